"""GTPO: the laws of its shaped rewards and advantages, and its loop reference."""

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batches import LAYOUTS, Batch, batches, close, scattered, shuffled
from tokencredit import GTPO, Rollouts, assign
from tokencredit.methods.gtpo import gtpo_reference

SCOPES = ("group", "batch")
EXAMPLES = settings(max_examples=100)


def rules(**fixed: Any) -> st.SearchStrategy[GTPO]:
    """Every combination of options."""
    options: dict[str, st.SearchStrategy[Any]] = {
        "alpha1": st.sampled_from([1.0, 0.9, 0.0]),
        "alpha2": st.sampled_from([0.1, 0.2, 1.5, 0.0]),
        "normalise": st.sampled_from(["joint", "zero_filled", "own_set"]),
        "normalise_over": st.sampled_from(SCOPES),
        "share_over": st.sampled_from(SCOPES),
        "uniform_groups": st.sampled_from(["zero", "literal"]),
        "entropy_floor": st.sampled_from([1e-6, 1e-2]),
        "entropy_range": st.sampled_from([None, (0.2, 0.28), (0.0, 2.0), (0.5, 0.5)]),
        "correction": st.sampled_from([0, 1]),
        "eps": st.sampled_from([0.0, 1e-4, 0.1]),
    }
    options |= {name: st.just(value) for name, value in fixed.items()}
    return (
        st.fixed_dictionaries(options)
        .filter(lambda o: o["alpha1"] + o["alpha2"] > 0)
        .map(lambda o: GTPO(**o))
    )


def reference(batch: Batch, rule: GTPO) -> tuple[list[list[float]], list[list[float]]]:
    reward, advantage = gtpo_reference(
        batch.padded_entropy(), batch.masks(), batch.success, batch.group, rule
    )
    return scattered(reward, batch.lengths), scattered(advantage, batch.lengths)


@pytest.mark.parametrize(
    ("normalise", "normalise_over", "share_over", "uniform"),
    list(
        itertools.product(["joint", "zero_filled", "own_set"], SCOPES, SCOPES, ["zero", "literal"])
    ),
)
@settings(max_examples=15)
@given(data=st.data())
def test_equals_the_loop_reference(
    normalise: str, normalise_over: str, share_over: str, uniform: str, data: st.DataObject
) -> None:
    # In float64, so that what is compared is the logic and not the rounding; results are float32.
    rule = data.draw(
        rules(
            normalise=normalise,
            normalise_over=normalise_over,
            share_over=share_over,
            uniform_groups=uniform,
        )
    )
    batch = data.draw(batches(zeros=True, unknown=True))
    layout = data.draw(st.sampled_from(LAYOUTS))
    credit = assign(batch.rollouts(layout, dtype=torch.float64, garbage=(math.nan, math.inf)), rule)
    assert credit.reward is not None
    reward, advantage = reference(batch, rule)
    close(batch.tokens(credit.reward, layout), reward, 1e-6)
    close(batch.tokens(credit.advantage, layout), advantage, 1e-6)


@EXAMPLES
@given(
    batch=batches(mixed=True), rule=rules(uniform_groups="zero", eps=0.0), seed=st.integers(0, 9)
)
def test_float32_is_within_1e_5_of_float64(batch: Batch, rule: GTPO, seed: int) -> None:
    if rule.normalise == "own_set":
        rule = GTPO(**{**rule.options(), "normalise": "joint"})
    credit = assign(batch.rollouts("interleaved", seed=seed), rule)
    assert credit.reward is not None
    reward, advantage = reference(batch, rule)
    close(batch.tokens(credit.reward, "interleaved", seed=seed), reward, 1e-5)
    close(batch.tokens(credit.advantage, "interleaved", seed=seed), advantage, 1e-5)


@EXAMPLES
@given(batch=batches(mixed=True), rule=rules(entropy_range=None))
def test_bfloat16_entropies_move_shaped_rewards_by_their_rounding_alone(
    batch: Batch, rule: GTPO
) -> None:
    # bfloat16 keeps 8 significant bits: rounding moves an entropy by at most 2^-9 of itself
    # (2^-8 with room to spare), and so the mean that it is divided by. A share moves by at most
    # (1 + 2^-8)^2 - 1 < 0.008 of itself, a shaped reward by 0.8 % of alpha2 x share.
    credit = assign(batch.rollouts(dtype=torch.bfloat16), rule)
    assert credit.reward is not None and credit.reward.dtype == torch.float32
    want, _ = reference(batch, rule)
    for g_row, w_row in zip(batch.tokens(credit.reward), want, strict=True):
        for g, w in zip(g_row, w_row, strict=True):
            shaped = abs(w) - rule.alpha1  # alpha2 x share
            assert abs(g - w) <= 0.008 * shaped + 1e-6


