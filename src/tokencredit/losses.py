"""The PPO-clipped surrogate that every method here trains with: ratio level x clip x aggregation.

One function, `policy_loss`, covers GRPO, DAPO, GTPO (token ratio), GSPO (geometric sequence
ratio), GRPO-S (arithmetic sequence ratio) and GSPO-token. The denominator can be given, so that
the losses of micro-batches add up to the loss of the whole batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tokencredit.errors import InputError

__all__ = [
    "Aggregation",
    "RatioLevel",
    "Surrogate",
    "importance_ratio",
    "loss_denominator",
    "policy_loss",
    "policy_loss_reference",
]

RatioLevel = Literal["token", "sequence_geometric", "sequence_arithmetic", "gspo_token"]
"""Where the importance ratio is formed; see `importance_ratio`."""

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How token losses become one number; see `loss_denominator`."""

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20, as verl does: exp stays finite, so 0 x ratio stays 0."""


@dataclass(frozen=True)
class Surrogate:
    """The shape of a policy loss.

    Attributes:
        ratio: level of the importance ratio.
        clip_low: the ratio is clipped below at ``1 - clip_low``.
        clip_high: the ratio is clipped above at ``1 + clip_high`` (larger than ``clip_low``:
            DAPO's clip-higher).
        aggregation: how token losses are averaged.

    Example:
        >>> Surrogate(clip_high=0.28).clip_high
        0.28
    """

    ratio: RatioLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "token-mean"

    def __post_init__(self) -> None:
        """Refuse names and ranges that no loss has."""
        for name, value, known in (
            ("ratio", self.ratio, get_args(RatioLevel)),
            ("aggregation", self.aggregation, get_args(Aggregation)),
        ):
            if value not in known:
                raise InputError(f"Surrogate: {name} must be one of {known}, got {value!r}")
        if not 0 <= self.clip_low <= 1 or not 0 <= self.clip_high < math.inf:
            raise InputError(
                "Surrogate: clip_low must lie in [0, 1] and clip_high in [0, inf), "
                f"got {self.clip_low!r} and {self.clip_high!r}"
            )


def _check(mask: Tensor, **tensors: Tensor) -> None:
    if mask.dim() != 2 or mask.dtype != torch.bool:
        raise InputError(
            f"policy_loss: mask must be bool of shape [b, t], got {mask.dtype} {list(mask.shape)}"
        )
    for name, value in tensors.items():
        if value.shape != mask.shape:
            raise InputError(
                f"policy_loss: {name} must have the shape of mask, {list(mask.shape)}, "
                f"got {list(value.shape)}"
            )


def importance_ratio(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    level: RatioLevel = "token",
) -> Float[Tensor, "b t"]:
    """Importance ratio of the current to the sampling policy, per token, 1 outside the mask.

    With ``rho_t = exp(logprob_t - old_logprob_t)`` and L the response's length:

    - ``token``: ``rho_t`` (GRPO, DAPO; GTPO Eq. 7).
    - ``sequence_geometric``: ``(prod_t rho_t)^(1/L)`` (GSPO, arXiv 2507.18071).
    - ``sequence_arithmetic``: ``(1/L) sum_t rho_t`` (GRPO-S, arXiv 2508.04349, Eq. 11).
    - ``gspo_token``: value of the geometric ratio, gradient of the token's own.

    A sequence-level ratio is the same at every token of a response, gradient included.

    Args:
        logprob: ``[b, t]`` current log-probabilities in nats; differentiable.
        old_logprob: ``[b, t]`` log-probabilities under the policy that sampled; detached here.
        mask: ``[b, t]`` bool, True = the policy chose this token.
        level: one of `RatioLevel`.

    Raises:
        InputError: shapes that do not fit, an unknown level.

    Example:
        >>> import torch
        >>> new, old = torch.log(torch.tensor([[0.2, 0.4]])), torch.log(torch.tensor([[0.1, 0.4]]))
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> importance_ratio(new, old, mask, "sequence_arithmetic").tolist()
        [[1.5, 1.5]]
    """
    _check(mask, logprob=logprob, old_logprob=old_logprob)
    logprob = logprob.to(torch.promote_types(logprob.dtype, torch.float32))
    log_ratio = torch.where(mask, logprob - old_logprob.detach(), 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if level == "token":
        return log_ratio.exp()
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    if level == "sequence_arithmetic":
        mean = (log_ratio.exp() * mask).sum(dim=1, keepdim=True) / length
        return torch.where(mask, mean, 1.0)
    if level in ("sequence_geometric", "gspo_token"):
        mean = log_ratio.sum(dim=1, keepdim=True) / length
        if level == "sequence_geometric":
            return torch.where(mask, mean.exp(), 1.0)
        own = torch.where(mask, logprob - logprob.detach(), 0.0)
        return torch.where(mask, mean.detach().exp() * own.exp(), 1.0)
    raise InputError(f"policy_loss: ratio must be one of {get_args(RatioLevel)}, got {level!r}")


def loss_denominator(
    mask: Bool[Tensor, "b t"], aggregation: Aggregation, *, max_length: int | None = None
) -> Tensor:
    """What the sum of token losses is divided by, for one batch; add it up over micro-batches.

    - ``token-mean`` (DAPO, GTPO): the number of tokens in the mask.
    - ``seq-mean-token-mean`` (GRPO, GRPO-S): the number of responses with at least one token
      (each response is first averaged over its own tokens).
    - ``seq-mean-token-sum-norm`` (Dr. GRPO): the number of responses with at least one token,
      times ``max_length``, a constant: the generation budget, not the padded width of the batch.

    Args:
        mask: ``[b, t]`` bool; rows that a rule leaves out of the loss are all False.
        aggregation: one of `Aggregation`.
        max_length: the constant of ``seq-mean-token-sum-norm``.

    Returns:
        A 0-d float tensor, at least 1.

    Example:
        >>> import torch
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> loss_denominator(mask, "token-mean").item()
        3.0
        >>> loss_denominator(mask, "seq-mean-token-sum-norm", max_length=10).item()
        20.0
    """
    _check(mask)
    if aggregation == "token-mean":
        return mask.sum().clamp(min=1).float()
    responses = mask.any(dim=1).sum().clamp(min=1).float()
    if aggregation == "seq-mean-token-mean":
        return responses
    if aggregation == "seq-mean-token-sum-norm":
        if max_length is None or max_length < 1:
            raise InputError(
                "policy_loss: seq-mean-token-sum-norm needs max_length >= 1, the generation "
                f"budget in tokens, got {max_length!r}"
            )
        return responses * max_length
    raise InputError(
        f"policy_loss: aggregation must be one of {get_args(Aggregation)}, got {aggregation!r}"
    )


def policy_loss(
    logprob: Float[Tensor, "b t"],
    old_logprob: Float[Tensor, "b t"],
    advantage: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    surrogate: Surrogate | None = None,
    *,
    denominator: Tensor | float | None = None,
    max_length: int | None = None,
) -> Float[Tensor, ""]:
    """PPO-clipped policy loss, to be minimised; differentiable in ``logprob``.

        - 1/D  sum_it  c_i m_it  min( w_it A_it,  clip(w_it, 1 - clip_low, 1 + clip_high) A_it )

    with ``c_i = 1 / L_i`` for ``seq-mean-token-mean``, else 1, and D the denominator. For a
    sequence-level ratio and an advantage that is constant along a response this is
    GSPO's and GRPO-S's objective (arXiv 2508.04349, Eq. 10). With token-level credit a
    sequence-level ratio averages the credit away on policy: use ``gspo_token`` there.

    Args:
        logprob: ``[b, t]`` current log-probabilities in nats.
        old_logprob: ``[b, t]`` under the policy that sampled; detached here.
        advantage: ``[b, t]``, `Credit.advantage`; detached here.
        mask: ``[b, t]`` bool, the tokens that the loss averages over.
        surrogate: ratio level, clip and aggregation; default: token ratio, 0.2, token mean.
        denominator: D of the whole optimiser step, over all ranks and micro-batches; default:
            `loss_denominator` of this batch alone.
        max_length: see `loss_denominator`.

    Returns:
        A 0-d tensor.

    Raises:
        InputError: shapes that do not fit, or a missing ``max_length``.

    Example:
        >>> import torch
        >>> logprob = torch.zeros(1, 2, requires_grad=True)
        >>> mask = torch.ones(1, 2, dtype=torch.bool)
        >>> loss = policy_loss(logprob, logprob.detach(), torch.tensor([[1.0, -2.0]]), mask)
        >>> loss.backward()
        >>> loss.item(), logprob.grad.tolist()
        (0.5, [[-0.5, 1.0]])
    """
    surrogate = surrogate or Surrogate()
    _check(mask, logprob=logprob, old_logprob=old_logprob, advantage=advantage)
    ratio = importance_ratio(logprob, old_logprob, mask, surrogate.ratio)
    credit = torch.where(mask, advantage.detach(), 0.0)
    clipped = ratio.clamp(1 - surrogate.clip_low, 1 + surrogate.clip_high)
    loss = -torch.minimum(ratio * credit, clipped * credit)
    if surrogate.aggregation == "seq-mean-token-mean":
        loss = loss / mask.sum(dim=1, keepdim=True).clamp(min=1)
    if denominator is None:
        denominator = loss_denominator(mask, surrogate.aggregation, max_length=max_length)
    return loss.sum() / denominator


def policy_loss_reference(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    surrogate: Surrogate | None = None,
    *,
    denominator: float | None = None,
    max_length: int | None = None,
) -> float:
    """`policy_loss` in plain loops and Python floats: slow, kept to check the fast one against."""
    surrogate = surrogate or Surrogate()
    total, tokens, responses = 0.0, 0, 0
    for i in range(mask.shape[0]):
        chosen = [t for t in range(mask.shape[1]) if mask[i, t]]
        if not chosen:
            continue
        tokens += len(chosen)
        responses += 1
        ratios = {t: math.exp(float(logprob[i, t]) - float(old_logprob[i, t])) for t in chosen}
        if surrogate.ratio == "sequence_arithmetic":
            mean = sum(ratios.values()) / len(chosen)
            ratios = dict.fromkeys(chosen, mean)
        elif surrogate.ratio in ("sequence_geometric", "gspo_token"):
            mean = math.exp(sum(math.log(r) for r in ratios.values()) / len(chosen))
            ratios = dict.fromkeys(chosen, mean)
        part = 0.0
        for t in chosen:
            a, w = float(advantage[i, t]), ratios[t]
            clipped = min(max(w, 1 - surrogate.clip_low), 1 + surrogate.clip_high)
            part += -min(w * a, clipped * a)
        total += part / len(chosen) if surrogate.aggregation == "seq-mean-token-mean" else part
    if denominator is None:
        denominator = max(tokens if surrogate.aggregation == "token-mean" else responses, 1)
        if surrogate.aggregation == "seq-mean-token-sum-norm":
            assert max_length is not None
            denominator *= max_length
    return total / denominator
