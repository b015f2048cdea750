"""Records to rollouts, and credit to records."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokencredit import Credit, assign
from tokencredit.errors import InputError
from tokencredit.records import (
    Record,
    compact,
    parse_record,
    records_with_credit,
    rollouts_from_records,
    to_json,
)


def record(group: str = "a", length: int = 2, reward: float | None = 1.0, **more: object) -> Record:
    made = {"token_ids": list(range(5, 5 + length)), "mask": [1] * length, **more}
    return Record(group=group, reward=reward, **made)


def floats(value: torch.Tensor) -> list[str]:
    """As text, so that NaN equals NaN."""
    return [str(x) for x in value.flatten().tolist()]


def test_records_become_rollouts():
    rollouts = rollouts_from_records(
        [
            record("a", 3, 1.0, mask=[1, 0, 1], signals={"entropy": [0.5, None, 2.0]}),
            record("b", 1, None, signals={"work": [7.0]}),
            record("a", 2, 0.0, keep=False, truncated=True),
            record("b", 2, 0.25, truncated=True, keep=True),
        ]
    )
    assert rollouts.mask.int().tolist() == [[1, 0, 1], [1, 0, 0], [1, 1, 0], [1, 1, 0]]
    assert rollouts.token_ids is not None
    assert rollouts.token_ids.tolist() == [[5, 6, 7], [5, 0, 0], [5, 6, 0], [5, 6, 0]]
    assert floats(rollouts.rewards) == ["1.0", "nan", "0.0", "0.25"]
    assert rollouts.group.tolist() == [0, 1, 0, 1]
    assert rollouts.real.tolist() == [True, False, True, True]
    assert rollouts.keep.tolist() == [True, True, False, True]
    assert rollouts.success.tolist() == [True, False, False, False]  # the default, above 0.5
    nan = "nan"
    assert floats(rollouts.signals["entropy"]) == ["0.5", nan, "2.0"] + [nan] * 9
    assert floats(rollouts.signals["work"]) == [nan] * 3 + ["7.0"] + [nan] * 8


def test_success_is_of_all_or_of_none():
    said = [record(success=False, reward=1.0), record(success=True, reward=0.0)]
    assert rollouts_from_records(said).success.tolist() == [False, True]
    with pytest.raises(InputError, match="2 of 3 records have 'success'"):
        rollouts_from_records([*said, record()])


def test_token_ids_need_all_records():
    both = [record(), record(token_ids=None, tokens=["a", "b"])]
    assert rollouts_from_records(both).token_ids is None


def test_signals_can_be_chosen():
    one = [record(signals={"entropy": [1.0, 2.0], "work": [1.0, 2.0]})]
    assert list(rollouts_from_records(one, signals=["work", "sum_p2"]).signals) == [
        "work",
        "sum_p2",
    ]


def test_empty_responses_and_no_records():
    rollouts = rollouts_from_records([record(length=0), record(length=0)])
    assert rollouts.mask.shape == (2, 0) and not rollouts.real.any()
    with pytest.raises(InputError, match="no records"):
        rollouts_from_records([])


@given(st.lists(st.floats(width=32, allow_nan=True, allow_infinity=False), max_size=20))
def test_compact_numbers_are_the_same_in_float32(values: list[float]):
    tensor = torch.tensor(values, dtype=torch.float32)
    for short, value in zip(compact(tensor), tensor, strict=True):
        if short is None:
            assert value.isnan()
        else:
            assert torch.tensor(short, dtype=torch.float32) == value


def test_compact_numbers_are_short():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=generator) * 10.0 ** torch.randint(
        -6, 6, (1000,), generator=generator
    )
    for short in compact(values):
        assert len(repr(short).split("e")[0].replace("-", "").replace(".", "").lstrip("0")) <= 9
    assert compact(torch.tensor([0.1, 1e-7, 16777216.0, -0.0, 3.4028235e38])) == [
        0.1,
        1e-7,
        16777216.0,
        0.0,
        3.4028235e38,
    ]
    assert compact(torch.zeros(2, 0)) == [[], []]
    assert compact(torch.tensor(0.1)) == 0.1


def test_credit_is_attached_and_reads_back_as_the_same_float32():
    records = [
        record(
            "a",
            3,
            float(reward),
            mask=[1, 0, 1],
            signals={"entropy": [0.1 + reward, 9.0, 0.7]},
            meta={"model": "m", "credit": {"other": {"version": "0"}}},
        )
        for reward in (1, 0, 1)
    ]
    records.append(record("a", 1, 0.0, signals={"entropy": [0.3]}))
    rollouts = rollouts_from_records(records)
    credit = assign(rollouts, "gtpo")
    with_credit = records_with_credit(records, "gtpo", credit, meta={"version": "1"})
    for row, one in enumerate(with_credit):
        entry = parse_record(json.loads(to_json(one)), "f:1").credit["gtpo"]
        assert len(entry.advantage) == one.length
        advantage = torch.tensor(entry.advantage, dtype=torch.float32)
        assert torch.equal(advantage, credit.advantage[row, : one.length])
        assert torch.tensor(entry.base, dtype=torch.float32) == credit.base[row]
        for column, kept in enumerate(one.mask):
            if kept:
                given = torch.tensor(entry.reward[column], dtype=torch.float32)
                assert given == credit.reward[row, column]
            else:
                assert entry.advantage[column] == 0.0 and entry.reward[column] is None
        assert entry.weight is None
    assert with_credit[0].meta == {
        "model": "m",
        "credit": {"other": {"version": "0"}, "gtpo": {"version": "1"}},
    }
    # and once more under another name: the first entry stays
    twice = records_with_credit(with_credit, "again", credit)
    assert list(twice[0].credit) == ["gtpo", "again"] and twice[0].meta == with_credit[0].meta


def test_a_reward_of_the_whole_response_is_one_number():
    credit = Credit(
        advantage=torch.tensor([[0.5, math.nan]]),
        base=torch.tensor([math.nan]),
        in_loss=torch.tensor([True]),
        reward=torch.tensor([1.1]),
        weight=torch.tensor([[2.0, 3.0]]),
    )
    entry = records_with_credit([record()], "x", credit)[0].credit["x"]
    assert (entry.base, entry.reward, entry.weight, entry.advantage) == (
        None,
        1.1,
        (2.0, 3.0),
        (0.5, None),
    )


def test_credit_of_another_batch_is_refused():
    credit = Credit(torch.zeros(2, 2), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    for records in ([record()], [record(), record(length=3)]):
        with pytest.raises(InputError, match=r"the credit has shape \[2, 2\], but there are"):
            records_with_credit(records, "x", credit)


@pytest.mark.parametrize("field", ["reward", "signals.work"])
def test_numbers_beyond_float32_are_refused_not_taken_for_unknown(field: str):
    """Infinite would mean: not scored, unknown. The record says neither."""
    for value in (1e39, -1e300):
        more = {"reward": value} if field == "reward" else {"signals": {"work": [None, value]}}
        with pytest.raises(InputError, match=f"'{field}': .* is beyond"):
            rollouts_from_records([record(), record(**more)])
    largest = torch.finfo(torch.float32).max
    assert rollouts_from_records([record(reward=largest)]).rewards.tolist() == [largest]


def test_every_rule_with_a_batch_scope_says_so():
    from tokencredit import GRPO, GRPO_S, GTPO, methods

    assert GRPO(scale="batch").whole_batch and not GRPO().whole_batch
    assert GTPO(normalise_over="batch").whole_batch and GRPO_S(share_over="batch").whole_batch
    for method in methods().values():
        for option in method.options:
            if option.choices and "batch" in option.choices:
                assert method.rule(**{option.name: "batch"}).whole_batch, (method.name, option.name)