@EXAMPLES
@given(batch=batches(zeros=True, unknown=True, keep=True), rule=rules())
def test_shaped_rewards_are_conserved_at_each_position(batch: Batch, rule: GTPO) -> None:
    credit = assign(batch.rollouts("left"), rule)
    assert credit.reward is not None
    got = batch.tokens(credit.reward, "left")
    for p in range(max(batch.lengths)):
        cells: dict[tuple[int, bool], list[float]] = {}
        for i, row in enumerate(got):
            if p < len(row):
                scope = 0 if rule.share_over == "batch" else batch.group[i]
                cells.setdefault((scope, batch.success[i]), []).append(row[p])
        for (_, right), values in cells.items():
            # d_t (or h_t) = len(values), truncated responses and unknown tokens included.
            want = (1 if right else -1) * (rule.alpha1 + rule.alpha2) * len(values)
            assert sum(values) == pytest.approx(want, rel=1e-5)


@EXAMPLES
@given(batch=batches(), rule=rules(), entropy=st.floats(1e-3, 20))
def test_equal_entropies_give_the_base(batch: Batch, rule: GTPO, entropy: float) -> None:
    batch.entropy = [[entropy] * n for n in batch.lengths]
    rollouts = batch.rollouts("interleaved")
    credit = assign(rollouts, rule)
    assert credit.reward is not None
    total = rule.alpha1 + rule.alpha2
    flat = [[total if s else -total] * n for s, n in zip(batch.success, batch.lengths, strict=True)]
    close(batch.tokens(credit.reward, "interleaved"), flat, 1e-6)
    if rule.normalise == "own_set":
        # Right and wrong apart, each without spread: nothing is left.
        assert not credit.advantage.any()
    else:
        base = credit.base.unsqueeze(1) * rollouts.mask
        torch.testing.assert_close(credit.advantage, base, rtol=1e-5, atol=1e-6)


@EXAMPLES
@given(
    batch=batches(),
    normalise=st.sampled_from(["joint", "zero_filled"]),
    scope=st.sampled_from(SCOPES),
    correction=st.sampled_from([0, 1]),
)
def test_without_alpha2_it_is_grpo_with_statistics_over_tokens(
    batch: Batch, normalise: str, scope: str, correction: int
) -> None:
    alpha1 = 0.7
    credit = assign(
        batch.rollouts(),
        "gtpo",
        alpha1=alpha1,
        alpha2=0,
        normalise=normalise,
        normalise_over=scope,
        correction=correction,
    )
    got = batch.tokens(credit.advantage)
    for i, row in enumerate(got):
        # N tokens in the scope, a share q of them on this response's side.
        peers = batch.peers(i) if scope == "group" else range(len(batch.rewards))
        n = sum(batch.lengths[k] for k in peers)
        q = sum(batch.lengths[k] for k in peers if batch.success[k] == batch.success[i]) / n
        if not batch.mixed(i):
            want = 0.0
        else:
            # joint: values +-alpha1, mean (2q - 1) alpha1 in this side's favour, variance
            # 4 q (1 - q) alpha1^2; zero_filled: values alpha1 and 0, mean q alpha1, variance
            # q (1 - q) alpha1^2. Both give (1 - q) / sqrt(q (1 - q)).
            want = math.sqrt((1 - q) / q * (n - correction) / n) * (1 if batch.success[i] else -1)
        close([row], [[want] * len(row)], 1e-5)


