"""SkyRL's trainer, which gives estimators entropies, the policy's own tokens, and true scores.

A mixin of super-calling overrides; no body of SkyRL's is copied.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from tokencredit.credit import Credit
from tokencredit.engines.skyrl.estimators import BESIDE, Beside, register
from tokencredit.engines.skyrl.settings import (
    Setting,
    forms_entropy,
    notes,
    obstacles,
    recommended_overrides,
    setting_of,
)
from tokencredit.errors import InputError

__all__ = ["CreditTrainerMixin", "credit_trainer"]

Trainer = TypeVar("Trainer", bound=type)


ENTROPY, SCORES, REAL = "tokencredit_entropy", "tokencredit_scores", "tokencredit_real"
"""Columns of the batch between the passes and the advantages: they move with its rows."""


def credit_trainer(base: Trainer) -> Trainer:
    """A trainer of SkyRL's that feeds tokencredit's estimators, and is itself with any other.

    What is overridden here lies under a subclass's own overrides, next to SkyRL's: what a subclass
    does to rewards or rows before it calls ``super()`` is seen.

    Args:
        base: ``skyrl.train.trainer.RayPPOTrainer`` or a subclass.

    Example:
        class Exp(BasePPOExp):
            def get_trainer(self, *args, **kwargs):
                return credit_trainer(RayPPOTrainer)(*args, **kwargs)
    """
    if issubclass(base, CreditTrainerMixin):
        return base
    from skyrl.train.trainer import RayPPOTrainer

    layer: Any = type("CreditRayPPOTrainer", (CreditTrainerMixin, RayPPOTrainer), {})
    if base is RayPPOTrainer:
        return layer
    if not issubclass(base, RayPPOTrainer):
        raise InputError(
            f"credit_trainer: needs SkyRL's RayPPOTrainer or a subclass of it, got {base.__name__}"
        )
    made: Any = type(f"Credit{base.__name__}", (base, layer), {})
    return made


class _Recording:
    """SkyRL's dispatch, remembering what the workers return for each sample."""

    def __init__(self, dispatch: Any) -> None:
        self.dispatch = dispatch
        self.outputs: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dispatch, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._keep(self.dispatch.forward(*args, **kwargs))

    def forward_from_staged(self, *args: Any, **kwargs: Any) -> Any:
        return self._keep(self.dispatch.forward_from_staged(*args, **kwargs))

    def _keep(self, result: Any) -> Any:
        self.outputs.extend(result.loss_fn_outputs)
        return result


class CreditTrainerMixin:
    """Before a trainer of SkyRL's; see `credit_trainer`."""

    cfg: Any
    dispatch: Any
    all_metrics: dict[str, Any]
    _credit_entropy: Tensor | None = None

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        setting = setting_of(cfg.trainer.algorithm, register())
        if setting is not None:
            found = obstacles(cfg, setting)
            if found:
                raise InputError("; ".join(found))
        tell(cfg, setting)
        base: Any = super()
        base.__init__(cfg, *args, **kwargs)

    @property
    def _credit_setting(self) -> Setting | None:
        return setting_of(self.cfg.trainer.algorithm, register())

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:  # noqa: N803
        """SkyRL's, with a policy worker that returns entropies where the rule reads them."""
        setting = self._credit_setting
        if setting is not None and forms_entropy(self.cfg, setting):
            import ray

            from tokencredit.engines.skyrl.worker import EntropyPolicyWorker

            PolicyWorker = ray.remote(num_gpus=1)(EntropyPolicyWorker)  # noqa: N806
        base: Any = super()
        base.build_models(PolicyWorker, CriticWorker, RefWorker)

    def fwd_logprobs_values_reward(self, training_input: Any) -> Any:
        """SkyRL's; the entropies go into the batch."""
        base: Any = super()
        data = base.fwd_logprobs_values_reward(training_input)
        entropy, self._credit_entropy = self._credit_entropy, None
        if self._credit_setting is not None:
            rows = len(data["response_mask"])
            if entropy is not None:
                data[ENTROPY] = entropy[:rows]
            padding = data.metadata.get("pad_size", 0)
            data[REAL] = torch.arange(rows) < rows - padding
        return data

    def _execute_forward_pass(self, model: str, *args: Any, **kwargs: Any) -> Tensor:
        base: Any = super()
        setting = self._credit_setting
        if model != "policy" or setting is None or not forms_entropy(self.cfg, setting):
            return base._execute_forward_pass(model, *args, **kwargs)
        dispatch = self.dispatch
        self.dispatch = recording = _Recording(dispatch)
        try:
            result = base._execute_forward_pass(model, *args, **kwargs)
        finally:
            self.dispatch = dispatch
        rows = [torch.tensor(one["entropy"]) for one in recording.outputs]
        entropy = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        if entropy.shape != result.shape:
            raise InputError(
                f"{setting.estimator}: SkyRL formed log-probabilities of shape "
                f"{list(result.shape)}, its workers entropies of shape {list(entropy.shape)}"
            )
        self._credit_entropy = entropy
        return result

    def apply_reward_kl_penalty(self, data: Any) -> Any:
        """SkyRL's; the scores before it go into the batch."""
        base: Any = super()
        if self._credit_setting is not None:
            data[SCORES] = data["rewards"].sum(dim=-1)
        return base.apply_reward_kl_penalty(data)

    def compute_advantages_and_returns(self, data: Any) -> Any:
        """SkyRL's, with everything that the rule reads beside the batch; logs diagnostics."""
        base: Any = super()
        if self._credit_setting is None:
            return base.compute_advantages_and_returns(data)

        def report(credit: Credit) -> None:
            self.all_metrics |= {f"credit/{key}": v for key, v in credit.diagnostics.items()}

        taken = {name: data.pop(name) for name in (ENTROPY, SCORES, REAL) if name in data}
        token = BESIDE.set(
            Beside(
                entropy=taken.get(ENTROPY),
                scores=taken.get(SCORES),
                real=taken.get(REAL),
                mask=_chosen(data["response_mask"], data["loss_mask"]),
                report=report,
            )
        )
        try:
            return base.compute_advantages_and_returns(data)
        finally:
            BESIDE.reset(token)


def tell(cfg: Any, setting: Setting | None) -> None:
    """Log what the method's paper trains with, and what has no effect."""
    from loguru import logger  # SkyRL's; nobody sees the standard one's INFO there

    if setting is not None:
        recommended = " ".join(recommended_overrides(setting))
        logger.info(f"tokencredit: {setting.estimator}; its paper trains with {recommended}")
    for line in notes(cfg, setting):
        logger.warning(f"tokencredit: {line}")


def _chosen(response_mask: Tensor, loss_mask: Tensor) -> Tensor:
    """The tokens that the policy chose: the loss mask's, where a row has any.

    A row whose loss mask is empty was left out of the loss by a filter of SkyRL's (a group of equal
    rewards, an overlong response); it stays in the statistics, with all its tokens, those of tools
    among them: which were the policy's is no longer known.
    """
    chosen = loss_mask > 0
    return torch.where(chosen.any(dim=1, keepdim=True), chosen, response_mask > 0)
