"""The errors that tokencredit raises on purpose.

Every message is one line: what is wrong, where, and what to do. The command line turns an
`InputError` into exit code 2 without a traceback; anything else is a fault of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "InputError",
    "MissingExtraError",
    "MissingSignalError",
    "TokenCreditError",
    "nearest",
]


class TokenCreditError(Exception):
    """Base class of every error that tokencredit raises on purpose."""


class InputError(TokenCreditError, ValueError):
    """What the caller gave cannot be used; the message says what, where and what to do."""


class MissingSignalError(InputError):
    """A rule needs a signal that the rollouts do not carry."""


class MissingExtraError(TokenCreditError, ImportError):
    """An optional dependency is not installed; the message names the extra to install."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package '{package}', which is not installed: "
            f"pip install 'tokencredit[{extra}]'"
        )


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: ``" (did you mean 'gtpo'?)"``, or nothing if none is close.

    Example:
        >>> nearest("gpto", ["grpo", "gtpo"])
        " (did you mean 'gtpo'?)"
        >>> nearest("GRPO-S", ["grpo", "grpo_s"])
        " (did you mean 'grpo_s'?)"
        >>> nearest("zzz", ["grpo", "gtpo"])
        ''
    """
    plain = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), plain, n=1, cutoff=0.6)
    return f" (did you mean {plain[close[0]]!r}?)" if close else ""
