"""Every method keeps its laws, and a broken one is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tokencredit import DAPO, DATC, GRPO, GRPO_S, GTPO, DrGRPO, Rollouts, Rule, assign, methods
from tokencredit.compare import LAWS, check_laws
from tokencredit.credit import Credit, finish
from tokencredit.methods import grpo_advantage

RULES = [m.rule() for m in methods().values() if m.rule.__module__.startswith("tokencredit.m")] + [
    GRPO(scale="batch"),
    GRPO(scale="none", correction=0),
    DAPO(filter_uniform=False),
    DrGRPO(),
    *(GTPO(alpha2=2.0, normalise=n) for n in ("joint", "zero_filled", "own_set")),
    GTPO(share_over="batch", normalise_over="batch", uniform_groups="literal"),
    GRPO_S(share_over="batch", entropy_mean="geometric", beta2=1.0),
    GRPO_S(normalise="zero_filled"),
    *(DATC(weight_map=w, bound=b) for w in ("band", "box") for b in (1.0, 1.5, 30.0)),
    DATC(alignment="cosine", direction="sign", tau=0.1),
]


def batch(seed: int) -> Rollouts:
    rng = torch.Generator().manual_seed(seed)
    b, t = 24, 9
    mask = torch.rand(b, t, generator=rng) < 0.75
    mask[3] = False
    rewards = (torch.rand(b, generator=rng) < 0.5).float()
    rewards[:4], rewards[5] = 1.0, torch.nan
    names = {name for rule in RULES for name in rule.needs} | {"eos"}
    given = {n: torch.randn(b, t, generator=rng) for n in sorted(names)}
    given["entropy"] = given["entropy"].abs()
    given["entropy"][mask & (torch.rand(b, t, generator=rng) < 0.1)] = torch.nan
    given["work"][10] = 0.0
    given["eos"] = (given["eos"] > 1).float()
    keep = torch.rand(b, generator=rng) > 0.1
    return Rollouts(rewards, [i // 4 for i in range(b)], mask, keep=keep, signals=given)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: repr(rule)[:60])
def test_every_method_keeps_its_laws(rule: Rule) -> None:
    found = 0
    for seed in range(4):
        rollouts = batch(seed)
        for law in check_laws(rollouts, assign(rollouts, rule), rule):
            assert law.passed is not False, law
            found += law.cases
    assert found


def test_every_law_holds_for_some_rule() -> None:
    for law in LAWS:
        assert any(law.holds_for(rule) for rule in RULES), law.name


@dataclass(frozen=True)
class Doubled(DATC):
    """DATC that gives every token twice its share."""

    def credit(self, rollouts: Rollouts) -> Credit:
        base = grpo_advantage(rollouts)
        twice = torch.full(rollouts.mask.shape, 2.0)
        return finish(rollouts, self, advantage=base.unsqueeze(1) * twice, base=base, weight=twice)


def broken(rule: Rule, rollouts: Rollouts, **changes: Any) -> set[str]:
    """The laws that the rule's own credit breaks once it is changed."""
    credit = assign(rollouts, rule)
    before = {law.name for law in check_laws(rollouts, credit, rule) if law.passed is False}
    assert not before
    fields = {
        "advantage": credit.advantage,
        "base": credit.base,
        "in_loss": credit.in_loss,
        "reward": credit.reward,
        "weight": credit.weight,
    }
    for name, change in changes.items():
        fields[name] = change(fields[name])
    after = check_laws(rollouts, Credit(**fields), rule)  # type: ignore[arg-type]
    return {law.name for law in after if law.passed is False}


def test_broken_laws_are_found() -> None:
    rollouts = batch(0).replace(keep=[True] * 24)
    live = rollouts.live.float()
    mixed = assign(rollouts, "dapo").in_loss.float().unsqueeze(1)
    slope = torch.linspace(0.5, 1.5, 9)
    assert broken(GRPO(), rollouts, advantage=lambda a: a + 0.1 * live) == {"centred"}
    assert broken(GRPO(), rollouts, advantage=lambda a: a * slope) == {"centred", "constant"}
    assert broken(GRPO(), rollouts, advantage=lambda a: a + 1) >= {"confined"}
    assert broken(GRPO(), rollouts, advantage=lambda a: a * torch.nan) >= {"confined", "constant"}
    assert broken(DAPO(), rollouts, in_loss=lambda x: rollouts.real) == {"filtered"}
    assert broken(GTPO(), rollouts, reward=lambda r: r * slope) == {"reward_sum"}
    assert broken(GTPO(), rollouts, reward=lambda r: -r) == {"reward_sum", "reward_sign"}
    assert broken(GTPO(), rollouts, advantage=lambda a: a + 0.1 * live * mixed) == {"centred"}
    assert "contrast" in broken(GTPO(), rollouts, advantage=lambda a: a + 0.1 * live)
    assert broken(GRPO_S(), rollouts, reward=lambda r: 1.1 * r) == {"reward_sum"}
    assert broken(DATC(), rollouts, weight=lambda w: 1.01 * w) == {"mean_one"}
    assert broken(DATC(), rollouts, weight=lambda w: w * 10) == {"mean_one", "bounded"}
    assert broken(DATC(), rollouts, advantage=lambda a: 1.01 * a) == {"sum_kept"}
    assert broken(DATC(), rollouts, advantage=lambda a: -a) == {"sum_kept", "sign_kept", "gain"}


def test_a_subclass_is_held_to_its_parents_laws_and_gain_to_datc_alone() -> None:
    rollouts = batch(7)
    laws = {law.name: law for law in check_laws(rollouts, assign(rollouts, Doubled()), Doubled())}
    assert laws["mean_one"].passed is False and laws["mean_one"].worst == pytest.approx(1)
    assert laws["mean_one"].broken == laws["mean_one"].cases > 0
    assert "gain" not in laws and laws["bounded"].passed


def test_a_law_without_a_case_is_neither() -> None:
    # Nothing but mixed groups: there is none to leave the loss.
    rollouts = Rollouts(torch.tensor([1.0, 0.0]), [0, 0], torch.ones(2, 2))
    laws = {law.name: law.passed for law in check_laws(rollouts, assign(rollouts, "dapo"), DAPO())}
    assert laws["filtered"] is None and laws["centred"] is True
