"""What a verl configuration says about credit, what a rule needs of it, what stands in the way.

Pure functions of the configuration: an OmegaConf ``DictConfig`` of verl's, or plain mappings of
the same shape. Nothing here imports verl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from tokencredit.engines import options
from tokencredit.engines.options import (
    PREFIX,
    accepted_losses,
    group_obstacle,
    loss_mode,
    loss_obstacle,
    methods_fed_by,
    names_of,
    plain_options,
    rule_of,
)
from tokencredit.errors import InputError, nearest
from tokencredit.losses import RatioLevel
from tokencredit.methods.registry import methods

__all__ = [
    "Setting",
    "estimator_names",
    "lookup",
    "misspelt",
    "needed_overrides",
    "notes",
    "obstacles",
    "recommended_overrides",
    "setting_of",
    "usable_methods",
    "wrong_name",
]

SECTION = "algorithm.tokencredit"
ESTIMATOR = "algorithm.adv_estimator"
ACTOR = "actor_rollout_ref.actor"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"
KL_LOSS = f"{ACTOR}.use_kl_loss"
FILTER = "algorithm.filter_groups.enable"
BYPASS = "algorithm.rollout_correction.bypass_mode"

VERL_HANDS_OVER = frozenset({"entropy"})
"""Token signals that can be had from verl."""

PENALTIES = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
)
"""Where verl's DAPO reward manager is told to take a penalty off the score of long responses."""

AVERAGING_LOSSES = ("gspo", "geo_mean")
"""verl's own policy losses whose ratio is formed over the whole response."""


@dataclass(frozen=True)
class Setting(options.Setting):
    """What a configuration asks of tokencredit.

    Attributes:
        estimator: the name that the configuration uses, for messages.
        rule: the credit rule with its options.
        success_from: the field of the reward function's result that says whether a response is
            right; None: the score, before any KL penalty, is above 0.5.
    """

    success_from: str | None = None

    @property
    def reads_field(self) -> str | None:
        """`success_from`, for rules that read success at all."""
        return self.success_from if self.rule.reads_success else None


def usable_methods() -> tuple[str, ...]:
    """Methods that need no more than rewards, success and entropies: what verl can give.

    Example:
        >>> "gtpo" in usable_methods(), "datc" in usable_methods()
        (True, False)
    """
    return methods_fed_by(VERL_HANDS_OVER)


def estimator_names(taken: Mapping[str, Any] | tuple[str, ...] = ("grpo",)) -> dict[str, str]:
    """Every estimator name and the method behind it.

    Args:
        taken: names that verl has itself; those stay verl's.

    Example:
        >>> names = estimator_names()
        >>> names["tokencredit_grpo"], names["gtpo"], "grpo" in names
        ('grpo', 'gtpo', False)
    """
    return names_of(usable_methods(), taken)


def lookup(config: Any, path: str, default: Any = None) -> Any:
    """A value of a nested configuration by its dotted path, or ``default`` where there is none.

    Example:
        >>> lookup({"algorithm": {"gamma": 1.0}}, "algorithm.gamma"), lookup({}, "a.b") is None
        (1.0, True)
    """
    value = config
    for key in path.split("."):
        get = getattr(value, "get", None)
        value = None if get is None else get(key, None)
        if value is None:
            return default
    return value


def setting_of(algorithm: Any, names: Mapping[str, str] | None = None) -> Setting | None:
    """What ``config.algorithm`` asks of tokencredit, or None where the estimator is not ours.

    Args:
        algorithm: verl's ``config.algorithm``: ``adv_estimator``, and in ``tokencredit`` the
            rule's options and ``success_from``.
        names: estimator names and the methods behind them; default: `estimator_names`.

    Raises:
        InputError: an unknown option, or a value out of range, naming the key.

    Example:
        >>> algorithm = {"adv_estimator": "tokencredit_gtpo", "tokencredit": {"alpha2": 0.2}}
        >>> setting_of(algorithm).rule.alpha2
        0.2
        >>> setting_of({"adv_estimator": "grpo"}) is None
        True
    """
    name = lookup(algorithm, "adv_estimator")
    name = str(getattr(name, "value", name))  # verl's own names are members of an enumeration
    names = estimator_names() if names is None else names
    if name not in names:
        return None
    return read_section(lookup(algorithm, "tokencredit"), name, names[name])


