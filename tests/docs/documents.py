"""What the tests of the documentation share: finding documents, and what is in them.

Run as a script it rewrites the tables of methods and options.
"""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tokencredit import Method, Option, methods
from tokencredit.signals.statistics import OF_REWARD

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *PAGES]

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def shipped() -> list[str]:
    """The methods of the package alone: a test or the lab may have registered others."""
    code = "import tokencredit; print(*tokencredit.methods())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split() if not methods()[name].rule.control_of]


def name_of(path: Path) -> str:
    """A document's name in test ids."""
    return str(path.relative_to(ROOT))


def blocks(text: str, *languages: str) -> list[str]:
    """The fenced blocks of these languages, those in lists as well."""
    found = _FENCE.findall(text)
    return [textwrap.dedent(body) for _, language, body in found if language in languages]


def without_blocks(text: str) -> str:
    """The text without its fenced blocks."""
    return _FENCE.sub("", text)


def written(value: object) -> str:
    """A default or a choice, the way YAML and the command line write it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def options_table(options: tuple[Option, ...]) -> str:
    """The table of options that a method's page must hold."""
    rows = ["| option | default | range | meaning |", "|---|---|---|---|"]
    for option in options:
        allowed = option.range
        if option.choices is not None:
            allowed = ", ".join(f"`{written(choice)}`" for choice in option.choices)
        elif option.kind == "bool":
            allowed = "`true`, `false`"
        default = f"`{written(option.default)}`"
        rows.append(f"| `{option.name}` | {default} | {allowed} | {option.help} |")
    return "\n".join(rows)


def methods_table(known: dict[str, Method], folder: str) -> str:
    """The table of methods that the README and the index of methods must hold."""
    rows = ["| name | paper | acts on | needs |", "|---|---|---|---|"]
    for name, method in known.items():
        if method.rule.control_of:
            continue
        paper = method.paper
        if paper.startswith("arXiv:"):
            paper = f"[{paper}](https://arxiv.org/abs/{paper.removeprefix('arXiv:')})"
        of_judge = [f"{n} (a reward model)" if n in OF_REWARD else n for n in method.needs]
        needs = [*(["success"] if method.rule.reads_success else []), *of_judge]
        if not method.needs:
            needs = ["rewards", *needs]
        rows.append(
            f"| [`{name}`]({folder}{name}.md) | {paper} | {method.acts_on} | {', '.join(needs)} |"
        )
    return "\n".join(rows)


_OPTIONS = re.compile(r"\| option \| default \| range \| meaning \|\n(?:\|.*\n)+")
_METHODS = re.compile(r"\| name \| paper \| acts on \| needs \|\n(?:\|.*\n)+")


def rewrite_tables() -> None:
    """Write every table of methods and options anew from the registry."""
    known = dict(methods())
    for path, folder in ((ROOT / "README.md", "docs/methods/"), (DOCS / "methods/index.md", "")):
        table = methods_table(known, folder) + "\n"
        text = path.read_text(encoding="utf-8")
        path.write_text(_METHODS.sub(lambda _, t=table: t, text), encoding="utf-8")
    for name, method in known.items():
        path = DOCS / "methods" / f"{name}.md"
        if method.options and path.exists():
            table = options_table(method.options) + "\n"
            text = path.read_text(encoding="utf-8")
            path.write_text(_OPTIONS.sub(lambda _, t=table: t, text), encoding="utf-8")


if __name__ == "__main__":
    rewrite_tables()
