"""Laws: what a method promises about its credit, checked on the data at hand.

A law belongs to the rules whose documentation states it, under the options for which it holds.
A method is never held to another method's law: GTPO does not keep the mean of a response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tokencredit.credit import Credit
from tokencredit.methods.dapo import DAPO
from tokencredit.methods.datc import DATC
from tokencredit.methods.grpo import GRPO, DrGRPO
from tokencredit.methods.grpo_s import GRPO_S
from tokencredit.methods.gtpo import GTPO
from tokencredit.methods.pools import uniform_groups
from tokencredit.methods.rule import Rule
from tokencredit.rollouts import Rollouts

__all__ = ["LAWS", "Law", "LawResult", "check_laws"]

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Law:
    """One promise and how to check it.

    Attributes:
        name: a short name.
        statement: the promise in words.
        holds_for: whether a rule, with its options, makes it.
        misses: from rollouts, credit and rule to the relative miss of each case (a response, a
            group, a position), 0 = kept; one dimension, empty where there is no case.
        tolerance: the largest miss that is rounding.
    """

    name: str
    statement: str
    holds_for: Callable[[Rule], bool]
    misses: Callable[[Rollouts, Credit, Any], Tensor]
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class LawResult:
    """What checking a law gave.

    Attributes:
        name: of the law.
        statement: of the law.
        passed: None where there was no case to check.
        cases: how many cases were checked.
        broken: how many of them miss by more than the tolerance.
        worst: the largest relative miss; infinite if not finite; 0 without a case.
    """

    name: str
    statement: str
    passed: bool | None
    cases: int
    broken: int
    worst: float


def check_laws(
    rollouts: Rollouts, credit: Credit, rule: Rule, laws: Iterable[Law] | None = None
) -> tuple[LawResult, ...]:
    """Check every law that the rule is under.

    Args:
        rollouts: what the credit was made from.
        credit: what is checked.
        rule: whose promises count; ``credit.rule`` if that is set.
        laws: default `LAWS`.

    Example:
        >>> from tokencredit import GRPO, assign
        >>> rollouts = Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 3))
        >>> [(law.name, law.passed) for law in check_laws(rollouts, assign(rollouts, "grpo"),
        ...                                               GRPO())]
        [('confined', True), ('centred', True), ('constant', True)]
    """
    results: list[LawResult] = []
    for law in LAWS if laws is None else laws:
        if not law.holds_for(rule):
            continue
        misses = law.misses(rollouts, credit, rule).to(torch.float64).flatten()
        misses = misses.nan_to_num(math.inf, math.inf, math.inf)
        cases = misses.numel()
        broken = int(cast("int", (misses > law.tolerance).sum().item()))
        worst = cast("float", misses.max().item()) if cases else 0.0
        passed = None if not cases else broken == 0
        results.append(LawResult(law.name, law.statement, passed, cases, broken, worst))
    return tuple(results)


# -- sums -----------------------------------------------------------------------------------


def _trained(rollouts: Rollouts, credit: Credit) -> Tensor:
    return rollouts.mask & credit.in_loss.unsqueeze(1)


def _row_sum(values: Tensor) -> Tensor:
    return values.sum(dim=1, dtype=torch.float64)


def _group_sum(rollouts: Rollouts, values: Tensor) -> Tensor:
    out = torch.zeros(rollouts.groups, dtype=torch.float64, device=values.device)
    return out.index_add_(0, rollouts.group, values.to(torch.float64))


def _whole_groups(rollouts: Rollouts, credit: Credit) -> Tensor:
    """Groups none of whose real responses is out of the loss, and some of which are in it."""
    out = _group_sum(rollouts, rollouts.real & ~credit.in_loss)
    return (out == 0) & (_group_sum(rollouts, credit.in_loss) > 0)


def _relative(miss: Tensor, size: Tensor) -> Tensor:
    return miss.abs() / torch.where(size > 0, size, 1.0)


# -- the checks -----------------------------------------------------------------------------


def _outside(rollouts: Rollouts, credit: Credit, rule: Rule) -> Tensor:
    trained = _trained(rollouts, credit)
    bad = ~credit.advantage.isfinite() | ((credit.advantage != 0) & ~trained)
    return bad.to(torch.uint8).amax(dim=1) if bad.shape[1] else bad.new_zeros(0)


def _off_centre(rollouts: Rollouts, credit: Credit, rule: Rule) -> Tensor:
    sums, sizes = _row_sum(credit.advantage), _row_sum(credit.advantage.abs())
    if not isinstance(rule, GTPO):  # one value a response, whatever its length
        length = _row_sum(rollouts.mask).clamp(min=1)
        sums, sizes = sums / length, sizes / length
    miss = _relative(_group_sum(rollouts, sums), _group_sum(rollouts, sizes))
    return miss[_whole_groups(rollouts, credit)]


def _not_constant(rollouts: Rollouts, credit: Credit, rule: Rule) -> Tensor:
    a, trained = credit.advantage, _trained(rollouts, credit)
    some = trained.any(dim=1)
    a, trained = a[some], trained[some]
    if a.numel() == 0:
        return a.new_zeros(0)
    top = a.masked_fill(~trained, -math.inf).amax(dim=1)
    bottom = a.masked_fill(~trained, math.inf).amin(dim=1)
    return _relative(top - bottom, torch.maximum(top.abs(), bottom.abs()))


def _weights(rollouts: Rollouts, credit: Credit) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and trained tokens of the responses that have any, and which responses those are."""
    trained = _trained(rollouts, credit)
    some = trained.any(dim=1)
    assert credit.weight is not None
    return credit.weight[some], trained[some], some


