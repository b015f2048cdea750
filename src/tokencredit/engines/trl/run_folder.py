"""The folder that a training run leaves: config, metrics, rollouts, checkpoints, report."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tokencredit.errors import InputError
from tokencredit.records import truncate_after_step

__all__ = ["RunFolder", "next_folder"]

PARTS = ("config.yaml", "metrics.jsonl", "rollouts.jsonl")


class RunFolder:
    """Paths of a run's parts, and how a run is opened, resumed and written aside.

    Only the main process writes.

    Args:
        path: the run's output folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.rollouts = self.path / "rollouts.jsonl"
        self.evaluation = self.path / "evaluation.json"
        self.report = self.path / "report.md"
        self.error = self.path / "error.log"

    def holds_a_run(self) -> bool:
        """Whether anything of a run is there."""
        return any((self.path / part).exists() for part in PARTS) or bool(self.checkpoints())

    def open_new(self) -> None:
        """Make the folder for a new run; refuse one that holds another."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"output_dir {self.path} is a file; name a folder")
        if self.holds_a_run():
            raise InputError(
                f"output_dir {self.path} holds another run: go on with it by --resume, or name "
                "another folder by --output_dir"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"output_dir {self.path} cannot be written: {error.strerror}"
            ) from error

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Complete checkpoints by step. The trainer's state is the last file that is written."""
        found: list[tuple[int, Path]] = []
        for folder in self.path.glob("checkpoint-*"):
            number = folder.name.removeprefix("checkpoint-")
            if not number.isdigit():
                continue
            try:
                json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
            found.append((int(number), folder))
        return sorted(found)

    def rewind(self) -> Path | None:
        """The last complete checkpoint, with everything later cut from metrics and rollouts."""
        checkpoints = self.checkpoints()
        step, folder = checkpoints[-1] if checkpoints else (0, None)
        # Rollouts are stamped with the steps done when they were sampled, metrics with the steps
        # done when they were logged.
        if self.rollouts.exists():
            if step:
                truncate_after_step(self.rollouts, step - 1)
            else:
                self.rollouts.unlink()
        if self.metrics.exists():
            kept: list[str] = []
            for line in self.metrics.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    break  # half a line: the run was killed while writing it
                if entry.get("step", 0) <= step:
                    kept.append(line + "\n")
            write_aside(self.metrics, "".join(kept))
        return folder

    def save_config(self, fields: Mapping[str, Any]) -> None:
        """Write the YAML that reproduces the run."""
        text = yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True)
        write_aside(self.config, text)

    def saved_evaluation(self) -> dict[str, Any]:
        """What was measured so far, by name."""
        try:
            return json.loads(self.evaluation.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def save_evaluation(self, values: Mapping[str, Any]) -> None:
        """Write what was measured."""
        write_aside(self.evaluation, json.dumps(dict(values), indent=2) + "\n")


def write_aside(path: Path, text: str) -> None:
    """Write a text file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def next_folder(parent: str | os.PathLike[str], stem: str) -> Path:
    """``parent/stem-001``, or the first free number after it."""
    taken = [
        int(tail)
        for folder in Path(parent).glob(f"{stem}-*")
        if (tail := folder.name.removeprefix(f"{stem}-")).isdigit()
    ]
    return Path(parent) / f"{stem}-{max(taken, default=0) + 1:03d}"