@EXAMPLES
@given(
    batch=batches(mixed=True, unknown=True),
    rule=rules(entropy_range=None, entropy_floor=1e-6, normalise="joint"),
    factor=st.floats(0.1, 10),
)
def test_a_common_factor_on_all_entropies_changes_nothing(
    batch: Batch, rule: GTPO, factor: float
) -> None:
    before = assign(batch.rollouts(), rule)
    batch.entropy = [[h * factor for h in row] for row in batch.entropy]
    after = assign(batch.rollouts(), rule)
    torch.testing.assert_close(after.reward, before.reward, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(after.advantage, before.advantage, rtol=1e-5, atol=1e-5)


@EXAMPLES
@given(batch=batches(keep=True, unknown=True, zeros=True), rule=rules(), data=st.data())
def test_every_option_is_blind_to_layout_and_order(
    batch: Batch, rule: GTPO, data: st.DataObject
) -> None:
    layout = data.draw(st.sampled_from(LAYOUTS))
    spare, seed = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 99))
    order = data.draw(st.permutations(range(len(batch.rewards))))
    plain = assign(batch.rollouts(dtype=torch.float64), rule)
    other = assign(
        batch.rollouts(
            layout,
            spare=spare,
            seed=seed,
            dtype=torch.float64,
            garbage=(math.nan, -math.inf, 1e30, math.inf),
            order=list(order),
        ),
        rule,
    )
    for name in ("advantage", "reward", "base"):
        got = batch.tokens(getattr(other, name), layout, spare=spare, seed=seed, order=list(order))
        close(got, batch.tokens(getattr(plain, name)), 1e-6)


def one_group(
    entropy: list[list[float]], success: list[bool], group: list[int] | None = None
) -> Batch:
    return Batch(
        rewards=[float(s) for s in success],
        group=group or [0] * len(success),
        success=success,
        entropy=entropy,
    )


def test_zero_entropies_share_equally() -> None:
    # Every entropy of position 0 is 0, floored alike: shares 1. At position 1 the wrong response
    # with H = 0 has 1/H = 1e6 against 1: share 2 x 1e6 / (1e6 + 1), so -(1 + 0.2) and -1.
    batch = one_group([[0.0], [0.0], [0.0, 0.0], [0.0, 1.0]], [True, True, False, False])
    credit = assign(batch.rollouts(), "gtpo")
    assert credit.reward is not None
    close(batch.tokens(credit.reward), [[1.1], [1.1], [-1.1, -1.2], [-1.1, -1.0]], 1e-6)


def test_a_lone_survivor_takes_the_mean_share_whatever_its_entropy() -> None:
    for entropy in (1e-6, 0.3, 19.0):
        batch = one_group([[2.0, entropy, entropy], [2.0], [2.0, entropy]], [True, True, False])
        credit = assign(batch.rollouts("left"), "gtpo")
        assert credit.reward is not None
        close(batch.tokens(credit.reward, "left"), [[1.1, 1.1, 1.1], [1.1], [-1.1, -1.1]], 1e-6)


def test_one_token_responses() -> None:
    # Shares of H = 1, 3: 1/2 and 3/2 of alpha2 = 0.1; of 1/H for H = 2, 2: 1 and 1.
    # Shaped: 1.05, 1.15, -1.1, -1.1: mean 0; sum of squares 1.1025 + 1.3225 + 2 x 1.21 = 4.845.
    batch = one_group([[1.0], [3.0], [2.0], [2.0]], [True, True, False, False])
    credit = assign(batch.rollouts(), "gtpo", correction=0)
    std = math.sqrt(4.845 / 4)
    want = [[1.05 / std], [1.15 / std], [-1.1 / std], [-1.1 / std]]
    close(batch.tokens(credit.advantage), want, 1e-6)


@pytest.mark.parametrize("normalise", ["joint", "zero_filled", "own_set"])
@pytest.mark.parametrize("over", SCOPES)
def test_groups_of_one_earn_nothing(normalise: str, over: str) -> None:
    batch = one_group([[1.0, 2.0], [3.0]], [True, False], group=[0, 1])
    credit = assign(batch.rollouts(), "gtpo", normalise=normalise, normalise_over=over)
    assert not credit.advantage.any() and not credit.base.any()


def test_a_pool_of_one_value_has_no_advantage_even_literally() -> None:
    batch = one_group([[1.0]], [True])
    for correction in (0, 1):
        credit = assign(batch.rollouts(), "gtpo", uniform_groups="literal", correction=correction)
        assert credit.advantage.tolist() == [[0.0]]


