"""What every benchmark shares: interleaved timing, page faults, peak memory, tables."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import importlib.metadata
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Report", "Table", "Timing", "cell", "facts", "interleaved", "peak_bytes", "set_memory"]


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_clock = "wall"


def set_clock(name: str) -> None:
    """``wall``, or ``cpu`` for a machine that others use too: it leaves out what they take."""
    global _clock
    _clock = name


def current_clock() -> str:
    """The clock that was chosen."""
    return _clock


def clock() -> float:
    """Seconds on the clock that was chosen."""
    return CLOCKS[_clock]()


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant, one value a round."""

    seconds: tuple[float, ...]

    @property
    def least(self) -> float:
        """The fastest round: what the work costs when nothing else disturbs."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """The middle round."""
        return statistics.median(self.seconds)

    def over(self, other: Timing) -> tuple[float, float]:
        """Ratio of the fastest rounds, and the median of the ratios round by round."""
        paired = [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]
        return self.least / other.least, statistics.median(paired)


def interleaved(
    contestants: Mapping[str, Callable[[], Any]], *, seconds: float, least: int, most: int
) -> dict[str, Timing]:
    """Time the contestants in turn, round after round, and drop each result at once.

    Args:
        contestants: what to call, by name.
        seconds: stop after the round in which this much time has gone by.
        least: at least so many rounds.
        most: at most so many.
    """
    for call in contestants.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    begin = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for number in range(most):
            if number >= least and time.perf_counter() - begin > seconds:
                break
            for name, call in contestants.items():
                start = clock()
                result = call()
                taken[name].append(clock() - start)
                del result
    finally:
        gc.enable()
    return {name: Timing(tuple(values)) for name, values in taken.items()}


# -- memory -----------------------------------------------------------------------------------

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGE = {"fresh": 128 << 10, "reused": 1 << 30}


def set_memory(regime: str) -> bool:
    """Tell glibc where large tensors come from; False where there is no glibc.

    ``fresh``: each one from the operating system, so that its first writing faults in every page.
    ``reused``: from memory that the process already has. Left to itself glibc changes from one to
    the other by a rule of its own, between two calls of the same function.
    """
    try:
        libc = ctypes.CDLL(ctypes.util.find_library("c"))
        mallopt, trim = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):
        return False
    done = mallopt(M_MMAP_THRESHOLD, LARGE[regime]) and mallopt(M_TRIM_THRESHOLD, LARGE[regime])
    trim(0)
    return bool(done)


def page_faults(call: Callable[[], Any]) -> int:
    """How many pages the call touches for the first time."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    result = call()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del result
    return after - before


def peak_bytes(call: Callable[[], Any]) -> int | None:
    """How far resident memory rises above where it stands now; None where that cannot be asked.

    Right where memory is ``fresh``; includes what the call returns.
    """
    gc.collect()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before = _status("VmRSS")
        result = call()
        peak = _status("VmHWM")
        del result
        return max(peak - before, 0)
    return None


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}")


def available_bytes() -> int | None:
    """Free memory of the machine, if it says so."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


# -- telling ----------------------------------------------------------------------------------


@dataclass
class Table:
    """One table: markdown for people, rows as they are for ``--json``."""

    title: str
    columns: Sequence[str]
    rows: list[list[str | float]] = field(default_factory=list[list[str | float]])
    notes: list[str] = field(default_factory=list[str])

    def markdown(self) -> str:
        """The table in markdown, numbers to three digits."""
        lines = [f"### {self.title}", ""]
        lines += [f"| {' | '.join(self.columns)} |", "|" + " --- |" * len(self.columns)]
        lines += [f"| {' | '.join(cell(value) for value in row)} |" for row in self.rows]
        lines += ["", *(f"{note}\n" for note in self.notes)]
        return "\n".join(lines)


def cell(value: str | float) -> str:
    """A number to three significant digits; text as it is."""
    if isinstance(value, str):
        return value
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{2 if abs(value) >= 1 else 3}f}" if abs(value) < 10 else f"{value:.1f}"


@dataclass
class Report:
    """What a benchmark found."""

    name: str
    tables: list[Table]

    def markdown(self) -> str:
        """Machine and tables in markdown."""
        about = ", ".join(f"{name} {value}" for name, value in facts().items())
        return "\n".join([f"## {self.name}", "", about, "", *(t.markdown() for t in self.tables)])

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "name": self.name,
            "machine": facts(),
            "tables": [
                {"title": t.title, "columns": list(t.columns), "rows": t.rows, "notes": t.notes}
                for t in self.tables
            ],
        }


def facts() -> dict[str, str]:
    """The machine and the versions that matter."""
    found = {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load": f"{os.getloadavg()[0]:.1f}",
        "clock": _clock,
        "Python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("trl", "transformers", "verl"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def progress(text: str) -> None:
    """A line for the one who waits; results go to standard output."""
    print(f"  {text}", file=sys.stderr, flush=True)
