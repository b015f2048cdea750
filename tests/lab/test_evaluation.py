import pytest
import torch

from tokencredit.errors import InputError
from tokencredit.lab import Countdown, Evaluation, evaluate, new_policy, tokenizer_for

TASK = Countdown()


def test_the_interval_is_wilsons():
    # n = 1024, p = 1/2: half width 1.959964 / (1 + z^2/n) * sqrt(1/4096 + z^2/(4 n^2)),
    # z^2 = 3.841459: 1.953476... * 0.0156543 = 0.030567.
    low, high = Evaluation(512, 1024).interval
    assert (low, high) == pytest.approx((0.469433, 0.530567), abs=2e-6)
    # No success in 10: 0 to z^2 / (n + z^2) = 3.841459 / 13.841459.
    assert Evaluation(0, 10).interval == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert Evaluation(10, 10).interval == pytest.approx((0.722467, 1.0), abs=1e-6)


def test_evaluation_repeats_and_leaves_mode_and_random_state():
    model = new_policy("llama", len(TASK.vocabulary), seed=0, layers=1, width=16).train()
    before = torch.get_rng_state()
    one, same = (evaluate(model, tokenizer_for(TASK), TASK, prompts=32, seed=3) for _ in "12")
    assert one == same
    assert one.total == 32
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_no_prompts_are_refused():
    with pytest.raises(InputError, match="prompts=0"):
        evaluate(None, None, TASK, prompts=0, seed=0)
