"""Any task of reasoning-gym, by name, as prompts and a reward."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokencredit.errors import InputError, MissingExtraError, nearest

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["gym_dataset", "gym_reward"]

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def gym_dataset(name: str, n: int, seed: int, **options: Any) -> Dataset:
    """`n` questions of one of reasoning-gym's tasks.

    Args:
        name: The task's name there, for example ``"chain_sum"``.
        n: How many questions.
        seed: Same seed, same questions.
        **options: The task's own options; plain numbers, strings, lists.

    Returns:
        Columns ``prompt`` (the question), ``answer`` (one right answer as text, empty if the task
        gives none) and ``gym_entry`` (JSON from which `gym_reward` makes the entry again, because
        an entry itself may hold what no data set can).

    Raises:
        InputError: There is no such task, or an option is not one of its own.
        MissingExtraError: reasoning-gym is not installed.
    """
    text = json.dumps({"name": name, "size": n, "seed": seed, "options": options}, sort_keys=True)
    entries = list(_gym(text))
    answers = [entry["answer"] for entry in entries]
    from datasets import Dataset

    return Dataset.from_dict(
        {
            "prompt": [str(entry["question"]) for entry in entries],
            "answer": ["" if answer is None else str(answer) for answer in answers],
            "gym_entry": [json.dumps([text, index]) for index in range(len(entries))],
        }
    )


def gym_reward(
    prompts: Sequence[Any], completions: Sequence[Any], gym_entry: Sequence[str], **kwargs: Any
) -> list[float]:
    """The task's own score, between 0 and 1, as a reward function for TRL.

    The answer is what stands between the last ``<answer>`` and ``</answer>``, or the whole
    response if it has no such tags.

    Args:
        prompts: The questions; not read.
        completions: The responses, as text or as lists of messages.
        gym_entry: The column of `gym_dataset`.
        **kwargs: Whatever else a trainer passes; not read.

    Returns:
        One score for each response.

    Raises:
        MissingExtraError: reasoning-gym is not installed.
    """
    scores: list[float] = []
    for completion, entry in zip(completions, gym_entry, strict=True):
        text, index = json.loads(entry)
        gym = _gym(text)
        scores.append(float(gym.score_answer(_answer(completion), gym[index])))
    return scores


def _answer(completion: Any) -> str:
    text = completion if isinstance(completion, str) else str(completion[-1]["content"])
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else text).strip()


@lru_cache(maxsize=64)
def _gym(text: str) -> Any:
    try:
        factory = import_module("reasoning_gym.factory")
    except ModuleNotFoundError as error:
        raise MissingExtraError("reasoning-gym", "reasoning-gym", "the gym's tasks") from error
    recipe = json.loads(text)
    name = recipe["name"]
    if name not in factory.DATASETS:
        raise InputError(
            f"gym_dataset: reasoning-gym has no task {name!r}{nearest(name, factory.DATASETS)}; "
            f"its {len(factory.DATASETS)} are listed in reasoning_gym.factory.DATASETS"
        )
    try:
        return factory.create_dataset(
            name, size=recipe["size"], seed=recipe["seed"], **recipe["options"]
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise InputError(
            f"gym_dataset: {name} refuses {recipe['options']} with size {recipe['size']}: {error}"
        ) from error
