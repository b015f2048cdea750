"""The policy losses, against `tokencredit.losses` and against verl's own."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: `make verl` makes its environment")

from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from tokencredit import InputError, Surrogate, loss_denominator, policy_loss
from tokencredit.losses import RatioLevel

LEVELS = get_args(RatioLevel)
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]).bool()


def actor(**changes: Any) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        use_dynamic_bsz=True,
        **changes,
    )
    config.global_batch_info["loss_scale_factor"] = config.loss_scale_factor
    return config


def tensors(seed: int = 0, scale: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(4, 4, generator=generator) - 0.5
    new = old + scale * torch.randn(4, 4, generator=generator)
    return old, new.requires_grad_(), torch.randn(4, 4, generator=generator)


def run(
    name: str, aggregation: str, config: ActorConfig, *, rows: slice = slice(None), **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    old, new, advantage = tensors()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=old[rows],
        log_prob=new[rows],
        advantages=advantage[rows],
        response_mask=MASK[rows],
        loss_agg_mode=aggregation,
        config=config,
        rollout_is_weights=kwargs.get("weights"),
    )
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.detach(), gradient, metrics


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_the_loss_of_tokencredit(level, aggregation):
    config = actor(clip_ratio_low=0.1, clip_ratio_high=0.25, loss_scale_factor=16)
    loss, gradient, _ = run(f"tokencredit_{level}", aggregation, config)
    old, new, advantage = tensors()
    surrogate = Surrogate(level, 0.1, 0.25, aggregation)
    want = policy_loss(new, old, advantage, MASK, surrogate, max_length=16)
    (want_gradient,) = torch.autograd.grad(want, new)
    assert torch.allclose(loss, want.detach(), atol=1e-6)
    assert torch.allclose(gradient, want_gradient, atol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_token_level_is_verls_vanilla(aggregation):
    # clip_ratio_c, which only vanilla has, bites at ratios above 3: there are none here.
    config = actor(clip_ratio_low=0.1, clip_ratio_high=0.25)
    ours, theirs = (run(name, aggregation, config) for name in ("tokencredit_token", "vanilla"))
    for mine, verls in zip(ours[:2], theirs[:2], strict=True):
        assert torch.allclose(mine, verls, atol=1e-6)
    assert ours[2] == pytest.approx(theirs[2], abs=1e-6)


def test_gspo_token_is_verls_gspo():
    config = actor()
    # The aggregation that verl 0.9.0 takes for it whatever is asked for.
    mode = "seq-mean-token-mean"
    ours, theirs = (run(n, mode, config) for n in ("tokencredit_gspo_token", "gspo"))
    assert torch.allclose(ours[0], theirs[0], atol=1e-6)
    assert torch.allclose(ours[1], theirs[1], atol=1e-6)
    assert ours[2] == pytest.approx({k: float(v) for k, v in theirs[2].items()}, abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS[:2])
@pytest.mark.parametrize("level", LEVELS)
def test_micro_batches_and_ranks_add_up_as_verls_do(level, aggregation):
    """Two ranks of one micro-batch each, gradients averaged: the loss of the whole batch."""
    config = actor()
    whole, gradient, _ = run(f"tokencredit_{level}", aggregation, config)
    config.global_batch_info.update(
        dp_size=2,
        batch_num_tokens=int(MASK.sum()),
        global_batch_size=int(loss_denominator(MASK, "seq-mean-token-mean")),
    )
    parts = [
        run(f"tokencredit_{level}", aggregation, config, rows=rows)
        for rows in (slice(0, 2), slice(2, 4))
    ]
    assert torch.allclose(sum(p[0] for p in parts) / 2, whole, atol=1e-6)
    assert torch.allclose(sum(p[1] for p in parts) / 2, gradient, atol=1e-6)


def test_verls_importance_weights_multiply_token_losses():
    config = actor()
    plain, _, _ = run("tokencredit_sequence_arithmetic", "token-mean", config)
    twice, _, _ = run("tokencredit_sequence_arithmetic", "token-mean", config,
                      weights=torch.full((4, 4), 2.0))  # fmt: skip
    assert torch.allclose(twice, 2 * plain)


def test_a_clip_that_is_unset_is_clip_ratio():
    unset = actor(clip_ratio=0.05, clip_ratio_low=None, clip_ratio_high=None)
    given = actor(clip_ratio_low=0.05, clip_ratio_high=0.05)
    for name in ("tokencredit_token", "tokencredit_sequence_arithmetic"):
        assert run(name, "token-mean", unset)[0] == run(name, "token-mean", given)[0]


def test_without_a_configuration_there_is_no_clip():
    old, new, advantage = tensors()
    with pytest.raises(InputError, match="actor configuration"):
        get_policy_loss_fn("tokencredit_token")(old, new, advantage, MASK)
