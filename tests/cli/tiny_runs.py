"""Tiny policies, prompts and rewards on disk, and the command line in this process or its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tokencredit import lab
from tokencredit.cli.main import main

SOURCE = Path(__file__).parents[2] / "src"
REWARDS = """
def length(completions, **_):
    return [float(len(c.split()) % 2) for c in completions]

def other(completions, **_):
    return [0.25] * len(completions)
"""
FIELDS: dict[str, Any] = {
    "model_name_or_path": "policy",
    "dataset_name": "prompts.jsonl",
    "reward_funcs": ["rewards_here.length"],
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 6,
    "max_steps": 2,
    "learning_rate": "1e-3",
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "logging_steps": 1,
    "output_dir": "out",
}
"""A `trl grpo` configuration that says nothing of credit; 1e-3 is a text in YAML 1.1."""
TINY_LAB = (
    "--lab",
    "--per_device_train_batch_size=16",
    "--eval_prompts=16",
    "--max_completion_length=16",
)


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    path = os.pathsep.join(filter(None, [str(SOURCE), kept.get("PYTHONPATH", "")]))
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def save_policy(folder: Path) -> None:
    """A Qwen3 of some thousand parameters, with the chain task's tokenizer."""
    task = lab.setting("chain-qwen3").task
    tokenizer = lab.tokenizer_for(task)
    policy = lab.new_policy("qwen3", len(tokenizer), seed=0, layers=1, width=16, heads=2)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def prompts(count: int = 32) -> list[str]:
    task = lab.setting("chain-qwen3").task
    return [" ".join(prompt) for prompt in lab.draw_prompts(task, count, seed=0)]


@dataclass
class Outcome:
    code: int
    out: str
    err: str


@dataclass
class Place:
    """A folder with a policy, prompts and rewards, which is the current one."""

    path: Path
    capture: Any
    fields: dict[str, Any] = field(default_factory=lambda: dict(FIELDS))

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(text, encoding="utf-8")
        return path

    def config(self, **changes: Any) -> str:
        """Write run.yaml: the usual fields, some changed; a change to ... leaves the field out."""
        fields = {k: v for k, v in {**self.fields, **changes}.items() if v is not ...}
        self.write("run.yaml", yaml.safe_dump(fields, sort_keys=False))
        return "run.yaml"

    def run(self, *argv: str) -> Outcome:
        """The command line in this process."""
        self.capture.readouterr()
        code = main([str(a) for a in argv])
        out, err = self.capture.readouterr()
        return Outcome(code, out, err)

    def train(self, *argv: str, **changes: Any) -> Outcome:
        return self.run("train", "--config", self.config(**changes), *argv)

    def spawn(self, *argv: str, timeout: float = 120) -> Outcome:
        """The command line in a process of its own."""
        command = [sys.executable, "-m", "tokencredit", *map(str, argv)]
        done = subprocess.run(
            command,
            cwd=self.path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def refused(self, outcome: Outcome, *words: str, left: str | None = "out") -> None:
        """Exit code 2, one line with all words, and nothing left behind."""
        assert outcome.code == 2, outcome
        lines = outcome.err.strip().splitlines()
        assert len(lines) == 1, outcome.err
        assert lines[0].startswith("tokencredit: "), lines[0]
        for word in words:
            assert word in lines[0], lines[0]
        assert "Traceback" not in outcome.err + outcome.out
        if left is not None:
            assert not (self.path / left).exists(), sorted((self.path / left).iterdir())


def json_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{path}: {text} is not JSON")

    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def steps(path: Path) -> list[int]:
    """The steps that metrics.jsonl has a reward for."""
    return [entry["step"] for entry in json_lines(path) if "reward" in entry]


TIMES = ("time", "step_time", "train_runtime")


def same_history(one: Path, two: Path) -> None:
    """The same metrics, but for what a clock says."""

    def timeless(path: Path) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in entry.items() if k not in TIMES and "per_second" not in k}
            for entry in json_lines(path / "metrics.jsonl")
            if "train_runtime" not in entry
        ]

    assert timeless(one) == timeless(two)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
