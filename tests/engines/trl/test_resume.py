"""A run in two halves ends with the weights of an undisturbed one.

Three prompts a step of six: without `num_iterations` the halves meet inside the second epoch.
"""

import pytest
import torch
from trl_harness import Run, policy, recommended, same_tensors


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gtpo", {}),
        ("grpo_s", {}),
        ("dapo", {"num_iterations": 3}),
        ("gtpo", {"num_iterations": 3}),
    ],
)
def test_resume(tmp_path, name, options):
    rule, fields = recommended(name)
    fields |= options | {"rollout": None, "save_steps": 3, "save_strategy": "steps"}

    def start(folder, steps):
        torch.manual_seed(11)
        return Run(rule, folder=folder, max_steps=steps, **fields)

    whole = start(tmp_path / "whole", 6).train()
    half = start(tmp_path / "half", 6)
    half.trainer.args.max_steps = 3
    half.train()
    second = start(tmp_path / "half", 6)
    torch.manual_seed(99)  # the random state comes from the checkpoint
    second.trainer.train(resume_from_checkpoint=str(tmp_path / "half" / "checkpoint-3"))
    assert second.trainer.state.global_step == 6
    assert same_tensors(whole.trainer.model.state_dict(), second.trainer.model.state_dict())
    assert not same_tensors(policy().state_dict(), second.trainer.model.state_dict())
    steps = [event.step for event in whole.events]
    assert [e.step for e in half.events] + [e.step for e in second.events] == steps
    for a, b in zip(whole.events, half.events + second.events, strict=True):
        assert a.response_ids == b.response_ids
        assert torch.equal(a.credit.advantage, b.credit.advantage)
