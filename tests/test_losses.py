"""The policy loss: values by hand, gradients, clipping, micro-batches, extremes."""

import itertools
import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokencredit import InputError, Surrogate, importance_ratio, loss_denominator, policy_loss
from tokencredit.losses import Aggregation, RatioLevel, policy_loss_reference

LEVELS: tuple[RatioLevel, ...] = get_args(RatioLevel)
AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
EVERY = list(itertools.product(LEVELS, AGGREGATIONS))


def case(
    seed: int, b: int = 4, t: int = 6, dtype: torch.dtype = torch.float64, spread: float = 0.3
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Current and old log-probabilities, advantages and an interleaved mask with an empty row."""
    g = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(b, t, generator=g, dtype=dtype)
    new = old + spread * torch.randn(b, t, generator=g, dtype=dtype)
    advantage = torch.randn(b, t, generator=g, dtype=dtype)
    mask = torch.rand(b, t, generator=g) > 0.35
    mask[0, 0] = True
    mask[-1] = False
    return new, old, advantage, mask


def value_and_gradient(new: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    new = new.detach().clone().requires_grad_()
    loss = policy_loss(new, *args, **kwargs)
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.detach(), gradient


# One response of two tokens with ratios 2 and 1/2, and one of one token with ratio 1.
LOG2 = math.log(2)
NEW = torch.tensor([[LOG2, -LOG2], [0.0, 55.0]])
OLD = torch.zeros(2, 2)
MASK = torch.tensor([[True, True], [True, False]])
A = torch.tensor([[1.0, -1.0], [3.0, 77.0]])
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
# token: min(2 x 1, 1.28 x 1) = 1.28; min(0.5 x -1, 0.8 x -1) = -0.8; 3.
#   token-mean: -(1.28 - 0.8 + 3) / 3 = -1.16.
#   seq-mean-token-mean: -((1.28 - 0.8) / 2 + 3) / 2 = -(0.24 + 3) / 2 = -1.62.
#   seq-mean-token-sum-norm, max_length 4: -(0.48 + 3) / (2 x 4) = -0.435.
# sequence_geometric: sqrt(2 x 1/2) = 1: terms 1, -1, 3, sum 3: -1; -(0 + 3) / 2; -3 / 8.
# sequence_arithmetic: (2 + 1/2) / 2 = 1.25 < 1.28: terms 1.25, -1.25, 3: the same sums.
# gspo_token: the value of the geometric one.
BY_HAND = {
    ("token", "token-mean"): -1.16,
    ("token", "seq-mean-token-mean"): -1.62,
    ("token", "seq-mean-token-sum-norm"): -0.435,
    ("sequence_geometric", "token-mean"): -1.0,
    ("sequence_geometric", "seq-mean-token-mean"): -1.5,
    ("sequence_geometric", "seq-mean-token-sum-norm"): -0.375,
    ("sequence_arithmetic", "token-mean"): -1.0,
    ("sequence_arithmetic", "seq-mean-token-mean"): -1.5,
    ("sequence_arithmetic", "seq-mean-token-sum-norm"): -0.375,
    ("gspo_token", "token-mean"): -1.0,
    ("gspo_token", "seq-mean-token-mean"): -1.5,
    ("gspo_token", "seq-mean-token-sum-norm"): -0.375,
}


@pytest.mark.parametrize(("level", "aggregation"), EVERY)
def test_values_by_hand(level: RatioLevel, aggregation: Aggregation) -> None:
    surrogate = Surrogate(ratio=level, aggregation=aggregation, **CLIP)
    want = BY_HAND[level, aggregation]
    got = policy_loss(NEW, OLD, A, MASK, surrogate, max_length=4)
    assert float(got) == pytest.approx(want, abs=1e-6)
    loop = policy_loss_reference(NEW, OLD, A, MASK, surrogate, max_length=4)
    assert loop == pytest.approx(want, abs=1e-6)


def test_ratios_by_hand() -> None:
    want = {
        "token": [[2.0, 0.5], [1.0, 1.0]],
        "sequence_geometric": [[1.0, 1.0], [1.0, 1.0]],
        "sequence_arithmetic": [[1.25, 1.25], [1.0, 1.0]],
        "gspo_token": [[1.0, 1.0], [1.0, 1.0]],
    }
    for level in LEVELS:
        got = importance_ratio(NEW, OLD, MASK, level)
        torch.testing.assert_close(got, torch.tensor(want[level]))


@pytest.mark.parametrize(
    ("ratio", "advantage", "term", "slope"),
    [
        # min(w A, clip(w, 0.8, 1.28) A), and its derivative in log w: w A, or 0 where clipped.
        (2.0, 1.0, 1.28, 0.0),  # too high and good: clipped at 1 + clip_high
        (1.25, 1.0, 1.25, 1.25),  # between 1.2 and 1.28: clip_high counts, not clip_low
        (0.5, 1.0, 0.5, 0.5),  # too low and good: may recover
        (0.5, -1.0, -0.8, 0.0),  # too low and bad: clipped at 1 - clip_low
        (0.75, -1.0, -0.8, 0.0),  # between 0.72 and 0.8: clip_low counts, not clip_high
        (2.0, -1.0, -2.0, -2.0),  # too high and bad: no limit
        (1.0, 1.0, 1.0, 1.0),  # on policy: the whole gradient, at the tie of both branches
        (1.0, -1.0, -1.0, -1.0),
        (2.0, 0.0, 0.0, 0.0),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_clipping_on_both_sides(
    level: RatioLevel, ratio: float, advantage: float, term: float, slope: float
) -> None:
    # One token: every level's ratio is the token's.
    new = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
    a = torch.tensor([[advantage]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.bool)
    loss, gradient = value_and_gradient(
        new, torch.zeros_like(new), a, one, Surrogate(ratio=level, **CLIP)
    )
    assert float(loss) == pytest.approx(-term, abs=1e-9)
    assert float(gradient) == pytest.approx(-slope, abs=1e-9)


@pytest.mark.parametrize("level", LEVELS)
def test_no_room_to_move_still_has_the_on_policy_gradient(level: RatioLevel) -> None:
    zero = torch.zeros(1, 1, dtype=torch.float64)
    surrogate = Surrogate(ratio=level, clip_low=0, clip_high=0)
    _, gradient = value_and_gradient(
        zero, zero, zero + 2, torch.ones(1, 1, dtype=torch.bool), surrogate
    )
    assert float(gradient) == -2.0


@pytest.mark.parametrize(("level", "aggregation"), EVERY)
@given(seed=st.integers(0, 10_000), high=st.sampled_from([0.2, 0.28, 3.0]))
@settings(max_examples=8)
def test_equals_the_loop_reference(
    level: RatioLevel, aggregation: Aggregation, seed: int, high: float
) -> None:
    new, old, advantage, mask = case(seed, dtype=torch.float32)
    surrogate = Surrogate(ratio=level, aggregation=aggregation, clip_high=high)
    got = policy_loss(new, old, advantage, mask, surrogate, max_length=9)
    want = policy_loss_reference(new, old, advantage, mask, surrogate, max_length=9)
    assert float(got) == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", ["token", "sequence_geometric", "sequence_arithmetic"])
@pytest.mark.parametrize("spread", [0.05, 0.5])  # almost nothing, and much, is clipped
def test_gradcheck(level: RatioLevel, aggregation: Aggregation, spread: float) -> None:
    new, old, advantage, mask = case(3, spread=spread)
    surrogate = Surrogate(ratio=level, aggregation=aggregation, **CLIP)

    def loss(x: Tensor) -> Tensor:
        return policy_loss(x, old, advantage, mask, surrogate, max_length=9)

    assert torch.autograd.gradcheck(loss, new.clone().requires_grad_())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gspo_token_gradient_by_hand(aggregation: Aggregation) -> None:
    # Its value stops the gradient of the sequence's ratio s on purpose, so no finite difference
    # applies: d/dlogp_it = -(c_i / D) s_i A_it where not clipped, else 0.
    new, old, advantage, mask = case(5, spread=0.5)
    _, gradient = value_and_gradient(
        new, old, advantage, mask, Surrogate("gspo_token", 0.2, 0.28, aggregation), max_length=9
    )
    denominator = float(loss_denominator(mask, aggregation, max_length=9))
    for i in range(mask.shape[0]):
        chosen = [t for t in range(mask.shape[1]) if mask[i, t]]
        n = max(len(chosen), 1)
        s = math.exp(sum(float(new[i, t] - old[i, t]) for t in chosen) / n)
        c = 1 / n if aggregation == "seq-mean-token-mean" else 1.0
        for t in range(mask.shape[1]):
            a = float(advantage[i, t])
            clipped = (s > 1.28 and a > 0) or (s < 0.8 and a < 0)
            want = 0.0 if t not in chosen or clipped else -c / denominator * s * a
            assert float(gradient[i, t]) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=20)
def test_gspo_token_is_sequence_geometric_for_a_constant_advantage(
    aggregation: Aggregation, seed: int
) -> None:
    # arXiv 2507.18071, section 4.3: same value, same clipping, same gradient.
    new, old, advantage, mask = case(seed, spread=0.5)
    constant = advantage[:, :1].expand_as(mask)
    results = [
        value_and_gradient(
            new, old, constant, mask, Surrogate(level, 0.2, 0.28, aggregation), max_length=9
        )
        for level in ("gspo_token", "sequence_geometric")
    ]
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("level", ["sequence_arithmetic", "sequence_geometric"])
def test_on_policy_a_sequence_ratio_spreads_the_mean_advantage(level: RatioLevel) -> None:
    # w_i = mean_t rho_t (or its geometric twin), rho = 1: dw_i/dlogp_it = 1/L. With 1/L per
    # response and D responses the gradient at each token is -(1/D) (1/L) mean_t(A_it).
    _, old, advantage, mask = case(7)
    _, gradient = value_and_gradient(
        old, old, advantage, mask, Surrogate(level, aggregation="seq-mean-token-mean")
    )
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = (advantage * mask).sum(dim=1, keepdim=True) / length
    want = -(mean / length) * mask / mask.any(dim=1).sum()
    torch.testing.assert_close(gradient, want)
    # And for a constant advantage (GRPO-S) that is mean_t A grad logp, plain REINFORCE.
    constant = mean.expand_as(mask)
    _, same = value_and_gradient(
        old, old, constant, mask, Surrogate("token", aggregation="seq-mean-token-mean")
    )
    torch.testing.assert_close(gradient, same)


@pytest.mark.parametrize(("level", "aggregation"), EVERY)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_micro_batches_add_up(level: RatioLevel, aggregation: Aggregation, size: int) -> None:
    new, old, advantage, mask = case(11, b=6)
    surrogate = Surrogate(ratio=level, aggregation=aggregation, **CLIP)
    whole = value_and_gradient(new, old, advantage, mask, surrogate, max_length=9)
    parts = [slice(k, k + size) for k in range(0, 6, size)]
    # The denominator of the whole, and the sum over the parts that hold a token, are the same.
    denominator = loss_denominator(mask, aggregation, max_length=9)
    summed = sum(
        float(loss_denominator(mask[p], aggregation, max_length=9)) for p in parts if mask[p].any()
    )
    assert summed == float(denominator)
    for given_denominator in (denominator, float(denominator)):
        done = [
            value_and_gradient(
                new[p], old[p], advantage[p], mask[p], surrogate, denominator=given_denominator
            )
            for p in parts
        ]
        torch.testing.assert_close(torch.stack([v for v, _ in done]).sum(), whole[0])
        torch.testing.assert_close(torch.cat([g for _, g in done]), whole[1])


@pytest.mark.parametrize(("level", "aggregation"), EVERY)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_garbage_outside_the_mask_reaches_neither_loss_nor_gradient(
    level: RatioLevel, aggregation: Aggregation, junk: float
) -> None:
    new, old, advantage, mask = case(13)
    surrogate = Surrogate(ratio=level, aggregation=aggregation)
    clean = value_and_gradient(new, old, advantage, mask, surrogate, max_length=9)
    dirty = value_and_gradient(
        *(torch.where(mask, x, junk) for x in (new, old, advantage)), mask, surrogate, max_length=9
    )
    assert torch.equal(dirty[0], clean[0]) and torch.equal(dirty[1], clean[1])
    assert not dirty[1][~mask].any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("far", [1e2, 1e4, -1e2, -1e4, 3e38])
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_extreme_ratios_stay_finite(level: RatioLevel, far: float, sign: float) -> None:
    new = torch.tensor([[far, -1.0, 0.0], [far, far, far]])
    advantage = torch.full((2, 3), sign)
    mask = torch.ones(2, 3, dtype=torch.bool)
    loss, gradient = value_and_gradient(
        new, torch.zeros(2, 3), advantage, mask, Surrogate(ratio=level)
    )
    assert loss.isfinite() and gradient.isfinite().all()


@pytest.mark.parametrize(("level", "aggregation"), EVERY)
@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_nothing_to_train_on(
    level: RatioLevel, aggregation: Aggregation, shape: tuple[int, int]
) -> None:
    x, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    surrogate = Surrogate(ratio=level, aggregation=aggregation)
    loss, gradient = value_and_gradient(x, x, x + math.nan, mask, surrogate, max_length=9)
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize(("level", "aggregation"), EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probabilities_are_computed_in_float32(
    level: RatioLevel, aggregation: Aggregation, dtype: torch.dtype
) -> None:
    # Only the input is rounded: the loss is that of the rounded numbers in float32.
    new, old, advantage, mask = (x.to(dtype) for x in case(17))
    surrogate = Surrogate(ratio=level, aggregation=aggregation)
    half, gradient = value_and_gradient(new, old, advantage, mask.bool(), surrogate, max_length=9)
    single, want = value_and_gradient(
        new.float(), old.float(), advantage.float(), mask.bool(), surrogate, max_length=9
    )
    assert half.dtype == torch.float32 and torch.equal(half, single)
    assert gradient.dtype == dtype and torch.equal(gradient, want.to(dtype))


def test_only_the_current_log_probabilities_get_a_gradient() -> None:
    new, old, advantage, mask = case(1)
    leaves = [x.clone().requires_grad_() for x in (new, old, advantage)]
    policy_loss(*leaves, mask).backward()
    assert leaves[0].grad is not None and leaves[1].grad is None and leaves[2].grad is None


GOOD = {
    "logprob": torch.zeros(2, 3),
    "old_logprob": torch.zeros(2, 3),
    "advantage": torch.zeros(2, 3),
    "mask": torch.ones(2, 3, dtype=torch.bool),
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": torch.ones(2, 3)}, ["mask", "bool", "[b, t]", "float32", "[2, 3]"]),
        ({"mask": torch.ones(6, dtype=torch.bool)}, ["mask", "[b, t]", "[6]"]),
        ({"logprob": torch.zeros(2, 4)}, ["logprob", "[2, 3]", "[2, 4]"]),
        ({"old_logprob": torch.zeros(3)}, ["old_logprob", "[2, 3]", "[3]"]),
        ({"advantage": torch.zeros(2)}, ["advantage", "[2, 3]", "[2]"]),
        ({"advantage": torch.zeros(2, 1)}, ["advantage", "[2, 3]", "[2, 1]"]),
        (
            {"surrogate": Surrogate(aggregation="seq-mean-token-sum-norm")},
            ["seq-mean-token-sum-norm", "max_length >= 1", "None"],
        ),
        (
            {"surrogate": Surrogate(aggregation="seq-mean-token-sum-norm"), "max_length": 0},
            ["max_length >= 1", "0"],
        ),
    ],
)
def test_bad_calls(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        policy_loss(**(GOOD | changes))
    message = str(caught.value)
    for word in ("policy_loss", *words):
        assert word in message, message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ratio": "sequence"}, ["ratio", "sequence_geometric", "'sequence'"]),
        ({"aggregation": "mean"}, ["aggregation", "token-mean", "'mean'"]),
        ({"clip_low": -0.1}, ["clip_low", "[0, 1]", "-0.1"]),
        ({"clip_low": 1.1}, ["clip_low", "[0, 1]", "1.1"]),
        ({"clip_high": -0.1}, ["clip_high", "-0.1"]),
        ({"clip_high": math.inf}, ["clip_high", "inf"]),
        ({"clip_low": math.nan}, ["clip_low", "nan"]),
    ],
)
def test_bad_surrogates(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        Surrogate(**options)
    for word in ("Surrogate", *words):
        assert word in str(caught.value)


def test_unknown_names_are_refused_by_the_functions_too() -> None:
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(InputError, match=r"ratio must be one of .*'sequence'"):
        importance_ratio(torch.zeros(1, 1), torch.zeros(1, 1), mask, "sequence")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"aggregation must be one of .*'mean'"):
        loss_denominator(mask, "mean")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="mask must be bool"):
        loss_denominator(torch.ones(1, 1), "token-mean")
