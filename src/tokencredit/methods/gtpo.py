"""GTPO, arXiv 2508.04349: dynamic entropy weighting, token by token.

Not to be confused with two other methods of the same name: Group-relative *Trajectory*-based
Policy Optimization (arXiv 2508.03772) and Group *Turn* Policy Optimization (arXiv 2511.14846).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from tokencredit.credit import Credit, finish
from tokencredit.errors import InputError
from tokencredit.losses import Surrogate
from tokencredit.methods.pools import NO_SPREAD, Pools, Positions, uniform_groups, wide
from tokencredit.methods.rule import Recipe, Rule, option
from tokencredit.rollouts import Rollouts

__all__ = ["GTPO", "gtpo_reference"]

Scope = Literal["group", "batch"]


@dataclass(frozen=True)
class GTPO(Rule):
    """GTPO: uncertain tokens of right responses earn more, confident ones of wrong ones lose more.

    With d_t right and h_t wrong responses of the group that have a token at position t, and H
    the entropy of the sampling policy there:

        r_it =  alpha1 + alpha2 d_t H_it     / sum_k H_kt         right responses i, k
        r_jt = -alpha1 - alpha2 h_t (1/H_jt) / sum_k (1/H_kt)     wrong responses j, k
        A_it = (r_it - mean) / (std + eps)

    Source: arXiv 2508.04349 (v6), Eqs. 3-7. Read from the paper: the base of a wrong answer is -1
    whatever the verifier pays; shares run over the responses that have a token at that position;
    entropy is the full vocabulary's under the policy that sampled, detached. Where the paper is
    open and what is chosen here:

    - *What the mean and the std of Eq. 6 run over.* ``joint``: the shaped rewards of all tokens.
      ``zero_filled``: for right responses, their rewards with a 0 for each token of a wrong one,
      and the reverse (supported by the proof of B.6). ``own_set``: right and wrong apart, the
      most literal wording; it erases correctness from the mean and makes the alphas irrelevant.
    - *Scope.* ``normalise_over`` and ``share_over``: the prompt's group, or the batch.
    - *A group that is all right or all wrong*, judged per prompt whatever the scope: advantage 0,
      as in GRPO; ``uniform_groups="literal"`` keeps what the formula gives. Such a group stays in
      the statistics of a batch-wide scope.
    - *"Entropy clipped at 0.2 / 0.28"* is read as a possible slip for the ratio clip, so off:
      ``entropy_range`` turns it on. Entropies are clamped to the range, then floored.
    - A token of unknown entropy (NaN) gets the mean share of its position: it shapes nothing and
      is counted in the diagnostics.

    Neither ``joint`` nor ``zero_filled`` keeps the sign of correctness in very lopsided groups:
    watch ``sign_flips``. ``Credit.base`` is the same normalisation of the unshaped rewards
    ``+-(alpha1 + alpha2)``; for ``own_set`` it is that of ``joint``.

    Invariants: at each position the shaped rewards of right responses sum to
    ``(alpha1 + alpha2) d_t``, those of wrong ones to ``-(alpha1 + alpha2) h_t``; equal entropies
    give the base; ``alpha2 = 0`` is GRPO with mean and std over the group's tokens; a common
    factor on all entropies changes nothing.

    Example:
        >>> import torch
        >>> from tokencredit import assign
        >>> rollouts = Rollouts(
        ...     torch.tensor([1.0, 1.0, 0.0]), ["p"] * 3, torch.ones(3, 1),
        ...     entropy=torch.tensor([[3.0], [1.0], [2.0]]),
        ... )
        >>> [round(x, 2) for x in assign(rollouts, GTPO()).reward.flatten().tolist()]
        [1.15, 1.05, -1.1]
    """

    name: ClassVar[str] = "gtpo"
    title: ClassVar[str] = "Group Token Policy Optimization"
    paper: ClassVar[str] = "arXiv:2508.04349"
    acts_on: ClassVar[str] = "token reward"
    reads_success: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("entropy",)

    alpha1: float = option(1.0, "reward of a right token before shaping", low=0)
    alpha2: float = option(0.1, "reward shared out by entropy", low=0)
    normalise: Literal["joint", "zero_filled", "own_set"] = option(
        "joint",
        "what the advantage's mean and std run over",
        choices=("joint", "zero_filled", "own_set"),
    )
    normalise_over: Scope = option("group", "scope of the mean and std", choices=("group", "batch"))
    share_over: Scope = option("group", "scope of the entropy shares", choices=("group", "batch"))
    uniform_groups: Literal["zero", "literal"] = option(
        "zero", "advantage of a group that is all right or all wrong", choices=("zero", "literal")
    )
    entropy_floor: float = option(1e-6, "smallest entropy, in nats, after the clamp", low=1e-30)
    entropy_range: tuple[float, float] | None = option(
        None, "clamp entropies to low,high nats; none = off (the paper's 0.2,0.28)"
    )
    correction: int = option(1, "degrees of freedom taken off, as in torch.std", low=0, high=1)
    eps: float = option(0.0, "added to the standard deviation", low=0)

    def check(self) -> None:
        """At least one of the two rewards must be there."""
        if self.alpha1 + self.alpha2 == 0:
            raise InputError(f"{self.name}: alpha1 and alpha2 cannot both be 0")

    def credit(self, rollouts: Rollouts) -> Credit:
        """Assign credit."""
        success = rollouts.success
        share, live, known, spare = entropy_share(
            rollouts, self.entropy_floor, self.entropy_range, self.share_over
        )
        sign = torch.where(success, 1.0, -1.0).to(share.dtype)
        reward = share.mul_((sign * self.alpha2).unsqueeze(1))
        reward = reward.addcmul_(live, (sign * self.alpha1).unsqueeze(1))

        scope, scopes = rollouts.group, rollouts.groups
        if self.normalise_over == "batch":
            scope, scopes = torch.zeros_like(scope), 1
        length = live.sum(dim=1)
        joint = reward_pools("joint", scope, scopes, success, length)
        pools = reward_pools(self.normalise, scope, scopes, success, length)
        advantage = pools.standardise(
            reward, live, correction=self.correction, eps=self.eps, out=spare
        )
        base = (joint if self.normalise == "own_set" else pools).standardise(
            sign * (self.alpha1 + self.alpha2), length, correction=self.correction, eps=self.eps
        )
        if self.uniform_groups == "zero":
            present = rollouts.real & (length > 0)  # a response without tokens is in no pool
            mixed = ~uniform_groups(success, present, rollouts.group, rollouts.groups)
            mixed = mixed.to(base.dtype)
            advantage, base = advantage.mul_(mixed.unsqueeze(1)), base * mixed
        return finish(
            rollouts,
            self,
            advantage=advantage,
            base=base,
            reward=reward,
            masked=True,
            measures=lambda: {"unknown_tokens": 1 - known / length.sum().clamp(min=1)},
        )

    @property
    def recipe(self) -> Recipe:
        """Token ratio, symmetric clip, one mean over all tokens, no KL."""
        return Recipe(
            Surrogate(ratio="token", aggregation="token-mean"),
            source="arXiv 2508.04349, Eq. 7 (the clip range is not stated; 0.2 is the convention)",
        )


def usable_entropy(
    rollouts: Rollouts, floor: float, limits: tuple[float, float] | None
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"], Float[Tensor, "b t"]]:
    """Entropies clamped to ``limits``, then floored; ones at live tokens; ones at known ones.

    The entropies are finite and at least ``floor`` everywhere, the other two 0 elsewhere. Masks
    are floats here: on a CPU multiplying by one is an order of magnitude faster than selecting.
    Where nothing is unknown (looked up only on the CPU: elsewhere it would synchronise) the last
    two are one and the same tensor.
    """
    entropy = rollouts.signals["entropy"]
    entropy = entropy.to(torch.promote_types(entropy.dtype, torch.float32))
    live = rollouts.live_as(entropy.dtype)
    low, high = limits if limits is not None else (floor, None)
    least, most = max(low, floor), None if high is None else max(high, floor)
    if entropy.device.type == "cpu" and math.isfinite(cast("float", entropy.sum().tolist())):
        return entropy.clamp(least, most), live, live
    value = entropy.nan_to_num(nan=floor, posinf=floor, neginf=floor).clamp_(least, most)
    known = entropy.mul(0).add_(1).nan_to_num_(nan=0.0).mul_(live)
    return value, live, known


def entropy_share(
    rollouts: Rollouts, floor: float, limits: tuple[float, float] | None, share_over: Scope
) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"], Float[Tensor, ""], Float[Tensor, "b t"]]:
    """Each token's share of its position's entropy, times how many share it: 1 on average.

    Right responses share H, wrong ones 1/H, each side apart. Returns the shares (1 where the
    entropy is unknown, 0 outside the live tokens), ones at live tokens, how many are known, and
    a tensor of that shape to be overwritten: new memory costs more than the arithmetic.
    """
    value, live, known = usable_entropy(rollouts, floor, limits)
    side = rollouts.success.to(value.dtype).unsqueeze(1)
    size = value.reciprocal().mul_(1 - side).addcmul_(value, side).mul_(known)
    cell, cells = rollouts.success.long(), 2
    if share_over == "group":
        cell, cells = cell + 2 * rollouts.group, 2 * rollouts.groups

    # Rounding grows with the number of terms: float32 is good for 64 of them, and faster.
    many = 2 * rollouts.responses > 64 * cells
    dtype = wide(size.device) if many else size.dtype
    positions = Positions.of(live)
    packed = positions.pack(size)  # size itself where nothing has to move
    total = packed.new_zeros(cells, packed.shape[1], dtype=dtype)
    total.index_add_(0, cell, packed.to(dtype))
    number = torch.zeros_like(total).index_add_(0, cell, positions.pack(known).to(dtype))
    mean_inverse = number.div_(total.clamp_(min=torch.finfo(size.dtype).tiny)).to(size.dtype)
    spread = torch.index_select(mean_inverse, 0, cell, out=value if packed is size else packed)
    share = size.mul_(positions.unpack(spread, out=value))
    if known is not live:
        share.add_(live).sub_(known)
    return share, live, known.sum(), value


def reward_pools(
    normalise: str, scope: Tensor, scopes: int, success: Tensor, number: Tensor
) -> Pools:
    """The sets whose mean and std Eq. 6 takes: ``number`` values a row, in each scope."""
    if normalise == "joint":
        return Pools(scope, scopes)
    index, count = 2 * scope + success.long(), 2 * scopes
    own = Pools(index, count)
    if normalise == "own_set":
        return own
    # The other side's tokens stand in the set as zeros.
    own_number = own.sum(number)
    return Pools(index, count, zeros=own_number.view(-1, 2).flip(1).reshape(-1))


def gtpo_reference(
    entropy: list[list[float]],
    mask: list[list[int]],
    success: list[bool],
    group: list[int],
    rule: GTPO | None = None,
) -> tuple[list[list[float]], list[list[float]]]:
    """GTPO in plain loops and Python floats: shaped rewards and advantages, all rows real."""
    rule = rule or GTPO()
    rows = range(len(mask))
    columns = [[t for t, m in enumerate(row) if m] for row in mask]
    low, high = rule.entropy_range or (0.0, math.inf)

    def size(i: int, p: int) -> float | None:
        h = entropy[i][columns[i][p]]
        if not math.isfinite(h):
            return None
        h = max(min(max(h, low), high), rule.entropy_floor)
        return h if success[i] else 1 / h

    reward: dict[tuple[int, int], float] = {}
    for i in rows:
        for p in range(len(columns[i])):
            peers = [
                k
                for k in rows
                if success[k] == success[i]
                and p < len(columns[k])
                and (rule.share_over == "batch" or group[k] == group[i])
            ]
            sizes = [s for s in (size(k, p) for k in peers) if s is not None]
            mine = size(i, p)
            share = 1.0 if mine is None else mine / sum(sizes) * len(sizes)
            reward[i, p] = (1 if success[i] else -1) * (rule.alpha1 + rule.alpha2 * share)

    shaped = [[0.0] * len(row) for row in mask]
    advantage = [[0.0] * len(row) for row in mask]
    for i, p in reward:
        shaped[i][columns[i][p]] = reward[i, p]
        right = {success[k] for k in rows if group[k] == group[i] and columns[k]}
        if rule.uniform_groups == "zero" and len(right) < 2:
            continue
        scope = [k for k in rows if rule.normalise_over == "batch" or group[k] == group[i]]
        values = [
            reward[k, q] if rule.normalise == "joint" or success[k] == success[i] else 0.0
            for k in scope
            for q in range(len(columns[k]))
            if rule.normalise != "own_set" or success[k] == success[i]
        ]
        if len(values) < 2:
            continue
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / max(len(values) - rule.correction, 1)) ** 0.5
        rms = (sum(v * v for v in values) / len(values)) ** 0.5
        if std > NO_SPREAD * rms:
            advantage[i][columns[i][p]] = (reward[i, p] - mean) / (std + rule.eps)
    return shaped, advantage
