"""Two reference credits: the oracle, which knows where each response went wrong, and uniform.

They bound what a method of credit assignment can do on the lab's tasks. Importing this module
registers them as ``oracle`` and ``uniform``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from tokencredit.credit import Credit, finish
from tokencredit.losses import Surrogate
from tokencredit.methods.grpo import grpo_advantage
from tokencredit.methods.registry import register
from tokencredit.methods.rule import Recipe, Rule
from tokencredit.rollouts import Rollouts

__all__ = ["Oracle", "Uniform"]


@register
@dataclass(frozen=True)
class Oracle(Rule):
    """The credit of someone who knows the task: marked tokens share the whole advantage.

        A_it = base_i  m_it  L_i / sum_t m_it

    with m the marks of `oracle_marks`: the first wrong token of a wrong response, the deciding
    tokens of a right one. A response without marks gets its base everywhere. The base is
    ``Rollouts.base``, else GRPO's.

    Invariants: the mean over a response's tokens is its base; the sign never flips.

    Example:
        >>> import torch
        >>> from tokencredit import Rollouts, assign
        >>> marks = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        >>> rollouts = Rollouts(
        ...     torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 2), signals={"oracle": marks},
        ...     base=torch.tensor([1.0, -1.0]),
        ... )
        >>> assign(rollouts, Oracle()).advantage.tolist()
        [[0.0, 2.0], [-2.0, -0.0]]
    """

    name: ClassVar[str] = "oracle"
    title: ClassVar[str] = "Credit from the task's verifier (lab only)"
    acts_on: ClassVar[str] = "token weight"
    needs: ClassVar[tuple[str, ...]] = ("oracle",)

    def credit(self, rollouts: Rollouts) -> Credit:
        """Assign credit."""
        base = grpo_advantage(rollouts) if rollouts.base is None else rollouts.base
        live = rollouts.live_as()
        marks = rollouts.signals["oracle"].to(live.dtype).nan_to_num(0.0, 0.0, 0.0) * live
        total = marks.sum(dim=1, keepdim=True)
        length = live.sum(dim=1, keepdim=True)
        weight = torch.where(total > 0, marks * length / total.clamp(min=1e-30), live)
        return finish(
            rollouts, self, advantage=weight * base.unsqueeze(1), base=base, weight=weight
        )


@register
@dataclass(frozen=True)
class Uniform(Rule):
    """Every token of a response gets the response's advantage: the engine's own, else GRPO's.

    Example:
        >>> import torch
        >>> from tokencredit import Rollouts, assign
        >>> rollouts = Rollouts(
        ...     torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 1), base=torch.tensor([3.0, -3])
        ... )
        >>> assign(rollouts, Uniform()).advantage.tolist()
        [[3.0], [-3.0]]
    """

    name: ClassVar[str] = "uniform"
    title: ClassVar[str] = "The same credit for every token (lab only)"
    acts_on: ClassVar[str] = "nothing"

    def credit(self, rollouts: Rollouts) -> Credit:
        """Assign credit."""
        base = grpo_advantage(rollouts) if rollouts.base is None else rollouts.base
        return finish(rollouts, self, advantage=base, base=base)

    @property
    def recipe(self) -> Recipe:
        """The same under every ratio level: its advantages are constant along a response."""
        return Recipe(Surrogate(), ratio_required=False)
