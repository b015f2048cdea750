"""Each kind of malformed input is refused in one line that says where it is."""

import gzip
import json
import os
import re
import sys
from pathlib import Path

import pytest

from tokencredit.errors import InputError, MissingExtraError
from tokencredit.records import read_groups, read_records, reading

GOOD = {"schema": 1, "group": "a", "token_ids": [5, 6], "mask": [1, 1], "reward": 1.0}


def but(*without: str, **changes: object) -> bytes:
    """A good line with some keys changed and some left out."""
    line = {key: value for key, value in (GOOD | changes).items() if key not in without}
    return json.dumps(line).encode()


def raw(old: str, new: str) -> bytes:
    """A good line with a piece of its text replaced."""
    text = json.dumps(GOOD)
    assert old in text
    return text.replace(old, new).encode()


def credit(**entry: object) -> bytes:
    return but(credit={"gtpo": entry})


# what is on the second line, the field, what the message says
LINES = [
    # not a line of JSON
    (b"{", None, "is not JSON: Expecting property name"),
    (b'{"schema": 1, "group": "a', None, "is not JSON: Unterminated string"),
    (json.dumps(GOOD).encode() * 2, None, "is not JSON: Extra data"),
    (b"[1, 2]", None, "expected a JSON object, got a list"),
    (b"null", None, "expected a JSON object, got null"),
    (b"3", None, "expected a JSON object, got 3"),
    (b"\xff" + json.dumps(GOOD).encode(), None, "is not UTF-8 at byte 1 (0xff)"),
    (raw('"a"', '"\\ud800"').replace(b"\\ud800", b"\xed\xa0\x80"), None, "is not UTF-8 at byte"),
    (raw("1.0", "NaN"), None, "holds NaN, which is not JSON; write null"),
    (raw("1.0", "-Infinity"), None, "holds -Infinity, which is not JSON"),
    (raw('"reward"', '"group"'), "group", "is given twice"),
    (but(meta={"x": 0}).replace(b'"x": 0', b'"x": 0, "x": 1'), "x", "is given twice"),
    (b'{"a":' * 100_000, None, "is nested too deeply"),
    (raw("1.0", "1" * 5000), None, "holds a number that cannot be read"),
    # required fields
    (but("schema"), "schema", "is missing; it is required"),
    (but("group"), "group", "is missing; it is required"),
    (but("mask"), "mask", "is missing; it is required"),
    (but("mask", masks=[1, 1]), "mask", "is it the 'masks' of this line?"),
    (but("reward"), "reward", "is missing; it is required"),
    (but("reward", rewrd=1.0), "reward", "is it the 'rewrd' of this line?"),
    (but("token_ids"), "token_ids", "is missing, and so is 'tokens'"),
    (but("token_ids", tokenids=[5, 6]), "token_ids", "is it the 'tokenids' of this line?"),
    # values
    (but(schema=2), "schema", "is 2, written by a newer version of tokencredit"),
    (but(schema=0), "schema", "is 0, which never existed"),
    (but(schema="1"), "schema", "expected an integer, got '1'"),
    (but(schema=True), "schema", "expected an integer, got true"),
    (but(schema=1.0), "schema", "expected an integer, got 1.0"),
    (but(group=None), "group", "expected text or an integer, got null"),
    (but(group=1.5), "group", "expected text or an integer, got 1.5"),
    (but(group=True), "group", "expected text or an integer, got true"),
    (but(step=-1), "step", "is -1; a step is 0 or more"),
    (but(step="3"), "step", "expected an integer, got '3'"),
    (but(prompt_id=[1]), "prompt_id", "expected text or an integer, got a list"),
    (but(prompt=3), "prompt", "expected text or a list of messages, got 3"),
    (but(prompt=["hi"]), "prompt[0]", "expected an object, got 'hi'"),
    (but(prompt=[{"content": "hi"}]), "prompt[0].role", "expected the role"),
    (but(prompt_token_ids=[1, None]), "prompt_token_ids[1]", "expected a token id, an integer"),
    (but(response=["x"]), "response", "expected text, got a list"),
    (but(token_ids=[5, -6]), "token_ids[1]", "is -6; a token id is 0 or more"),
    (but(token_ids=[5, 2**63]), "token_ids[1]", "below 2**63"),
    (but(token_ids=[5, 6.0]), "token_ids[1]", "expected a token id, an integer, got 6.0"),
    (but(token_ids=[True, 6]), "token_ids[0]", "expected a token id, an integer, got true"),
    (but(token_ids="56"), "token_ids", "expected a list, got '56'"),
    (but(tokens=["a"]), "tokens", "has 1 value, but the record has 2 token_ids"),
    (but(tokens=["a", 6]), "tokens[1]", "expected text or a list of byte values, got 6"),
    (but(tokens=["a", [256]]), "tokens[1]", "must hold byte values, integers 0 to 255"),
    (but(tokens=["a", [True]]), "tokens[1]", "must hold byte values, integers 0 to 255"),
    (but(mask=[1]), "mask", "has 1 value, but the record has 2 token_ids"),
    (but("token_ids", tokens=["a"]), "mask", "has 2 values, but the record has 1 tokens"),
    (but(mask=[1, 2]), "mask[1]", "expected 0 or 1, got 2"),
    (but(mask=[1, True]), "mask[1]", "expected 0 or 1, got true"),
    (but(mask=[1, 0.0]), "mask[1]", "expected 0 or 1, got 0.0"),
    (but(mask=[1, [0]]), "mask[1]", "expected 0 or 1, got a list"),
    (but(mask=None), "mask", "expected a list, got null"),
    (but(reward="1"), "reward", "expected a number or null, got '1'"),
    (but(reward=True), "reward", "expected a number or null, got true"),
    (raw("1.0", "1e999"), "reward", "is infinite"),
    (but(rewards=[1.0]), "rewards", "expected an object, got a list"),
    (but(rewards={"format": "x"}), "rewards.format", "expected a number or null, got 'x'"),
    (but(success=1), "success", "expected true, false or null, got 1"),
    (but(keep="yes"), "keep", "expected true, false or null, got 'yes'"),
    (but(truncated=0), "truncated", "expected true, false or null, got 0"),
    (but(signals=[1.0]), "signals", "expected an object, got a list"),
    (but(signals={"entropy": 1.0}), "signals.entropy", "expected a list, got 1.0"),
    (but(signals={"entropy": [1.0]}), "signals.entropy", "has 1 value, but the record has 2"),
    (but(signals={"entropy": [1, "x"]}), "signals.entropy[1]", "a number or null, got 'x'"),
    (
        but(signals={"e": [1, 7.5]}).replace(b"7.5", b"1e400"),
        "signals.e[1]",
        "is infinite; numbers must be finite, null = unknown",
    ),
    (but(credit=[]), "credit", "expected an object, got a list"),
    (but(credit={"gtpo": 1.0}), "credit.gtpo", "expected an object, got 1.0"),
    (credit(advantages=[1, 1]), "credit.gtpo.advantages", "did you mean 'advantage'?"),
    (credit(base="x"), "credit.gtpo.base", "expected a number or null, got 'x'"),
    (credit(reward=[1]), "credit.gtpo.reward", "has 1 value, but the record has 2 token_ids"),
    (credit(weight=[1, 1, 1]), "credit.gtpo.weight", "has 3 values"),
    (credit(advantage=[1, True]), "credit.gtpo.advantage[1]", "a number or null, got true"),
    (but(meta="model"), "meta", "expected an object, got 'model'"),
    (but(sucess=True), "sucess", "did you mean 'success'?"),
]


