"""Data sets and reward functions for ``tokencredit train``, with errors that name the culprit."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokencredit.errors import InputError, nearest

__all__ = ["checked_reward", "load_rewards", "load_splits", "read_prompts"]


def read_prompts(path: str | Path) -> Any:
    """A ``datasets.Dataset`` from a JSON Lines file, one object a line, each with a ``prompt``.

    Raises:
        InputError: naming file, line and field: not JSON, no object, no prompt, a prompt that is
            neither text nor a list of messages, or columns that differ between lines.
    """
    from datasets import Dataset

    rows: list[dict[str, Any]] = []
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_prompt_row(line, f"{path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise InputError(f"{path}: holds no prompt")
    columns = set(rows[0])
    for number, row in enumerate(rows, 1):
        if set(row) != columns:
            odd = sorted(set(row) ^ columns)[0]
            raise InputError(f"{path}: row {number}: field {odd!r} is not in every row")
    try:
        return Dataset.from_list(rows)
    except Exception as error:  # pyarrow's errors have no common base worth naming
        raise InputError(
            f"{path}: rows do not fit together: {' '.join(str(error).split())}"
        ) from error


def _prompt_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: must be an object with a field 'prompt'")
    if "prompt" not in row:
        raise InputError(f"{where}: field 'prompt' is missing{nearest('prompt', row)}")
    prompt = row["prompt"]
    if isinstance(prompt, str) and prompt:
        return row
    if not isinstance(prompt, list) or not prompt:
        raise InputError(f"{where}: field 'prompt' must be text or a list of messages")
    for i, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InputError(
                f"{where}: field 'prompt[{i}]' must be a message with role and content"
            )
        if "content" not in message:
            raise InputError(f"{where}: field 'prompt[{i}].content' is missing")
    return row


def load_splits(script: Any, mixture: Any, *, evaluate: bool) -> tuple[Any, Any]:
    """The training split and, if asked for, the evaluation split that a TRL config names."""
    name = script.dataset_name
    if mixture.datasets:
        from trl import get_dataset

        splits = get_dataset(mixture)
    elif name is None:
        raise InputError("train: no data: set dataset_name (a .jsonl file or a data set) or --lab")
    elif str(name).endswith((".jsonl", ".json")):
        if evaluate:
            raise InputError(
                f"train: eval_strategy needs an evaluation split, and {name} is one file; "
                "use `datasets:` or a data set with splits"
            )
        return read_prompts(name), None
    else:
        from datasets import load_dataset

        try:
            splits = load_dataset(
                name, name=script.dataset_config, streaming=script.dataset_streaming
            )
        except Exception as error:  # the hub, the cache and the readers each have their own
            raise InputError(
                f"train: dataset_name={name!r} cannot be loaded: {' '.join(str(error).split())}"
            ) from error
    wanted = [script.dataset_train_split] + ([script.dataset_test_split] if evaluate else [])
    for split in wanted:
        if split not in splits:
            raise InputError(
                f"train: the data set has no split {split!r}; it has {', '.join(splits)}"
            )
    train = splits[script.dataset_train_split]
    columns = getattr(train, "column_names", None)
    if columns is not None and "prompt" not in columns:
        raise InputError(
            f"train: the data set has no column 'prompt'{nearest('prompt', columns)}; "
            f"it has {', '.join(columns)}"
        )
    return train, splits[script.dataset_test_split] if evaluate else None


def load_rewards(script: Any) -> list[Any]:
    """The reward functions that a TRL config names: TRL's own, dotted paths, a reward model."""
    names: list[str] = list(script.reward_funcs or [])
    rewards: list[Any] = []
    if script.reward_model_name_or_path:
        rewards.append(script.reward_model_name_or_path)
    for name in names:
        rewards.append(checked_reward(_reward(name)))
    if not rewards:
        raise InputError("train: no reward: set reward_funcs or reward_model_name_or_path")
    return rewards


def _reward(name: str) -> Callable[..., Any]:
    import trl.rewards as library

    builtin = {
        key: getattr(library, key)
        for key in ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
        if hasattr(library, key)
    }
    # The arguments that `trl grpo` gives it.
    builtin["get_soft_overlong_punishment"] = library.get_soft_overlong_punishment(
        max_completion_len=1280, soft_punish_cache=256
    )
    if name in builtin:
        return builtin[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        raise InputError(
            f"train: unknown reward function {name!r}{nearest(name, builtin)}; known: "
            f"{', '.join(builtin)}, or a dotted path such as my_rewards.accuracy"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise InputError(f"train: reward function {name!r} cannot be imported: {error}") from error
    if not callable(function):
        raise InputError(f"train: reward function {name!r} is not callable")
    return function


def checked_reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same reward function, whose failures name it and say what it should have returned."""
    name = getattr(function, "__name__", type(function).__name__)

    def check(values: Any, completions: Sequence[Any]) -> list[float | None]:
        try:
            given = list(values)
        except TypeError:
            given = None
        if given is None or len(given) != len(completions):
            got = type(values).__name__ if given is None else f"{len(given)} values"
            raise InputError(
                f"reward function {name!r} must return one number a response, "
                f"{len(completions)}, got {got}"
            )
        out: list[float | None] = []
        for i, value in enumerate(given):
            try:
                number = None if value is None else float(value)
            except (TypeError, ValueError):
                raise InputError(
                    f"reward function {name!r}, response {i}: not a number: {value!r}"
                ) from None
            if number is not None and math.isinf(number):
                raise InputError(f"reward function {name!r}, response {i}: infinite")
            out.append(number)
        return out

    def failed(error: Exception) -> InputError:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return InputError(f"reward function {name!r} raised {what}")

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def later(*args: Any, **kwargs: Any) -> Any:
            try:
                values = await function(*args, **kwargs)
            except InputError:
                raise
            except Exception as error:
                raise failed(error) from error
            return check(values, kwargs["completions"])

        return later

    @functools.wraps(function)
    def now(*args: Any, **kwargs: Any) -> Any:
        try:
            values = function(*args, **kwargs)
        except InputError:
            raise
        except Exception as error:
            raise failed(error) from error
        return check(values, kwargs["completions"])

    if not hasattr(now, "__name__"):
        now.__name__ = name
    return now
