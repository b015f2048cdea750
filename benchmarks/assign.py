"""`assign` against verl's GRPO advantage and against one elementwise pass over ``[b, t]``.

The pass is ``entropy + 1`` into a new tensor. What that costs depends on where the new tensor's
memory comes from, so everything is measured twice, with the allocator told which it is to be:

- *fresh* from the operating system, which clears each page when it is first written. So it is the
  first time, and for tensors that glibc hands back to the system as soon as they are dropped.
- *reused*, memory that the process holds already. Here the pass runs at the speed of the cache or
  of memory and is the hardest yardstick there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokencredit import Rollouts, assign

from .harness import (
    Report,
    Table,
    Timing,
    available_bytes,
    interleaved,
    page_faults,
    peak_bytes,
    progress,
    set_memory,
)

__all__ = ["run"]

RULES = ("grpo", "gtpo", "grpo_s")
GROUP = 8
BATCHES, LENGTHS = (512, 2048, 8192), (128, 512, 1024, 4096)
QUICK_BATCHES, QUICK_LENGTHS = (32, 64), (16, 64)
TENSORS_NEEDED = 12
"""A batch is left out unless so many ``[b, t]`` float32 tensors fit into memory."""
LINEAR_FROM = 1 << 20
"""The exponent is fitted from here on; below, the cost of calling torch shows."""
LINE = "one pass"


@dataclass(frozen=True)
class Batch:
    """Inputs of one size, for us and for verl."""

    rollouts: Rollouts
    token_rewards: Tensor
    float_mask: Tensor
    index: Any

    @property
    def entropy(self) -> Tensor:
        """The token entropies."""
        return self.rollouts.signals["entropy"]


def make(b: int, t: int, *, order: str = "contiguous", padding: str = "right") -> Batch:
    """Responses of ``t / 4`` to ``t`` tokens in groups of eight, half of them right."""
    seed = torch.Generator().manual_seed(0)
    length = torch.randint(max(t // 4, 1), t + 1, (b, 1), generator=seed)
    mask = torch.arange(t) < length
    if padding == "left":
        mask = mask.flip(1)
    if padding == "holes":
        mask &= torch.rand(b, t, generator=seed) < 0.8
    entropy = torch.rand(b, t, generator=seed).mul_(2)
    if padding == "unknown":
        entropy[torch.rand(b, t, generator=seed) < 0.01] = math.nan
    rewards = (torch.rand(b, generator=seed) < 0.5).float()
    group = torch.arange(b) // GROUP
    if order == "shuffled":
        group = group[torch.randperm(b, generator=seed)]
    token_rewards = torch.zeros(b, t)
    token_rewards[:, 0] = rewards
    index = np.array([f"prompt-{g}" for g in group.tolist()], dtype=object)
    return Batch(
        Rollouts(rewards, group, mask, entropy=entropy), token_rewards, mask.float(), index
    )


def peer() -> tuple[str, Callable[[Tensor, Tensor, Any], Any]]:
    """Verl's function where verl is installed, else the same algorithm in our own words."""
    try:
        from verl.trainer.ppo.core_algos import (  # pyright: ignore[reportMissingImports]
            compute_grpo_outcome_advantage,
        )
    except ImportError as error:
        progress(f"verl cannot be imported ({error}): pip install verl; a restatement stands in")
        return "restated verl", restated
    return "verl", compute_grpo_outcome_advantage