@pytest.mark.parametrize(("line", "field", "says"), LINES, ids=range(len(LINES)))
def test_malformed_lines(tmp_path: Path, line: bytes, field: str | None, says: str):
    path = tmp_path / "rollouts.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    stream = read_records(path)
    assert next(stream).group == "a"
    with pytest.raises(InputError) as caught:
        next(stream)
    message = str(caught.value)
    place = f"{path}:2: " + (f"field '{field}': " if field else "")
    assert message.startswith(place) and says in message
    assert "\n" not in message and len(message) < len(str(path)) + 300
    assert "field" not in message or field


def line(**changes: object) -> bytes:
    return but(**changes) + b"\n"


FILES = [
    ("f.jsonl", line() + b"\n" + line(), ":2: the line is empty, but records follow; remove it"),
    ("f.jsonl", b"\xef\xbb\xbf" + line(), ":1: begins with a byte-order mark"),
    (
        "f.jsonl",
        line().decode().encode("utf-16"),
        ":1: is not UTF-8 at byte 1 .0xff.; the file is UTF-16",
    ),
    ("f.jsonl", line() + line()[:20], ":2: is not JSON: .*the last line is cut off"),
    ("f.jsonl.gz", gzip.compress(line() * 50)[:-12], "the compressed file is cut off"),
    ("f.jsonl.gz", line(), ":1: cannot be read .Not a gzipped file"),
    ("f.jsonl.gz", gzip.compress(line() * 50)[:-5] + b"\0" * 5, "cannot be read .CRC check failed"),
    ("f.jsonl.gz", gzip.compress(line())[:10] + b"\xff" * 40, ":1: the compressed file is damaged"),
]


