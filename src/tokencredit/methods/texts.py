"""Options of a rule on the command line: ``--set key=value ...``."""

from __future__ import annotations

from collections.abc import Sequence

from tokencredit.errors import InputError

__all__ = ["set_options"]


def set_options(pairs: Sequence[str]) -> dict[str, str]:
    """``["alpha2=0.2"]`` as a mapping; the rule itself turns texts into numbers.

    Raises:
        InputError: a pair without ``=``, or a key given twice.

    Example:
        >>> set_options(["alpha2=0.2", "normalise=joint"])
        {'alpha2': '0.2', 'normalise': 'joint'}
    """
    options: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        key = key.strip()
        if not separator or not key:
            raise InputError(f"--set: expected key=value, got {pair!r}")
        if key in options:
            raise InputError(f"--set: {key} is given twice")
        options[key] = value.strip()
    return options
