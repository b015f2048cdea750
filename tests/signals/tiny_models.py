"""Tiny transformers models of several families, for the signals' tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCABULARY = 19
WIDTH = 8
FAMILIES = ("Qwen3", "Llama", "GPT2", "Gemma", "Gemma2", "Gemma3Text")


def config(family: str, **changes: Any) -> Any:
    import transformers

    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "num_labels": 1,
        # Weights of ordinary size: with the default 0.02 every score is near 0.
        "initializer_range": 0.3,
    }
    if family == "GPT2":
        drop = ("intermediate_size", "num_key_value_heads", "head_dim", "hidden_size")
        values = {k: v for k, v in values.items() if k not in drop}
        values |= {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64}
        values = {k: v for k, v in values.items() if not k.startswith(("num_hidden", "num_att"))}
    if family.startswith("Gemma") and family != "Gemma":
        values |= {"query_pre_attn_scalar": 4, "sliding_window": 4}
    if family in ("Cohere", "Granite", "Llama"):
        values.pop("head_dim")
    values |= changes
    return getattr(transformers, f"{_stem(family, config=True)}Config")(**values)


def model(family: str, head: str, seed: int = 0, **changes: Any) -> Any:
    """A model of the family with the given head and random weights."""
    import transformers

    torch.manual_seed(seed)
    name = f"{_stem(family, config=False)}For{head}"
    cls = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2ForCausalLM" else name)
    made = cls(config(family, **changes))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if p.dim() == 1:  # norms and biases start at one value: make them differ
                p.add_(0.1 * torch.randn_like(p))
            if "embed_tokens" in name or "wte" in name:
                p.copy_(0.5 * torch.randn_like(p))
    return made.to(dtype(family)).eval()


def _stem(family: str, *, config: bool) -> str:
    if family == "Gemma3Text":
        return "Gemma3Text" if config else "Gemma3"
    return family


def reward_model(family: str, **changes: Any) -> Any:
    if family == "Gemma3Text":
        import transformers

        torch.manual_seed(0)
        made = transformers.Gemma3TextForSequenceClassification(config(family, **changes))
        return made.to(dtype(family)).eval()
    return model(family, "SequenceClassification", **changes)


def rows(
    side: str, lengths: tuple[int, ...] = (7, 4, 6), prompt: int = 2, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, attention and response masks of rows padded on one side; all tokens > 0."""
    g = torch.Generator().manual_seed(seed)
    s = max(lengths) + 1  # one column of padding in every row
    ids = torch.zeros(len(lengths), s, dtype=torch.long)
    seen, response = torch.zeros_like(ids).bool(), torch.zeros_like(ids).bool()
    for i, n in enumerate(lengths):
        start = 0 if side == "right" else s - n
        ids[i, start : start + n] = torch.randint(1, VOCABULARY, (n,), generator=g)
        seen[i, start : start + n] = True
        response[i, start + prompt : start + n] = True
    return ids, seen, response


def places(seen: Tensor) -> Tensor:
    return (seen.long().cumsum(dim=1) - 1).clamp(min=0)


def dtype(family: str) -> torch.dtype:
    """Float64, but for Gemma2: its eager attention masks with a float64 and softmaxes in 32 bit."""
    return torch.float32 if family == "Gemma2" else torch.float64
