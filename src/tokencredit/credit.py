"""Credit: what a rule returns, and `assign`, the one way to call a rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tokencredit.errors import InputError, MissingSignalError
from tokencredit.rollouts import as_ones

if TYPE_CHECKING:
    from tokencredit.methods.rule import Rule
    from tokencredit.rollouts import Rollouts

__all__ = ["Credit", "assign", "finish"]

HOW_TO_GET = {
    "entropy": "the full-vocabulary entropy of the sampling policy at each token, in nats; "
    "CreditGRPOTrainer fills it in, elsewhere pass Rollouts(entropy=...)",
} | dict.fromkeys(
    ("work", "projection", "cosine", "natural", "reward_norm", "work_random", "grad_x_input"),
    "formed from a frozen reward model's gradient at each token; CreditGRPOTrainer does it with "
    "reward_model=..., elsewhere tokencredit.signals.alignment_signals",
)
"""For each signal, one clause that says what it is and how to get it."""


@dataclass(frozen=True, eq=False)
class Credit:
    """Token-level credit: what the loss multiplies, and how it came about.

    Everything is detached and float32.

    Attributes:
        advantage: ``[b, t]``, what the loss multiplies; 0 outside the mask, for padding rows,
            and for responses that are kept out of the loss. Constant along a response for
            response-level rules (GRPO, Dr. GRPO, DAPO, GRPO-S).
        base: ``[b]``, the response-level advantage before any shaping.
        in_loss: ``[b]`` bool, the responses whose tokens the loss averages over: real, kept,
            and not in a group that the rule drops. A dropped response differs from one with
            advantage 0: it does not count in the loss's denominator.
        reward: the shaped reward of rules that act on rewards, ``[b, t]`` (GTPO) or ``[b]``
            (GRPO-S), else None; 0 where there is none.
        weight: ``[b, t]``, advantage over base, of rules that multiply, 1 where frozen; else None.
        rule: the rule with its options.
    """

    advantage: Float[Tensor, "b t"]
    base: Float[Tensor, "b"]
    in_loss: Bool[Tensor, "b"]
    reward: Float[Tensor, "b t"] | Float[Tensor, "b"] | None = None
    weight: Float[Tensor, "b t"] | None = None
    rule: Rule | None = None
    _rollouts: Rollouts | None = field(default=None, repr=False)
    _measures: Callable[[], Mapping[str, Tensor]] | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled or copied carries the diagnostics themselves, not how to form them."""
        if self._rollouts is not None:
            _ = self.diagnostics
        return self.__dict__ | {"_rollouts": None, "_measures": None}

    @cached_property
    def diagnostics(self) -> dict[str, float]:
        """What to watch. Computed when first read (one synchronisation on an accelerator).

        - ``responses``, ``groups``: real ones. ``tokens``: those that the loss averages over.
        - ``groups_skipped``: share of the groups whose every advantage is 0 or dropped.
        - ``sign_flips``: share of those tokens whose advantage has the opposite sign of the base.
        - ``effective_tokens``: mean over responses of ``(sum |A|)^2 / sum A^2``, the number of
          equal tokens that would be as concentrated; ``effective_share`` divides by the length.
        - ``largest_share``: the largest share of one response's ``|A|`` on one token.
        - ``unknown_tokens``: share of tokens whose needed signal was unknown; rules that read one.
        """
        if self._rollouts is None:
            raise InputError("Credit: made without its rollouts; a rule returns finish(...)")
        measures = _common_measures(self, self._rollouts)
        if self._measures is not None:
            measures.update(self._measures())
        stacked = torch.stack([v.detach().to(torch.float32).reshape(()) for v in measures.values()])
        values = cast("list[float]", (stacked + 0.0).tolist())  # no -0
        return dict(zip(measures, values, strict=True))


def finish(
    rollouts: Rollouts,
    rule: Rule,
    *,
    advantage: Tensor,
    base: Tensor,
    reward: Tensor | None = None,
    weight: Tensor | None = None,
    dropped: Tensor | None = None,
    masked: bool = False,
    measures: Callable[[], Mapping[str, Tensor]] | None = None,
) -> Credit:
    """Make the `Credit` of a rule: zero where nothing is trained, float32, detached.

    Args:
        rollouts: what the rule read.
        rule: the rule.
        advantage: ``[b, t]``, or ``[b]`` for a response-level rule.
        base: ``[b]``, the advantage before shaping.
        reward: ``[b, t]`` or ``[b]`` shaped rewards, if the rule has them.
        weight: ``[b, t]`` weights, if the rule multiplies.
        dropped: ``[b]`` bool, responses that leave the loss together with its denominator.
        masked: the rule promises that its ``[b, t]`` values are 0 outside ``rollouts.live``
            (weights: 1) and gives them away: ``advantage`` is finished in place.
        measures: the rule's own diagnostics, computed when first read.

    Raises:
        InputError: a shape that does not fit the rollouts.
    """
    b, t = rollouts.mask.shape
    for name, value, shapes in (
        ("advantage", advantage, ([b, t], [b])),
        ("base", base, ([b],)),
        ("reward", reward, ([b, t], [b])),
        ("weight", weight, ([b, t],)),
        ("dropped", dropped, ([b],)),
    ):
        if value is not None and list(value.shape) not in shapes:
            raise InputError(
                f"{rule.name}: finish: {name} must have shape "
                f"{' or '.join(map(str, shapes))}, got {list(value.shape)}"
            )
    in_loss = rollouts.real & rollouts.keep
    if dropped is not None:
        in_loss = in_loss & ~dropped

    def clean(value: Tensor, outside: float = 0.0) -> Tensor:
        value = value.detach().to(torch.float32)
        if masked or value.dim() == 1:
            return value
        return torch.where(rollouts.live, value, outside)

    if advantage.dim() == 1:
        flat = torch.where(in_loss, advantage.detach().to(torch.float32), 0.0)
        full = as_ones(rollouts.mask).mul_(flat.unsqueeze(1))
    else:
        full = clean(advantage).mul_(in_loss.to(torch.float32).unsqueeze(1))
    if weight is not None:
        weight = torch.where(in_loss.unsqueeze(1), clean(weight, 1.0), 1.0)
    return Credit(
        advantage=full,
        base=torch.where(rollouts.real, base.detach().to(torch.float32), 0.0),
        in_loss=in_loss,
        reward=None if reward is None else clean(reward),
        weight=weight,
        rule=rule,
        _rollouts=rollouts,
        _measures=measures,
    )


