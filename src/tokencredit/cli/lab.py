"""``tokencredit lab``: the embedded tasks and policies."""

from __future__ import annotations

import time
from typing import Any

from tokencredit.cli.main import Parser

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
    build.add_argument("--seed", type=int, default=None, help="instead of the setting's own")
    options: Any = parser.parse_args(argv)
    from tokencredit import lab

    if options.command == "build":
        return _build(lab, options)
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

    folder = options.output or lab.cache_folder() / f"{setting.name}-{setting.fingerprint}"
    path = lab.build_policy(setting, folder, seed=options.seed, on_progress=on_progress)
    print(f"{setting.name}: {path} in {time.monotonic() - start:.0f} s")
    return 0
