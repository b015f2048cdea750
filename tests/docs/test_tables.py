"""The tables of methods and options say what the registry says."""

from __future__ import annotations

import re

import pytest
import torch
from documents import DOCS, ROOT, methods_table, options_table, shipped

from tokencredit import Rollouts, assign, methods

HOW = "run: python tests/docs/documents.py"


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


# -- pages that name all methods --------------------------------------------------------------


def section(page: str, head: str) -> str:
    """A section of a page, up to the next of its level."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.split(r"^## ", text.split(f"\n## {head}\n")[1], flags=re.MULTILINE)[0]


def cells(text: str, head: str) -> list[list[str]]:
    """The rows of the table that begins with this line."""
    table = text.split(f"{head}\n")[1].split("\n\n")[0]
    lines = table.splitlines()[1:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


def test_what_each_method_requires_is_on_the_trl_page(names: list[str]) -> None:
    from tokencredit.engines.trl.guards import RATIO_LEVEL

    rows = cells(section("trl.md", "Requirements and recommendations"), "| rule | requires |")
    said = {name: row[1] for row in rows for name in names_in(row[0])}
    assert set(said) == set(names)
    for name in names:
        recipe = methods()[name].rule().recipe
        if recipe.ratio_required:
            level = RATIO_LEVEL[recipe.surrogate.ratio]
            assert f"`importance_sampling_level: {level}`" in said[name], name
        assert (said[name] == "nothing") == (not recipe.ratio_required), name


def test_which_methods_do_without_success_is_on_the_trl_page(names: list[str]) -> None:
    text = section("trl.md", "Success and several rewards")
    listed = re.search(r"do not read success \(([^)]*)\)", text)
    assert listed is not None
    assert names_in(listed[1]) == {n for n in names if not methods()[n].rule.reads_success}


def test_the_overridden_methods_are_on_the_trl_page() -> None:
    from trl import GRPOTrainer

    from tokencredit.engines.trl import TokenCreditMixin

    overridden = {n for n in vars(TokenCreditMixin) if hasattr(GRPOTrainer, n) and n[:2] != "__"}
    text = section("trl.md", "How it plugs in")
    numbered = re.findall(r"^\d\. `(\w+)`", text, re.MULTILINE)
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")
    assert set(numbered) == overridden and len(numbered) == len(overridden)
    assert f"{words[len(overridden)].capitalize()} methods of `GRPOTrainer`" in text


def test_every_diagnostic_is_explained_in_the_guide() -> None:
    """Of every method and control, whatever it reads being there."""
    text = section("guide.md", "Reading the diagnostics")
    told = {name for row in cells_of_all(text) for name in names_in(row[0])}
    mask = torch.ones(8, 5)
    for name, method in methods().items():
        rule = method.rule()
        g = torch.Generator().manual_seed(0)
        signals = {n: torch.rand(8, 5, generator=g) for n in (*rule.needs, *rule.reads)}
        rollouts = Rollouts(torch.rand(8, generator=g), [0, 1] * 4, mask, signals=signals)
        assert set(assign(rollouts, rule).diagnostics) <= told, name


def cells_of_all(text: str) -> list[list[str]]:
    """The rows of every table of a section."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_first_pages_name_every_method(names: list[str]) -> None:
    for page in (DOCS / "index.md", ROOT / "README.md", ROOT / "mkdocs.yml"):
        text = page.read_text(encoding="utf-8")
        for name in names:
            assert f"methods/{name}.md" in text, (page.name, name)


def test_every_page_is_on_the_readmes_list() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    line = text.split("## Documentation\n\n")[1].split("\n")[0]
    listed = set(re.findall(r"\(docs/([\w/]+\.md)\)", line))
    assert listed == {p.name for p in DOCS.glob("*.md") if p.name != "index.md"} | {
        "methods/index.md"
    }


def test_the_options_of_controls_are_on_their_methods_page() -> None:
    """In the table of controls: the options that differ from the method's, and what is needed."""
    for name, method in methods().items():
        if not method.rule.control_of:
            continue
        of = methods()[method.rule.control_of]
        text = (DOCS / "methods" / f"{of.name}.md").read_text(encoding="utf-8")
        (row,) = [r for r in cells_of_all(text) if r[0] == f"`{name}`"]
        own, usual = ({o.name for o in m.options} for m in (method, of))
        assert names_in(row[2]) - {of.name} == own ^ usual, name
        needed = set(method.needs) - set(of.needs)
        assert names_in(row[3]) == needed and (row[3] == "yes") == (not needed), name