def _common_measures(credit: Credit, rollouts: Rollouts) -> dict[str, Tensor]:
    a = credit.advantage
    trained = as_ones(rollouts.mask).mul_(credit.in_loss.to(a.dtype).unsqueeze(1))
    size = a.abs()
    norm = cast("Tensor", torch.linalg.vector_norm(a, dim=1))
    total, square = size.sum(dim=1), norm.square()
    length = trained.sum(dim=1)
    moved = total > 0
    effective = torch.where(moved, total * total / square.clamp(min=1e-30), 0.0)
    count = moved.sum().clamp(min=1)
    tokens = length.sum()
    number = torch.zeros(2, rollouts.groups, dtype=torch.int32, device=a.device)
    number.index_add_(1, rollouts.group, torch.stack([rollouts.real, moved]).to(torch.int32))
    groups, groups_moved = number.count_nonzero(dim=1)
    largest = size.amax(dim=1) if a.shape[1] else total
    against = torch.mul(a, credit.base.sign().unsqueeze(1), out=size).clamp_(max=0)
    flips = -against.sign_().sum()
    return {
        "responses": rollouts.real.sum(),
        "groups": groups,
        "tokens": tokens,
        "groups_skipped": (groups - groups_moved) / groups.clamp(min=1),
        "sign_flips": flips / tokens.clamp(min=1),
        "effective_tokens": effective.sum() / count,
        "effective_share": (effective / length.clamp(min=1)).sum() / count,
        "largest_share": torch.where(moved, largest / total.clamp(min=1e-30), 0.0).amax()
        if a.numel()
        else a.new_zeros(()),
    }


def assign(rollouts: Rollouts, rule: str | Rule, **options: Any) -> Credit:
    """Turn response-level rewards into token-level credit by a published rule.

    Args:
        rollouts: what was sampled and what it scored; group statistics need whole groups.
        rule: a name (``"gtpo"``; see `methods`) or a rule object (``GTPO(alpha2=0.2)``).
        **options: the rule's options, only together with a name.

    Returns:
        A `Credit`: detached, float32, 0 outside the mask; the same (1e-6) whatever the padding,
        the order of the rows or the split over ranks.

    Raises:
        InputError: an unknown name or option, or an option out of range.
        MissingSignalError: the rule needs a signal that the rollouts lack.

    Example:
        >>> import torch
        >>> from tokencredit import Rollouts
        >>> rollouts = Rollouts(
        ...     rewards=torch.tensor([1.0, 1.0, 0.0, 0.0]),
        ...     group=["p"] * 4,
        ...     mask=torch.ones(4, 2, dtype=torch.bool),
        ...     entropy=torch.tensor([[3.0, 1.0], [1.0, 3.0], [4.0, 1.0], [1.0, 4.0]]),
        ... )
        >>> credit = assign(rollouts, "gtpo", alpha2=0.1)
        >>> [[round(x, 2) for x in row] for row in credit.reward.tolist()]
        [[1.15, 1.05], [1.05, 1.15], [-1.04, -1.16], [-1.16, -1.04]]
    """
    from tokencredit.methods.registry import resolve

    resolved = resolve(rule, options)
    for name in resolved.needs:
        if name not in rollouts.signals:
            how = HOW_TO_GET.get(name, f"pass Rollouts(signals={{{name!r}: ...}})")
            raise MissingSignalError(
                f"{resolved.name}: the rollouts have no signal {name!r} ({how})"
            )
    credit = resolved.credit(rollouts)
    if not isinstance(credit, Credit):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"{resolved.name}: the rule returned {type(credit).__name__}, not a Credit: end its "
            "`credit` by `return finish(...)`"
        )
    if credit.advantage.shape != rollouts.mask.shape:
        raise InputError(
            f"{resolved.name}: the rule returned advantages of shape "
            f"{list(credit.advantage.shape)} for a mask of {list(rollouts.mask.shape)}"
        )
    return credit
