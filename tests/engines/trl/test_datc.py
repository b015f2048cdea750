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
    fixed_rollouts,
    one_step,
    parity,
    policy,
    reward_model,
    statistics,
)

from tokencredit import InputError, MissingSignalError, methods
from tokencredit.engines.trl import RolloutRecorder
from tokencredit.lab import Countdown, tokenizer_for
from tokencredit.methods.datc import DATC, DATCRandom, datc_weights_reference
from tokencredit.records import read_records
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


ALIGNED = [DATC(alignment="natural"), DATC(alignment="cosine")]
CONTROLS = [method.rule() for method in methods().values() if method.rule.control_of == "datc"]


@pytest.mark.parametrize("rule", [*ALIGNED, *CONTROLS], ids=str)
def test_the_work_is_formed_for_the_diagnostics_of_every_relative(rule):
    run = Run(rule, more={"reward_model": reward_model()}).train()
    (event,) = run.events
    datc = one_step("datc", 4)
    work, same = (e.rollouts.signals["work"].nan_to_num(0) for e in (event, datc.events[0]))
    assert torch.allclose(work, same, rtol=1e-4, atol=1e-6)
    log, usual = run.log[0], datc.log[0]
    assert log["credit/misaligned_share"] == pytest.approx(usual["credit/misaligned_share"])
    assert log["credit/predicted_gain"] < usual["credit/predicted_gain"]
    if rule.name == "datc_flipped":
        assert log["credit/predicted_gain"] < 0 and log["credit/gain_below"] > 0.8


def test_signals_beside_the_reward_model():
    """A user's own alignment replaces ours, and then no reward model is needed."""

    def work(completion_ids, **_):
        return [[float(t) for t in ids] for ids in completion_ids]

    run = Run(DATC(), more={"signals": {"work": work}}).train()
    (event,) = run.events
    assert event.rollouts.signals["work"][0, 0] == event.response_ids[0][0]
    # Marks need no reward model: the end token is frozen here as well.
    for weight, answer in zip(event.credit.weight, event.response_ids, strict=True):
        ends = [i for i, token in enumerate(answer) if token == EOS]
        assert all(weight[i] == 1 for i in ends)
    eos = event.rollouts.signals["eos"] * event.rollouts.mask
    assert eos.sum() == sum(a.count(EOS) for a in event.response_ids)


def test_marks_that_nobody_forms_are_refused_and_ones_own_freeze():
    """A misspelt name would freeze nothing, in silence."""
    given = {"reward_model": reward_model()}
    with pytest.raises(InputError, match=r"'eoss'.*did you mean 'eos'"):
        Run(DATC(freeze=("eoss",)), more=given)
    mine = {"signals": {"even": lambda completion_ids, **_: [
        [float(t % 2 == 0) for t in ids] for ids in completion_ids
    ]}}  # fmt: skip
    (event,) = Run(DATC(freeze="even"), more=given | mine).train().events
    for weight, answer in zip(event.credit.weight, event.response_ids, strict=True):
        assert all(weight[i] == 1 for i, token in enumerate(answer) if token % 2 == 0)


# -- who says what is right -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "funcs", "named", "known"),
    [
        ("grpo", [parity], None, True),
        ("grpo", [parity, lambda completions, **_: [2.0] * len(completions)], None, False),
        ("datc", [parity, lambda completions, **_: [2.0] * len(completions)], None, False),
        ("datc", [parity, lambda completions, **_: [2.0] * len(completions)], "parity", True),
        ("datc", ["model"], None, False),
        ("gtpo", ["model"], None, True),  # the rule has gone by it
    ],
)
def test_records_say_what_is_right_only_where_some_reward_does(rule, funcs, named, known, tmp_path):
    """A sum of rewards or a reward model's raw score above 0.5 is no verdict."""
    more = {"success_from": named}
    if "model" in funcs:
        funcs = [reward_model()]
        more["reward_processing_classes"] = [tokenizer_for(TASK)]
    if rule == "datc":
        more["reward_model"] = reward_model()
    run = Run(rule, reward_funcs=funcs, more=more)
    path = tmp_path / "rollouts.jsonl"
    run.trainer.on_credit.append(RolloutRecorder(path, tokenizer_for(TASK)))
    run.train()
    (event,) = run.events
    assert event.success_known is known
    records = list(read_records(path))
    if not known:
        assert all(record.success is None for record in records)
    else:
        assert [record.success for record in records] == event.rollouts.success.tolist()
        if funcs[0] is parity:
            assert [r.success for r in records] == [r.rewards["parity"] > 0.5 for r in records]


