"""The command line and the YAML of ``tokencredit train``: TRL's own, and a few fields more.

TRL's parser does the parsing, so every ``trl grpo`` YAML file and flag works unchanged. What is
added here: the credit rule, a check of every key against the known ones, and which fields the
user set on purpose (a rule's recipe fills in only the others).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tokencredit.errors import InputError, nearest
from tokencredit.methods.registry import resolve
from tokencredit.methods.rule import Rule
from tokencredit.methods.texts import set_options

__all__ = [
    "TrainArguments",
    "config_path",
    "lab_name",
    "make_parser",
    "parse_train_arguments",
    "plain",
    "read_yaml",
]

OWN_FIELDS = (
    "credit",
    "set",
    "lab",
    "success_from",
    "entropy_source",
    "reward_model",
    "path_points",
    "dynamic_sampling",
    "record_every",
    "eval_prompts",
    "resume",
)
DEFAULT_LAB = "chain-qwen3"
LAB_BRINGS = (
    "model_name_or_path",
    "dataset_name",
    "datasets",
    "reward_funcs",
    "reward_model_name_or_path",
)
"""What a setting of the lab decides, so that it cannot be set beside ``lab``."""
SECRETS = ("hub_token",)
"""Not written into the run folder."""
AT_LEAST = {
    "temperature": (0.0, False),
    "max_completion_length": (1, True),
    "per_device_train_batch_size": (1, True),
    "per_device_eval_batch_size": (1, True),
    "gradient_accumulation_steps": (1, True),
    "num_iterations": (1, True),
    "learning_rate": (0.0, True),
    "weight_decay": (0.0, True),
    "max_grad_norm": (0.0, True),
    "beta": (0.0, True),
    "epsilon": (0.0, True),
    "save_steps": (0.0, False),
    "logging_steps": (0.0, False),
}
"""Lowest value, and whether it is allowed, of fields that TRL takes without looking."""


@dataclass
class TrainArguments:
    """A parsed ``tokencredit train`` command.

    Attributes:
        script: TRL's GRPOScriptArguments.
        training: TRL's GRPOConfig.
        model: TRL's ModelConfig.
        dataset: TRL's DatasetMixtureConfig.
        rule: the credit rule, or None for plain GRPO.
        lab: name of the lab's setting, or None.
        success_from: which reward function says whether a response is right.
        entropy_source: auto, old_logprobs or forward.
        reward_model: what DATC differentiates, or None.
        path_points: points that the reward gradient is averaged at.
        dynamic_sampling: further rounds of sampling for groups that teach nothing; 0 = none.
        record_every: rollouts are recorded every so many steps; 0 = never.
        eval_prompts: held-out prompts for the lab's accuracy before and after.
        resume: go on from the last checkpoint.
        explicit: what the user set, by field name.
        defaults: what the lab's setting set beneath that.
        environment: the YAML's ``env`` mapping.
    """

    script: Any
    training: Any
    model: Any
    dataset: Any
    rule: Rule | None
    lab: str | None
    success_from: str | None
    entropy_source: Any
    reward_model: str | None
    path_points: int
    dynamic_sampling: int
    record_every: int
    eval_prompts: int
    resume: bool
    explicit: dict[str, Any] = field(default_factory=dict[str, Any])
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])
    environment: dict[str, str] = field(default_factory=dict[str, str])

    def value(self, name: str) -> Any:
        """What a TRL field is set to, as plain YAML can hold it."""
        return _value_of(name, (self.script, self.training, self.model, self.dataset))


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """TRL's fields get their default appended; ours say theirs in their own words."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        own = action.dest in (*OWN_FIELDS, "config")
        return action.help if own else super()._get_help_string(action)


