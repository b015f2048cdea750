"""Files that freeze the format: they must be read, and written again, byte for byte, for ever.

A change that fails here breaks files that people have. Make a new schema version instead, and
add files for it; never edit those of an old one.
"""

import json
from pathlib import Path

import pytest

from tokencredit.records import RecordWriter, read_groups, read_records, to_json

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(GOLDEN.glob("*.jsonl"))


def test_every_kind_is_there():
    assert [path.stem for path in FILES] == [
        "v1_byte_tokens",
        "v1_full",
        "v1_messages",
        "v1_minimal",
        "v1_nulls",
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_files_are_read_and_written_unchanged(path: Path, tmp_path: Path):
    copy = tmp_path / path.name
    with RecordWriter(copy) as writer:
        for group in read_groups(path):
            for record in group:
                writer.write(record)
    assert copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_files_hold_what_any_json_reader_sees(path: Path):
    lines = path.read_bytes().split(b"\n")[:-1]
    for line, record in zip(lines, read_records(path), strict=True):
        assert json.loads(to_json(record)) == json.loads(line)


def test_what_the_full_file_means():
    right, wrong = read_records(GOLDEN / "v1_full.jsonl")
    assert (right.group, right.step, right.prompt_id, right.prompt) == ("p1-s3", 3, "p1", "1+1=")
    assert right.prompt_token_ids == (16, 10, 16, 28)
    assert (right.response, right.token_ids) == ("2!", (17, 0, 2))
    assert right.tokens == ("2", "!", "<|end|>") and right.mask == (1, 1, 0)
    assert right.reward == 1.0 and right.rewards == {"correct": 1.0, "format": 0.25}
    assert (right.success, right.keep, right.truncated) == (True, True, False)
    assert (wrong.success, wrong.keep, wrong.truncated) == (False, False, True)
    assert right.signals["entropy"] == (0.1, 1.25, None)
    assert right.credit["gtpo"].base == 0.5
    assert right.credit["grpo_s"].reward == 1.05
    assert right.credit["datc"].weight == (0.5, 1.5, None)
    assert right.credit["datc"].advantage == (0.25, 0.75, 0.0)
    assert right.meta["credit"]["gtpo"]["options"]["alpha2"] == 0.1


def test_what_the_other_files_mean():
    (tokens,) = read_records(GOLDEN / "v1_byte_tokens.jsonl")
    assert tokens.tokens == (b"\xe4\xbd", b"\xa0", "é", "")
    (nulls,) = read_records(GOLDEN / "v1_nulls.jsonl")
    assert nulls.reward is None and nulls.signals["work"] == (0.0, None)
    assert nulls.extra == {"verifier": {"lines": [1, None]}}
    (messages,) = read_records(GOLDEN / "v1_messages.jsonl")
    assert messages.response == 'line\nbreak\t\u2028\x00\ud800 "quoted" \\'
    assert [message["role"] for message in messages.prompt] == ["system", "user", "assistant"]
