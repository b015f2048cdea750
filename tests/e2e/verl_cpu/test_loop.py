"""verl's whole loop on CPU: two FSDP2 ranks over gloo, Ray, TransferQueue, verl's PPO loss.

A tiny policy, Hugging Face generation in place of vLLM; the rest is verl's own (`loop.py`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("verl") is None or find_spec("transfer_queue") is None,
        reason="verl is not installed: `make verl` makes its environment",
    ),
]
LOOP = Path(__file__).with_name("loop.py")
STEPS = 6
ACTOR = "actor_rollout_ref.actor"

RUNS = {
    # Tolerances of the advantage: in float32 verl's entropies are those of another forward pass;
    # in bfloat16, its default, they come in steps of 1/32 nat.
    "gtpo": (
        [
            "algorithm.adv_estimator=tokencredit_gtpo",
            "+algorithm.tokencredit.success_from=acc",
            "+algorithm.tokencredit.alpha2=1.0",
            f"++{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32}}",
        ],
        1e-5,
    ),
    "grpo_s": (
        [
            "algorithm.adv_estimator=tokencredit_grpo_s",
            f"{ACTOR}.policy_loss.loss_mode=tokencredit_sequence_arithmetic",
            f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        ],
        2e-3,
    ),
}


@pytest.mark.parametrize("method", RUNS)
def test_the_reward_rises(method: str, tmp_path: Path) -> None:
    overrides, tolerance = RUNS[method]
    done = subprocess.run(
        [sys.executable, str(LOOP), str(tmp_path), str(STEPS), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"RAY_DEDUP_LOGS": "1"},
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["data"] for line in lines]
    assert len(steps) == STEPS
    scores = [step["critic/score/mean"] for step in steps]
    print(f"{method}: mean score by step {[round(s, 3) for s in scores]}")
    # 48 responses a step; chance moves their mean score by some .02.
    assert sum(scores[-2:]) / 2 > sum(scores[:2]) / 2 + 0.1, scores
    for step in steps:
        # Whole groups; the 16 rows that verl appends count nowhere.
        assert step["credit/responses"] == 48 and step["credit/groups"] == 6
        assert step["check/padding_rows"] == 16
        assert step["credit/unknown_tokens"] == 0
        assert step["check/advantage_error"] < tolerance, step["check/advantage_error"]
    # What is compared would show an alignment off by one.
    assert steps[0]["check/shifted_error"] > 1e-4
