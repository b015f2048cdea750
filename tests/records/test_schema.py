"""The record: what it accepts, and that a line gives it back exactly."""

import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokencredit.errors import InputError
from tokencredit.records import CreditRecord, Record, RecordError, parse_record, to_json
from tokencredit.records.reading import parse_line

# Every code point, lone surrogates included, and the ones that break naive line handling.
TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=()),
        st.sampled_from('\x00\ud800\udfff\u2028\u2029\x85\u200f\u202e\n\r"\\\ufeff'),
    ),
    max_size=8,
)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
KNOWN_OR_NOT = st.one_of(st.none(), NUMBER)
INTEGER = st.integers(-(2**70), 2**70)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGER, NUMBER, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
MESSAGE = st.builds(
    lambda role, more: {**more, "role": role}, TEXT, st.dictionaries(TEXT, JSON, max_size=2)
)
FLAG = st.sampled_from([None, True, False])
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)


@st.composite
def records(draw: st.DrawFn) -> Record:
    length = draw(st.integers(0, 4))

    def tokens(element: st.SearchStrategy) -> st.SearchStrategy:
        return st.lists(element, min_size=length, max_size=length)

    ids = tokens(st.integers(0, 2**63 - 1))
    texts = tokens(st.one_of(TEXT, st.binary(max_size=4)))
    with_ids, with_texts = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    numbers = tokens(KNOWN_OR_NOT)
    credit = st.builds(
        CreditRecord,
        base=KNOWN_OR_NOT,
        reward=st.one_of(KNOWN_OR_NOT, numbers),
        weight=st.one_of(st.none(), numbers),
        advantage=st.one_of(st.none(), numbers),
    )
    return Record(
        group=draw(st.one_of(TEXT, INTEGER)),
        token_ids=draw(ids) if with_ids else None,
        tokens=draw(texts) if with_texts else None,
        mask=draw(tokens(st.integers(0, 1))),
        reward=draw(KNOWN_OR_NOT),
        step=draw(st.one_of(st.none(), st.integers(0, 2**40))),
        prompt_id=draw(st.one_of(st.none(), TEXT, INTEGER)),
        prompt=draw(st.one_of(st.none(), TEXT, st.lists(MESSAGE, max_size=2))),
        prompt_token_ids=draw(st.one_of(st.none(), st.lists(st.integers(0, 9), max_size=3))),
        response=draw(st.one_of(st.none(), TEXT)),
        rewards=draw(st.dictionaries(TEXT, KNOWN_OR_NOT, max_size=2)),
        success=draw(FLAG),
        keep=draw(FLAG),
        truncated=draw(FLAG),
        signals=draw(st.dictionaries(TEXT, numbers, max_size=2)),
        credit=draw(st.dictionaries(TEXT, credit, max_size=2)),
        meta=draw(OBJECT),
        # A prefix that no field is near to, so that none is taken for a misspelling.
        extra={f"zz-{key}-zz": value for key, value in draw(OBJECT).items()},
    )


@settings(max_examples=300, deadline=None)
@given(records())
def test_a_line_gives_the_record_back(record: Record):
    text = to_json(record)
    line = text.encode("utf-8") + b"\n"  # encodable, although texts may hold lone surrogates
    assert line.count(b"\n") == 1 and len(text.splitlines()) == 1
    again = parse_line(line, "file:1")
    assert again == record
    assert to_json(again) == text
    assert parse_record(json.loads(text), "file:1") == record


def minimal(**changes: object) -> Record:
    return Record(**{"group": "a", "token_ids": [1, 2], "mask": [1, 0], "reward": 0.5, **changes})


def test_a_pair_of_surrogates_is_the_character_it_stands_for():
    record = minimal(response="\ud83d\ude00", meta={"\ud83d\ude00": ["\ud83d"]})
    assert record.response == "\U0001f600"
    assert record.meta == {"\U0001f600": ["\ud83d"]}


