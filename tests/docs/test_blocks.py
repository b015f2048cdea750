"""Code in the documentation runs, commands parse, and YAML holds keys that exist."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import DOCS, DOCUMENTS, ROOT, blocks, name_of, shipped, without_blocks

from tokencredit.cli.main import VERBS, main
from tokencredit.methods import registry

RUN = [ROOT / "README.md", *(DOCS / f"{page}.md" for page in ("guide", "losses", "records", "lab"))]
RUN += [DOCS / "trl.md", DOCS / "architecture.md"]


@pytest.fixture
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))


def a_script_of_yours(folder: Path) -> dict[str, Any]:
    """What the README's five lines are added to: a model, its tokenizer, data, reward, config."""
    from trl import GRPOConfig

    from tokencredit import lab

    task = lab.setting("chain-qwen3").task
    model, tokenizer = lab.load_policy("chain-qwen3")
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=1,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=task.max_response,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    return {
        "model": model,
        "tokenizer": tokenizer,
        "args": args,
        "dataset": lab.prompt_dataset(task, 2, seed=0),
        "accuracy": lab.task_reward(task),
    }


@pytest.mark.usefixtures("_own_registry")
@pytest.mark.parametrize("path", RUN, ids=name_of)
def test_python_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # A module of its own, because dataclasses look theirs up.
    module = types.ModuleType("documentation")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    if path.name == "README.md":
        vars(module).update(a_script_of_yours(tmp_path))
    found = 0
    for source in blocks(_text(path), "python"):
        if "# not run:" in source:
            continue
        found += 1
        code = compile(source, str(path), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, vars(module))
    assert found


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_few_blocks_are_left_out() -> None:
    left_out = sum("# not run:" in s for path in RUN for s in blocks(_text(path), "python"))
    assert left_out <= 2


# -- commands -------------------------------------------------------------------------------


def commands(path: Path) -> list[str]:
    """Every `tokencredit ...` of a document: in blocks of commands, and in running text."""
    text = _text(path)
    lines: list[str] = []
    for block in blocks(text, "bash", "console", "sh"):
        lines += block.replace("\\\n", " ").splitlines()
    lines += re.findall(r"`((?:python -m )?tokencredit [^`]+)`", without_blocks(text))
    found: list[str] = []
    for line in lines:
        for part in re.split(r"\s\|\s|&&|;", line.split("  #")[0].split(" # ")[0]):
            match = re.search(r"(?:^|-m |\s)tokencredit (?=[a-z-])(.*)", part.strip())
            if match and "pip install" not in part:
                found.append(match[1].strip())
    return found


@cache
def flags_of(verb: str) -> frozenset[str]:
    if verb == "train":
        from tokencredit.engines.trl.arguments import make_parser

        return frozenset(make_parser()._option_string_actions)
    found: set[str] = set()
    below = ("build", "evidence") if verb == "lab" else ()
    for argv in ([verb, "--help"], *([verb, each, "--help"] for each in below)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main(list(argv))
        found |= set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", out.getvalue()))
    return frozenset(found)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_parse(path: Path) -> None:
    for command in commands(path):
        verb, *words = shlex.split(command)
        if verb.startswith("-") or verb in ("VERB", "..."):
            continue
        assert verb in VERBS, command
        for word in words:
            flag = word.split("=")[0]
            if flag.startswith("-") and flag != "-":
                assert flag in flags_of(verb), command


def test_commands_are_found() -> None:
    assert "train --resume --output_dir runs/mine" in commands(ROOT / "README.md")
    assert any(command.startswith("lab build") for command in commands(DOCS / "cli.md"))
    assert "train --config mine.yaml" in commands(DOCS / "guide.md")


def test_every_verb_and_every_flag_of_ours_is_documented() -> None:
    from tokencredit.engines.trl.arguments import OWN_FIELDS

    text = _text(DOCS / "cli.md")
    for verb in VERBS:
        assert f"\n## {verb}\n" in text and f"| `{verb}` |" in text, verb
    for name in (*OWN_FIELDS, "config"):
        assert f"`--{name}" in text, name


def test_rules_named_in_commands_exist() -> None:
    import tokencredit.lab.credits  # noqa: F401 - registers oracle and uniform
    from tokencredit import methods, resolve

    for path in DOCUMENTS:
        for command in commands(path):
            words = shlex.split(command)
            for i, word in enumerate(words[:-1]):
                rule = words[i + 1]
                if word != "--credit" or rule in ("none", "NAME"):
                    continue
                *others, rule = rule.split(",")
                assert {*others, rule} <= set(methods()), command
                options: dict[str, str] = {}
                if "--set" in words:
                    for pair in words[words.index("--set") + 1 :]:
                        if "=" not in pair or pair.startswith("-"):
                            break
                        key, value = pair.split("=", 1)
                        options[key] = value
                resolve(rule, options)


# -- YAML and examples ----------------------------------------------------------------------


def check_yaml(text: str) -> None:
    from tokencredit import resolve
    from tokencredit.engines.trl.arguments import make_parser

    known = {action.dest for action in make_parser()._actions} | {"env"}
    content = yaml.safe_load(text)
    assert set(content) <= known, set(content) - known
    credit = content.get("credit")
    if isinstance(credit, dict):
        resolve(credit.pop("name"), credit)


def test_yaml_keys_exist() -> None:
    ours = [path for path in DOCUMENTS if path.name != "slime.md"]  # its file is slime's
    found = [text for path in ours for text in blocks(_text(path), "yaml")]
    assert len(found) > 5
    for text in found:
        check_yaml(text)


def test_the_papers_configurations_agree_with_the_recipes() -> None:
    from tokencredit import methods
    from tokencredit.engines.trl import recommended_config

    for text in blocks(_text(DOCS / "papers.md"), "yaml"):
        content = yaml.safe_load(text)
        rule = methods()[content["credit"]["name"]].rule()
        if content.get("importance_sampling_level") == "sequence" and rule.name == "grpo":
            continue  # GSPO
        for name, value in recommended_config(rule).items():
            if (rule.name, name) != ("grpo", "beta"):  # said on the method's page
                assert content[name] == value, (rule.name, name)


def test_the_example_yaml() -> None:
    from tokencredit.engines.trl.arguments import parse_train_arguments

    check_yaml(_text(ROOT / "examples/train.yaml"))
    path = str(ROOT / "examples/train.yaml")
    parsed = parse_train_arguments(["--config", path, "--bf16", "false", "--use_cpu", "true"])
    assert parsed.rule is not None and parsed.success_from == "accuracy_reward"


def test_the_example_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "out"
    argv = ["trl_script.py", "--steps", "1", "--output", str(output)]
    monkeypatch.setattr("sys.argv", argv)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(ROOT / "examples/trl_script.py"), run_name="__main__")
    assert (output / "model.safetensors").is_file() and (output / "rollouts.jsonl").is_file()
    assert "credit/sign_flips" in out.getvalue()


def test_the_recommendations_on_the_trl_page() -> None:
    from tokencredit import methods
    from tokencredit.engines.trl import recommended_config

    text = _text(DOCS / "trl.md")
    for name in shipped():
        fields = recommended_config(methods()[name].rule())
        high = fields.get("epsilon_high", "")
        cells = [f"`{name}`", fields["loss_type"], fields["epsilon"], high, f"{fields['beta']:g}"]
        cells.append("true" if fields.get("mask_truncated_completions") else "")
        row = "|".join(f" {cell} " if cell != "" else " " for cell in cells)
        assert f"|{row}|" in text, row