@pytest.mark.parametrize("over", SCOPES)
@pytest.mark.parametrize("normalise", ["joint", "zero_filled", "own_set"])
def test_uniform_groups_are_judged_per_prompt_whatever_the_scope(normalise: str, over: str) -> None:
    # Group 0 is all right, group 1 mixed, group 2 all wrong.
    batch = one_group(
        [[1.0, 2.0], [3.0], [1.0], [2.0], [4.0, 1.0], [1.0]],
        [True, True, True, False, False, False],
        group=[0, 0, 1, 1, 2, 2],
    )
    options = {"normalise": normalise, "normalise_over": over, "share_over": over}
    zero = assign(batch.rollouts(), "gtpo", **options)
    literal = assign(batch.rollouts(), "gtpo", uniform_groups="literal", **options)
    uniform = torch.tensor([True, True, False, False, True, True])
    assert not zero.advantage[uniform].any() and not zero.base[uniform].any()
    assert literal.advantage[uniform].any(dim=1).all()
    # The mixed group does not notice: the others stay in batch-wide statistics.
    assert torch.equal(zero.advantage[~uniform], literal.advantage[~uniform])
    assert torch.equal(zero.reward, literal.reward)


def test_literal_uniform_groups_keep_the_formula() -> None:
    # All right, joint over the group: rewards 1.05 and 1.15, standardised to -+1 (correction 0).
    batch = one_group([[1.0], [3.0]], [True, True])
    credit = assign(batch.rollouts(), "gtpo", uniform_groups="literal", correction=0)
    close(batch.tokens(credit.advantage), [[-1.0], [1.0]], 1e-5)


@pytest.mark.parametrize("size", [64, 1000, 4096])
@pytest.mark.parametrize("alpha1", [1.0, 0.0])
def test_equal_entropies_have_no_spread_in_huge_groups(size: int, alpha1: float) -> None:
    # Float32 sums of thousands of equal terms differ from position to position by more than a
    # rounding error; taken for a spread, they would become advantages of size 1.
    rng = random.Random(size)
    batch = one_group([[0.7] * rng.randint(1, 8) for _ in range(size)], [True] * size)
    credit = assign(batch.rollouts(), "gtpo", uniform_groups="literal", alpha1=alpha1)
    assert not credit.advantage.any()


def test_the_order_of_rows_does_not_show_in_huge_groups() -> None:
    rng = random.Random(0)
    batch = one_group(
        [[math.exp(rng.uniform(-7, 3)) for _ in range(rng.randint(1, 8))] for _ in range(3000)],
        [rng.random() < 0.3 for _ in range(3000)],
    )
    order = list(range(3000))
    rng.shuffle(order)
    one = assign(batch.rollouts(), "gtpo")
    two = assign(batch.rollouts(order=order), "gtpo")
    torch.testing.assert_close(two.advantage, one.advantage[order], rtol=1e-6, atol=1e-6)


def test_unscored_rows_are_in_no_statistic() -> None:
    batch = one_group([[3.0, 1.0], [1.0], [9.0, 9.0], [2.0]], [True, True, True, False])
    for nothing in (math.nan, math.inf, -math.inf):
        batch.rewards[2] = nothing
        credit = assign(batch.rollouts(), "gtpo")
        rest = one_group([[3.0, 1.0], [1.0], [2.0]], [True, True, False])
        alone = assign(rest.rollouts(), "gtpo")
        kept = [0, 1, 3]
        torch.testing.assert_close(credit.advantage[kept], alone.advantage)
        assert credit.reward is not None and alone.reward is not None
        torch.testing.assert_close(credit.reward[kept], alone.reward)
        assert not credit.advantage[2].any() and not credit.reward[2].any()
        assert credit.base[2] == 0 and not credit.in_loss[2]


def test_the_base_is_the_normalisation_of_the_unshaped_rewards() -> None:
    # Tokens: right 2 + 1, wrong 2, so pi = 3/5: sqrt((1 - pi) / pi) and -sqrt(pi / (1 - pi)) for
    # joint and zero_filled alike; own_set, which would leave nothing, has that of joint.
    batch = one_group([[3.0, 1.0], [1.0], [2.0, 0.5]], [True, True, False])
    right = math.sqrt(2 / 3)
    for normalise in ("joint", "zero_filled", "own_set"):
        credit = assign(batch.rollouts(), "gtpo", normalise=normalise, correction=0)
        assert credit.base.tolist() == pytest.approx([right, right, -1 / right], rel=1e-6)


def test_truncated_rows_count_but_do_not_train() -> None:
    batch = one_group([[3.0, 1.0], [1.0], [2.0, 0.5]], [True, True, False])
    whole = assign(batch.rollouts(), "gtpo")
    batch.keep = [True, False, True]
    credit = assign(batch.rollouts(), "gtpo")
    torch.testing.assert_close(credit.advantage[[0, 2]], whole.advantage[[0, 2]])
    assert not credit.advantage[1].any()
    assert torch.equal(credit.reward, whole.reward)
    assert credit.in_loss.tolist() == [True, False, True]


