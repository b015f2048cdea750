"""Statistics over pools of responses or tokens, without a Python loop over any of them.

A pool is the set of values that share one mean and one standard deviation: the tokens of a
prompt's group, the successes of a group, a whole batch. Row sums are formed first and added up
over rows in float64 (float32 where a device has no float64), so that neither the order of rows
nor the padding shows in the sixth digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["NO_SPREAD", "Pools", "Positions", "uniform_groups", "wide"]

NO_SPREAD = 1e-6
"""A pool whose std is at most this fraction of its root mean square has no spread: what is left
is rounding, and dividing by it would turn rounding into advantages."""


def wide(device: torch.device) -> torch.dtype:
    """The widest float that the device has."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, eq=False)
class Pools:
    """Rows divided into pools.

    Attributes:
        index: ``[b]`` the pool of each row, ``0 .. count - 1``.
        count: number of pools.
        zeros: ``[count]`` how many further values, all 0, each pool holds; None = none.
    """

    index: Int[Tensor, "b"]
    count: int
    zeros: Float[Tensor, "p"] | None = None

    def sum(self, values: Float[Tensor, "b"]) -> Float[Tensor, "p"]:
        """Sum of one value a row over each pool."""
        out = torch.zeros(self.count, dtype=wide(values.device), device=values.device)
        return out.index_add_(0, self.index, values.to(out.dtype))

    def mean(self, values: Tensor, weight: Tensor) -> Float[Tensor, "b"]:
        """Mean of each row's pool.

        Args:
            values: ``[b, t]`` one value a token, or ``[b]`` one value a row; 0 where the weight
                is 0.
            weight: of ``values``' shape and type: 1 where a value counts, else 0; for ``[b]`` any
                number of times that a row's value counts.
        """
        mean = self.sum(_row_sums(values, weight)) / self._total(weight).clamp(min=1)
        return mean.to(values.dtype)[self.index]

    def inverse_std(
        self, values: Tensor, weight: Tensor, *, correction: int, eps: float
    ) -> Float[Tensor, "b"]:
        """``1 / (std + eps)`` of each row's pool; 0 for fewer than two values or no spread."""
        mean = self.mean(values, weight)
        return self._inverse_std(mean, _centre(values, weight, mean), weight, correction, eps)

    def standardise(
        self,
        values: Tensor,
        weight: Tensor,
        *,
        correction: int,
        eps: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """``(value - mean) / (std + eps)`` within each pool; 0 for a pool without spread.

        Arguments as in `mean`; ``correction`` as in ``torch.std``: 1 divides by n - 1; ``out``: a
        tensor of ``values``' shape and type to put the result into (``[b, t]`` alone).

        Returns:
            Of ``values``' shape; 0 where ``weight`` is 0.
        """
        mean = self.mean(values, weight)
        centred = _centre(values, weight, mean, out)
        factor = self._inverse_std(mean, centred, weight, correction, eps)
        return centred.mul_(factor.unsqueeze(1) if values.dim() == 2 else factor)

    def _inverse_std(
        self, mean: Tensor, centred: Tensor, weight: Tensor, correction: int, eps: float
    ) -> Tensor:
        total = self._total(weight)
        if centred.dim() == 2:
            norm = cast("Tensor", torch.linalg.vector_norm(centred, dim=1))
            square = self.sum(norm.square())
        else:
            square = self.sum(centred * centred * weight)
        pool_mean = torch.zeros_like(square)
        pool_mean[self.index] = mean.to(square.dtype)
        if self.zeros is not None:
            # Each zero lies one mean away from the mean of its pool.
            square = square + self.zeros * pool_mean * pool_mean
        std = (square / (total - correction).clamp(min=1)).sqrt()
        rms = (square / total.clamp(min=1) + pool_mean * pool_mean).sqrt()
        alive = (total >= 2) & (std > NO_SPREAD * rms)
        inverse = torch.where(alive, 1 / torch.where(alive, std + eps, 1.0), 0.0)
        return inverse.to(mean.dtype)[self.index]

    def _total(self, weight: Tensor) -> Tensor:
        total = self.sum(weight.sum(dim=1) if weight.dim() == 2 else weight)
        return total if self.zeros is None else total + self.zeros


def _row_sums(values: Tensor, weight: Tensor) -> Tensor:
    return values.sum(dim=1) if values.dim() == 2 else values * weight


def _centre(values: Tensor, weight: Tensor, mean: Tensor, out: Tensor | None = None) -> Tensor:
    if values.dim() == 2:
        return torch.addcmul(values, weight, mean.unsqueeze(1), value=-1, out=out)
    return torch.where(weight > 0, values - mean, 0.0)


@dataclass(frozen=True, eq=False)
class Positions:
    """Tokens by their position: the index among the masked tokens of their response.

    ``pack`` moves each response's masked values to the front, so that a column is a position
    whatever the padding; ``unpack`` is its inverse. Both are free where the mask already is a
    prefix of each row, which is looked up only on the CPU: elsewhere it would synchronise.
    Otherwise what is packed has one column more, the first, for what is outside the mask.
    """

    index: Int[Tensor, "b t"] | None

    @staticmethod
    def of(ones: Float[Tensor, "b t"]) -> Positions:
        """Positions of the tokens of a mask given as ones and zeros (`Rollouts.live_as`)."""
        if ones.device.type == "cpu" and _is_prefix(ones):
            return Positions(None)
        return Positions.general(ones)

    @staticmethod
    def general(ones: Float[Tensor, "b t"]) -> Positions:
        """The same without a look at the values: no synchronisation."""
        bits = ones.to(torch.int8)  # a sum of integers comes out as the int64 that indexing wants
        return Positions(bits.cumsum(dim=1).mul_(bits))

    def pack(self, values: Float[Tensor, "b t"]) -> Float[Tensor, "b p"]:
        """Masked values to the front; ``values`` must be 0 outside the mask."""
        if self.index is None:
            return values
        packed = values.new_zeros(values.shape[0], values.shape[1] + 1)
        return packed.scatter_(1, self.index, values)

    def unpack(
        self, packed: Float[Tensor, "b p"], out: Float[Tensor, "b t"] | None = None
    ) -> Float[Tensor, "b t"]:
        """Back to the columns of the mask; anything outside it. ``out`` may take the result."""
        return packed if self.index is None else torch.gather(packed, 1, self.index, out=out)


def _is_prefix(ones: Float[Tensor, "b t"]) -> bool:
    """Whether no 0 is followed by a 1; in bytes, which a CPU compares fastest."""
    if ones.shape[0] == 0 or ones.shape[1] < 2:
        return True
    return int(ones.to(torch.int8).diff(dim=1).amax()) <= 0


def uniform_groups(
    success: Bool[Tensor, "b"], real: Bool[Tensor, "b"], group: Int[Tensor, "b"], groups: int
) -> Bool[Tensor, "b"]:
    """``[b]``: whether a response's group lacks a success or lacks a failure, real rows alone."""
    right = torch.zeros(groups, dtype=torch.int32, device=group.device)
    wrong = right.clone()
    right.index_add_(0, group, (success & real).to(torch.int32))
    wrong.index_add_(0, group, (~success & real).to(torch.int32))
    return ((right == 0) | (wrong == 0))[group]
