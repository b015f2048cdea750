"""``tokencredit assign``: a method's credit for recorded rollouts."""

from __future__ import annotations

import sys
from typing import Any

from tokencredit.cli.main import Parser
from tokencredit.methods.registry import resolve
from tokencredit.methods.texts import set_options

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """Read records, assign credit, write records; prints a summary."""
    parser = Parser(
        prog="tokencredit assign",
        description="Read rollouts (JSON Lines, also .gz and .zst), form a method's credit on "
        "whole groups, and write the same records with it. Files larger than memory work.",
    )
    parser.add_argument("rollouts", metavar="ROLLOUTS.jsonl", help="records, or - for stdin")
    parser.add_argument("--credit", required=True, metavar="NAME", help="see `tokencredit methods`")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help="its options"
    )
    parser.add_argument("-o", "--output", required=True, metavar="OUT.jsonl")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing OUT")
    options: Any = parser.parse_args(argv)

    from tokencredit.records import AssignProgress, assign_file

    terminal = sys.stderr.isatty()

    def on_progress(progress: AssignProgress) -> None:
        if terminal:
            share = "" if progress.fraction is None else f"  {progress.fraction:4.0%}"
            print(f"  {progress.responses} responses{share}", end="\r", file=sys.stderr)

    rule = resolve(options.credit, set_options(options.set))
    summary = assign_file(
        options.rollouts, options.output, rule, overwrite=options.overwrite, on_progress=on_progress
    )
    print(
        f"{summary.name}: {summary.responses} responses, {summary.groups} groups, "
        f"{summary.tokens} tokens -> {options.output}"
    )
    for name, value in summary.diagnostics.items():
        print(f"  {name:<18} {value:.6g}")
    if summary.success_guessed:
        print(
            f"note: {summary.name} reads which responses are right, which the records do not say; "
            "it went by reward > 0.5",
            file=sys.stderr,
        )
    return 0
