"""Texts of users, made safe to print."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""The text with what does not print, or turns the direction of writing, spelt out.

    Example:
        >>> printable("a\x00b\u202ec")
        'a\\x00b\\u202ec'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in text
    )
