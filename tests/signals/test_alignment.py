"""From policy and reward model to token signals: places, templates, and an autograd oracle."""

from __future__ import annotations

import copy

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

from tokencredit import InputError
from tokencredit.lab import Chain, new_policy, tokenizer_for
from tokencredit.signals.alignment import (
    EXTRA,
    alignment_signals,
    chat_input,
    plain_input,
    text_input,
)
from tokencredit.signals.reward_gradient import RewardModel
from tokencredit.signals.statistics import STATISTICS, mean_embedding, token_statistics

V = 29


def policy(seed=0):
    model = new_policy("qwen3", V, seed=seed, layers=2, width=32, heads=2, initializer_range=0.3)
    return model.double().eval()


def reward_model(v=V, seed=0, width=24, scale=0.5):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=v, hidden_size=width, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_labels=1, pad_token_id=0,
        initializer_range=scale,
    )  # fmt: skip
    return LlamaForSequenceClassification(config).double().eval()


PROMPTS = [[5, 6], [7], [8, 9, 10]]
RESPONSES = [[11, 12, 13], [14, 15, 16, 17], [18]]


def laid_out(prompts=PROMPTS, responses=RESPONSES):
    p, t = max(map(len, prompts)), max(map(len, responses))
    ids = [
        [0] * (p - len(a)) + a + b + [0] * (t - len(b))
        for a, b in zip(prompts, responses, strict=True)
    ]
    seen = [
        [0] * (p - len(a)) + [1] * (len(a) + len(b)) + [0] * (t - len(b))
        for a, b in zip(prompts, responses, strict=True)
    ]
    seen = torch.tensor(seen, dtype=torch.bool)
    return torch.tensor(ids), seen, seen[:, -t:], plain_input(prompts, responses, t)


def test_plain_input_puts_responses_after_prompts():
    _, _, _, made = laid_out()
    assert made.input_ids.tolist() == [
        [5, 6, 11, 12, 13], [7, 14, 15, 16, 17], [8, 9, 10, 18, 0]
    ]  # fmt: skip
    assert made.column.tolist() == [[2, 3, 4, -1], [1, 2, 3, 4], [3, -1, -1, -1]]
    assert made.response.sum(1).tolist() == [3, 4, 1]
    for i, response in enumerate(RESPONSES):
        for j, token in enumerate(response):
            assert made.input_ids[i, made.column[i, j]] == token


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_work_equals_autograd_through_the_joint_graph(temperature):
    """Policy -> logits -> softmax -> soft embedding (hard value) -> reward model, all in one."""
    actor, rm = policy(), reward_model()
    source = RewardModel(copy.deepcopy(rm))
    ids, seen, mask, made = laid_out()
    found = alignment_signals(
        actor, source, ids, seen, mask, made, want=("work", "logprob", "reward_norm"),
        temperature=temperature, micro_batch=2,
    )  # fmt: skip
    table = rm.get_input_embeddings().weight
    for i, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        whole = torch.tensor([prompt + response])
        # The logits that produce token t stand at place t - 1.
        logits = actor(input_ids=whole).logits[0, len(prompt) - 1 : -1].detach() / temperature
        logits.requires_grad_(True)
        soft = logits.softmax(-1) @ table
        hard = table[torch.tensor(response)]
        inputs = torch.cat([table[torch.tensor(prompt)], soft + (hard - soft).detach()])[None]
        # The reward model reads the same places; scored by its own full forward pass.
        states = rm.model(inputs_embeds=inputs).last_hidden_state
        score = rm.score(states)[0, -1, 0]
        plain = rm(input_ids=whole).logits[0, 0]
        assert score.item() == pytest.approx(plain.item(), abs=1e-9)
        assert found.score[i].item() == pytest.approx(plain.item(), abs=1e-5)
        (force,) = torch.autograd.grad(score, logits)
        onehot = torch.nn.functional.one_hot(torch.tensor(response), V).double()
        work = (force * (onehot - logits.detach().softmax(-1))).sum(-1)
        n = len(response)
        assert torch.allclose(found.signals["work"][i, :n].double(), work, rtol=1e-4, atol=1e-7)
        assert torch.allclose(
            found.signals["reward_norm"][i, :n].double(), force.norm(dim=-1), rtol=1e-4, atol=1e-7
        )
        assert found.signals["work"][i, n:].isnan().all()


def test_the_gradient_is_the_tokens_own_and_the_distribution_the_one_before():
    actor, rm = policy(), reward_model()
    ids, seen, mask, made = laid_out()
    base = alignment_signals(
        actor, RewardModel(rm), ids, seen, mask, made, want=("work", "entropy")
    )
    # Another token at response place 1 of row 1: its own entropy, formed before it, stays; the
    # next ones change.
    responses = [list(r) for r in RESPONSES]
    responses[1][1] = 20
    ids, seen, mask, made = laid_out(responses=responses)
    other = alignment_signals(
        actor, RewardModel(rm), ids, seen, mask, made, want=("work", "entropy")
    )
    same = (base.signals["entropy"][1] - other.signals["entropy"][1]).abs() < 1e-6
    assert same.tolist() == [True, True, False, False]
    # A causal reward model read at its end: the last token's gradient does not depend on its
    # embedding alone, but every other row is untouched.
    for row in (0, 2):
        before, after = (x.signals["work"][row].nan_to_num() for x in (base, other))
        assert torch.allclose(before, after, atol=1e-7)


