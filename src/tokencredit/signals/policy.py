"""The policy's last hidden states and its head: what `token_statistics` reads, without logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tokencredit.errors import InputError

__all__ = ["PolicyHead", "check_policy_head", "last_hidden_states", "policy_head"]


@dataclass(frozen=True, eq=False)
class PolicyHead:
    """How a causal language model turns its last hidden state into logits.

    Attributes:
        weight: ``[v, d]``.
        bias: ``[v]`` or None.
        softcap: Gemma's cap of the logits, or None.
        logit_scale: factor on the logits (Cohere's ``logit_scale``, the inverse of Granite's
            ``logits_scaling``).
    """

    weight: Float[Tensor, "v d"]
    bias: Float[Tensor, "v"] | None
    softcap: float | None
    logit_scale: float

    def options(self) -> dict[str, Any]:
        """What `token_statistics` takes by keyword beside hidden states, head and targets."""
        return {"bias": self.bias, "softcap": self.softcap, "logit_scale": self.logit_scale}


def policy_head(model: Any) -> PolicyHead:
    """The head of a transformers causal language model.

    Args:
        model: the model itself, not a distributed wrapper; a PEFT model is looked through.

    Raises:
        InputError: no output embedding, one that an adapter changes, or one that is sharded over
            ranks (FSDP, ZeRO-3): gather the head first, or leave it out of the sharding.

    Example:
        >>> from tokencredit.lab import load_policy
        >>> policy_head(load_policy("chain-qwen3")[0]).weight.shape
        torch.Size([23, 128])
    """
    model = inner_model(model)
    head = model.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        raise InputError(
            f"{type(model).__name__} has no output embedding: not a causal language model"
        )
    if type(head) is not nn.Linear:
        raise InputError(
            f"{type(model).__name__}: its head is a {type(head).__name__}, not a plain linear "
            "layer (an adapter on lm_head, or quantised): leave lm_head out of it"
        )
    weight: Tensor = head.weight
    refuse_sharded(weight, f"{type(model).__name__}: lm_head.weight")
    bias: Tensor | None = getattr(head, "bias", None)
    config = model.config
    scaling = getattr(config, "logits_scaling", None)
    scale = getattr(config, "logit_scale", None)
    return PolicyHead(
        weight=weight.detach(),
        bias=None if bias is None else bias.detach(),
        softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=float(scale) if scale is not None else 1 / float(scaling or 1.0),
    )


def check_policy_head(
    model: Any,
    input_ids: Int[Tensor, "b s"],
    attention_mask: Bool[Tensor, "b s"],
    *,
    tolerance: float = 1e-2,
) -> None:
    """Check on some rows that `policy_head` gives the model's own logits.

    Raises:
        InputError: it does not: the model does more between its last hidden states and its
            logits than a bias, a factor and a cap, and statistics would be of another policy.
    """
    head = policy_head(model)
    states = last_hidden_states(model, input_ids, attention_mask, input_ids.shape[1] - 1)
    attention = attention_mask.bool()
    with torch.inference_mode(False), torch.no_grad():
        own = inner_model(model)(
            input_ids=input_ids,
            attention_mask=attention.long(),
            position_ids=_positions(attention),
            use_cache=False,
        ).logits[:, :-1]
        ours = torch.nn.functional.linear(states, head.weight, head.bias) * head.logit_scale
        if head.softcap is not None:
            ours = head.softcap * torch.tanh(ours / head.softcap)
    seen = attention[:, :-1].unsqueeze(-1)
    error = torch.where(seen, (ours - own).float().abs(), 0.0).max()
    size = torch.where(seen, own.float().abs(), 0.0).max()
    if not bool(error <= tolerance * size.clamp(min=1e-6)):
        raise InputError(
            f"{type(inner_model(model)).__name__}: its logits are not those of its last hidden "
            "states and its head; statistics of its distribution cannot be taken from them"
        )


def last_hidden_states(
    model: Any,
    input_ids: Int[Tensor, "b s"],
    attention_mask: Bool[Tensor, "b s"],
    keep: int,
) -> Float[Tensor, "b keep d"]:
    """The hidden states that produce the last ``keep`` tokens, without gradient or logits.

    The distribution of the token at column s is formed at column s - 1: the result's column 0
    belongs to the first of the ``keep`` tokens.

    Args:
        model: a transformers causal language model, in whatever mode it is: dropout, if it has
            any, is off in eval mode only.
        input_ids: ``[b, s]`` prompts and responses.
        attention_mask: ``[b, s]``, 0 at padding on either side.
        keep: how many tokens at the end, less than s.

    Raises:
        InputError: nothing comes before the kept tokens.
    """
    if not 0 < keep < input_ids.shape[1]:
        raise InputError(
            f"last_hidden_states: keep must lie between 1 and {input_ids.shape[1] - 1}, got {keep}"
        )
    model = inner_model(model)
    backbone = getattr(model, model.base_model_prefix)
    # A caller's inference mode would make states that no later graph may use.
    with torch.inference_mode(False), torch.no_grad():
        states = backbone(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=_positions(attention_mask),
            use_cache=False,
        ).last_hidden_state
    return states[:, -keep - 1 : -1]


def inner_model(model: Any) -> Any:
    """The transformers model inside a PEFT model."""
    inner = getattr(model, "get_base_model", None)
    return inner() if inner is not None else model


def refuse_sharded(weight: Tensor, name: str) -> None:
    """Refuse a weight of which this rank holds a part (a DTensor, or ZeRO-3's placeholder)."""
    if hasattr(weight, "ds_id") or hasattr(weight, "placements") or weight.numel() == 0:
        raise InputError(
            f"{name} is sharded over ranks; gather it, or keep it out of FSDP's or ZeRO's sharding"
        )


def _positions(attention_mask: Tensor) -> Tensor:
    """Places among the real tokens, whichever side the padding is on."""
    return (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)
