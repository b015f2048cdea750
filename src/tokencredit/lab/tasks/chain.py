"""Arithmetic from left to right with the running value written out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

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

__all__ = ["Chain"]


@dataclass(frozen=True)
class Chain:
    """Evaluate ``a op b op c ... =`` from left to right modulo `modulus`, step by step.

    The response writes every step out, ``so 6 - 4 = 2 ; next 2 * 7 = 4 ; ... ans 4 <eos>``, and
    is correct if its end is ``ans v <eos>`` with the right `v`, whatever came before. Each step
    has one right result, so the first wrong token is known exactly. The results are deciding,
    the connective word that opens each step is filler, everything else is forced.

    An outcome can be right by luck although a step is wrong (a later ``* 0`` forgives all);
    then `Verdict.correct` is True and `Verdict.first_wrong` still names the wrong token.

    Attributes:
        steps: Operations in a prompt, at least 1.
        modulus: Values are 0 to ``modulus - 1``, at least 2.
        operators: Which of ``+-*`` occur.
        fillers: From how many connective words each step's opening is drawn, 0 (steps open
            without one) to 8. Their entropy is high and tells nothing about the outcome.
        noise: Probability that a demonstration redraws a result at random; the slip is carried
            on, so the policy learns both the arithmetic and to err.

    Raises:
        InputError: A field is out of range.

    Example:
        >>> task = Chain(steps=2, fillers=0)
        >>> prompt = "6 - 4 * 7 =".split()
        >>> task.verify(prompt, "6 - 4 = 2 ; 2 * 7 = 4 ; ans 4 <eos>".split()).correct
        True
        >>> task.verify(prompt, "6 - 4 = 3 ; 3 * 7 = 1 ; ans 1 <eos>".split()).first_wrong
        4
    """

    steps: int = 5
    modulus: int = 10
    operators: str = "+-*"
    fillers: int = 4
    noise: float = 0.15

    def __post_init__(self) -> None:
        check_range("Chain", "steps", self.steps, 1)
        check_range("Chain", "modulus", self.modulus, 2)
        check_operators("Chain", self.operators)
        check_range("Chain", "fillers", self.fillers, 0, len(FILLERS))
        check_range("Chain", "noise", self.noise, 0.0, 1.0)

    @property
    def name(self) -> str:
        """The task's short name, "chain"."""
        return "chain"

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every word; a token's id is its index here."""
        values = tuple(str(value) for value in range(self.modulus))
        return (*SPECIAL_TOKENS, "=", ";", "ans", *self.operators, *values, *self._filler_words)

    @property
    def prompt_length(self) -> int:
        """Tokens in every prompt."""
        return 2 * self.steps + 2

    @property
    def max_response(self) -> int:
        """Tokens in a complete response, `<eos>` included."""
        return len(self._kinds)

    def problem(self, rng: random.Random) -> tuple[str, ...]:
        """Draw a prompt: values and operators uniform and independent."""
        words = [str(rng.randrange(self.modulus))]
        for _ in range(self.steps):
            words += [rng.choice(self.operators), str(rng.randrange(self.modulus))]
        return (*words, "=")

    def demonstration(self, prompt: Sequence[str], rng: random.Random) -> tuple[str, ...]:
        """A response in which each result is redrawn at random with probability `noise`."""
        value, operations = self._parse(prompt)
        words: list[str] = []
        for operator, operand in operations:
            result = self._apply(value, operator, operand)
            if rng.random() < self.noise:
                result = rng.randrange(self.modulus)
            if self.fillers:
                words.append(rng.choice(self._filler_words))
            words += [str(value), operator, str(operand), "=", str(result), ";"]
            value = result
        return (*words, "ans", str(value), "<eos>")

    def verify(self, prompt: Sequence[str], response: Sequence[str]) -> Verdict:
        """Judge a response of any length and content.

        Raises:
            InputError: The prompt is not one of this task's.
        """
        solution = self._solution(prompt)
        ending = tuple(choice[0] for choice in solution[-3:])
        correct = tuple(response[-3:]) == ending and "<eos>" not in response[:-1]
        return Verdict(
            correct, _first_wrong(solution, response), response_kinds(self._kinds, len(response))
        )

    @property
    def _filler_words(self) -> tuple[str, ...]:
        return FILLERS[: self.fillers]

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        step: list[Kind] = ["forced", "forced", "forced", "forced", "deciding", "forced"]
        if self.fillers:
            step.insert(0, "filler")
        ending: list[Kind] = ["forced", "forced", "forced"]
        return (*step * self.steps, *ending)

    def _solution(self, prompt: Sequence[str]) -> list[tuple[str, ...]]:
        """The words that are right at each position."""
        value, operations = self._parse(prompt)
        choices: list[tuple[str, ...]] = []
        for operator, operand in operations:
            result = self._apply(value, operator, operand)
            if self.fillers:
                choices.append(self._filler_words)
            step = (str(value), operator, str(operand), "=", str(result), ";")
            choices += [(word,) for word in step]
            value = result
        return [*choices, ("ans",), (str(value),), ("<eos>",)]

    def _apply(self, left: int, operator: str, right: int) -> int:
        return OPERATIONS[operator](left, right) % self.modulus

    def _parse(self, prompt: Sequence[str]) -> tuple[int, list[tuple[str, int]]]:
        values = {str(value): value for value in range(self.modulus)}
        operands, operators = prompt[0:-1:2], prompt[1:-1:2]
        if (
            len(prompt) != self.prompt_length
            or prompt[-1] != "="
            or not all(word in values for word in operands)
            or not all(word in tuple(self.operators) for word in operators)
        ):
            raise InputError(
                f"chain: {' '.join(prompt)!r} is not a prompt of {self}; give words such as "
                f"{' '.join(self.problem(random.Random(0)))!r}"
            )
        first, *rest = (values[word] for word in operands)
        return first, list(zip(operators, rest, strict=True))


def _first_wrong(solution: Sequence[tuple[str, ...]], response: Sequence[str]) -> int | None:
    for index, (choices, word) in enumerate(zip(solution, response, strict=False)):
        if word not in choices:
            return index
    if len(response) > len(solution):
        return len(solution)
    return max(len(response) - 1, 0) if len(response) < len(solution) else None
