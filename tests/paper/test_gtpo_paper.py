"""GTPO and GRPO-S against numbers that follow from arXiv 2508.04349 by hand."""

import math
from typing import Any

import pytest
import torch

from tokencredit import GRPO_S, GTPO, Rollouts, Surrogate, assign, importance_ratio

# Two right responses with entropies [3, 1] and [1, 3], two wrong ones with [4, 1] and [1, 4].
ENTROPY = torch.tensor([[3.0, 1.0], [1.0, 3.0], [4.0, 1.0], [1.0, 4.0]])
WORKED = Rollouts(
    [1.0, 1.0, 0.0, 0.0], ["q"] * 4, torch.ones(4, 2, dtype=torch.bool), entropy=ENTROPY
)


def test_worked_shaped_rewards() -> None:
    # Eq. 3, alpha = (1, 0.1). Right, t = 1: shares 3/4 and 1/4 of d_1 = 2, so 1 + 0.1 x 1.5 and
    # 1 + 0.1 x 0.5. Wrong, t = 1: 1/H = 1/4 and 1, shares 1/5 and 4/5 of h_1 = 2, so
    # -(1 + 0.1 x 0.4) and -(1 + 0.1 x 1.6).
    want = [[1.15, 1.05], [1.05, 1.15], [-1.04, -1.16], [-1.16, -1.04]]
    for credit in (assign(WORKED, GTPO(alpha1=1.0, alpha2=0.1)), assign(WORKED, "gtpo")):
        torch.testing.assert_close(credit.reward, torch.tensor(want))


def test_worked_advantages() -> None:
    # joint: mean 0. Squares, twice each: 1.3225, 1.1025, 1.0816, 1.3456, sum 4.8522 x 2 = 9.7044;
    # 8 tokens: variance 9.7044 / 8 = 1.21305 (correction 0), 9.7044 / 7 (correction 1).
    for correction, n in ((0, 8), (1, 7)):
        credit = assign(WORKED, "gtpo", correction=correction)
        assert credit.reward is not None
        torch.testing.assert_close(credit.advantage, credit.reward / math.sqrt(9.7044 / n))
    # zero_filled, right side: four rewards and four zeros: mean 4.4 / 8 = 0.55, mean square
    # 2 (1.3225 + 1.1025) / 8 = 0.60625, variance 0.60625 - 0.3025 = 0.30375.
    credit = assign(WORKED, "gtpo", normalise="zero_filled", correction=0)
    assert float(credit.advantage[0, 0]) == pytest.approx((1.15 - 0.55) / math.sqrt(0.30375))
    # own_set, right side: 1.15 and 1.05 about 1.1: +1 and -1. Wrong side: about -1.1 by 0.06.
    credit = assign(WORKED, "gtpo", normalise="own_set", correction=0)
    want = [[1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, 1.0]]
    torch.testing.assert_close(credit.advantage, torch.tensor(want), rtol=1e-5, atol=1e-5)


def test_worked_grpo_s() -> None:
    # Mean entropies: right 3 and 1, wrong 4 and 1: as position 1 above.
    rollouts = Rollouts(
        [1.0, 1.0, 0.0, 0.0],
        ["q"] * 4,
        torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0]]),
        entropy=torch.tensor([[2.0, 4.0], [1.0, 0.0], [5.0, 3.0], [1.0, 0.0]]),
    )
    credit = assign(rollouts, GRPO_S(beta1=1.0, beta2=0.1, correction=0))
    want = torch.tensor([1.15, 1.05, -1.04, -1.16])
    torch.testing.assert_close(credit.reward, want)
    std = math.sqrt(4.8522 / 4)  # mean 0
    torch.testing.assert_close(credit.advantage[:, 0], want / std)
    # zero_filled (B.6): right 1.15, 1.05, 0, 0: mean 0.55, variance 2.425 / 4 - 0.3025 = 0.30375.
    credit = assign(rollouts, GRPO_S(normalise="zero_filled", correction=0))
    assert float(credit.advantage[0, 0]) == pytest.approx(0.6 / math.sqrt(0.30375))


def test_sequence_ratio() -> None:
    # Eq. 11: the arithmetic mean of the token ratios 1.2, 0.9 and 0.6.
    ratio = torch.tensor([[1.2, 0.9, 0.6]])
    got = importance_ratio(
        ratio.log(), torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), "sequence_arithmetic"
    )
    torch.testing.assert_close(got, torch.full((1, 3), 0.9))
    assert GRPO_S().recipe.surrogate == Surrogate(
        "sequence_arithmetic", aggregation="seq-mean-token-mean"
    )


def lopsided(right: int, size: int) -> Rollouts:
    """``right`` of ``size`` one-token responses are right; one of each side takes the whole share.

    The entropies are as extreme as they get: among the right, one is certain of everything else's
    share (its H dwarfs the others'), among the wrong likewise by 1/H. The others are left with the
    smallest rewards that the formula can give, alpha1 and -alpha1.
    """
    wrong = size - right
    entropy = [1e4] + [1e-6] * (right - 1) + [1e-6] + [1e4] * (wrong - 1)
    rewards = [1.0] * right + [0.0] * wrong
    return Rollouts(
        rewards, ["q"] * size, torch.ones(size, 1), entropy=torch.tensor(entropy).unsqueeze(1)
    )


def keeps_the_sign(right: int, size: int, normalise: str) -> bool:
    rollouts = lopsided(right, size)
    credit = assign(rollouts, "gtpo", normalise=normalise)
    good = credit.advantage[:, 0] * torch.where(rollouts.success, 1.0, -1.0)
    return bool((good > 0).all())


