"""GRPO-S, arXiv 2508.04349: dynamic entropy weighting, response by response."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from tokencredit.credit import Credit, finish
from tokencredit.errors import InputError
from tokencredit.losses import Surrogate
from tokencredit.methods.gtpo import reward_pools, usable_entropy
from tokencredit.methods.pools import NO_SPREAD, Pools, uniform_groups, wide
from tokencredit.methods.rule import Recipe, Rule, option
from tokencredit.rollouts import Rollouts

__all__ = ["GRPO_S", "grpo_s_reference"]

Scope = Literal["group", "batch"]
Mean = Literal["arithmetic", "geometric"]


@dataclass(frozen=True)
class GRPO_S(Rule):  # noqa: N801 - the paper writes GRPO-S
    """GRPO-S: uncertain right responses earn more, confident wrong ones lose more.

    With n right and m wrong responses in the group and H a response's mean entropy:

        r_i =  beta1 + beta2 n H_i     / sum_k H_k         right responses i, k
        r_j = -beta1 - beta2 m (1/H_j) / sum_k (1/H_k)     wrong responses j, k
        A_i = (r_i - mean) / (std + eps)

    Source: arXiv 2508.04349 (v6), Eqs. 8-11. The advantage is constant along a response; the
    paper trains it with the *arithmetic* mean of the token ratios, clipped as one number, and
    1/G over responses (``Recipe``). Choices as in `GTPO`: ``joint`` or ``zero_filled``, scopes,
    uniform groups, clamp and floor of the token entropies before the mean. ``entropy_mean`` and
    ``ratio`` "geometric" are the variants of its Appendix C (the shares stay arithmetic here, so
    that the totals below hold). Unknown token entropies (NaN) are left out of the mean; a
    response without any known one gets the mean share.

    Invariants: shaped rewards of right responses sum to ``n (beta1 + beta2)``, of wrong ones to
    ``-m (beta1 + beta2)``; equal mean entropies give the base; ``beta2 = 0`` is GRPO of rewards
    +1 / -1; a common factor on all entropies changes nothing.

    Example:
        >>> import torch
        >>> from tokencredit import assign
        >>> rollouts = Rollouts(
        ...     torch.tensor([1.0, 1.0, 0.0]), ["p"] * 3, torch.ones(3, 1),
        ...     entropy=torch.tensor([[3.0], [1.0], [2.0]]),
        ... )
        >>> [round(x, 2) for x in assign(rollouts, "grpo_s").reward.tolist()]
        [1.15, 1.05, -1.1]
    """

    name: ClassVar[str] = "grpo_s"
    title: ClassVar[str] = "GRPO with sequence-level entropy weighting"
    paper: ClassVar[str] = "arXiv:2508.04349"
    acts_on: ClassVar[str] = "sequence reward, importance ratio"
    reads_success: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("entropy",)

    beta1: float = option(1.0, "reward of a right response before shaping", low=0)
    beta2: float = option(0.1, "reward shared out by mean entropy", low=0)
    normalise: Literal["joint", "zero_filled"] = option(
        "joint", "what the advantage's mean and std run over", choices=("joint", "zero_filled")
    )
    normalise_over: Scope = option("group", "scope of the mean and std", choices=("group", "batch"))
    share_over: Scope = option("group", "scope of the entropy shares", choices=("group", "batch"))
    uniform_groups: Literal["zero", "literal"] = option(
        "zero", "advantage of a group that is all right or all wrong", choices=("zero", "literal")
    )
    entropy_floor: float = option(
        1e-6, "smallest token entropy, in nats, after the clamp", low=1e-30
    )
    entropy_range: tuple[float, float] | None = option(
        None, "clamp token entropies to low,high nats; none = off (the paper's 0.2,0.28)"
    )
    entropy_mean: Mean = option(
        "arithmetic", "mean of a response's entropies", choices=("arithmetic", "geometric")
    )
    ratio: Mean = option(
        "arithmetic",
        "mean of a response's token ratios in the loss",
        choices=("arithmetic", "geometric"),
    )
    correction: int = option(1, "degrees of freedom taken off, as in torch.std", low=0, high=1)
    eps: float = option(0.0, "added to the standard deviation", low=0)

    def check(self) -> None:
        """At least one of the two rewards must be there."""
        if self.beta1 + self.beta2 == 0:
            raise InputError(f"{self.name}: beta1 and beta2 cannot both be 0")

    def credit(self, rollouts: Rollouts) -> Credit:
        """Assign credit."""
        success = rollouts.success
        value, live, known = usable_entropy(rollouts, self.entropy_floor, self.entropy_range)
        geometric = self.entropy_mean == "geometric"
        number = known.sum(dim=1)
        mean = (value.log_() if geometric else value).mul_(known).sum(dim=1) / number.clamp(min=1)
        mean = mean.exp() if geometric else mean.clamp(min=self.entropy_floor)
        mean = mean.to(wide(mean.device))  # one value a response is cheap to keep wide

        real, heard = rollouts.real.to(mean.dtype), number.clamp(max=1).to(mean.dtype)
        size = torch.where(success, mean, 1 / mean) * heard
        cell, cells = success.long(), 2
        if self.share_over == "group":
            cell, cells = cell + 2 * rollouts.group, 2 * rollouts.groups
        pools = Pools(cell, cells)
        per_share = pools.sum(heard) / pools.sum(size).clamp(min=1e-30)
        share = size * per_share.to(size.dtype)[cell] + (1 - heard)
        sign = torch.where(success, 1.0, -1.0).to(size.dtype)
        reward = sign * (self.beta1 + self.beta2 * share) * real

        scope, scopes = rollouts.group, rollouts.groups
        if self.normalise_over == "batch":
            scope, scopes = torch.zeros_like(scope), 1
        rewards = reward_pools(self.normalise, scope, scopes, success, real)
        advantage = rewards.standardise(reward, real, correction=self.correction, eps=self.eps)
        base = rewards.standardise(
            sign * (self.beta1 + self.beta2), real, correction=self.correction, eps=self.eps
        )
        if self.uniform_groups == "zero":
            mixed = ~uniform_groups(success, rollouts.real, rollouts.group, rollouts.groups)
            advantage, base = advantage * mixed, base * mixed
        return finish(
            rollouts,
            self,
            advantage=advantage,
            base=base,
            reward=reward,
            measures=lambda: {"unknown_tokens": 1 - known.sum() / live.sum().clamp(min=1)},
        )

    @property
    def recipe(self) -> Recipe:
        """One ratio a response, symmetric clip, a mean over responses, no KL."""
        level: Literal["sequence_arithmetic", "sequence_geometric"] = (
            "sequence_arithmetic" if self.ratio == "arithmetic" else "sequence_geometric"
        )
        return Recipe(
            Surrogate(ratio=level, aggregation="seq-mean-token-mean"),
            source="arXiv 2508.04349, Eqs. 10-11 (the clip range is not stated; 0.2 is the "
            "convention)",
        )


def grpo_s_reference(
    entropy: list[list[float]],
    mask: list[list[int]],
    success: list[bool],
    group: list[int],
    rule: GRPO_S | None = None,
) -> tuple[list[float], list[float]]:
    """GRPO-S in plain loops and Python floats: shaped rewards and advantages, all rows real."""
    rule = rule or GRPO_S()
    rows = range(len(mask))
    low, high = rule.entropy_range or (0.0, math.inf)
    sizes: list[float | None] = []
    for i in rows:
        values = [
            max(min(max(h, low), high), rule.entropy_floor)
            for h, m in zip(entropy[i], mask[i], strict=True)
            if m and math.isfinite(h)
        ]
        if not values:
            sizes.append(None)
            continue
        mean = sum(values) / len(values)
        if rule.entropy_mean == "geometric":
            mean = math.exp(sum(math.log(v) for v in values) / len(values))
        sizes.append(mean if success[i] else 1 / mean)

    reward: list[float] = []
    for i in rows:
        peers = [
            s
            for k, s in enumerate(sizes)
            if s is not None
            and success[k] == success[i]
            and (rule.share_over == "batch" or group[k] == group[i])
        ]
        mine = sizes[i]
        share = 1.0 if mine is None else mine / sum(peers) * len(peers)
        reward.append((1 if success[i] else -1) * (rule.beta1 + rule.beta2 * share))

    advantage: list[float] = []
    for i in rows:
        sides = {success[k] for k in rows if group[k] == group[i]}
        scope = [k for k in rows if rule.normalise_over == "batch" or group[k] == group[i]]
        values = [
            reward[k] if rule.normalise == "joint" or success[k] == success[i] else 0.0
            for k in scope
        ]
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / max(len(values) - rule.correction, 1)) ** 0.5
        rms = (sum(v * v for v in values) / len(values)) ** 0.5
        dead = len(values) < 2 or std <= NO_SPREAD * rms
        dead = dead or (rule.uniform_groups == "zero" and len(sides) < 2)
        advantage.append(0.0 if dead else (reward[i] - mean) / (std + rule.eps))
    return reward, advantage
