"""``tokencredit train``: see `tokencredit.engines.trl.training`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import threading
from collections.abc import Generator

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

    with _terminated_is_interrupted():
        train(argv)
    return 0


@contextlib.contextmanager
def _terminated_is_interrupted() -> Generator[None]:
    """A scheduler ends a run by SIGTERM: it is left as after Ctrl-C.

    Not one of several processes: waiting for the others, it would not come to raise anything.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several or threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
