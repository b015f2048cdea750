"""The same rollouts, the same credit as in TRL: from records that `CreditGRPOTrainer` wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: `make verl` makes its environment")

from verl_harness import advantages, algorithm, at_the_end

from tokencredit.engines.verl.estimators import Beside
from tokencredit.records import read_records

GOLDEN = Path(__file__).parents[2] / "doctor" / "golden"


@pytest.mark.parametrize("method", ["grpo", "gtpo", "grpo_s"])
def test_the_credit_that_the_trl_trainer_recorded(method):
    import numpy as np
    from verl import DataProto

    records = list(read_records(GOLDEN / f"{method}.jsonl.gz"))
    assert len(records) >= 48
    width = max(len(r.mask) for r in records)
    mask = torch.zeros(len(records), width, dtype=torch.long)
    entropy = torch.full((len(records), width), float("nan"))
    want = torch.zeros(len(records), width)
    for i, record in enumerate(records):
        n = len(record.mask)
        mask[i, :n] = torch.tensor(record.mask)
        want[i, :n] = torch.tensor(record.credit[method].advantage)
        if method != "grpo":
            entropy[i, :n] = torch.tensor([e or float("nan") for e in record.signals["entropy"]])
    rewards = at_the_end([r.reward for r in records], mask)
    data = DataProto.from_dict(
        tensors={"token_level_rewards": rewards, "response_mask": mask},
        non_tensors={
            "uid": np.array([r.group for r in records], dtype=object),
            "right": np.array([r.success for r in records], dtype=object),
        },
    )
    got = advantages(
        data, f"tokencredit_{method}", algorithm(success_from="right"), Beside(entropy=entropy)
    )
    assert torch.allclose(got, want, atol=2e-6) and bool(want.any())
