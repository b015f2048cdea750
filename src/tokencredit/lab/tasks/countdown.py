"""Reach a target from a few numbers, each used once."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tokencredit.errors import InputError
from tokencredit.lab.tasks.task import (
    FILLERS,
    OPERATIONS,
    SPECIAL_TOKENS,
    Kind,
    Verdict,
    check_operators,
    check_range,
    response_kinds,
)

__all__ = ["Countdown"]

_DRAWS = 10_000


@dataclass(frozen=True)
class Countdown:
    """Combine the numbers of ``3 2 5 -> 6``, each used once, until the target is left.

    A step takes two of the numbers at hand and puts their result back:
    ``3 + 5 = 8 ; 8 - 2 = 6 ; <eos>``. A response is correct if every step is legal and its
    arithmetic right, every number is used, and the last result is the target. Several responses
    can be right; the choices (both numbers and the operator) are deciding, the rest is forced.

    The first wrong token is the first after which no continuation reaches the target, found by
    a search; so `Verdict.correct` holds if and only if `Verdict.first_wrong` is None. If a prompt
    has no solution at all, the first choice is blamed.

    Attributes:
        numbers: How many numbers a prompt gives, at least 2.
        low: Smallest number given, at least 0.
        high: Largest number given, at most `maximum`.
        operators: Which of ``+-*`` may be used.
        maximum: Every result must lie between 0 and this.
        fillers: From how many connective words each step's opening is drawn, 0 (none) to 8.
        hit_share: Share of the demonstrations that reach the target; the others are legal but
            aimless.

    Raises:
        InputError: A field is out of range.

    Example:
        >>> task = Countdown()
        >>> prompt = "3 2 5 -> 6".split()
        >>> task.verify(prompt, "3 + 5 = 8 ; 8 - 2 = 6 ; <eos>".split()).correct
        True
        >>> task.verify(prompt, "3 * 5 = 15 ; 15 - 2 = 13 ; <eos>".split()).first_wrong
        1
    """

    numbers: int = 3
    low: int = 1
    high: int = 9
    operators: str = "+-*"
    maximum: int = 50
    fillers: int = 0
    hit_share: float = 0.5

    def __post_init__(self) -> None:
        check_range("Countdown", "numbers", self.numbers, 2)
        check_range("Countdown", "low", self.low, 0)
        check_range("Countdown", "high", self.high, self.low, self.maximum)
        check_operators("Countdown", self.operators)
        check_range("Countdown", "fillers", self.fillers, 0, len(FILLERS))
        check_range("Countdown", "hit_share", self.hit_share, 0.0, 1.0)

    @property
    def name(self) -> str:
        """The task's short name, "countdown"."""
        return "countdown"

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every word; a token's id is its index here."""
        values = tuple(str(value) for value in range(self.maximum + 1))
        return (*SPECIAL_TOKENS, "=", ";", "->", *self.operators, *values, *self._filler_words)

    @property
    def prompt_length(self) -> int:
        """Tokens in every prompt."""
        return self.numbers + 2

    @property
    def max_response(self) -> int:
        """Tokens in a complete response, `<eos>` included."""
        return len(self._step_kinds) * (self.numbers - 1) + 1

    def problem(self, rng: random.Random) -> tuple[str, ...]:
        """Draw a solvable prompt: uniform numbers, and the target at the end of a random walk.

        Raises:
            InputError: No numbers in the range have a legal walk under `maximum`.
        """
        for _ in range(_DRAWS):
            numbers = tuple(rng.randint(self.low, self.high) for _ in range(self.numbers))
            walk = _walk(numbers, rng, self._moves)
            if walk is not None:
                return (*map(str, numbers), "->", str(walk[-1].value))
        raise InputError(f"countdown: {self} has no solvable prompt; raise maximum")

    def demonstration(self, prompt: Sequence[str], rng: random.Random) -> tuple[str, ...]:
        """A response that reaches the target with probability `hit_share`, else an aimless one.

        Raises:
            InputError: The prompt is not one of this task's, or has no solution.
        """
        numbers, target = self._parse(prompt)
        if rng.random() < self.hit_share:
            walk = _walk(numbers, rng, lambda left: self._good_moves(left, target))
        else:
            walk = self._aimless_walk(numbers, rng)
        if walk is None:
            raise InputError(
                f"countdown: {' '.join(prompt)!r} cannot be solved; draw prompts with problem()"
            )
        words: list[str] = []
        for move in walk:
            if self.fillers:
                words.append(rng.choice(self._filler_words))
            words += move.words
        return (*words, "<eos>")

    def verify(self, prompt: Sequence[str], response: Sequence[str]) -> Verdict:
        """Judge a response of any length and content.

        Raises:
            InputError: The prompt is not one of this task's.
        """
        first_wrong = self._first_wrong(prompt, response)
        template = (*self._step_kinds * (self.numbers - 1), "forced")
        return Verdict(first_wrong is None, first_wrong, response_kinds(template, len(response)))

    @property
    def _filler_words(self) -> tuple[str, ...]:
        return FILLERS[: self.fillers]

    @property
    def _step_kinds(self) -> tuple[Kind, ...]:
        step: list[Kind] = ["deciding", "deciding", "deciding", "forced", "forced", "forced"]
        return ("filler", *step) if self.fillers else tuple(step)

    def _first_wrong(self, prompt: Sequence[str], response: Sequence[str]) -> int | None:
        left, target = self._parse(prompt)
        step_length, opening = len(self._step_kinds), int(self.fillers > 0)
        end = self.max_response - 1
        candidates: Sequence[_Move] = ()
        for index, word in enumerate(response):
            place = index % step_length - opening
            if index >= end:
                right = index == end and word == "<eos>"
            elif place < 0:
                right = word in self._filler_words
            else:
                # The steps that still lead to the target, narrowed word by word: when none is
                # left, the word just read was the wrong one, be it a choice or arithmetic.
                if place == 0:
                    candidates = self._good_moves(left, target)
                candidates = [move for move in candidates if move.words[place] == word]
                right = bool(candidates)
                if right and index % step_length == step_length - 1:
                    left = candidates[0].rest
            if not right:
                return index
        return None if len(response) == self.max_response else max(len(response) - 1, 0)

    def _aimless_walk(self, numbers: tuple[int, ...], rng: random.Random) -> list[_Move] | None:
        # Without "-" a walk can run into a dead end above `maximum`.
        walks = (_walk(numbers, rng, self._moves) for _ in range(_DRAWS))
        return next((walk for walk in walks if walk is not None), None)

    def _moves(self, left: tuple[int, ...]) -> Sequence[_Move]:
        return _moves(tuple(sorted(left)), self.operators, self.maximum)

    def _good_moves(self, left: tuple[int, ...], target: int) -> Sequence[_Move]:
        return [
            move
            for move in self._moves(left)
            if _reachable(move.rest, target, self.operators, self.maximum)
        ]

    def _parse(self, prompt: Sequence[str]) -> tuple[tuple[int, ...], int]:
        values = {str(value): value for value in range(self.maximum + 1)}
        *numbers, arrow, target = prompt if len(prompt) == self.prompt_length else ["", ""]
        if arrow != "->" or not all(word in values for word in (*numbers, target)):
            raise InputError(
                f"countdown: {' '.join(prompt)!r} is not a prompt of {self}; give words such as "
                f"{' '.join(self.problem(random.Random(0)))!r}"
            )
        return tuple(values[word] for word in numbers), values[target]