def test_nan_is_unknown_and_infinity_is_refused():
    record = minimal(reward=math.nan, signals={"entropy": [math.nan, 1]})
    assert record.reward is None
    assert record.signals == {"entropy": (None, 1.0)}
    with pytest.raises(InputError, match=r"field 'signals.entropy\[1\]': is infinite"):
        minimal(signals={"entropy": [1.0, math.inf]})
    with pytest.raises(InputError, match=r"field 'reward': is infinite"):
        minimal(reward=10**400)


def test_a_token_that_is_not_utf8_is_bytes_here_and_byte_values_there():
    record = minimal(tokens=["a", b"\xe4\xbd"])
    assert '"tokens":["a",[228,189]]' in to_json(record)
    assert parse_record(json.loads(to_json(record)), "f:1").tokens == ("a", b"\xe4\xbd")


def test_unknown_keys_are_kept():
    line = json.loads(to_json(minimal()))
    line["verifier_log"] = {"lines": [1, None, "x"]}
    line["extra"] = 1
    record = parse_record(line, "f:1")
    assert record.extra == {"verifier_log": {"lines": [1, None, "x"]}, "extra": 1}
    assert json.loads(to_json(record)) == line


@pytest.mark.parametrize(
    ("key", "field"),
    [("sucess", "success"), ("Truncated", "truncated"), ("signal", "signals"), ("token", "tokens")],
)
def test_a_misspelt_optional_field_is_refused(key: str, field: str):
    line = json.loads(to_json(minimal())) | {key: None}
    with pytest.raises(InputError, match=f"f:1: field '{key}': .*did you mean '{field}'"):
        parse_record(line, "f:1")


def test_a_near_name_is_kept_where_the_field_itself_is_there():
    line = json.loads(to_json(minimal(success=True))) | {"successs": 3}
    assert parse_record(line, "f:1").extra == {"successs": 3}


def test_null_stands_for_an_absent_optional_field():
    required = {"schema", "group", "token_ids", "mask", "reward", "extra"}
    names = {entry.name for entry in dataclasses.fields(Record)} - required
    nulls = dict.fromkeys(names)
    assert parse_record(json.loads(to_json(minimal())) | nulls, "f:1") == minimal()


def test_records_are_frozen_and_do_not_share_what_they_were_made_of():
    entropy = [1.0, 2.0]
    meta = {"model": ["a"]}
    record = minimal(signals={"entropy": entropy}, meta=meta)
    entropy[0] = 9.0
    meta["model"].append("b")
    assert record.signals["entropy"] == (1.0, 2.0) and record.meta == {"model": ["a"]}
    with pytest.raises(AttributeError):
        record.reward = 1.0  # type: ignore[misc]


def test_python_gets_the_same_checks():
    for changes, message in [
        ({"mask": [True, False]}, r"field 'mask\[0\]': expected 0 or 1, got true"),
        ({"mask": [1]}, "field 'mask': has 1 value, but the record has 2 token_ids"),
        ({"credit": {"gtpo": {"base": 1.0}}}, "field 'credit.gtpo': expected a CreditRecord"),
        ({"token_ids": None}, "field 'token_ids': is missing, and so is 'tokens'"),
        ({"meta": {"x": math.nan}}, "field 'meta.x': is nan, which JSON cannot hold"),
        ({"meta": {"x": object()}}, "field 'meta.x': expected something JSON can hold"),
        ({"meta": {1: 2}}, "field 'meta': expected text for each key, got 1"),
        ({"meta": {"x": 1 << 2000}}, "field 'meta.x': is an integer of more than 1024 bits"),
    ]:
        with pytest.raises(InputError, match="^record: " + message):
            minimal(**changes)
    deep: list = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InputError, match="nested deeper than 64 levels"):
        minimal(meta={"x": deep})


def test_the_error_survives_pickling_as_workers_send_it():
    error = pickle.loads(pickle.dumps(RecordError("mask", "is missing", "f:3")))
    assert (str(error), error.field) == ("f:3: field 'mask': is missing", "mask")