def _mean_off_one(rollouts: Rollouts, credit: Credit, rule: Rule) -> Tensor:
    weight, trained, _ = _weights(rollouts, credit)
    return (_row_sum(weight * trained) / _row_sum(trained) - 1).abs()


def _out_of_bounds(rollouts: Rollouts, credit: Credit, rule: Any) -> Tensor:
    weight, trained, _ = _weights(rollouts, credit)
    if weight.numel() == 0:
        return weight.new_zeros(0)
    far = weight.clamp(min=1e-30).log().abs() - math.log(rule.bound)
    return far.masked_fill(~trained, 0.0).amax(dim=1).clamp(min=0)


def _sum_changed(rollouts: Rollouts, credit: Credit, rule: Rule) -> Tensor:
    length = _row_sum(_trained(rollouts, credit))
    some = length > 0
    want = credit.base.to(torch.float64) * length
    return _relative(_row_sum(credit.advantage) - want, want.abs())[some]


def _flipped(rollouts: Rollouts, credit: Credit, rule: Rule) -> Tensor:
    trained = _trained(rollouts, credit)
    against = (credit.advantage * credit.base.sign().unsqueeze(1) < 0) & trained
    some = trained.any(dim=1)
    return against[some].any(dim=1).to(torch.float64)


def _gain_lost(rollouts: Rollouts, credit: Credit, rule: Any) -> Tensor:
    trained = _trained(rollouts, credit)
    d = torch.where(trained, rule.alignments(rollouts).nan_to_num(0.0, 0.0, 0.0), 0.0)
    peak = d.abs().amax(dim=1, keepdim=True) if d.shape[1] else d.sum(1, True)
    work = d / torch.where(peak > 0, peak, 1.0)
    plain = work * credit.base.unsqueeze(1)
    gain = _row_sum(work * credit.advantage - plain)
    some = trained.any(dim=1)
    return _relative(gain.clamp(max=0), _row_sum(plain.abs()))[some]


def _token_rewards_off(rollouts: Rollouts, credit: Credit, rule: Any) -> Tensor:
    live = rollouts.live
    reward = credit.reward
    assert reward is not None
    cell = rollouts.success.long()
    cells = 2
    if rule.share_over == "group":
        cell, cells = cell + 2 * rollouts.group, 2 * rollouts.groups
    width = live.shape[1]
    place = cell.unsqueeze(1) * width + (live.cumsum(dim=1) - 1).clamp(min=0)
    got = torch.zeros(cells * width, dtype=torch.float64, device=live.device)
    number = torch.zeros_like(got)
    got.index_add_(0, place[live], reward[live].to(torch.float64))
    number.index_add_(0, place[live], torch.ones_like(place[live], dtype=torch.float64))
    side = torch.arange(cells, device=live.device).remainder(2).mul(2).sub(1)
    want = (rule.alpha1 + rule.alpha2) * number * side.repeat_interleave(width)
    some = number > 0
    return _relative(got - want, want.abs())[some]


