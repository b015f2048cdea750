"""The ratio levels of `tokencredit.losses` as policy losses of SkyRL.

SkyRL scales advantages beforehand so that a sum over tokens is the reduction that
``trainer.algorithm.loss_reduction`` names; ratio and clip are tokencredit's, the off-policy
correction and the sum are SkyRL's own functions.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tokencredit.losses import RatioLevel, importance_ratio

__all__ = ["policy_loss"]


def policy_loss(
    log_probs: Float[Tensor, "b t"],
    old_log_probs: Float[Tensor, "b t"],
    advantages: Float[Tensor, "b t"],
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Float[Tensor, "b t"] | None = None,
    *,
    level: RatioLevel,
) -> tuple[Tensor, dict[str, float]]:
    """PPO's clipped loss with tokencredit's ratio, in the signature that SkyRL calls.

    The clip is ``trainer.algorithm.eps_clip_low`` and ``eps_clip_high``; there is no second clip.

    Source: arXiv 2508.04349, Eqs. 7, 10, 11; see `importance_ratio`.
    """
    from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import (
        apply_off_policy_correction,
    )
    from skyrl.backends.skyrl_train.utils.ppo_utils import reduce_loss

    mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask > 0
    ratio = importance_ratio(log_probs, old_log_probs, mask, level)
    credit = torch.where(mask, advantages.detach(), 0.0)
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    losses = torch.maximum(-ratio * credit, -clipped * credit)
    with torch.no_grad():
        moved = ((-clipped * credit > -ratio * credit) & mask).sum()
        metrics = {"clip_ratio": (moved / mask.sum().clamp(min=1)).item()}
    losses, loss_mask, more = apply_off_policy_correction(
        losses, old_log_probs, rollout_logprobs, loss_mask, config.off_policy_correction
    )
    return reduce_loss(losses, loss_mask), metrics | more
