"""What people see: the table, the figures, the page. Whatever users wrote is text in it."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tokencredit import DATC, GRPO, GTPO, InputError, MissingExtraError, Rollouts
from tokencredit.compare import (
    Comparison,
    compare,
    draw,
    html_report,
    text_table,
    write_comparison,
)

EVIL = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "$\\frac{x$",
    "_hidden",
    "a\x00b\x1b[31m",
    "\u202egnp.exe",
    "\ud800",
    "</svg><style>*{display:none}",
    "BODY",
    "x" * 300,
)


class Page(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def evil() -> Comparison:
    rollouts = Rollouts(
        torch.tensor([1.0, 1.0, 0.0]),
        ["p"] * 3,
        torch.ones(3, 2),
        entropy=torch.tensor([[1.0, 3.0], [2.0, 1.0], [1.0, 1.0]]),
    )
    rules = {name: GTPO(alpha2=0.1 * k) for k, name in enumerate(EVIL)}
    return compare(rollouts, {**rules, "<b>missing</b>": DATC(freeze=("<i>",)), "grpo": GRPO()})


def check_page(text: str) -> Page:
    page = Page(text)
    assert not {"script", "img", "iframe", "object", "embed", "link", "a", "b", "i"} & set(
        page.tags
    )
    assert page.tags.count("style") == 1 + page.tags.count("svg")
    for name, value in page.attributes:
        assert not name.startswith("on"), name
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#"), value
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 10
    for target in re.findall(r"(?:href=\"|url\()#([^\")]+)", text):
        assert target in ids
    # Addresses are those of XML vocabularies alone.
    for address in re.findall(r"https?://[^\s\"'<)]+", text):
        assert re.match(r"http://(www\.w3\.org|purl\.org|creativecommons\.org)/|"
                        r"https?://matplotlib\.org/", address), address  # fmt: skip
    assert "url(http" not in text and "@import" not in text
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text and "currentColor" in text
    assert text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")
    return page


def test_nothing_of_the_users_runs_in_the_page() -> None:
    result = evil()
    assert result.names == (*EVIL, "grpo")
    page = check_page(
        html_report(result, source="</title><script>x</script>", facts={"<u>": "<s>&amp;"})
    )
    assert not {"u", "s"} & set(page.tags)
    for shown in (EVIL[0], EVIL[1], "a\\x00b\\x1b[31m", "\\u202egnp.exe", "\\ud800", "<b>missing"):
        assert shown in page.text, shown
    assert "</title><script>x" in page.text and "<s>&amp;" in page.text


def test_nothing_of_the_users_steers_the_terminal() -> None:
    text = text_table(evil())
    assert all(line.isprintable() for line in text.splitlines())
    assert "\\x1b" in text and "not computed:\n  <b>missing</b> needs work" in text


def test_files_are_written_whole(tmp_path: Path) -> None:
    result, folder = evil(), tmp_path / "new" / "folder"
    page = write_comparison(result, folder, source="\udcff.jsonl")
    names = {f"{n}.{e}" for n in ("correlation", "position", "entropy") for e in ("svg", "png")}
    assert {p.name for p in folder.iterdir()} == {"compare.html", "comparison.json", *names}
    assert page == folder / "compare.html"
    check_page(page.read_text(encoding="utf-8"))
    for name in names:
        content = (folder / name).read_bytes()
        if name.endswith("png"):
            assert content.startswith(b"\x89PNG")
        else:
            root = ElementTree.fromstring(content)
            assert root.tag.endswith("svg") and b"currentColor" not in content
            assert not any(element.tag.endswith("script") for element in root.iter())
    # The same numbers give the same bytes.
    again = write_comparison(result, tmp_path / "again", source="\udcff.jsonl").parent
    for name in ("compare.html", "comparison.json", "entropy.svg"):
        assert (again / name).read_bytes() == (folder / name).read_bytes(), name


def test_without_entropy_there_is_no_figure_of_it(tmp_path: Path) -> None:
    rollouts = Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 2))
    names = {path.name for path in draw(compare(rollouts, ["grpo"]), tmp_path)}
    assert names == {"correlation.svg", "correlation.png", "position.svg", "position.png"}
    assert "At which entropies" not in html_report(compare(rollouts, ["grpo"]))


def test_no_credit_at_all(tmp_path: Path) -> None:
    # Every group uniform: all advantages 0, so shares and correlations are not defined.
    rollouts = Rollouts(torch.ones(2), ["p", "p"], torch.ones(2, 2), entropy=torch.ones(2, 2))
    result = compare(rollouts, ["grpo", "gtpo"])
    write_comparison(result, tmp_path)
    assert re.search(r"grpo +- +- +-", text_table(result))


def test_broken_laws_are_shown() -> None:
    from test_laws import Doubled, batch

    rollouts = batch(0)
    result = compare(rollouts, {"wrong": Doubled()})
    assert result.method("wrong").laws_failed == ("mean_one", "sum_kept")
    text = text_table(result)
    assert "LAW BROKEN  wrong: weights have mean 1 over each response (" in text and " 3/5" in text
    assert "BROKEN" in html_report(result)


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = evil()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made a folder"):
        draw(result, tmp_path / "file")
    (tmp_path / "position.svg").mkdir()
    with pytest.raises(InputError, match=r"position\.svg: cannot be written"):
        draw(result, tmp_path)
    assert not list(tmp_path.glob(".*tmp"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"tokencredit\[trl\]"):
        draw(result, tmp_path)
