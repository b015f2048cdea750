"""`token_statistics` against what it replaces: time, peak memory and error, in one run.

Log-probability and entropy of the same tokens from the same hidden states and head:

- *materialised float32*: logits in memory, log-softmax, gather and sum: the plain path;
- *materialised bfloat16*: the same with 16-bit logits (bfloat16 inputs only);
- *TRL*: the chunked function behind TRL's fused head, where TRL >= 1.15 is installed;
- *verl*: `FusedLinearForPPO`, torch back end, where verl is installed.

Errors are against float64 on the same inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokencredit.signals import token_statistics

from .harness import Report, Table, interleaved, peak_bytes, progress, set_memory

WIDTH = 896
SIZES = ((8_192, 1024), (32_768, 384), (151_936, 96))
QUICK = ((1_000, 16),)
BOTH = ("logprob", "entropy")
Call = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def run(*, quick: bool = False) -> Report:
    """Time, memory and error of every contestant, for both input types."""
    tables = []
    for dtype in (torch.float32, torch.bfloat16):
        tables.append(_table(dtype, quick=quick))
    tables.append(_all_statistics(quick=quick))
    return Report("token_statistics", tables)


def _inputs(v: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and a head whose distributions have some 1 to 5 nats of entropy."""
    g = torch.Generator().manual_seed(v)
    hidden = torch.randn(n, WIDTH, generator=g)
    head = torch.randn(v, WIDTH, generator=g) * (3.5 / WIDTH**0.5)
    return hidden.to(dtype), head.to(dtype), torch.randint(0, v, (n,), generator=g)


def ours(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    s = token_statistics(hidden, head, targets, want=BOTH)
    assert s.logprob is not None and s.entropy is not None
    return s.logprob, s.entropy


def materialised(dtype: torch.dtype) -> Call:
    def call(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden.to(dtype) @ head.to(dtype).t()
        log_p = logits.log_softmax(dim=-1)
        own = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
        return own, -(log_p.exp() * log_p).sum(dim=-1)

    return call


def contestants(dtype: torch.dtype) -> dict[str, Call]:
    """What is installed here."""
    found: dict[str, Call] = {"materialised float32": materialised(torch.float32)}
    if dtype == torch.bfloat16:
        found["materialised bfloat16"] = materialised(torch.bfloat16)
    found["tokencredit"] = ours
    with suppress(ImportError):
        from trl.kernels import ChunkedLogProbFunction
        from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE

        def of_trl(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            out: Any = ChunkedLogProbFunction.apply(
                hidden, head, None, targets, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0,
                ("log_probs", "entropy"),
            )  # fmt: skip
            return out[0], out[1]

        found["TRL, chunked"] = of_trl
    try:
        from verl.utils.experimental.torch_functional import (  # pyright: ignore[reportMissingImports]
            FusedLinearForPPO,
        )
    except Exception as error:
        progress(f"verl cannot be imported ({error}): pip install verl")
    else:
        module = FusedLinearForPPO()

        def of_verl(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return module(hidden, head, targets)

        found["verl, FusedLinearForPPO"] = of_verl
    return found


def _table(dtype: torch.dtype, *, quick: bool) -> Table:
    name = str(dtype).removeprefix("torch.")
    table = Table(
        f"log-probability and entropy, {name} inputs, d = {WIDTH}",
        [
            "V", "tokens", "what", "time over materialised float32", "peak memory over it",
            "peak, MB", "largest error of logprob", "of entropy",
        ],
    )  # fmt: skip
    for v, n in QUICK if quick else SIZES:
        hidden, head, targets = _inputs(v, n, dtype)
        progress(f"token_statistics: {name}, V = {v}")
        few = slice(0, min(n, 32))
        exact = token_statistics(hidden[few], head, targets[few], want=BOTH, impl="reference")
        calls = {what: partial(f, hidden, head, targets) for what, f in contestants(dtype).items()}
        with torch.no_grad():
            set_memory("fresh")
            peaks = {what: peak_bytes(call) for what, call in calls.items()}
            set_memory("reused")
            timings = interleaved(calls, seconds=1 if quick else 25, least=2, most=9)
            errors = {
                what: [
                    float((a[few].double() - b).abs().max())
                    for a, b in zip(call(), (exact.logprob, exact.entropy), strict=True)
                    if b is not None
                ]
                for what, call in calls.items()
            }
        base, base_peak = timings["materialised float32"], peaks["materialised float32"]
        for what in calls:
            peak = peaks[what]
            share = peak / base_peak if peak is not None and base_peak else float("nan")
            table.rows.append(
                [
                    str(v), str(n), what, timings[what].over(base)[1], share,
                    (peak or 0) / 1e6, *(f"{e:.1e}" for e in errors[what]),
                ]
            )  # fmt: skip
    table.notes.append(
        "Time: median of the ratios round by round. Peak: how far resident memory rises during "
        "the call, results included; bfloat16 inputs are cast tile by tile on a CPU."
    )
    return table


def _all_statistics(*, quick: bool) -> Table:
    """What further statistics add to log-probability and entropy."""
    table = Table(
        "what further statistics cost, float32 inputs",
        ["V", "tokens", "statistics", "time over logprob and entropy"],
    )
    reward = ("work", "projection", "cosine", "natural", "reward_norm")
    for v, n in QUICK if quick else SIZES[1:2]:
        hidden, head, targets = _inputs(v, n, torch.float32)
        g = torch.Generator().manual_seed(0)
        given = (torch.randn(n, WIDTH, generator=g), head)
        kinds = {
            "logprob, entropy": (BOTH, None),
            "and logsumexp, sum_p2, update_norm": (
                (*BOTH, "logsumexp", "sum_p2", "update_norm"), None,
            ),
            f"and {', '.join(reward)}": ((*BOTH, *reward), given),
        }  # fmt: skip
        calls = {
            what: partial(token_statistics, hidden, head, targets, want=want, reward=r)
            for what, (want, r) in kinds.items()
        }
        with torch.no_grad():
            timings = interleaved(calls, seconds=1 if quick else 15, least=2, most=9)
        first = timings["logprob, entropy"]
        for what in calls:
            table.rows.append([str(v), str(n), what, timings[what].over(first)[1]])
    table.notes.append("The alignments need a second product of the head's size: twice the work.")
    return table
