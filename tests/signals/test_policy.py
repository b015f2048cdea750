"""`policy_head` and `last_hidden_states`: a model's own logits, from the place before the token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, model, places, reward_model, rows
from torch import Tensor, nn

from tokencredit import InputError
from tokencredit.signals import (
    RewardModel,
    check_policy_head,
    last_hidden_states,
    policy_head,
    reward_gradients,
    token_statistics,
)

FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3", {}),
    ("Qwen3", {"tie_word_embeddings": True}),
    ("Llama", {}),
    ("GPT2", {}),
    ("Gemma", {}),
    ("Gemma2", {"final_logit_softcapping": 0.7}),
    ("Gemma3Text", {}),
    ("Cohere", {"logit_scale": 0.3}),
    ("Granite", {"logits_scaling": 4.0}),
    ("Phi", {}),  # a head with a bias
]


def own_logits(made: Any, ids: Tensor, seen: Tensor) -> Tensor:
    with torch.no_grad():
        return made(input_ids=ids, attention_mask=seen.long(), position_ids=places(seen)).logits


def biased(made: Any) -> Any:
    head = made.get_output_embeddings()
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return made


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=str)
def test_statistics_are_those_of_the_models_own_logits(
    family: str, changes: dict[str, Any], side: str
) -> None:
    made = biased(model(family, "CausalLM", **changes))
    ids, seen, _ = rows(side)
    check_policy_head(made, ids, seen)
    head = policy_head(made)
    assert head.weight.shape[0] == VOCABULARY and not head.weight.requires_grad
    assert (head.bias is not None) == (family == "Phi")
    t = ids.shape[1] - 1
    hidden = last_hidden_states(made, ids, seen, t)
    assert not hidden.requires_grad
    logp = own_logits(made, ids, seen)[:, :-1].log_softmax(dim=-1)
    got = token_statistics(
        hidden.reshape(3 * t, -1), head.weight, ids[:, 1:].reshape(-1),
        want=["logprob", "entropy"], **head.options(),
    )  # fmt: skip
    # Tokens whose distribution was formed at a real token.
    inside = (seen[:, 1:] & seen[:, :-1]).reshape(-1)
    want = logp.gather(2, ids[:, 1:].unsqueeze(-1)).reshape(-1)
    assert got.logprob is not None and got.entropy is not None
    torch.testing.assert_close(got.logprob[inside], want[inside], rtol=1e-5, atol=1e-5)
    entropy = -(logp.exp() * logp).sum(dim=-1).reshape(-1)
    torch.testing.assert_close(got.entropy[inside], entropy[inside], rtol=1e-5, atol=1e-5)


def test_column_0_is_what_produced_the_first_kept_token() -> None:
    made = model("Llama", "CausalLM")
    ids, seen, _ = rows("left")
    for keep in (1, 3, ids.shape[1] - 1):
        hidden = last_hidden_states(made, ids, seen, keep)
        assert hidden.shape[:2] == (3, keep)
        logits = hidden @ policy_head(made).weight.T
        want = own_logits(made, ids, seen)[:, -keep - 1 : -1]
        real = seen[:, -keep - 1 : -1]
        torch.testing.assert_close(logits[real], want[real], rtol=1e-5, atol=1e-6)
    for keep in (0, ids.shape[1], -1):
        with pytest.raises(InputError, match=f"keep must lie between 1 and 7, got {keep}"):
            last_hidden_states(made, ids, seen, keep)


def test_the_gradient_is_at_the_tokens_place_the_distribution_at_the_place_before() -> None:
    # The position shift, by perturbation. Policy: changing the token at column c leaves the
    # distribution of the token at c as it is and moves that of the token at c + 1. Reward model:
    # moving the embedding at column c moves the score by the gradient that stands at column c.
    policy, made = model("GPT2", "CausalLM"), reward_model("GPT2")
    ids, seen, response = rows("right", lengths=(7,))
    first, n = 2, 5  # the response's first column and its length
    kept = slice(first, first + n)

    def states(tokens: Tensor) -> Tensor:
        return last_hidden_states(policy, tokens[:, : first + n], seen[:, : first + n], n)[0]

    for place in range(n - 1):
        other = ids.clone()
        other[0, first + place] = ids[0, first + place] % (VOCABULARY - 1) + 1
        moved = (states(other) - states(ids)).abs().amax(dim=1)
        assert not moved[: place + 1].any() and moved[place + 1 :].gt(1e-6).all()

    source = RewardModel(made)
    (found,) = reward_gradients(source, ids, seen, response)
    gradient, base, step = found.gradient[0, kept], source.embed(ids), 1e-5
    for place in range(n):
        moved = base.clone()
        moved[0, first + place, 1] += step
        with torch.no_grad():
            score = source.score(moved, seen, response, slice(0, 1))
        slope = float(score - found.score) / step
        assert slope == pytest.approx(float(gradient[place, 1]), rel=1e-3, abs=1e-6)

    # Together: the work of a token reads the logit row of the place before it and no other.
    head = policy_head(policy)
    hidden = states(ids)

    def work(h: Tensor) -> Tensor:
        made = token_statistics(
            h, head.weight, ids[0, kept], want=["work"], reward=(gradient, source.embedding)
        ).work
        assert made is not None
        return made

    logits = own_logits(policy, ids, seen)[0, first - 1 : first - 1 + n]
    p = logits.softmax(dim=-1)
    u = gradient @ source.embedding.T
    force = p * (u - (p * u).sum(dim=1, keepdim=True))
    k = nn.functional.one_hot(ids[0, kept], VOCABULARY) - p
    torch.testing.assert_close(work(hidden), (force * k).sum(dim=1), rtol=1e-8, atol=1e-12)
    for place in range(n):
        bumped = hidden.clone()
        bumped[place] *= 1.1
        assert (work(bumped) != work(hidden)).nonzero().flatten().tolist() == [place]


def test_padding_is_inert_on_either_side() -> None:
    made = model("GPT2", "CausalLM")
    ids, seen, _ = rows("left", lengths=(6, 3))
    short = ids[1:, 4:]
    alone = last_hidden_states(made, short, torch.ones_like(short).bool(), 2)
    junk = ids.masked_fill(~seen, 9)
    for mask in (seen, seen.long(), seen.float()):
        got = last_hidden_states(made, junk, mask, 2)
        torch.testing.assert_close(got[1:], alone)


def test_states_made_in_inference_mode_can_be_used_in_a_graph() -> None:
    made = model("Llama", "CausalLM")
    ids, seen, _ = rows("left")
    with torch.inference_mode():
        hidden = last_hidden_states(made, ids, seen, 3)
        head = policy_head(made)
    assert not hidden.is_inference() and not head.weight.is_inference()
    scale = torch.ones(1, dtype=hidden.dtype, requires_grad=True)
    logprob = token_statistics(
        (hidden * scale).reshape(9, -1), head.weight, ids[:, -3:].reshape(-1), want=["logprob"]
    ).logprob
    assert logprob is not None
    logprob.sum().backward()
    assert scale.grad is not None and scale.grad.abs() > 0


def test_mode_and_gradients_of_the_policy_stay() -> None:
    made = model("Llama", "CausalLM").train()
    ids, seen, _ = rows("left")
    last_hidden_states(made, ids, seen, 3)
    policy_head(made)
    assert made.training and all(p.requires_grad and p.grad is None for p in made.parameters())


# -- what is looked through and what is refused ---------------------------------------------


def adapted(modules: list[str], **more: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=modules, init_lora_weights=False, **more)
    return peft.get_peft_model(model("Llama", "CausalLM").float(), config)


def test_an_adapter_on_attention_is_part_of_the_policy() -> None:
    made = adapted(["q_proj", "v_proj"]).eval()
    ids, seen, _ = rows("left")
    check_policy_head(made, ids, seen)
    hidden = last_hidden_states(made, ids, seen, 4)
    logits = hidden @ policy_head(made).weight.T
    want = own_logits(made, ids, seen)[:, -5:-1]
    real = seen[:, -5:-1]
    torch.testing.assert_close(logits[real], want[real], rtol=1e-4, atol=1e-5)
    with made.disable_adapter():
        assert (last_hidden_states(made, ids, seen, 4) - hidden).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("modules", "more"),
    [(["q_proj", "lm_head"], {}), (["q_proj"], {"modules_to_save": ["lm_head"]})],
    ids=str,
)
def test_an_adapter_on_the_head_is_refused(modules: list[str], more: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"LlamaForCausalLM: its head is a .*leave lm_head out"):
        policy_head(adapted(modules, **more))


def test_a_reward_model_under_an_adapter_is_read_whole() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    made = peft.get_peft_model(reward_model("Llama").float(), config)
    ids, seen, response = rows("right")
    (found,) = reward_gradients(RewardModel(made), ids, seen, response, micro_batch=3)
    with torch.no_grad():
        plain = made(input_ids=ids, attention_mask=seen.long()).logits.squeeze(1)
    torch.testing.assert_close(found.score, plain, rtol=1e-4, atol=1e-5)


def test_sharded_heads_are_refused_by_name() -> None:
    words = r"LlamaForCausalLM: lm_head.weight is sharded over ranks; gather it"
    made = model("Llama", "CausalLM")
    made.lm_head.weight.ds_id = 1  # ZeRO-3
    with pytest.raises(InputError, match=words):
        policy_head(made)
    made = model("Llama", "CausalLM")
    made.lm_head.weight.placements = ("Shard(0)",)  # a DTensor
    with pytest.raises(InputError, match=words):
        policy_head(made)
    made = model("Llama", "CausalLM")
    made.lm_head.weight = nn.Parameter(torch.empty(0))  # FSDP 1, between its forwards
    with pytest.raises(InputError, match=words):
        policy_head(made)


def test_models_without_a_plain_head_are_refused() -> None:
    with pytest.raises(InputError, match="has no output embedding: not a causal language model"):
        policy_head(reward_model("Llama"))

    class Odd(nn.Linear):
        pass

    made = model("Llama", "CausalLM")
    made.lm_head = Odd(8, VOCABULARY)
    with pytest.raises(InputError, match="its head is a Odd, not a plain linear"):
        policy_head(made)


def test_a_model_that_does_more_to_its_logits_is_noticed() -> None:
    made = model("Llama", "CausalLM")
    ids, seen, _ = rows("left")
    check_policy_head(made, ids, seen)
    made.lm_head.register_forward_hook(lambda module, given, out: 2 * out)
    with pytest.raises(InputError, match="logits are not those of its last hidden states"):
        check_policy_head(made, ids, seen)
