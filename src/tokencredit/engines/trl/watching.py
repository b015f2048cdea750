"""What a run shows while it trains, and the metrics it keeps."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

__all__ = ["MetricsFile", "Progress"]


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
            if isinstance(value, float) and not math.isfinite(value):
                value = None
            entry[name] = value
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class Progress(TrainerCallback):
    """One line that moves on a terminal, ten lines elsewhere: step, reward, time left.

    Args:
        lines: how many lines a run prints where the output is no terminal.
    """

    def __init__(self, lines: int = 10) -> None:
        self.lines = lines
        self._start = 0.0
        self._first = 0
        self._seen: dict[str, float] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Remember where the run begins."""
        self._start, self._first = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Take note of what was logged and show it if it is time."""
        if not state.is_world_process_zero or not logs or "reward" not in logs:
            return
        self._seen = {k: float(v) for k, v in logs.items() if v is not None}
        terminal = sys.stdout.isatty()
        total = state.max_steps
        every = max(1, total // self.lines)
        if not terminal and state.global_step % every and state.global_step != total:
            return
        done = state.global_step - self._first
        seconds = (time.monotonic() - self._start) / max(done, 1)
        left = seconds * (total - state.global_step)
        text = (
            f"  step {state.global_step:>{len(str(total))}}/{total}"
            f"  reward {self._seen['reward']:.3f}"
            f"  entropy {self._seen.get('entropy', math.nan):.3f}"
            f"  {seconds:.2f} s/step  {_duration(left)} left"
        )
        end = "\r" if terminal and state.global_step != total else "\n"
        print(text.ljust(78), end=end, flush=True)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
