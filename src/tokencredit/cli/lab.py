"""``tokencredit lab``: the embedded tasks and policies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tokencredit.cli.main import Parser
from tokencredit.errors import InputError

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """List the settings, or build one's warm policy."""
    parser = Parser(
        prog="tokencredit lab",
        description="The lab: tiny tasks whose every token is understood, and tiny policies warmed "
        "up for them. Without a command: list the settings.",
    )
    commands = parser.add_subparsers(dest="command", parser_class=Parser)
    commands.add_parser("list", help="list the settings")
    build = commands.add_parser("build", help="warm a policy up, as the shipped one was")
    build.add_argument("setting", nargs="?", default="chain-qwen3", metavar="SETTING")
    build.add_argument("-o", "--output", metavar="FOLDER", help="default: the user's cache")
    build.add_argument(
        "--reward", choices=("strong", "weak"), help="build this reward model, not the policy"
    )
    build.add_argument("--seed", type=int, default=None, help="instead of the setting's own")
    evidence = commands.add_parser(
        "evidence", help="measure whether the credit means something, on tasks with known truth"
    )
    evidence.add_argument("setting", nargs="?", default="chain-qwen3", metavar="SETTING")
    evidence.add_argument(
        "--reward", choices=("strong", "weak"), action="append", help="default: both"
    )
    evidence.add_argument(
        "--size", type=float, default=1.0, help="factor on the numbers of samples (default 1)"
    )
    evidence.add_argument("--seed", type=int, default=0)
    evidence.add_argument("-o", "--output", metavar="FILE.md", help="write the tables as markdown")
    options: Any = parser.parse_args(argv)
    from tokencredit import lab

    if options.command == "build":
        return _build(lab, options)
    if options.command == "evidence":
        return _evidence(options)
    for name, setting in lab.settings().items():
        metadata = lab.policy_metadata(setting)
        state = "built on first use"
        if metadata is not None:
            state = f"ready, sampled accuracy {float(metadata['accuracy']):.3f}"
        print(f"{name:<16} {setting.task.name:<10} {setting.family:<6} {state}")
    return 0


def _build(lab: Any, options: Any) -> int:
    setting = lab.setting(options.setting)
    start = time.monotonic()

    def on_progress(step: int, loss: float, accuracy: float | None) -> None:
        if accuracy is not None or step % 100 == 0:
            reached = "" if accuracy is None else f"  sampled accuracy {accuracy:.3f}"
            print(f"  step {step:>4}  loss {loss:.3f}{reached}", flush=True)

    if options.reward is not None:
        if options.output is None and options.seed is None:
            made = lab.load_reward_model(setting, options.reward, on_progress=on_progress)
            print(f"{setting.name}, {options.reward} reward model: {dict(made.metadata)}")
            return 0
        path = lab.build_reward_model(
            setting,
            options.output or ".",
            strength=options.reward,
            seed=options.seed,
            on_progress=on_progress,
        )
        print(f"{setting.name}: {path} in {time.monotonic() - start:.0f} s")
        return 0
    folder = options.output or lab.cache_folder() / f"{setting.name}-{setting.fingerprint}"
    path = lab.build_policy(setting, folder, seed=options.seed, on_progress=on_progress)
    print(f"{setting.name}: {path} in {time.monotonic() - start:.0f} s")
    return 0


def _evidence(options: Any) -> int:
    from tokencredit.lab.evidence import Table, evidence

    if not options.size > 0:
        raise InputError(f"lab evidence: --size must be above 0, got {options.size}")

    def on_table(table: Table) -> None:
        print(table.text() + "\n", flush=True)

    tables = evidence(
        options.setting,
        strengths=options.reward or ("strong", "weak"),
        size=options.size,
        seed=options.seed,
        on_table=on_table,
    )
    if options.output is not None:
        text = "\n".join(table.markdown() for table in tables)
        try:
            Path(options.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{options.output}: cannot be written: {error.strerror}") from error
    return 0
