"""Tiny causal language models in three families, with fresh weights."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

from tokencredit.errors import InputError, nearest
from tokencredit.lab.tasks.task import SPECIAL_TOKENS

__all__ = ["Family", "new_policy"]

Family = Literal["llama", "qwen3", "gpt2"]


def new_policy(
    family: Family,
    vocabulary_size: int,
    *,
    seed: int,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    context: int = 128,
    initializer_range: float = 0.02,
) -> PreTrainedModel:
    """A policy of about 0.8 million parameters, weights drawn from `seed`.

    Embeddings are tied and there is no dropout, so that a policy computes the same log
    probabilities in training mode as it sampled with. Qwen3 normalises queries and keys, and its
    heads share keys and values in pairs; it bears higher learning rates than the others.

    Args:
        family: "llama", "qwen3" or "gpt2".
        vocabulary_size: Number of token ids; ids 0 and 1 are padding and end.
        seed: Seed of the initial weights. The global random state is left as it was.
        layers: Transformer blocks.
        width: Hidden size, a multiple of ``2 * heads``.
        heads: Attention heads, even.
        context: Longest sequence, prompt and response together.
        initializer_range: Standard deviation of the initial weights.

    Returns:
        A float32 model on the CPU, in evaluation mode.

    Raises:
        InputError: The family is unknown, or the sizes do not divide.

    Example:
        >>> model = new_policy("qwen3", 24, seed=0)
        >>> sum(parameter.numel() for parameter in model.parameters())
        717184
    """
    if family not in get_args(Family):
        raise InputError(
            f"new_policy: no family {family!r}{nearest(family, get_args(Family))}; "
            f"choose one of {', '.join(get_args(Family))}"
        )
    if heads % 2 or width % (2 * heads):
        raise InputError(
            f"new_policy: width={width}, heads={heads}; give an even number of heads and a width "
            "that is a multiple of twice that"
        )
    special: dict[str, Any] = {
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
        "eos_token_id": SPECIAL_TOKENS.index("<eos>"),
        "bos_token_id": None,
    }
    common: dict[str, Any] = special | {
        "vocab_size": vocabulary_size,
        "initializer_range": initializer_range,
        "tie_word_embeddings": True,
    }
    if family == "gpt2":
        config = GPT2Config(
            n_positions=context,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
    else:
        make = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family]
        config = make(
            max_position_embeddings=context,
            hidden_size=width,
            # The usual 8/3 of a gated layer, rounded down to whole vector registers.
            intermediate_size=max(16, width * 8 // 3 // 16 * 16),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2 if family == "qwen3" else heads,
            head_dim=width // heads,
            **common,
        )
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    # transformers infers this from the class's name, in vain for GPT-2, and then warns.
    model.loss_type = "ForCausalLM"
    model.generation_config = GenerationConfig(**special)
    return model.eval()
