"""What credit adds to a training step as the batch grows, and what it would add beyond memory.

One call of `assign` with its diagnostics read, on batches of a thousand to a hundred thousand
responses; the engines make one such call a step, on the whole batch: TRL on every rank, verl in
its driver. Time is fitted by a power of the number of tokens, bytes by a line, and both are
carried on to batches that do not fit here. The peer is verl's own GRPO advantage, or its
algorithm restated where verl is not installed.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import torch

from tokencredit import Rollouts, assign
from tokencredit.credit import Credit
from tokencredit.methods.registry import resolve

from .assign import make, peer
from .harness import Report, Table, available_bytes, interleaved, peak_bytes, progress, set_memory

__all__ = ["run"]

LENGTH = 512
RESPONSES = (1_000, 3_000, 10_000, 30_000, 100_000)
QUICK_RESPONSES = (16, 64)
BEYOND = (1_000_000, 10_000_000)
RULES = ("grpo", "gtpo", "grpo_s", "datc")
MEASURED_PEER_UP_TO = 30_000
TENSORS_NEEDED = 16
"""A batch is left out unless so many ``[b, t]`` float32 tensors fit into memory."""

GATHERED = (
    ("TRL, `grpo`, `dr_grpo`, `dapo`", "mask", 1, "to every rank"),
    ("TRL, `gtpo`, `grpo_s`", "mask, entropy, log-probability", 9, "to every rank"),
    ("TRL, `datc`", "mask, entropy, log-probability, work, two marks", 21, "to every rank"),
    ("verl V1, `gtpo`, `grpo_s`", "mask, entropy, once more from the queue", 12, "to the driver"),
)
"""Who, what, bytes a padded token, where to: read off the adapters, not measured."""


def batch(responses: int, length: int) -> Rollouts:
    """Groups of eight, entropies and a work signal."""
    made = make(responses, length).rollouts
    seed = torch.Generator().manual_seed(1)
    work = torch.randn(made.mask.shape, generator=seed)
    return made.replace(signals={**made.signals, "work": work})


def step(rollouts: Rollouts, rule: str) -> Credit:
    """What an engine does with a batch."""
    credit = assign(rollouts, rule)
    _ = credit.diagnostics
    return credit


def power(tokens: list[int], seconds: list[float]) -> tuple[float, float]:
    """Factor and exponent of ``seconds = factor * tokens ** exponent``, by least squares of logs.

    The exponent is at least 0: that less time is taken for more is noise.
    """
    x, y = [math.log(n) for n in tokens], [math.log(s) for s in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    slope = max(slope, 0.0)
    return math.exp(mean_y - slope * mean_x), slope


def run(*, quick: bool = False) -> Report:
    """Measure, fit, carry on."""
    set_memory("fresh")
    name, function = peer()
    length = 8 if quick else LENGTH
    times = Table(
        f"Seconds a step, responses of {length // 4} to {length} tokens",
        ("responses", *RULES, name),
        notes=[f"`-`: {name} takes time by the response, and was not tried."],
    )
    memory = Table(
        "Bytes a padded token while it runs, what it returns included",
        ("responses", *RULES),
    )
    tokens: list[int] = []
    for responses in QUICK_RESPONSES if quick else RESPONSES:
        size = responses * length
        if (available_bytes() or 0) < 4 * TENSORS_NEEDED * size:
            times.notes.append(f"{responses} x {length} does not fit into memory here.")
            break
        progress(f"scale: {responses} x {length}")
        rollouts = batch(responses, length)
        calls: dict[str, Callable[[], Any]] = {
            rule: lambda rule=rule, rollouts=rollouts: step(rollouts, rule) for rule in RULES
        }
        if responses <= MEASURED_PEER_UP_TO:
            theirs = make(responses, length)
            calls[name] = lambda theirs=theirs: function(
                theirs.token_rewards, theirs.float_mask, theirs.index
            )
        taken = interleaved(calls, seconds=0.1 if quick else 20, least=2, most=5)
        found: list[str | float] = [taken[one].least if one in taken else "-" for one in calls]
        times.rows.append([str(responses), *found, *(["-"] if name not in calls else [])])
        peaks: list[str | float] = []
        for rule in RULES:
            peak = peak_bytes(calls[rule])
            peaks.append("-" if peak is None else peak / size)
        memory.rows.append([str(responses), *peaks])
        tokens.append(size)
        del rollouts, calls
        gc.collect()
    return Report("scale", [times, memory, _law(times, memory, tokens, length), _gathered(length)])


def _law(times: Table, memory: Table, tokens: list[int], length: int) -> Table:
    """The fitted laws, carried on."""
    table = Table(
        "The law, carried on",
        ("rule", "seconds grow as tokens to the", *(f"{n} responses, s" for n in BEYOND),
         *(f"{n} responses, GB" for n in BEYOND)),
        notes=["Memory is linear: the bytes a token of the largest batch. Extrapolated, not run."],
    )  # fmt: skip
    for column, rule in enumerate(RULES, start=1):
        seconds = [float(row[column]) for row in times.rows]
        factor, exponent = power(tokens, seconds)
        peak = memory.rows[-1][column]
        ahead = [factor * (n * length) ** exponent for n in BEYOND]
        table.rows.append(
            [resolve(rule).name, exponent, *ahead,
             *("-" if isinstance(peak, str) else peak * n * length / 1e9 for n in BEYOND)]
        )  # fmt: skip
    return table


def _gathered(length: int) -> Table:
    table = Table(
        "What is gathered for it",
        ("engine and method", "what", "bytes a padded token", "where",
         *(f"{n} responses, GB" for n in (10_000, *BEYOND))),
        notes=["Read off the adapters. On one TRL rank nothing is copied."],
    )  # fmt: skip
    for who, what, size, where in GATHERED:
        ahead = [size * n * length / 1e9 for n in (10_000, *BEYOND)]
        table.rows.append([who, what, float(size), where, *ahead])
    return table
