"""The lab: tiny tasks whose every token is understood, and tiny policies that solve them.

Everything runs on one CPU thread in minutes and nothing is downloaded. The tasks know which
token went wrong, so that credit assignment can be compared with the truth.

    >>> from tokencredit import lab
    >>> task = lab.setting("chain-qwen3").task
    >>> task.verify("1 + 2 - 0 * 3 + 1 - 1 =".split(), ["so", "1", "-"]).first_wrong
    2
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from tokencredit.errors import MissingExtraError

if TYPE_CHECKING:
    from tokencredit.lab.catalogue import DEFAULT_SETTING, Setting, setting, settings
    from tokencredit.lab.evaluation import Evaluation, evaluate
    from tokencredit.lab.gym import gym_dataset, gym_reward
    from tokencredit.lab.models import Family, new_policy
    from tokencredit.lab.prompts import draw_prompts, is_held_out, prompt_dataset, stream_prompts
    from tokencredit.lab.reward_models import (
        LabRewardModel,
        RewardModelAccuracy,
        build_reward_model,
        load_reward_model,
        localisation,
        reward_model_accuracy,
        reward_model_metadata,
    )
    from tokencredit.lab.reward_training import RewardRecipe, Strength, reward_recipe
    from tokencredit.lab.rewards import oracle_signal, task_reward
    from tokencredit.lab.sampling import sample_responses
    from tokencredit.lab.store import build_policy, cache_folder, load_policy, policy_metadata
    from tokencredit.lab.tasks import (
        Chain,
        Countdown,
        Kind,
        Task,
        Verdict,
        context_length,
        oracle_marks,
    )
    from tokencredit.lab.tokenizer import tokenizer_for
    from tokencredit.lab.warmup import OnProgress, WarmedUp, fresh_policy, warm_up

__all__ = [
    "DEFAULT_SETTING",
    "Chain",
    "Countdown",
    "Evaluation",
    "Family",
    "Kind",
    "LabRewardModel",
    "OnProgress",
    "RewardModelAccuracy",
    "RewardRecipe",
    "Setting",
    "Strength",
    "Task",
    "Verdict",
    "WarmedUp",
    "build_policy",
    "build_reward_model",
    "cache_folder",
    "context_length",
    "draw_prompts",
    "evaluate",
    "fresh_policy",
    "gym_dataset",
    "gym_reward",
    "is_held_out",
    "load_policy",
    "load_reward_model",
    "localisation",
    "new_policy",
    "oracle_marks",
    "oracle_signal",
    "policy_metadata",
    "prompt_dataset",
    "reward_model_accuracy",
    "reward_model_metadata",
    "reward_recipe",
    "sample_responses",
    "setting",
    "settings",
    "stream_prompts",
    "task_reward",
    "tokenizer_for",
    "warm_up",
]

# Which module each name comes from. They are imported on first use, because importing
# transformers takes seconds that a command line which only prints help should not spend.
_NAMES = {
    "catalogue": ("DEFAULT_SETTING", "Setting", "setting", "settings"),
    "evaluation": ("Evaluation", "evaluate"),
    "gym": ("gym_dataset", "gym_reward"),
    "models": ("Family", "new_policy"),
    "prompts": ("draw_prompts", "is_held_out", "prompt_dataset", "stream_prompts"),
    "reward_models": (
        "LabRewardModel",
        "RewardModelAccuracy",
        "build_reward_model",
        "load_reward_model",
        "localisation",
        "reward_model_accuracy",
        "reward_model_metadata",
    ),
    "reward_training": ("RewardRecipe", "Strength", "reward_recipe"),
    "rewards": ("oracle_signal", "task_reward"),
    "sampling": ("sample_responses",),
    "store": ("build_policy", "cache_folder", "load_policy", "policy_metadata"),
    "tasks": (
        "Chain",
        "Countdown",
        "Kind",
        "Task",
        "Verdict",
        "context_length",
        "oracle_marks",
    ),
    "tokenizer": ("tokenizer_for",),
    "warmup": ("OnProgress", "WarmedUp", "fresh_policy", "warm_up"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if importlib.util.find_spec("transformers") is None:
    raise MissingExtraError("transformers", "trl", "tokencredit.lab")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
