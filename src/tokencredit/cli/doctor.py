"""``tokencredit doctor``: what is wrong with a file of rollouts."""

from __future__ import annotations

import json
import sys
from typing import Any

from tokencredit.cli.main import Parser

__all__ = ["FINDINGS", "run"]

FINDINGS = 3
"""The exit code for a file with at least one fault."""


def run(argv: list[str]) -> int:
    """Read records, print what is wrong with them; 0 without faults, 3 with."""
    parser = Parser(
        prog="tokencredit doctor",
        description="Read rollouts (JSON Lines, also .gz and .zst) and say what is wrong with "
        "them: masks, entropies, log-probabilities, credit, success, truncation, copies. "
        "Exit code 0: no fault (notes do not count); 3: faults; 2: not a file of records.",
    )
    parser.add_argument("rollouts", metavar="ROLLOUTS.jsonl", help="records, or - for stdin")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="V",
        help="tokens in the policy's vocabulary, for the largest possible entropy "
        "(default: meta.vocab_size)",
    )
    options: Any = parser.parse_args(argv)

    from tokencredit.doctor import diagnose

    terminal = sys.stderr.isatty()

    def on_progress(responses: int, fraction: float | None) -> None:
        if terminal:
            share = "" if fraction is None else f"  {fraction:4.0%}"
            print(f"  {responses} responses{share}", end="\r", file=sys.stderr)

    diagnosis = diagnose(options.rollouts, vocab_size=options.vocab_size, on_progress=on_progress)
    print(json.dumps(diagnosis.as_dict(), indent=2) if options.json else diagnosis)
    return 0 if diagnosis.clean else FINDINGS
