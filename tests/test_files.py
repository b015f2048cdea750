"""Files that are there whole or not at all, whatever stands in their place."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tokencredit.errors import InputError
from tokencredit.files import opened_aside, what_is, write_aside


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "a"
    write_aside(path, "one")
    with pytest.raises(RuntimeError), opened_aside(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_text() == "one" and names(tmp_path) == ["a"]


def test_links_are_followed(tmp_path: Path):
    real = tmp_path / "real"
    link, dangling = tmp_path / "link", tmp_path / "dangling"
    real.write_text("old")
    link.symlink_to(real)
    dangling.symlink_to(tmp_path / "new")
    write_aside(link, "one")
    write_aside(dangling, "two")
    assert link.is_symlink() and real.read_text() == "one"
    assert dangling.is_symlink() and (tmp_path / "new").read_text() == "two"
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(InputError, match="cannot be written"):
        write_aside(loop, "three")
    assert loop.is_symlink()


def test_what_is_no_file_is_written_to(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_aside(pipe, "through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)
    assert what_is(pipe) == "other"
    with pytest.raises(InputError, match="/dev/full: cannot be written: No space"):
        write_aside(Path("/dev/full"), "much")


def test_permissions_stay(tmp_path: Path):
    path = tmp_path / "private"
    path.touch(mode=0o600)
    write_aside(path, "one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "name", ["n" * 250, "é" * 125, "n" * 300, "file/below", "no/folder", "a\0b"]
)
def test_names_of_every_kind(tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    path = tmp_path / name
    if len(os.fsencode(name)) <= 255 and "/" not in name and "\0" not in name:
        write_aside(path, "one")
        assert path.read_text() == "one"
    else:
        with pytest.raises(InputError, match="cannot be written"):
            write_aside(path, "one")
        assert names(tmp_path) == ["file"]


def test_errors_of_whoever_writes_are_their_own(tmp_path: Path):
    for error in (InputError("theirs"), ValueError("theirs"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, opened_aside(tmp_path / "a"):
            raise error
        assert caught.value is error
    assert names(tmp_path) == []
