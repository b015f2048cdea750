from __future__ import annotations

import pytest
import torch

from tokencredit import Rollouts, assign
from tokencredit.errors import MissingSignalError
from tokencredit.lab.credits import Oracle, Uniform


def batch(*, base: bool, marked: bool = True) -> Rollouts:
    drawn = torch.Generator().manual_seed(0)
    mask = torch.rand(8, 6, generator=drawn) < 0.7
    mask[:, 0] = True
    marks = (torch.rand(8, 6, generator=drawn) < 0.4).float()
    marks[3] = 0.0
    marks[~mask] = torch.nan  # never read
    return Rollouts(
        torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
        [0, 0, 0, 0, 1, 1, 1, 1],
        mask,
        base=torch.linspace(-1.0, 1.0, 8) if base else None,
        signals={"oracle": marks} if marked else {},
    )


@pytest.mark.parametrize("base", [False, True])
def test_the_oracle_spreads_the_base_over_the_marked_tokens(base: bool):
    rollouts = batch(base=base)
    credit = assign(rollouts, Oracle())
    mask, marks = rollouts.mask, rollouts.signals["oracle"]
    mean = (credit.advantage * mask).sum(dim=1) / mask.sum(dim=1)
    assert torch.allclose(mean, credit.base, atol=1e-6)
    assert bool((credit.advantage * credit.base.unsqueeze(1) >= 0).all())
    for row in range(8):
        chosen = mask[row] & (marks[row] > 0)
        if chosen.any():
            assert bool((credit.advantage[row][~chosen] == 0).all())
        else:
            assert torch.allclose(credit.advantage[row][mask[row]], credit.base[row])
    assert bool((credit.advantage[~mask] == 0).all())


@pytest.mark.parametrize("base", [False, True])
def test_uniform_is_the_base_at_every_token(base: bool):
    rollouts = batch(base=base)
    credit = assign(rollouts, Uniform())
    assert torch.equal(credit.advantage, credit.base.unsqueeze(1) * rollouts.mask)


def test_the_bases_default_to_grpo():
    rollouts = batch(base=False)
    expected = assign(rollouts, "grpo").base
    for rule in (Oracle(), Uniform()):
        assert torch.allclose(assign(rollouts, rule).base, expected)


def test_the_oracle_needs_its_marks():
    with pytest.raises(MissingSignalError, match="oracle"):
        assign(batch(base=True, marked=False), Oracle())
