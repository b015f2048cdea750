"""``tokencredit train``: see `tokencredit.engines.trl.training`."""

from __future__ import annotations

import importlib.util

from tokencredit.errors import MissingExtraError

__all__ = ["run"]


def run(argv: list[str]) -> int:
    """Train; 0 when the run is done."""
    for package in ("trl", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "trl", "tokencredit train")
    if "-h" in argv or "--help" in argv:
        from tokencredit.engines.trl.arguments import make_parser

        print(make_parser().format_help())
        return 0
    if not argv:
        from tokencredit.errors import InputError

        raise InputError("train: say what to train: --lab, or --config FILE.yaml (see --help)")
    from tokencredit.engines.trl.training import train

    train(argv)
    return 0
