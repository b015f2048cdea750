"""Files: whole or not there, growing without damage, and never larger in memory than a group."""

import errno
import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokencredit.errors import InputError, MissingExtraError
from tokencredit.records import (
    Record,
    RecordWriter,
    append_records,
    read_groups,
    read_records,
    to_json,
    truncate_after_step,
)


def record(group: str | int = "a", *, tokens: int = 2, **changes: object) -> Record:
    return Record(
        **{
            "group": group,
            "token_ids": range_list(tokens),
            "mask": [1] * tokens,
            "reward": 0.5,
            **changes,
        }
    )


def range_list(count: int) -> list[int]:
    return list(range(count))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
def test_what_is_written_is_read(tmp_path: Path, ending: str):
    if ending == ".zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"f.jsonl{ending}"
    records = [record("ä"), record("ä", reward=None), record(2, response="\ud800\u2028")]
    with RecordWriter(path) as writer:
        for one in records:
            writer.write(one)
    assert writer.count == 3
    assert list(read_records(path)) == records
    assert list(read_groups(path)) == [tuple(records[:2]), tuple(records[2:])]
    assert names(tmp_path) == [path.name]
    magic = {"": b'{"s', ".gz": b"\x1f\x8b\x08", ".zst": b"\x28\xb5\x2f"}[ending]
    assert path.read_bytes()[:3] == magic


def test_compressed_files_are_the_same_each_time(tmp_path: Path):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        with RecordWriter(tmp_path / name) as writer:
            writer.write(record())
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    plain = gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes())
    assert plain == to_json(record()).encode() + b"\n"


def test_standard_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "f.jsonl"
    append_records(path, [record("a"), record("b")])
    with path.open("r") as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert [group[0].group for group in read_groups("-")] == ["a", "b"]
    with pytest.raises(InputError, match="not to standard output"), RecordWriter("-"):
        pass


