"""Rewards by rule for ``train.yaml``: one sentence, short, with a word on a given letter.

Each prompt has the columns ``letter`` and ``words``. Deterministic; nothing is looked up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def score(
    completions: Sequence[Any], letter: Sequence[str], words: Sequence[int], **_: Any
) -> list[float]:
    """How well a response does, 0 to 1: dense, so that a response may be nearly right."""
    return [
        sum(marks(text(response), each, limit)) / 3
        for response, each, limit in zip(completions, letter, words, strict=True)
    ]


def right(
    completions: Sequence[Any], letter: Sequence[str], words: Sequence[int], **_: Any
) -> list[float]:
    """1 for a response that keeps all three rules, else 0: the success that GTPO reads."""
    return [
        float(min(marks(text(response), each, limit)) == 1)
        for response, each, limit in zip(completions, letter, words, strict=True)
    ]


def marks(response: str, letter: str, limit: int) -> tuple[float, float, float]:
    """One sentence; at most ``limit`` words; a word on ``letter``: 1 each if kept.

    Example:
        >>> marks("Silent seas sing.", "s", 12)
        (1.0, 1.0, 1.0)
        >>> marks("The sea. It is wide", "b", 4)
        (0.5, 0.8, 0.0)
    """
    response = response.strip()
    found = re.findall(r"[A-Za-z][A-Za-z'-]*", response)
    if not found:
        return 0.0, 0.0, 0.0
    ends = len(re.findall(r"[.!?]+(?=\s|$)", response))
    one = 1.0 if ends == 1 and response[-1] in ".!?" else 0.5 if ends else 0.0
    short = 1.0 if len(found) <= limit else limit / len(found)
    return one, short, float(any(word.lower().startswith(letter) for word in found))


def text(response: Any) -> str:
    """The text of a response: TRL hands over strings, or messages for chat prompts."""
    return response if isinstance(response, str) else str(response[-1]["content"])