def test_rows_do_not_depend_on_their_company():
    actor, rm = policy(), reward_model()
    ids, seen, mask, made = laid_out()
    want = (*STATISTICS, "grad_x_input")
    one = alignment_signals(actor, RewardModel(rm), ids, seen, mask, made, want=want, micro_batch=1)
    all_ = alignment_signals(
        actor, RewardModel(rm), ids, seen, mask, made, want=want, micro_batch=8
    )
    for name in want:
        a, b = one.signals[name], all_.signals[name]
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isnan(), ~mask), name
        assert torch.allclose(a.nan_to_num(), b.nan_to_num(), rtol=1e-4, atol=1e-6), name


def test_tool_tokens_and_tokens_without_a_counterpart_are_unknown():
    actor, rm = policy(), reward_model()
    ids, seen, mask, made = laid_out()
    mask[1, 2] = False
    made.column[0, 1] = -1
    found = alignment_signals(actor, RewardModel(rm), ids, seen, mask, made)
    work = found.signals["work"]
    assert work[1].isnan().tolist() == [False, False, True, False]
    assert work[0].isnan().tolist() == [False, True, False, True]
    assert found.unmapped == 1 and found.non_finite == 0


def test_a_non_finite_gradient_is_unknown_and_counted():
    actor, rm = policy(), reward_model()
    with torch.no_grad():
        rm.get_input_embeddings().weight[15] = float("inf")
    ids, seen, mask, made = laid_out()
    found = alignment_signals(
        actor, RewardModel(rm), ids, seen, mask, made, want=("work", "entropy"), micro_batch=1
    )
    assert found.non_finite == 1
    assert found.signals["work"][1].isnan().all()
    assert found.signals["entropy"][1].isfinite().all()


@pytest.mark.parametrize("v", [V - 3, V + 5])
def test_tables_padded_to_different_sizes(v):
    actor = policy()
    ids, seen, mask, made = laid_out()
    found = alignment_signals(actor, RewardModel(reward_model(v)), ids, seen, mask, made)
    assert torch.equal(found.signals["work"].isfinite(), mask)


def test_path_points():
    actor, rm = policy(), reward_model()
    ids, seen, mask, made = laid_out()
    one = alignment_signals(actor, RewardModel(rm), ids, seen, mask, made, path_points=1)
    four = alignment_signals(actor, RewardModel(rm), ids, seen, mask, made, path_points=4)
    difference = (one.signals["work"] - four.signals["work"]).nan_to_num().abs().max()
    assert difference > 1e-6
    assert torch.allclose(one.score, four.score)


def test_mean_embedding_is_the_softmax_times_the_table():
    g = torch.Generator().manual_seed(0)
    hidden, head, table = (
        torch.randn(n, d, generator=g).double() for n, d in ((5, 4), (37, 4), (37, 3))
    )
    bias = torch.randn(37, generator=g).double()
    z = 3 * torch.tanh(((hidden @ head.T + bias) * 1.7) / 3) / 0.8
    got = mean_embedding(
        hidden, head, table, bias=bias, temperature=0.8, softcap=3.0, logit_scale=1.7, chunk=(2, 10)
    )
    assert torch.allclose(got, z.softmax(-1) @ table)


def test_work_is_what_token_statistics_gives_for_the_same_gradient():
    actor, rm = policy(), reward_model()
    ids, seen, mask, made = laid_out()
    found = alignment_signals(actor, RewardModel(rm), ids, seen, mask, made, want=("work_random",))
    again = alignment_signals(actor, RewardModel(rm), ids, seen, mask, made, want=("work_random",))
    other = alignment_signals(
        actor, RewardModel(rm), ids, seen, mask, made, want=("work_random",), seed=1
    )
    a, b, c = (x.signals["work_random"].nan_to_num() for x in (found, again, other))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert set(EXTRA) == {"grad_x_input", "work_random"}
    assert token_statistics is not None


def test_unknown_signal():
    ids, seen, mask, made = laid_out()
    with pytest.raises(InputError, match="wrok"):
        alignment_signals(
            policy(), RewardModel(reward_model()), ids, seen, mask, made, want=("wrok",)
        )


# -- templates --------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim if strip else m.content }}"
    "<|end|>\n{% endfor %}"
)


def tokenizer(strip=False):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = ["the answer is twelve plus thirty four, the answer is that", "what is the answer"] * 20
    core.train_from_iterator(text, trainer)
    out = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    out.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|user|>", "<|assistant|>"]})
    out.chat_template = (
        "{% set strip = true %}" if strip else "{% set strip = false %}"
    ) + TEMPLATE
    return out