def test_nothing_is_there_before_the_end_and_nothing_after_a_failure(tmp_path: Path):
    path = tmp_path / "f.jsonl.gz"
    with pytest.raises(KeyboardInterrupt), RecordWriter(path) as writer:
        writer.write(record())
        assert not path.exists()
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_failure_leaves_the_file_that_was_there(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    append_records(path, [record("old")])
    says = r"f.jsonl: exists already; remove it"
    with pytest.raises(InputError, match=says), RecordWriter(path):
        pass
    with pytest.raises(RuntimeError), RecordWriter(path, overwrite=True) as writer:
        writer.write(record("new"))
        raise RuntimeError
    assert [r.group for r in read_records(path)] == ["old"] and names(tmp_path) == ["f.jsonl"]
    with RecordWriter(path, overwrite=True) as writer:
        writer.write(record("new"))
    assert [r.group for r in read_records(path)] == ["new"] and names(tmp_path) == ["f.jsonl"]


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    with pytest.raises(InputError, match="exists already"), RecordWriter(path) as writer:
        writer.write(record("mine"))
        append_records(path, [record("theirs")])
    assert [r.group for r in read_records(path)] == ["theirs"] and names(tmp_path) == ["f.jsonl"]


def test_a_link_is_followed(tmp_path: Path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "f.jsonl"
    link.symlink_to(tmp_path / "there" / "real.jsonl")
    with RecordWriter(link) as writer:
        writer.write(record())
    assert link.is_symlink() and names(tmp_path / "there") == ["real.jsonl"]


def test_places_that_cannot_be_written(tmp_path: Path):
    for path, says in [
        (tmp_path, "is a folder; give a file name"),
        (Path("/dev/null"), "is not a regular file"),
        (tmp_path / "no" / "f.jsonl", "cannot be written .No such file.*make its folder first"),
    ]:
        with pytest.raises(InputError, match=says), RecordWriter(path, overwrite=True):
            pass
    if os.geteuid():
        tmp_path.chmod(0o500)
        says = r"Permission denied.*choose a folder"
        with pytest.raises(InputError, match=says), RecordWriter(tmp_path / "f.jsonl"):
            pass
        tmp_path.chmod(0o700)


def test_the_zstd_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(MissingExtraError, match="zstd"), RecordWriter(tmp_path / "f.jsonl.zst"):
        pass
    assert names(tmp_path) == []


def test_the_writer_refuses_what_the_reader_would(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    with RecordWriter(path) as writer:
        for group in ("a", "b"):
            writer.write(record(group))
        with pytest.raises(InputError, match=r"f.jsonl:3: field 'group': 'a' began on line 1"):
            writer.write(record("a"))
        writer.write(record("b"))
    assert [r.group for r in read_records(path)] == ["a", "b", "b"]
    with pytest.raises(InputError, match="write inside `with"):
        writer.write(record("c"))


class FullDisk:
    """A file on a disk that has room for so many bytes."""

    def __init__(self, file: object, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        taken = min(len(data), self._room)
        self._room -= taken
        self._file.write(data[:taken])
        if taken < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened = Path.open

    def open_full(self: Path, mode: str = "r", *args: object, **more: object) -> object:
        file = opened(self, mode, *args, **more)
        return file if mode in ("r", "rb") else FullDisk(file, room=100)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        yield


@pytest.mark.parametrize("ending", ["", ".gz", ".zst"])
@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_nothing(tmp_path: Path, ending: str):
    if ending == ".zst":
        pytest.importorskip("zstandard")
    path = tmp_path / f"f.jsonl{ending}"
    says = r"cannot be written \(No space left on device\); free some space"
    with pytest.raises(InputError, match=says), RecordWriter(path) as writer:
        for number in range(4):
            writer.write(record(number, meta={"noise": os.urandom(200).hex()}))
    assert names(tmp_path) == []


@pytest.mark.usefixtures("full_disk")
def test_a_failed_write_that_is_caught_still_publishes_nothing(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    with pytest.raises(InputError, match="not written, because"), RecordWriter(path) as writer:
        for number in range(4):
            try:
                writer.write(record(number))
            except InputError:
                break
    assert names(tmp_path) == []


def test_a_full_disk_leaves_an_appended_file_as_it_was(
    tmp_path: Path, request: pytest.FixtureRequest
):
    path = tmp_path / "f.jsonl"
    append_records(path, [record("a", step=1)])
    before = path.read_bytes()
    request.getfixturevalue("full_disk")
    with pytest.raises(InputError, match="No space left on device"):
        append_records(path, [record(i, step=2) for i in range(9)])
    assert path.read_bytes() == before


def test_append_mends_a_line_that_a_killed_writer_left(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    assert append_records(path, [record("a"), record("b")]) == 2
    first, second = path.read_bytes().splitlines(keepends=True)
    for cut in range(len(second)):
        path.write_bytes(first + second[:cut])
        append_records(path, [record("c")])
        # A line that lacks nothing but its end is whole, and stays.
        stays = ["b"] if cut == len(second) - 1 else []
        assert [r.group for r in read_records(path)] == ["a", *stays, "c"]


def test_append_mends_a_long_line_and_zeros(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    append_records(path, [record("a"), record("b", tokens=100_000)])
    whole = path.read_bytes()
    for damaged in (whole[:-1000], whole[:-1000] + b"\0" * 500):
        path.write_bytes(damaged)
        append_records(path, [record("c")])
        assert [r.group for r in read_records(path)] == ["a", "c"]
    path.write_bytes(b'{"schema":1,"gro')  # the very first line was cut
    append_records(path, [record("c")])
    assert [r.group for r in read_records(path)] == ["c"]


def test_append_leaves_other_files_alone(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk")
    with pytest.raises(InputError, match="is not a record; is this the right file"):
        append_records(path, [record()])
    assert path.read_text() == "remember the milk"
    for ending in (".gz", ".zst"):
        with pytest.raises(InputError, match="a compressed file cannot grow safely"):
            append_records(tmp_path / f"f.jsonl{ending}", [record()])


KILLED = """
import sys
from tokencredit.records import Record, append_records
for step in range(10**9):
    append_records(sys.argv[1], [
        Record(group=f"{step}-{g}", step=step, token_ids=[1] * 500, mask=[1] * 500, reward=1.0)
        for g in range(8)
    ])
    print(step, flush=True)
"""


def test_a_writer_that_is_killed_loses_at_most_its_last_step(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    finished = [int(writer.stdout.readline()) for _ in range(5)][-1]
    writer.send_signal(signal.SIGKILL)
    finished = max([finished, *map(int, writer.stdout.read().split())])
    writer.wait()
    truncate_after_step(path, finished)
    append_records(path, [record("resumed", step=finished + 1)])
    steps = [r.step for r in read_records(path)]
    assert steps == [s for s in range(finished + 1) for _ in range(8)] + [finished + 1]


def test_resuming_doubles_no_step(tmp_path: Path):
    path = tmp_path / "f.jsonl"
    for step in (1, 2, 3):
        append_records(path, [record(f"{step}{name}", step=step) for name in "xy"])
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:4])
    with path.open("ab") as file:
        file.write(b'{"schema":1,"group":"3z')
    assert truncate_after_step(path, 2) == 2
    assert path.read_bytes() == kept and names(tmp_path) == ["f.jsonl"]
    inode = path.stat().st_ino
    assert truncate_after_step(path, 2) == 0
    assert path.stat().st_ino == inode  # nothing to remove, so not rewritten
    append_records(path, [record("2z")])
    with pytest.raises(InputError, match=r"f.jsonl:5: field 'step': is missing"):
        truncate_after_step(path, 2)
    with pytest.raises(InputError, match="there is no such file"):
        truncate_after_step(tmp_path / "g.jsonl", 2)


def peak(path: Path) -> int:
    tracemalloc.start()
    for group in read_groups(path):
        assert len(group) == 4
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


def test_memory_does_not_grow_with_the_file(tmp_path: Path):
    line = json.loads(to_json(record(tokens=1000, signals={"entropy": [0.25] * 1000})))
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl.gz"
    for path, count in ((small, 10), (large, 200)):
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "wb") as file:
            for group, _ in itertools.product(range(count), range(4)):
                file.write(json.dumps(line | {"group": group}).encode() + b"\n")
    # 200 groups are 8 MB of text and more as objects; a group is a 200th of that.
    assert peak(large) < peak(small) + 400_000
