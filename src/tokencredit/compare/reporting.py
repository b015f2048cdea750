"""A comparison for people: a plain table for the terminal, and one HTML page that needs nothing.

The page holds its figures and its styles, no script, and a policy that forbids to load or run
anything. Whatever comes from the user (labels, options, file names, facts of the records) is
escaped, and characters that do not print are spelt out.
"""

from __future__ import annotations

import html
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tokencredit.compare.comparing import Comparison, MethodSummary, Pair
from tokencredit.compare.drawing import (
    FIGURES,
    draw,
    inline_svg,
    require_matplotlib,
)
from tokencredit.compare.laws import LawResult
from tokencredit.files import write_aside
from tokencredit.texts import printable

__all__ = ["html_report", "text_table", "write_comparison"]

PAGE, NUMBERS = "compare.html", "comparison.json"


def number(value: float, digits: int = 3) -> str:
    """A number for a table; ``-`` where it is not defined."""
    if math.isnan(value):
        return "-"
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def kept(method: MethodSummary) -> str:
    """How many of the laws that could be checked were kept, ``4/5``."""
    checked = [law for law in method.laws if law.passed is not None]
    return f"{sum(law.passed is True for law in checked)}/{len(checked)}"


_COLUMNS: tuple[tuple[str, Callable[[MethodSummary], str]], ...] = (
    ("method", lambda m: printable(m.name)),
    ("rank corr.", lambda m: number(m.to_reference.correlation)),
    ("moved", lambda m: number(m.to_reference.moved)),
    ("signed", lambda m: number(m.to_reference.moved_signed)),
    ("flips", lambda m: number(m.to_reference.flips, 4)),
    ("own flips", lambda m: number(m.diagnostics["sign_flips"], 4)),
    ("eff. tokens", lambda m: number(m.diagnostics["effective_tokens"], 1)),
    ("eff. share", lambda m: number(m.diagnostics["effective_share"])),
    ("laws", kept),
)

EXPLAINED = (
    ("rank corr.", "Spearman against plain GRPO, over the tokens in the loss"),
    ("moved", "share of absolute credit that lies on other tokens than GRPO's"),
    ("signed", "the same, counting credit that changed its sign"),
    ("flips", "share of tokens whose sign is opposite to GRPO's"),
    ("own flips", "share of tokens whose sign is opposite to the method's own base"),
    ("eff. tokens", "(sum |A|)^2 / sum A^2 of a response, averaged: equal tokens as concentrated"),
    ("eff. share", "the same over the response's length; 1 = uniform"),
    ("laws", "promises of the method kept, of those that the data can check"),
)

MATRICES: tuple[tuple[str, str, Callable[[Pair], float]], ...] = (
    ("Rank correlation", "Spearman, over all tokens in the loss", lambda p: p.correlation),
    (
        "Rank correlation within responses",
        "Spearman along each response, averaged over those along which both vary",
        lambda p: p.within,
    ),
    (
        "Share of absolute credit moved",
        "half the L1 distance of |A|, each normalised over the batch",
        lambda p: p.moved,
    ),
    (
        "Share moved, with signs",
        "the same with the signs of A",
        lambda p: p.moved_signed,
    ),
    ("Sign flips", "share of tokens to which the two give opposite signs", lambda p: p.flips),
)


