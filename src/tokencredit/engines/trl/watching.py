"""What a run shows while it trains, and the metrics it keeps."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

__all__ = ["AlreadyDoneError", "MetricsFile", "NothingLeft", "Progress"]


class MetricsFile(TrainerCallback):
    """Appends everything the trainer logs to a JSON Lines file, one line a log.

    Args:
        path: the file; each line carries ``step`` and ``time`` (seconds since the epoch).
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Write one line."""
        if not state.is_world_process_zero or not logs:
            return
        entry = {"step": state.global_step, "time": round(time.time(), 3)}
        for name, value in logs.items():
            if isinstance(value, str):
                with contextlib.suppress(ValueError):
                    value = float(value)
            entry[name] = _strict(value)
        line = json.dumps(entry, allow_nan=False).encode("utf-8") + b"\n"
        with self.path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if file.write(line) != len(line):  # the disk is full: leave no half of a line
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def _strict(value: Any) -> Any:
    """What JSON can hold: NaN and infinity, which it cannot, are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [_strict(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    try:
        return _strict(float(value))  # a number of numpy or torch
    except (TypeError, ValueError):
        return str(value)


class AlreadyDoneError(Exception):
    """The checkpoint that a run goes on from is its last one."""


class NothingLeft(TrainerCallback):
    """Stops a resumed run that has no step left; Trainer would do one more.

    Raises `AlreadyDoneError` out of ``train()``, which has loaded the checkpoint by then.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Look at the steps."""
        if 0 < state.max_steps <= state.global_step:
            raise AlreadyDoneError


class Progress(TrainerCallback):
    """One line that moves on a terminal, some lines elsewhere: step, reward, time left.

    Args:
        lines: how many lines a run prints where the output is no terminal.
        seconds: after so much time without a line there is one all the same.
    """

    def __init__(self, lines: int = 10, seconds: float = 20.0) -> None:
        self.lines = lines
        self.seconds = seconds
        self._said = 0.0
        self._start = 0.0
        self._first = 0
        self._shown = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember where the run begins."""
        self._start, self._first = time.monotonic(), state.global_step
        self._shown, self._said = state.global_step, self._start

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Take note of what was logged and show it if it is time."""
        if not state.is_world_process_zero or not logs or logs.get("reward") is None:
            return
        reward, entropy = float(logs["reward"]), logs.get("entropy")
        terminal = sys.stdout.isatty()
        total = state.max_steps
        every = max(1, total // self.lines)
        due = state.global_step // every > self._shown // every
        due = due or time.monotonic() - self._said > self.seconds
        if not terminal and not due and state.global_step != total:
            return
        self._shown, self._said = state.global_step, time.monotonic()
        done = state.global_step - self._first
        seconds = (time.monotonic() - self._start) / max(done, 1)
        left = seconds * (total - state.global_step)
        text = (
            f"  step {state.global_step:>{len(str(total))}}/{total}"
            f"  reward {reward:.3f}"
            + ("" if entropy is None else f"  entropy {float(entropy):.3f}")
            + f"  {seconds:.2f} s/step  {_duration(left)} left"
        )
        end = "\r" if terminal and state.global_step != total else "\n"
        print(text.ljust(78), end=end, flush=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
