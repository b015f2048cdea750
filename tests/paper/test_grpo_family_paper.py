"""GRPO, Dr. GRPO and DAPO against numbers that follow from their papers."""

import math

import pytest
import torch

from tokencredit import (
    DAPO,
    Rollouts,
    Surrogate,
    assign,
    loss_denominator,
    policy_loss,
    soft_overlong_punishment,
)


@pytest.mark.parametrize("size", [2, 5, 16])
def test_grpo_with_binary_rewards(size: int) -> None:
    # arXiv 2402.03300, population std: mean p, std sqrt(p (1 - p)), so right answers get
    # (1 - p) / sqrt(p (1 - p)) = sqrt((1 - p) / p) and wrong ones -sqrt(p / (1 - p)).
    for right in range(1, size):
        p = right / size
        rewards = torch.tensor([1.0] * right + [0.0] * (size - right))
        credit = assign(Rollouts(rewards, [0] * size, torch.ones(size, 1)), "grpo", correction=0)
        want = torch.where(rewards > 0, math.sqrt((1 - p) / p), -math.sqrt(p / (1 - p)))
        torch.testing.assert_close(credit.base, want)
        # torch.std's default divides by n - 1 instead: a factor sqrt((n - 1) / n).
        other = assign(Rollouts(rewards, [0] * size, torch.ones(size, 1)), "grpo")
        torch.testing.assert_close(other.base, want * math.sqrt((size - 1) / size))


def test_dr_grpo_is_rloo_up_to_a_factor() -> None:
    # r_i - mean of the others = r_i - (G m - r_i) / (G - 1) = G / (G - 1) (r_i - m).
    rewards = torch.tensor([0.3, -1.2, 2.0, 0.7, 0.0])
    size = len(rewards)
    rloo = rewards - (rewards.sum() - rewards) / (size - 1)
    credit = assign(Rollouts(rewards, [0] * size, torch.ones(size, 3)), "dr_grpo")
    torch.testing.assert_close(credit.base, (size - 1) / size * rloo)


def test_dr_grpo_loss_divides_by_the_budget() -> None:
    # arXiv 2503.20783: (1/G) sum_i (1/C) sum_t. On policy, A = +-0.5 (rewards 1, 0), lengths 3, 1,
    # C = 10: loss -(3 x 0.5 - 1 x 0.5) / (2 x 10) = -0.05.
    mask = torch.tensor([[True, True, True], [True, False, False]])
    credit = assign(Rollouts([1.0, 0.0], [0, 0], mask), "dr_grpo")
    zero = torch.zeros(2, 3)
    surrogate = Surrogate(aggregation="seq-mean-token-sum-norm")
    loss = policy_loss(zero, zero, credit.advantage, mask, surrogate, max_length=10)
    assert float(loss) == pytest.approx(-0.05)


def test_dapo_soft_overlong_punishment() -> None:
    # arXiv 2503.14476, Eq. 13, with its values: L_max 20480, L_cache 4096, so from 16384 on.
    # 18432 is half-way: -0.5. 16385: -1/4096. Beyond L_max: -1.
    length = torch.tensor([0, 1000, 16384, 16385, 18432, 20480, 20481, 99999])
    want = torch.tensor([0.0, 0.0, 0.0, -1 / 4096, -0.5, -1.0, -1.0, -1.0])
    got = soft_overlong_punishment(length, max_length=20480, cache=4096)
    torch.testing.assert_close(got, want)


def test_dapo_punishment_leaves_success_and_filter_alone() -> None:
    # All four right; the punishment makes their rewards differ and drops two below 0.5.
    length = torch.tensor([10, 90, 100, 120])
    rewards = 1 + soft_overlong_punishment(length, max_length=100, cache=20)
    rollouts = Rollouts(rewards, [0] * 4, torch.ones(4, 1), success=[True] * 4)
    assert rewards.tolist() == [1.0, 0.5, 0.0, 0.0]
    assert not assign(rollouts, "dapo").in_loss.any()


def test_dapo_drops_uniform_groups_from_the_denominator() -> None:
    # Groups: right and wrong (tokens 2 + 1), all right (3 + 3). The token mean is over 3 tokens.
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 1]]).bool()
    credit = assign(Rollouts([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], mask), DAPO(correction=0))
    trained = mask & credit.in_loss.unsqueeze(1)
    assert float(loss_denominator(trained, "token-mean")) == 3.0
    zero = torch.zeros(4, 3)
    loss = policy_loss(zero, zero, credit.advantage, trained, DAPO().recipe.surrogate)
    assert float(loss) == pytest.approx(-(2 * 1.0 + 1 * -1.0) / 3)


def test_dapo_clip_higher() -> None:
    # eps_low 0.2, eps_high 0.28: a good token's ratio counts up to 1.28, a bad one's down to 0.8.
    surrogate = DAPO().recipe.surrogate
    new = torch.tensor([[math.log(1.5), math.log(0.5)]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss = policy_loss(new, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), mask, surrogate)
    assert float(loss) == pytest.approx(-(1.28 - 0.8) / 2)
