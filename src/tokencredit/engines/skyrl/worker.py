"""SkyRL's FSDP policy worker, which returns entropies beside old log-probabilities.

The model forms entropies when it is asked to, and SkyRL's training pass asks; the pass that forms
old log-probabilities does not, and keeps one number a token of what a micro-batch returns. So the
model is asked here, and the two numbers travel through SkyRL's own splitting, reordering and
gathering as one: the last dimension, taken apart where the worker returns.
"""

from __future__ import annotations

from typing import Any

import torch
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from torch import Tensor

__all__ = ["EntropyPolicyWorker", "EntropyWorkerMixin"]


class _Asking:
    """A model that is asked for entropies as well; returns log-probabilities, keeps the others."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.entropy: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, sequences: Tensor, num_actions: int, *args: Any, **kwargs: Any) -> Tensor:
        asked = {"return_output": True, "compute_entropy": True, "entropy_requires_grad": False}
        log_probs, output = self.model(sequences, num_actions, *args, **(kwargs | asked))
        # As SkyRL does with log-probabilities: column s tells of the token after it.
        self.entropy = output["entropy"][:, -num_actions - 1 : -1]
        return log_probs


class EntropyWorkerMixin:
    """Before a policy worker of SkyRL's: `forward` without a loss returns ``entropy`` as well."""

    model: Any

    def forward(self, data: Any, loss_fn: Any = None, loss_fn_config: Any = None) -> Any:
        """SkyRL's, with ``entropy`` beside ``logprobs`` in each sample's outputs."""
        base: Any = super()
        result = base.forward(data, loss_fn=loss_fn, loss_fn_config=loss_fn_config)
        if loss_fn is None:
            for one in result.loss_fn_outputs:
                pairs = one["logprobs"]
                one["logprobs"] = [pair[0] for pair in pairs]
                one["entropy"] = [pair[1] for pair in pairs]
        return result

    def _forward_micro_batch(self, micro_batch: Any) -> Any:
        base: Any = super()
        model = self.model
        self.model = asking = _Asking(model)
        try:
            output = base._forward_micro_batch(micro_batch)
        finally:
            self.model = model
        assert asking.entropy is not None
        log_probs = output["output"].float()
        entropy = asking.entropy.to(device=log_probs.device, dtype=torch.float32)
        output["output"] = torch.stack([log_probs, entropy], dim=-1)
        return output


class EntropyPolicyWorker(EntropyWorkerMixin, FSDPPolicyWorkerBase):
    """`EntropyWorkerMixin` before SkyRL's FSDP policy worker."""
