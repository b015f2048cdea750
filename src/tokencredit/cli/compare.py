"""``tokencredit compare``: several methods on the same recorded rollouts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tokencredit.cli.main import Parser
from tokencredit.errors import InputError, nearest
from tokencredit.methods.registry import resolve
from tokencredit.methods.rule import Rule
from tokencredit.methods.texts import set_options
from tokencredit.texts import printable

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """Read records, compare methods, print a table, write figures and a report."""
    parser = Parser(
        prog="tokencredit compare",
        description="What would each method do to these rollouts? Prints rank correlations, "
        "credit moved, effective tokens, sign flips and laws; with -o also figures and one "
        "HTML report. Needs memory for the whole batch.",
    )
    parser.add_argument("rollouts", metavar="ROLLOUTS.jsonl", help="records, or - for stdin")
    parser.add_argument(
        "--credit",
        metavar="NAME,NAME,...",
        help="the methods, see `tokencredit methods`; default: all that are not controls",
    )
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="their options, for example gtpo.alpha2=0.2",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="at most N responses, whole groups")
    parser.add_argument("--step", type=int, metavar="N", help="only the records of this step")
    parser.add_argument("-o", "--output", metavar="FOLDER", help="for figures and compare.html")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing report")
    options: Any = parser.parse_args(argv)

    from tokencredit.compare import compare, default_rules, read_rollouts, text_table
    from tokencredit.compare.drawing import require_matplotlib
    from tokencredit.compare.reporting import PAGE, write_comparison

    rules = _rules(options.credit, options.set, tuple(default_rules()))
    folder = None if options.output is None else Path(options.output)
    if folder is not None:
        require_matplotlib()
        if (folder / PAGE).exists() and not options.overwrite:
            raise InputError(f"{folder / PAGE}: exists already; give --overwrite to replace it")
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder}: is not a folder")

    terminal = sys.stderr.isatty()

    def on_progress(responses: int) -> None:
        if terminal:
            print(f"  {responses} responses", end="\r", file=sys.stderr)

    needed = {"entropy", "logprob", *(name for rule in rules.values() for name in _reads(rule))}
    read = read_rollouts(
        options.rollouts,
        signals=sorted(needed),
        limit=options.limit,
        step=options.step,
        on_progress=on_progress,
    )
    _check_steps(rules, read.steps, read.source)
    result = compare(read.rollouts, rules)
    print(text_table(result))
    if read.limited:
        print(f"\nonly the first {read.rollouts.responses} responses were read (--limit)")
    if folder is not None:
        facts = dict(read.facts)
        if read.steps:
            facts["steps"] = ", ".join(map(str, read.steps[:20]))
        if read.limited:
            facts["limit"] = f"the first {read.rollouts.responses} responses"
        page = write_comparison(result, folder, source=read.source, facts=facts)
        print(f"\nreport: {printable(str(page))}")
    return 0


def _reads(rule: Rule) -> tuple[str, ...]:
    """The signals that a rule reads: those it needs, and those that options name."""
    named = rule.options().get("freeze", ())
    return (*rule.needs, *(named if isinstance(named, tuple) else ()))  # pyright: ignore


def _rules(names: str | None, pairs: list[str], default: tuple[str, ...]) -> dict[str, Rule]:
    chosen = default
    if names is not None:
        chosen = tuple(name.strip() for name in names.split(",") if name.strip())
        if not chosen:
            raise InputError("--credit: names no method")
    options: dict[str, dict[str, str]] = {}
    for name in chosen:
        if name in options:
            raise InputError(f"--credit: {name} is given twice")
        resolve(name)  # before its options, so that a misspelt name is what is complained about
        options[name] = {}
    for key, value in set_options(pairs).items():
        name, dot, option = key.partition(".")
        if not dot or not option:
            raise InputError(f"--set: expected name.key=value, got {key}={value}")
        if name not in options:
            raise InputError(
                f"--set: {name!r} is not compared{nearest(name, options)}; "
                f"compared are {', '.join(options)}"
            )
        options[name][option] = value
    return {name: resolve(name, own) for name, own in options.items()}


def _check_steps(rules: dict[str, Rule], steps: tuple[int, ...], source: str) -> None:
    """A statistic over the batch must not run over several steps' batches."""
    wide = [name for name, rule in rules.items() if rule.whole_batch]
    if wide and len(steps) > 1:
        raise InputError(
            f"{source}: has {len(steps)} steps, but {wide[0]} has a statistic over one step's "
            f"batch; choose one, for example --step {steps[0]}"
        )