def test_all_truncated() -> None:
    batch = one_group([[3.0, 1.0], [1.0]], [True, False])
    batch.keep = [False, False]
    credit = assign(batch.rollouts(), "gtpo")
    assert not credit.advantage.any()
    assert all(math.isfinite(v) for v in credit.diagnostics.values())


def test_a_response_without_tokens_makes_no_group_mixed() -> None:
    # The only right response has no token (say, all of it was tool output): the tokens of the
    # wrong ones differ by entropy alone and must not be trained on.
    rollouts = Rollouts(
        [1.0, 0.0, 0.0],
        ["p"] * 3,
        [[0, 0], [1, 1], [1, 1]],
        real=[True] * 3,
        entropy=torch.tensor([[1.0, 1.0], [1.0, 2.0], [3.0, 4.0]]),
    )
    assert not assign(rollouts, "gtpo").advantage.any()


def test_unknown_entropies_get_the_mean_share_and_are_counted() -> None:
    # Position 0, right side: H = nan, 1, 3: shares 1, 1/2, 3/2 (the mean is over known ones).
    batch = one_group([[math.nan], [1.0], [3.0], [math.inf]], [True, True, True, False])
    credit = assign(batch.rollouts(), "gtpo")
    assert credit.reward is not None
    close(batch.tokens(credit.reward), [[1.1], [1.05], [1.15], [-1.1]], 1e-6)
    assert credit.diagnostics["unknown_tokens"] == pytest.approx(0.5)


def test_nothing_known_gives_the_base() -> None:
    batch = one_group([[math.nan] * 2, [math.nan] * 2], [True, False])
    credit = assign(batch.rollouts(), "gtpo")
    torch.testing.assert_close(credit.advantage, credit.base.unsqueeze(1).expand(2, 2))
    assert credit.diagnostics["unknown_tokens"] == 1.0


def test_success_alone_decides_the_side() -> None:
    batch = one_group([[3.0], [1.0], [2.0]], [True, True, False])
    one = assign(batch.rollouts(), "gtpo")
    batch.rewards = [-4.0, 0.2, 100.0]  # a length penalty, a format bonus
    two = assign(batch.rollouts(), "gtpo")
    assert torch.equal(one.advantage, two.advantage)


def test_entropies_are_clamped_then_floored() -> None:
    # Range (0, 1) turns 5 into 1; the floor 0.5 turns 0 into 0.5: shares 2/3 and 4/3.
    batch = one_group([[0.0], [5.0]], [True, True])
    credit = assign(batch.rollouts(), "gtpo", entropy_range=(0, 1), entropy_floor=0.5)
    assert credit.reward is not None
    close(batch.tokens(credit.reward), [[1 + 0.2 / 3], [1 + 0.4 / 3]], 1e-6)
    # A range below the floor: the floor wins, all equal.
    credit = assign(batch.rollouts(), "gtpo", entropy_range=(0.1, 0.2), entropy_floor=0.5)
    assert credit.reward is not None
    close(batch.tokens(credit.reward), [[1.1], [1.1]], 1e-6)


def test_tiny_floor_stays_finite() -> None:
    batch = one_group([[0.0, 0.0], [1.0, 0.0], [0.0], [2.0]], [True, True, False, False])
    for floor in (1e-30, 1e-12):
        credit = assign(batch.rollouts(), "gtpo", entropy_floor=floor)
        assert credit.reward is not None
        assert credit.advantage.isfinite().all() and credit.reward.isfinite().all()
        close(batch.tokens(credit.reward), [[1.0, 1.1], [1.2, 1.1], [-1.2], [-1.0]], 1e-6)


def test_sign_flips_are_counted() -> None:
    # 1 of 50 responses right, zero-filled: the mean of the wrong side is -(49/50) 1.1 = -1.078,
    # above the -1 of the wrong tokens without a share: they are rewarded.
    rng = random.Random(0)
    entropy = [[1.0]] + [[1e-3 if k == 0 else 10.0] for k in range(49)]
    batch = shuffled(one_group(entropy, [True] + [False] * 49), rng)
    credit = assign(batch.rollouts(), "gtpo", normalise="zero_filled")
    assert credit.diagnostics["sign_flips"] == pytest.approx(48 / 50)
