"""Random batches for the tests: drawn as plain lists, laid out as tensors in any padding.

A `Batch` knows nothing of padding: each response is a list of tokens. `Batch.rollouts` lays it
out, `Batch.tokens` reads a ``[b, t]`` result back, so that two layouts compare token by token.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from tokencredit import Rollouts

LAYOUTS = ("right", "left", "interleaved")

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    ),
]


@dataclass
class Batch:
    """Responses as plain lists, in group order or not."""

    rewards: list[float]
    group: list[int]
    success: list[bool]
    entropy: list[list[float]]
    keep: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.keep = self.keep or [True] * len(self.rewards)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.entropy]

    def columns(self, layout: str, spare: int = 0, seed: int = 0) -> tuple[list[list[int]], int]:
        """The column of each token of each response, and the width."""
        rng = random.Random(seed)
        longest = max(self.lengths, default=0)
        width = longest + spare
        if layout == "interleaved":
            width += 3
        out: list[list[int]] = []
        for n in self.lengths:
            if layout == "right":
                out.append(list(range(n)))
            elif layout == "left":
                out.append(list(range(width - n, width)))
            else:
                out.append(sorted(rng.sample(range(width), n)))
        return out, width

    def rollouts(
        self,
        layout: str = "right",
        *,
        spare: int = 0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        garbage: tuple[float, ...] = (0.0,),
        order: list[int] | None = None,
        padding_rows: int = 0,
        padding: Literal["flagged", "empty"] = "flagged",
        device: str = "cpu",
        **extra: Any,
    ) -> Rollouts:
        """The batch as tensors; ``garbage`` cycles through what lies outside the mask."""
        columns, width = self.columns(layout, spare, seed)
        b = len(self.rewards)
        junk = [garbage[k % len(garbage)] for k in range((b + padding_rows) * width)]
        entropy = torch.tensor(junk, dtype=dtype).reshape(b + padding_rows, width)
        mask = torch.zeros(b + padding_rows, width, dtype=torch.bool)
        for i, (where, row) in enumerate(zip(columns, self.entropy, strict=True)):
            mask[i, where] = True
            entropy[i, where] = torch.tensor(row, dtype=dtype)
        # Padding rows: "flagged" ones look like responses but real=False, "empty" ones have no
        # token and say nothing.
        mask[b:] = padding == "flagged"
        wild = [(-1.0) ** k * 7.5 for k in range(padding_rows)]
        values: dict[str, Any] = {
            "rewards": torch.tensor(self.rewards + wild, dtype=torch.float32),
            "group": torch.tensor(
                self.group + [k % 3 for k in range(padding_rows)], dtype=torch.long
            ),
            "mask": mask,
            "success": torch.tensor(
                self.success + [k % 2 == 0 for k in range(padding_rows)], dtype=torch.bool
            ),
            "keep": torch.tensor(self.keep + [True] * padding_rows, dtype=torch.bool),
            "entropy": entropy,
        }
        if padding == "flagged":
            real = torch.ones(b + padding_rows, dtype=torch.bool)
            real[b:] = False
            values["real"] = real
        if order is not None:
            values = {name: value[order] for name, value in values.items()}
        return Rollouts(**{k: v.to(device) for k, v in values.items()}, **extra)

    def tokens(
        self,
        values: Tensor,
        layout: str = "right",
        *,
        spare: int = 0,
        seed: int = 0,
        order: list[int] | None = None,
    ) -> list[list[float]]:
        """Read ``[b, t]`` values (or ``[b]``, one a response) back, in the batch's own order."""
        columns, _ = self.columns(layout, spare, seed)
        rows = values.detach().double().cpu()
        if order is not None:
            back = [order.index(i) for i in range(len(self.rewards))]
            rows = rows[back]
        if rows.dim() == 1:
            return [[float(rows[i])] for i in range(len(self.rewards))]
        return [[float(rows[i, c]) for c in where] for i, where in enumerate(columns)]

    def masks(self) -> list[list[int]]:
        """The mask of the right-padded layout, for the loop references."""
        longest = max(self.lengths, default=0)
        return [[1] * n + [0] * (longest - n) for n in self.lengths]

    def padded_entropy(self) -> list[list[float]]:
        """The entropies of the right-padded layout, for the loop references."""
        longest = max(self.lengths, default=0)
        return [row + [math.nan] * (longest - len(row)) for row in self.entropy]

    def mixed(self, i: int) -> bool:
        """Whether the group of response i holds a success and a failure."""
        return len({self.success[k] for k in self.peers(i)}) == 2

    def peers(self, i: int) -> list[int]:
        """The responses of i's group."""
        return [k for k, g in enumerate(self.group) if g == self.group[i]]


@st.composite
def batches(
    draw: st.DrawFn,
    *,
    groups: int = 3,
    size: int = 4,
    longest: int = 5,
    low: float = 1e-3,
    high: float = 20.0,
    keep: bool = False,
    binary: bool = False,
    zeros: bool = False,
    unknown: bool = False,
    mixed: bool = False,
) -> Batch:
    """Ragged groups, shuffled; entropies log-uniform in [low, high], some 0 or NaN if asked."""
    sizes = draw(st.lists(st.integers(2 if mixed else 1, size), min_size=1, max_size=groups))
    b = sum(sizes)
    lengths = draw(st.lists(st.integers(1, longest), min_size=b, max_size=b))
    success = draw(st.lists(st.booleans(), min_size=b, max_size=b))
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    group = [g for g, n in enumerate(sizes) for _ in range(n)]
    if mixed:  # a success and a failure in every group
        for g in range(len(sizes)):
            first = group.index(g)
            success[first], success[first + 1] = True, False

    def value() -> float:
        kind = rng.random()
        if zeros and kind < 0.2:
            return 0.0
        if unknown and kind > 0.8:
            return math.nan
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    batch = Batch(
        rewards=[float(s) if binary else rng.choice([s * 1.0, rng.gauss(0, 1)]) for s in success],
        group=group,
        success=success,
        entropy=[[value() for _ in range(n)] for n in lengths],
        keep=[not keep or rng.random() > 0.3 for _ in range(b)],
    )
    return shuffled(batch, rng)


def shuffled(batch: Batch, rng: random.Random) -> Batch:
    """The same responses in another order."""
    order = list(range(len(batch.rewards)))
    rng.shuffle(order)
    return Batch(
        rewards=[batch.rewards[i] for i in order],
        group=[batch.group[i] for i in order],
        success=[batch.success[i] for i in order],
        entropy=[batch.entropy[i] for i in order],
        keep=[batch.keep[i] for i in order],
    )


def close(got: list[list[float]], want: list[list[float]], rel: float, floor: float = 1.0) -> None:
    """Assert ``|got - want| <= rel * max(floor, |want|)`` at every token."""
    assert [len(row) for row in got] == [len(row) for row in want]
    for i, (g_row, w_row) in enumerate(zip(got, want, strict=True)):
        for p, (g, w) in enumerate(zip(g_row, w_row, strict=True)):
            assert abs(g - w) <= rel * max(floor, abs(w)), (i, p, g, w)


def scattered(per_token: list[list[float]], lengths: list[int]) -> list[list[float]]:
    """The right-padded rows of a loop reference cut to each response's length."""
    return [row[:n] for row, n in zip(per_token, lengths, strict=True)]