def make_parser() -> Any:
    """TRL's parser for ``trl grpo`` with our fields added."""
    from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, TrlParser
    from trl.scripts.grpo import GRPOScriptArguments

    class Parser(TrlParser):
        def error(self, message: str) -> NoReturn:
            raise InputError(f"train: {message}")

    parser = Parser(
        (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig),
        prog="tokencredit train",
        allow_abbrev=False,
        formatter_class=_Help,
        description="Train a language model with GRPO and token-level credit. Every field of "
        "`trl grpo` is a flag here, and a key of the YAML given with --config.",
    )
    add = parser.add_argument_group("tokencredit").add_argument
    add("--config", metavar="FILE.yaml", help="YAML with any of these fields; flags override it")
    add(
        "--lab",
        nargs="?",
        const=DEFAULT_LAB,
        metavar="SETTING",
        help="train the embedded task and policy (default chain-qwen3; see `tokencredit lab`)",
    )
    add("--credit", metavar="NAME", help="credit rule (see `tokencredit methods`); none = plain")
    add("--set", nargs="+", action="extend", metavar="KEY=VALUE", help="options of the credit rule")
    add(
        "--success_from",
        metavar="NAME",
        help="reward function that says whether a response is right",
    )
    add(
        "--entropy_source",
        choices=("auto", "old_logprobs", "forward"),
        default="auto",
        help="where token entropies come from (default auto)",
    )
    add(
        "--reward_model",
        metavar="NAME",
        help="for DATC: the frozen reward model that is differentiated, a folder or name; "
        "from_rewards = the one among the rewards (default if reward_model_name_or_path is set); "
        "with --lab: strong (default) or weak",
    )
    add(
        "--path_points",
        type=int,
        default=1,
        metavar="N",
        help="for DATC: average the reward gradient at N points between each token and the "
        "policy's mean embedding (default 1: at the token)",
    )
    add(
        "--dynamic_sampling",
        type=int,
        default=0,
        metavar="N",
        help="replace groups in which there is nothing to compare (all right, all wrong) by up to "
        "N further rounds of sampling, as DAPO does (default 0: they stay)",
    )
    add(
        "--record_every",
        type=int,
        default=10,
        metavar="N",
        help="record the rollouts of every Nth step; 0 = never (default 10)",
    )
    add(
        "--eval_prompts",
        type=int,
        default=1024,
        metavar="N",
        help="with --lab: held-out prompts for the accuracy before and after (default 1024)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the last checkpoint in --output_dir",
    )
    return parser


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML mapping from a file, or `InputError` with file and line."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise InputError(f"{where}: {problem}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{path}: must hold a mapping of field to value")
    for key in content:
        if not isinstance(key, str):
            raise InputError(f"{path}: key {key!r} must be a field name")
    return content


def parse_train_arguments(
    argv: Sequence[str], *, defaults: Mapping[str, Any] | None = None
) -> TrainArguments:
    """Parse flags and YAML; ``defaults`` stand below both (the lab's own configuration).

    Raises:
        InputError: an unknown key or flag (with the nearest known one), a value of the wrong
            type, or a configuration that TRL refuses.
    """
    parser = make_parser()
    known = {action.dest for action in parser._actions} - {"help"}
    flags = _flags_given(parser, argv)
    path = config_path(argv)
    config = {} if path is None else read_yaml(path)
    environment = _environment(config.pop("env", None), path)
    os.environ.update(environment)
    for key in config:
        if key == "config" or key not in known:
            hint = nearest(key, known) or _launcher_hint(key)
            raise InputError(f"{path}: unknown key {key!r}{hint}")
    options: dict[str, Any] = {}
    if isinstance(config.get("credit"), dict):
        credit = dict(config["credit"])
        config["credit"] = credit.pop("name", None)
        if config["credit"] is None:
            raise InputError(f"{path}: credit must name its rule: credit: {{name: gtpo, ...}}")
        options.update(credit)
    yaml_pairs = config.pop("set", None)
    if yaml_pairs is not None:
        pairs = yaml_pairs if isinstance(yaml_pairs, list) else [yaml_pairs]
        options.update(set_options([str(pair) for pair in pairs]))
    _check_types(parser, config, path)

    parser.set_defaults_with_config(**{**dict(defaults or {}), **config})
    try:
        *parsed, own, rest = parser.parse_args_into_dataclasses(
            args=list(argv), return_remaining_strings=True
        )
    except InputError:
        raise
    except Exception as error:  # TRL's configurations check themselves, each in its own way
        raise InputError(f"train: {_one_line(error)}") from error
    if rest:
        flag = next((r for r in rest if r.startswith("--")), rest[0])
        word = flag.removeprefix("--").split("=")[0]
        hint = nearest(word, known) or _launcher_hint(word)
        raise InputError(f"train: unknown argument {flag!r}{hint}")
    script, training, model, dataset = parsed
    if "credit" in flags and config.get("credit") not in (None, own.credit):
        options = {}
    options.update(set_options(own.set or []))
    if own.credit in (None, "none", "None"):
        if options:
            raise InputError("train: --set needs --credit NAME")
        rule = None
    else:
        rule = resolve(own.credit, options)
    for name, lowest in (
        ("record_every", 0),
        ("eval_prompts", 1),
        ("path_points", 1),
        ("dynamic_sampling", 0),
    ):
        value = getattr(own, name)
        if value is None or value < lowest:
            raise InputError(f"train: {name} must be at least {lowest}, got {value}")
    explicit: dict[str, Any] = {}
    for name in [*config, *flags]:
        if name not in OWN_FIELDS and name != "config":
            explicit[name] = _value_of(name, (script, training, model, dataset))
    for name, (lowest, allowed) in AT_LEAST.items():
        value = getattr(training, name)
        if value is not None and (value < lowest or (value == lowest and not allowed)):
            bound = "at least" if allowed else "above"
            raise InputError(f"train: {name} must be {bound} {lowest}, got {value}")
    lab = lab_name(own.lab)
    beside = next((name for name in LAB_BRINGS if explicit.get(name)), None)
    if lab is not None and beside is not None:
        raise InputError(f"train: --lab brings its own model, data and reward; leave out {beside}")
    return TrainArguments(
        script=script,
        training=training,
        model=model,
        dataset=dataset,
        rule=rule,
        lab=lab,
        success_from=own.success_from,
        entropy_source=own.entropy_source,
        reward_model=own.reward_model,
        path_points=own.path_points,
        dynamic_sampling=own.dynamic_sampling,
        record_every=own.record_every,
        eval_prompts=own.eval_prompts,
        resume=own.resume,
        explicit=explicit,
        defaults=dict(defaults or {}),
        environment=environment,
    )