def read_section(section: Any, estimator: str, method: str) -> Setting:
    """The options under ``algorithm.tokencredit``, for one method."""
    given = plain_options(section, SECTION)
    success_from = given.pop("success_from", None)
    if success_from is not None and not (isinstance(success_from, str) and success_from.strip()):
        raise InputError(
            f"{SECTION}.success_from must name a field of the reward function's result, "
            f"got {success_from!r}"
        )
    rule = rule_of(method, given, SECTION, others=["success_from"])
    return Setting(estimator, rule, success_from)


# -- what a rule needs -------------------------------------------------------------------------


def needed_overrides(setting: Setting) -> list[str]:
    """Hydra overrides without which the method would be another one.

    Example:
        >>> needed_overrides(setting_of({"adv_estimator": "tokencredit_grpo_s"}))[1]
        'actor_rollout_ref.actor.policy_loss.loss_mode=tokencredit_sequence_arithmetic'
    """
    lines = [f"{ESTIMATOR}={setting.estimator}"]
    losses = accepted_losses(setting.rule)
    if losses is not None:
        lines.append(f"{LOSS_MODE}={losses[0]}")
    return lines


def recommended_overrides(setting: Setting) -> list[str]:
    """Hydra overrides for what the paper trains with besides: aggregation, clip, no KL.

    Example:
        >>> recommended_overrides(setting_of({"adv_estimator": "tokencredit_gtpo"}))[0]
        'actor_rollout_ref.actor.loss_agg_mode=token-mean'
    """
    recipe = setting.rule.recipe
    surrogate = recipe.surrogate
    lines = [
        f"{ACTOR}.loss_agg_mode={surrogate.aggregation}",
        f"{ACTOR}.clip_ratio_low={surrogate.clip_low:g}",
        f"{ACTOR}.clip_ratio_high={surrogate.clip_high:g}",
        f"{ACTOR}.use_kl_loss={recipe.kl > 0}",
    ]
    if surrogate.aggregation == "seq-mean-token-sum-norm":
        lines.append(f"'{ACTOR}.loss_scale_factor=${{data.max_response_length}}'")
    if recipe.filter_uniform:
        metric = setting.success_from or "reward"
        lines += [f"{FILTER}=True", f"algorithm.filter_groups.metric={metric}"]
    return lines


# -- what stands in the way --------------------------------------------------------------------


def obstacles(config: Any, setting: Setting) -> list[str]:
    """What in verl's configuration keeps the method from working, a line each: what, and the cure.

    The trainers refuse to start with any of these; ``check`` prints them.

    Example:
        >>> config = {"algorithm": {"rollout_correction": {"bypass_mode": True}}}
        >>> obstacles(config, setting_of({"adv_estimator": "gtpo"}))[0][:50]
        'algorithm.rollout_correction.bypass_mode=True: gtp'
    """
    rule, found = setting.rule, list[str]()
    missing = sorted(set(rule.needs) - VERL_HANDS_OVER)
    if missing:
        found.append(f"{rule.name} needs {', '.join(missing)}, which verl does not give")
    if setting.needs_entropy and _on(config, BYPASS):
        found.append(
            f"{BYPASS}=True: {rule.name} needs the entropies of the old-log-probability pass, "
            f"which this mode leaves out; set {BYPASS}=False"
        )
    policy_loss = lookup(config, f"{ACTOR}.policy_loss")
    if policy_loss is not None and not hasattr(policy_loss, "get"):
        found.append(f"{ACTOR}.policy_loss={policy_loss}: holds keys; set {LOSS_MODE}")
    mode = str(lookup(config, LOSS_MODE, "vanilla"))
    other = loss_obstacle(rule, mode, LOSS_MODE, averaging=AVERAGING_LOSSES, plain="vanilla")
    if other is not None:
        found.append(other)
    for where in PENALTIES:
        if _on(config, f"{where}.enable") and rule.reads_success and not setting.success_from:
            found.append(
                f"{where}.enable=True: verl takes the penalty off the score, and {rule.name} would "
                f"take a long right response for a wrong one; set +{SECTION}.success_from=acc"
            )
    n = lookup(config, "actor_rollout_ref.rollout.n")
    if n is not None:
        found += group_obstacle(rule, n, "actor_rollout_ref.rollout.n")
    return found


