"""What lies between generation and the loss: masks, holes, groups out, rows without a reward."""

from dataclasses import dataclass

import pytest
import torch
from trl import GRPOTrainer
from trl_harness import (
    BUDGET,
    EOS,
    ROWS,
    Run,
    dataset,
    distance,
    fixed_rollouts,
    own_tokens,
    parity,
    plain,
    policy,
    recommended,
    reference_gradient,
    response,
    surrogate_of,
)

from tokencredit import (
    DAPO,
    GRPO,
    GTPO,
    InputError,
    MissingSignalError,
    Rollouts,
    Rule,
    assign,
    finish,
    grpo_advantage,
    register,
)


def items(run):
    """TRL's count of tokens in the loss of the generation."""
    return float(run.trainer._buffered_inputs[0]["num_items_in_batch"])


def against_trl(**options):
    """GRPO with TRL's guard of the standard deviation, and TRL's own GRPO."""
    return (
        Run(GRPO(eps=1e-4), optim="sgd", **options).train(),
        Run(None, trainer=GRPOTrainer, optim="sgd", **options).train(),
    )


# -- truncated responses --------------------------------------------------------------------


@pytest.mark.parametrize("env_mask", [False, True])
@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo"])
def test_masking_truncated_responses_equals_trls(loss_type, iterations, env_mask):
    options = {"num_iterations": iterations, "max_steps": 2 * iterations, "learning_rate": 0.05}
    options |= {"loss_type": loss_type, "mask_truncated_completions": True}
    ours, theirs = (
        Run(
            GRPO(eps=1e-4),
            trainer=trainer,
            rollout=fixed_rollouts(env_mask),
            optim="sgd",
            **options,
        ).train()
        for trainer in (Run.__init__.__kwdefaults__["trainer"], GRPOTrainer)
    )
    assert items(ours) == items(theirs)
    for a, b in zip(ours.keep.gradients, theirs.keep.gradients, strict=True):
        assert distance(a, b) < 2e-5
    assert ours.trainer.mask_truncated_completions


def test_truncated_responses_count_in_the_statistics_only():
    rule, fields = recommended("gtpo", alpha2=1.0)
    masked = Run(rule, mask_truncated_completions=True, **fields).train()
    full = Run(rule, **fields).train()
    (event,), (other,) = masked.events, full.events
    cut = torch.tensor([ids[-1] != EOS for ids in event.response_ids])
    assert 2 < int(cut.sum()) < ROWS and torch.equal(event.truncated, cut)
    assert torch.equal(other.truncated, cut) and bool(other.credit.in_loss.all())
    assert torch.equal(event.credit.in_loss, ~cut)
    assert bool((event.credit.advantage[cut] == 0).all())
    assert torch.equal(event.credit.base, other.credit.base)
    assert torch.equal(event.credit.reward, other.credit.reward)
    assert torch.equal(event.credit.advantage[~cut], other.credit.advantage[~cut])
    # Entropies of truncated rows are the policy's, not those of a masked prompt.
    assert (event.rollouts.signals["entropy"] - other.rollouts.signals["entropy"]).abs().max() == 0
    tokens = sum(len(ids) for ids, out in zip(event.response_ids, cut, strict=True) if not out)
    assert items(masked) == tokens == masked.log[0]["credit/tokens"]
    assert items(full) == sum(len(ids) for ids in event.response_ids)
    wanted = reference_gradient(policy(), plain(event), surrogate_of("gtpo"))
    assert distance(masked.keep.gradients[0], wanted) < 1e-5


def test_rows_out_of_the_loss_cannot_make_it_nan():
    """A masked row's old log-probabilities may be anything: a tool's tokens at low temperature."""
    ours = Run(
        GRPO(eps=1e-4),
        rollout=fixed_rollouts(env_mask=True),
        mask_truncated_completions=True,
        num_iterations=2,
        temperature=0.01,
        learning_rate=0.0,
        max_steps=2,
        loss_type="dapo",
    ).train()
    (event,) = ours.events
    tool = torch.zeros_like(event.rollouts.mask)
    for i, ids in enumerate(event.response_ids):
        tool[i, : len(ids)] = ~torch.tensor(own_tokens(ids)).bool()
    assert event.rollouts.signals["logprob"][tool & event.truncated.unsqueeze(1)].min() < -100
    for gradient in ours.keep.gradients:
        assert all(bool(g.isfinite().all()) for g in gradient.values())
    assert all(line["loss"] == line["loss"] for line in ours.log if "loss" in line)


