"""What a training run trains, on what, by which rewards: from a TRL configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokencredit.engines.trl.arguments import TrainArguments
from tokencredit.engines.trl.data import load_rewards, load_splits
from tokencredit.engines.trl.run_folder import broken_weights
from tokencredit.engines.trl.work import FROM_REWARDS, needs_work
from tokencredit.errors import InputError

__all__ = ["Job", "configured_job"]


@dataclass(frozen=True)
class Job:
    """The parts of a training run that are not configuration.

    Attributes:
        model: a model, or a name or folder that TRL loads.
        tokenizer: the tokenizer or processor, or None: TRL loads the model's.
        train: the training data set.
        evaluation: the evaluation data set, or None.
        rewards: reward functions and models.
        signals: functions for further token signals, by name.
        reward_model: what DATC differentiates, or None.
        reward_tokenizer: its tokenizer, where that is not beside it.
        accuracy: measures a policy on held-out prompts, ``(model, count) -> Evaluation``; None
            where there is no such measure.
        peft: a PEFT configuration, or None.
        quantization: a quantisation configuration, or None.
    """

    model: Any
    tokenizer: Any
    train: Any
    evaluation: Any
    rewards: list[Any]
    signals: Mapping[str, Callable[..., Any]] = field(default_factory=dict[str, Any])
    reward_model: Any = None
    reward_tokenizer: Any = None
    accuracy: Callable[[Any, int], Any] | None = None
    peft: Any = None
    quantization: Any = None


def configured_job(arguments: TrainArguments) -> Job:
    """The job that a TRL configuration describes.

    Raises:
        InputError: a model folder that is missing or holds no causal language model, a tokenizer
            without an end token, data or rewards that cannot be used.
    """
    from trl import get_peft_config, get_quantization_config

    name = arguments.model.model_name_or_path
    if not name:
        raise InputError("train: no model: set model_name_or_path, or --lab")
    rewards = load_rewards(arguments.script)
    train, evaluation = load_splits(
        arguments.script, arguments.dataset, evaluate=arguments.training.eval_strategy != "no"
    )
    trust = bool(arguments.training.trust_remote_code)
    _check_model(name, arguments.model.model_revision, trust)
    tokenizer = _check_tokenizer(name, arguments.model.model_revision, trust)
    _check_template(tokenizer, train, name)
    init: dict[str, Any] = {
        "revision": arguments.model.model_revision,
        "trust_remote_code": trust,
        "attn_implementation": arguments.model.attn_implementation,
        "dtype": arguments.model.dtype,
    }
    init.update(arguments.training.model_init_kwargs or {})
    arguments.training.model_init_kwargs = init
    return Job(
        model=name,
        tokenizer=None,
        train=train,
        evaluation=evaluation,
        rewards=rewards,
        reward_model=_reward_model(arguments),
        peft=get_peft_config(arguments.model),
        quantization=get_quantization_config(arguments.model),
    )


def _reward_model(arguments: TrainArguments) -> str | None:
    """What is named, else the reward model that is a reward, for rules that need one."""
    if arguments.reward_model is not None:
        return arguments.reward_model
    among = arguments.script.reward_model_name_or_path and needs_work(arguments.rule)
    return FROM_REWARDS if among else None


def _check_model(name: str, revision: str | None, trust: bool) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    looks_local = name.startswith((".", "/", "~")) or Path(name).is_dir()
    if looks_local and not Path(name).is_dir():
        raise InputError(f"train: model folder {name!r} does not exist")
    if looks_local and not (Path(name) / "config.json").is_file():
        if (Path(name) / "adapter_config.json").is_file() or list(Path(name).glob("*.gguf")):
            return
        raise InputError(f"train: model folder {name!r} has no config.json: not a model")
    try:
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise InputError(f"train: model {name!r}: {' '.join(str(error).split())}") from error
    broken = broken_weights(Path(name)) if looks_local else None
    if broken is not None:
        raise InputError(f"train: {broken} is cut off or damaged; copy the model again")
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"train: model {name!r} is a {config.model_type!r}, an encoder with a decoder, no "
            "causal language model"
        )
    known = type(config) in AutoModelForCausalLM._model_mapping
    remote = trust and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    architectures = getattr(config, "architectures", None) or []
    multimodal = any(a.endswith("ForConditionalGeneration") for a in architectures)
    if not (known or remote or multimodal):
        raise InputError(
            f"train: model {name!r} is a {config.model_type!r}, no causal language model"
        )
    if (
        architectures
        and not multimodal
        and not any("CausalLM" in a or "LMHead" in a for a in architectures)
    ):
        raise InputError(
            f"train: model {name!r} was saved as {architectures[0]}, no causal language model"
        )


def _check_tokenizer(name: str, revision: str | None, trust: bool) -> Any:
    if list(Path(name).glob("*.gguf")):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust)
    except Exception as error:  # tokenizers raises its own kinds
        raise InputError(
            f"train: the tokenizer of {name!r} cannot be loaded: {' '.join(str(error).split())}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise InputError(
            f"train: the tokenizer of {name!r} has no end token; set eos_token in its "
            "tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        raise InputError(
            f"train: the tokenizer of {name!r} has no pad token; set pad_token in its "
            "tokenizer_config.json (the end token will do)"
        )
    return tokenizer


def _check_template(tokenizer: Any, train: Any, name: str) -> None:
    first = next(iter(train), None)
    if first is None:
        raise InputError("train: the training split is empty")
    if (
        isinstance(first["prompt"], list)
        and tokenizer is not None
        and tokenizer.chat_template is None
    ):
        raise InputError(
            f"train: the prompts are messages, and the tokenizer of {name!r} has no chat template; "
            "give it one (chat_template.jinja in its folder), or write the prompts as text"
        )
