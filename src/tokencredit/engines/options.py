"""What the engines that name methods by string share: which methods they can feed, their options.

Nothing here imports an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from tokencredit.errors import InputError, nearest
from tokencredit.losses import RatioLevel
from tokencredit.methods.registry import methods, resolve
from tokencredit.methods.rule import Rule

__all__ = [
    "PREFIX",
    "Setting",
    "accepted_losses",
    "group_obstacle",
    "loss_mode",
    "loss_obstacle",
    "methods_fed_by",
    "names_of",
    "plain_options",
    "rule_of",
]

PREFIX = "tokencredit_"
"""Of every name that is registered with an engine."""


@dataclass(frozen=True)
class Setting:
    """What a configuration asks of tokencredit.

    Attributes:
        estimator: the name that the configuration uses, for messages.
        rule: the credit rule with its options.
    """

    estimator: str
    rule: Rule

    @property
    def needs_entropy(self) -> bool:
        """Whether the rule cannot do without token entropies."""
        return "entropy" in self.rule.needs

    @property
    def wants_entropy(self) -> bool:
        """Whether the rule reads token entropies where they are there."""
        return "entropy" in {*self.rule.needs, *self.rule.reads}


def methods_fed_by(signals: Iterable[str]) -> tuple[str, ...]:
    """Methods that need, beyond rewards and success, only these token signals.

    Example:
        >>> "gtpo" in methods_fed_by(["entropy"]), "datc" in methods_fed_by(["entropy"])
        (True, False)
    """
    given = set(signals)
    return tuple(name for name, one in methods().items() if set(one.needs) <= given)


def names_of(usable: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """Every name under which methods are registered with an engine, and the method behind it.

    Args:
        usable: the methods.
        taken: names that the engine has itself; those stay the engine's.

    Example:
        >>> names_of(["grpo", "gtpo"], taken=["grpo"])
        {'tokencredit_grpo': 'grpo', 'tokencredit_gtpo': 'gtpo', 'gtpo': 'gtpo'}
    """
    usable, taken = list(usable), set(taken)
    return {PREFIX + method: method for method in usable} | {
        method: method for method in usable if method not in taken
    }


def plain_options(section: Any, where: str) -> dict[str, Any]:
    """A configuration's section as a dictionary: None, a mapping, or OmegaConf's.

    Args:
        section: what stands under ``where``.
        where: its key, for messages.

    Raises:
        InputError: it holds something else.

    Example:
        >>> plain_options(None, "tokencredit"), plain_options({"alpha2": 0.2}, "tokencredit")
        ({}, {'alpha2': 0.2})
    """
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        if not hasattr(section, "items"):  # a DictConfig is no Mapping
            raise InputError(
                f"{where} must hold options, such as {where}.alpha2=0.2, got {section!r}"
            )
        from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

        section = OmegaConf.to_container(section, resolve=True)
    return dict(section)


def rule_of(
    method: str, options: Mapping[str, Any], where: str, others: Iterable[str] = ()
) -> Rule:
    """The rule of a method with the options of a configuration.

    Args:
        method: a name of `tokencredit.methods`.
        options: its options.
        where: the key under which they stand, for messages.
        others: names that may stand there besides and are read by the engine.

    Raises:
        InputError: an unknown option, or a value out of range, naming the key.

    Example:
        >>> rule_of("gtpo", {"alpha2": "0.2"}, "algorithm.tokencredit").alpha2
        0.2
    """
    known = [*(o.name for o in methods()[method].options), *others]
    for key in options:
        if key not in known:
            raise InputError(
                f"{where}.{key}: {method} has no such option{nearest(str(key), known)}; "
                f"options: {', '.join(known) or 'none'}"
            )
    try:
        return resolve(method, options)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def group_obstacle(rule: Rule, n: Any, key: str) -> list[str]:
    """Why a group of ``n`` responses is no group, and the cure; or nothing.

    Example:
        >>> group_obstacle(rule_of("gtpo", {}, "here"), 8, "n")
        []
    """
    try:
        size = int(n)
    except (TypeError, ValueError):
        size = -1
    if size < 1 or str(size) != str(n).strip():
        return [f"{key}={n}: must be a whole number of responses to a prompt, such as 8"]
    if size < 2 and not rule.whole_batch:
        why = "a group needs several responses to a prompt, or every advantage is 0"
        return [f"{key}={n}: {why}; set it to 8, say"]
    return []


# -- policy losses -----------------------------------------------------------------------------


def loss_mode(level: RatioLevel) -> str:
    """The name under which the policy loss with this ratio level is registered with an engine.

    Example:
        >>> loss_mode("sequence_arithmetic")
        'tokencredit_sequence_arithmetic'
    """
    return PREFIX + level


def accepted_losses(rule: Rule) -> tuple[str, ...] | None:
    """Policy losses under which the rule keeps its meaning; None = any of token level."""
    level = rule.recipe.surrogate.ratio
    if not rule.recipe.ratio_required or level == "token":
        return None
    if level == "sequence_geometric":
        # For an advantage that is constant along a response the three are one gradient.
        return (loss_mode(level), "gspo", loss_mode("gspo_token"))
    return (loss_mode(level),)


def loss_obstacle(
    rule: Rule, mode: str, key: str, *, averaging: Iterable[str], plain: str
) -> str | None:
    """Why the rule would be another one under a policy loss, and the cure; or None.

    Args:
        rule: the credit rule.
        mode: the policy loss that the configuration names.
        key: where it names it.
        averaging: the engine's own losses whose ratio is formed over the whole response.
        plain: the engine's own PPO loss.

    Example:
        >>> rule = rule_of("gtpo", {}, "here")
        >>> loss_obstacle(rule, "gspo", "loss", averaging=["gspo"], plain="ppo")[-12:]
        'set loss=ppo'
    """
    accepted = accepted_losses(rule)
    known = [loss_mode(level) for level in get_args(RatioLevel)]
    if mode.startswith(PREFIX) and mode not in known:
        return f"{key}={mode}: no such loss{nearest(mode, known)}"
    if accepted is not None and mode not in accepted:
        return (
            f"{key}={mode}: {rule.name} forms its ratio over the whole response; "
            f"set {key}={accepted[0]}"
        )
    over_responses = {*averaging, *known} - {loss_mode("token")}
    if accepted is None and rule.recipe.ratio_required and mode in over_responses:
        return (
            f"{key}={mode}: its ratio is formed over the whole response, {rule.name} "
            f"trains with each token's own; set {key}={plain}"
        )
    return None
