"""What tokens are coloured by, and on which scale."""

from __future__ import annotations

import math

import pytest
import torch
from looking import two_methods

from tokencredit.errors import InputError
from tokencredit.records import CreditRecord, Record
from tokencredit.viewer import series as module
from tokencredit.viewer.series import Scale, Series, chosen, level, scales_of, token_values

ENTROPY = Series("entropy", "entropy", None)


def test_names_that_choose():
    known = list(token_values(two_methods()[0]))
    assert [one.key for one in known] == [
        "gtpo.advantage", "gtpo.reward", "grpo_s.advantage", "grpo_s.reward", "entropy",
    ]  # fmt: skip
    for name, key in (
        ("entropy", "entropy"),
        ("advantage", "gtpo.advantage"),
        ("grpo_s", "grpo_s.advantage"),
        ("reward", "gtpo.reward"),
        ("grpo_s.reward", "grpo_s.reward"),
    ):
        assert chosen(name, known).key == key
    with pytest.raises(InputError, match=r"no 'entropie' \(did you mean 'entropy'\?\); there are"):
        chosen("entropie", known)
    with pytest.raises(InputError, match="neither credit nor signals"):
        chosen("entropy", [])


def test_the_range_is_a_quantile_of_what_is_off_the_centre():
    scale = Scale(ENTROPY)
    # 1 .. 100 and many zeros: the 98th of a hundred.
    scale.add(torch.cat([torch.zeros(1000), -torch.arange(1.0, 101.0)]))
    assert (scale.range, scale.largest) == (98.0, 100.0)
    weight = Scale(Series("datc.weight", "weight", "datc"))
    weight.add(torch.tensor([1.0, 1.0, 3.0, 0.5]))
    assert (weight.range, weight.largest) == (2.0, 2.0)
    assert Scale(ENTROPY).range == 1.0


def test_a_long_file_is_thinned_evenly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_KEPT", 1000)
    scale = Scale(ENTROPY)
    for part in torch.arange(1.0, 100_001.0)[torch.randperm(100_000)].split(100):
        scale.add(part)
    assert scale.largest == 100_000
    assert scale.range == pytest.approx(98_000, rel=0.02)


def test_masked_and_unknown_values_are_on_no_scale():
    record = Record(group=0, tokens=["a", "b", "c"], mask=[1, 0, 1], reward=1.0,
                    signals={"entropy": [0.5, 99.0, None]})  # fmt: skip
    scale = scales_of([record])[ENTROPY]
    assert (scale.range, scale.largest) == (0.5, 0.5)


def test_shades():
    assert [level(v, 1.0, 2.0) for v in (1.0, 1.2, 1.2001, 3.0, 9.0, -1.0, 0.999)] == [
        0, 1, 2, 10, 10, -10, -1,
    ]  # fmt: skip
    assert level(math.nan, 0.0, 1.0) is None


def test_a_response_s_own_reward_is_that_of_its_tokens():
    record = Record(group=0, tokens=["a", "b"], mask=[0, 1], reward=1.0,
                    credit={"grpo_s": CreditRecord(base=1.0, reward=1.25)})  # fmt: skip
    assert {s.key: list(v) for s, v in token_values(record).items()} == {
        "grpo_s.reward": [None, 1.25]
    }
