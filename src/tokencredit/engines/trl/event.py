"""What the trainer tells its listeners after each assignment of credit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool, Int
from torch import Tensor

from tokencredit.credit import Credit
from tokencredit.rollouts import Rollouts

__all__ = ["CreditEvent"]


@dataclass(frozen=True, eq=False)
class CreditEvent:
    """One generation batch, whole across ranks, with its credit; rows in global order.

    Attributes:
        step: optimiser steps done when the batch was sampled.
        mode: ``train`` or ``eval``.
        rollouts: what the rule read; signals that were at hand are in ``rollouts.signals``.
        credit: what the loss will use.
        prompts: ``n`` prompts, text or messages.
        responses: ``n`` responses, text or messages, as the reward functions saw them.
        prompt_ids: ``n`` lists of token ids.
        response_ids: ``n`` lists of token ids, without padding.
        rewards: each reward function's values by name; None = it gave none.
        truncated: ``[n]`` bool, cut off at the generation budget.
        group: ``[n]``, which prompt each row answers: ``rollouts.group``.
        entropy_source: where the entropies came from, or None.
        success_known: whether some reward function says which responses are right; if not,
            ``rollouts.success`` is the default of `Rollouts`, which no rule in use reads.
    """

    step: int
    mode: Literal["train", "eval"]
    rollouts: Rollouts
    credit: Credit
    prompts: list[Any]
    responses: list[Any]
    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: dict[str, list[float | None]]
    truncated: Bool[Tensor, "n"]
    group: Int[Tensor, "n"]
    entropy_source: str | None
    success_known: bool = True
