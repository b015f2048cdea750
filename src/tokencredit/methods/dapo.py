"""DAPO, arXiv 2503.14476: mostly a recipe around GRPO's advantage.

What is a rule here: the advantage, and the group filter (groups that are all right or all wrong
leave the loss). What is recipe: clip-higher, the token-level loss, truncated responses kept out
of the loss. What is a reward: the soft overlong punishment, `soft_overlong_punishment`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from tokencredit.credit import Credit, finish
from tokencredit.errors import InputError
from tokencredit.losses import Surrogate
from tokencredit.methods.grpo import grpo_advantage
from tokencredit.methods.pools import uniform_groups
from tokencredit.methods.rule import Recipe, Rule, option
from tokencredit.rollouts import Rollouts

__all__ = ["DAPO", "soft_overlong_punishment"]


@dataclass(frozen=True)
class DAPO(Rule):
    """DAPO: GRPO's advantage over the groups that hold both successes and failures.

        A_it = (r_i - mean_g(r)) / std_g(r)    where 0 < successes of g < G

    Source: arXiv 2503.14476, Eqs. 8-11. The filter reads ``Rollouts.success``, never the reward:
    a length penalty makes rewards differ inside a group that is all right. Dropped responses are
    out of ``Credit.in_loss``, so they leave the loss's denominator as well. Where we differ:
    the paper refills the batch with fresh prompts; that is the trainer's (`dynamic_sampling`).

    Truncated responses stay in the statistics and leave the loss when ``Rollouts.keep`` is False
    for them (overlong filtering).

    Example:
        >>> import torch
        >>> from tokencredit import assign
        >>> rewards = torch.tensor([1.0, 0.0, 1.0, 0.9])
        >>> rollouts = Rollouts(rewards, ["p", "p", "q", "q"], torch.ones(4, 1))
        >>> credit = assign(rollouts, "dapo", correction=0)
        >>> credit.advantage.flatten().tolist(), credit.in_loss.tolist()
        ([1.0, -1.0, 0.0, 0.0], [True, True, False, False])
    """

    name: ClassVar[str] = "dapo"
    title: ClassVar[str] = "Decoupled Clip and Dynamic Sampling Policy Optimization"
    paper: ClassVar[str] = "arXiv:2503.14476"
    acts_on: ClassVar[str] = "group filter, clip, loss aggregation, loss mask"
    reads_success: ClassVar[bool] = True

    filter_uniform: bool = option(True, "drop groups that are all right or all wrong")
    correction: int = option(1, "degrees of freedom taken off, as in torch.std", low=0, high=1)
    eps: float = option(0.0, "added to the standard deviation", low=0)

    def credit(self, rollouts: Rollouts) -> Credit:
        """Assign credit."""
        base = grpo_advantage(rollouts, correction=self.correction, eps=self.eps)
        dropped = None
        if self.filter_uniform:
            dropped = uniform_groups(
                rollouts.success, rollouts.real, rollouts.group, rollouts.groups
            )
        return finish(rollouts, self, advantage=base, base=base, dropped=dropped)

    @property
    def recipe(self) -> Recipe:
        """Clip-higher 0.2 / 0.28, token mean, truncated responses out of the loss, no KL."""
        return Recipe(
            Surrogate(clip_low=0.2, clip_high=0.28, aggregation="token-mean"),
            ratio_required=False,
            mask_truncated=True,
            filter_uniform=self.filter_uniform,
            source="arXiv 2503.14476, sections 3.1-3.4 and 4.1",
        )


def soft_overlong_punishment(length: Tensor, *, max_length: int, cache: int) -> Float[Tensor, "b"]:
    """DAPO's soft overlong punishment, to be added to the reward (success stays untouched).

        0                                  L <= max_length - cache
        (max_length - cache - L) / cache   L <= max_length
        -1                                 L >  max_length

    Source: arXiv 2503.14476, Eq. 13, with ``max_length`` 20480 and ``cache`` 4096.

    Args:
        length: ``[b]`` tokens of each response.
        max_length: longest allowed response, in tokens.
        cache: width of the interval over which the punishment grows, ``0 < cache <= max_length``.

    Example:
        >>> import torch
        >>> length = torch.tensor([60, 80, 90, 100, 101])
        >>> soft_overlong_punishment(length, max_length=100, cache=20).tolist()
        [0.0, 0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < cache <= max_length:
        raise InputError(
            f"soft_overlong_punishment: cache must lie in (0, max_length = {max_length}], "
            f"got {cache!r}"
        )
    return ((max_length - cache - length.to(torch.float32)) / cache).clamp(-1.0, 0.0)
