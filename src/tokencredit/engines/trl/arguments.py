"""The command line and the YAML of ``tokencredit train``: TRL's own, and a few fields more.

TRL's parser does the parsing, so every ``trl grpo`` YAML file and flag works unchanged. What is
added here: the credit rule, a check of every key against the known ones, and which fields the
user set on purpose (a rule's recipe fills in only the others).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tokencredit.errors import InputError, nearest
from tokencredit.methods.registry import resolve
from tokencredit.methods.rule import Rule
from tokencredit.methods.texts import set_options

__all__ = ["TrainArguments", "make_parser", "parse_train_arguments", "read_yaml"]

OWN_FIELDS = (
    "credit",
    "set",
    "lab",
    "success_from",
    "entropy_source",
    "record_every",
    "eval_prompts",
    "resume",
)


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
        record_every: rollouts are recorded every so many steps; 0 = never.
        eval_prompts: held-out prompts for the lab's accuracy before and after.
        resume: go on from the last checkpoint.
        explicit: what the user set, by field name.
        defaults: what the lab's setting set beneath that.
    """

    script: Any
    training: Any
    model: Any
    dataset: Any
    rule: Rule | None
    lab: str | None
    success_from: str | None
    entropy_source: Any
    record_every: int
    eval_prompts: int
    resume: bool
    explicit: dict[str, Any] = field(default_factory=dict[str, Any])
    defaults: dict[str, Any] = field(default_factory=dict[str, Any])


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
        description="Train a language model with GRPO and token-level credit. Every field of "
        "`trl grpo` is a flag here, and a key of the YAML given with --config.",
    )
    add = parser.add_argument_group("tokencredit").add_argument
    add("--config", metavar="FILE.yaml", help="YAML with any of these fields; flags override it")
    add(
        "--lab",
        nargs="?",
        const="chain-qwen3",
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
    pre = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    pre.add_argument("--config")
    path = pre.parse_known_args(list(argv))[0].config
    config = {} if path is None else read_yaml(path)
    _set_environment(config.pop("env", None), path)
    for key in config:
        if key not in known:
            raise InputError(f"{path}: unknown key {key!r}{nearest(key, known)}")
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

    parser.set_defaults_with_config(**{**dict(defaults or {}), **config})
    try:
        *parsed, own, rest = parser.parse_args_into_dataclasses(
            args=list(argv), return_remaining_strings=True
        )
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(f"train: {_one_line(error)}") from error
    if rest:
        flag = next((r for r in rest if r.startswith("--")), rest[0])
        hint = nearest(flag.removeprefix("--").split("=")[0], known)
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
    if own.record_every < 0 or own.eval_prompts < 1:
        raise InputError("train: record_every must be at least 0, eval_prompts at least 1")
    explicit: dict[str, Any] = {}
    for name in [*config, *flags]:
        if name not in OWN_FIELDS and name != "config":
            explicit[name] = _value_of(name, (script, training, model, dataset))
    return TrainArguments(
        script=script,
        training=training,
        model=model,
        dataset=dataset,
        rule=rule,
        lab=own.lab,
        success_from=own.success_from,
        entropy_source=own.entropy_source,
        record_every=own.record_every,
        eval_prompts=own.eval_prompts,
        resume=own.resume,
        explicit=explicit,
        defaults=dict(defaults or {}),
    )


def _flags_given(parser: Any, argv: Sequence[str]) -> list[str]:
    table = parser._option_string_actions
    names = [arg.split("=")[0] for arg in argv if arg.startswith("--")]
    return [table[name].dest for name in names if name in table]


def _value_of(name: str, parsed: Sequence[Any]) -> Any:
    for group in parsed:
        if hasattr(group, name):
            value = getattr(group, name)
            return value if _plain(value) else str(value)
    return None


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(_plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)


def _set_environment(variables: Any, path: Any) -> None:
    """The ``env`` mapping of a TRL YAML."""
    import os

    if variables is None:
        return
    if not isinstance(variables, dict):
        raise InputError(f"{path}: env must be a mapping of variable to value")
    for key, value in variables.items():
        os.environ[str(key)] = str(value)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
