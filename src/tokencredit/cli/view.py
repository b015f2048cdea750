"""``tokencredit view``: rollouts and their credit, token by token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tokencredit.cli.main import Parser
from tokencredit.errors import InputError
from tokencredit.files import what_is
from tokencredit.methods.registry import resolve
from tokencredit.texts import printable

__all__ = ["run"]

IN_TERMINAL = 16


def run(argv: list[str]) -> int:
    """Read records, write one page or print them."""
    parser = Parser(
        prog="tokencredit view",
        description="See where the credit went: the tokens of each response coloured by an "
        "advantage, weight, shaped reward or signal; siblings of a prompt side by side; two "
        "methods on one response. Writes one HTML page that needs no server and no network, or "
        "prints to the terminal.",
    )
    parser.add_argument(
        "rollouts",
        metavar="ROLLOUTS.jsonl",
        help="records (also .gz and .zst), a run folder, or - for stdin",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="PAGE.html",
        help="the page (default: ROLLOUTS.html beside the records, view.html in a run folder)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing page")
    parser.add_argument("--terminal", action="store_true", help="print instead of a page")
    parser.add_argument(
        "--by",
        metavar="SERIES",
        help="colour by gtpo.advantage, gtpo.reward, datc.weight, entropy, ... (on the page: at "
        "first; default: the first advantage, else the first signal)",
    )
    parser.add_argument("--against", metavar="SERIES", help="shown beside it, with the difference")
    parser.add_argument(
        "--credit",
        metavar="NAME,NAME,...",
        help="methods to assign first, with their default options; see `tokencredit methods`; "
        "one that the records hold credit of is shown with a star",
    )
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="the first groups that have at most N responses together, at least one "
        f"(default: all; in the terminal {IN_TERMINAL})",
    )
    parser.add_argument(
        "--step", type=int, metavar="N", help="only the records of this step, from 0"
    )
    options: Any = parser.parse_args(argv)
    if options.terminal and options.output is not None:
        raise InputError("view: --terminal prints; leave out -o, or leave out --terminal")
    names = [name.strip() for name in (options.credit or "").split(",") if name.strip()]
    rules = [resolve(name) for name in names]

    from tokencredit.viewer.viewing import recorded_groups, save_page

    if options.terminal:
        from tokencredit.viewer.terminal import print_responses

        limit = IN_TERMINAL if options.limit is None else options.limit
        with recorded_groups(
            options.rollouts, credit=rules, limit=limit, step=options.step
        ) as groups:
            print_responses(groups, by=options.by, against=options.against, title=options.rollouts)
        return 0

    terminal = sys.stderr.isatty()

    def on_progress(responses: int) -> None:
        if terminal:
            print(f"  {responses} responses", end="\r", file=sys.stderr)

    target = _target(options.rollouts) if options.output is None else Path(options.output)
    summary = save_page(
        options.rollouts,
        target,
        overwrite=options.overwrite,
        credit=rules,
        by=options.by,
        against=options.against,
        limit=options.limit,
        step=options.step,
        on_progress=on_progress,
    )
    size = summary.size / 1e6
    print(
        f"{printable(str(target))}: {summary.responses} responses, {summary.groups} groups, "
        f"{summary.tokens} tokens, {size:.1f} MB; open it in a browser"
    )
    return 0


def _target(source: str) -> Path:
    """Where the page goes if nobody says."""
    if source == "-":
        raise InputError("view: name the page by -o, or print by --terminal")
    path = Path(source)
    if what_is(path) == "folder":
        return path / "view.html"
    if what_is(path) == "other":
        raise InputError(f"view: {source} is no file; name the page by -o, or print by --terminal")
    name = path.name
    for ending in (".gz", ".zst", ".jsonl"):
        name = name.removesuffix(ending)
    return path.with_name(f"{name or path.name}.html")
