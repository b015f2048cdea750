"""Credit reaches the update: gradients inside TRL against autograd outside it, on one rank.

Two ranks: `test_ranks`. Not run in this folder, for want of the hardware or the package: vLLM,
FSDP, DeepSpeed, multimodal models. They share every line of the mixin but two: vLLM makes TRL
run an old-log-probability pass (`test_entropies` has that pass by other means), and a multimodal
policy's inputs are passed on in the extra forward pass (`mixin.FORWARD_KEYS`).
"""

import pytest
import torch
from trl_harness import (
    CASES,
    ROWS,
    Run,
    copy_of,
    distance,
    one_step,
    plain,
    policy,
    recommended,
    reference_gradient,
    same_tensors,
    statistics,
    surrogate_of,
)

from tokencredit.losses import importance_ratio


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_that_of_the_policy_loss_with_the_credit(case, micro_batch):
    run = one_step(case, micro_batch)
    (event,), (gradient,) = run.events, run.keep.gradients
    told = plain(event)
    assert told["mask"].shape[0] == ROWS
    assert len({len(ids) for ids in told["response_ids"]}) > 3
    wanted = reference_gradient(policy(), told, surrogate_of(case))
    assert distance(gradient, wanted) < 1e-5
    assert run.trainer.last_credit is event.credit


@pytest.mark.parametrize("case", ["gtpo", "grpo_s", "grpo_s-geometric"])
def test_a_wrong_credit_would_be_seen(case):
    """The comparison above must be able to fail: GRPO's credit gives another gradient."""
    told = plain(one_step(case, 4).events[0])
    right = reference_gradient(policy(), told, surrogate_of(case))
    mean = told["advantage"].sum(1) / told["mask"].sum(1)
    flat = told | {"advantage": mean.unsqueeze(1) * told["mask"]}
    other = told | {"advantage": told["advantage"].sign()}
    if case == "gtpo":
        assert distance(reference_gradient(policy(), flat, surrogate_of(case)), right) > 1e-2
    assert distance(reference_gradient(policy(), other, surrogate_of(case)), right) > 1e-2


def test_token_credit_gives_another_gradient_than_grpo():
    token, flat = one_step("gtpo", 4), one_step("grpo", 4, loss_type="dapo")
    assert distance(token.keep.gradients[0], flat.keep.gradients[0]) > 1e-2
    assert token.events[0].response_ids == flat.events[0].response_ids


@pytest.mark.parametrize("micro_batch", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_off_policy_with_ratios_that_clip(case, micro_batch):
    run = one_step(
        case, micro_batch, num_iterations=2, max_steps=2, optim="sgd", learning_rate=0.04
    )
    (event,) = run.events
    told, surrogate = plain(event), surrogate_of(case)
    width = told["mask"].shape[1]
    before, after = (_loaded(weights) for weights in run.keep.weights)
    with torch.no_grad():
        old, _ = statistics(before, told["prompt_ids"], told["response_ids"], width)
        new, _ = statistics(after, told["prompt_ids"], told["response_ids"], width)
    ratio = importance_ratio(new, old, told["mask"], surrogate.ratio)
    outside = (ratio > 1 + surrogate.clip_high) & (told["advantage"] > 0)
    outside |= (ratio < 1 - surrogate.clip_low) & (told["advantage"] < 0)
    share = float(outside.sum() / told["mask"].sum())
    assert 0.02 < share < 0.9

    wanted = reference_gradient(before, told, surrogate, old=old)
    assert distance(run.keep.gradients[0], wanted) < 1e-5
    wanted = reference_gradient(after, told, surrogate, old=old)
    assert distance(run.keep.gradients[1], wanted) < 2e-5
    if case == "grpo_s":  # the arithmetic mean of the ratios is not the geometric one
        other = reference_gradient(after, told, surrogate_of("grpo_s-geometric"), old=old)
        assert distance(run.keep.gradients[1], other) > 1e-2


def _loaded(weights):
    model = policy()
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_generation_spread_over_two_optimiser_steps(case):
    """Rows are shuffled over the steps; with the weights held still their mean is the whole."""
    run = one_step(case, 4, steps_per_generation=2 * ROWS // 4, max_steps=2, learning_rate=0.0)
    (event,), gradients = run.events, run.keep.gradients
    told = plain(event)
    assert told["mask"].shape[0] == 2 * ROWS
    assert event.entropy_source in (None, "the old-log-probability pass")
    mean = {name: (gradients[0][name] + gradients[1][name]) / 2 for name in gradients[0]}
    assert distance(mean, reference_gradient(policy(), told, surrogate_of(case))) < 1e-5
    assert not same_tensors(gradients[0], gradients[1])


@pytest.mark.parametrize("case", ["gtpo", "grpo_s"])
def test_gradient_checkpointing_changes_nothing(case):
    run = one_step(case, 4, gradient_checkpointing=True)
    wanted = reference_gradient(policy(), plain(run.events[0]), surrogate_of(case))
    assert distance(run.keep.gradients[0], wanted) < 1e-5


def test_the_copy_is_plain():
    rule, fields = recommended("gtpo")
    run = Run(rule, **fields).train()
    assert "fused" not in getattr(copy_of(run.trainer.model).forward, "__name__", "")
