"""Data sets and reward functions for ``tokencredit train``, with errors that name the culprit."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokencredit.errors import InputError, nearest

__all__ = ["checked_reward", "load_rewards", "load_splits", "read_prompts"]

GYM = "reasoning-gym:"
"""Data sets of this name are reasoning-gym's tasks, paid by ``tokencredit.lab.gym_reward``."""
GYM_PROMPTS = 2000


def read_prompts(path: str | Path) -> Any:
    """A ``datasets.Dataset`` from a JSON Lines file, one object a line, each with a ``prompt``.

    Raises:
        InputError: naming file, line and field: not JSON, no object, no prompt, a prompt that is
            neither text nor a list of messages, or columns that differ between lines.
    """
    from datasets import Dataset

    rows: list[dict[str, Any]] = []
    kinds: dict[str, tuple[str, int]] = {}
    try:
        with Path(path).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = _prompt_row(line, f"{path}:{number}")
                    _check_like_the_first(row, rows, kinds, f"{path}:{number}", number)
                    rows.append(row)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if not rows:
        raise InputError(f"{path}: holds no prompt")
    try:
        return Dataset.from_list(rows)
    except Exception as error:  # pyarrow's errors have no common base worth naming
        raise InputError(
            f"{path}: rows do not fit together: {' '.join(str(error).split())}"
        ) from error


def _check_like_the_first(
    row: dict[str, Any],
    rows: list[dict[str, Any]],
    kinds: dict[str, tuple[str, int]],
    where: str,
    number: int,
) -> None:
    """The same fields on every line, each of one kind; ``kinds`` says where a kind was seen."""
    if rows and set(row) != set(rows[0]):
        odd = sorted(set(row) ^ set(rows[0]))[0]
        is_it = "is not on the lines before" if odd in row else "is missing"
        raise InputError(f"{where}: field {odd!r} {is_it}; give it on every line or on none")
    for name, value in row.items():
        if value is None:
            continue
        kind = {bool: "true or false", int: "a number", float: "a number", str: "text"}.get(
            type(value), "a list" if isinstance(value, list) else "an object"
        )
        before, line = kinds.setdefault(name, (kind, number))
        if before != kind:
            raise InputError(f"{where}: field {name!r} is {kind}, but {before} on line {line}")


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
        if not isinstance(message["content"], (str, list, type(None))):
            raise InputError(f"{where}: field 'prompt[{i}].content' must be text")
    return row


def load_splits(script: Any, mixture: Any, *, evaluate: bool) -> tuple[Any, Any]:
    """The training split and, if asked for, the evaluation split that a TRL config names."""
    name = script.dataset_name
    if mixture.datasets:
        from trl import get_dataset

        with _loading("datasets"):
            splits: Any = get_dataset(mixture)
    elif name is None:
        raise InputError("train: no data: set dataset_name (a .jsonl file or a data set) or --lab")
    elif str(name).startswith(GYM):
        from tokencredit.lab import gym_dataset

        task = str(name).removeprefix(GYM)
        splits = {
            script.dataset_train_split: gym_dataset(task, GYM_PROMPTS, seed=0),
            script.dataset_test_split: gym_dataset(task, 256, seed=1),
        }
    elif str(name).endswith((".jsonl", ".json")):
        if evaluate:
            raise InputError(
                f"train: eval_strategy needs an evaluation split, and {name} is one file; "
                "use `datasets:` or a data set with splits"
            )
        return read_prompts(name), None
    elif (Path(name) / "dataset_dict.json").is_file() or (Path(name) / "state.json").is_file():
        from datasets import Dataset, load_from_disk

        with _loading(f"dataset_name={name!r}"):
            splits = load_from_disk(name)
        if isinstance(splits, Dataset):
            splits = {script.dataset_train_split: splits}
    else:
        from datasets import load_dataset

        with _loading(f"dataset_name={name!r}"):
            splits = load_dataset(
                name, name=script.dataset_config, streaming=script.dataset_streaming
            )
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


@contextmanager
def _loading(what: str) -> Generator[None]:
    from datasets.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # it would say first what the error then says
    try:
        yield
    except Exception as error:  # the hub, the cache and the readers each have their own
        causes: list[str] = []
        link: BaseException | None = error
        while link is not None and len(causes) < 3:
            text = " ".join(str(link).split())
            if text and not any(text in cause for cause in causes):
                causes.append(text)
            link = link.__cause__
        raise InputError(f"train: {what} cannot be loaded: {': '.join(causes)}") from error
    finally:
        logging.set_verbosity(verbosity)


def load_rewards(script: Any) -> list[Any]:
    """The reward functions that a TRL config names: TRL's own, dotted paths, a reward model."""
    names: list[str] = list(script.reward_funcs or [])
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
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
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # the user's module runs while it is imported
        what = f"{type(error).__name__}: {' '.join(str(error).split())}{_place(error)}"
        raise InputError(f"train: reward function {name!r} cannot be imported: {what}") from error
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
                if isinstance(value, (str, bytes)):
                    raise TypeError
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
        what = f"{type(error).__name__}: {' '.join(str(error).split())}{_place(error)}"
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

        later.__name__ = name
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

    now.__name__ = name  # a partial or an object has none that `wraps` could copy
    return now


def _place(error: BaseException) -> str:
    """Where in the user's code an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or Path(frames[-1].filename) == Path(__file__):
        return ""
    return f" ({frames[-1].filename}:{frames[-1].lineno})"
