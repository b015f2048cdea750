"""What a SkyRL configuration says about credit, what a rule needs of it, what stands in the way.

Pure functions of the configuration, SkyRL's dataclasses or anything with the same attributes.
Nothing here imports SkyRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokencredit.engines.options import (
    PREFIX,
    Setting,
    accepted_losses,
    group_obstacle,
    loss_obstacle,
    methods_fed_by,
    names_of,
    plain_options,
    rule_of,
)
from tokencredit.errors import InputError, nearest
from tokencredit.methods.registry import methods

__all__ = [
    "Setting",
    "estimator_names",
    "forms_entropy",
    "needed_overrides",
    "notes",
    "obstacles",
    "recommended_overrides",
    "setting_of",
]

ALGORITHM = "trainer.algorithm"
SECTION = f"{ALGORITHM}.tokencredit"
ESTIMATOR = f"{ALGORITHM}.advantage_estimator"
LOSS = f"{ALGORITHM}.policy_loss_type"

SKYRL_HANDS_OVER = frozenset({"entropy"})
"""Token signals that can be had from SkyRL, the entropies by a worker of ours."""

AVERAGING_LOSSES = ("gspo",)
"""SkyRL's own policy losses whose ratio is formed over the whole response."""
LOSSES_WITHOUT_ADVANTAGES = ("cross_entropy",)
LOSSES_WITHOUT_THE_PASS = ("rollout_is", "dppo")
"""Those for which it may leave out the pass that forms old log-probabilities and entropies."""
SKYRL_NAMES = ("gae", "grpo", "rloo", "reinforce++", "maxrl")

REDUCTIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm",
}


def estimator_names(taken: tuple[str, ...] = SKYRL_NAMES) -> dict[str, str]:
    """Every estimator name and the method behind it.

    Args:
        taken: names that SkyRL has itself; those stay SkyRL's.

    Example:
        >>> names = estimator_names()
        >>> names["tokencredit_grpo"], names["gtpo"], "grpo" in names
        ('grpo', 'gtpo', False)
    """
    return names_of(methods_fed_by(SKYRL_HANDS_OVER), taken)


def setting_of(algorithm: Any, names: Mapping[str, str] | None = None) -> Setting | None:
    """What ``trainer.algorithm`` asks of tokencredit, or None where the estimator is not ours.

    Args:
        algorithm: SkyRL's ``cfg.trainer.algorithm``: ``advantage_estimator``, and in
            ``tokencredit`` the rule's options.
        names: estimator names and the methods behind them; default: `estimator_names`.

    Raises:
        InputError: an unknown option, or a value out of range, naming the key.

    Example:
        >>> from types import SimpleNamespace
        >>> algorithm = SimpleNamespace(
        ...     advantage_estimator="tokencredit_gtpo", tokencredit={"alpha2": 0.2}
        ... )
        >>> setting_of(algorithm).rule.alpha2
        0.2
    """
    name = str(algorithm.advantage_estimator)
    names = estimator_names() if names is None else names
    if name not in names:
        if name.startswith(PREFIX):
            raise InputError(f"{ESTIMATOR}={name}: {_no_such(name.removeprefix(PREFIX))}")
        return None
    options = plain_options(getattr(algorithm, "tokencredit", None), SECTION)
    return Setting(name, rule_of(names[name], options, SECTION))


def _no_such(method: str) -> str:
    """Why there is no estimator for a method, and what there is."""
    usable = methods_fed_by(SKYRL_HANDS_OVER)
    if method in methods():
        lacks = sorted(set(methods()[method].needs) - SKYRL_HANDS_OVER)
        return f"{method} needs {', '.join(lacks)}, which SkyRL does not give"
    return (
        f"no such method{nearest(method, usable)}; methods: {', '.join(usable)}; a rule of your "
        "own is there once its module is imported, in the process of the trainer as well"
    )


def forms_entropy(cfg: Any, setting: Setting) -> bool:
    """Whether the workers are to form entropies: where the rule needs, or can be given, them."""
    return setting.needs_entropy or (setting.wants_entropy and cfg.trainer.strategy == "fsdp")