# -- reward models that cannot be read, or are not ------------------------------------------


@pytest.mark.parametrize("entry", ["by the first response", "later"])
def test_a_reward_model_with_fewer_embeddings_than_tokens_is_refused(entry):
    """Given as an object, its tokenizer is not known before."""
    small = reward_model()
    small.resize_token_embeddings(4 if entry != "later" else VOCAB - 1)
    with pytest.raises(InputError, match=r"embeddings, but the policy's tokens go up to \d+"):
        Run(DATC(), more={"reward_model": small}).train()


@pytest.mark.parametrize("rule", ["gtpo", None])
def test_a_reward_model_that_nothing_reads_is_pointed_out(rule, caplog):
    with caplog.at_level(logging.WARNING, "tokencredit"):
        Run(rule, more={"reward_model": reward_model()})
    assert caplog.text.count("reward_model is not used") == 1
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tokencredit"):
        Run(DATC(), more={"reward_model": reward_model()})
    assert "not used" not in caplog.text


@pytest.mark.parametrize("form", ["folder", "loaded"])
def test_a_reward_model_folder_without_a_tokenizer(form, tmp_path, caplog):
    reward_model().save_pretrained(tmp_path)
    if form == "loaded":
        given = type(reward_model()).from_pretrained(tmp_path)
        with caplog.at_level(logging.WARNING, "tokencredit"):
            Run(DATC(), more={"reward_model": given})
        assert "the reward model's tokenizer is not known" in caplog.text
        return
    with pytest.raises(InputError, match="holds no tokenizer"):
        Run(DATC(), more={"reward_model": str(tmp_path)})
    more = {"reward_model": str(tmp_path), "reward_tokenizer": tokenizer_for(TASK)}
    Run(DATC(), more=more)
    tokenizer_for(TASK).save_pretrained(tmp_path)
    Run(DATC(), more={"reward_model": str(tmp_path)})


def test_a_missing_reward_model_is_asked_for_in_every_way_to_give_it():
    with pytest.raises(MissingSignalError, match=r"reward_model=.*reward_model: .*--reward_model"):
        Run(DATC())


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
    """Prompt and response run together as one text, and the whole response is one word."""

    def one_word(call, row):
        return [3 + (call + row) % 9, EOS]

    with caplog.at_level(logging.WARNING, "tokencredit"):
        run = Run(
            DATC(),
            more={
                "reward_model": "from_rewards",
                "reward_processing_classes": [tokenizer_for(TASK), None],
            },
            reward_funcs=[reward_model(), parity],
            rollout=fixed_rollouts(make=one_word),
            max_steps=2,
        ).train()
    assert run.log[0]["credit/coverage"] < 0.5
    assert caplog.text.count("have a counterpart") == 1
    assert "let prompts end where a token ends" in caplog.text  # and what to do


def test_text_prompts_that_run_into_the_response_cost_one_token():
    """The rest of the response is found by its characters, also where tokens carry no space."""
    tokenizers = {"reward_processing_classes": [tokenizer_for(TASK), None]}
    run = Run(
        DATC(freeze=()),
        more=tokenizers | {"reward_model": "from_rewards"},
        reward_funcs=[reward_model(), parity],
    ).train()
    (event,) = run.events
    for known, answer in zip(
        event.rollouts.signals["work"].isfinite(), event.response_ids, strict=True
    ):
        for i, token in enumerate(answer):
            assert bool(known[i]) == (i > 0 and token != EOS)


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
