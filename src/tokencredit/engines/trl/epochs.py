"""Every epoch's order of prompts, in a resumed run as in an undisturbed one.

TRL draws each epoch's order from one generator, which a resumed run starts anew: past the first
epoch it would see other prompts. The trainer calls a sampler's ``set_epoch``, if it finds it;
resumed inside an epoch on several ranks, accelerate wraps the sampler more deeply than it looks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback

__all__ = ["OrderOfEpochs"]


class OrderOfEpochs(TrainerCallback):
    """Brings a `trl.RepeatSampler` to where it stands before the epoch that begins."""

    def __init__(self) -> None:
        self.sampler: Any = None

    def attach(self, sampler: Any) -> None:
        """Give a sampler that has a generator a ``set_epoch``; leave any other alone."""
        if getattr(sampler, "generator", None) is not None:
            sampler.set_epoch = partial(_draw_orders_before, sampler)
            self.sampler = sampler

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The trainer calls this before it makes the epoch's iterator."""
        if self.sampler is not None:
            self.sampler.set_epoch(int((state.epoch or 0.0) + 1e-6))


def _draw_orders_before(sampler: Any, epoch: int) -> None:
    sampler.generator.manual_seed(sampler.seed)
    for _ in range(epoch):
        torch.randperm(sampler.num_samples, generator=sampler.generator)
