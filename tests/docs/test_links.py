"""Links and pictures lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from documents import DOCS, DOCUMENTS, PAGES, ROOT, name_of, without_blocks

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """The ids that headings get, on GitHub and from mkdocs alike for plain words."""
    heads = HEADING.findall(without_blocks(path.read_text(encoding="utf-8")))
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links(path: Path) -> None:
    text = without_blocks(path.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if path in PAGES:
            # What mkdocs builds holds the folder docs alone.
            assert there.is_relative_to(DOCS), target
        if anchor:
            assert anchor in anchors(there), target


def test_the_site_lists_every_page() -> None:

    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = set(re.findall(r"[\w/]+\.md", str(config["nav"])))
    assert listed == {str(path.relative_to(DOCS)) for path in PAGES}


def test_nothing_is_fetched_when_the_site_is_read() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["theme"]["font"] is False
    assert not {"repo_url", "extra_javascript", "extra_css"} & set(config)
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        assert "```mermaid" not in text and "<script" not in text, path