def restated(
    token_rewards: Tensor, mask: Tensor, index: Any, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """GRPO's outcome advantage by a loop over responses: the algorithm that verl uses."""
    scores = token_rewards.sum(dim=-1)
    members: dict[Any, list[int]] = {}
    for row, key in enumerate(index):
        members.setdefault(key, []).append(row)
    for rows in members.values():
        own = torch.stack([scores[row] for row in rows])
        mean, std = (own.mean(), own.std()) if len(rows) > 1 else (0.0, 1.0)
        for row in rows:
            scores[row] = (scores[row] - mean) / (std + epsilon)
    advantage = scores.unsqueeze(-1) * mask
    return advantage, advantage


def run(*, quick: bool = False) -> Report:
    name, function = peer()
    sizes = [
        (b, t)
        for b in (QUICK_BATCHES if quick else BATCHES)
        for t in (QUICK_LENGTHS if quick else LENGTHS)
    ]
    _check_same(function)
    steered = set_memory("fresh")
    regimes = ("fresh", "reused") if steered else ("as the allocator likes",)
    tables: list[Table] = []
    for regime in regimes:
        if steered:
            set_memory(regime)
        tables.append(_sizes(sizes, regime, name, function, quick=quick))
        tables.append(_variants(regime, quick=quick))
    if steered:
        set_memory("fresh")
    tables.append(_memory(64 if quick else 2048, 64 if quick else 1024))
    return Report("assign", tables)


def _check_same(function: Callable[[Tensor, Tensor, Any], Any]) -> None:
    """Both must compute the same thing before their times are compared."""
    batch = make(32, 8)
    theirs = function(batch.token_rewards, batch.float_mask, batch.index)[0]
    ours = assign(batch.rollouts, "grpo", eps=1e-6).advantage
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def _rounds(quick: bool) -> dict[str, Any]:
    return {"seconds": 0.05, "least": 2, "most": 3} if quick else _FULL


_FULL: dict[str, Any] = {"seconds": 1.2, "least": 5, "most": 60}


def _contestants(batch: Batch) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {LINE: lambda: torch.add(batch.entropy, 1)}
    for rule in RULES:
        calls[rule] = lambda rule=rule: assign(batch.rollouts, rule)
    return calls


def _sizes(
    sizes: list[tuple[int, int]],
    regime: str,
    peer_name: str,
    function: Callable[[Tensor, Tensor, Any], Any],
    *,
    quick: bool,
) -> Table:
    table = Table(
        f"Memory {regime}: milliseconds, and passes over [b, t]",
        (
            "b x t",
            "one pass, ms",
            *(f"{rule}, ms" for rule in RULES),
            *(f"{rule}, passes: min (median)" for rule in RULES),
            f"{peer_name}, ms",
            f"{peer_name} / our grpo: min (median)",
        ),
    )
    measured: list[tuple[int, Mapping[str, Timing]]] = []
    for b, t in sizes:
        free = available_bytes()
        if free is not None and TENSORS_NEEDED * 4 * b * t > free:
            table.notes.append(f"{b} x {t} left out: not enough free memory.")
            continue
        progress(f"assign, memory {regime}: {b} x {t}")
        batch = make(b, t)
        calls = _contestants(batch)
        calls[peer_name] = lambda batch=batch: function(
            batch.token_rewards, batch.float_mask, batch.index
        )
        timing = interleaved(calls, **_rounds(quick))
        measured.append((b * t, timing))
        against = timing[peer_name].over(timing["grpo"])
        table.rows.append(
            [
                f"{b} x {t}",
                1e3 * timing[LINE].least,
                *(1e3 * timing[rule].least for rule in RULES),
                *("{:.1f} ({:.1f})".format(*timing[rule].over(timing[LINE])) for rule in RULES),
                1e3 * timing[peer_name].least,
                "{:.1f} ({:.1f})".format(*against),
            ]
        )
        if (b, t) == sizes[-1]:
            pages = 4 * b * t / 4096
            faults = {name: page_faults(call) / pages for name, call in calls.items()}
            told = ", ".join(f"{name} {value:.2f}" for name, value in faults.items())
            table.notes.append(f"Page faults at {b} x {t}, in pages of one [b, t] float32: {told}.")
    table.notes.append(_growth(measured))
    return table


def _growth(measured: list[tuple[int, Mapping[str, Timing]]]) -> str:
    """The exponent p of time ~ (b t)^p, by least squares in logarithms, from the fastest rounds."""
    large = [(n, timing) for n, timing in measured if n >= LINEAR_FROM] or measured
    x = torch.tensor([math.log(n) for n, _ in large], dtype=torch.float64)
    found: list[str] = []
    for rule in (LINE, *RULES):
        y = torch.tensor([math.log(timing[rule].least) for _, timing in large], dtype=torch.float64)
        slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
        found.append(f"{rule} {float(slope):.2f}")
    return f"Time grows as (b t)^p from b t = {min(n for n, _ in large)} on, p: {', '.join(found)}."


def _variants(regime: str, *, quick: bool) -> Table:
    b, t = (64, 64) if quick else (2048, 1024)
    progress(f"assign, memory {regime}: variants of {b} x {t}")
    plain = make(b, t)
    table = Table(
        f"Memory {regime}: variants of {b} x {t}, in passes: min (median)", ("variant", *RULES)
    )

    def add(what: str, calls: dict[str, Callable[[], Any]]) -> None:
        timing = interleaved(calls, **_rounds(quick))
        row: list[str | float] = [what]
        row += ["{:.1f} ({:.1f})".format(*timing[rule].over(timing[LINE])) for rule in RULES]
        table.rows.append(row)

    add("contiguous groups, right padding", _contestants(plain))
    add("shuffled groups", _contestants(make(b, t, order="shuffled")))
    add("left padding", _contestants(make(b, t, padding="left")))
    add("holes (tool output)", _contestants(make(b, t, padding="holes")))
    add("1 % of the entropies unknown", _contestants(make(b, t, padding="unknown")))

    def rebuilt() -> Rollouts:
        given = plain.rollouts
        return Rollouts(given.rewards, given.group, given.mask, entropy=plain.entropy)

    first = _contestants(plain)[LINE]
    with_rollouts: dict[str, Callable[[], Any]] = {LINE: first}
    with_diagnostics: dict[str, Callable[[], Any]] = {LINE: first}
    for rule in RULES:
        with_rollouts[rule] = lambda rule=rule: assign(rebuilt(), rule)
        with_diagnostics[rule] = lambda rule=rule: assign(plain.rollouts, rule).diagnostics
    add("the first, and Rollouts(...) made each time", with_rollouts)
    add("the first, and the diagnostics read", with_diagnostics)
    return table


def _memory(b: int, t: int) -> Table:
    progress("assign: peak memory")
    batch = make(b, t)
    calls = _contestants(batch)
    table = Table(
        f"Peak memory above the inputs at {b} x {t}, in [b, t] float32 tensors",
        ("call", "peak", "of which returned"),
    )
    returned = {LINE: "1", "grpo": "1 (advantage)", "gtpo": "2 (advantage, shaped reward)"}
    for name, call in calls.items():
        call()
        peak = peak_bytes(call)
        value = "not to be had here" if peak is None else peak / (4 * b * t)
        table.rows.append([name, value, returned.get(name, "1 (advantage)")])
    return table
