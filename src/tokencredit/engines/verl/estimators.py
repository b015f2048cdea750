"""Advantage estimators for verl: each builds `Rollouts`, calls `assign`, returns ``[b, t]``.

verl calls an estimator in its driver, once a step, on the whole batch: groups are whole, and no
rank or micro-batch shows. What verl knows but does not pass (entropies, scores before the KL
penalty, fields of the reward function's result) comes by `BESIDE`, which the taps set.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tokencredit.credit import Credit, assign
from tokencredit.engines.options import PREFIX
from tokencredit.engines.verl.settings import (
    BYPASS,
    KL_LOSS,
    SECTION,
    Setting,
    estimator_names,
    lookup,
    read_section,
    usable_methods,
)
from tokencredit.errors import InputError, MissingSignalError, nearest
from tokencredit.rollouts import TRUE_ABOVE, Rollouts

__all__ = [
    "BESIDE",
    "MARK",
    "Beside",
    "credit_of",
    "make_estimator",
    "register_estimators",
    "wrap",
]


@dataclass(frozen=True, eq=False)
class Beside:
    """What verl knows about a batch and does not pass to estimators; rows in the same order.

    Attributes:
        entropy: ``[b, t]``, nats, of the policy that sampled, at the sampling temperature.
        mask: ``[b, t]``, the response mask before verl's rejection sampling took tokens out of
            it. Statistics and positions are over this one.
        scores: ``[b]``, the reward function's score, before any KL penalty.
        reward_info: gives, for each row, the further fields of the reward function's result; a
            function, because few rules ask.
        report: called with the `Credit`, for logging.
    """

    entropy: Float[Tensor, "b t"] | None = None
    mask: Tensor | None = None
    scores: Float[Tensor, "b"] | None = None
    reward_info: Callable[[], Sequence[Mapping[str, Any]]] | None = None
    report: Callable[[Credit], None] | None = None


BESIDE: ContextVar[Beside] = ContextVar("tokencredit_verl_beside", default=Beside())  # noqa: B039
"""Of the batch whose advantages are being computed; frozen, so a default does no harm."""


def make_estimator(name: str, method: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The estimator that verl registers under ``name``, with the signature that verl calls."""

    def estimator(
        token_level_rewards: Float[Tensor, "b t"],
        response_mask: Tensor,
        config: Any = None,
        index: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        setting = read_section(lookup(config, "tokencredit"), name, method)
        beside = BESIDE.get()
        if (
            beside.scores is None
            and setting.rule.reads_success
            and setting.success_from is None
            and lookup(config, "use_kl_in_reward")
        ):
            raise InputError(
                f"{name}: with algorithm.use_kl_in_reward=True success is the score before the "
                "penalty, and it did not reach the estimator: this trainer has a "
                "compute_advantage of its own; name a field by "
                f"+{SECTION}.success_from=..., or set {KL_LOSS}=True instead of the penalty"
            )
        credit = credit_of(setting, token_level_rewards, response_mask, index, beside)
        if beside.report is not None:
            beside.report(credit)
        advantage = credit.advantage.to(token_level_rewards.dtype)
        return advantage, advantage

    estimator.__name__ = estimator.__qualname__ = name
    return estimator


def credit_of(
    setting: Setting,
    token_level_rewards: Float[Tensor, "b t"],
    response_mask: Tensor,
    index: Sequence[Any] | None,
    beside: Beside,
) -> Credit:
    """Credit for one batch of verl's.

    Args:
        setting: rule and source of success.
        token_level_rewards: ``[b, t]``; their sum over a row is the response's reward.
        response_mask: ``[b, t]``, 1 where the policy chose the token. An all-zero row is one of
            verl's padding rows and in no statistic.
        index: ``[b]``, verl's ``uid``: which prompt a response answers.
        beside: what verl does not pass.

    Raises:
        MissingSignalError: the rule needs entropies and there are none.
        InputError: no ``uid``, or a success field that is not there.
    """
    if index is None:
        raise InputError(
            f"{setting.estimator}: verl passed no uid, so responses have no groups; its trainers "
            "set non_tensor_batch['uid']"
        )
    rule, rewards = setting.rule, token_level_rewards.sum(dim=-1)
    mask = (response_mask if beside.mask is None else beside.mask).bool()
    entropy = None
    if setting.wants_entropy:
        if beside.entropy is None and setting.needs_entropy:
            raise MissingSignalError(
                f"{setting.estimator} needs the entropies of verl's old-log-probability pass and "
                f"got none: set {BYPASS}=False; if it is, `python -m tokencredit.engines.verl "
                "check` says whether the tap is attached, and this trainer computes advantages in "
                "a thread, twice, or by a function of its own, which the tap does not see"
            )
        if beside.entropy is not None:
            entropy = beside.entropy.to(device=mask.device, dtype=torch.float32)
    success, scored = _success(setting, rewards, mask.any(dim=1), beside)
    real = None if scored is None else scored & mask.any(dim=1)
    rollouts = Rollouts(rewards, list(index), mask, success=success, real=real, entropy=entropy)
    return assign(rollouts, rule)


def _success(
    setting: Setting, rewards: Float[Tensor, "b"], real: Bool[Tensor, "b"], beside: Beside
) -> tuple[Bool[Tensor, "b"] | None, Bool[Tensor, "b"] | None]:
    """Whether each response is right, and whether that is known; None = the default."""
    if not setting.rule.reads_success:
        return None, None
    field = setting.success_from
    if field is None:
        scores = rewards if beside.scores is None else beside.scores.to(rewards.device)
        return scores > TRUE_ABOVE, None
    if beside.reward_info is None:
        raise InputError(
            f"{SECTION}.success_from={field}: the reward function's results did not reach the "
            "estimator; `python -m tokencredit.engines.verl check` says whether the tap is attached"
        )
    rows = list(zip(beside.reward_info(), real.tolist(), strict=True))
    have = sum(field in info for info, is_real in rows if is_real)
    verdict = torch.tensor(
        [
            _verdict(info, field, f"response {i}", have) if is_real else math.nan
            for i, (info, is_real) in enumerate(rows)
        ],
        device=rewards.device,
    )
    return verdict > TRUE_ABOVE, ~verdict.isnan()


def _verdict(info: Mapping[str, Any], field: str, which: str, have: int) -> float:
    if field not in info:
        there = ", ".join(map(str, info)) or "none (it returns a number: let it return a dict)"
        others = f", which {have} other responses have" if have else nearest(field, map(str, info))
        raise InputError(
            f"{SECTION}.success_from={field}: the reward function's result for {which} has no "
            f"such field{others}; fields: {there}"
        )
    value = info[field]
    if value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        shown = " ".join(repr(value).split())[:60]
        raise InputError(
            f"{SECTION}.success_from={field}: must be true, false or a number, got {shown} "
            f"for {which}"
        ) from None


def register_estimators() -> dict[str, str]:
    """Register every usable method with verl as ``tokencredit_NAME``; all names and their methods.

    The bare names are among them as long as nobody else has them: they are looked up and take no
    place in verl's registry, so that a program's or a plugin's own estimator of that name is not
    in the way of ours, nor ours of it. Calling it again changes nothing.
    """
    from verl.trainer.ppo import core_algos

    registry = core_algos.ADV_ESTIMATOR_REGISTRY
    for method in usable_methods():
        name = PREFIX + method
        if name not in registry:
            core_algos.register_adv_est(name)(make_estimator(name, method))
    wrap(core_algos, "get_adv_estimator_fn", _with_bare_names)
    return estimator_names(registry)


def _with_bare_names(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_adv_estimator_fn(name_or_enum: Any) -> Any:
        name = str(getattr(name_or_enum, "value", name_or_enum))
        method = register_estimators().get(name)
        return original(name_or_enum if method is None else PREFIX + method)

    return get_adv_estimator_fn


MARK = "_tokencredit_tap"
"""On every function of verl's that is wrapped."""


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap a function of verl's, once, wherever it has been imported by its name.

    A module may have taken it before: a trainer of the user's, loaded ahead of verl's plugins.
    """
    original = getattr(owner, name)
    if hasattr(original, MARK):
        return
    wrapped = wraps(original)(make(original))
    setattr(wrapped, MARK, True)
    setattr(owner, name, wrapped)
    if inspect.isclass(owner):
        return
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapped)
