"""GRPO, Dr. GRPO and the advantage that every weighting rule falls back on.

Sources: DeepSeekMath, arXiv 2402.03300, section 4.1 (GRPO); "Understanding R1-Zero-Like
Training", arXiv 2503.20783 (Dr. GRPO).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tokencredit.credit import Credit, finish
from tokencredit.losses import Surrogate
from tokencredit.methods.pools import Pools, wide
from tokencredit.methods.rule import Recipe, Rule, option
from tokencredit.rollouts import Rollouts

__all__ = ["GRPO", "DrGRPO", "grpo_advantage", "grpo_reference"]

Scale = Literal["group", "batch", "none"]


def grpo_advantage(
    rollouts: Rollouts, *, scale: Scale = "group", correction: int = 1, eps: float = 0.0
) -> Float[Tensor, "b"]:
    """Group-relative advantage ``(r - mean(r)) / (std(r) + eps)``; 0 for padding rows.

    Args:
        rollouts: read: rewards, group, real.
        scale: where the standard deviation is taken: the prompt's group, the whole batch (of all
            rewards, as TRL does), or none at all (Dr. GRPO).
        correction: as in ``torch.std``.
        eps: added to the standard deviation.

    Example:
        >>> import torch
        >>> rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
        >>> rollouts = Rollouts(rewards, [0, 0, 1, 1], torch.ones(4, 1))
        >>> grpo_advantage(rollouts, correction=0).tolist()
        [1.0, -1.0, -1.0, 1.0]
    """
    # One value a response is cheap to keep wide, and large rewards that differ little need it.
    rewards = torch.where(rollouts.real, rollouts.rewards, 0.0).to(wide(rollouts.device))
    real = rollouts.real.to(rewards.dtype)
    groups = Pools(rollouts.group, rollouts.groups)
    if scale == "group":
        advantage = groups.standardise(rewards, real, correction=correction, eps=eps)
    else:
        advantage = rewards - groups.mean(rewards, real)
        if scale == "batch":
            batch = Pools(torch.zeros_like(rollouts.group), 1)
            factor = batch.inverse_std(rewards, real, correction=correction, eps=eps)
            advantage = advantage * factor
    return (advantage * real).to(rollouts.rewards.dtype)


@dataclass(frozen=True)
class GRPO(Rule):
    """GRPO: every token of a response gets the response's group-relative advantage.

        A_it = (r_i - mean_g(r)) / (std_g(r) + eps)

    Source: arXiv 2402.03300, section 4.1.2 (outcome supervision). The paper states neither the
    degrees of freedom nor a guard of the standard deviation. Here: ``torch.std``'s default and no
    guard, with 0 for a group without spread; TRL adds 1e-4, verl 1e-6, OpenRLHF 1e-9.

    Invariants: advantages of a group sum to 0; a constant added to a group's rewards changes
    nothing; with ``scale`` "group" and ``eps`` 0 neither does a positive factor.

    Example:
        >>> import torch
        >>> from tokencredit import assign
        >>> rollouts = Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 2))
        >>> assign(rollouts, "grpo", correction=0).advantage.tolist()
        [[1.0, 1.0], [-1.0, -1.0]]
    """

    name: ClassVar[str] = "grpo"
    title: ClassVar[str] = "Group Relative Policy Optimization"
    paper: ClassVar[str] = "arXiv:2402.03300"
    acts_on: ClassVar[str] = "advantage"

    scale: Scale = option(
        "group", "where the standard deviation is taken", choices=("group", "batch", "none")
    )
    correction: int = option(1, "degrees of freedom taken off, as in torch.std", low=0, high=1)
    eps: float = option(0.0, "added to the standard deviation", low=0)

    def credit(self, rollouts: Rollouts) -> Credit:
        """Assign credit."""
        base = grpo_advantage(rollouts, scale=self.scale, correction=self.correction, eps=self.eps)
        return finish(rollouts, self, advantage=base, base=base)

    @property
    def recipe(self) -> Recipe:
        """Token ratio, symmetric clip, mean over tokens then over responses."""
        return Recipe(
            Surrogate(aggregation="seq-mean-token-mean"),
            ratio_required=False,
            source="arXiv 2402.03300, Eq. 3 (the clip range is not stated there)",
        )


@dataclass(frozen=True)
class DrGRPO(Rule):
    """Dr. GRPO: GRPO without the division by the standard deviation.

        A_it = r_i - mean_g(r)

    Source: arXiv 2503.20783, section 3. The other half of the method is in the loss: a sum over
    tokens divided by a constant, the generation budget (``seq-mean-token-sum-norm``).

    Invariants: advantages of a group sum to 0; ``G / (G - 1)`` times this is RLOO's advantage.

    Example:
        >>> import torch
        >>> from tokencredit import assign
        >>> rollouts = Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 1))
        >>> assign(rollouts, "dr_grpo").advantage.tolist()
        [[0.5], [-0.5]]
    """

    name: ClassVar[str] = "dr_grpo"
    title: ClassVar[str] = "GRPO Done Right"
    paper: ClassVar[str] = "arXiv:2503.20783"
    acts_on: ClassVar[str] = "advantage, loss aggregation"

    def credit(self, rollouts: Rollouts) -> Credit:
        """Assign credit."""
        base = grpo_advantage(rollouts, scale="none")
        return finish(rollouts, self, advantage=base, base=base)

    @property
    def recipe(self) -> Recipe:
        """Token ratio; the sum over tokens over the generation budget."""
        return Recipe(
            Surrogate(aggregation="seq-mean-token-sum-norm"),
            ratio_required=False,
            source="arXiv 2503.20783, section 3.2 and the authors' script",
        )


def grpo_reference(
    rewards: list[float],
    group: list[int],
    *,
    scale: Scale = "group",
    correction: int = 1,
    eps: float = 0.0,
) -> list[float]:
    """`grpo_advantage` in plain loops and Python floats; not finite = not scored, advantage 0."""

    def spread(values: list[float]) -> float:
        if len(values) < 2:
            return 0.0
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / (len(values) - correction)) ** 0.5
        rms = (sum(v * v for v in values) / len(values)) ** 0.5
        return std if std > 1e-6 * rms else 0.0

    scored = [r for r in rewards if math.isfinite(r)]
    out: list[float] = []
    for r, g in zip(rewards, group, strict=True):
        own = [x for x, h in zip(rewards, group, strict=True) if h == g and math.isfinite(x)]
        if not math.isfinite(r):
            out.append(0.0)
            continue
        centred = r - sum(own) / len(own)
        if scale == "none":
            out.append(centred)
            continue
        std = spread(own if scale == "group" else scored)
        out.append(centred / (std + eps) if std else 0.0)
    return out