def check(tok, made, responses):
    """Each mapped token has the same id at its column; the columns grow."""
    for i, response in enumerate(responses):
        columns = [c for c in made.column[i].tolist() if c >= 0]
        assert columns == sorted(columns) and len(set(columns)) == len(columns)
        for j, token in enumerate(response):
            if made.column[i, j] >= 0:
                assert made.input_ids[i, made.column[i, j]] == token
                assert made.response[i, made.column[i, j]]


def test_chat_input_maps_every_token_of_an_ordinary_response():
    tok = tokenizer()
    texts = ["the answer is twelve", "that is what: üß 你好", "the the the"]
    responses = [[*tok.encode(t, add_special_tokens=False), tok.eos_token_id] for t in texts]
    prompts = [[{"role": "user", "content": "what is the answer"}]] * 3
    made = chat_input(tok, prompts, responses, max(map(len, responses)))
    check(tok, made, responses)
    for i, response in enumerate(responses):
        mapped = made.column[i, : len(response)]
        assert (mapped[:-1] >= 0).all() and mapped[-1] == -1  # all but the end token
        own = made.input_ids[i][made.response[i]].tolist()
        assert tok.decode(own) == texts[i]
        whole = tok.apply_chat_template(
            [*prompts[i], {"role": "assistant", "content": texts[i]}], tokenize=True
        )
        whole = whole["input_ids"] if not isinstance(whole, list) else whole
        assert made.input_ids[i][made.attention_mask[i]].tolist() == list(whole)


def test_chat_input_where_the_policy_split_the_text_otherwise():
    tok = tokenizer()
    # "the" letter by letter: the same text, other tokens; the rest coincides.
    letters = [tok.convert_tokens_to_ids(c) for c in "the"]
    rest = tok.encode(" answer is", add_special_tokens=False)
    made = chat_input(tok, [[{"role": "user", "content": "x"}]], [letters + rest], 3 + len(rest))
    check(tok, made, [letters + rest])
    assert made.column[0, :3].tolist() == [-1, -1, -1]
    assert (made.column[0, 3:] >= 0).all()


def test_chat_input_with_a_template_that_strips():
    tok = tokenizer(strip=True)
    response = tok.encode("  the answer \n", add_special_tokens=False)
    made = chat_input(tok, [[{"role": "user", "content": "x"}]], [response], len(response))
    check(tok, made, [response])
    inner = made.input_ids[0][made.response[0]].tolist()
    assert tok.decode(inner) == "the answer"
    assert (made.column[0] >= 0).any()


def test_text_input_reads_prompt_and_response_as_one_text():
    tok = tokenizer()
    response = tok.encode(" the answer", add_special_tokens=False)
    made = text_input(tok, ["what is"], [[*response, tok.eos_token_id]], len(response) + 1)
    assert tok.decode(made.input_ids[0].tolist()) == "what is the answer"
    assert (made.column[0, :-1] >= 0).all() and made.column[0, -1] == -1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("what is", " the answer is that"),  # the seam lies between two tokens
        ("üß 你好: th", "e answer is that"),  # inside one, after text of more bytes than characters
        ("what is ", "the answer is that"),
        ("x", "你好 the answer 你 is"),  # characters of several tokens each
    ],
)
def test_text_input_finds_what_lies_behind_a_seam(before, after):
    tok = tokenizer()
    response = [*tok.encode(after, add_special_tokens=False), tok.eos_token_id]
    made = text_input(tok, [before], [response], len(response))
    check(tok, made, [response])
    column = made.column[0].tolist()
    # What the seam splits otherwise has no counterpart; the next word and all after it has.
    second = len(tok.encode(after.split(" ")[0] or " the", add_special_tokens=False))
    assert all(c >= 0 for c in column[second:-1]) and column[-1] == -1
    assert [tok.decode([made.input_ids[0, c]]) for c in column[second:-1]] == [
        tok.decode([t]) for t in response[second:-1]
    ]


def test_text_input_of_tokens_that_carry_no_space():
    """The lab's words are split at white space, which no token holds."""
    tok = tokenizer_for(Chain())
    response = tok.encode("6 - 4 = 2 ; ans 2", add_special_tokens=False)
    for prompt, first in (("3 + 4 =", 1), ("3 + 4 = ", 0), ("", 0)):
        made = text_input(tok, [prompt], [[*response, tok.eos_token_id]], len(response) + 1)
        check(tok, made, [response])
        assert (made.column[0, first:-1] >= 0).all(), prompt
        assert (made.column[0, :first] == -1).all() and made.column[0, -1] == -1


def test_templates_that_cannot_be_used():
    tok = tokenizer()
    tok.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(InputError, match="template"):
        chat_input(tok, [[{"role": "user", "content": "x"}]], [[7, 8]], 2)
    tok.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        chat_input(tok, [[{"role": "user", "content": "x"}]], [[7, 8]], 2)
