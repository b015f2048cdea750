"""With credit=None the trainer is GRPOTrainer, bit for bit."""

import pytest
import torch
from peft import LoraConfig
from trl import GRPOTrainer
from trl_harness import (
    Run,
    copy_of,
    dataset,
    distance,
    fixed_rollouts,
    parity,
    policy,
    same_log,
    same_tensors,
)

from tokencredit import GRPO
from tokencredit.engines.trl import CreditGRPOTrainer

SETTINGS = {
    "fixed": {"max_steps": 3},
    "sampled": {"max_steps": 3, "rollout": None},
    "iterations": {"max_steps": 4, "num_iterations": 2, "rollout": None},
    "late": {"max_steps": 4, "steps_per_generation": 12},
    "sequence": {"max_steps": 2, "importance_sampling_level": "sequence", "loss_type": "grpo"},
    "truncated": {"max_steps": 2, "mask_truncated_completions": True, "num_iterations": 2},
    "entropy": {"max_steps": 2, "top_entropy_quantile": 0.5, "entropy_coef": 0.01},
    "tools": {"max_steps": 2, "rollout": "tools"},
    "lora": {"max_steps": 3, "beta": 0.04, "num_iterations": 2, "lora": True},
}


def trained(trainer, lora=False, rollout="fixed", **options):
    if rollout == "tools":
        rollout = fixed_rollouts(env_mask=True)
    torch.manual_seed(5)
    more = {"peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"])} if lora else {}
    return Run(None, trainer=trainer, rollout=rollout, more=more, **options).train()


@pytest.mark.parametrize("setting", SETTINGS)
def test_without_credit_everything_equals_grpo_trainer(setting):
    plain = trained(GRPOTrainer, **SETTINGS[setting])
    ours = trained(CreditGRPOTrainer, **SETTINGS[setting])
    assert len(plain.keep.gradients) == SETTINGS[setting]["max_steps"]
    for a, b in zip(plain.keep.gradients, ours.keep.gradients, strict=True):
        assert same_tensors(a, b)
    assert same_log(plain.log, ours.log)
    assert same_tensors(plain.trainer.model.state_dict(), ours.trainer.model.state_dict())
    start = trained(GRPOTrainer, **(SETTINGS[setting] | {"max_steps": 1})).keep.weights[0]
    assert not same_tensors(start, ours.trainer.model.state_dict())


def test_without_credit_nothing_is_formed_or_told():
    run = trained(CreditGRPOTrainer)
    assert run.trainer.last_credit is None and not run.events
    assert not any(k.startswith("credit/") for k in run.log[0])


def test_grpo_credit_with_trl_guard_equals_trl_in_value():
    """GRPO with TRL's 1e-4 in the denominator is TRL's own advantage."""
    plain = trained(GRPOTrainer, max_steps=2, loss_type="grpo", optim="sgd")
    ours = Run(GRPO(eps=1e-4), max_steps=2, loss_type="grpo", optim="sgd").train()
    for a, b in zip(ours.keep.gradients, plain.keep.gradients, strict=True):
        assert distance(a, b) < 1e-5
    assert (ours.events[0].rollouts.base - ours.events[0].credit.base).abs().max() < 1e-6


def test_helpers_are_sound():
    assert same_tensors(policy().state_dict(), copy_of(policy()).state_dict())
    assert len(dataset()) == 6 and parity([[1], [2]]) == [1.0, 0.0]
