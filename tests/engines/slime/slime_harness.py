"""What slime hands to its hook, made locally: the contract that the adapter is written against.

slime is not on PyPI and needs Megatron and SGLang. `hook` does around the custom function what
slime 0.3.1 does (`backends/megatron_utils/loss.py`, `compute_advantages_and_returns`), `rank_data`
makes the lists that a rank holds there, and `held` says which tokens of a response a rank holds
under context parallelism. `slime_ranks.py` does the same with Megatron's own groups and the
functions of a fork of slime that is on PyPI, where those are installed.
"""

from __future__ import annotations

import importlib
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import torch

from tokencredit import Rollouts, assign

GROUPS, SIZE, VOCABULARY = 5, 4, 11


@dataclass
class Batch:
    """A whole rollout: ``GROUPS`` prompts, ``SIZE`` responses each, in slime's order of indices."""

    prompts: list[int]
    lengths: list[int]
    logits: list[torch.Tensor]
    tokens: list[torch.Tensor]
    rewards: list[float]
    masks: list[torch.Tensor]
    entropies: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        for prompt, length, logits in zip(self.prompts, self.lengths, self.logits, strict=True):
            logp = logits[prompt - 1 : prompt - 1 + length].log_softmax(dim=-1)
            self.entropies.append(-(logp.exp() * logp).sum(dim=-1))

    def expected(self, method: str, **options: Any) -> torch.Tensor:
        """`assign` on the whole rollout, rows in the order of indices."""
        rows, longest = len(self.lengths), max(self.lengths)
        mask, entropy = torch.zeros(rows, longest), torch.zeros(rows, longest)
        for i, length in enumerate(self.lengths):
            mask[i, :length] = self.masks[i]
            entropy[i, :length] = self.entropies[i]
        group = [i // SIZE for i in range(rows)]
        rollouts = Rollouts(torch.tensor(self.rewards), group, mask, entropy=entropy)
        return assign(rollouts, method, **options).advantage


def make_batch(seed: int = 0) -> Batch:
    """Lengths from 1 on, tokens of a tool in the middle of some, one sample taken out."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int) -> list[int]:
        return torch.randint(low, high, (GROUPS * SIZE,), generator=generator).tolist()

    prompts, lengths = numbers(1, 9), numbers(1, 24)
    prompts = [prompts[i - i % SIZE] for i in range(GROUPS * SIZE)]  # one prompt a group
    lengths[3] = 1
    rewards = [float(r) for r in numbers(0, 2)]
    rewards[:SIZE] = [1.0, 0.0, 1.0, 0.0]
    masks = [torch.ones(length, dtype=torch.int) for length in lengths]
    for mask in masks[::3]:
        mask[1:3] = 0
    masks[5].zero_()
    logits = [
        2 * torch.randn(p + n, VOCABULARY, generator=generator)
        for p, n in zip(prompts, lengths, strict=True)
    ]
    tokens = [torch.randint(0, VOCABULARY, (len(one),), generator=generator) for one in logits]
    for i, prompt in enumerate(prompts):
        tokens[i][:prompt] = tokens[i - i % SIZE][:prompt]
    return Batch(prompts, lengths, logits, tokens, rewards, masks)


def arguments(**changes: Any) -> Namespace:
    """slime's arguments, as far as anybody here reads them."""
    values = {
        "custom_advantage_function_path": "tokencredit.engines.slime.gtpo",
        "advantage_estimator": "grpo",
        "loss_type": "policy_loss",
        "n_samples_per_prompt": SIZE,
        "rewards_normalization": False,
        "normalize_advantages": False,
        "use_critic": False,
        "use_rollout_entropy": True,
        "use_rollout_logprobs": False,
        "get_mismatch_metrics": False,
        "kl_coef": 0.0,
    }
    return Namespace(**(values | changes))


def held(total: int, length: int, cp_rank: int, cp_size: int) -> list[int]:
    """The tokens of a response on one rank: those whose logits lie in its two chunks."""
    if cp_size == 1:
        return list(range(length))
    chunk = -(-total // (2 * cp_size))
    mine = (cp_rank, 2 * cp_size - 1 - cp_rank)
    first = total - length - 1
    return [t for t in range(length) if (first + t) // chunk in mine]


def rank_data(
    batch: Batch, indices: list[int], cp_rank: int = 0, cp_size: int = 1, reused: bool = False
) -> dict[str, Any]:
    """What one rank's ``rollout_data`` holds; ``reused``: without the log-probability pass."""
    totals = [batch.prompts[i] + batch.lengths[i] for i in indices]
    slices = [
        held(total, batch.lengths[i], cp_rank, cp_size)
        for i, total in zip(indices, totals, strict=True)
    ]
    data: dict[str, Any] = {
        "tokens": [batch.tokens[i] for i in indices],
        "rewards": [batch.rewards[i] for i in indices],
        "raw_reward": batch.rewards,
        "truncated": [0 for _ in indices],
        "response_lengths": [batch.lengths[i] for i in indices],
        "total_lengths": totals,
        "loss_masks": [batch.masks[i] for i in indices],
        "sample_indices": indices,
        "rollout_ids": indices,
        "rollout_log_probs": [torch.full((len(one),), -1.0) for one in slices],
    }
    if not reused:
        data["log_probs"] = [torch.full((len(one),), -1.0) for one in slices]
        data["entropy"] = [batch.entropies[i][one] for i, one in zip(indices, slices, strict=True)]
    return data


def hook(args: Namespace, rollout_data: dict[str, Any]) -> None:
    """What slime does around the custom function: form ``kl``, look the path up, call it."""
    shaped = rollout_data.get("log_probs") or rollout_data["rollout_log_probs"]
    rollout_data["kl"] = [torch.zeros_like(one, dtype=torch.float32) for one in shaped]
    module, _, name = args.custom_advantage_function_path.rpartition(".")
    getattr(importlib.import_module(module), name)(args, rollout_data)
    advantages, returns = rollout_data["advantages"], rollout_data["returns"]
    for one, kl in zip(advantages, rollout_data["kl"], strict=True):
        assert one.shape == kl.shape and one.dtype == torch.float32 and one.device == kl.device
    assert len(returns) == len(advantages)
