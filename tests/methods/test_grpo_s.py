"""GRPO-S: the laws of its shaped rewards and advantages, and its loop reference."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import LAYOUTS, Batch, batches, close
from tokencredit import GRPO_S, Rollouts, assign
from tokencredit.methods.grpo_s import grpo_s_reference

SCOPES = ("group", "batch")
EXAMPLES = settings(max_examples=100)


def rules(**fixed: Any) -> st.SearchStrategy[GRPO_S]:
    """Every combination of options."""
    options: dict[str, st.SearchStrategy[Any]] = {
        "beta1": st.sampled_from([1.0, 0.9, 0.0]),
        "beta2": st.sampled_from([0.1, 0.2, 1.5, 0.0]),
        "normalise": st.sampled_from(["joint", "zero_filled"]),
        "normalise_over": st.sampled_from(SCOPES),
        "share_over": st.sampled_from(SCOPES),
        "uniform_groups": st.sampled_from(["zero", "literal"]),
        "entropy_floor": st.sampled_from([1e-6, 1e-2]),
        "entropy_range": st.sampled_from([None, (0.2, 0.28), (0.0, 2.0), (0.5, 0.5)]),
        "entropy_mean": st.sampled_from(["arithmetic", "geometric"]),
        "ratio": st.sampled_from(["arithmetic", "geometric"]),
        "correction": st.sampled_from([0, 1]),
        "eps": st.sampled_from([0.0, 1e-4, 0.1]),
    }
    options |= {name: st.just(value) for name, value in fixed.items()}
    return (
        st.fixed_dictionaries(options)
        .filter(lambda o: o["beta1"] + o["beta2"] > 0)
        .map(lambda o: GRPO_S(**o))
    )


def reference(batch: Batch, rule: GRPO_S) -> tuple[list[list[float]], list[list[float]]]:
    """Shaped rewards, one a response, and advantages, one a token."""
    reward, advantage = grpo_s_reference(
        batch.padded_entropy(), batch.masks(), batch.success, batch.group, rule
    )
    along = [[a] * n for a, n in zip(advantage, batch.lengths, strict=True)]
    return [[r] for r in reward], along


@pytest.mark.parametrize(
    ("normalise", "normalise_over", "share_over", "uniform", "mean"),
    list(
        itertools.product(
            ["joint", "zero_filled"],
            SCOPES,
            SCOPES,
            ["zero", "literal"],
            ["arithmetic", "geometric"],
        )
    ),
)
@settings(max_examples=15)
@given(data=st.data())
def test_equals_the_loop_reference(
    normalise: str,
    normalise_over: str,
    share_over: str,
    uniform: str,
    mean: str,
    data: st.DataObject,
) -> None:
    rule = data.draw(
        rules(
            normalise=normalise,
            normalise_over=normalise_over,
            share_over=share_over,
            uniform_groups=uniform,
            entropy_mean=mean,
        )
    )
    batch = data.draw(batches(zeros=True, unknown=True))
    layout = data.draw(st.sampled_from(LAYOUTS))
    credit = assign(batch.rollouts(layout, dtype=torch.float64, garbage=(math.nan, math.inf)), rule)
    assert credit.reward is not None
    reward, advantage = reference(batch, rule)
    close(batch.tokens(credit.reward), reward, 1e-6)
    close(batch.tokens(credit.advantage, layout), advantage, 1e-6)


@EXAMPLES
@given(batch=batches(mixed=True), rule=rules(uniform_groups="zero"))
def test_float32_is_within_1e_5_of_float64(batch: Batch, rule: GRPO_S) -> None:
    credit = assign(batch.rollouts(), rule)
    assert credit.reward is not None
    reward, advantage = reference(batch, rule)
    close(batch.tokens(credit.reward), reward, 1e-5)
    close(batch.tokens(credit.advantage), advantage, 1e-5)


@EXAMPLES
@given(batch=batches(mixed=True), rule=rules(entropy_range=None))
def test_bfloat16_entropies_move_shaped_rewards_by_their_rounding_alone(
    batch: Batch, rule: GRPO_S
) -> None:
    # As for GTPO: a mean of entropies is off by at most a factor 1 +- 2^-8, and so is the mean of
    # those; a shaped reward by at most 0.8 % of beta2 x share.
    credit = assign(batch.rollouts(dtype=torch.bfloat16), rule)
    assert credit.reward is not None and credit.reward.dtype == torch.float32
    want, _ = reference(batch, rule)
    for (g,), (w,) in zip(batch.tokens(credit.reward), want, strict=True):
        assert abs(g - w) <= 0.008 * (abs(w) - rule.beta1) + 1e-6


@EXAMPLES
@given(batch=batches(zeros=True, unknown=True, keep=True), rule=rules())
def test_shaped_rewards_are_conserved(batch: Batch, rule: GRPO_S) -> None:
    credit = assign(batch.rollouts("left"), rule)
    assert credit.reward is not None
    cells: dict[tuple[int, bool], list[float]] = {}
    for i, (value,) in enumerate(batch.tokens(credit.reward)):
        scope = 0 if rule.share_over == "batch" else batch.group[i]
        cells.setdefault((scope, batch.success[i]), []).append(value)
    for (_, right), values in cells.items():
        want = (1 if right else -1) * (rule.beta1 + rule.beta2) * len(values)
        assert sum(values) == pytest.approx(want, rel=1e-5)


@EXAMPLES
@given(batch=batches(), rule=rules(), entropy=st.floats(1e-3, 20))
def test_equal_entropies_give_the_base(batch: Batch, rule: GRPO_S, entropy: float) -> None:
    batch.entropy = [[entropy] * n for n in batch.lengths]
    rollouts = batch.rollouts("interleaved")
    credit = assign(rollouts, rule)
    assert credit.reward is not None
    total = rule.beta1 + rule.beta2
    close(batch.tokens(credit.reward), [[total if s else -total] for s in batch.success], 1e-6)
    base = credit.base.unsqueeze(1) * rollouts.mask
    torch.testing.assert_close(credit.advantage, base, rtol=1e-5, atol=1e-6)


@EXAMPLES
@given(
    batch=batches(),
    normalise=st.sampled_from(["joint", "zero_filled"]),
    uniform=st.sampled_from(["zero", "literal"]),
    correction=st.sampled_from([0, 1]),
)
def test_without_beta2_it_is_grpo_of_plus_and_minus_one(
    batch: Batch, normalise: str, uniform: str, correction: int
) -> None:
    # zero_filled: values 1 and 0 instead of 1 and -1; standardised, the factor 2 cancels.
    credit = assign(
        batch.rollouts(),
        GRPO_S(
            beta1=0.7,
            beta2=0,
            normalise=normalise,  # type: ignore[arg-type]
            uniform_groups=uniform,  # type: ignore[arg-type]
            correction=correction,
        ),
    )
    batch.rewards = [1.0 if s else -1.0 for s in batch.success]
    grpo = assign(batch.rollouts(), "grpo", correction=correction)
    torch.testing.assert_close(credit.advantage, grpo.advantage, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(credit.base, grpo.base, rtol=1e-6, atol=1e-6)


@EXAMPLES
@given(
    batch=batches(mixed=True, unknown=True),
    rule=rules(entropy_range=None, entropy_floor=1e-6, uniform_groups="zero"),
    factor=st.floats(0.1, 10),
)
def test_a_common_factor_on_all_entropies_changes_nothing(
    batch: Batch, rule: GRPO_S, factor: float
) -> None:
    before = assign(batch.rollouts(), rule)
    batch.entropy = [[h * factor for h in row] for row in batch.entropy]
    after = assign(batch.rollouts(), rule)
    torch.testing.assert_close(after.reward, before.reward, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after.advantage, before.advantage, rtol=1e-5, atol=1e-5)


@EXAMPLES
@given(batch=batches(keep=True, unknown=True, zeros=True), rule=rules(), data=st.data())
def test_every_option_is_blind_to_layout_and_order(
    batch: Batch, rule: GRPO_S, data: st.DataObject
) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    spare, seed = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 99))
    order = list(data.draw(st.permutations(range(len(batch.rewards)))))
    junk = (math.nan, -math.inf, 1e30, math.inf)
    plain = assign(batch.rollouts(dtype=torch.float64), rule)
    other = assign(
        batch.rollouts(
            layout, spare=spare, seed=seed, dtype=torch.float64, garbage=junk, order=order
        ),
        rule,
    )
    for name in ("advantage", "reward", "base"):
        got = batch.tokens(getattr(other, name), layout, spare=spare, seed=seed, order=order)
        close(got, batch.tokens(getattr(plain, name)), 1e-6)


def one_group(entropy: list[list[float]], success: list[bool]) -> Batch:
    return Batch([float(s) for s in success], [0] * len(success), success, entropy)


def test_zero_entropies() -> None:
    # Wrong: means 0 (floored to 1e-6) and 1, so 1/H = 1e6 and 1: shares 2 and 0 to 1e-6.
    batch = one_group([[0.0, 0.0], [0.0], [0.0], [1.0]], [True, True, False, False])
    credit = assign(batch.rollouts(), "grpo_s")
    assert credit.reward is not None
    assert credit.reward.tolist() == pytest.approx([1.1, 1.1, -1.2, -1.0], abs=1e-6)


def test_the_floor_comes_before_the_mean() -> None:
    # Floor 1: (0, 3) becomes (1, 3), mean 2; against 2: shares 1, 1. After the mean, the floor
    # would leave 1.5 against 2.
    batch = one_group([[0.0, 3.0], [2.0]], [True, True])
    credit = assign(batch.rollouts(), "grpo_s", entropy_floor=1.0)
    assert credit.reward is not None
    assert credit.reward.tolist() == pytest.approx([1.1, 1.1], abs=1e-6)


def test_geometric_mean() -> None:
    # sqrt(1 x 4) = 2 against 6: shares 2 x 2/8 and 2 x 6/8.
    batch = one_group([[1.0, 4.0], [6.0]], [True, True])
    credit = assign(batch.rollouts(), "grpo_s", entropy_mean="geometric")
    assert credit.reward is not None
    assert credit.reward.tolist() == pytest.approx([1.05, 1.15], abs=1e-6)


def test_lone_successes_and_groups_of_one() -> None:
    # A lone right response has share 1 whatever its entropy: 1.1. Wrong ones share alike: -1.1.
    batch = one_group([[7.0], [2.0, 2.0], [2.0]], [True, False, False])
    credit = assign(batch.rollouts(), "grpo_s", correction=0)
    assert credit.reward is not None
    assert credit.reward.tolist() == pytest.approx([1.1, -1.1, -1.1], abs=1e-6)
    # p = 1/3: sqrt((1 - p) / p) = sqrt(2), -sqrt(p / (1 - p)) = -sqrt(1/2).
    root = math.sqrt(2)
    close(batch.tokens(credit.advantage), [[root], [-1 / root, -1 / root], [-1 / root]], 1e-6)
    alone = one_group([[7.0, 1.0]], [True])
    for uniform in ("zero", "literal"):
        assert not assign(alone.rollouts(), "grpo_s", uniform_groups=uniform).advantage.any()


@pytest.mark.parametrize("over", SCOPES)
def test_uniform_groups_are_judged_per_prompt_whatever_the_scope(over: str) -> None:
    batch = Batch(
        rewards=[1.0, 1.0, 1.0, 0.0],
        group=[0, 0, 1, 1],
        success=[True, True, True, False],
        entropy=[[1.0, 2.0], [3.0], [1.0], [2.0]],
    )
    options = {"normalise_over": over, "share_over": over}
    zero = assign(batch.rollouts(), "grpo_s", **options)
    literal = assign(batch.rollouts(), "grpo_s", uniform_groups="literal", **options)
    assert not zero.advantage[:2].any() and not zero.base[:2].any()
    assert literal.advantage[:2].any(dim=1).all()
    assert torch.equal(zero.advantage[2:], literal.advantage[2:])


def test_unscored_and_truncated_rows() -> None:
    batch = one_group([[3.0, 1.0], [1.0], [9.0, 9.0], [2.0]], [True, True, True, False])
    batch.rewards[2] = math.nan
    batch.keep = [True, False, True, True]
    credit = assign(batch.rollouts(), "grpo_s")
    alone = assign(one_group([[3.0, 1.0], [1.0], [2.0]], [True, True, False]).rollouts(), "grpo_s")
    assert credit.reward is not None and alone.reward is not None
    torch.testing.assert_close(credit.reward[[0, 1, 3]], alone.reward)
    torch.testing.assert_close(credit.advantage[[0, 3]], alone.advantage[[0, 2]])
    assert not credit.advantage[1:3].any() and credit.reward[2] == 0
    assert credit.in_loss.tolist() == [True, False, False, True]


def test_unknown_entropies_leave_the_mean_and_are_counted() -> None:
    # Means 1 (of the one known token), none, 3: shares 1/2, 1, 3/2.
    nan = math.nan
    batch = one_group([[1.0, nan], [nan, nan], [3.0]], [True, True, True])
    credit = assign(batch.rollouts("left"), "grpo_s")
    assert credit.reward is not None
    assert credit.reward.tolist() == pytest.approx([1.05, 1.1, 1.15], abs=1e-6)
    assert credit.diagnostics["unknown_tokens"] == pytest.approx(3 / 5)


def test_a_response_without_tokens_counts_once_if_it_is_said_to_be_real() -> None:
    rollouts = Rollouts(
        [1.0, 0.0, 0.0],
        ["p"] * 3,
        [[0, 0], [1, 1], [1, 1]],
        real=[True] * 3,
        entropy=torch.ones(3, 2),
    )
    credit = assign(rollouts, "grpo_s", correction=0)
    # As in GRPO: p = 1/3.
    want = torch.tensor([[0.0] * 2, [-math.sqrt(0.5)] * 2, [-math.sqrt(0.5)] * 2])
    torch.testing.assert_close(credit.advantage, want)
