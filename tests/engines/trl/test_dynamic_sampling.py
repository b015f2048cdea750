"""Groups in which there is nothing to compare give their place to fresh ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset
from trl_harness import (
    GROUP,
    PROMPTS,
    Run,
    dataset,
    distance,
    fixed_rollouts,
    plain,
    policy,
    recommended,
    reference_gradient,
    surrogate_of,
)

from tokencredit import InputError, assign

EASY, HARD = PROMPTS[0], PROMPTS[2]


def three_kinds(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """One prompt is always right, one never, the others by the sum of their tokens."""
    known = {EASY: 1.0, HARD: 0.0}
    return [
        known.get(prompt, float(sum(ids) % 2))
        for prompt, ids in zip(prompts, completion_ids, strict=True)
    ]


def run(name: str = "dapo", rounds: int = 8, **options: Any) -> Run:
    rule, fields = recommended(name)
    more = {"dynamic_sampling": rounds} | options.pop("more", {})
    fields |= {"reward_funcs": three_kinds, "max_steps": 4} | options
    return Run(rule, more=more, **fields)


def mixed(event: Any) -> list[bool]:
    rows = event.rollouts.success.view(-1, GROUP)
    return (rows.any(dim=1) & ~rows.all(dim=1)).tolist()


@pytest.mark.parametrize("name", ["dapo", "gtpo", "grpo_s", "grpo"])
def test_every_group_has_something_to_compare(name):
    without = run(name, rounds=0).train()
    assert not all(all(mixed(event)) for event in without.events)
    made = run(name).train()
    for event in made.events:
        assert all(mixed(event)) and not {EASY, HARD} & set(event.prompts)
    rounds = [line["credit/sampling_rounds"] for line in made.log if "loss" in line]
    assert len(rounds) == 4 and max(rounds) >= 1
    # Groups that had a mix are those of the run that did not sample on.
    first, then = without.events[0], made.events[0]
    for g, stayed in enumerate(mixed(first)):
        rows = slice(g * GROUP, (g + 1) * GROUP)
        same = then.response_ids[rows] == first.response_ids[rows]
        assert same == stayed and (not stayed or then.prompts[rows] == first.prompts[rows])


def test_rows_stay_together_and_the_loss_trains_on_them():
    """Prompt, response, reward, columns of the data set and gradient are those of one row."""
    seen: list[tuple[str, float, tuple[int, ...], str]] = []

    def watching(prompts, completions, completion_ids, number, **more):
        for row in zip(prompts, number, map(tuple, completion_ids), completions, strict=True):
            seen.append(row)
        return three_kinds(prompts=prompts, completion_ids=completion_ids)

    made = run(max_steps=1, reward_funcs=watching).train()
    (event,) = made.events
    tokenizer = made.trainer.processing_class
    numbers = dict(zip(PROMPTS, range(6), strict=True))
    asked = {(prompt, ids, text): number for prompt, number, ids, text in seen}
    for i, prompt in enumerate(event.prompts):
        ids = tuple(event.response_ids[i])
        assert asked[(prompt, ids, event.responses[i])] == numbers[prompt]
        assert event.prompt_ids[i] == tokenizer(prompt)["input_ids"]
        assert float(event.rollouts.rewards[i]) == sum(ids) % 2
    wanted = reference_gradient(policy(), plain(event), surrogate_of("dapo"))
    assert distance(made.keep.gradients[0], wanted) < 1e-5
    again = assign(event.rollouts, made.trainer.credit_rule)
    assert torch.equal(again.advantage, event.credit.advantage)


def test_a_response_is_scored_once():
    calls: list[int] = []

    def counting(prompts, completion_ids, **more):
        calls.append(len(prompts))
        return three_kinds(prompts=prompts, completion_ids=completion_ids)

    made = run(max_steps=1, reward_funcs=counting).train()
    rounds = made.log[0]["credit/sampling_rounds"]
    assert calls == [24] * (1 + int(rounds))


def test_what_a_reward_function_logs_stays_with_its_row():
    def logging(prompts, completion_ids, log_extra, log_metric, **more):
        log_extra("kind", list(prompts))
        log_metric("asked", 1.0)
        return three_kinds(prompts=prompts, completion_ids=completion_ids)

    made = run(max_steps=1, reward_funcs=logging, log_completions=True).train()
    logs = made.trainer._logs
    assert list(logs["extra"]["kind"]) == list(logs["prompt"]) == made.events[0].prompts


def test_fields_of_a_rollout_function_stay_with_their_rows():
    """A list an entry a response, and one value for all."""
    fixed, asked = fixed_rollouts(), []

    def rollout(prompts, trainer):
        out = fixed(prompts, trainer)
        return out | {"first": [ids[0] for ids in out["completion_ids"]], "kind": "tiny"}

    def reading(prompts, completion_ids, first, kind, **_):
        assert [ids[0] for ids in completion_ids] == first and set(kind) == {"tiny"}
        asked.append(len(prompts))
        return three_kinds(prompts, completion_ids)

    made = run(max_steps=1, reward_funcs=reading, rollout=rollout).train()
    assert all(mixed(made.events[0])) and len(asked) > 1


def test_rounds_are_bounded_and_what_is_left_is_left():
    made = run(rounds=2, reward_funcs=lambda prompts, **_: [1.0] * len(prompts)).train()
    assert [line["credit/sampling_rounds"] for line in made.log if "loss" in line] == [2.0] * 4
    for event in made.events:
        assert not any(mixed(event)) and not event.credit.advantage.any()


def test_a_rule_that_reads_rewards_looks_at_rewards():
    """Equal successes with unequal rewards teach GRPO something, and DAPO nothing."""

    def graded(prompts, completion_ids, **_):
        return [1.0 + len(ids) for ids in completion_ids]

    made = run("grpo", reward_funcs=graded).train()
    assert all(line["credit/sampling_rounds"] == 0 for line in made.log if "loss" in line)
    made = run("dapo", rounds=1, reward_funcs=graded).train()
    assert all(line["credit/sampling_rounds"] == 1 for line in made.log if "loss" in line)


def test_unscored_responses_are_no_mix():
    def partly(prompts, completion_ids, **_):
        return [None if p == EASY else v for p, v in
                zip(prompts, three_kinds(prompts, completion_ids), strict=True)]  # fmt: skip

    made = run("grpo", reward_funcs=partly).train()
    for event in made.events:
        assert not {EASY, HARD} & set(event.prompts)


def test_conversations():
    rows = [[{"role": "user", "content": text}] for text in PROMPTS]

    def by_content(prompts, completion_ids, **_):
        return three_kinds([p[0]["content"] for p in prompts], completion_ids)

    def rollout(prompts, trainer):
        return fixed([p[0]["content"] for p in prompts], trainer)

    fixed = fixed_rollouts()
    made = run(
        reward_funcs=by_content, rollout=rollout, prompts=Dataset.from_dict({"prompt": rows})
    ).train()
    for event in made.events:
        assert all(mixed(event))
        assert not {EASY, HARD} & {p[0]["content"] for p in event.prompts}


@pytest.mark.parametrize("options", [{}, {"num_iterations": 2}, {"steps_per_generation": 2}])
def test_a_resumed_run_draws_the_same(tmp_path, options):
    """Also with several generation batches a step."""
    fields = options | {"rollout": None, "save_steps": 2, "save_strategy": "steps"}
    whole = run(folder=tmp_path / "whole", **fields).train()
    half = run(folder=tmp_path / "half", **fields)
    half.trainer.args.max_steps = 2
    half.train()
    second = run(folder=tmp_path / "half", **fields)
    torch.manual_seed(99)
    second.trainer.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-2"))
    told = [event.prompts for event in half.events + second.events]
    assert told == [event.prompts for event in whole.events]
    assert sum(line.get("credit/sampling_rounds", 0) for line in whole.log) > 0


def test_two_batches_of_a_step_draw_different_prompts():
    from tokencredit.engines.trl.dynamic_sampling import DynamicSampling, Sampled

    drawn = []

    def sample(rows):
        drawn.append([row["prompt"] for row in rows])
        return Sampled(rows, {}, torch.ones(len(rows), 1))

    made = DynamicSampling(2, dataset(), 7, 4)

    def nothing(rewards):
        return torch.zeros(len(rewards) // 4, dtype=torch.bool)

    for step in (0, 0, 1):
        first = Sampled([{"prompt": ""}] * 16, {}, torch.ones(16, 1))
        assert made.fill(first, sample, nothing, step=step, rank=0, ranks=1) == 2
    assert len({tuple(one) for one in drawn}) == 6
    for one in drawn:
        assert one[::4] == one[3::4] and len(set(one)) == 4  # four prompts, four times each


def test_more_prompts_than_the_data_set_has():
    from tokencredit.engines.trl.dynamic_sampling import DynamicSampling

    made = DynamicSampling(1, dataset(3), 7, 2)
    drawn = [row["prompt"] for row in made._prompts(1, 16, 0, 16, {"prompt"})][::2]
    assert set(drawn[:3]) == set(drawn[3:6]) == set(PROMPTS[:3]) and len(drawn) == 8


def test_datc_forms_its_signals_for_the_rows_that_stay():
    from trl_harness import reward_model

    frozen = reward_model()
    rule, fields = recommended("datc")
    made = Run(
        rule, reward_funcs=three_kinds,
        more={"dynamic_sampling": 8, "reward_model": frozen, "success_from": "three_kinds"},
        **(fields | {"max_steps": 2}),
    ).train()  # fmt: skip
    for event in made.events:
        assert all(mixed(event))
        work = event.rollouts.signals["work"]
        assert bool(work[event.rollouts.mask].isfinite().any())
        assert work.shape == event.rollouts.mask.shape


@pytest.mark.parametrize(
    "rounds", [-1, 1.5, True, float("nan"), float("inf"), 1e30, "two", None, [1]]
)
def test_rounds_are_a_whole_number(rounds):
    with pytest.raises(InputError, match="whole number of rounds from 0"):
        run(rounds=rounds)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(InputError, match="needs a credit rule"):
        Run(None, more={"dynamic_sampling": 1})
    with pytest.raises(InputError, match="has no length"):
        run(prompts=dataset().to_iterable_dataset())
    with pytest.raises(InputError, match="not with images or the masks of tools"):
        run(rollout=fixed_rollouts(env_mask=True)).train()


def test_evaluation_does_not_sample_on():
    made = run(
        max_steps=1, more={"eval_dataset": dataset(3)}, eval_strategy="steps", eval_steps=1,
        num_generations_eval=4, per_device_eval_batch_size=12,
    ).train()  # fmt: skip
    _, *evaluations = made.events
    assert {p for event in evaluations for p in event.prompts} == set(PROMPTS[:3])


# -- found by trying to break it ---------------------------------------------------------------


def test_subclasses_that_would_not_see_further_rounds_are_refused():
    from tokencredit.engines.trl import CreditGRPOTrainer

    class Cuts(CreditGRPOTrainer):
        def _generate(self, prompts):
            return super()._generate(prompts)

    class Judges(CreditGRPOTrainer):
        def _calculate_rewards(self, *args):
            return super()._calculate_rewards(*args) * 0

    for kind in (Cuts, Judges):
        with pytest.raises(InputError, match=f"{kind.__name__}._.* would not see"):
            run(trainer=kind)
        run(trainer=kind, rounds=0, max_steps=1)


def test_images_in_the_data_set_are_refused():
    rows = {"prompt": list(PROMPTS), "images": [[]] * 6}
    with pytest.raises(InputError, match="not with images"):
        run(prompts=Dataset.from_dict(rows))


def test_columns_that_trl_takes_away_stay_away():
    def strict(prompts, completion_ids, completions, trainer_state, **rest):
        assert "number" not in rest
        return three_kinds(prompts, completion_ids)

    made = run(reward_funcs=strict, remove_unused_columns=True).train()
    assert all(all(mixed(event)) for event in made.events)


def test_what_a_function_kept_does_not_change():
    kept = []

    def keeping(prompts, completion_ids, **_):
        values = three_kinds(prompts, completion_ids)
        kept.append((prompts, completion_ids, values))
        return values

    run(max_steps=2, reward_funcs=keeping).train()
    assert len(kept) > 2
    for prompts, ids, values in kept:
        assert three_kinds(prompts, ids) == values


def test_rounding_is_no_mix():
    def noisy(prompts, **_):
        return [(0.1 + 0.6) if i % 2 else (0.2 + 0.5) for i in range(len(prompts))]

    made = run("grpo", rounds=1, reward_funcs=noisy).train()
    assert all(line["credit/sampling_rounds"] == 1 for line in made.log if "loss" in line)


def test_the_same_trainer_resumed_draws_the_same(tmp_path):
    fields = {"rollout": None, "save_steps": 2, "save_strategy": "steps"}
    whole = run(folder=tmp_path / "whole", **fields).train()
    other = run(folder=tmp_path / "other", **fields).train()
    told = [event.prompts for event in whole.events]
    other.events.clear()
    other.trainer.train(resume_from_checkpoint=str(tmp_path / "other" / "checkpoint-2"))
    assert [event.prompts for event in other.events] == told[2:]


def test_a_field_that_only_some_rounds_have():
    fixed, calls = fixed_rollouts(), []

    def rollout(prompts, trainer):
        out = fixed(prompts, trainer)
        calls.append(len(prompts))
        return out | ({"later": [1.0] * len(prompts), "none": []} if len(calls) % 3 == 2 else {})

    made = run(rollout=rollout).train()
    assert all(all(mixed(event)) for event in made.events)