def config_path(argv: Sequence[str]) -> str | None:
    """The file that ``--config`` names, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append")
    try:
        given = parser.parse_known_args(list(argv))[0].config or []
    except argparse.ArgumentError as error:
        raise InputError(f"train: {error}") from error
    if len(given) > 1:
        raise InputError(f"train: --config is given {len(given)} times; put it all into one file")
    return given[0] if given else None


def lab_name(value: Any) -> str | None:
    """The lab's setting that a flag or a YAML value names: ``lab: true`` is the default one."""
    if value is None or value is False:
        return None
    return DEFAULT_LAB if value is True else str(value)


def _flags_given(parser: Any, argv: Sequence[str]) -> list[str]:
    table = parser._option_string_actions
    names = [arg.split("=")[0] for arg in argv if arg.startswith("--")]
    return [table[name].dest for name in names if name in table]


def _value_of(name: str, parsed: Sequence[Any]) -> Any:
    for group in parsed:
        if hasattr(group, name):
            return plain(getattr(group, name))
    return None


def plain(value: Any) -> Any:
    """A field's value as YAML can hold it and TRL's parser reads it again."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
        return {name: plain(v) for name, (v, default) in fields.items() if v != default}
    if value is None or type(value) in (bool, int, float, str):
        return value
    return str(value)


def _check_types(parser: Any, config: dict[str, Any], path: Any) -> None:
    """Refuse YAML values of a type that the field cannot have; argparse looks only at texts.

    A number where a text belongs becomes that text, and one text where a list belongs a list.
    """
    optional, defaults = {"credit", "lab", "success_from"}, {}
    for cls in parser.dataclass_types:
        hints = typing.get_type_hints(cls)
        for f in dataclasses.fields(cls):
            defaults[f.name] = f.default
            if type(None) in typing.get_args(hints[f.name]):
                optional.add(f.name)
    for action in parser._actions:
        name = action.dest
        if name in config and not action.option_strings[0].startswith("--no_"):
            where = f"{path}: {name}"
            if config[name] is not None:
                config[name] = _checked(action, config[name], where)
            elif name not in optional and defaults.get(name) is not None:
                raise InputError(f"{where} is empty; give it a value or leave it out")


def _checked(action: Any, value: Any, where: str) -> Any:
    kind, several = action.type, action.nargs == "+"
    if isinstance(value, (dict, list)):
        if isinstance(value, list) and several:
            return [_typed(kind, v, where) for v in value] if kind in (int, float) else value
        if kind is None or kind in (int, float) or action.choices is not None or _is_bool(action):
            raise InputError(f"{where} must be one value, got {value!r}")
        return value  # TRL takes mappings where the command line takes JSON
    if action.nargs == 0 or _is_bool(action):
        if action.nargs != 0 and isinstance(value, str):
            return value  # argparse will look at it
        if not isinstance(value, bool):
            raise InputError(f"{where} must be true or false, got {value!r}")
        return value
    if value is False and "no" in (action.choices or ()):
        return "no"  # what YAML makes of a bare no
    if isinstance(value, bool):
        if action.dest != "lab" and (action.choices is not None or kind not in (str, None)):
            raise InputError(f"{where} must not be true or false, got {value!r}")
        return value
    value = _typed(kind or str, value, where)
    if action.choices is not None and value not in action.choices:
        listed = ", ".join(map(str, action.choices))
        hint = nearest(str(value), map(str, action.choices))
        raise InputError(f"{where} is {value!r}, must be one of {listed}{hint}")
    return [value] if several else value


def _is_bool(action: Any) -> bool:
    return getattr(action.type, "__name__", "") == "string_to_bool"


def _typed(kind: Any, value: Any, where: str) -> Any:
    try:
        if isinstance(value, (bool, dict, list)) or value is None:
            raise ValueError
        return kind(value if isinstance(value, str) else str(value))
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        names = {int: "a whole number", float: "a number"}
        wanted = f"must be {names[kind]}, got" if kind in names else "cannot be"
        raise InputError(f"{where} {wanted} {value!r}") from error


def _launcher_hint(word: str) -> str:
    """`trl grpo` starts its own processes; here a launcher does."""
    if word not in ("accelerate_config", "config_file", "num_processes", "num_machines"):
        return ""
    return "; for several processes use `accelerate launch -m tokencredit train ...` or torchrun"


def _environment(variables: Any, path: Any) -> dict[str, str]:
    """The ``env`` mapping of a TRL YAML."""
    if variables is None:
        return {}
    if not isinstance(variables, dict):
        raise InputError(f"{path}: env must be a mapping of variable to value")
    return {str(key): str(value) for key, value in variables.items()}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
