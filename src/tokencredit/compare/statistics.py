"""Ranks, correlations and distances of credit: tensors in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

__all__ = ["average_ranks", "gram", "moved_share", "rounded", "spearman", "unit_ranks"]

BLOCK = 1 << 20
"""How many tokens, or padded places, are worked on at once: bounds the memory in between."""

_DROPPED = 6
"""Bits of a float32's mantissa that ranks do not see: 17 are left, five significant digits."""


def rounded(values: Tensor) -> Float[Tensor, "..."]:
    """Values to five significant digits, as float32: what rounding separates is a tie again.

    Credit is promised to 1e-6. Without this, two groups whose advantages differ by rounding alone
    would be ranked by it, one way by one method and the other way by another.

    Example:
        >>> one = torch.tensor([0.9, 0.9 + 1e-7, 0.91])
        >>> [len(set(v.tolist())) for v in (one, rounded(one))]
        [3, 2]
    """
    values = values.detach().to(torch.float32) + 0.0  # -0.0 becomes 0.0
    half = 1 << (_DROPPED - 1)
    bits = values.contiguous().view(torch.int32)
    near = ((bits + half) & ~((1 << _DROPPED) - 1)).view(torch.float32)
    return torch.where(values.isfinite() & near.isfinite(), near, values)


def average_ranks(
    values: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"] | None = None
) -> Float[Tensor, "b t"]:
    """The rank of each value within its row, 1 the smallest; equal values share their mean rank.

    Args:
        values: ``[b, t]``, ranked row by row; one row of n values for a single ranking.
        mask: ``[b, t]`` bool, which values take part. Default: all.

    Returns:
        ``[b, t]`` float64; 0 where the mask is False.

    Example:
        >>> average_ranks(torch.tensor([[10.0, 20.0, 20.0, 5.0]])).tolist()
        [[2.0, 3.5, 3.5, 1.0]]
    """
    if values.numel() == 0:
        return torch.zeros(values.shape, dtype=torch.float64, device=values.device)
    if mask is None:
        mask = torch.ones_like(values, dtype=torch.bool)
    outside = (~mask).to(torch.int8)
    held = torch.where(mask, values, math.inf)
    ordered, order = held.sort(dim=1)
    # A run of equal values begins where a value differs from the one before it.
    place = torch.arange(values.shape[1], device=values.device).expand_as(order)
    begins = torch.ones_like(mask)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    ends = torch.ones_like(mask)
    ends[:, :-1] = begins[:, 1:]
    last = values.shape[1] - 1
    first = torch.where(begins, place, 0).cummax(dim=1).values
    final = torch.where(ends, place, last).flip(1).cummin(dim=1).values.flip(1)
    ranks = torch.empty(values.shape, dtype=torch.float64, device=values.device)
    ranks.scatter_(1, order, (first + final).to(torch.float64) / 2 + 1)
    return ranks * (1 - outside)


def unit_ranks(
    values: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> tuple[Float[Tensor, "b t"], Bool[Tensor, "b"]]:
    """Ranks of each row, centred and of length one, and which rows vary at all.

    The product of two such rows is Spearman's correlation. Rows that do not vary are 0.
    """
    ranks = average_ranks(rounded(values), mask)
    ones = mask.to(ranks.dtype)
    centred = (ranks - ranks.sum(1, True) / ones.sum(1, True).clamp(min=1)) * ones
    length = centred.square().sum(1, True).sqrt()
    varies = length > 0
    unit = torch.where(varies, centred / torch.where(varies, length, 1.0), 0.0)
    return unit, varies.squeeze(1)


def spearman(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation of two lists of values; equal values share their mean rank.

    Values are compared to five significant digits. NaN where one of the two does not vary.

    Args:
        a: ``[n]``.
        b: ``[n]``.

    Example:
        >>> spearman(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 3.0, 2.0, 4.0]))
        0.8
    """
    if a.shape != b.shape or a.dim() != 1:
        raise ValueError(f"spearman: two lists of one length, got {[*a.shape]} and {[*b.shape]}")
    rows = torch.stack([rounded(a), rounded(b)])
    unit, varies = unit_ranks(rows, torch.ones_like(rows, dtype=torch.bool))
    if not bool(varies.all()):
        return math.nan
    return max(-1.0, min(1.0, round(_number(unit[0] @ unit[1]), 12)))


def moved_share(a: Tensor, b: Tensor, *, signed: bool = False) -> float:
    """How much of the absolute credit lies elsewhere: half the L1 distance, 0 to 1.

        1/2 sum_t | |a_t| / sum |a|  -  |b_t| / sum |b| |

    With ``signed`` the outer signs stay, so that credit of the other sign counts as moved as
    well. NaN where one of the two is 0 throughout.

    Args:
        a: advantages, any shape.
        b: advantages of the same shape.
        signed: whether the sign counts.

    Example:
        >>> a, b = torch.tensor([1.0, 1.0]), torch.tensor([-3.0, 1.0])
        >>> moved_share(a, b), moved_share(a, b, signed=True)
        (0.25, 0.75)
    """
    a, b = a.detach().flatten(), b.detach().flatten()
    sizes = [_number(v.abs().sum(dtype=torch.float64)) for v in (a, b)]
    if not all(sizes):
        return math.nan
    total = 0.0
    for start in range(0, a.numel(), BLOCK):
        pieces = [v[start : start + BLOCK].to(torch.float64) for v in (a, b)]
        first, second = (
            (piece if signed else piece.abs()) / size
            for piece, size in zip(pieces, sizes, strict=True)
        )
        total += _number((first - second).abs().sum())
    return total / 2


def gram(rows: Sequence[Float[Tensor, "n"]]) -> Float[Tensor, "m m"]:
    """Every scalar product of the rows, added up in float64."""
    total = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for start in range(0, rows[0].numel() if rows else 0, BLOCK):
        block = torch.stack([row[start : start + BLOCK].to(torch.float64) for row in rows])
        total += (block @ block.T).cpu()
    return total


def _number(value: Tensor) -> float:
    return cast("float", value.item())
