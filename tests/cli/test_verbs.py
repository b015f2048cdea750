"""The verbs besides training, and what is common to all."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Place

import tokencredit
from tokencredit.records import read_records


def rows(count: int = 3) -> str:
    lines: list[str] = []
    for group in range(count):
        for reward in (1.0, 0.0):
            lines.append(
                json.dumps(
                    {
                        "schema": 1,
                        "group": group,
                        "tokens": ["a", "b"],
                        "mask": [1, 1],
                        "reward": reward,
                        "signals": {"entropy": [1.0 + group, 2.0]},
                    }
                )
            )
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("argv", [["--version"], ["-V"]])
def test_the_version(place: Place, argv: list[str]):
    outcome = place.run(*argv)
    assert outcome.code == 0 and outcome.out == f"tokencredit {tokencredit.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["help"]])
def test_every_verb_is_listed(place: Place, argv: list[str]):
    outcome = place.run(*argv)
    assert outcome.code == (0 if argv else 2)
    for verb in ("train", "assign", "methods", "lab", "env"):
        assert re.search(rf"^  {verb} ", outcome.out, re.MULTILINE)


@pytest.mark.parametrize("verb", ["train", "assign", "methods", "lab", "env"])
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_verb_has_help(place: Place, verb: str, flag: str):
    outcome = place.run(verb, flag)
    assert outcome.code == 0 and outcome.err == ""
    assert f"usage: tokencredit {verb}" in outcome.out


def test_the_help_of_train_is_complete(place: Place):
    from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    text = place.run("train", "--help").out
    for cls in (GRPOScriptArguments, GRPOConfig, ModelConfig, DatasetMixtureConfig):
        for field in dataclasses.fields(cls):
            if field.init:
                assert f"--{field.name}" in text, field.name
    for name in ("lab", "credit", "set", "success_from", "entropy_source", "record_every",
                 "eval_prompts", "resume", "config"):  # fmt: skip
        assert re.search(rf"--{name}\b", text), name


def test_the_help_of_other_verbs_is_complete(place: Place):
    text = place.run("assign", "--help").out
    assert all(word in text for word in ("--credit", "--set", "--output", "--overwrite", "stdin"))
    assert "build" in place.run("lab", "--help").out
    assert "--seed" in place.run("lab", "build", "--help").out


def test_every_method_is_listed_and_explained(place: Place):
    listed = place.run("methods").out
    for name in ("grpo", "dr_grpo", "dapo", "gtpo", "grpo_s"):
        assert re.search(rf"^{name} ", listed, re.MULTILINE)
        explained = place.run("methods", name).out
        for option in tokencredit.methods()[name].options:
            assert re.search(rf"^  {option.name} .*{re.escape(option.help)}", explained, re.M)


def test_env_names_versions_and_devices(place: Place):
    out = place.run("env").out
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in ("torch", "trl", "devices"))


def test_the_lab_lists_its_settings(place: Place):
    for argv in ([], ["list"]):
        out = place.run("lab", *argv).out
        assert len(out.splitlines()) == 6 and "chain-qwen3" in out


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_assign_from_file_to_file(place: Place, ending: str):
    if ending == ".zst":
        pytest.importorskip("zstandard")
    place.write("in.jsonl", rows())
    argv = ("--credit", "gtpo", "--set", "alpha2=0.2", "eps=1e-3")
    outcome = place.run("assign", "in.jsonl", *argv, "-o", f"out.jsonl{ending}")
    assert outcome.code == 0 and outcome.err == ""
    assert outcome.out.startswith("gtpo: 6 responses, 3 groups, 12 tokens -> out.jsonl")
    written = list(read_records(f"out.jsonl{ending}"))
    assert [set(r.credit) for r in written] == [{"gtpo"}] * 6
    assert written[0].meta["credit"]["gtpo"]["options"]["alpha2"] == 0.2
    again = place.run("assign", f"out.jsonl{ending}", "--credit", "grpo", "-o", "both.jsonl")
    assert again.code == 0
    assert [set(r.credit) for r in read_records("both.jsonl")] == [{"gtpo", "grpo"}] * 6
    place.refused(place.run("assign", "in.jsonl", *argv, "-o", "both.jsonl"), "exists already")
    over = place.run("assign", "in.jsonl", *argv, "-o", "both.jsonl", "--overwrite")
    assert over.code == 0
    assert [set(r.credit) for r in read_records("both.jsonl")] == [{"gtpo"}] * 6


@pytest.mark.parametrize("packed", [False, True])
def test_assign_from_standard_input(place: Place, monkeypatch: pytest.MonkeyPatch, packed: bool):
    data = rows().encode()

    class Standard:
        buffer = io.BytesIO(gzip.compress(data) if packed else data)

    monkeypatch.setattr(sys, "stdin", Standard())
    outcome = place.run("assign", "-", "--credit", "gtpo", "-o", "out.jsonl")
    if packed:  # by ending alone, and a stream has none: the line says what is wrong
        place.refused(outcome, "stdin" if "stdin" in outcome.err else "-")
        return
    assert outcome.code == 0, outcome.err
    assert len(list(read_records("out.jsonl"))) == 6


def test_the_lab_builds_a_policy_anew(place: Place, monkeypatch: pytest.MonkeyPatch):
    from tokencredit import lab

    seen: dict[str, Any] = {}

    def build(setting: Any, folder: Any, *, seed: Any, on_progress: Any) -> Path:
        seen.update(setting=setting.name, folder=str(folder), seed=seed)
        on_progress(100, 1.0, 0.5)
        return Path(folder)

    monkeypatch.setattr(lab, "build_policy", build, raising=False)
    outcome = place.run("lab", "build", "chain-llama", "-o", "there", "--seed", "3")
    assert outcome.code == 0 and "sampled accuracy 0.500" in outcome.out
    assert seen == {"setting": "chain-llama", "folder": "there", "seed": 3}


def test_a_bug_says_how_to_report_it(place: Place, monkeypatch: pytest.MonkeyPatch):
    from tokencredit.cli import methods

    def broken() -> Any:
        raise KeyError("x")

    monkeypatch.setattr(methods, "methods", broken)
    outcome = place.run("methods")
    assert outcome.code == 1
    assert "Traceback" in outcome.err and "please report it" in outcome.err
