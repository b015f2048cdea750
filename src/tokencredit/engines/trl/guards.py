"""What a rule demands of a TRL configuration, what it recommends, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

import torch
from packaging.version import Version

from tokencredit.errors import InputError
from tokencredit.methods.rule import Rule

__all__ = ["apply_requirements", "check_trainer", "check_versions", "recommended_config"]

logger = logging.getLogger("tokencredit")

OLDEST_TRL = Version("1.14")
RATIO_LEVEL = {
    "token": "token",
    "sequence_geometric": "sequence",
    "sequence_arithmetic": "sequence",
}
LOSS_TYPE = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
}
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def check_versions() -> None:
    """Refuse TRL releases that cannot carry token-level credit."""
    import trl

    found = Version(trl.__version__)
    if found < OLDEST_TRL:
        raise InputError(
            f"tokencredit.engines.trl needs trl>={OLDEST_TRL}, found {found}: "
            "pip install 'trl>=1.14,!=1.15.0'"
        )
    if found == Version("1.15.0") and not torch.cuda.is_available():
        raise InputError(
            "trl 1.15.0 cannot run GRPO without a GPU (its own fault, mended in 1.16.0): "
            "pip install 'trl>=1.16'"
        )


def check_trainer(trainer: object) -> None:
    """Refuse trainers whose loss would not use token-level advantages."""
    for cls in type(trainer).__mro__:
        if cls.__name__ == "GMPOTrainer":
            raise InputError(
                "TokenCreditMixin: trl's GMPOTrainer has a loss of its own that takes one "
                "advantage a response; use GRPOTrainer"
            )
        if cls.__name__.startswith("Unsloth"):
            raise InputError(
                "TokenCreditMixin: Unsloth replaces TRL's loss by generated code that takes one "
                "advantage a response; import trl without unsloth"
            )


def apply_requirements(args: Any, rule: Rule, *, explicit: Collection[str] = ()) -> list[str]:
    """Set what the rule requires of a `GRPOConfig`, in place; refuse what contradicts it.

    Args:
        args: a ``trl.GRPOConfig``.
        rule: the credit rule.
        explicit: names of fields that the user set on purpose: those are refused, not changed.
            (A field that differs from TRL's default is always taken as set on purpose.)

    Returns:
        One line for each field that was set.

    Raises:
        InputError: the configuration contradicts the rule.
    """
    surrogate = rule.recipe.surrogate
    changes: list[str] = []
    level = args.importance_sampling_level
    if surrogate.ratio == "gspo_token":
        raise InputError(f"{rule.name}: TRL has no gspo_token ratio; see tokencredit.policy_loss")
    wanted = RATIO_LEVEL[surrogate.ratio]
    if rule.recipe.ratio_required and level != wanted:
        if level != "token" or "importance_sampling_level" in explicit:
            why = (
                "a sequence-level ratio averages token-level credit away"
                if wanted == "token"
                else "its ratio is formed over the whole response"
            )
            raise InputError(
                f"{rule.name}: importance_sampling_level must be {wanted!r}, got {level!r} ({why})"
            )
        args.importance_sampling_level = wanted
        changes.append(f"importance_sampling_level={wanted} (required by {rule.name})")
    if rule.recipe.ratio_required and surrogate.ratio == "sequence_arithmetic":
        _check_arithmetic(args, rule)
    if rule.recipe.ratio_required and surrogate.ratio == "token":
        if args.off_policy_mask_threshold is not None:
            logger.warning(
                "%s: off_policy_mask_threshold masks the negative tokens of an off-policy "
                "response, not the whole response, when advantages are token-level",
                rule.name,
            )
        if args.loss_type in ("vespo", "luspo"):
            logger.warning(
                "%s: loss_type=%s is meant for one advantage a response", rule.name, args.loss_type
            )
    return changes


def _check_arithmetic(args: Any, rule: Rule) -> None:
    """The arithmetic ratio is handed to TRL through the log-probabilities that its loss reads."""
    geometric = f"use {type(rule).__name__}(ratio='geometric') or change it"
    if args.beta != 0.0:
        raise InputError(
            f"{rule.name}: the arithmetic ratio does not compose with beta={args.beta} (the KL "
            f"penalty needs the tokens' own log-probabilities); {geometric}"
        )
    if args.loss_type not in CLIPPED_LOSSES:
        raise InputError(
            f"{rule.name}: the arithmetic ratio needs a clipped loss_type "
            f"({', '.join(CLIPPED_LOSSES)}), got {args.loss_type!r}; {geometric}"
        )
    if args.off_policy_mask_threshold is not None or args.top_entropy_quantile < 1.0:
        name = (
            "top_entropy_quantile"
            if args.top_entropy_quantile < 1.0
            else ("off_policy_mask_threshold")
        )
        raise InputError(
            f"{rule.name}: the arithmetic ratio does not compose with {name}; {geometric}"
        )


def recommended_config(rule: Rule) -> dict[str, Any]:
    """The `GRPOConfig` fields that the rule's paper trains with, for a config that is silent.

    Example:
        >>> from tokencredit import DAPO
        >>> recommended_config(DAPO())["epsilon_high"]
        0.28
    """
    recipe = rule.recipe
    surrogate = recipe.surrogate
    fields: dict[str, Any] = {
        "loss_type": LOSS_TYPE[surrogate.aggregation],
        "epsilon": surrogate.clip_low,
        "beta": recipe.kl,
    }
    if surrogate.clip_high != surrogate.clip_low:
        fields["epsilon_high"] = surrogate.clip_high
    if recipe.mask_truncated:
        fields["mask_truncated_completions"] = True
    return fields
