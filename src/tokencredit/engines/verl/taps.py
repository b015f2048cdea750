"""Taps on verl's trainers: what they know and do not pass to estimators, put into `BESIDE`.

Every tap wraps a function of verl's and calls it; no body is copied.

- V1 (``trainer.use_v1=True``, the default): entropies, scores and reward fields are in the
  TransferQueue; they are read by the batch's own keys, so rows are in its order.
- The legacy trainer: the entropies ride in the batch from the old-log-probability pass to
  `compute_advantage`, under a key of ours, and are taken out there; verl's own union and
  reordering move them with their rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tokencredit.credit import Credit
from tokencredit.engines.verl.estimators import BESIDE, MARK, Beside, register_estimators, wrap
from tokencredit.engines.verl.settings import (
    BYPASS,
    ESTIMATOR,
    SECTION,
    Setting,
    lookup,
    misspelt,
    notes,
    obstacles,
    setting_of,
)
from tokencredit.errors import InputError, MissingSignalError

__all__ = ["attach", "attached", "refuse_several_outputs"]

logger = logging.getLogger("tokencredit")

ENTROPY_KEY = "tokencredit_entropy"
MASK_KEY = "tokencredit_mask"


def attach() -> dict[str, str]:
    """Attach the taps to both trainers; for each, "" or why it could not be done."""
    trouble: dict[str, str] = {}
    for name, one in (("legacy", _attach_legacy), ("V1", _attach_v1)):
        try:
            one()
            trouble[name] = ""
        except (ImportError, AttributeError) as error:
            # The TransferQueue is an extra of verl's; other versions have other names.
            trouble[name] = " ".join(str(error).split())
    return trouble


def attached() -> dict[str, bool]:
    """Whether each trainer's functions are wrapped now."""
    from verl.trainer.ppo import ray_trainer

    def tapped(*places: tuple[Any, str]) -> bool:
        return all(hasattr(getattr(owner, name, None), MARK) for owner, name in places)

    legacy = tapped(
        (ray_trainer, "compute_advantage"),
        (getattr(ray_trainer, "RayPPOTrainer", None), "_compute_old_log_prob"),
    )
    try:
        from verl.trainer.ppo.v1 import trainer_base, utils
    except ImportError:
        return {"legacy": legacy, "V1": False}
    v1 = tapped((trainer_base.PPOTrainer, "_compute_advantage"), (utils, "compute_advantage"))
    return {"legacy": legacy, "V1": v1}


