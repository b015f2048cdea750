"""Advantage estimators for SkyRL: each builds `Rollouts`, calls `assign`, returns ``[b, t]``.

SkyRL calls an estimator in its trainer, once a step, on the whole batch: groups are whole. Its
tensors are padded on the left, its groups are named by strings. What it knows and does not pass
comes by `BESIDE`, which the trainer of `credit_trainer` sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tokencredit.credit import Credit, assign
from tokencredit.engines.options import loss_mode
from tokencredit.engines.skyrl.settings import ESTIMATOR, estimator_names, setting_of
from tokencredit.engines.skyrl.surrogates import policy_loss
from tokencredit.errors import InputError, MissingSignalError
from tokencredit.losses import RatioLevel
from tokencredit.rollouts import TRUE_ABOVE, Rollouts

__all__ = ["BESIDE", "Beside", "estimate", "register"]


@dataclass(frozen=True, eq=False)
class Beside:
    """What SkyRL knows about a batch and does not pass to estimators; rows in the same order.

    Attributes:
        entropy: ``[b, t]``, nats, at the sampling temperature.
        mask: ``[b, t]``, the tokens that the policy chose. SkyRL's response mask has those of
            tools and environments as well.
        scores: ``[b]``, rewards before any KL penalty.
        real: ``[b]``, False where a row repeats another to fill a batch.
        report: called with the `Credit`, for logging.
    """

    entropy: Float[Tensor, "b t"] | None = None
    mask: Tensor | None = None
    scores: Float[Tensor, "b"] | None = None
    real: Tensor | None = None
    report: Callable[[Credit], None] | None = None


BESIDE: ContextVar[Beside] = ContextVar("tokencredit_skyrl_beside", default=Beside())  # noqa: B039
"""Of the batch whose advantages are being computed; frozen, so a default does no harm."""


def estimate(
    token_level_rewards: Float[Tensor, "b t"],
    response_mask: Tensor,
    index: Sequence[str] | None = None,
    config: Any = None,
    *,
    name: str,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The estimator that SkyRL calls, for the method that is registered under ``name``.

    Args:
        token_level_rewards: ``[b, t]``; their sum over a row is the response's reward.
        response_mask: ``[b, t]``, 1 on a response's tokens, wherever the padding is.
        index: ``[b]``, SkyRL's ``uids``: which prompt a response answers.
        config: ``trainer.algorithm``.
        name: the estimator's name.

    Returns:
        Advantages, and the same tensor as returns.

    Raises:
        MissingSignalError: the rule needs entropies and there are none.
        InputError: no ``uids``, or options that do not exist.
    """
    setting, beside = setting_of(partial_config(config, name)), BESIDE.get()
    if setting is None:
        raise InputError(
            f"{name}: its rule is not registered in this process; import its module where the "
            "trainer is made"
        )
    if index is None:
        raise InputError(f"{name}: SkyRL passed no uids, so responses have no groups")
    rewards = token_level_rewards.sum(dim=-1)
    mask = (response_mask if beside.mask is None else beside.mask).bool()
    entropy = None
    if setting.wants_entropy:
        if beside.entropy is None and setting.needs_entropy:
            raise MissingSignalError(
                f"{ESTIMATOR}={name} needs entropies, which SkyRL's trainer does not form: start "
                "with `python -m tokencredit.engines.skyrl` in place of "
                "skyrl.train.entrypoints.main_base, or make "
                "tokencredit.engines.skyrl.credit_trainer of your trainer"
            )
        if beside.entropy is not None:
            entropy = beside.entropy.to(device=mask.device, dtype=torch.float32)
    scores = rewards if beside.scores is None else beside.scores.to(rewards.device)
    real = mask.any(dim=1)
    if beside.real is not None:
        real = real & beside.real.to(real.device)
    rollouts = Rollouts(
        rewards, list(index), mask, success=scores > TRUE_ABOVE, real=real, entropy=entropy
    )
    credit = assign(rollouts, setting.rule)
    if beside.report is not None:
        beside.report(credit)
    advantage = credit.advantage.to(token_level_rewards.dtype)
    return advantage, advantage


@dataclass(frozen=True)
class _Algorithm:
    advantage_estimator: str
    tokencredit: Any


def partial_config(config: Any, name: str) -> _Algorithm:
    """``trainer.algorithm`` as far as credit is concerned, with the name that was called."""
    return _Algorithm(name, getattr(config, "tokencredit", None))


def register() -> dict[str, str]:
    """Register every usable method and policy loss with SkyRL; estimators and their methods.

    Call it before SkyRL's ``validate_cfg``, which asks for the names, and ``initialize_ray``, which
    copies them to every process. Under ``tokencredit_NAME``, and under the bare name where SkyRL
    has none. Calling it again changes nothing.

    Where SkyRL's registry is synchronised, functions travel as references to this package: it must
    be installed on every node.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import (
        AdvantageEstimatorRegistry,
        PolicyLossRegistry,
        repopulate_all_registries,
    )

    repopulate_all_registries()  # SkyRL's own first, so that ours do not take their names
    there = AdvantageEstimatorRegistry.list_available()
    for name in estimator_names():
        if name not in there:
            AdvantageEstimatorRegistry.register(name, partial(estimate, name=name))
    there = PolicyLossRegistry.list_available()
    for level in get_args(RatioLevel):
        if loss_mode(level) not in there:
            PolicyLossRegistry.register(loss_mode(level), partial(policy_loss, level=level))
    return {
        name: method
        for name, method in estimator_names().items()
        if getattr(AdvantageEstimatorRegistry.get(name), "func", None) is estimate
    }