# -- groups that leave the loss -------------------------------------------------------------


def odd(ids):
    return ids if sum(ids) % 2 else [3, *ids] if sum([3, *ids]) % 2 else [4, *ids]


def first_group_right(call, row):
    return odd(response(call, row)) if row < 8 else response(call, row)


@pytest.mark.parametrize("iterations", [1, 2])
def test_dapo_drops_groups_from_the_denominator(iterations):
    rule, fields = recommended("dapo")
    fields |= {"mask_truncated_completions": False, "num_iterations": iterations}
    run = Run(rule, rollout=fixed_rollouts(make=first_group_right), **fields).train()
    (event,) = run.events
    assert bool(event.rollouts.success[:8].all())
    assert event.credit.in_loss.tolist() == [False] * 8 + [True] * 16
    assert items(run) == sum(len(ids) for ids in event.response_ids[8:])
    wanted = reference_gradient(policy(), plain(event), surrogate_of("dapo"))
    assert distance(run.keep.gradients[0], wanted) < 1e-5
    kept = Run(
        DAPO(filter_uniform=False), rollout=fixed_rollouts(make=first_group_right), **fields
    ).train()
    share = items(run) / items(kept)
    scaled = {k: v * share for k, v in run.keep.gradients[0].items()}
    assert share < 1 and distance(scaled, kept.keep.gradients[0]) < 1e-5


def test_all_groups_dropped_is_a_step_of_nothing():
    def right(completion_ids, **_):
        return [1.0] * len(completion_ids)

    rule, fields = recommended("dapo")
    run = Run(rule, reward_funcs=right, **fields).train()
    assert not bool(run.events[0].credit.in_loss.any()) and items(run) == 0
    assert all(bool((g == 0).all()) for g in run.keep.gradients[0].values())
    assert run.log[0]["credit/groups_skipped"] == 1.0 and not run.trainer._loss_checked


# -- rewards --------------------------------------------------------------------------------


def unscored(completion_ids, **_):
    return [None if len(ids) % 4 == 3 else float(sum(ids) % 2) for ids in completion_ids]


@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_unscored_responses_are_treated_as_trl_does(loss_type, mask_truncated):
    ours, theirs = against_trl(
        reward_funcs=unscored,
        loss_type=loss_type,
        mask_truncated_completions=mask_truncated,
    )
    (event,) = ours.events
    none = torch.tensor([len(ids) % 4 == 3 for ids in event.response_ids])
    assert torch.equal(~event.rollouts.real, none) and bool(
        event.rollouts.rewards[none].isnan().all()
    )
    assert bool((none & event.truncated).any()) and bool((none & ~event.truncated).any())
    assert [r is None for r in event.rewards["unscored"]] == none.tolist()
    assert bool((event.credit.advantage[none] == 0).all())
    assert items(ours) == items(theirs)
    assert distance(ours.keep.gradients[0], theirs.keep.gradients[0]) < 1e-5


@pytest.mark.parametrize("case", ["gtpo", "grpo_s", "dapo"])
def test_unscored_responses_are_in_no_statistic(case):
    rule, fields = recommended(case)
    run = Run(rule, reward_funcs=unscored, **fields).train()
    (event,) = run.events
    rollouts, real = event.rollouts, event.rollouts.real
    without = assign(
        Rollouts(
            rewards=rollouts.rewards[real],
            group=rollouts.group[real],
            mask=rollouts.mask[real],
            success=rollouts.success[real],
            keep=rollouts.keep[real],
            signals={k: v[real] for k, v in rollouts.signals.items()},
        ),
        rule,
    )
    assert (without.advantage - event.credit.advantage[real]).abs().max() < 1e-5


def test_no_reward_at_all_is_refused():
    def nothing(completion_ids, **_):
        return [None] * len(completion_ids)

    with pytest.raises(InputError, match=r"every reward of this batch is None or NaN .*nothing"):
        Run(GRPO(), reward_funcs=nothing).train()


def punished(completion_ids, **_):
    return [-0.3 * len(ids) for ids in completion_ids]