def _rewards_off(rollouts: Rollouts, credit: Credit, rule: Any) -> Tensor:
    reward = credit.reward
    assert reward is not None
    cell, cells = rollouts.success.long(), 2
    if rule.share_over == "group":
        cell, cells = cell + 2 * rollouts.group, 2 * rollouts.groups
    real = rollouts.real.to(torch.float64)
    got = torch.zeros(cells, dtype=torch.float64, device=real.device)
    number = torch.zeros_like(got).index_add_(0, cell, real)
    got.index_add_(0, cell, reward.to(torch.float64) * real)
    side = torch.arange(cells, device=real.device).remainder(2).mul(2).sub(1)
    want = (rule.beta1 + rule.beta2) * number * side
    return _relative(got - want, want.abs())[number > 0]


def _reward_against_success(rollouts: Rollouts, credit: Credit, rule: Rule) -> Tensor:
    reward = credit.reward
    assert reward is not None
    sign = torch.where(rollouts.success, 1.0, -1.0)
    some = rollouts.live.any(dim=1)
    if reward.dim() == 1:
        return (reward * sign < 0)[some].to(torch.float64)
    return ((reward * sign.unsqueeze(1) < 0) & rollouts.live)[some].any(dim=1).to(torch.float64)


def _uniform(rollouts: Rollouts) -> Tensor:
    present = rollouts.real & rollouts.mask.any(dim=1)
    same = uniform_groups(rollouts.success, present, rollouts.group, rollouts.groups)
    return same & present


def _credit_without_contrast(rollouts: Rollouts, credit: Credit, rule: Rule) -> Tensor:
    return credit.advantage[_uniform(rollouts)].ne(0).any(dim=1).to(torch.float64)


def _kept_without_contrast(rollouts: Rollouts, credit: Credit, rule: Rule) -> Tensor:
    return credit.in_loss[_uniform(rollouts)].to(torch.float64)


# -- the table ------------------------------------------------------------------------------


def _is_centred(rule: Rule) -> bool:
    if isinstance(rule, GTPO | GRPO_S):
        return rule.normalise == "joint" and rule.normalise_over == "group"
    return isinstance(rule, GRPO | DrGRPO | DAPO)


LAWS: tuple[Law, ...] = (
    Law(
        "confined",
        "advantages are finite, and 0 outside the mask and the loss",
        lambda rule: True,
        _outside,
    ),
    Law(
        "centred",
        "advantages of a group sum to 0 (over responses; GTPO: over tokens)",
        _is_centred,
        _off_centre,
    ),
    Law(
        "constant",
        "one advantage along each response",
        lambda rule: isinstance(rule, GRPO | DrGRPO | DAPO | GRPO_S),
        _not_constant,
    ),
    Law(
        "filtered",
        "groups that are all right or all wrong leave the loss",
        lambda rule: isinstance(rule, DAPO) and rule.filter_uniform,
        _kept_without_contrast,
    ),
    Law(
        "contrast",
        "groups that are all right or all wrong get no credit",
        lambda rule: isinstance(rule, GTPO | GRPO_S) and rule.uniform_groups == "zero",
        _credit_without_contrast,
    ),
    Law(
        "reward_sum",
        "at each position shaped rewards of right responses sum to (alpha1 + alpha2) d, "
        "of wrong ones to -(alpha1 + alpha2) h",
        lambda rule: isinstance(rule, GTPO),
        _token_rewards_off,
    ),
    Law(
        "reward_sum",
        "shaped rewards of right responses sum to (beta1 + beta2) n, of wrong ones to "
        "-(beta1 + beta2) m",
        lambda rule: isinstance(rule, GRPO_S),
        _rewards_off,
    ),
    Law(
        "reward_sign",
        "shaped rewards have the sign of correctness",
        lambda rule: isinstance(rule, GTPO | GRPO_S),
        _reward_against_success,
    ),
    Law(
        "mean_one",
        "weights have mean 1 over each response",
        lambda rule: isinstance(rule, DATC),
        _mean_off_one,
    ),
    Law(
        "bounded",
        "weights lie within [1/bound, bound]",
        lambda rule: isinstance(rule, DATC),
        _out_of_bounds,
        tolerance=1e-3,
    ),
    Law(
        "sum_kept",
        "advantages of a response sum to its base times its length",
        lambda rule: isinstance(rule, DATC),
        _sum_changed,
    ),
    Law(
        "sign_kept",
        "no token's advantage has the opposite sign of its response's base",
        lambda rule: isinstance(rule, DATC),
        _flipped,
    ),
    Law(
        "gain",
        "the predicted gain of a response is not below its base's",
        lambda rule: type(rule) is DATC and rule.alignment == "work",
        _gain_lost,
    ),
)
"""Every law, with the rules that it holds for."""
