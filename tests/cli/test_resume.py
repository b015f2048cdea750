"""A run that was stopped goes on as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_runs import Place, json_lines, same_history, steps

from tokencredit.records import read_records

STEPS = 6
STOPS = """
import os
from rewards_here import length

calls = 0

def f(completions, **_):
    global calls
    calls += 1
    if calls == int(os.environ.get("STOP_AT", "0")):
        raise KeyboardInterrupt
    return length(completions)
"""


@pytest.fixture
def run(place: Place, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Train for six steps, with a checkpoint every second one; stop while sampling a step."""
    place.write("stops_here.py", STOPS)

    def go(*argv: str, stop_in_step: int = 0, **changes: Any) -> Any:
        import sys

        sys.modules.pop("stops_here", None)
        monkeypatch.setenv("STOP_AT", str(stop_in_step))
        fields = {
            "reward_funcs": ["stops_here.f"],
            "max_steps": STEPS,
            "save_steps": 2,
            "record_every": 1,
            "credit": "gtpo",
        }
        return place.train(*argv, **{**fields, **changes})

    return go


def whole(folder: Path) -> None:
    assert steps(folder / "metrics.jsonl") == list(range(1, STEPS + 1))
    ends = [e["step"] for e in json_lines(folder / "metrics.jsonl") if "train_runtime" in e]
    assert sorted(set(ends)) == ends and ends[-1] == STEPS
    recorded = [r.step for r in read_records(folder / "rollouts.jsonl")]
    assert recorded == [step for step in range(STEPS) for _ in range(4)]


def half_written(folder: Path) -> None:
    for name, text in (("metrics", '{"step": 5, "rew'), ("rollouts", '{"schema":1,"group":"4.')):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.write(text)


def half_a_checkpoint(folder: Path) -> None:
    last = max(folder.glob("checkpoint-*"))
    copy = folder / "checkpoint-6"
    shutil.copytree(last, copy)
    (copy / "trainer_state.json").unlink()


def truncated_model(folder: Path) -> None:
    path = max(folder.glob("checkpoint-*")) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def truncated_optimizer(folder: Path) -> None:
    path = max(folder.glob("checkpoint-*")) / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-10])


def no_model(folder: Path) -> None:
    (max(folder.glob("checkpoint-*")) / "model.safetensors").unlink()


def truncated_state(folder: Path) -> None:
    path = max(folder.glob("checkpoint-*")) / "trainer_state.json"
    path.write_text(path.read_text()[:20])


def files_aside(folder: Path) -> None:
    for name in (".rollouts.jsonl.abcd.tmp", ".config.yaml.1.tmp", ".learning_curve.tmp.svg"):
        (folder / name).write_text("half")


@pytest.mark.parametrize(
    ("stop", "damage"),
    [
        (1, None),
        (2, None),
        (6, None),
        (5, half_written),
        (2, half_written),
        (5, half_a_checkpoint),
        (5, truncated_model),
        (5, truncated_optimizer),
        (5, no_model),
        (5, truncated_state),
        (3, truncated_model),
        (5, files_aside),
    ],
)
def test_a_stopped_run_ends_like_an_undisturbed_one(
    place: Place, run: Any, stop: int, damage: Callable[[Path], None] | None
):
    assert run(output_dir="undisturbed").code == 0
    outcome = run(stop_in_step=stop)
    assert outcome.code == 130, outcome
    assert "--resume --output_dir out" in outcome.err
    out = place.path / "out"
    if damage is not None:
        damage(out)
    outcome = place.run("train", "--resume", "--output_dir", "out") if stop % 2 else None
    # The configuration may be repeated as well.
    outcome = outcome or run("--resume")
    assert outcome.code == 0, outcome.err
    whole(out)
    same_history(place.path / "undisturbed", out)
    both = [(place.path / f / "rollouts.jsonl").read_bytes() for f in ("undisturbed", "out")]
    assert both[0] == both[1]
    assert not [p for p in out.iterdir() if p.name.endswith(".tmp") or ".tmp." in p.name]
    assert not (out / "error.log").exists()


def test_a_finished_run_that_is_resumed_stays_what_it_is(place: Place, run: Any):
    assert run().code == 0
    out = place.path / "out"
    shutil.copytree(out, place.path / "before")
    outcome = place.run("train", "--resume", "--output_dir", "out")
    assert outcome.code == 0, outcome.err
    whole(out)
    same_history(place.path / "before", out)


def test_a_run_killed_between_its_last_step_and_its_report_is_completed(place: Place, run: Any):
    assert run().code == 0
    out = place.path / "out"
    shutil.copytree(out, place.path / "before")
    for name in ("report.md", "model.safetensors", "learning_curve.svg"):
        (out / name).unlink()
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:-1]))
    outcome = place.run("train", "--resume", "--output_dir", "out")
    assert outcome.code == 0, outcome.err
    same_history(place.path / "before", out)
    assert (out / "report.md").exists()


