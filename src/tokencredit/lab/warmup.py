"""Supervised warm-up on imperfect demonstrations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from tokencredit.errors import InputError
from tokencredit.lab.catalogue import Setting
from tokencredit.lab.evaluation import evaluate
from tokencredit.lab.models import new_policy
from tokencredit.lab.prompts import stream_prompts
from tokencredit.lab.tasks.task import Task, context_length
from tokencredit.lab.tokenizer import tokenizer_for

__all__ = ["OnProgress", "WarmedUp", "fresh_policy", "warm_up"]

OnProgress = Callable[[int, float, float | None], None]
"""Called as ``on_progress(step, loss, accuracy)``, the accuracy None where not measured."""

_ATTEMPTS = 4
_RAMP = 50  # steps from zero to the full learning rate
_CHECK_EVERY = 25
_CHECK_PROMPTS = 256
_CHECK_SEED = 555
_IGNORED = -100  # the label that cross-entropy leaves out


@dataclass(frozen=True)
class WarmedUp:
    """A policy ready for reinforcement learning.

    Attributes:
        model: The policy, in evaluation mode.
        seed: The seed that worked, the setting's own unless attempts failed.
        steps: Warm-up steps taken.
    """

    model: PreTrainedModel
    seed: int
    steps: int


def fresh_policy(setting: Setting) -> PreTrainedModel:
    """The setting's policy before any training.

    Example:
        >>> from tokencredit.lab import setting
        >>> fresh_policy(setting("chain-llama")).config.vocab_size
        23
    """
    return new_policy(
        setting.family,
        len(setting.task.vocabulary),
        seed=setting.seed,
        layers=setting.layers,
        width=setting.width,
        heads=setting.heads,
        context=context_length(setting.task),
        initializer_range=setting.initializer_range,
    )


def warm_up(setting: Setting, *, on_progress: OnProgress | None = None) -> WarmedUp:
    """Teach a fresh policy the task from demonstrations, as far as the setting says.

    With a target, the sampled accuracy on 256 held-out prompts is checked every 25 steps and the
    first check that reaches the target ends the warm-up. A seed that does not get there within
    the budget is given up for the next one, up to four in all: now and then a policy gets stuck.

    The same setting on the same number of threads gives the same weights.

    Args:
        setting: Task, policy, seed, budget and target.
        on_progress: Called after every 25th step.

    Raises:
        InputError: No seed reached the target.
    """
    if setting.warmup_steps < 1:
        raise InputError(f"{setting.name}: warmup_steps={setting.warmup_steps}; give at least 1")
    for seed in range(setting.seed, setting.seed + _ATTEMPTS):
        warmed = _attempt(replace(setting, seed=seed), on_progress)
        if warmed is not None:
            return warmed
    raise InputError(
        f"{setting.name}: seeds {setting.seed} to {setting.seed + _ATTEMPTS - 1} did not reach "
        f"target_accuracy={setting.target_accuracy} in warmup_steps={setting.warmup_steps}; "
        "raise the steps, or lower the target"
    )


def _attempt(setting: Setting, on_progress: OnProgress | None) -> WarmedUp | None:
    task, target = setting.task, setting.target_accuracy
    tokenizer = tokenizer_for(task)
    model = fresh_policy(setting).train()
    rng = random.Random(setting.seed)
    prompts = stream_prompts(task, rng)
    # The usual beta2 of 0.999 remembers longer than the whole warm-up lasts.
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, setting.warmup_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = setting.warmup_learning_rate * _schedule(step, setting.warmup_steps)
        batch = list(islice(prompts, setting.warmup_batch_size))
        ids, labels = _encode(task, batch, [task.demonstration(p, rng) for p in batch])
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % _CHECK_EVERY and step < setting.warmup_steps:
            continue
        accuracy = None
        if target is not None:
            checked = evaluate(model, tokenizer, task, prompts=_CHECK_PROMPTS, seed=_CHECK_SEED)
            accuracy = checked.accuracy
        if on_progress is not None:
            on_progress(step, loss.item(), accuracy)
        if target is not None and accuracy is not None and accuracy >= target:
            return WarmedUp(model.eval(), setting.seed, step)
    return WarmedUp(model.eval(), setting.seed, setting.warmup_steps) if target is None else None


def _schedule(step: int, steps: int) -> float:
    """Share of the peak learning rate: a ramp times a linear decay to zero."""
    return min(1.0, step / _RAMP) * (1 - (step - 1) / steps)


def _encode(
    task: Task, prompts: Sequence[Sequence[str]], responses: Sequence[Sequence[str]]
) -> tuple[Int[Tensor, "b t"], Int[Tensor, "b t"]]:
    """Token ids, and labels that count only the response."""
    ids = {word: index for index, word in enumerate(task.vocabulary)}
    rows = [
        [ids[word] for word in (*prompt, *response)]
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    length = max(map(len, rows))
    tokens = torch.tensor([row + [ids["<pad>"]] * (length - len(row)) for row in rows])
    labels = tokens.masked_fill(tokens == ids["<pad>"], _IGNORED)
    labels[:, : task.prompt_length] = _IGNORED
    return tokens, labels