@pytest.mark.parametrize("size", [20, 50])
def test_the_readings_keep_the_sign_of_correctness_for_these_shares_of_right_tokens(
    size: int,
) -> None:
    # pi = share of the group's tokens that are right. By conservation the mean shaped reward of
    # right tokens is S = alpha1 + alpha2, of wrong ones -S, whatever the entropies; the smallest
    # reward of a right token is alpha1, the largest of a wrong one -alpha1.
    # zero_filled: mean of the right pool pi S, so all right tokens stay positive if alpha1 > pi S;
    #   of the wrong pool -(1 - pi) S, so all wrong ones stay negative if alpha1 > (1 - pi) S:
    #   alpha2 / S < pi < alpha1 / S.
    # joint: mean (2 pi - 1) S: alpha1 > (2 pi - 1) S and -alpha1 < (2 pi - 1) S:
    #   |2 pi - 1| < alpha1 / S.
    # At alpha = (1, 0.1): 1/11 < pi < 10/11, and 1/22 < pi < 21/22. The entropies are the worst
    # case, so outside the range the sign is lost.
    for right in range(1, size):
        pi = right / size
        assert keeps_the_sign(right, size, "zero_filled") == (1 / 11 < pi < 10 / 11), right
        assert keeps_the_sign(right, size, "joint") == (abs(2 * pi - 1) < 10 / 11), right


def test_the_own_set_reading_erases_correctness_and_the_alphas() -> None:
    # (r - mean) / std within a side: alpha1 is a shift and alpha2 a factor; both cancel. The mean
    # advantage of either side is 0, so some right token is pushed down.
    rollouts = lopsided(5, 10)
    credit = assign(rollouts, "gtpo", normalise="own_set")
    other = assign(rollouts, "gtpo", normalise="own_set", alpha1=0.3, alpha2=0.7)
    torch.testing.assert_close(credit.advantage, other.advantage, rtol=1e-4, atol=1e-4)
    assert float(credit.advantage[:5].mean()) == pytest.approx(0, abs=1e-5)
    assert float(credit.advantage[5:].mean()) == pytest.approx(0, abs=1e-5)
    assert not keeps_the_sign(5, 10, "own_set")


@pytest.mark.parametrize("normalise", ["joint", "zero_filled"])
def test_without_entropy_the_readings_meet_in_token_level_grpo(normalise: str) -> None:
    # Right lengths 3 and 1, wrong 2: pi = 4/6. (1 - pi) / sqrt(pi (1 - pi)) = sqrt((1 - pi) / pi)
    # = sqrt(1/2); wrong: -sqrt(pi / (1 - pi)) = -sqrt(2). GRPO over responses has sqrt(1/2) too
    # here (2 of 3 right); lengths 4 and 1 tell them apart: pi = 5/7, sqrt(2/5).
    for first, want in ((3, math.sqrt(1 / 2)), (4, math.sqrt(2 / 5))):
        mask = torch.arange(4) < torch.tensor([[first], [1], [2]])
        rollouts = Rollouts([1.0, 1.0, 0.0], ["q"] * 3, mask, entropy=torch.rand(3, 4) + 0.1)
        options: dict[str, Any] = {"alpha2": 0.0, "normalise": normalise, "correction": 0}
        credit = assign(rollouts, "gtpo", **options)
        side = torch.tensor([want, want, -1 / want])
        torch.testing.assert_close(credit.advantage, side.unsqueeze(1) * mask)


def test_the_entropy_clamp_makes_shares_nearly_uniform() -> None:
    # Clamped to [0.2, 0.28]. Right: H -> 0.2 and 0.28, shares 2 x 0.2/0.48 and 2 x 0.28/0.48:
    # 1 + 0.1 x 0.8333 and 1 + 0.1 x 1.1667. Wrong: 1/H shares are the same, crossed over.
    rollouts = Rollouts(
        [1.0, 1.0, 0.0, 0.0],
        ["q"] * 4,
        torch.ones(4, 1),
        entropy=torch.tensor([[0.0], [5.0], [0.01], [9.0]]),
    )
    credit = assign(rollouts, "gtpo", entropy_range=(0.2, 0.28))
    want = torch.tensor([[1 + 1 / 12], [1 + 7 / 60], [-1 - 7 / 60], [-1 - 1 / 12]])
    torch.testing.assert_close(credit.reward, want)
    # However many peers: H / mean(H) lies in (0.2/0.28, 0.28/0.2), so rewards in (1.0714, 1.14).
    many = lopsided(30, 60)
    credit = assign(many, "gtpo", entropy_range=(0.2, 0.28))
    assert credit.reward is not None
    size = credit.reward.abs()
    assert float(size.min()) > 1 + 0.1 / 1.4 and float(size.max()) < 1 + 0.1 * 1.4


def test_zero_entropy_edge_cases() -> None:
    # All right responses certain at t: the uniform share, alpha1 + alpha2, mass conserved.
    # One wrong response certain, h_t = 2: it takes (nearly) all: -(1 + 0.1 x 2), the other -1.
    rollouts = Rollouts(
        [1.0, 1.0, 0.0, 0.0],
        ["q"] * 4,
        torch.ones(4, 1),
        entropy=torch.tensor([[0.0], [0.0], [0.0], [1.0]]),
    )
    credit = assign(rollouts, "gtpo")
    want = torch.tensor([[1.1], [1.1], [-1.2], [-1.0]])
    torch.testing.assert_close(credit.reward, want, rtol=0, atol=1e-6)


def test_defaults_are_the_papers_settings() -> None:
    # Section 4: alpha1 = beta1 = 1, alpha2 = beta2 = 0.1.
    assert (GTPO().alpha1, GTPO().alpha2) == (1.0, 0.1)
    assert (GRPO_S().beta1, GRPO_S().beta2) == (1.0, 0.1)