def _on(config: Any, path: str) -> bool:
    """Whether a switch is on; a text, as some launchers pass, counts for what it says."""
    value = lookup(config, path)
    return str(value).strip().lower() not in ("false", "none", "null", "no", "off", "0", "")


def misspelt(config: Any, names: Mapping[str, str]) -> list[str]:
    """Names of ours that do not exist, a line each: what, and what there is."""
    found = list[str]()
    section = SECTION.rpartition(".")[2]
    for key in lookup(config, "algorithm") or ():
        if str(key) != section and nearest(str(key), [section]):
            found.append(f"algorithm.{key}: is not read (did you mean {SECTION}?)")
    name = lookup(config, ESTIMATOR)
    name = str(getattr(name, "value", name))
    if name.startswith(PREFIX) and name not in names:
        found.append(wrong_name(name))
    mode = str(lookup(config, LOSS_MODE, "vanilla"))
    known = [loss_mode(level) for level in get_args(RatioLevel)]
    if mode.startswith(PREFIX) and mode not in known:
        found.append(f"{LOSS_MODE}={mode}: no such loss{nearest(mode, known)}")
    return found


def wrong_name(name: str) -> str:
    """Why an estimator's name is none of ours, and which are."""
    ours = [PREFIX + method for method in usable_methods()]
    plain = name.lower().replace("-", "_").removeprefix(PREFIX)
    if plain in usable_methods():
        whose = "" if name.startswith(PREFIX) or name != plain else f": {name} is somebody else's"
        return f"{ESTIMATOR}={name}: not one of tokencredit's{whose}; set {PREFIX}{plain}"
    if plain.startswith("datc"):
        return f"{ESTIMATOR}={name}: DATC needs a reward model's gradient, which verl does not give"
    if plain in methods():
        lacks = sorted(set(methods()[plain].needs) - VERL_HANDS_OVER)
        return f"{ESTIMATOR}={name}: needs {', '.join(lacks)}, which verl does not give"
    hint = nearest(plain, usable_methods())
    return f"{ESTIMATOR}={name}: not one of tokencredit's{hint}; those are: {', '.join(ours)}"


def notes(config: Any, setting: Setting) -> list[str]:
    """What in verl's configuration is worth knowing, a line each; nothing here stops a run."""
    rule, found = setting.rule, list[str]()
    if _on(config, "algorithm.use_kl_in_reward") and rule.reads_success and rule.needs:
        found.append(
            f"algorithm.use_kl_in_reward=True: {rule.name} reads success, not rewards, so this "
            f"penalty does nothing; {ACTOR}.use_kl_loss=True has an effect"
        )
    legacy = not lookup(config, "trainer.use_v1", True)
    if rule.recipe.filter_uniform and (legacy or not _on(config, FILTER)):
        cure = (
            "the legacy trainer does not drop them, whatever algorithm.filter_groups says"
            if legacy
            else f"{FILTER}=True drops them"
        )
        found.append(
            f"{rule.name}: groups without a mix of successes and failures get advantage 0 but "
            f"stay in the loss's denominator; {cure}"
        )
    if str(lookup(config, "algorithm.norm_adv_by_std_in_grpo", True)).lower() == "false":
        found.append(
            f"algorithm.norm_adv_by_std_in_grpo=False: {rule.name} does not read it; "
            f"{PREFIX}dr_grpo does not divide by the standard deviation"
        )
    if setting.success_from and not rule.reads_success:
        found.append(f"{SECTION}.success_from: {rule.name} does not read success")
    if rule.recipe.mask_truncated:
        found.append(
            f"{rule.name}: verl does not say which responses are truncated: none is masked"
        )
    if setting.needs_entropy and _on(config, "actor_rollout_ref.model.use_fused_kernels"):
        found.append(
            "actor_rollout_ref.model.use_fused_kernels=True: entropies come from verl's fused "
            "kernel; its torch form was compared with float32, its Triton form was not run"
        )
    if lookup(config, "actor_rollout_ref.rollout.agent.agent_loop_manager_class") or lookup(
        config, "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    ):
        found.append(
            "an agent loop of your own: one that gives several outputs a session is refused in "
            "the first step, since each would count as a response of the group"
        )
    return found
