"""`reward_gradients`: scores, gradients against autograd and differences, and bad input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, VOCABULARY, dtype, model, places, reward_model, rows
from torch import Tensor, nn

from tokencredit import InputError
from tokencredit.signals import (
    GoldAnswer,
    RewardModel,
    check_same_tokenizer,
    reward_gradients,
    token_statistics,
)
from tokencredit.signals import reward_gradient as module

SIDES = ("right", "left")


def gradients(source: Any, ids: Tensor, seen: Tensor, response: Tensor, **how: Any):
    """Scores, gradients and finite flags of the whole batch."""
    parts = list(reward_gradients(source, ids, seen, response, **how))
    assert [p.rows.start for p in parts] == list(range(0, len(ids), how.get("micro_batch", 1)))
    return (
        torch.cat([p.score for p in parts]),
        torch.cat([p.gradient for p in parts]),
        torch.cat([p.finite for p in parts]),
    )


def tolerance(family: str) -> float:
    return 1e-5 if dtype(family) == torch.float32 else 1e-6  # norms run in 32 bit


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_plain_forwards(family: str, side: str) -> None:
    made = reward_model(family)
    ids, seen, response = rows(side)
    with torch.no_grad():
        plain = made(input_ids=ids, attention_mask=seen.long(), position_ids=places(seen)).logits
    source = RewardModel(made)
    source.verify(ids, seen)
    for size in (1, 2, 3):
        score, _, finite = gradients(source, ids, seen, response, micro_batch=size)
        torch.testing.assert_close(score, plain.squeeze(1), rtol=1e-5, atol=1e-5)
        assert finite.all()


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_is_that_through_one_hot_tokens(family: str, side: str) -> None:
    # The graph that `work` is derived from: tokens as one-hot rows times the table.
    made = reward_model(family)
    ids, seen, response = rows(side)
    source = RewardModel(made)
    _, gradient, _ = gradients(source, ids, seen, response, micro_batch=2)
    hot = nn.functional.one_hot(ids, VOCABULARY).to(source.embedding.dtype).requires_grad_()
    states = source._backbone(
        inputs_embeds=hot @ source.embedding,
        attention_mask=seen.long(),
        position_ids=places(seen),
    ).last_hidden_state
    columns = torch.arange(ids.shape[1])
    last = (seen * columns).amax(dim=1)
    score = made.score(states)[torch.arange(len(ids)), last].sum()
    (want,) = torch.autograd.grad(score, hot)
    got = gradient @ source.embedding.T.to(gradient.dtype)
    want = want * response.unsqueeze(-1)
    assert want.abs().max() > 1e-3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=tolerance(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_against_finite_differences(family: str) -> None:
    made = reward_model(family)
    ids, seen, response = rows("right", lengths=(6,))
    source = RewardModel(made)
    _, gradient, _ = gradients(source, ids, seen, response)
    base = source.embed(ids)
    # Norms in 32 bit leave GPT-2 alone with all of float64's digits.
    step, allowed = (1e-4, 1e-6) if family == "GPT2" else (1e-2, 1e-2)
    size = float(gradient.abs().max())
    for column in (2, 4, 5):
        for k in (0, 3):
            values = []
            for sign in (1, -1):
                moved = base.clone()
                moved[0, column, k] += sign * step
                with torch.no_grad():
                    values.append(source.score(moved, seen, response, slice(0, 1)))
            slope = float(values[0] - values[1]) / (2 * step)
            assert abs(slope - float(gradient[0, column, k])) <= allowed * size


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_padding_inert_rows_independent(family: str) -> None:
    made = reward_model(family)
    made.train().requires_grad_(True)
    source = RewardModel(made)
    assert not made.training and not any(p.requires_grad for p in made.parameters())
    ids, seen, response = rows("right", lengths=(7, 3, 6))
    score, gradient, _ = gradients(source, ids, seen, response, micro_batch=3)
    assert all(p.grad is None for p in made.parameters())
    assert not gradient.requires_grad and not score.requires_grad
    assert not gradient[~response].any()
    assert gradient[response].abs().amax(dim=1).gt(0).all()
    assert gradient.shape == (*ids.shape, source.embedding.shape[1])
    other = ids.masked_fill(~seen, 5)
    again = gradients(source, other, seen, response, micro_batch=3)
    torch.testing.assert_close(again[:2], (score, gradient), rtol=1e-5, atol=1e-6)
    # Alone, in other company, in another order, padded on the other side.
    for order in ([1], [2, 1], [2, 0, 1]):
        part = gradients(source, ids[order], seen[order], response[order], micro_batch=2)
        want = (score[order], gradient[order])
        torch.testing.assert_close(part[:2], want, rtol=1e-4, atol=1e-5)
    left = rows("left", lengths=(7, 3, 6))
    assert torch.equal(left[0][left[1]], ids[seen])
    score_left, gradient_left, _ = gradients(source, *left, micro_batch=3)
    torch.testing.assert_close(score_left, score, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient_left[left[2]], gradient[response], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_changes_nothing(family: str) -> None:
    made = reward_model(family)
    ids, seen, response = rows("right")
    want = gradients(RewardModel(made), ids, seen, response, micro_batch=2)
    source = RewardModel(made, checkpointing=True)
    got = gradients(source, ids, seen, response, micro_batch=2)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    layers = module._checkpointed_layers(source._backbone).layers
    assert len(layers) == 2 and not any("forward" in layer.__dict__ for layer in layers)


def test_checkpointing_restores_layers_after_an_exception_and_keeps_others_hooks() -> None:
    made = reward_model("Qwen3")
    first, second = made.model.layers
    plain, calls = first.forward, []

    def hooked(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    first.forward = hooked  # as accelerate's hooks do
    source = RewardModel(made, checkpointing=True)
    ids, seen, response = rows("right")
    list(reward_gradients(source, ids, seen, response))
    assert len(calls) == 2 * len(ids)  # forth, and again on the way back
    assert first.__dict__["forward"] is hooked and "forward" not in second.__dict__

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("broken")

    second.forward = broken
    with pytest.raises(KeyError, match="broken"):
        list(reward_gradients(source, ids, seen, response))
    assert first.__dict__["forward"] is hooked and second.__dict__["forward"] is broken


def test_checkpointing_without_layers_is_refused() -> None:
    made = reward_model("Qwen3")
    source = RewardModel(made, checkpointing=True)
    made.model.others, made.model.layers = made.model.layers, None
    with pytest.raises(InputError, match="checkpointing: the layers of Qwen3Model"):
        list(reward_gradients(source, *rows("right")))


def test_bfloat16_models_give_float32_gradients() -> None:
    made = reward_model("Qwen3").to(torch.bfloat16)
    ids, seen, response = rows("right")
    score, gradient, finite = gradients(RewardModel(made), ids, seen, response)
    exact = gradients(RewardModel(copy.deepcopy(made).float()), ids, seen, response)
    assert score.dtype == gradient.dtype == torch.float32 and finite.all()
    assert (gradient - exact[1]).norm() < 0.05 * exact[1].norm()
    assert (score - exact[0]).abs().max() < 0.05


def test_scores_that_are_not_finite_are_flagged() -> None:
    made = reward_model("Llama").float()
    ids, seen, response = rows("right")
    odd = int(ids[1, 3])
    ids = torch.where(ids == odd, odd % (VOCABULARY - 1) + 1, ids)
    ids[1, 3] = odd
    clean = gradients(RewardModel(made), ids, seen, response, micro_batch=3)
    with torch.no_grad():
        made.get_input_embeddings().weight[odd] = torch.nan
    score, gradient, finite = gradients(RewardModel(made), ids, seen, response, micro_batch=3)
    assert finite.tolist() == [True, False, True]
    assert score[1].isnan() and not gradient[1].any()
    torch.testing.assert_close(gradient[[0, 2]], clean[1][[0, 2]])


def test_a_gradient_that_is_not_finite_is_flagged() -> None:
    made = reward_model("Llama").float()

    class Root(nn.Module):
        def forward(self, states: Tensor) -> Tensor:
            return (states[..., :1] * 0).sqrt()  # 0, with an infinite slope: 0 x inf

    made.score = Root()
    _, gradient, finite = gradients(RewardModel(made), *rows("right"))
    assert not finite.any() and not gradient.any()


def test_rows_without_tokens() -> None:
    made = reward_model("Llama")
    ids, seen, response = rows("right")
    want = gradients(RewardModel(made), ids, seen, response)
    seen[1] = False
    for size in (1, 3):
        score, gradient, finite = gradients(
            RewardModel(made), ids, seen, response, micro_batch=size
        )
        assert finite.tolist() == [True, False, True]
        assert score[1].isnan() and not gradient[1].any()
        torch.testing.assert_close(gradient[[0, 2]], want[1][[0, 2]], rtol=1e-5, atol=1e-6)


def test_transformers_own_pooling_of_embeddings_reads_the_padding() -> None:
    # The trap that the pooling here avoids: given embeddings alone, the classifier cannot see
    # where padding starts and reads position -1.
    made = reward_model("Qwen3")
    ids, seen, response = rows("right")
    table = made.get_input_embeddings().weight.detach()
    with torch.no_grad():
        plain = made(input_ids=ids, attention_mask=seen.long()).logits.squeeze(1)
        theirs = made(inputs_embeds=table[ids], attention_mask=seen.long()).logits.squeeze(1)
    assert (theirs - plain).abs().min() > 1e-3
    ours, _, _ = gradients(RewardModel(made), ids, seen, response, micro_batch=3)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", SIDES)
def test_pooling(side: str) -> None:
    made = reward_model("Qwen3")
    ids, seen, response = rows(side)
    with torch.no_grad():
        states = made.model(
            input_ids=ids, attention_mask=seen.long(), position_ids=places(seen)
        ).last_hidden_state
        each = made.score(states).squeeze(-1)
    own = [each[i, response[i]] for i in range(3)]  # responses of 5, 2 and 4 tokens
    for options, want in (
        ({}, [v[-1] for v in own]),
        ({"pooling": "mean"}, [v.mean() for v in own]),
        ({"pooling": "positions", "positions": [0, 1]}, [v[:2].mean() for v in own]),
        ({"pooling": "positions", "positions": torch.tensor([1])}, [v[1] for v in own]),
    ):
        score, gradient, finite = gradients(RewardModel(made, **options), ids, seen, response)
        torch.testing.assert_close(score, torch.stack(want), rtol=1e-5, atol=1e-6)
        assert finite.all() and gradient.any()
    # A position that a response does not have: no score, not a score of 0.
    source = RewardModel(made, pooling="positions", positions=[4])
    score, gradient, finite = gradients(source, ids, seen, response)
    assert finite.tolist() == [True, False, False]
    assert score[1:].isnan().all() and not gradient[1:].any()
    # The score of the second token says nothing of the third.
    source = RewardModel(made, pooling="positions", positions=[1])
    _, gradient, _ = gradients(source, ids, seen, response)
    assert not gradient[response & ((response.cumsum(dim=1) - 1) > 1)].any()


def test_a_response_inside_a_template_gets_no_gradient_outside() -> None:
    ids, seen, response = rows("right", lengths=(8,))
    response[0, 6:] = False  # two closing tokens of a template
    _, gradient, _ = gradients(RewardModel(reward_model("Qwen3")), ids, seen, response)
    assert gradient[0, 2:6].any(dim=1).all()
    assert not gradient[0, :2].any() and not gradient[0, 6:].any()


def test_a_model_that_reads_ids_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = reward_model("Llama")
    source = RewardModel(made)
    ids, seen, _ = rows("right")
    source.verify(ids, seen)
    plain = made.model.forward

    def per_layer_inputs(*args: Any, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        if input_ids is None:
            return plain(*args, **kwargs)
        table = made.get_input_embeddings()(input_ids)
        return plain(*args, inputs_embeds=table + input_ids.unsqueeze(-1), **kwargs)

    monkeypatch.setattr(made.model, "forward", per_layer_inputs)
    with pytest.raises(InputError, match="other hidden states for embeddings than for their"):
        source.verify(ids, seen)


def test_models_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(InputError, match="LlamaForSequenceClassification has 2 labels; one scalar"):
        RewardModel(reward_model("Llama", num_labels=2))
    language = model("Llama", "CausalLM")
    language.config.num_labels = 1
    with pytest.raises(InputError, match="LlamaForCausalLM has no layer `score`"):
        RewardModel(language)
    made = reward_model("Llama")
    made.get_input_embeddings = lambda: None
    with pytest.raises(InputError, match=r"input embeddings of LlamaFor.* cannot be reached"):
        RewardModel(made)
    made = reward_model("Llama")
    made.get_input_embeddings().weight.ds_id = 3
    with pytest.raises(InputError, match=r"embeddings of Llama.* sharded over ranks"):
        RewardModel(made)
    for options, words in (
        ({"pooling": "first"}, "pooling must be last, mean or positions, got 'first'"),
        ({"pooling": "positions"}, "positions go with pooling='positions'"),
        ({"positions": [1]}, "positions go with pooling='positions'"),
        ({"pooling": "positions", "positions": []}, "positions must be columns"),
        ({"pooling": "positions", "positions": [-1]}, r"0 or more, got \[-1\]"),
    ):
        with pytest.raises(InputError, match=words):
            RewardModel(reward_model("Llama"), **options)


def test_arguments_that_do_not_fit_are_refused() -> None:
    source = RewardModel(reward_model("Llama"))
    ids, seen, response = rows("right")
    for changes, words in (
        ({"attention_mask": seen[:, 1:]}, "attention_mask must have shape"),
        ({"response": response[:2]}, "response must have shape"),
        ({"micro_batch": 0}, "at least 1"),
        ({"path_points": 0}, "at least 1"),
        ({"path_points": 2}, "needs path"),
        ({"path_points": 2, "path": torch.zeros(3, 2, 8)}, "path must have shape"),
    ):
        given: dict[str, Any] = {"attention_mask": seen, "response": response, **changes}
        with pytest.raises(InputError, match=words):
            list(reward_gradients(source, ids, **given))


def test_a_model_that_detaches_is_refused() -> None:
    made = reward_model("Llama")
    plain = made.model.forward

    def detached(inputs_embeds: Tensor, **others: Any) -> Any:
        return plain(inputs_embeds=inputs_embeds.detach(), **others)

    made.model.forward = detached
    with pytest.raises(InputError, match="no gradient reaches the input embeddings"):
        list(reward_gradients(RewardModel(made), *rows("right")))


def test_under_no_grad_and_inference_mode() -> None:
    source = RewardModel(reward_model("Llama"))
    want = gradients(source, *rows("right"))
    with torch.no_grad():
        got = gradients(source, *rows("right"))
    torch.testing.assert_close(got, want)
    with torch.inference_mode():
        got = gradients(source, *rows("right"))
    torch.testing.assert_close(got, want)


# -- paths ----------------------------------------------------------------------------------


def test_paths() -> None:
    source = RewardModel(reward_model("GPT2"))
    ids, seen, response = rows("right")
    hard = source.embed(ids)
    g = torch.Generator().manual_seed(0)
    end = torch.randn(hard.shape, generator=g, dtype=hard.dtype) * 0.3
    end[~response] = torch.nan  # never read
    plain = gradients(source, ids, seen, response)
    one = gradients(source, ids, seen, response, path=end, path_points=1)
    torch.testing.assert_close(one, plain)
    # Completeness: the average gradient times the way is the difference of the scores; with
    # points at the left ends of equal parts the error falls as 1 / points.
    with torch.no_grad():
        there = torch.where(response.unsqueeze(-1), end, hard)
        moved = source.score(there, seen, response, slice(0, 3))
    errors = []
    for points in (8, 32, 128):
        score, gradient, _ = gradients(source, ids, seen, response, path=end, path_points=points)
        torch.testing.assert_close(score, plain[0])  # the score is that of the tokens
        way = torch.where(response.unsqueeze(-1), hard - end, 0.0)
        errors.append((plain[0] - moved - (way * gradient).sum(dim=(1, 2))).abs().max().item())
    assert errors[2] < 0.05 * (plain[0] - moved).abs().max()
    assert errors[1] < errors[0] / 3 and errors[2] < errors[1] / 3


# -- gold answers ---------------------------------------------------------------------------

ANSWERS = [[5, 3, 1], [7], [2, 2]]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("family", ["GPT2", "Qwen3", "Gemma2"])
def test_gold_answers_are_scored_as_a_plain_forward_does(family: str, side: str) -> None:
    made = model(family, "CausalLM")
    ids, seen, response = rows(side)
    source = GoldAnswer(made, ANSWERS)
    want = []
    for i, answer in enumerate(ANSWERS):
        own = torch.cat([ids[i, seen[i]], torch.tensor(answer)])
        with torch.no_grad():
            logprob = made(input_ids=own[None]).logits[0].log_softmax(dim=-1)
        n = len(own) - len(answer)
        want.append(sum(logprob[n - 1 + k, token] for k, token in enumerate(answer)))
    source.verify(ids, seen)
    for size in (1, 2, 3):
        score, gradient, finite = gradients(source, ids, seen, response, micro_batch=size)
        torch.testing.assert_close(score, torch.stack(want), rtol=1e-5, atol=1e-5)
        assert finite.all() and not gradient[~response].any()
        assert gradient[response].any(dim=1).all()
    assert all(p.grad is None and not p.requires_grad for p in made.parameters())
    # Rows of a larger batch, named by where they stand in it.
    parts = list(reward_gradients(source, ids[1:], seen[1:], response[1:], first_row=1))
    assert [p.rows.start for p in parts] == [1, 2]
    torch.testing.assert_close(parts[1].score, score[2:], rtol=1e-5, atol=1e-5)


def test_gold_answer_against_finite_differences() -> None:
    source = GoldAnswer(model("GPT2", "CausalLM"), ANSWERS, checkpointing=True)
    ids, seen, response = rows("left")
    _, gradient, _ = gradients(source, ids, seen, response, micro_batch=3)
    base, step = source.embed(ids), 1e-4
    for row, column in response.nonzero().tolist()[::2]:
        values = []
        for sign in (1, -1):
            moved = base.clone()
            moved[row, column, 2] += sign * step
            with torch.no_grad():
                values.append(source.score(moved, seen, response, slice(0, 3))[row])
        slope = float(values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(float(gradient[row, column, 2]), rel=1e-4, abs=1e-7)


def test_gold_answers_apply_the_head_to_the_answers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_rows = []

    def watched(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen_rows.append(hidden.shape[0])
        return token_statistics(hidden, *args, **kwargs)

    monkeypatch.setattr(module, "token_statistics", watched)
    ids, seen, response = rows("right", lengths=(40, 30))
    gradients(GoldAnswer(model("GPT2", "CausalLM"), [[1, 2], [3]]), ids, seen, response,
              micro_batch=2)  # fmt: skip
    assert seen_rows == [4]


def test_gold_answers_that_do_not_fit_are_refused() -> None:
    made = model("Llama", "CausalLM")
    with pytest.raises(InputError, match="an answer is empty"):
        GoldAnswer(made, [[1], []])
    for odd in (VOCABULARY, -1):
        with pytest.raises(InputError, match=f"token id {odd}, but .* {VOCABULARY} embeddings"):
            GoldAnswer(made, [[1], [2, odd]])
    with pytest.raises(InputError, match="2 answers, but rows 2:3"):
        list(reward_gradients(GoldAnswer(made, [[1], [2]]), *rows("right")))


# -- tokenizers -----------------------------------------------------------------------------


class Words:
    """A tokenizer of whole texts, by its vocabulary and how it splits."""

    def __init__(self, vocabulary: dict[str, int], split: Any = list) -> None:
        self.vocabulary, self.split = vocabulary, split

    def get_vocab(self) -> dict[str, int]:
        return dict(self.vocabulary)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [self.vocabulary.get(part, 0) for part in self.split(text)]


def test_tokenizers_must_be_the_same() -> None:
    ours = Words({"?": 0, "T": 1, "h": 2, "Th": 3})
    check_same_tokenizer(ours, Words({"Th": 3, "h": 2, "T": 1, "?": 0}))
    for theirs, words in (
        ({"?": 0, "T": 2, "h": 1, "Th": 3}, "another tokenizer .*token 'T' is 1 in the policy's"),
        ({"?": 0, "T": 1, "h": 2}, "token 'Th' is 3 in the policy's and missing in it"),
        ({"?": 0, "T": 1, "h": 2, "Th": 3, "e": 4}, "it has 5 tokens to the policy's 4"),
    ):
        with pytest.raises(InputError, match=words):
            check_same_tokenizer(ours, Words(theirs))
    with pytest.raises(InputError, match="splits text otherwise"):
        check_same_tokenizer(ours, Words(ours.vocabulary, lambda text: [text[:2], *list(text[2:])]))


# -- the straight-through oracle ------------------------------------------------------------


def test_work_is_the_gradient_through_the_joint_straight_through_graph() -> None:
    # Policy logits -> softmax -> mixture of embeddings, with the sampled token's as its value ->
    # reward model -> score. The gradient at the logits is G_t; work_t = <G_t, onehot - p>.
    policy, made = model("GPT2", "CausalLM", seed=3), reward_model("GPT2")
    source = RewardModel(made)
    ids, seen, response = rows("left")
    _, gradient, _ = gradients(source, ids, seen, response)

    with torch.no_grad():
        logits = policy(
            input_ids=ids, attention_mask=seen.long(), position_ids=places(seen)
        ).logits[:, :-1]  # the distribution of the token at column s is formed at s - 1
    logits = (logits / 0.7).requires_grad_()
    p = logits.softmax(dim=-1)
    hard, soft = source.embed(ids[:, 1:]), p @ source.embedding
    through = torch.where(response[:, 1:, None], hard + soft - soft.detach(), hard)
    whole = torch.cat([source.embed(ids[:, :1]), through], dim=1)
    score = source.score(whole, seen, response, slice(0, 3))
    (force,) = torch.autograd.grad(score.sum(), logits)
    k = nn.functional.one_hot(ids[:, 1:], VOCABULARY) - p.detach()
    want = (force * k).sum(dim=-1)

    from tokencredit.signals import last_hidden_states, policy_head

    head = policy_head(policy)
    t = ids.shape[1] - 1
    hidden = last_hidden_states(policy, ids, seen, t)
    got = token_statistics(
        hidden.reshape(-1, hidden.shape[2]),
        head.weight,
        ids[:, 1:].masked_fill(~response[:, 1:], -100).reshape(-1),
        want=["work", "natural", "reward_norm"],
        temperature=0.7,
        reward=(gradient[:, 1:].reshape(-1, gradient.shape[2]), source.embedding),
        **head.options(),
    )
    inside = response[:, 1:]
    assert got.work is not None and got.reward_norm is not None and got.natural is not None
    assert want[inside].abs().min() > 0
    torch.testing.assert_close(got.work.view(3, t)[inside], want[inside], rtol=1e-9, atol=1e-13)
    norm = force.norm(dim=-1)[inside]
    torch.testing.assert_close(got.reward_norm.view(3, t)[inside], norm, rtol=1e-9, atol=1e-13)
    # Without the softmax's Jacobian one gets `natural`, not `work`.
    u = gradient[:, 1:] @ source.embedding.T
    natural = (u * k).sum(dim=-1)[inside]
    torch.testing.assert_close(got.natural.view(3, t)[inside], natural, rtol=1e-9, atol=1e-13)

    # A step along A w k moves the linearised reward by sum w A work: by a finite difference.
    w = torch.rand(inside.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = []
    for step in (1e-5, -1e-5):
        moved = (logits.detach() + step * (w * inside).unsqueeze(-1) * k).softmax(dim=-1)
        at = torch.where(inside.unsqueeze(-1), hard + (moved - p.detach()) @ source.embedding, hard)
        whole = torch.cat([source.embed(ids[:, :1]), at], dim=1)
        with torch.no_grad():
            scores.append(source.score(whole, seen, response, slice(0, 3)))
    slope = (scores[0] - scores[1]) / 2e-5
    torch.testing.assert_close(slope, (w * want * inside).sum(dim=1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_model_cannot_read_is_refused(family: str) -> None:
    """Learned positions would fail with an index error, rotary ones would go on in silence."""
    source = RewardModel(reward_model(family))  # 64 places, VOCABULARY tokens
    ids, seen, response = rows("right", lengths=(64,))
    gradients(source, ids, seen, response)
    longer = [torch.nn.functional.pad(x, (0, 1), value=1) for x in (ids, seen, response)]
    with pytest.raises(InputError, match=r"reads 64 tokens at most.* 65"):
        gradients(source, *longer)
    longer[1][:, -1] = False  # padding takes no place
    gradients(source, *longer)
    ids[0, 3] = VOCABULARY
    for read in (lambda: gradients(source, ids, seen, response), lambda: source.verify(ids, seen)):
        with pytest.raises(InputError, match=f"{VOCABULARY} embeddings.*up to {VOCABULARY}"):
            read()


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_may_be_a_token_that_the_model_lacks(family: str) -> None:
    """A policy's own padding token may lie behind all that the reward model has embeddings for."""
    source = RewardModel(reward_model(family))
    ids, seen, response = rows("right", lengths=(7, 3, 6))
    want = gradients(source, ids, seen, response, micro_batch=3)
    other = ids.masked_fill(~seen, VOCABULARY + 3)
    source.verify(other, seen)
    got = gradients(source, other, seen, response, micro_batch=3)
    torch.testing.assert_close(got[:2], want[:2], rtol=1e-5, atol=1e-6)
