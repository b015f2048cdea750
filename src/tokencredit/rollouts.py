"""Rollouts: what was sampled and what it scored, in the one form that every rule reads."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tokencredit.errors import InputError

__all__ = ["Rollouts"]

TRUE_ABOVE = 0.5
"""A reward above it is a success, and so is a flag that comes as a number: -1 is no success."""


@dataclass(frozen=True, init=False, eq=False)
class Rollouts:
    """A batch of sampled responses, their rewards, and what is known about each token.

    Frozen; every tensor lies on one device. Nothing outside ``mask`` is ever read, so padding
    may hold anything, NaN and infinity included.

    Notation for shapes: b responses, t padded tokens.

    Args:
        rewards: ``[b]``, the scalar reward of each response; NaN or infinite = not scored.
        group: ``[b]``, which prompt a response answers: an integer tensor or a sequence of any
            hashables, in any order. A group tensor on an accelerator costs one synchronisation
            (the number of groups is read back); a sequence or a CPU tensor costs none.
        mask: ``[b, t]`` bool, True where the policy chose the token. Holes (tool output) and
            padding on either side are fine: a token's position is its index among the True ones.
        success: ``[b]`` bool, whether the response is right (numbers: right above 0.5, so that
            0/1 and -1/1 both work). The only thing that GTPO, GRPO-S and the DAPO filter read.
            Default: ``rewards > 0.5``.
        real: ``[b]`` bool, False = a padding row of the engine, in no statistic. Default: the
            mask is not empty. An unscored response is never real.
        keep: ``[b]`` bool, False = counts in every statistic but not in the loss (a truncated
            response under DAPO's overlong filter); its advantage is 0. Default: all True.
        base: ``[b]``, the engine's own response-level advantage. Rules that weight a base use
            it; without it they use GRPO's.
        signals: named ``[b, t]`` tensors: ``entropy`` (nats, full vocabulary, at the sampling
            temperature), ``logprob``, ``ref_logprob``, ``sum_p2``, ``work``, ... NaN = unknown
            at that token, which is not 0.
        token_ids: ``[b, t]`` integer token ids; kept for rules and records that read them.
        entropy: shorthand for ``signals={"entropy": ...}``.
        work: shorthand for ``signals={"work": ...}``.

    Raises:
        InputError: a shape, type or device that does not fit, naming the argument.

    Example:
        >>> import torch
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0, 0.0]), group=["p", "p"], mask=torch.ones(2, 3)
        ... )
        >>> rollouts.success.tolist(), rollouts.group.tolist(), rollouts.groups
        ([True, False], [0, 0], 1)
    """

    rewards: Float[Tensor, "b"]
    group: Int[Tensor, "b"]
    mask: Bool[Tensor, "b t"]
    success: Bool[Tensor, "b"]
    real: Bool[Tensor, "b"]
    keep: Bool[Tensor, "b"]
    base: Float[Tensor, "b"] | None
    signals: Mapping[str, Float[Tensor, "b t"]]
    token_ids: Int[Tensor, "b t"] | None
    groups: int = field(repr=False)
    """Number of distinct groups; ``group`` holds ``0 .. groups - 1``."""

    def __init__(
        self,
        rewards: Float[Tensor, "b"] | Sequence[float],
        group: Int[Tensor, "b"] | Iterable[Hashable],
        mask: Tensor | Sequence[Sequence[int]],
        *,
        success: Tensor | Sequence[bool] | None = None,
        real: Tensor | Sequence[bool] | None = None,
        keep: Tensor | Sequence[bool] | None = None,
        base: Tensor | Sequence[float] | None = None,
        signals: Mapping[str, Tensor] | None = None,
        token_ids: Tensor | None = None,
        entropy: Tensor | None = None,
        work: Tensor | None = None,
    ) -> None:
        mask_t = _as_tensor(mask, "mask")
        if mask_t.dim() != 2:
            raise InputError(f"Rollouts: mask must have shape [b, t], got {_shape(mask_t)}")
        device = mask_t.device
        b, t = mask_t.shape
        mask_t = mask_t if mask_t.dtype == torch.bool else mask_t != 0

        rewards_t = _row(rewards, "rewards", b, device, floating=True)
        group_t, count = _dense_groups(group, b, device)

        def flags(value: Tensor | Sequence[bool] | None, name: str, default: Tensor) -> Tensor:
            return default if value is None else _row(value, name, b, device, floating=False)

        given = dict(signals or {})
        for name, value in (("entropy", entropy), ("work", work)):
            if value is not None:
                if name in given:
                    raise InputError(f"Rollouts: {name} is given twice, by name and in signals")
                given[name] = value
        checked = {
            name: _tokens(value, f"signals[{name!r}]", b, t, device, floating=True)
            for name, value in given.items()
        }

        values: dict[str, Any] = {
            "rewards": rewards_t,
            "group": group_t,
            "mask": mask_t,
            "success": flags(success, "success", rewards_t > TRUE_ABOVE),
            "real": flags(real, "real", _any_of_row(mask_t)) & rewards_t.isfinite(),
            "keep": flags(keep, "keep", torch.ones(b, dtype=torch.bool, device=device)),
            "base": None if base is None else _row(base, "base", b, device, floating=True),
            "signals": MappingProxyType(checked),
            "token_ids": None
            if token_ids is None
            else _tokens(token_ids, "token_ids", b, t, device, floating=False),
            "groups": count,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """A read-only view cannot be pickled or copied, a plain mapping can."""
        return self.__dict__ | {"signals": dict(self.signals)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Put the view back."""
        self.__dict__.update(state, signals=MappingProxyType(state["signals"]))

    @property
    def responses(self) -> int:
        """Number of rows, b."""
        return self.mask.shape[0]

    @property
    def device(self) -> torch.device:
        """The device that every tensor lies on."""
        return self.mask.device

    @property
    def live(self) -> Bool[Tensor, "b t"]:
        """``[b, t]``: the tokens that statistics may read: inside the mask of a real row."""
        return self.mask & self.real.unsqueeze(1)

    def live_as(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "b t"]:
        """`live` as a new tensor of ones and zeros: multiplying by it is the fast way to mask."""
        return as_ones(self.mask, dtype).mul_(self.real.to(dtype).unsqueeze(1))

    def replace(self, **changes: Any) -> Rollouts:
        """The same rollouts with some constructor arguments changed.

        The others stay as they are: new rewards do not make a new ``success``. ``entropy=`` and
        ``work=`` replace that one signal.

        Example:
            >>> import torch
            >>> one = Rollouts(torch.ones(2), [0, 0], torch.ones(2, 3))
            >>> one.replace(success=[True, False]).success.tolist()
            [True, False]
        """
        names = [f.name for f in fields(self) if f.name != "groups"]
        shorthand = {name: changes.pop(name) for name in ("entropy", "work") if name in changes}
        values = {name: getattr(self, name) for name in names} | changes
        values["signals"] = {**(values["signals"] or {}), **shorthand}
        return Rollouts(**values)

    def to(self, device: torch.device | str) -> Rollouts:
        """The same rollouts on another device."""

        def move(value: Tensor | None) -> Tensor | None:
            return None if value is None else value.to(device)

        return Rollouts(
            self.rewards.to(device),
            self.group.cpu(),
            self.mask.to(device),
            success=move(self.success),
            real=move(self.real),
            keep=move(self.keep),
            base=move(self.base),
            signals={name: value.to(device) for name, value in self.signals.items()},
            token_ids=move(self.token_ids),
        )


