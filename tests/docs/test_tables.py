"""The tables of methods and options say what the registry says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from documents import DOCS, ROOT, methods_table, options_table

from tokencredit import methods

HOW = "run: python tests/docs/documents.py"


def shipped() -> list[str]:
    """The methods of the package alone: a test or the lab may have registered others."""
    code = "import tokencredit; print(*tokencredit.methods())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split() if not methods()[name].rule.control_of]


@pytest.fixture(scope="module")
def names() -> list[str]:
    return shipped()


def test_every_method_has_its_page_and_its_options(names: list[str]) -> None:
    for name in names:
        text = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8")
        options = methods()[name].options
        if options:
            assert options_table(options) in text, f"{name}: {HOW}"
        else:
            assert "## Options\n\nNone.\n" in text, name


def test_no_page_without_a_method(names: list[str]) -> None:
    pages = {path.stem for path in (DOCS / "methods").glob("*.md")} - {"index"}
    assert pages == set(names)


@pytest.mark.parametrize(
    ("path", "folder"), [("README.md", "docs/methods/"), ("docs/methods/index.md", "")]
)
def test_the_tables_of_methods(names: list[str], path: str, folder: str) -> None:
    table = methods_table({name: methods()[name] for name in names}, folder)
    assert table in (ROOT / path).read_text(encoding="utf-8"), f"{path}: {HOW}"


SKELETON = (
    "Paper",
    "What it does",
    "Formula",
    "Where we differ and why",
    "Options",
    "Cost",
    "What to watch",
    "Laws",
    "Use it",
)


def test_pages_of_methods_have_one_skeleton(names: list[str]) -> None:
    for name in names:
        lines = (DOCS / "methods" / f"{name}.md").read_text(encoding="utf-8").splitlines()
        heads = tuple(line.removeprefix("## ") for line in lines if line.startswith("## "))
        assert heads == SKELETON, name


def test_every_paper_is_cited(names: list[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    papers = (DOCS / "papers.md").read_text(encoding="utf-8")
    for name in names:
        paper = methods()[name].paper
        if not paper.startswith("arXiv:"):
            title = methods()[name].title
            assert title in readme and title in citation and title in papers, name
            continue
        number = paper.removeprefix("arXiv:")
        assert f"arXiv preprint arXiv:{number}" in readme, name
        assert f"arXiv:{number}" in citation, name
        assert f"(https://arxiv.org/abs/{number}) → " in papers, name
        assert f"methods/{name}.md" in papers, name