def text_table(comparison: Comparison) -> str:
    """The comparison as plain text.

    Example:
        >>> import torch
        >>> from tokencredit import Rollouts
        >>> from tokencredit.compare import compare
        >>> rollouts = Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 2))
        >>> print(text_table(compare(rollouts, ["grpo", "gtpo"])).splitlines()[0])
        2 responses, 1 groups, 4 tokens in the loss
    """
    head = [title for title, _ in _COLUMNS]
    rows = [[cell(m) for _, cell in _COLUMNS] for m in comparison.methods]
    size = f"{comparison.responses} responses, {comparison.groups} groups"
    lines = [
        f"{size}, {comparison.tokens} tokens in the loss",
        "",
        f"against {comparison.reference}:",
        *_aligned([head, *rows]),
    ]
    if len(comparison.methods) > 1:
        names = [printable(name) for name in comparison.names]
        for title, _, value in MATRICES[:2]:
            cells = [
                [name, *(number(value(pair)) for pair in row)]
                for name, row in zip(names, comparison.pairs, strict=True)
            ]
            lines += ["", f"{title.lower()}:", *_aligned([["", *names], *cells])]
    for m in comparison.methods:
        lines += [
            f"LAW BROKEN  {printable(m.name)}: {law.statement} "
            f"({law.broken} of {law.cases}, worst miss {law.worst:.2g})"
            for law in m.laws
            if law.passed is False
        ]
    if comparison.missing:
        lines += ["", "not computed:"]
        same: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for m in comparison.missing:
            same.setdefault((m.signals, m.how), []).append(printable(m.name))
        for (signals, how), names in same.items():
            verb = "needs" if len(names) == 1 else "need"
            wanted = f" {verb} {printable(' and '.join(signals))}" if signals else ""
            lines.append(f"  {', '.join(names)}{wanted}")
            lines += [f"    {printable(part)}" for part in how.split("\n")]
    return "\n".join(lines)


def html_report(
    comparison: Comparison,
    *,
    source: str = "",
    facts: Mapping[str, str] | None = None,
) -> str:
    """The comparison as one HTML page: no script, nothing loaded, light and dark.

    Args:
        comparison: what to show.
        source: where the rollouts came from.
        facts: further lines of provenance (model, tokenizer, temperature).

    Raises:
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> import torch
        >>> from tokencredit import Rollouts
        >>> from tokencredit.compare import compare
        >>> rollouts = Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 2))
        >>> page = html_report(compare(rollouts, ["grpo"]), source="<script>")
        >>> "<script" in page, "&lt;script&gt;" in page
        (False, True)
    """
    require_matplotlib()
    provenance = {
        "rollouts": source,
        "responses": f"{comparison.responses} in {comparison.groups} groups",
        "tokens in the loss": str(comparison.tokens),
        **(facts or {}),
    }
    parts = [
        _table(
            ("", ""),
            [(key, value) for key, value in provenance.items() if value],
            head_row=False,
        ),
        "<h2>Against plain GRPO</h2>",
        _table(
            [title for title, _ in _COLUMNS],
            [[cell(m) for _, cell in _COLUMNS] for m in comparison.methods],
        ),
        "<dl>" + "".join(f"<dt>{_text(k)}</dt><dd>{_text(v)}</dd>" for k, v in EXPLAINED) + "</dl>",
    ]
    if comparison.missing:
        parts += [
            "<h2>Not computed</h2>",
            _table(
                ("method", "needs", "how to get it"),
                [(m.name, ", ".join(m.signals) or "-", m.how) for m in comparison.missing],
                words=True,
            ),
        ]
    for name, make in FIGURES.items():
        figure = make(comparison)
        if figure is not None:
            title = {
                "correlation": "Rank correlation between methods",
                "position": "Where along a response",
                "entropy": "At which entropies",
            }[name]
            parts += [f"<h2>{_text(title)}</h2>", f"<figure>{inline_svg(figure, title)}</figure>"]
            if name != "correlation":
                parts.append(_profile_table(comparison, name))
    parts.append("<h2>Every two methods</h2>")
    for title, meaning, value in MATRICES:
        rows = [
            [name, *(number(value(pair)) for pair in row)]
            for name, row in zip(comparison.names, comparison.pairs, strict=True)
        ]
        parts += [f"<h3>{_text(title)}</h3><p>{_text(meaning)}</p>"]
        parts.append(_table(["", *comparison.names], rows))
    parts += [
        "<h2>Laws</h2>",
        "<p>What each method promises for its options, checked on these rollouts.</p>",
        _table(
            ("method", "law", "", "cases", "broken", "worst miss"),
            [
                (m.name, law.statement, _verdict(law), str(law.cases), str(law.broken), worst)
                for m in comparison.methods
                for law in m.laws
                for worst in [f"{law.worst:.1e}"]
            ],
        ),
        "<h2>Options</h2>",
        _table(
            ("method", "rule", "options"),
            [
                (m.name, m.rule, ", ".join(f"{k}={v}" for k, v in m.options.items()) or "none")
                for m in comparison.methods
            ],
            words=True,
        ),
        f"<footer>tokencredit {_text(_version())}</footer>",
    ]
    return _PAGE.replace("\nBODY\n", "\n" + "\n".join(parts) + "\n", 1)


