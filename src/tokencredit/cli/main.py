"""``tokencredit VERB ...``: finds the verb, runs it, and turns errors into exit codes.

Exit codes: 0 done; 2 the user's input is wrong (one line: what, where, what to do); 1 a fault of
ours (with its traceback); 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from tokencredit import __version__
from tokencredit.errors import InputError, MissingExtraError, nearest

__all__ = ["entry_point", "main"]

VERBS: dict[str, tuple[str, str]] = {
    "train": ("train", "train a language model with GRPO and token-level credit, through TRL"),
    "assign": ("assign", "add a method's credit to a file of recorded rollouts"),
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
    try:
        return _dispatch(arguments)
    except (InputError, MissingExtraError) as error:
        print(f"tokencredit: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output left; what was asked for is not wanted any more.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        return 0
    except KeyboardInterrupt:
        hint = "; go on with --resume" if arguments[:1] == ["train"] else ""
        print(f"\ntokencredit: interrupted{hint}", file=sys.stderr)
        return 130
    except Exception as error:
        if type(error).__name__ == "RunFaultError":
            print(f"tokencredit: fault: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
            print(
                "tokencredit: fault: the above is a bug in tokencredit; please report it with "
                "the output of `tokencredit env`",
                file=sys.stderr,
            )
        return 1


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