def test_success_comes_from_the_named_reward():
    rule, fields = recommended("gtpo", alpha2=1.0)
    alone = Run(rule, **fields).train()
    both = Run(
        rule, reward_funcs=[punished, parity], more={"success_from": "parity"}, **fields
    ).train()
    (event,) = both.events
    assert set(event.rewards) == {"punished", "parity"}
    assert event.rollouts.success.tolist() == [r > 0.5 for r in event.rewards["parity"]]
    total = torch.tensor(event.rewards["parity"]) + torch.tensor(event.rewards["punished"])
    assert torch.allclose(event.rollouts.rewards, total)
    assert torch.equal(event.credit.advantage, alone.events[0].credit.advantage)


def test_a_length_penalty_changes_no_success_and_no_filter():
    rule, fields = recommended("dapo")
    run = Run(
        rule,
        reward_funcs=[parity, punished],
        rollout=fixed_rollouts(make=first_group_right),
        more={"success_from": "parity"},
        reward_weights=[1.0, 0.5],
        **(fields | {"mask_truncated_completions": False}),
    ).train()
    (event,) = run.events
    assert not bool(event.credit.in_loss[:8].any()) and bool(event.credit.in_loss[8:].all())
    assert event.rollouts.rewards[:8].std() > 0.1
    one = torch.tensor(event.rewards["parity"]) + 0.5 * torch.tensor(event.rewards["punished"])
    assert torch.allclose(event.rollouts.rewards, one)


def test_an_unknown_verdict_is_no_failure():
    """The reward that decides success is None, another one is not: the row is in no statistic."""
    rule, fields = recommended("gtpo")
    run = Run(
        rule, reward_funcs=[unscored, punished], more={"success_from": "unscored"}, **fields
    ).train()
    (event,) = run.events
    none = torch.tensor([r is None for r in event.rewards["unscored"]])
    assert bool(none.any()) and torch.equal(~event.rollouts.real, none)
    assert bool((event.credit.advantage[none] == 0).all())


def test_success_from_is_asked_for_and_checked():
    both = [parity, punished]
    with pytest.raises(InputError, match="set success_from to one of parity, punished"):
        Run("gtpo", reward_funcs=both)
    with pytest.raises(InputError, match=r"no reward function 'party' \(did you mean 'parity'\?\)"):
        Run("gtpo", reward_funcs=both, more={"success_from": "party"})
    with pytest.raises(InputError, match="2 reward functions named parity"):
        Run("gtpo", reward_funcs=[parity, parity], more={"success_from": "parity"})
    assert Run(GRPO(), reward_funcs=both).trainer._success_column is None
    assert Run("grpo", reward_funcs=both, more={"success_from": "parity"}).trainer is not None


# -- holes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["gtpo", "grpo_s", "grpo_s-geometric", "grpo"])
def test_a_tools_tokens_get_no_credit_and_shift_no_position(case):
    name = case.split("-")[0]
    options = {"grpo_s-geometric": {"ratio": "geometric"}}.get(case, {})
    rule, fields = recommended(name, **options)
    run = Run(rule, rollout=fixed_rollouts(env_mask=True), **fields).train()
    (event,) = run.events
    mask = torch.zeros_like(event.rollouts.mask)
    for i, ids in enumerate(event.response_ids):
        mask[i, : len(ids)] = torch.tensor(own_tokens(ids)).bool()
    assert torch.equal(mask, event.rollouts.mask)
    assert int(mask.sum()) < sum(len(ids) for ids in event.response_ids)
    assert bool((event.credit.advantage[~mask] == 0).all())
    assert items(run) == int(mask.sum())

    told = plain(event)
    wanted = reference_gradient(policy(), told, surrogate_of(case))
    assert distance(run.keep.gradients[0], wanted) < 1e-5

    # The same credit as for responses that never held a tool's tokens.
    rollouts = event.rollouts
    width = int(mask.sum(1).max())
    packed = torch.zeros(ROWS, width)
    short = torch.arange(width) < mask.sum(1, keepdim=True)
    if rollouts.signals:
        packed[short] = rollouts.signals["entropy"][mask]
    compact = Rollouts(rollouts.rewards, rollouts.group, short, entropy=packed)
    credit = assign(compact, rule)
    assert (credit.advantage[short] - event.credit.advantage[mask]).abs().max() < 1e-6