def test_a_run_of_whole_epochs_is_finished_too(place: Place, run: Any):
    place.write("prompts.jsonl", '{"prompt": "1 + 1 ="}\n' * 3)
    assert run(max_steps=..., num_train_epochs=2).code == 0
    out = place.path / "out"
    assert steps(out / "metrics.jsonl") == [1, 2, 3, 4, 5, 6]
    shutil.copytree(out, place.path / "before")
    assert place.run("train", "--resume", "--output_dir", "out").code == 0
    same_history(place.path / "before", out)


def test_a_finished_run_can_be_prolonged(place: Place, run: Any):
    assert run(max_steps=4).code == 0
    outcome = place.run("train", "--resume", "--output_dir", "out", "--max_steps", str(STEPS))
    assert outcome.code == 0, outcome.err
    whole(place.path / "out")
    config = yaml.safe_load((place.path / "out/config.yaml").read_text())
    assert config["max_steps"] == STEPS


@pytest.mark.parametrize("every", [3])
def test_what_is_recorded_does_not_depend_on_a_stop(place: Place, run: Any, every: int):
    assert run(output_dir="undisturbed", record_every=every).code == 0
    for stop in (6,):
        out = f"out{stop}"
        assert run(output_dir=out, record_every=every, stop_in_step=stop).code == 130
        assert place.run("train", "--resume", "--output_dir", out).code == 0
        both = [(place.path / f / "rollouts.jsonl").read_bytes() for f in ("undisturbed", out)]
        assert both[0] == both[1]


def test_a_run_can_be_stopped_more_than_once(place: Place, run: Any):
    assert run(output_dir="undisturbed").code == 0
    assert run(stop_in_step=4).code == 130
    assert run("--resume", stop_in_step=2).code == 130
    assert run("--resume").code == 0
    same_history(place.path / "undisturbed", place.path / "out")


@pytest.mark.parametrize(
    ("argv", "changes", "word"),
    [
        (["--learning_rate", "0.5"], {}, "learning_rate"),
        (["--temperature", "0.5"], {}, "temperature was 1.0"),
        (["--credit", "grpo"], {}, "credit"),
        (["--set", "alpha2=0.3"], {}, "credit"),
        (["--credit", "none"], {}, "credit"),
        ([], {"seed": 7}, "seed"),
        ([], {"max_completion_length": 5}, "max_completion_length was 6"),
        ([], {"max_completion_length": ...}, "max_completion_length was 6"),
    ],
)
def test_another_configuration_cannot_go_on_with_a_run(
    place: Place, run: Any, argv: list[str], changes: dict[str, Any], word: str
):
    assert run(stop_in_step=4).code == 130
    before = sorted((p, p.stat().st_mtime_ns) for p in (place.path / "out").rglob("*"))
    outcome = run("--resume", *argv, **changes)
    place.refused(outcome, "--resume: ", word, "config.yaml", left=None)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (place.path / "out").rglob("*"))


def test_a_reward_that_fails_later_keeps_what_was_learnt(place: Place, run: Any):
    place.write("stops_here.py", STOPS.replace("raise KeyboardInterrupt", "raise ValueError(3)"))
    outcome = run(stop_in_step=4)
    place.refused(outcome, "ValueError: 3", left=None)
    assert steps(place.path / "out/metrics.jsonl") == [1, 2, 3]
    assert run("--resume").code == 0
    whole(place.path / "out")


def test_the_newest_numbered_run_is_the_one_that_goes_on(place: Place, run: Any):
    assert run(output_dir=...).code == 0
    (place.path / "runs/policy-gtpo-001").rename(place.path / "runs/policy-gtpo-999")
    assert run(output_dir=..., stop_in_step=4).code == 130
    outcome = run("--resume", output_dir=...)
    assert outcome.code == 0 and "policy-gtpo-1000" in outcome.out
    whole(place.path / "runs/policy-gtpo-1000")


def test_the_accuracy_before_is_measured_once(place: Place):
    from tiny_runs import TINY_LAB

    argv = ("train", *TINY_LAB, "--max_steps=4", "--save_steps=2", "--output_dir=out")
    assert place.run(*argv).code == 0
    evaluation = place.path / "out/evaluation.json"
    known = json.loads(evaluation.read_text())
    known["before"]["prompts"] = 4321
    evaluation.write_text(json.dumps(known))
    outcome = place.run(*argv, "--resume")
    assert outcome.code == 0, outcome.err
    assert json.loads(evaluation.read_text())["before"] == known["before"]
    assert "| 4321 |" in (place.path / "out/report.md").read_text()
