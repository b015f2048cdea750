"""Prompts to train on and prompts held out, which never overlap."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from tokencredit.errors import InputError, MissingExtraError
from tokencredit.lab.tasks.task import Task

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["draw_prompts", "is_held_out", "prompt_dataset", "stream_prompts"]

_HELD_OUT_BELOW = 32  # of the 256 values of a hash's first byte: one prompt in eight
_MISSES = 10_000


def is_held_out(prompt: Sequence[str]) -> bool:
    """Whether a prompt belongs to the held-out split.

    The prompt's own SHA-256 decides, so the splits are disjoint by construction: whatever the
    task's options, the seed, or the number of prompts drawn, a prompt is on the same side.

    Args:
        prompt: Its words.

    Example:
        >>> is_held_out("1 + 2 =".split()), is_held_out("2 + 2 =".split())
        (False, True)
    """
    return hashlib.sha256(" ".join(prompt).encode()).digest()[0] < _HELD_OUT_BELOW


def stream_prompts(
    task: Task, rng: random.Random, *, held_out: bool = False
) -> Iterator[tuple[str, ...]]:
    """Prompts of one split without end, drawn independently (so they may repeat).

    Args:
        task: Whose prompts.
        rng: Source of randomness; shared with the caller, who may draw from it in between.
        held_out: Which split.

    Raises:
        InputError: The task is so small that the split has no prompt.
    """
    misses = 0
    while misses < _MISSES:
        prompt = task.problem(rng)
        if is_held_out(prompt) == held_out:
            misses = 0
            yield prompt
        else:
            misses += 1
    split = "held-out" if held_out else "training"
    raise InputError(
        f"{task.name}: no {split} prompt among {_MISSES} drawn from {task}; make the task larger"
    )


def draw_prompts(
    task: Task, count: int, seed: int, *, held_out: bool = False
) -> list[tuple[str, ...]]:
    """The first `count` prompts of a split at this seed.

    Args:
        task: Whose prompts.
        count: How many.
        seed: Same seed, same prompts.
        held_out: Which split.

    Returns:
        Prompts as tuples of words.

    Raises:
        InputError: The split has no prompt.

    Example:
        >>> from tokencredit.lab import Chain
        >>> [len(prompt) for prompt in draw_prompts(Chain(), 2, seed=0)]
        [12, 12]
    """
    return list(islice(stream_prompts(task, random.Random(seed), held_out=held_out), count))


def prompt_dataset(task: Task, n: int, seed: int, *, held_out: bool = False) -> Dataset:
    """The same prompts as a data set with one column, `prompt`: words joined by spaces.

    Args:
        task: Whose prompts.
        n: How many rows.
        seed: Same seed, same prompts.
        held_out: Which split; see `is_held_out`.

    Returns:
        What a trainer takes as ``train_dataset``.

    Raises:
        InputError: The split has no prompt.
        MissingExtraError: `datasets` is not installed.

    Example:
        >>> from tokencredit.lab import Countdown
        >>> prompt_dataset(Countdown(), 4, seed=0).column_names
        ['prompt']
    """
    try:
        from datasets import Dataset
    except ModuleNotFoundError as error:
        raise MissingExtraError("datasets", "trl", "prompt_dataset") from error
    prompts = draw_prompts(task, n, seed, held_out=held_out)
    return Dataset.from_dict({"prompt": [" ".join(words) for words in prompts]})
