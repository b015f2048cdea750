"""GRPO, Dr. GRPO and DAPO: the response-level rules."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import Batch, batches, close
from tokencredit import (
    DAPO,
    GRPO,
    InputError,
    Rollouts,
    assign,
    grpo_advantage,
    soft_overlong_punishment,
)
from tokencredit.methods.grpo import grpo_reference

EXAMPLES = settings(max_examples=60)
SCALES = ("group", "batch", "none")
corrections = st.sampled_from([0, 1])


def grpo_rules() -> st.SearchStrategy[GRPO]:
    return st.builds(
        GRPO, scale=st.sampled_from(SCALES), correction=corrections, eps=st.sampled_from([0.0, 0.1])
    )


@EXAMPLES
@given(batch=batches(groups=4, size=5), rule=grpo_rules(), unscored=st.integers(0, 3))
def test_grpo_equals_the_loop_reference(batch: Batch, rule: GRPO, unscored: int) -> None:
    for i, nothing in zip(range(unscored), (math.nan, math.inf, -math.inf), strict=False):
        batch.rewards[min(i, len(batch.rewards) - 1)] = nothing
    # The reference sees what the float32 tensor holds.
    rewards = torch.tensor(batch.rewards).tolist()
    want = grpo_reference(rewards, batch.group, **rule.options())
    credit = assign(batch.rollouts(), rule)
    close([[x] for x in credit.base.tolist()], [[x] for x in want], 1e-5)
    along = [[a] * n for a, n in zip(want, batch.lengths, strict=True)]
    close(batch.tokens(credit.advantage), along, 1e-5)


@EXAMPLES
@given(
    batch=batches(mixed=True),
    shift=st.sampled_from([-1000.0, -8.0, 64.0, 1000.0]),
    factor=st.sampled_from([1e-20, 0.5, 4.0, 1e15]),
    correction=corrections,
)
def test_grpo_ignores_a_shift_and_a_positive_factor(
    batch: Batch, shift: float, factor: float, correction: int
) -> None:
    # Multiples of 1/8 below 2^14 lose nothing in float32, so what is compared is our arithmetic.
    batch.rewards = [round(r * 8) / 8 for r in batch.rewards]
    before = assign(batch.rollouts(), "grpo", correction=correction)
    kept = batch.rewards
    batch.rewards = [r + shift for r in kept]
    moved = assign(batch.rollouts(), "grpo", correction=correction)
    torch.testing.assert_close(moved.advantage, before.advantage, rtol=1e-6, atol=1e-6)
    batch.rewards = [r * factor for r in kept]
    scaled = assign(batch.rollouts(), "grpo", correction=correction)
    torch.testing.assert_close(scaled.advantage, before.advantage, rtol=1e-6, atol=1e-6)


@EXAMPLES
@given(batch=batches(), rule=grpo_rules())
def test_group_advantages_sum_to_zero(batch: Batch, rule: GRPO) -> None:
    base = assign(batch.rollouts(), rule).base
    for i in range(len(batch.rewards)):
        assert float(base[batch.peers(i)].sum()) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("scale", SCALES)
def test_all_rewards_equal_and_groups_of_one(scale: str) -> None:
    # 0.1 + 0.2 and 0.3 differ in the last bit: a rounding error is no spread.
    rewards = [0.1 + 0.2, 0.3, 0.30000001, 0.3]
    rollouts = Rollouts(rewards, [0, 0, 0, 1], torch.ones(4, 2))
    assert not assign(rollouts, "grpo").advantage.any()
    alone = Rollouts([5.0, 1.0], [0, 1], torch.ones(2, 2))
    assert not assign(alone, "grpo", scale=scale).advantage.any()


def test_batch_scale_takes_the_std_of_all_rewards() -> None:
    # Rewards 1, 3 | 5, 7: group means 2 and 6, all four: mean 4, squares 9+1+1+9 = 20,
    # population std sqrt(5).
    rollouts = Rollouts([1.0, 3.0, 5.0, 7.0], [0, 0, 1, 1], torch.ones(4, 1))
    credit = assign(rollouts, "grpo", scale="batch", correction=0)
    want = torch.tensor([-1.0, 1.0, -1.0, 1.0]) / math.sqrt(5)
    torch.testing.assert_close(credit.base, want)


def test_eps_is_added_to_the_std() -> None:
    rollouts = Rollouts([1.0, 0.0], [0, 0], torch.ones(2, 1))
    # Population std 0.5, deviation 0.5: 0.5 / (0.5 + 0.5).
    credit = assign(rollouts, "grpo", correction=0, eps=0.5)
    assert credit.base.tolist() == pytest.approx([0.5, -0.5])


def test_large_close_rewards_keep_their_digits() -> None:
    rewards = torch.tensor([1000.1, 1000.2, 1000.3, 1000.7])
    wide = rewards.double()
    got = grpo_advantage(Rollouts(rewards, [0] * 4, torch.ones(4, 1)))
    want = (wide - wide.mean()) / wide.std()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)


@EXAMPLES
@given(batch=batches(keep=True), correction=corrections)
def test_dapo_is_grpo_where_the_group_is_mixed(batch: Batch, correction: int) -> None:
    dapo = assign(batch.rollouts(), "dapo", correction=correction)
    grpo = assign(batch.rollouts(), "grpo", correction=correction)
    mixed = torch.tensor([batch.mixed(i) for i in range(len(batch.rewards))])
    assert torch.equal(dapo.advantage[mixed], grpo.advantage[mixed])
    assert not dapo.advantage[~mixed].any()
    assert torch.equal(dapo.in_loss, mixed & torch.tensor(batch.keep))
    plain = assign(batch.rollouts(), "dapo", correction=correction, filter_uniform=False)
    assert torch.equal(plain.advantage, grpo.advantage)
    assert torch.equal(plain.in_loss, grpo.in_loss)


def test_dapo_filters_on_success_and_counts_truncated_responses() -> None:
    # Group 0: all right, though a length penalty makes its rewards differ. Group 1: its only
    # right response was truncated; it still makes the group a mixed one.
    rollouts = Rollouts(
        [1.0, 0.4, 1.0, 0.0],
        [0, 0, 1, 1],
        torch.ones(4, 1),
        success=[True, True, True, False],
        keep=[True, True, False, True],
    )
    credit = assign(rollouts, DAPO(correction=0))
    assert credit.in_loss.tolist() == [False, False, False, True]
    assert credit.advantage.flatten().tolist() == [0.0, 0.0, 0.0, -1.0]
    assert credit.base.tolist() == pytest.approx([1, -1, 1, -1])
    assert credit.diagnostics["groups_skipped"] == 0.5
    assert credit.diagnostics["tokens"] == 1


def test_an_unscored_success_makes_no_group_mixed() -> None:
    rollouts = Rollouts(
        [math.nan, 0.0, 0.5], [0] * 3, torch.ones(3, 1), success=[True, False, False]
    )
    assert not assign(rollouts, "dapo").in_loss.any()


@pytest.mark.parametrize(("max_length", "cache"), [(100, 0), (100, -1), (100, 101), (0, 0)])
def test_overlong_punishment_refuses_a_cache_out_of_range(max_length: int, cache: int) -> None:
    with pytest.raises(InputError, match=rf"soft_overlong_punishment: cache .* got {cache}"):
        soft_overlong_punishment(torch.tensor([1]), max_length=max_length, cache=cache)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
@given(data=st.data())
@settings(max_examples=20)
def test_advantage_is_the_base_along_the_response(name: str, data: st.DataObject) -> None:
    batch: Any = data.draw(batches(keep=True))
    rollouts = batch.rollouts("interleaved")
    credit = assign(rollouts, name)
    want = (credit.base * credit.in_loss).unsqueeze(1) * rollouts.mask
    assert torch.equal(credit.advantage, want)
    assert credit.reward is None and credit.weight is None
