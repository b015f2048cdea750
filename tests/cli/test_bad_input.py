"""What users get wrong: one line, exit code 2, nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from tiny_runs import Place


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["prompts.jsonl:3", "not JSON"]),
        ("[1]", ["prompts.jsonl:3", "object", "prompt"]),
        ('{"promt": "1"}', ["prompts.jsonl:3", "'prompt' is missing", "did you mean 'promt'"]),
        ('{"prompt": 3}', ["prompts.jsonl:3", "field 'prompt'", "text or a list"]),
        ('{"prompt": ""}', ["prompts.jsonl:3", "field 'prompt'"]),
        ('{"prompt": []}', ["prompts.jsonl:3", "field 'prompt'"]),
        ('{"prompt": ["a"]}', ["prompts.jsonl:3", "prompt[0]", "role"]),
        ('{"prompt": [{"role": "user"}]}', ["prompts.jsonl:3", "prompt[0].content"]),
        ('{"prompt": [{"role": "user", "content": 1}]}', ["prompts.jsonl:3", "prompt[0].content"]),
        ('{"prompt": "1", "answer": 2}', ["prompts.jsonl:3", "'answer'", "lines before"]),
        ('{"prompt": [{"role": "user", "content": "1"}]}', ["prompts.jsonl:3", "text on line 1"]),
    ],
)
def test_a_malformed_data_set_is_refused_by_file_line_and_field(
    place: Place, line: str, words: list[str]
):
    # A blank line counts as a line, as in every editor.
    place.write("prompts.jsonl", '{"prompt": "1 +"}\n\n' + line + "\n")
    place.refused(place.train(), *words)


def test_a_field_that_is_missing_or_changes_its_kind_is_refused_by_line(place: Place):
    good = '{"prompt": "1 +", "answer": 1}\n'
    place.write("prompts.jsonl", good + '{"prompt": "1 +"}\n')
    place.refused(place.train(), "prompts.jsonl:2", "'answer' is missing")
    place.write("prompts.jsonl", good + '{"prompt": "1 +", "answer": "one"}\n')
    place.refused(place.train(), "prompts.jsonl:2", "'answer' is text", "a number on line 1")


def test_a_data_set_that_cannot_be_had_is_refused(place: Place):
    place.write("empty.jsonl", "\n")
    place.refused(place.train(dataset_name="empty.jsonl"), "empty.jsonl", "holds no prompt")
    (place.path / "binary.jsonl").write_bytes(b"\xff\xfe{")
    place.refused(place.train(dataset_name="binary.jsonl"), "binary.jsonl", "cannot be read")
    mixture = [{"path": "json", "data_files": "binary.jsonl"}]
    place.refused(place.train(dataset_name=..., datasets=mixture), "datasets cannot be loaded")
    place.refused(place.train(dataset_name="gone.jsonl"), "gone.jsonl", "cannot be read")
    place.refused(place.train(dataset_name=...), "dataset_name")
    place.refused(place.train(dataset_name="./gone"), "./gone", "cannot be loaded")
    place.refused(place.train(eval_strategy="steps", eval_steps=1), "evaluation split")
    mixture = [{"path": "json", "data_files": "gone.jsonl"}]
    place.refused(place.train(dataset_name=..., datasets=mixture), "datasets", "gone.jsonl")
    place.refused(place.train(dataset_name=..., datasets=[{"pth": "json"}]), "pth")
    place.write("bare.jsonl", '{"question": "1"}\n')
    mixture = [{"path": "json", "data_files": "bare.jsonl"}]
    place.refused(place.train(dataset_name=..., datasets=mixture), "no column 'prompt'")
    mixture = [{"path": "json", "data_files": "prompts.jsonl"}]
    changes = {"dataset_name": ..., "datasets": mixture, "dataset_train_split": "trian"}
    place.refused(place.train(**changes), "'trian'", "it has train")


def test_messages_need_a_chat_template(place: Place):
    place.write("prompts.jsonl", '{"prompt": [{"role": "user", "content": "1"}]}\n')
    place.refused(place.train(), "no chat template")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--credit", "gtop"], ["unknown method 'gtop'", "did you mean 'gtpo'", "grpo_s"]),
        (["--credit", "gtpo", "--set", "alhpa2=1"], ["alhpa2", "alpha2"]),
        (["--credit", "gtpo", "--set", "alpha2=-1"], ["alpha2", "-1"]),
        (["--credit", "gtpo", "--set", "alpha2=abc"], ["alpha2", "abc"]),
        (["--credit", "gtpo", "--set", "alpha2"], ["key=value"]),
        (["--credit", "gtpo", "--set", "alpha2=1", "alpha2=2"], ["alpha2 is given twice"]),
        (["--set", "alpha2=1"], ["--set needs --credit"]),
        (["--credit", "none", "--set", "alpha2=1"], ["--set needs --credit"]),
        (["--num_generation", "4"], ["--num_generation", "did you mean 'num_generations'"]),
        (["--credti=gtpo"], ["--credti", "did you mean 'credit'"]),
        (["stray"], ["'stray'"]),
        (["--num_processes", "2"], ["num_processes", "accelerate launch"]),
        (["--max_steps", "many"], ["max_steps", "many"]),
        (["--max_steps"], ["max_steps"]),
        (["--config", "other.yaml"], ["--config is given 2 times"]),
        (["--num_generations", "3"], ["3"]),
        (["--num_generations", "1"], ["at least 2 generations"]),
        (["--temperature", "0"], ["temperature must be above 0"]),
        (["--learning_rate", "-1"], ["learning_rate must be at least 0"]),
        (["--max_completion_length", "0"], ["max_completion_length must be at least 1"]),
        (["--record_every", "-1"], ["record_every"]),
        (["--loss_type", "gpro"], ["gpro"]),
        (["--entropy_source", "guess"], ["entropy_source"]),
        (["--success_from", "lenght", "--credit", "gtpo"], ["did you mean 'length'"]),
        (["--lab"], ["--lab brings its own", "model_name_or_path"]),
        (["--entropy_source", "old_logprobs", "--credit", "gtpo"], ["old_logprobs"]),
        (["--importance_sampling_level", "sequence", "--credit", "gtpo"], ["gtpo", "'token'"]),
        (["--beta", "0.1", "--credit", "grpo_s"], ["grpo_s", "beta"]),
        (["--reward_funcs", "rewards_here.length", "rewards_here.other", "--credit", "gtpo"],
         ["success_from", "length, other"]),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_used_are_refused(place: Place, argv: list[str], words: list[str]):
    place.refused(place.train(*argv), *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rte": 1}, ["run.yaml", "'learning_rte'", "did you mean 'learning_rate'"]),
        ({"help": True}, ["unknown key 'help'"]),
        ({"num_processes": 2}, ["num_processes", "accelerate launch"]),
        ({"max_steps": 2.5}, ["run.yaml: max_steps", "whole number", "2.5"]),
        ({"max_steps": "two"}, ["max_steps", "whole number", "'two'"]),
        ({"max_steps": True}, ["max_steps", "True"]),
        ({"max_steps": [2]}, ["max_steps", "one value"]),
        ({"max_steps": None}, ["max_steps is empty"]),
        ({"learning_rate": "fast"}, ["learning_rate", "a number", "'fast'"]),
        ({"learning_rate": {"a": 1}}, ["learning_rate", "one value"]),
        ({"num_generations": "some"}, ["num_generations", "'some'"]),
        ({"bf16": "perhaps"}, ["bf16", "perhaps"]),
        ({"use_cpu": 3}, ["use_cpu", "true or false"]),
        ({"eval_strategy": "setps"}, ["eval_strategy", "did you mean 'steps'"]),
        ({"reward_weights": ["a"]}, ["reward_weights", "'a'"]),
        ({"entropy_source": "guess"}, ["entropy_source", "old_logprobs"]),
        ({"record_every": "often"}, ["record_every", "often"]),
        ({"env": ["A=1"]}, ["env must be a mapping"]),
        ({"credit": {"alpha2": 1}}, ["credit must name its rule"]),
        ({"credit": {"name": "gtpo", "alhpa2": 1}}, ["alhpa2", "alpha2"]),
        ({"credit": {"name": "gtpo", "alpha2": "much"}}, ["alpha2", "much"]),
        ({"credit": {"name": "gtpo", "alpha2": None}}, ["alpha2"]),
        ({"credit": {"name": 3}}, ["3"]),
        ({"credit": 3}, ["3"]),
        ({"credit": ["gtpo"]}, ["credit"]),
        ({"credit": True}, ["credit"]),
        ({"set": "alpha2=1"}, ["--set needs --credit"]),
        ({"lab": "chain-qwen"}, ["chain-qwen3"]),
        ({"loss_type": "gpro"}, ["gpro"]),
        ({"warmup_ratio": "x"}, ["warmup_ratio"]),
    ],
)  # fmt: skip
def test_yaml_that_cannot_be_used_is_refused(
    place: Place, changes: dict[str, Any], words: list[str]
):
    place.refused(place.train(**changes), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: [1,\n", ["broken.yaml:3"]),
        ("a: 1\n\tb: 2\n", ["broken.yaml:2"]),
        ("- a\n", ["broken.yaml", "mapping"]),
        ("1: a\n", ["broken.yaml", "key 1"]),
        ("a: \x00\n", ["broken.yaml"]),
    ],
)
def test_broken_yaml_is_refused_by_file_and_line(place: Place, text: str, words: list[str]):
    place.write("broken.yaml", text)
    place.refused(place.run("train", "--config", "broken.yaml"), *words)


def test_a_configuration_that_cannot_be_read_is_refused(place: Place):
    place.refused(place.run("train", "--config", "gone.yaml"), "gone.yaml", "cannot be read")
    place.refused(place.run("train", "--config", "policy"), "policy", "cannot be read")
    place.refused(place.run("train", "--config"), "--config")
    place.refused(place.run("train"), "--lab", "--config")
    place.refused(place.run("train", "--lab", "chain-qwen"), "chain-qwen3")
    place.refused(place.run("train", "--use_cpu", "--bf16=false"), "no model")


REWARDS = {
    "raises": ("def f(completions, **_):\n    return 1 / 0\n", ["ZeroDivisionError", "here.py:2"]),
    "too_few": ("def f(completions, **_):\n    return [1.0]\n", ["got 1 values"]),
    "number": ("def f(completions, **_):\n    return 1.0\n", ["got float"]),
    "nothing": ("def f(completions, **_):\n    pass\n", ["got NoneType"]),
    "texts": ("def f(completions, **_):\n    return completions\n", ["response 0", "a number"]),
    "digits": ("def f(completions, **_):\n    return ['1'] * len(completions)\n", ["'1'"]),
    "infinite": ("def f(completions, **_):\n    return [1e999] * len(completions)\n", ["infinite"]),
    "nan": ("def f(completions, **_):\n    return [float('nan')] * 4\n", ["NaN", "f"]),
    "none": ("def f(completions, **_):\n    return [None] * 4\n", ["None or NaN"]),
    "later": ("async def f(completions, **_):\n    return 1 / 0\n", ["ZeroDivisionError"]),
    "late_few": ("async def f(completions, **_):\n    return [1.0]\n", ["got 1 values"]),
    "arguments": ("def f():\n    return []\n", ["TypeError"]),
    "object": (
        "class F:\n    def __call__(self, **_):\n        raise ValueError('no')\nf = F()\n",
        ["'F'", "ValueError: no"],
    ),
    "partial": (
        "import functools\ndef g(**_):\n    raise ValueError('no')\nf = functools.partial(g)\n",
        ["ValueError: no"],
    ),
}


@pytest.mark.parametrize("name", REWARDS)
def test_a_reward_function_that_fails_is_named(place: Place, name: str):
    source, words = REWARDS[name]
    place.write("bad_here.py", source)
    outcome = place.train("--credit", "gtpo", reward_funcs=["bad_here.f"])
    place.refused(outcome, "reward function", *words)


@pytest.mark.parametrize(
    ("source", "name", "words"),
    [
        (None, "gone_here.f", ["gone_here.f", "cannot be imported", "gone_here"]),
        ("f = 1\n", "bad_here.f", ["not callable"]),
        ("f = 1\n", "bad_here.g", ["cannot be imported", "'g'"]),
        ("f = 1\n", "bad_here.", ["cannot be imported"]),
        ("f =\n", "bad_here.f", ["SyntaxError", "bad_here.py"]),
        ("1 / 0\n", "bad_here.f", ["ZeroDivisionError", "bad_here.py:1"]),
        ("import sys\nsys.exit(3)\n", "bad_here.f", ["SystemExit"]),
        (None, ".f", ["unknown reward function '.f'"]),
        (None, "acuracy_reward", ["did you mean 'accuracy_reward'"]),
    ],
)
def test_a_reward_function_that_cannot_be_had_is_refused(
    place: Place, source: str | None, name: str, words: list[str]
):
    if source is not None:
        place.write("bad_here.py", source)
    place.refused(place.train(reward_funcs=[name]), *words)
    place.refused(place.train(reward_funcs=name), *words)


def test_no_reward_is_refused(place: Place):
    place.refused(place.train(reward_funcs=...), "no reward")
    place.refused(place.train(reward_funcs=..., reward_model_name_or_path="./gone"), "./gone")


def test_a_model_that_is_not_one_is_refused(place: Place):
    place.refused(place.train(model_name_or_path=...), "no model")
    place.refused(place.train(model_name_or_path="./gone"), "'./gone' does not exist")
    place.refused(place.train(model_name_or_path="gone"), "'gone'")
    (place.path / "empty").mkdir()
    place.refused(place.train(model_name_or_path="empty"), "no config.json")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(**sizes, intermediate_size=16, vocab_size=30)
    transformers.BertForSequenceClassification(bert).save_pretrained("bert")
    place.refused(place.train(model_name_or_path="bert"), "BertForSequenceClassification")
    t5 = transformers.T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=30)
    transformers.T5ForConditionalGeneration(t5).save_pretrained("t5")
    place.refused(place.train(model_name_or_path="t5"), "'t5'", "no causal language model")
    transformers.ViTConfig().save_pretrained("vit")
    place.refused(place.train(model_name_or_path="vit"), "no causal language model")
    place.write("policy/config.json", "{")
    place.refused(place.train(), "policy")


def test_a_model_without_whole_weights_is_refused(place: Place):
    weights = place.path / "policy/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    place.refused(place.train(), "model.safetensors", "cut off")
    weights.write_bytes(whole[:5])
    place.refused(place.train(), "model.safetensors", "cut off")
    weights.unlink()
    place.refused(place.train(), "policy")


@pytest.mark.parametrize("token", ["eos", "pad"])
def test_a_tokenizer_without_pad_or_end_token_is_refused(place: Place, token: str):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = place.path / "policy" / name
        if path.exists():
            fields = json.loads(path.read_text())
            fields.pop(f"{token}_token", None)
            path.write_text(json.dumps(fields))
    words = {"eos": "no end token", "pad": "no pad token"}
    place.refused(place.train(), words[token], f"{token}_token", "tokenizer_config.json")


def test_a_tokenizer_that_is_missing_or_broken_is_refused(place: Place):
    place.write("policy/tokenizer.json", "{")
    place.refused(place.train(), "tokenizer", "policy")
    (place.path / "policy/tokenizer.json").unlink()
    place.refused(place.train(), "tokenizer", "policy")


def test_an_output_folder_that_cannot_be_used_is_refused(place: Place):
    place.write("file", "")
    place.refused(place.train(output_dir="file"), "file is a file")
    place.refused(place.train(output_dir="file/run"), "file/run cannot be written")
    place.refused(place.train(output_dir="/proc/run"), "/proc/run cannot be written")


@pytest.mark.parametrize("part", ["config.yaml", "metrics.jsonl", "rollouts.jsonl"])
def test_another_run_is_never_overwritten(place: Place, part: str):
    (place.path / "out").mkdir()
    kept = place.write(f"out/{part}", "mine")
    place.refused(place.train(), "out holds another run", "--resume", left=None)
    assert kept.read_text() == "mine"
    assert list((place.path / "out").iterdir()) == [kept]


def test_a_refused_run_leaves_a_folder_that_was_there(place: Place):
    (place.path / "out").mkdir()
    kept = place.write("out/notes.txt", "mine")
    place.refused(place.train(dataset_name="gone.jsonl"), "gone.jsonl", left=None)
    assert list((place.path / "out").iterdir()) == [kept]
    place.refused(place.train(output_dir="a/b/c", dataset_name="gone.jsonl"), "gone", left="a")
    place.refused(place.train(output_dir=..., dataset_name="gone.jsonl"), "gone", left="runs")


def test_a_run_that_was_refused_can_be_started_again(place: Place):
    place.write("bad_here.py", REWARDS["raises"][0])
    place.refused(place.train("--credit", "gtpo", reward_funcs=["bad_here.f"]), "raised")
    assert place.train("--credit", "gtpo").code == 0


def test_nothing_to_resume_is_said(place: Place):
    place.refused(place.run("train", "--resume"), "--output_dir")
    place.refused(place.run("train", "--resume", "--output_dir", "gone"), "gone holds no run")
    place.refused(place.train("--resume"), "out holds no run")
    place.refused(place.train("--resume", output_dir=...), "--resume: no run runs/policy-plain")


def test_a_rule_whose_signal_nobody_gives_is_refused(place: Place):

    place.refused(place.train("--credit", "oracle"), "oracle", "signal 'oracle'")


# -- other verbs ----------------------------------------------------------------------------

RECORD = {
    "schema": 1,
    "group": 0,
    "token_ids": [1, 2],
    "mask": [1, 1],
    "reward": 1.0,
    "signals": {"entropy": [1.0, 2.0]},
}


def records(place: Place, **changes: Any) -> str:
    rows = [{**RECORD, **changes}, {**RECORD, **changes, "reward": 0.0}]
    rows = [{k: v for k, v in row.items() if v is not ...} for row in rows]
    place.write("in.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return "in.jsonl"


@pytest.mark.parametrize(
    ("changes", "argv", "words"),
    [
        ({"signals": ...}, [], ["in.jsonl", "'entropy'", "signals"]),
        ({"mask": [1]}, [], ["in.jsonl:1", "'mask'"]),
        ({"reward": "good"}, [], ["in.jsonl:1", "'reward'"]),
        ({}, ["--set", "alhpa2=1"], ["alhpa2", "alpha2"]),
        ({}, ["--set", "alpha1=-1"], ["alpha1"]),
        ({}, ["--credit", "gtop"], ["did you mean 'gtpo'"]),
        ({}, ["--credti", "gtpo"], ["--credti"]),
        ({}, ["-o", "gone/out.jsonl"], ["gone/out.jsonl", "folder"]),
        ({}, ["-o", "policy"], ["policy", "folder"]),
        ({}, ["-o", "prompts.jsonl"], ["prompts.jsonl", "exists already"]),
        ({}, ["-o", "-"], ["-"]),
    ],
)
def test_assign_refuses_what_it_cannot_use(
    place: Place, changes: dict[str, Any], argv: list[str], words: list[str]
):
    source = records(place, **changes)
    outcome = place.run("assign", source, "--credit", "gtpo", "-o", "out", *argv)
    place.refused(outcome, *words)
    assert not list(place.path.glob(".*"))


def test_assign_needs_its_arguments(place: Place):
    place.refused(place.run("assign"), "ROLLOUTS.jsonl")
    place.refused(place.run("assign", "gone.jsonl", "--credit", "grpo", "-o", "out"), "gone.jsonl")
    place.refused(place.run("assign", records(place), "--credit", "grpo"), "-o")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trian"], ["unknown command 'trian'", "did you mean 'train'"]),
        (["--verison"], ["--verison"]),
        (["methods", "gtop"], ["did you mean 'gtpo'"]),
        (["methods", "a", "b"], ["methods", "b"]),
        (["env", "x"], ["env", "x"]),
        (["lab", "bulid"], ["lab", "bulid"]),
        (["lab", "build", "chain-qwen"], ["chain-qwen3"]),
        (["lab", "build", "chain-qwen3", "--seed", "x"], ["seed"]),
    ],
)
def test_other_verbs_refuse_in_one_line(place: Place, argv: list[str], words: list[str]):
    place.refused(place.run(*argv), *words)


# -- a full disk ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of a few kilobytes, where this process may mount one."""
    import subprocess

    folder = tmp_path / "small"
    folder.mkdir()
    for options in ("size=120k",):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True
        )
        if done.returncode:
            pytest.skip("cannot mount a tmpfs here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_said_and_assign_leaves_nothing(place: Place, small_disk: Path):
    (small_disk / "ballast").write_bytes(b"x" * 119_000)
    rows = [json.dumps({**RECORD, "group": i}) + "\n" for i in range(100)]
    place.write("in.jsonl", "".join(rows))
    target = small_disk / "out.jsonl"
    outcome = place.run("assign", "in.jsonl", "--credit", "gtpo", "-o", str(target))
    place.refused(outcome, "out.jsonl", "No space left", left=None)
    assert [p.name for p in small_disk.iterdir()] == ["ballast"]


def test_a_full_disk_ends_training_in_one_line(place: Place, small_disk: Path):
    out = small_disk / "out"
    outcome = place.train("--credit", "gtpo", output_dir=str(out), save_steps=1)
    place.refused(outcome, "full", "--resume", left=None)
    left = [p for p in out.glob("checkpoint-*") if not (p / "trainer_state.json").exists()]
    assert not left
    shutil.copytree(out, place.path / "larger")
    outcome = place.run("train", "--resume", "--output_dir", "larger")
    assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("stage", ["metrics", "rollouts", "checkpoint", "model", "report"])
def test_a_disk_that_fills_up_anywhere_is_said(
    place: Place, monkeypatch: pytest.MonkeyPatch, stage: str
):
    from tokencredit.engines.trl import recording, report, watching

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    where: dict[str, tuple[Any, str]] = {
        "metrics": (watching.MetricsFile, "on_log"),
        "rollouts": (recording, "append_records"),
        "checkpoint": (transformers.Trainer, "_save_optimizer_and_scheduler"),
        "model": (transformers.Trainer, "save_model"),
        "report": (report, "write_aside"),
    }
    monkeypatch.setattr(*where[stage], full)
    outcome = place.train("--credit", "gtpo")
    place.refused(outcome, "full", left=None)
    assert not list((place.path / "out").glob("checkpoint-2")) or stage == "report"