def test_padding_to_a_multiple_changes_nothing():
    rule, fields = recommended("gtpo", alpha2=1.0)
    run = Run(rule, pad_to_multiple_of=16, mask_truncated_completions=True, **fields).train()
    (event,) = run.events
    assert event.rollouts.mask.shape[1] == 16 > BUDGET
    assert event.truncated.tolist() == [ids[-1] != EOS for ids in event.response_ids]
    wanted = reference_gradient(policy(), plain(event), surrogate_of("gtpo"))
    assert distance(run.keep.gradients[0], wanted) < 1e-5


# -- evaluation -----------------------------------------------------------------------------


def test_evaluation_has_its_own_group_size_and_metrics():
    rule, fields = recommended("gtpo")
    run = Run(
        rule,
        more={"eval_dataset": dataset(4)},
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=2,
        per_device_eval_batch_size=8,
        max_steps=2,
        **fields,
    ).train()
    modes = [(e.mode, e.step, e.rollouts.mask.shape[0]) for e in run.events]
    assert modes == [("train", 0, 24), ("eval", 1, 8), ("train", 1, 24), ("eval", 2, 8)]
    (event, _) = [e for e in run.events if e.mode == "eval"]
    assert event.rollouts.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(set(event.prompts)) == 4 and event.prompts[0] == event.prompts[1]
    lines = [line for line in run.log if "eval_loss" in line]
    assert len(lines) == 2 and "eval_credit/sign_flips" in lines[0]
    assert lines[0]["eval_credit/responses"] == 8
    assert [line["credit/responses"] for line in run.log if "credit/responses" in line] == [24, 24]


# -- further signals ------------------------------------------------------------------------


@register
@dataclass(frozen=True)
class ByWork(Rule):
    """A weighting rule that reads a signal of its own and the engine's base."""

    name = "by_work"
    title = "test"
    needs = ("work",)

    def credit(self, rollouts):
        base = rollouts.base if rollouts.base is not None else grpo_advantage(rollouts)
        weight = rollouts.signals["work"]
        return finish(
            rollouts, self, advantage=base.unsqueeze(1) * weight, base=base, weight=weight
        )


def work(prompts, completions, completion_ids, number, **_):
    assert len(prompts) == len(completions) == len(completion_ids) == len(number)
    return [
        [1.0 + n + t + (token % 3) for t, token in enumerate(ids)]
        for ids, n in zip(completion_ids, number, strict=True)
    ]


def test_a_rule_with_a_signal_of_its_own():
    run = Run("by_work", more={"signals": {"work": work}}, loss_type="dapo").train()
    (event,) = run.events
    numbers = dict(zip(dataset()["prompt"], dataset()["number"], strict=True))
    for i, (prompt, ids) in enumerate(zip(event.prompts, event.response_ids, strict=True)):
        weight = torch.tensor([1.0 + numbers[prompt] + t + (x % 3) for t, x in enumerate(ids)])
        found = event.rollouts.signals["work"][i]
        assert torch.equal(found[: len(ids)], weight) and not bool(found[len(ids) :].any())
        assert torch.allclose(
            event.credit.advantage[i, : len(ids)], event.rollouts.base[i] * weight
        )
    wanted = reference_gradient(policy(), plain(event), surrogate_of("gtpo"))
    assert distance(run.keep.gradients[0], wanted) < 1e-5


def test_a_signal_that_is_missing_or_does_not_fit():
    with pytest.raises(MissingSignalError, match="by_work: needs the signal 'work'"):
        Run("by_work")

    def few(completion_ids, **_):
        return [[0.0] * len(ids) for ids in completion_ids[1:]]

    def short(completion_ids, **_):
        return [[0.0] * (len(ids) - (i == 2)) for i, ids in enumerate(completion_ids)]

    with pytest.raises(InputError, match="signal 'work': one list a response, 24, got 23"):
        Run("by_work", more={"signals": {"work": few}}).train()
    with pytest.raises(InputError, match=r"signal 'work', response 2: one number a token, "):
        Run("by_work", more={"signals": {"work": short}}).train()


def test_a_signal_that_the_rule_does_not_read_is_told():
    run = Run(GTPO(), more={"signals": {"work": work}}, loss_type="dapo").train()
    assert set(run.events[0].rollouts.signals) == {"entropy", "logprob", "work"}
