"""What the trainer tells: metrics, the completions table, events."""

import math

import pytest
import torch
from trl_harness import ROWS, Run, fixed_rollouts, parity, recommended

from tokencredit import GTPO, InputError


def test_the_diagnostics_are_logged():
    rule, fields = recommended("gtpo", alpha2=1.0)
    run = Run(rule, max_steps=2, **fields).train()
    lines = [line for line in run.log if "loss" in line]
    assert len(lines) == len(run.events) == 2
    for line, event in zip(lines, run.events, strict=True):
        found = {k: v for k, v in line.items() if k.startswith("credit/")}
        assert found == {f"credit/{k}": v for k, v in event.credit.diagnostics.items()}
        assert all(math.isfinite(v) for v in found.values())
        assert {"credit/sign_flips", "credit/unknown_tokens", "credit/tokens"} <= set(found)
    assert lines[0] != lines[1]


def test_the_completions_table_shows_what_the_loss_used(tmp_path):
    import pandas

    rule, fields = recommended("gtpo", alpha2=1.0)
    run = Run(
        rule,
        folder=tmp_path,
        log_completions=True,
        num_completions_to_print=0,
        max_steps=2,
        **fields,
    ).train()
    for step, event in enumerate(run.events, start=1):
        table = pandas.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        mean = event.credit.advantage.sum(1) / event.rollouts.mask.sum(1)
        assert table["advantage"].tolist() == pytest.approx(mean.tolist(), abs=1e-6)
        assert table["prompt"].tolist() == event.prompts
        assert table["completion"].tolist() == event.responses
        assert table["parity"].tolist() == event.rewards["parity"]
        assert (event.rollouts.base - mean).abs().max() > 1e-2  # TRL's own are others


def test_the_table_shows_zero_for_rows_out_of_the_loss():
    rule, fields = recommended("gtpo")
    run = Run(rule, mask_truncated_completions=True, **fields).train()
    shown = torch.tensor(list(run.trainer._logs["advantages"]))
    assert bool((shown[run.events[0].truncated] == 0).all())


def test_an_event_is_the_whole_generation():
    rule, fields = recommended("gtpo")
    make = fixed_rollouts()
    sampled = []

    def rollout(prompts, trainer):
        out = make(prompts, trainer)
        sampled.append((list(prompts), out["prompt_ids"], out["completion_ids"]))
        return out

    run = Run(rule, rollout=rollout, max_steps=2, **fields).train()
    tokenizer = run.trainer.processing_class
    for step, (event, (prompts, prompt_ids, response_ids)) in enumerate(
        zip(run.events, sampled, strict=True)
    ):
        assert (event.step, event.mode) == (step, "train")
        assert event.prompts == prompts and event.prompt_ids == prompt_ids
        assert event.response_ids == response_ids
        assert event.responses == [
            tokenizer.decode(ids, skip_special_tokens=True) for ids in response_ids
        ]
        assert event.rewards == {"parity": parity(response_ids)}
        assert event.rollouts.group.tolist() == [i // 8 for i in range(ROWS)]
        assert all(len(set(prompts[g : g + 8])) == 1 for g in (0, 8, 16))
        lengths = event.rollouts.mask.sum(1).tolist()
        assert lengths == [len(ids) for ids in response_ids]
        assert (
            event.credit.rule == rule and event.credit.advantage.shape == event.rollouts.mask.shape
        )


@pytest.mark.parametrize("options", [{"num_iterations": 2}, {"steps_per_generation": 12}])
def test_one_event_a_generation(options):
    rule, fields = recommended("gtpo")
    run = Run(rule, max_steps=4, **fields, **options).train()
    assert [event.step for event in run.events] == [0, 2]
    told = [line["step"] for line in run.log if "credit/tokens" in line]
    assert told == [1, 3]


def test_listeners_are_called_in_order_and_may_stop_the_run():
    rule, fields = recommended("gtpo")
    run = Run(rule, **fields)
    calls = []

    def stop(event):
        raise InputError("enough")

    run.trainer.on_credit = [lambda e: calls.append(1), lambda e: calls.append(2), stop]
    with pytest.raises(InputError, match="enough"):
        run.train()
    assert calls == [1, 2]


def test_conversations():
    """Prompts as messages: events hold messages, as the reward functions saw them."""
    from datasets import Dataset
    from trl_harness import dataset

    rule, fields = recommended("gtpo")
    chats = [[{"role": "user", "content": p}] for p in dataset()["prompt"]]
    make = fixed_rollouts()

    def rollout(prompts, trainer):
        return make([p[0]["content"] for p in prompts], trainer)

    run = Run(rule, rollout=rollout, prompts=Dataset.from_dict({"prompt": chats}), **fields).train()
    (event,) = run.events
    assert event.prompts[0][0]["role"] == "user"
    assert event.responses[0][0]["role"] == "assistant"


def test_what_a_listener_does_to_its_event_is_not_training():
    plain = Run(GTPO()).train()
    changed = Run(GTPO())

    def spoil(event):
        event.credit.advantage.zero_()
        event.rollouts.mask.zero_()

    changed.trainer.on_credit.append(spoil)
    changed.train()
    assert changed.log[0]["grad_norm"] == plain.log[0]["grad_norm"] > 0