def write_comparison(
    comparison: Comparison,
    folder: str | os.PathLike[str],
    *,
    source: str = "",
    facts: Mapping[str, str] | None = None,
) -> Path:
    """Write figures, the numbers (``comparison.json``) and the page (``compare.html``) to a folder.

    Each file appears when it is complete, the page last. Files of these names are replaced.

    Returns:
        The page's path.

    Raises:
        InputError: the folder or a file cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    folder = Path(folder)
    draw(comparison, folder)
    numbers = json.dumps({"source": source, **comparison.to_dict()}, indent=1, default=str)
    write_aside(folder / NUMBERS, (numbers + "\n").encode("utf-8", "backslashreplace"))
    page = html_report(comparison, source=source, facts=facts)
    write_aside(folder / PAGE, page.encode("utf-8", "backslashreplace"))
    return folder / PAGE


# -- pieces ---------------------------------------------------------------------------------


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [f"{row[0]:<{widths[0]}}"]
            + [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    ]


def _verdict(law: LawResult) -> str:
    return {True: "kept", False: "BROKEN", None: "no case"}[law.passed]


def _text(value: str) -> str:
    return html.escape(printable(value))


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    head_row: bool = True,
    words: bool = False,
) -> str:
    top = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>'
        + "".join(f"<td>{_text(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    kind = ' class="words"' if words or not head_row else ""
    top = f"<thead><tr>{top}</tr></thead>" if head_row else ""
    return f'<div class="wide"><table{kind}>{top}<tbody>{body}</tbody></table></div>'


def _profile_table(comparison: Comparison, name: str) -> str:
    tokens = comparison.position_tokens if name == "position" else comparison.entropy_tokens
    count = len(tokens)
    head = ["mean |A| over its mean", *(f"{100 * k // count} %" for k in range(count))]
    rows = [["share of tokens", *(number(share) for share in tokens)]]
    if name == "entropy":
        rows.append(["mean entropy, nats", *(number(v) for v in comparison.entropy_means)])
    for m in comparison.methods:
        profile = m.position if name == "position" else m.entropy
        if profile is not None:
            rows.append([m.name, *(number(value) for value in profile.density)])
    return f"<details><summary>Numbers</summary>{_table(head, rows)}</details>"


def _version() -> str:
    from tokencredit import __version__

    return __version__


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>tokencredit compare</title>
<style>
:root { color-scheme: light dark; --ink: #1f2329; --page: #ffffff; --line: #d0d4da; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --page: #16191d; --line: #3b414a; }
}
body { color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif;
  max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .75rem; text-align: right;
  vertical-align: top; }
th[scope=row], .words th, .words td { text-align: left; }
th, td { overflow-wrap: anywhere; unicode-bidi: isolate; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .875rem; }
dd { margin: 0; }
figure { margin: 1rem 0; overflow-x: auto; }
figure svg { max-width: 100%; height: auto; }
footer { margin: 3rem 0 1rem; font-size: .875rem; }
summary { cursor: pointer; }
@media print { details { display: block; } }
</style>
</head>
<body>
<h1>tokencredit compare</h1>
BODY
</body>
</html>
"""
