"""Batches in verl's own form, and its own function that turns them into advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo import ray_trainer

from tokencredit.engines.verl.estimators import BESIDE, Beside

UIDS = ["a", "b", "a", "b", "a", "b", "a", "b"]  # groups interleaved, as after balancing
LENGTHS = [4, 2, 3, 4, 1, 4, 2, 3]
SCORES = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.2, 0.0]


def mask_of(lengths: list[int], width: int = 4) -> Tensor:
    return (torch.arange(width) < torch.tensor(lengths).unsqueeze(1)).long()


def entropies(rows: int = 8, width: int = 4, seed: int = 0) -> Tensor:
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) * 3 + 0.1


def at_the_end(scores: list[float], mask: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """verl's way: a response's score sits on its last token."""
    out = torch.zeros(mask.shape, dtype=dtype)
    last = (mask.sum(dim=1) - 1).clamp(min=0)
    return out.scatter_(1, last.unsqueeze(1), torch.tensor(scores, dtype=dtype).unsqueeze(1))


def batch(
    scores: list[float] = SCORES,
    uids: list[str] = UIDS,
    lengths: list[int] = LENGTHS,
    dtype: torch.dtype = torch.float32,
    tensors: dict[str, Tensor] | None = None,
    **columns: list[Any],
) -> DataProto:
    mask = mask_of(lengths)
    rewards = at_the_end(scores, mask, dtype)
    return DataProto.from_dict(
        tensors={
            "token_level_rewards": rewards,
            "token_level_scores": rewards,
            "response_mask": mask,
            **(tensors or {}),
        },
        non_tensors={
            "uid": np.array(uids, dtype=object),
            **{name: np.array(value, dtype=object) for name, value in columns.items()},
        },
    )


def algorithm(**section: Any) -> Any:
    """verl's ``config.algorithm``: a DictConfig, as its trainers pass it."""
    return OmegaConf.create({"use_kl_in_reward": False, "tokencredit": section})


def advantages(
    data: DataProto, estimator: str, config: Any = None, beside: Beside | None = None
) -> Tensor:
    """By verl's own `compute_advantage`, called as its trainers call it."""
    token = BESIDE.set(beside or Beside())
    try:
        done = ray_trainer.compute_advantage(
            data, adv_estimator=estimator, config=config or algorithm()
        )
    finally:
        BESIDE.reset(token)
    assert torch.equal(done.batch["advantages"], done.batch["returns"])
    return done.batch["advantages"]