class _Move(NamedTuple):
    """One legal step: the words that write it, its result, and the numbers left after it."""

    words: tuple[str, ...]
    value: int
    rest: tuple[int, ...]


@lru_cache(maxsize=2**16)
def _moves(left: tuple[int, ...], operators: str, maximum: int) -> tuple[_Move, ...]:
    found: list[_Move] = []
    for i, first in enumerate(left):
        for j, second in enumerate(left):
            for operator in operators if i != j else "":
                value = OPERATIONS[operator](first, second)
                if 0 <= value <= maximum:
                    words = (str(first), operator, str(second), "=", str(value), ";")
                    rest = [number for k, number in enumerate(left) if k not in (i, j)]
                    found.append(_Move(words, value, tuple(sorted([*rest, value]))))
    return tuple(found)


@lru_cache(maxsize=2**16)
def _reachable(left: tuple[int, ...], target: int, operators: str, maximum: int) -> bool:
    if len(left) == 1:
        return left[0] == target
    return any(
        _reachable(move.rest, target, operators, maximum)
        for move in _moves(left, operators, maximum)
    )


def _walk(
    numbers: tuple[int, ...],
    rng: random.Random,
    moves: Callable[[tuple[int, ...]], Sequence[_Move]],
) -> list[_Move] | None:
    """Random steps until one number is left; None at a dead end."""
    walk: list[_Move] = []
    left = numbers
    while len(left) > 1:
        possible = moves(left)
        if not possible:
            return None
        walk.append(rng.choice(possible))
        left = walk[-1].rest
    return walk