@pytest.mark.parametrize(("name", "content", "says"), FILES)
def test_malformed_files(tmp_path: Path, name: str, content: bytes, says: str):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        list(read_records(path))
    message = str(caught.value)
    assert message.startswith(str(path)) and re.search(says, message) and "\n" not in message


def test_damaged_zstd(tmp_path: Path):
    zstandard = pytest.importorskip("zstandard")
    whole = zstandard.compress(b"".join(line(group=i) for i in range(50)))
    path = tmp_path / "f.jsonl.zst"
    for content, says in [
        (whole[:-10], "the compressed file is cut off"),
        (whole + whole[:10], "the compressed file is cut off"),
        (line(), "the compressed file is damaged"),
        (whole[:30] + b"\xff" * 30 + whole[60:], "the compressed file is damaged"),
    ]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=says):
            list(read_records(path))
    path.write_bytes(whole + zstandard.compress(line(group="last")))
    assert [record.group for record in read_records(path)] == [*range(50), "last"]


def test_the_zstd_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tokencredit\[zstd\]'"):
        list(read_records(tmp_path / "f.jsonl.zst"))


def test_files_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(InputError, match=r"missing.jsonl: cannot be read .No such file"):
        list(read_records(tmp_path / "missing.jsonl"))
    with pytest.raises(InputError, match=r"cannot be read .Is a directory"):
        list(read_records(tmp_path))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_records("a\0b"))
    if os.geteuid():
        path = tmp_path / "f.jsonl"
        path.write_bytes(line())
        path.chmod(0)
        with pytest.raises(InputError, match=r"cannot be read .Permission denied"):
            list(read_records(path))


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reading, "LONGEST_LINE", 1000)
    path = tmp_path / "f.jsonl"
    path.write_bytes(line() + b"x" * 5000)
    with pytest.raises(InputError, match=":2: the line is longer than 1000 bytes"):
        list(read_records(path))


def test_a_group_that_reappears_names_both_lines(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b"".join(line(group=group) for group in ["a", "b", "b", "c", "b", "c"]))
    groups = read_groups(path)
    assert [len(next(groups)) for _ in range(3)] == [1, 2, 1]
    with pytest.raises(InputError, match=r"f.jsonl:5: field 'group': 'b' began on line 2 and"):
        next(groups)


def test_text_and_integer_groups_are_different(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(line(group=1) + line(group="1"))
    assert [group[0].group for group in read_groups(path)] == [1, "1"]


def test_empty_lines_at_the_end_and_an_empty_file_are_fine(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(line().rstrip() + b"\r\n\n  \n")
    assert len(list(read_groups(path))) == 1
    path.write_bytes(b"")
    assert list(read_groups(path)) == []
