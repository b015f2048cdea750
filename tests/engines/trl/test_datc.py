"""DATC inside TRL: its signals, the shared reward model, and what is refused.

That its credit reaches the update is in `test_update` and `test_ranks`, with the other methods.
"""

import logging

import pytest
import torch
from trl_harness import (
    EOS,
    TASK,
    VOCAB,
    Run,
    dataset,
    one_step,
    parity,
    policy,
    reward_model,
    statistics,
)

from tokencredit import InputError, MissingSignalError
from tokencredit.lab import Countdown, tokenizer_for
from tokencredit.methods.datc import DATC, DATCRandom, datc_weights_reference
from tokencredit.signals import alignment_signals, plain_input
from tokencredit.signals.reward_gradient import GoldAnswer, RewardModel


def by_hand(event, temperature=0.7):
    """Score, work and weights of each response, by autograd and loops, without our pipeline."""
    actor, rm = policy().eval(), reward_model()
    table = rm.get_input_embeddings().weight.detach()
    works = []
    for prompt, answer in zip(event.prompt_ids, event.response_ids, strict=True):
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            z = actor(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature
        e = table[ids].clone().requires_grad_(True)
        score = rm.score(rm.model(inputs_embeds=e).last_hidden_state)[0, -1, 0]
        (g,) = torch.autograd.grad(score, e)
        u, p = g[0, len(prompt) :] @ table.T, z.softmax(-1)
        force = p * (u - (p * u).sum(-1, keepdim=True))
        k = torch.nn.functional.one_hot(torch.tensor(answer), VOCAB) - p
        works.append((force * k).sum(-1).detach())
    return works


def test_signals_and_weights_by_hand():
    run = one_step("datc", 4)
    (event,) = run.events
    signals, base = event.rollouts.signals, event.credit.base
    for i, (work, answer) in enumerate(zip(by_hand(event), event.response_ids, strict=True)):
        n = len(answer)
        assert torch.allclose(signals["work"][i, :n], work, rtol=1e-3, atol=1e-6)
        free = [token != EOS for token in answer]
        weights = datc_weights_reference(work.tolist(), free, float(base[i]))
        assert torch.allclose(event.credit.weight[i, :n], torch.tensor(weights), rtol=1e-3)
        assert event.credit.advantage[i, :n].mean().item() == pytest.approx(
            float(base[i]), abs=1e-5
        )
    assert event.credit.weight.max() > 1.5  # it does weight
    log = run.log[0]
    for name in ("misaligned_share", "coverage", "at_bounds", "fall_backs", "gain_below"):
        assert f"credit/{name}" in log, name
    assert log["credit/gain_below"] == 0


def test_the_base_is_trls_own_advantage():
    plain = one_step("datc", 4, scale_rewards="none").events[0]
    rewards = plain.rollouts.rewards.view(-1, 8)
    expected = (rewards - rewards.mean(1, keepdim=True)).flatten()
    assert torch.allclose(plain.credit.base, expected, atol=1e-6)


def test_logprob_and_entropy_are_there_for_the_record():
    (event,) = one_step("datc", 4).events
    n = event.rollouts.mask.shape[1]
    logprob, _ = statistics(policy().eval(), event.prompt_ids, event.response_ids, n)
    found = event.rollouts.signals["logprob"]
    assert torch.allclose(torch.where(event.rollouts.mask, found, 0.0), logprob.detach(), atol=1e-4)


def test_a_reward_model_among_the_rewards_is_run_once():
    """Its scores are TRL's own, and its forward pass is the one that is differentiated."""
    calls = [0]

    def count(*_):
        calls[0] += 1

    # TRL joins prompt and response as they are, and the lab's words are split at white space.
    spaced = dataset().map(lambda row: {"prompt": row["prompt"] + " "})
    tokenizers = {"reward_processing_classes": [tokenizer_for(TASK), None]}
    funcs = [reward_model(), parity]
    plain = Run(None, more=tokenizers, reward_funcs=funcs, prompts=spaced).train()
    rm = reward_model()
    rm.model.register_forward_hook(count)
    shared = Run(
        DATC(),
        more=tokenizers | {"reward_model": "from_rewards", "reward_micro_batch": 100},
        reward_funcs=[rm, parity],
        prompts=spaced,
    ).train()
    name = next(
        k for k in plain.log[0] if k.startswith("rewards/") and "parity" not in k and "mean" in k
    )
    assert shared.log[0][name] == pytest.approx(plain.log[0][name], abs=1e-5)
    # Two passes of `verify` on two rows, and one for scores and gradients of all 24.
    assert calls[0] == 3
    (event,) = shared.events
    assert event.credit.diagnostics["coverage"] > 0.7


@pytest.mark.parametrize(
    ("rule", "more", "error", "fragment"),
    [
        (DATC(), {}, MissingSignalError, "reward_model"),
        (DATCRandom(), {}, MissingSignalError, "work_random"),
        (DATC(), {"reward_model": "from_rewards"}, InputError, "0 of the reward functions"),
        (DATC(), {"reward_model": "/no/such/folder"}, InputError, "/no/such/folder"),
        (DATC(), {"reward_model": parity}, InputError, "a RewardModel or a GoldAnswer"),
        (DATC(), {"reward_model": reward_model(), "path_points": 0}, InputError, "path_points"),
        (DATC(), {"reward_model": reward_model(), "path_points": 1.5}, InputError, "1.5"),
        (DATC(), {"reward_model": reward_model(), "reward_micro_batch": -1}, InputError, "-1"),
        (DATC(), {"reward_model": reward_model(), "reward_micro_batch": 0}, InputError, "got 0"),
        (DATC(), {"reward_model": GoldAnswer(policy(), [[5]] * 24)}, InputError, "column"),
    ],
    ids=str,
)
def test_what_is_refused(rule, more, error, fragment):
    with pytest.raises(error) as caught:
        Run(rule, more=more)
    assert fragment in str(caught.value)


def test_another_tokenizer_is_refused():
    more = {"reward_model": reward_model(), "reward_tokenizer": tokenizer_for(Countdown())}
    with pytest.raises(InputError, match="another tokenizer"):
        Run(DATC(), more=more)


def test_a_reward_model_with_options_of_its_own_and_path_points():
    for source in (
        RewardModel(reward_model(), pooling="mean"),
        RewardModel(reward_model(), checkpointing=True),
    ):
        run = Run(DATC(weight_map="box"), more={"reward_model": source, "path_points": 3}).train()
        assert run.log[0]["credit/coverage"] > 0.5
        assert all(p.grad is None for p in source.model.parameters())


def test_truncated_sampling_is_pointed_out(caplog):
    with caplog.at_level(logging.WARNING, "tokencredit"):
        Run(DATC(), more={"reward_model": reward_model()}, top_p=0.9)
    assert "untruncated" in caplog.text


def test_lora():
    from peft import LoraConfig

    run = Run(
        DATC(),
        more={
            "reward_model": reward_model(),
            "peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
        },
        max_steps=2,
    ).train()
    assert run.log[1]["grad_norm"] > 0


def test_signals_beside_the_reward_model():
    """A user's own alignment replaces ours, and then no reward model is needed."""

    def work(completion_ids, **_):
        return [[float(t) for t in ids] for ids in completion_ids]

    run = Run(DATC(), more={"signals": {"work": work}}).train()
    (event,) = run.events
    assert event.rollouts.signals["work"][0, 0] == event.response_ids[0][0]


def test_a_reward_model_that_shares_the_policys_weights_is_refused():
    """It is frozen: the shared part of the policy would not be trained, in silence."""
    model, classifier = policy(), reward_model()
    classifier.model = model.model
    with pytest.raises(InputError, match="shares weights with the policy"):
        Run(DATC(), model=model, more={"reward_model": classifier})
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("kind", ["ids", "text"])
def test_gold_answers_follow_their_prompts(kind):
    """Batches are drawn in another order than the data set's: each row has its own answer."""
    answers = [[3 + i, 4 + i] for i in range(6)]
    texts = tokenizer_for(TASK).batch_decode(answers)
    rows = dataset().add_column("answer", answers if kind == "ids" else texts)
    of_prompt = dict(zip(rows["prompt"], answers, strict=True))
    reference = policy(3)
    run = Run(
        DATC(), prompts=rows, max_steps=2, more={"reward_model": GoldAnswer(reference, "answer")}
    ).train()
    seen = []
    for event in run.events:
        seen.append(list(dict.fromkeys(event.prompts)))
        works = event.rollouts.signals["work"]
        for i in (0, 9, 17):
            with torch.no_grad():
                hand = alone(run, event, i, GoldAnswer(reference, [of_prompt[event.prompts[i]]]))
            if event is run.events[0]:  # later the policy has moved
                assert torch.allclose(works[i][: len(hand)], hand, rtol=1e-3, atol=1e-6)
    assert seen[0] != seen[1]
    missing = {"reward_model": GoldAnswer(policy(3), "anwser")}
    with pytest.raises(InputError, match=r"no column 'anwser'.*answer"):
        Run(DATC(), prompts=rows, more=missing).train()
    for odd in (None, 7.0):
        numbers = {"prompts": dataset().add_column("answer", [odd] * 6)}
        with pytest.raises(InputError, match="'answer' must hold text or lists of token ids"):
            Run(DATC(), more={"reward_model": GoldAnswer(policy(3), "answer")}, **numbers).train()


def alone(run, event, i, source):
    """The work of one response, its row by itself."""
    prompt, answer = event.prompt_ids[i], event.response_ids[i]
    ids = torch.tensor([[*prompt, *answer]])
    mask = torch.ones(1, len(answer), dtype=torch.bool)
    reward_input = plain_input([prompt], [answer], len(answer))
    found = alignment_signals(
        policy(), source, ids, torch.ones_like(ids), mask, reward_input, temperature=0.7
    )
    return found.signals["work"][0]


def test_unknown_values_of_a_users_signal_may_be_none():
    def work(completion_ids, **_):
        return [[None, *(float(t) for t in ids[1:])] for ids in completion_ids]

    (event,) = Run(DATC(), more={"signals": {"work": work}}).train().events
    first = event.rollouts.signals["work"][:, 0]
    assert first.isnan().all() and (event.credit.weight[:, 0] == 1).all()


def test_a_reward_model_that_reads_other_tokens_is_pointed_out(caplog):
    """Prompt and response run together as one text: hardly a token has a counterpart."""
    with caplog.at_level(logging.WARNING, "tokencredit"):
        run = Run(
            DATC(),
            more={
                "reward_model": "from_rewards",
                "reward_processing_classes": [tokenizer_for(TASK), None],
            },
            reward_funcs=[reward_model(), parity],
            max_steps=2,
        ).train()
    assert run.log[0]["credit/coverage"] < 0.5
    assert caplog.text.count("have a counterpart") == 1


def test_a_tokenizer_that_is_not_known_is_pointed_out_and_one_that_lies_beside_is_checked(
    tmp_path, caplog
):
    with caplog.at_level(logging.WARNING, "tokencredit"):
        Run(DATC(), more={"reward_model": reward_model()})
    assert "reward_tokenizer" in caplog.text
    reward_model().save_pretrained(tmp_path)
    tokenizer_for(Countdown()).save_pretrained(tmp_path)
    loaded = type(reward_model()).from_pretrained(tmp_path)
    with pytest.raises(InputError, match="another tokenizer"):
        Run(DATC(), more={"reward_model": loaded})
