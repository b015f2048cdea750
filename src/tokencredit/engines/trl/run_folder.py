"""The folder that a training run leaves: config, metrics, rollouts, checkpoints, report."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tokencredit.errors import InputError
from tokencredit.files import write_aside
from tokencredit.records import truncate_after_step

__all__ = ["RunFolder", "broken_weights", "next_folder", "numbered_folders"]

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

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
        self._made: list[Path] = []
        self._claim: int | None = None

    def claim(self) -> None:
        """Keep other processes out of the folder until `release` or the end of this one.

        Raises:
            InputError: another process is training into it.
        """
        if fcntl is None:
            return
        self._claim = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise InputError(
                f"output_dir {self.path}: another process is training into it; name another folder"
            ) from None
        except OSError:
            self.release()  # a file system without locks

    def release(self) -> None:
        """Let others in."""
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

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
            for folder in reversed([self.path, *self.path.parents]):
                if not folder.exists():
                    folder.mkdir(exist_ok=True)
                    self._made.append(folder)
            probe = self.path / f".probe-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise InputError(
                f"output_dir {self.path} cannot be written: {error.strerror}"
            ) from error

    def open_next(self) -> None:
        """Make the folder for a new run; take the next number if another run was quicker."""
        stem = self.path.name.rpartition("-")[0]
        while True:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.mkdir()
            except FileExistsError:
                self.__init__(next_folder(self.path.parent, stem))
                continue
            except OSError as error:
                raise InputError(f"{self.path} cannot be made: {error.strerror}") from error
            self._made = [self.path.parent, self.path]
            return

    def discard(self) -> None:
        """Undo `open_new` for a run that ended before it had anything to go on from."""
        if not self._made and not self.path.is_dir():
            return
        if self.metrics.exists() or self.checkpoints():
            return
        for path in (self.config, self.evaluation, self.rollouts, self.error):
            path.unlink(missing_ok=True)
        self.remove_broken_checkpoints()
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:
                return  # something else is in it

    def remove_broken_checkpoints(self) -> None:
        """Remove what a killed run or a full disk left of a checkpoint."""
        complete = {folder for _, folder in self.checkpoints()}
        for folder in self.path.glob("checkpoint-*"):
            if folder.name.removeprefix("checkpoint-").isdigit() and folder not in complete:
                shutil.rmtree(folder, ignore_errors=True)

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Complete checkpoints by step."""
        found: list[tuple[int, Path]] = []
        for folder in self.path.glob("checkpoint-*"):
            number = folder.name.removeprefix("checkpoint-")
            if not number.isdigit():
                continue
            if not _is_complete(folder):
                continue
            found.append((int(number), folder))
        return sorted(found)

    def rewind(self) -> Path | None:
        """The last complete checkpoint, with everything later cut from metrics and rollouts."""
        self.remove_broken_checkpoints()
        for pattern in (".*.tmp", ".*.tmp.*"):
            for path in self.path.glob(pattern):  # killed while writing aside
                path.unlink()
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


def broken_weights(folder: Path) -> Path | None:
    """The first safetensors file of a folder that is cut off, or None."""
    for path in sorted(folder.glob("*.safetensors")):
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if length > size:
                    return path
                header: dict[str, Any] = json.loads(file.read(length))
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return path
        if 8 + length + max(ends, default=0) != size:
            return path
    return None


def _is_complete(checkpoint: Path) -> bool:
    # The trainer's state is the last file that is written, but a machine that loses power may
    # keep it and lose others.
    try:
        json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    archives = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]
    if broken_weights(checkpoint) or not all(zipfile.is_zipfile(path) for path in archives):
        return False
    # Sharded engines keep their weights in folders.
    weights = ("*.safetensors", "pytorch_model*", "adapter_model*", "global_step*")
    return any(any(checkpoint.glob(pattern)) for pattern in weights)


def next_folder(parent: str | os.PathLike[str], stem: str) -> Path:
    """``parent/stem-001``, or the first free number after it."""
    return Path(parent) / f"{stem}-{max(numbered_folders(parent, stem), default=0) + 1:03d}"


def numbered_folders(parent: str | os.PathLike[str], stem: str) -> dict[int, Path]:
    """The folders ``parent/stem-NUMBER`` by their number."""
    return {
        int(tail): folder
        for folder in Path(parent).glob("*")
        if folder.name.startswith(f"{stem}-")
        and (tail := folder.name.removeprefix(f"{stem}-")).isdigit()
    }