def notes(cfg: Any, setting: Setting | None) -> list[str]:
    """What in SkyRL's configuration is worth knowing, a line each; nothing here stops a run."""
    algorithm, found = cfg.trainer.algorithm, list[str]()
    if setting is None:
        if getattr(algorithm, "tokencredit", None):
            name = algorithm.advantage_estimator
            found.append(
                f"{SECTION} is set, and {ESTIMATOR}={name} is not tokencredit's and does not read "
                f"it; ours are {', '.join(PREFIX + m for m in methods_fed_by(SKYRL_HANDS_OVER))}"
            )
        return found
    rule = setting.rule
    if algorithm.use_kl_in_reward and rule.reads_success and rule.needs:
        found.append(
            f"{ALGORITHM}.use_kl_in_reward=true: {rule.name} reads success, not rewards, so this "
            f"penalty does nothing; {ALGORITHM}.use_kl_loss=true has an effect"
        )
    if not algorithm.grpo_norm_by_std:
        found.append(
            f"{ALGORITHM}.grpo_norm_by_std=false: {rule.name} does not read it; {PREFIX}dr_grpo "
            "does not divide by the standard deviation"
        )
    return found


def needed_overrides(setting: Setting) -> list[str]:
    """Overrides without which the method would be another one.

    Example:
        >>> from types import SimpleNamespace
        >>> needed_overrides(setting_of(SimpleNamespace(advantage_estimator="grpo_s")))[1]
        'trainer.algorithm.policy_loss_type=tokencredit_sequence_arithmetic'
    """
    lines = [f"{ESTIMATOR}={setting.estimator}"]
    losses = accepted_losses(setting.rule)
    if losses is not None:
        lines.append(f"{LOSS}={losses[0]}")
    return lines


def recommended_overrides(setting: Setting) -> list[str]:
    """Overrides for what the paper trains with besides: reduction, clip, no KL.

    Example:
        >>> from types import SimpleNamespace
        >>> recommended_overrides(setting_of(SimpleNamespace(advantage_estimator="gtpo")))[0]
        'trainer.algorithm.loss_reduction=token_mean'
    """
    recipe = setting.rule.recipe
    surrogate = recipe.surrogate
    lines = [
        f"{ALGORITHM}.loss_reduction={REDUCTIONS[surrogate.aggregation]}",
        f"{ALGORITHM}.eps_clip_low={surrogate.clip_low:g}",
        f"{ALGORITHM}.eps_clip_high={surrogate.clip_high:g}",
        f"{ALGORITHM}.use_kl_loss={str(recipe.kl > 0).lower()}",
    ]
    if surrogate.aggregation == "seq-mean-token-sum-norm":
        lines.append(f"{ALGORITHM}.max_seq_len=N, the generation budget in tokens")
    if recipe.mask_truncated:
        lines.append("generator.apply_overlong_filtering=true")
    if recipe.filter_uniform:
        lines.append(f"{ALGORITHM}.dynamic_sampling.type=filter")
    return lines


def obstacles(cfg: Any, setting: Setting) -> list[str]:
    """What in SkyRL's configuration keeps the method from working, a line each: what, the cure.

    Args:
        cfg: SkyRL's whole configuration.
        setting: what it asks of tokencredit.
    """
    rule, algorithm, found = setting.rule, cfg.trainer.algorithm, list[str]()
    loss = str(algorithm.policy_loss_type)
    other = loss_obstacle(rule, loss, LOSS, averaging=AVERAGING_LOSSES, plain="regular")
    if other is not None:
        found.append(other)
    if loss in LOSSES_WITHOUT_ADVANTAGES:
        found.append(f"{LOSS}={loss}: reads no advantages; set {LOSS}=regular")
    lacks = sorted(set(rule.needs) - SKYRL_HANDS_OVER)
    if lacks:
        found.append(f"{rule.name} needs {', '.join(lacks)}, which SkyRL does not give")
    if setting.needs_entropy:
        if loss in LOSSES_WITHOUT_THE_PASS:
            found.append(
                f"{LOSS}={loss}: {rule.name} needs the entropies of the pass that forms old "
                f"log-probabilities, which SkyRL leaves out with this loss; set {LOSS}=regular"
            )
        if cfg.trainer.strategy != "fsdp":
            found.append(
                f"trainer.strategy={cfg.trainer.strategy}: {rule.name} needs entropies, which can "
                "be had from SkyRL's FSDP worker only; set trainer.strategy=fsdp"
            )
    if cfg.generator.step_wise_trajectories:
        found.append(
            "generator.step_wise_trajectories=true: SkyRL passes the last step of a trajectory "
            f"alone and gives its advantage to all, so {rule.name} has no tokens to tell apart; "
            "set it to false, or use SkyRL's own grpo"
        )
    if algorithm.advantage_batch_normalize:
        found.append(
            f"{ALGORITHM}.advantage_batch_normalize=true: shifts every token's advantage by the "
            "batch's mean; set it to false"
        )
    n = cfg.generator.n_samples_per_prompt
    found += group_obstacle(rule, n, "generator.n_samples_per_prompt")
    return found
