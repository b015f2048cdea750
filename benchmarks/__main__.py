"""``python -m benchmarks [NAME ...] [--quick] [--json FILE] [--markdown FILE]``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from .harness import CLOCKS, set_clock

BENCHMARKS = {
    "assign": "assign() against verl's GRPO advantage and one pass over [b, t]",
    "token_statistics": "log-probability and entropy without logits, against TRL, verl and plain",
    "view": "the page of `tokencredit view`, made and opened, against one element a token",
    "scale": "seconds and bytes that credit adds per step, 10^3 to 10^5 responses, and beyond",
    "trl_step": "a training step of CreditGRPOTrainer against one of TRL's GRPOTrainer",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Without a name: list the benchmarks.",
        epilog="; ".join(f"{name}: {what}" for name, what in BENCHMARKS.items()),
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to run, in this order")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run at all?")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")
    parser.add_argument("--markdown", metavar="FILE", help="write the tables, ready to be pasted")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default 1)")
    parser.add_argument(
        "--clock",
        choices=sorted(CLOCKS),
        default="wall",
        help="cpu: on a machine that others use too (with one thread; default wall)",
    )
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in BENCHMARKS:
            parser.error(f"no benchmark {name!r}; there are: {', '.join(BENCHMARKS)}")
    if not arguments.names:
        for name, what in BENCHMARKS.items():
            print(f"{name:16} {what}")
        return
    torch.set_num_threads(arguments.threads)
    set_clock(arguments.clock)
    reports = [
        importlib.import_module(f"benchmarks.{name}").run(quick=arguments.quick)
        for name in arguments.names
    ]
    text = "\n".join(report.markdown() for report in reports)
    print(text)
    if arguments.markdown:
        Path(arguments.markdown).write_text(text + "\n", encoding="utf-8")
    if arguments.json:
        content = [report.as_json() for report in reports]
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
