"""The ratio levels of `tokencredit.losses` as policy losses of verl.

The ratio and the clip are tokencredit's, the aggregation is verl's own ``agg_loss`` with its
global batch information, so micro-batches and ranks add up as they do for verl's losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tokencredit.engines.options import loss_mode
from tokencredit.errors import InputError
from tokencredit.losses import LOG_RATIO_LIMIT, RatioLevel, importance_ratio

__all__ = ["clip_range", "make_policy_loss", "register_policy_losses"]


def clip_range(config: Any) -> tuple[float, float]:
    """The clip distances of an actor configuration; where one is unset, ``clip_ratio``."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (
        config.clip_ratio if low is None else low,
        config.clip_ratio if high is None else high,
    )


def make_policy_loss(level: RatioLevel) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """A policy loss for verl with tokencredit's ratio: its signature, its metrics' names.

    The clip is ``actor.clip_ratio_low`` and ``clip_ratio_high``. There is no second clip for
    negative advantages (``clip_ratio_c``): neither paper has one, nor has verl's ``gspo``.

    Raises:
        InputError: when called without an actor configuration.

    Source: arXiv 2508.04349, Eqs. 7, 10, 11; see `importance_ratio`.
    """

    def policy_loss(
        old_log_prob: Float[Tensor, "b t"],
        log_prob: Float[Tensor, "b t"],
        advantages: Float[Tensor, "b t"],
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        from verl.trainer.ppo.core_algos import agg_loss

        if config is None:
            raise InputError(f"{loss_mode(level)}: verl passed no actor configuration")
        mask = response_mask.bool()
        low, high = clip_range(config)
        ratio = importance_ratio(log_prob, old_log_prob, mask, level)
        credit = torch.where(mask, advantages.detach(), 0.0)
        plain, clipped = -ratio * credit, -ratio.clamp(1 - low, 1 + high) * credit
        losses = torch.maximum(plain, clipped)
        if rollout_is_weights is not None:
            losses = losses * torch.where(mask, rollout_is_weights, 0.0)
        loss = agg_loss(
            loss_mat=losses,
            loss_mask=mask,
            loss_agg_mode=loss_agg_mode,
            **config.global_batch_info,
        )
        with torch.no_grad():
            tokens = mask.sum().clamp(min=1)
            moved = torch.where(mask, log_prob - old_log_prob, 0.0)
            kl = -moved.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).sum() / tokens
            metrics = {
                "actor/pg_clipfrac": ((clipped > plain) & mask).sum().div(tokens).item(),
                "actor/ppo_kl": kl.item(),
                "actor/pg_clipfrac_lower": 0.0,
            }
        return loss, metrics

    policy_loss.__name__ = policy_loss.__qualname__ = loss_mode(level)
    return policy_loss


def register_policy_losses() -> tuple[str, ...]:
    """Register a policy loss for every ratio level with verl; their names."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    names = tuple(loss_mode(level) for level in get_args(RatioLevel))
    for name, level in zip(names, get_args(RatioLevel), strict=True):
        if name not in POLICY_LOSS_REGISTRY:
            register_policy_loss(name)(make_policy_loss(level))
    return names
