"""What tokens are coloured by, and on which scale."""

from __future__ import annotations

import math

import pytest
import torch
from looking import two_methods

from tokencredit.errors import InputError
from tokencredit.records import CreditRecord, Record
from tokencredit.viewer import series as module
from tokencredit.viewer.series import (
    Scale,
    Series,
    chosen,
    first_choice,
    level,
    scales_of,
    token_values,
)

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


def test_a_signal_called_like_credit_is_another_series():
    record = Record(group=0, tokens=["a"], mask=[1], reward=1.0,
                    signals={"gtpo.advantage": [7.0], "": [1.0]},
                    credit={"gtpo": CreditRecord(base=1.0, advantage=[0.5])})  # fmt: skip
    known = token_values(record)
    assert len(known) == len({series.id for series in known}) == 3
    assert known[chosen("gtpo.advantage", known)] == (0.5,)
    assert [series.title for series in known][2] == '""'


def test_what_is_shown_if_nobody_says():
    work, other = Series("work", "work", None), Series("x.reward", "reward", "x")
    ours = Series("y.advantage", "advantage", "y")
    assert first_choice([other, work, ours]) == ours
    assert first_choice([other, work]) == work
    assert first_choice([other]) == other
    assert first_choice([]) is None
    # A signal of that name is no advantage.
    assert first_choice([Series("advantage", "advantage", None), ours]) == ours


def test_the_range_is_a_quantile_of_what_is_off_the_centre():
    scale = Scale()
    # 1 .. 100 and many zeros: the 98th of a hundred.
    scale.add(torch.cat([torch.zeros(1000), -torch.arange(1.0, 101.0)]))
    assert (scale.range, scale.least, scale.most) == (98.0, -100.0, 0.0)
    assert scale.ends(98.0) == (-98.0, 98.0)
    assert (Scale().range, Scale().least) == (1.0, None)


def test_weights_are_as_far_from_one_as_their_inverses():
    scale = Scale(factor=True)
    scale.add(torch.tensor([1.0, 1.0, 4.0, 0.5, math.nan]))
    assert scale.range == pytest.approx(math.log(4))
    assert scale.ends(scale.range) == pytest.approx((0.25, 4.0))
    assert (scale.least, scale.most) == (0.5, 4.0)
    scale.add(torch.tensor([0.0, -1.0]))  # no logarithm, and drawn at the lower end
    assert scale.range == pytest.approx(math.log(4)) and scale.least == -1.0
    shades = [level(v, math.log(4), factor=True) for v in (0.25, 0.5, 1.0, 2.0, 9.0, 0.0, -1.0)]
    assert shades == [-10, -5, 0, 5, 10, -10, -10]


def test_a_long_file_is_thinned_evenly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_KEPT", 1000)
    scale = Scale()
    for part in torch.arange(1.0, 100_001.0)[torch.randperm(100_000)].split(100):
        scale.add(part)
    assert (scale.least, scale.most) == (1.0, 100_000.0)
    assert scale.range == pytest.approx(98_000, rel=0.02)


def test_masked_and_unknown_values_are_on_no_scale():
    record = Record(group=0, tokens=["a", "b", "c"], mask=[1, 0, 1], reward=1.0,
                    signals={"entropy": [0.5, 99.0, None]})  # fmt: skip
    scale = scales_of([record])[ENTROPY]
    assert (scale.range, scale.least, scale.most) == (0.5, 0.5, 0.5)


def test_shades():
    assert [level(v, 2.0) for v in (0.0, 0.2, 0.2001, 2.0, 8.0, -2.0, -0.001)] == [
        0, 1, 2, 10, 10, -10, -1,
    ]  # fmt: skip
    assert level(math.nan, 1.0) is None


def test_a_response_s_own_reward_is_that_of_its_tokens():
    record = Record(group=0, tokens=["a", "b"], mask=[0, 1], reward=1.0,
                    credit={"grpo_s": CreditRecord(base=1.0, reward=1.25)})  # fmt: skip
    assert {s.key: list(v) for s, v in token_values(record).items()} == {
        "grpo_s.reward": [None, 1.25]
    }
