"""What a task is, and what its verifier says about a response."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from tokencredit.errors import InputError

__all__ = [
    "FILLERS",
    "OPERATIONS",
    "SPECIAL_TOKENS",
    "Kind",
    "Task",
    "Verdict",
    "context_length",
    "oracle_marks",
]

Kind = Literal["forced", "deciding", "filler"]

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
"""The first words of every vocabulary, so their ids are 0, 1 and 2 in every task."""

FILLERS = ("so", "then", "next", "now", "ok", "well", "hence", "thus")
"""Connective words: free to choose, without influence on the reward."""

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
}
"""What the operator words mean."""

_SMALLEST_CONTEXT = 128


@dataclass(frozen=True)
class Verdict:
    """What the verifier says about one response.

    Attributes:
        correct: The outcome, the only thing that the reward tells: did it reach the goal?
        first_wrong: Index of the first wrong token; None if and only if every token is right.
            A response that is right as far as it goes but stops short (cut off, or nothing
            missing but the end) has its last token blamed, an empty one index 0, and one that
            goes on after `<eos>` the first token after it.
        kinds: What each token given was for, one entry per token of the response: "deciding"
            settles the outcome, "filler" cannot influence it, "forced" follows from what came
            before. Kinds go by position in the task's format; tokens past its end are "forced".
    """

    correct: bool
    first_wrong: int | None
    kinds: tuple[Kind, ...]


class Task(Protocol):
    """A family of prompts with a verifier that knows which token went wrong.

    Prompts of one task all have the same length, so that a batch needs no padding. A token's id
    is its index in `vocabulary`. Implementations are frozen dataclasses.
    """

    @property
    def name(self) -> str:
        """A short name, used for the reward function and in file names."""
        ...

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every word, `SPECIAL_TOKENS` first."""
        ...

    @property
    def prompt_length(self) -> int:
        """Tokens in every prompt."""
        ...

    @property
    def max_response(self) -> int:
        """Tokens in a complete response, `<eos>` included."""
        ...

    def problem(self, rng: random.Random) -> tuple[str, ...]:
        """Draw a prompt."""
        ...

    def demonstration(self, prompt: Sequence[str], rng: random.Random) -> tuple[str, ...]:
        """A response to warm up on, ending in `<eos>` and deliberately imperfect.

        A policy warmed up on perfect responses leaves reinforcement learning little to do.
        """
        ...

    def verify(self, prompt: Sequence[str], response: Sequence[str]) -> Verdict:
        """Judge a response of any length and content; only a malformed prompt is an error."""
        ...


def oracle_marks(verdict: Verdict) -> list[float]:
    """The tokens that truly earned the outcome: 1.0 there, 0.0 elsewhere.

    A wrong response owes its failure to its first wrong token, a right one its success to its
    deciding tokens. This is the ceiling that a credit assignment method can be held against.

    Args:
        verdict: What `Task.verify` returned.

    Returns:
        One mark per token of the response.

    Example:
        >>> oracle_marks(Verdict(False, 1, ("filler", "deciding", "deciding")))
        [0.0, 1.0, 0.0]
        >>> oracle_marks(Verdict(True, None, ("filler", "deciding", "deciding")))
        [0.0, 1.0, 1.0]
    """
    if verdict.correct:
        return [float(kind == "deciding") for kind in verdict.kinds]
    return [float(index == verdict.first_wrong) for index in range(len(verdict.kinds))]


def context_length(task: Task) -> int:
    """Positions that a policy for this task needs, and at least 128.

    Example:
        >>> from tokencredit.lab import Chain
        >>> context_length(Chain()), context_length(Chain(steps=20))
        (128, 185)
    """
    return max(_SMALLEST_CONTEXT, task.prompt_length + task.max_response)


def response_kinds(template: tuple[Kind, ...], length: int) -> tuple[Kind, ...]:
    """The template's kinds, cut or continued with "forced" to the length of a response."""
    rest: list[Kind] = ["forced"] * (length - len(template))
    return (*template[:length], *rest)


def check_operators(owner: str, operators: str) -> None:
    """Refuse an empty, unknown or repeated operator."""
    if (
        not operators
        or not set(operators) <= set(OPERATIONS)
        or len(set(operators)) < len(operators)
    ):
        raise InputError(
            f"{owner}: operators={operators!r}; give one or more of {''.join(OPERATIONS)!r}, "
            "each once"
        )


def check_range(
    owner: str, field: str, value: float, low: float, high: float | None = None
) -> None:
    """Refuse a number outside ``[low, high]``."""
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InputError(f"{owner}: {field}={value}; give a number {bounds}")
