"""Every loss of TRL takes the credit, and the check of the first loss passes for each."""

import math

import pytest
import torch
from peft import LoraConfig
from trl_harness import Run, recommended

LOSSES = ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "vespo", "luspo"]
CLIPPED = ["grpo", "dr_grpo", "dapo", "bnpo", "luspo"]


def sound(run):
    assert run.trainer._loss_checked
    line = run.log[0]
    assert math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"])
    assert line["grad_norm"] > 0
    for gradient in run.keep.gradients:
        assert all(bool(g.isfinite().all()) for g in gradient.values())
    return run


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_gtpo(loss_type, iterations):
    sound(Run("gtpo", loss_type=loss_type, num_iterations=iterations, max_steps=2).train())


@pytest.mark.parametrize("ratio", ["arithmetic", "geometric"])
@pytest.mark.parametrize("loss_type", CLIPPED)
def test_grpo_s(loss_type, ratio):
    rule, _ = recommended("grpo_s", ratio=ratio)
    sound(Run(rule, loss_type=loss_type, num_iterations=2, max_steps=2).train())


SETTINGS = {
    "delta": {"delta": 2.0},
    "entropy": {"entropy_coef": 0.01},
    "scale": {"scale_rewards": "none"},
    "aggregation": {"multi_objective_aggregation": "normalize_then_sum"},
    "quantile": {"top_entropy_quantile": 0.3},
    "off policy mask": {"off_policy_mask_threshold": 0.1, "num_iterations": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "reentrant": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_gtpo_beside_other_settings(setting):
    sound(Run("gtpo", max_steps=2, **SETTINGS[setting]).train())


@pytest.mark.parametrize("setting", ["delta", "entropy", "scale", "checkpointing"])
def test_grpo_s_beside_other_settings(setting):
    sound(Run("grpo_s", max_steps=2, loss_type="grpo", **SETTINGS[setting]).train())


@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_lora(name):
    rule, fields = recommended(name)
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    run = sound(Run(rule, more={"peft_config": lora}, max_steps=2, **fields).train())
    assert all("lora" in key for key in run.keep.gradients[0])


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("name", ["gtpo", "grpo_s"])
def test_bf16_autocast(name, iterations):
    rule, fields = recommended(name)
    run = sound(Run(rule, bf16=True, max_steps=2, num_iterations=iterations, **fields).train())
    event = run.events[0]
    assert event.credit.advantage.dtype == torch.float32
    assert bool(event.credit.advantage.isfinite().all())


def test_one_token_responses():
    from trl_harness import EOS, fixed_rollouts

    rule, fields = recommended("gtpo")

    def short(call, row):
        return [EOS] if row % 3 else [3 + row % 5]

    sound(Run(rule, rollout=fixed_rollouts(make=short), **fields).train())
