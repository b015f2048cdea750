"""Training through the command line: configurations, what is written, and that it is right."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_runs import TINY_LAB, Place, json_lines, same_history, steps

from tokencredit.records import assign_file, read_records


def config_of(place: Place, out: str = "out") -> dict[str, Any]:
    return yaml.safe_load((place.path / out / "config.yaml").read_text())


def test_a_plain_trl_configuration_runs_unchanged(place: Place):
    outcome = place.train()
    assert outcome.code == 0, outcome.err
    assert "none (plain GRPO)" in outcome.out
    out = place.path / "out"
    assert steps(out / "metrics.jsonl") == [1, 2]
    assert not (out / "rollouts.jsonl").exists()
    assert "rollouts" not in (out / "report.md").read_text()


def test_flags_override_the_yaml_and_texts_become_numbers(place: Place):
    outcome = place.train("--max_steps", "3", "--seed=5", learning_rate="1e-4", epsilon="2e-1")
    assert outcome.code == 0, outcome.err
    assert steps(place.path / "out/metrics.jsonl") == [1, 2, 3]
    config = config_of(place)
    assert (config["max_steps"], config["seed"]) == (3, 5)
    assert (config["learning_rate"], config["epsilon"]) == (1e-4, 0.2)


def test_dynamic_sampling_is_a_flag_and_is_written_down(place: Place):
    outcome = place.train("--credit", "dapo", "--dynamic_sampling", "2")
    assert outcome.code == 0, outcome.err
    assert config_of(place)["dynamic_sampling"] == 2
    logged = [line for line in json_lines(place.path / "out/metrics.jsonl") if "loss" in line]
    assert logged and all(0 <= line["credit/sampling_rounds"] <= 2 for line in logged)
    for argv, words in (
        (("--credit", "dapo", "--dynamic_sampling", "-1"), "at least 0"),
        (("--dynamic_sampling", "2"), "needs a credit rule"),
    ):
        outcome = place.train(*argv, output_dir="other")
        assert outcome.code == 2 and words in outcome.err, outcome.err


@pytest.mark.parametrize(
    ("changes", "argv"),
    [
        ({"credit": {"name": "gtpo", "alpha2": 0.2}}, ()),
        ({"credit": {"name": "gtpo", "alpha2": "2e-1"}}, ()),
        ({"credit": "gtpo", "set": ["alpha2=0.2"]}, ()),
        ({"credit": "gtpo", "set": "alpha2=0.2"}, ()),
        ({"credit": "gtpo"}, ("--set", "alpha2=0.2")),
        ({"credit": {"name": "gtpo", "alpha2": 0.5}}, ("--set", "alpha2=0.2")),
        ({"credit": {"name": "dapo"}}, ("--credit", "gtpo", "--set", "alpha2=0.2")),
        ({"credit": {"name": "grpo_s", "beta2": 3}}, ("--credit=gtpo", "--set=alpha2=0.2")),
        ({}, ("--credit", "gtpo", "--set", "alpha2=0.2")),
    ],
)
def test_a_rule_can_be_written_in_several_ways(
    place: Place, changes: dict[str, Any], argv: tuple[str, ...]
):
    from tokencredit import GTPO
    from tokencredit.engines.trl.arguments import parse_train_arguments

    path = place.config(**changes)
    assert parse_train_arguments(["--config", path, *argv]).rule == GTPO(alpha2=0.2)


@pytest.mark.parametrize("value", ["none", "None", None])
def test_no_rule_can_be_written_too(place: Place, value: Any):
    from tokencredit.engines.trl.arguments import parse_train_arguments

    assert parse_train_arguments(["--config", place.config(credit=value)]).rule is None


@pytest.mark.parametrize(
    ("value", "setting"),
    [(True, "chain-qwen3"), ("countdown-llama", "countdown-llama"), (False, None), (None, None)],
)
def test_the_lab_can_be_named_in_yaml(place: Place, value: Any, setting: str | None):
    from tokencredit.engines.trl.arguments import parse_train_arguments

    path = place.write("lab.yaml", yaml.safe_dump({"lab": value, "use_cpu": True, "bf16": False}))
    assert parse_train_arguments(["--config", str(path)]).lab == setting


def test_yaml_makes_false_of_a_bare_no(place: Place):
    from tokencredit.engines.trl.arguments import parse_train_arguments

    text = Path(place.config()).read_text() + "eval_strategy: no\nsave_strategy: no\n"
    path = place.write("no.yaml", text)
    training = parse_train_arguments(["--config", str(path)]).training
    assert (training.eval_strategy, training.save_strategy) == ("no", "no")


def test_the_environment_of_a_trl_yaml_is_set_and_kept(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINY_RUN", "before")
    assert place.train(env={"TINY_RUN": 3}).code == 0
    assert os.environ["TINY_RUN"] == "3"
    assert config_of(place)["env"] == {"TINY_RUN": "3"}


def test_what_a_paper_recommends_is_applied_where_the_user_is_silent(place: Place):
    outcome = place.train("--credit", "dapo", epsilon_high=0.25)
    assert outcome.code == 0, outcome.err
    (said,) = [line for line in outcome.out.splitlines() if "recommended by" in line]
    assert "mask_truncated_completions=True" in said and "loss_type=dapo" in said
    assert "epsilon_high=" not in outcome.out
    config = config_of(place)
    assert config["mask_truncated_completions"] is True
    # Also where TRL's default happens to be the same: another release may have another one.
    assert config["loss_type"] == "dapo" and config["epsilon"] == 0.2 and config["beta"] == 0.0
    assert config["epsilon_high"] == 0.25


def test_what_a_rule_requires_is_set_and_said(place: Place):
    outcome = place.train("--credit", "grpo_s")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("importance_sampling_level=sequence (required by grpo_s)") == 1


REWARD_FORMS = {
    "late": "async def f(completions, **_):\n    return [float(len(c)) for c in completions]\n",
    "object": "class F:\n    def __call__(self, completions, **_):\n"
    "        return [float(len(c)) for c in completions]\nf = F()\n",
    "tensor": "import torch\ndef f(completions, **_):\n"
    "    return torch.tensor([len(c) for c in completions])\n",
    "unscored": "def f(completions, **_):\n"
    "    return [None, float('nan'), *[float(len(c)) for c in completions[2:]]]\n",
}


@pytest.mark.parametrize("form", REWARD_FORMS)
def test_reward_functions_of_every_form_work(place: Place, form: str):
    place.write("form_here.py", REWARD_FORMS[form])
    outcome = place.train("--credit", "gtpo", reward_funcs="form_here.f")
    assert outcome.code == 0, outcome.err
    name = "F" if form == "object" else "f"
    assert f"rewards/{name}/mean" in json_lines(place.path / "out/metrics.jsonl")[0]
    first = next(iter(read_records(place.path / "out/rollouts.jsonl")))
    assert (first.reward is None) == (form == "unscored")


def test_several_reward_functions_with_success_from(place: Place):
    both = ["rewards_here.length", "rewards_here.other"]
    argv = ("--credit", "gtpo", "--success_from", "length", "--reward_weights", "1", "2")
    outcome = place.train(*argv, reward_funcs=both)
    assert outcome.code == 0, outcome.err
    for record in read_records(place.path / "out/rollouts.jsonl"):
        assert record.rewards is not None and record.reward is not None
        assert record.reward == pytest.approx(record.rewards["length"] + 0.5)
        assert record.success == (record.rewards["length"] > 0.5)


def test_a_lora_adapter_with_evaluation_on_a_mixture(place: Place):
    changes: dict[str, Any] = {
        "use_peft": True,
        "lora_r": 2,
        "lora_target_modules": "all-linear",
        "dataset_name": ...,
        "datasets": [{"path": "json", "data_files": "prompts.jsonl", "fraction": 1.0}],
        "test_split_size": 0.25,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": 1e-5},
    }
    outcome = place.train("--credit", "gtpo", **changes)
    assert outcome.code == 0, outcome.err
    out = place.path / "out"
    assert (out / "adapter_model.safetensors").exists()
    assert "adapter" in (out / "report.md").read_text()
    assert any("eval_reward" in entry for entry in json_lines(out / "metrics.jsonl"))
    config = config_of(place)
    assert config["datasets"] == [{"path": "json", "data_files": "prompts.jsonl", "fraction": 1.0}]
    assert config["lr_scheduler_type"] == "cosine_with_min_lr"
    # The configuration that was written is one that can be read, mixture and all.
    again = place.run("train", "--config", "out/config.yaml", "--output_dir", "again")
    assert again.code == 0, again.err
    assert config_of(place, "again") == config


def test_data_sets_that_lie_on_the_disk(place: Place):
    import datasets

    rows = [{"prompt": f"{i} + 1 ="} for i in range(8)]
    whole = datasets.Dataset.from_list(rows)
    whole.save_to_disk("single")
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk("splits")
    (place.path / "folder").mkdir()
    for split in ("train", "test"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        place.write(f"folder/{split}.jsonl", text)
    assert place.train(dataset_name="single", output_dir="a").code == 0
    evaluated = {"eval_strategy": "epoch", "per_device_eval_batch_size": 8}
    for i, name in enumerate(("splits", "folder")):
        outcome = place.train(dataset_name=name, output_dir=f"b{i}", **evaluated, max_steps=1)
        assert outcome.code == 0, outcome.err


@pytest.mark.parametrize("rule", ["grpo", "dr_grpo", "dapo", "gtpo", "grpo_s"])
def test_a_run_s_records_carry_the_credit_of_their_own_signals(place: Place, rule: str):
    outcome = place.train("--credit", rule, record_every=1, per_device_train_batch_size=8)
    assert outcome.code == 0, outcome.err
    source, target = Path("out/rollouts.jsonl"), Path("again.jsonl")
    recorded = list(read_records(source))
    assert sorted({r.step for r in recorded}) == [0, 1]
    assert len({r.group for r in recorded}) == 4
    from tokencredit.methods.registry import resolve

    meta = recorded[0].meta
    assert meta["tokenizer"].endswith(" tokens)") and {"model", "temperature"} <= set(meta)
    options = recorded[0].meta["credit"][rule]["options"]
    assert_options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    assign_file(source, target, resolve(rule, assert_options))
    for old, new in zip(recorded, read_records(target), strict=True):
        close(old.credit[rule].advantage, new.credit[rule].advantage)
        close([old.credit[rule].base], [new.credit[rule].base])


def close(one: Any, two: Any) -> None:
    assert torch.allclose(torch.tensor(one), torch.tensor(two), rtol=1e-5, atol=1e-5)


def test_only_every_nth_step_is_recorded(place: Place):
    assert place.train("--credit", "gtpo", record_every=2, max_steps=5).code == 0
    recorded = {r.step for r in read_records(place.path / "out/rollouts.jsonl")}
    assert recorded == {0, 2, 4}


def test_recording_can_be_turned_off(place: Place):
    assert place.train("--credit", "gtpo", record_every=0).code == 0
    assert not (place.path / "out/rollouts.jsonl").exists()


def test_a_step_of_several_generation_batches_is_recorded_whole(place: Place):
    changes = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "record_every": 1}
    outcome = place.train("--credit", "gtpo", **changes)
    assert outcome.code == 0, outcome.err
    recorded = list(read_records(place.path / "out/rollouts.jsonl"))
    assert [r.step for r in recorded] == [0] * 8 + [1] * 8
    assert len({r.group for r in recorded}) == 4


def test_the_report_is_there_and_sane(place: Place):
    assert place.train("--credit", "gtpo", max_steps=3).code == 0
    out = place.path / "out"
    report = (out / "report.md").read_text()
    for word in ("- credit: gtpo (alpha1=1.0", "- steps: 3", "learning_curve.svg", "trl "):
        assert word in report
    for line in report.splitlines():
        if line.startswith("- `"):
            assert (out / line.split("`")[1]).exists() or "*" in line, line
    ElementTree.parse(out / "learning_curve.svg")
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert load_file(out / "model.safetensors")
    assert not list(out.glob(".*"))
    assert all({"step", "time"} <= set(entry) for entry in json_lines(out / "metrics.jsonl"))


def test_progress_is_ten_lines_where_it_is_no_terminal(place: Place):
    outcome = place.train(max_steps=23, logging_steps=3, save_strategy="no")
    shown = [line for line in outcome.out.splitlines() if line.startswith("  step")]
    assert 5 <= len(shown) <= 12, shown


@pytest.mark.parametrize("rule", ["gtpo", "none"])
def test_the_configuration_of_a_run_reproduces_it(place: Place, rule: str):
    assert place.train("--credit", rule, record_every=1, max_steps=3).code == 0
    outcome = place.run("train", "--config", "out/config.yaml", "--output_dir", "again")
    assert outcome.code == 0, outcome.err
    same_history(place.path / "out", place.path / "again")
    assert config_of(place) == config_of(place, "again")
    if rule != "none":
        recorded = [(place.path / f / "rollouts.jsonl").read_bytes() for f in ("out", "again")]
        assert recorded[0] == recorded[1]


def test_runs_without_a_name_are_numbered(place: Place):
    for _ in range(2):
        assert place.train(output_dir=...).code == 0
    assert sorted(p.name for p in (place.path / "runs").iterdir()) == [
        "policy-plain-001",
        "policy-plain-002",
    ]
    # Another process was quicker.
    from tokencredit.engines.trl.run_folder import RunFolder

    late = RunFolder(Path("runs/policy-plain-002"))
    late.open_next()
    assert late.path.name == "policy-plain-003"
    assert late.config == late.path / "config.yaml"


def test_a_fault_of_ours_leaves_its_traceback(place: Place, monkeypatch: pytest.MonkeyPatch):
    from tokencredit.engines.trl import mixin

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug\nof ours")

    with monkeypatch.context() as patch:
        patch.setattr(mixin, "assign", broken)
        outcome = place.train("--credit", "gtpo")
    assert outcome.code == 1
    assert outcome.err.strip().count("\n") == 0
    assert "fault: RuntimeError: a bug of ours" in outcome.err
    assert "out/error.log" in outcome.err
    log = place.path / "out/error.log"
    assert "Traceback" in log.read_text() and "a bug" in log.read_text()
    # Mended, the run goes on, and the log of what is over goes.
    assert place.run("train", "--resume", "--output_dir", "out").code == 0
    assert not log.exists()


def test_a_checkpoint_from_elsewhere_can_be_named(place: Place):
    assert place.train(max_steps=4, save_steps=2).code == 0
    outcome = place.train(
        "--resume_from_checkpoint", "out/checkpoint-2", max_steps=4, output_dir="more"
    )
    assert outcome.code == 0, outcome.err
    assert steps(place.path / "more/metrics.jsonl") == [3, 4]


@pytest.mark.parametrize("rule", ["oracle", "uniform", "none", "gtpo"])
def test_the_lab_trains_with_every_reference_credit(place: Place, rule: str):
    outcome = place.run(
        "train",
        *TINY_LAB,
        "--credit",
        rule,
        "--max_steps=2",
        "--output_dir=out",
        "--record_every=1",
    )
    assert outcome.code == 0, outcome.err
    assert "held-out accuracy before" in outcome.out and " -> " in outcome.out
    assert steps(place.path / "out/metrics.jsonl") == [1, 2]
    if rule == "none":
        return
    for record in read_records(place.path / "out/rollouts.jsonl"):
        credit = record.credit[rule]
        if rule == "uniform":
            assert len(set(credit.advantage)) == 1
        if rule == "oracle":
            marks = record.signals["oracle"]
            mean = sum(credit.advantage) / len(credit.advantage)
            assert mean == pytest.approx(credit.base, abs=1e-5)
            if any(marks):
                assert all(a == 0 for a, m in zip(credit.advantage, marks, strict=True) if not m)


def save_reward_model(folder: Path) -> None:
    """A tiny reward model with the policy's tokenizer beside it."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained("policy")
    shape = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_labels=1,
        pad_token_id=tokenizer.pad_token_id, initializer_range=0.5,
    )  # fmt: skip
    Qwen3ForSequenceClassification(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("given", ["reward_model", "reward_model_name_or_path"])
def test_datc_from_yaml(place: Place, given: str):
    """A reward model by itself, or one that is a reward and then is differentiated as well."""
    save_reward_model(Path("rm"))
    more = {given: "rm", "credit": {"name": "datc", "bound": 2.0}, "record_every": 1}
    outcome = place.train(**more)
    assert outcome.code == 0, outcome.err
    records = list(read_records(Path("out/rollouts.jsonl")))
    assert records
    for record in records:
        weights = [w for w in record.credit["datc"].weight or () if w is not None]
        assert all(0.5 - 1e-6 <= w <= 2.0 + 1e-6 for w in weights)
        assert set(record.signals) >= {"work", "logprob", "entropy", "eos"}
    assert config_of(place)["credit"]["bound"] == 2.0
    assert all(record.meta["reward_model"] == "rm" for record in records)
    report = Path("out/report.md").read_text()
    assert "- reward model: rm" in report
    for name in ("coverage", "misaligned_share", "at_bounds"):
        assert f"| credit/{name} |" in report


@pytest.mark.parametrize("strength", [None, "weak"])
def test_datc_in_the_lab_says_which_reward_model(place: Place, strength: str | None):
    named = ["--reward_model", strength] if strength else []
    outcome = place.run(
        "train", *TINY_LAB, "--credit", "datc", *named, "--max_steps=2", "--output_dir=out",
        "--record_every=1", "--save_steps=1",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "tokenizer is not known" not in outcome.out + outcome.err
    assert config_of(place)["reward_model"] == (strength or "strong")
    assert f"- reward model: {strength or 'strong'}" in Path("out/report.md").read_text()
    for record in read_records(Path("out/rollouts.jsonl")):
        assert record.meta["reward_model"] == (strength or "strong")
        assert record.success is not None
    if strength is None:
        # A run from before the name was written goes on.
        config = Path("out/config.yaml")
        lines = config.read_text().splitlines(keepends=True)
        config.write_text("".join(line for line in lines if "reward_model" not in line))
        again = place.run("train", "--resume", "--output_dir=out", "--max_steps=3")
        assert again.code == 0, again.err
        other = ["--reward_model", "weak"]
        again = place.run("train", "--resume", "--output_dir=out", "--max_steps=4", *other)
        assert again.code == 2 and "reward_model" in again.err


@pytest.mark.parametrize("rule", ["gtpo", "none"])
@pytest.mark.parametrize("where", ["yaml", "lab"])
def test_a_reward_model_that_no_rule_reads_is_pointed_out(place: Place, rule: str, where: str):
    if where == "yaml":
        outcome = place.train("--credit", rule, "--reward_model", "nowhere", max_steps=1)
    else:
        outcome = place.run(
            "train", *TINY_LAB, "--credit", rule, "--reward_model=weak", "--max_steps=1",
            "--output_dir=out",
        )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert (outcome.out + outcome.err).count("is not used") == 1
    assert "reward_model" not in config_of(place)
    report = (place.path / "out/report.md").read_text()
    assert "reward model" not in report and "credit/coverage" not in report


def test_a_reward_model_that_is_only_a_reward_is_no_matter(place: Place):
    save_reward_model(Path("rm"))
    outcome = place.train("--credit", "grpo", reward_model_name_or_path="rm", max_steps=1,
                          reward_funcs=..., record_every=1)  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert "is not used" not in outcome.out + outcome.err
    for record in read_records(Path("out/rollouts.jsonl")):
        assert record.success is None and "reward_model" not in record.meta


def test_our_flags_say_their_defaults_once(place: Place):
    text = " ".join(place.run("train", "--help").out.split())
    for name in ("--reward_model", "--entropy_source", "--success_from", "--record_every"):
        ours = text.split(f" {name} ", 2)[-1].split(" --")[0]
        assert "(default: None)" not in ours and ours.count("(default: ") == 0, ours
    assert "(default: " in text  # TRL's own keep theirs


def test_datc_without_a_reward_model_says_what_to_give(place: Place):
    outcome = place.train("--credit", "datc")
    assert outcome.code == 2
    assert "--reward_model" in outcome.err and outcome.err.count("\n") == 1
    assert "reward_model: " in outcome.err
