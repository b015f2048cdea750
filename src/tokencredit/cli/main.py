"""``tokencredit VERB ...``: finds the verb, runs it, and turns errors into exit codes.

Exit codes: 0 done; 2 the user's input is wrong (one line: what, where, what to do); 1 a fault of
ours (with its traceback); 130 interrupted; 141 training stopped because its output was closed.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from tokencredit import __version__
from tokencredit.errors import InputError, MissingExtraError, nearest
from tokencredit.texts import printable

__all__ = ["entry_point", "main"]

VERBS: dict[str, tuple[str, str]] = {
    "train": ("train", "train a language model with GRPO and token-level credit, through TRL"),
    "assign": ("assign", "add a method's credit to a file of recorded rollouts"),
    "compare": ("compare", "what several methods would do to the same rollouts"),
    "view": ("view", "see where the credit went: one HTML page, or the terminal"),
    "doctor": ("doctor", "say what is wrong with a file of recorded rollouts"),
    "methods": ("methods", "list the methods, or explain one"),
    "lab": ("lab", "list or build the embedded tasks and policies"),
    "env": ("env", "versions and devices, for bug reports"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what `main` prints."""
        raise InputError(f"{self.prog.removeprefix('tokencredit ')}: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code.

    Example:
        >>> main(["methods", "no_such"])
        2
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows its escape.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _dispatch(arguments)
        if sys.stdout:  # None where it is closed from the start
            sys.stdout.flush()
        return code
    except SystemExit as end:  # argparse, after --help
        return end.code if isinstance(end.code, int) else 0
    except (InputError, MissingExtraError) as error:
        print(f"{_who()}: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output left. Python would complain once more when it flushes.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if arguments[:1] != ["train"] or {"-h", "--help"} & set(arguments):
            return 0
        print(f"{_who()}: stopped, as nobody reads its output any more", file=sys.stderr)
        return 141
    except OSError as error:
        # Python would complain once more when it flushes what could not be written.
        if error.errno != errno.ENOSPC or error.filename is not None:
            return _fault(error)
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"{_who()}: the output cannot be written: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"\n{_who()}: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130
    except Exception as error:
        return _fault(error)


def _fault(error: Exception) -> int:
    """Ours, not the user's."""
    if type(error).__name__ == "RunFaultError":
        print(f"{_who()}: fault: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
        print(
            "tokencredit: fault: the above is a bug in tokencredit; please report it with "
            "the output of `tokencredit env`",
            file=sys.stderr,
        )
    return 1


def _who() -> str:
    """Which process speaks, where a launcher started several."""
    rank = os.environ.get("RANK", "0")
    return "tokencredit" if rank == "0" else f"tokencredit (rank {rank})"


def entry_point() -> NoReturn:
    """The installed command."""
    raise SystemExit(main())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"tokencredit {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        raise InputError(f"unknown command {verb!r}{nearest(verb, VERBS)}; see tokencredit --help")
    import importlib

    run: Callable[[list[str]], int] = importlib.import_module(
        f"tokencredit.cli.{VERBS[verb][0]}"
    ).run
    return run(rest)


def _usage() -> str:
    width = max(map(len, VERBS))
    lines = [
        "usage: tokencredit VERB ...",
        "",
        "Fine-grained credit assignment for reinforcement learning of language models.",
        "",
        *(f"  {verb:<{width}}  {text}" for verb, (_, text) in VERBS.items()),
        "",
        "`tokencredit VERB --help` explains each. `tokencredit --version` prints the version.",
    ]
    return "\n".join(lines)