def _setting(config: Any) -> Setting | None:
    return setting_of(lookup(config, "algorithm"), register_estimators())


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """A trainer's constructor that refuses what would fail, or mislead, hours later."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        found = misspelt(config, register_estimators())
        if found:
            raise InputError("; ".join(found))
        setting = _setting(config)
        if setting is not None:
            found = obstacles(config, setting)
            if found:
                raise InputError("; ".join(found))
            for line in notes(config, setting):
                logger.warning("tokencredit: %s", line)
        elif lookup(config, SECTION):
            name = lookup(config, ESTIMATOR)
            logger.warning(
                "tokencredit: %s is set, and %s=%s is not tokencredit's and does not read it",
                SECTION, ESTIMATOR, getattr(name, "value", name),
            )  # fmt: skip
        original(self, config, *args, **kwargs)

    return __init__


# -- the legacy trainer ------------------------------------------------------------------------


def _attach_legacy() -> None:
    from verl.trainer.ppo import ray_trainer

    wrap(ray_trainer.RayPPOTrainer, "__init__", _refusing)
    wrap(ray_trainer.RayPPOTrainer, "_compute_old_log_prob", _keeping_entropies)
    wrap(ray_trainer, "compute_advantage", _with_batch)


def _keeping_entropies(original: Callable[..., Any]) -> Callable[..., Any]:
    def _compute_old_log_prob(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, batch, *args, **kwargs)
        setting = _setting(self.config)
        if setting is not None:
            old_log_prob = result[0]
            old_log_prob.batch[MASK_KEY] = batch.batch["response_mask"]
            if setting.needs_entropy or (
                setting.wants_entropy and "entropys" in old_log_prob.batch
            ):
                old_log_prob.batch[ENTROPY_KEY] = old_log_prob.batch["entropys"]
        return result

    return _compute_old_log_prob


def _with_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """`compute_advantage` of both trainers: what the batch itself holds goes into `BESIDE`."""

    def compute_advantage(data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
        found: dict[str, Any] = {}
        for key, name in ((ENTROPY_KEY, "entropy"), (MASK_KEY, "mask")):
            if key in data.batch:
                found[name] = data.batch.pop(key)
        method = register_estimators().get(str(getattr(adv_estimator, "value", adv_estimator)))
        if method is None:
            return original(data, adv_estimator, *args, **kwargs)
        if "token_level_scores" in data.batch:
            found["scores"] = data.batch["token_level_scores"].sum(dim=-1)
        outer = BESIDE.get()
        if outer.reward_info is None:
            found["reward_info"] = lambda: _rows(data.non_tensor_batch)
        return _beside(replace(outer, **found), original, data, adv_estimator, *args, **kwargs)

    return compute_advantage


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The columns of a ``DataProto``, among them the reward function's fields, as rows."""
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _beside(value: Beside, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    token = BESIDE.set(value)
    try:
        return call(*args, **kwargs)
    finally:
        BESIDE.reset(token)


# -- V1 ----------------------------------------------------------------------------------------


def _attach_v1() -> None:
    from verl.trainer.ppo.v1 import trainer_base, utils

    wrap(trainer_base.PPOTrainer, "__init__", _refusing)
    wrap(trainer_base.PPOTrainer, "_compute_advantage", _with_queue)
    # It has the name from the legacy trainer, and may have it from before that was wrapped.
    wrap(utils, "compute_advantage", _with_batch)


def _with_queue(original: Callable[..., Any]) -> Callable[..., Any]:
    def _compute_advantage(self: Any, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        setting = _setting(self.config)
        if setting is None:
            return original(self, batch, metrics, *args, **kwargs)
        refuse_several_outputs(batch.keys)
        if setting.needs_entropy and lookup(self.config, BYPASS):
            raise MissingSignalError("; ".join(obstacles(self.config, setting)))

        def report(credit: Credit) -> None:
            metrics.update({f"credit/{key}": value for key, value in credit.diagnostics.items()})

        wanted = setting.needs_entropy or (
            setting.wants_entropy and not lookup(self.config, BYPASS)
        )
        beside = replace(_read_queue(batch, setting, wanted), report=report)
        return _beside(beside, original, self, batch, metrics, *args, **kwargs)

    return _compute_advantage


def _read_queue(batch: Any, setting: Setting, wanted: bool) -> Beside:
    """Entropies and reward fields of the batch, rows in the order of ``batch.keys``."""
    import transfer_queue as tq

    fields = [
        "response_mask",
        *(["entropy"] if wanted else []),
        *(["extra_fields"] if setting.reads_field else []),
    ]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    rows = [_reward_info(row) for row in data.pop("extra_fields")] if setting.reads_field else []
    info = (lambda: rows) if setting.reads_field else None
    if setting.needs_entropy and "entropy" not in data:
        raise MissingSignalError(
            f"{setting.estimator}: the TransferQueue does not hold the entropies of every response "
            f"of this batch; set {BYPASS}=False, so that verl runs its old-log-probability pass"
        )
    padded = data.to_padded_tensor()
    return Beside(
        entropy=padded["entropy"] if wanted and "entropy" in data else None,
        mask=padded["response_mask"],
        reward_info=info,
    )


def _reward_info(extra_fields: Any) -> dict[str, Any]:
    extra_fields = getattr(extra_fields, "data", extra_fields)
    info = extra_fields.get("reward_extra_info") if isinstance(extra_fields, dict) else None
    return dict(info or {})


def refuse_several_outputs(keys: Sequence[str]) -> None:
    """Refuse a batch in which a session has several outputs: all would count in its group.

    Keys of V1 are ``{uid}_{session}_{output}``, outputs numbered from 0.

    Raises:
        InputError: a key ends in a number above 0.

    Example:
        >>> refuse_several_outputs(["a_0_0", "a_1_0"])
    """
    for key in keys:
        parts = key.rsplit("_", 2)
        if len(parts) == 3 and parts[2].isdigit() and int(parts[2]) > 0:
            raise InputError(
                f"tokencredit: session {parts[0]}_{parts[1]} has several outputs (its agent loop "
                "returns a list), and each would count as a response of the group: let the agent "
                "loop return one output, or use verl's own grpo"
            )