def as_ones(mask: Bool[Tensor, "b t"], dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask as a new tensor of ones and zeros.

    By way of bytes, because a CPU converts bool itself some ten times more slowly.
    """
    return mask.view(torch.uint8).to(dtype)


def _any_of_row(mask: Bool[Tensor, "b t"]) -> Bool[Tensor, "b"]:
    """``mask.any(dim=1)``, by way of bytes for the same reason."""
    if mask.shape[1] == 0:
        return mask.new_zeros(mask.shape[0])
    return mask.view(torch.uint8).amax(dim=1).view(torch.bool)


def _shape(value: Tensor) -> str:
    return "[" + ", ".join(str(n) for n in value.shape) + "]"


def _as_tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"Rollouts: {name} cannot be made a tensor: {error}") from error


def _same_device(value: Tensor, given: Any, name: str, device: torch.device) -> Tensor:
    if value.device != device:
        if isinstance(given, Tensor):
            raise InputError(f"Rollouts: {name} is on {value.device}, mask on {device}")
        value = value.to(device)
    return value


def _row(given: Any, name: str, b: int, device: torch.device, *, floating: bool) -> Tensor:
    value = _as_tensor(given, name)
    if value.shape != (b,):
        raise InputError(
            f"Rollouts: {name} must have shape [b] = [{b}], one value a response, "
            f"got {_shape(value)}"
        )
    if value.is_complex():
        raise InputError(f"Rollouts: {name} must be real, got {value.dtype}")
    value = _same_device(value, given, name, device)
    if floating:
        return value if value.dtype == torch.float64 else value.to(torch.float32)
    return value if value.dtype == torch.bool else value > TRUE_ABOVE


def _tokens(
    given: Any, name: str, b: int, t: int, device: torch.device, *, floating: bool
) -> Tensor:
    value = _as_tensor(given, name)
    if value.shape != (b, t):
        raise InputError(
            f"Rollouts: {name} must have the shape of mask, [b, t] = [{b}, {t}], "
            f"got {_shape(value)}"
        )
    if value.is_complex() or (value.is_floating_point() != floating and not floating):
        kind = "a real number" if floating else "an integer"
        raise InputError(f"Rollouts: {name} must hold {kind} a token, got {value.dtype}")
    value = _same_device(value, given, name, device)
    return value.to(torch.float32) if floating and not value.is_floating_point() else value


def _dense_groups(given: Any, b: int, device: torch.device) -> tuple[Tensor, int]:
    """Number the groups 0, 1, ... and count them; on the host wherever the values already are."""
    if isinstance(given, Tensor):
        if given.shape != (b,):
            raise InputError(f"Rollouts: group must have shape [b] = [{b}], got {_shape(given)}")
        if given.is_floating_point() or given.is_complex():
            raise InputError(f"Rollouts: group must hold integers, got {given.dtype}")
        unique, dense = cast(
            "tuple[Tensor, Tensor]", torch.unique(given.detach(), return_inverse=True)
        )
        return dense.to(device), unique.numel()
    try:
        keys: list[Hashable] = list(given)
    except TypeError as error:
        raise InputError(f"Rollouts: group must be a tensor or a sequence: {error}") from error
    if len(keys) != b:
        raise InputError(f"Rollouts: group must name {b} responses, one each, got {len(keys)}")
    if any(isinstance(key, Tensor) for key in keys):
        # Tensors hash by identity: every response would be a group of its own.
        raise InputError("Rollouts: group must be one tensor or hashable values, got tensors")
    index: dict[Hashable, int] = {}
    try:
        dense_list = [index.setdefault(key, len(index)) for key in keys]
    except TypeError as error:
        raise InputError(f"Rollouts: group must hold hashable values: {error}") from error
    return torch.tensor(dense_list, dtype=torch.long, device=device), len(index)
