"""A task's verifier as a reward function, and as the oracle's token marks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokencredit.errors import InputError
from tokencredit.lab.tasks.task import Task, Verdict, oracle_marks

__all__ = ["oracle_signal", "task_reward"]


def task_reward(task: Task) -> Callable[..., list[float]]:
    """A reward function for TRL: 1.0 for a correct response, 0.0 for a wrong one.

    It reads `completion_ids`, because the text that a trainer passes along lacks `<eos>` and the
    verifier wants it.

    Args:
        task: Whose verifier to ask.

    Returns:
        ``f(prompts, completions, completion_ids, **kwargs) -> list[float]``, named after the
        task, for example ``chain_accuracy``.

    Example:
        >>> from tokencredit.lab import Chain
        >>> task = Chain(steps=1, fillers=0)
        >>> words = "6 - 4 = 2 ; ans 2 <eos>".split()
        >>> reward = task_reward(task)
        >>> reward(["6 - 4 ="], [""], [[task.vocabulary.index(word) for word in words]])
        [1.0]
    """

    def reward(
        prompts: Sequence[str],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[float]:
        return [float(verdict.correct) for verdict in _verdicts(task, prompts, completion_ids)]

    reward.__name__ = reward.__qualname__ = f"{task.name}_accuracy"
    return reward


def oracle_signal(
    task: Task,
) -> Callable[[Sequence[str], Sequence[Sequence[int]]], list[list[float]]]:
    """The oracle's marks, one per response token; see `oracle_marks`.

    Args:
        task: Whose verifier to ask.

    Returns:
        ``f(prompts, completion_ids) -> list[list[float]]``, each list as long as the response.

    Example:
        >>> from tokencredit.lab import Chain
        >>> task = Chain(steps=1, fillers=0)
        >>> words = "6 - 4 = 3 ; ans 3 <eos>".split()
        >>> oracle_signal(task)(["6 - 4 ="], [[task.vocabulary.index(word) for word in words]])
        [[0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]]
    """

    def marks(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        return [oracle_marks(verdict) for verdict in _verdicts(task, prompts, completion_ids)]

    marks.__name__ = marks.__qualname__ = f"{task.name}_oracle"
    return marks


def _verdicts(
    task: Task, prompts: Sequence[Any], completion_ids: Sequence[Sequence[int]]
) -> list[Verdict]:
    if len(prompts) != len(completion_ids):
        raise InputError(
            f"{task.name}: {len(prompts)} prompts but {len(completion_ids)} completion_ids; "
            "give one list of ids for each prompt"
        )
    vocabulary = task.vocabulary
    verdicts: list[Verdict] = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        if not isinstance(prompt, str):
            raise InputError(
                f"{task.name}: a prompt is a {type(prompt).__name__}; give plain text, not messages"
            )
        words = [vocabulary[i] if 0 <= i < len(vocabulary) else "<unk>" for i in ids]
        verdicts.append(task.verify(prompt.split(), words))
    return verdicts
