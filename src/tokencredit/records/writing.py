"""Writing records: a file that is whole or not there, and one that grows step by step.

`RecordWriter` writes aside and renames, so nothing half-written is ever left under the final
name. `append_records` is for a trainer that adds a step at a time and may be killed at any
moment: at worst the last line is cut off, and the next append removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from tokencredit.errors import InputError
from tokencredit.records.reading import parse_line, require_zstandard
from tokencredit.records.schema import Record, to_json

__all__ = ["RecordWriter", "append_records", "truncate_after_step"]

_BLOCK = 64 * 1024


class RecordWriter:
    r"""Writes a file of records that appears under its name only when it is complete.

    The records go to a hidden file in the same folder, which is flushed to the disk and renamed
    when the `with` block ends, and removed if it ends by an exception. A process that is killed
    outright leaves the hidden file (`.NAME.*.tmp`) behind, never a part of the final one.

    Args:
        path: the file; `.gz` and `.zst` (extra `zstd`) are compressed. A symbolic link is
            followed. Its folder must exist.
        overwrite: replace a file that is already there.

    Raises:
        InputError: the file exists and `overwrite` is False, it cannot be written (no folder, no
            permission, no space), or a group reappears after another one has begun.
        MissingExtraError: a `.zst` file, and `zstandard` is not installed.

    Example:
        >>> import tempfile, pathlib
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name) / "rollouts.jsonl"
        >>> with RecordWriter(path) as writer:
        ...     writer.write(Record(group="a", tokens=["x"], mask=[1], reward=1.0))
        ...     path.exists()
        False
        >>> path.read_text()
        '{"schema":1,"group":"a","tokens":["x"],"mask":[1],"reward":1.0}\n'
        >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self.overwrite = overwrite
        self.count = 0
        self._final = Path(os.path.realpath(self.path))
        self._aside = self._final.with_name(f".{self._final.name}.{secrets.token_hex(4)}.tmp")
        self._groups: dict[str | int, int] = {}
        self._last: str | int | None = None
        self._failed = False
        self._raw: IO[bytes] | None = None
        self._lines: Any = None

    def __enter__(self) -> RecordWriter:
        self._refuse_existing()
        if self._final.name.endswith(".zst"):
            require_zstandard("writing a .zst file")
        with _reported(self.path):
            self._raw = self._aside.open("xb")
        self._lines = _compressed(self._final.name, self._raw)
        return self

    def write(self, record: Record) -> None:
        """Add one record.

        Raises:
            InputError: the disk is full, or the record's group came earlier and another one has
                begun since.
        """
        if self._lines is None:
            raise InputError(f"{self.path}: write inside `with RecordWriter(...) as writer:`")
        number = self.count + 1
        if record.group != self._last or not self.count:
            if record.group in self._groups:
                raise InputError(
                    f"{self.path}:{number}: field 'group': {record.group!r} began on line "
                    f"{self._groups[record.group]} and reappears here; write the records of a "
                    "group one after another"
                )
            self._groups[record.group] = number
            self._last = record.group
        self.write_line(_line(record))

    def write_line(self, line: bytes) -> None:
        """Add one line as it is, its line feed included; for lines that were just read."""
        self._failed = True
        with _reported(self.path):
            self._lines.write(line)
        self._failed = False
        self.count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also where a failed write was caught inside the block: part of a line may be there.
        if kind is not None or self._failed:
            self._abandon()
            if kind is None:
                raise InputError(f"{self.path}: not written, because writing a record failed")
            return
        try:
            self._commit()
        except BaseException:
            self._abandon()
            raise

    def _commit(self) -> None:
        assert self._raw is not None
        with _reported(self.path):
            if self._lines is not self._raw:
                self._lines.close()  # ends the compressed stream, and leaves the file open
            self._raw.flush()
            os.fsync(self._raw.fileno())
            self._raw.close()
            self._refuse_existing()
            self._aside.replace(self._final)
        self._lines = None
        _sync_folder(self._final.parent)

    def _abandon(self) -> None:
        """Remove what was written; closing may fail once more where the disk is full."""
        streams: tuple[Any, ...] = (self._lines, self._raw)
        for stream in streams:
            with contextlib.suppress(Exception):
                stream.close()
        with contextlib.suppress(OSError):
            self._aside.unlink()
        self._lines = None

    def _refuse_existing(self) -> None:
        if str(self.path) == "-":
            raise InputError("-: records are written to a file, not to standard output")
        try:
            mode = self._final.stat().st_mode
        except OSError:
            return  # not there, or not to be seen: opening it will tell
        if stat.S_ISDIR(mode):
            raise InputError(f"{self.path}: is a folder; give a file name")
        if not stat.S_ISREG(mode):
            raise InputError(f"{self.path}: is not a regular file; give a file name")
        if not self.overwrite:
            raise InputError(f"{self.path}: exists already; remove it, or allow overwriting")


def append_records(path: str | os.PathLike[str], records: Iterable[Record]) -> int:
    """Add records to the end of a plain `.jsonl` file, which is made if it is not there.

    All lines are written at once and flushed to the disk. A last line that an earlier writer,
    killed half-way, left without its end is removed first (or completed, if only the line feed
    is missing); if this write fails, the file is cut back to what it was. A killed writer may
    still leave some complete lines of a step: `truncate_after_step` removes them on resuming.

    Args:
        path: the file. One writer at a time.
        records: usually those of one step, whole groups. That a group does not come again later
            is not looked for here, as that would mean to read the file; reading it will tell.

    Returns:
        How many records were added.

    Raises:
        InputError: the file is compressed, cannot be written, or ends in something that is not
            a record.

    Example:
        >>> import tempfile, pathlib
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name) / "rollouts.jsonl"
        >>> record = Record(group="a", step=1, tokens=["x"], mask=[1], reward=1.0)
        >>> append_records(path, [record]), append_records(path, [record])
        (1, 1)
        >>> len(path.read_text().splitlines())
        2
        >>> folder.cleanup()
    """
    _refuse_compressed(path)
    lines = [_line(record) for record in records]
    with _reported(path), Path(path).open("a+b", buffering=0) as file:
        _mend_tail(path, file)
        size = file.seek(0, os.SEEK_END)
        try:
            _write_all(file, b"".join(lines))
            os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise
    return len(lines)


def truncate_after_step(path: str | os.PathLike[str], step: int) -> int:
    """Remove the records of later steps, so that a trainer resuming at `step` doubles none.

    The lines that stay are copied byte for byte into a file aside, which then takes the name of
    the old one. A cut-off last line goes as well. If nothing is to be removed, the file is not
    touched.

    Args:
        path: a plain `.jsonl` file.
        step: the last step to keep.

    Returns:
        How many complete records were removed.

    Raises:
        InputError: the file is missing or compressed, a line is not a record, or has no `step`.

    Example:
        >>> import tempfile, pathlib
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name) / "rollouts.jsonl"
        >>> for step in (1, 2, 3):
        ...     record = Record(group=step, step=step, tokens=["x"], mask=[1], reward=1.0)
        ...     _ = append_records(path, [record])
        >>> truncate_after_step(path, 1)
        2
        >>> folder.cleanup()
    """
    _refuse_compressed(path)
    if not Path(path).exists():
        raise InputError(f"{os.fspath(path)}: there is no such file, so no step to resume from")
    with _reported(path), Path(path).open("r+b", buffering=0) as file:
        _mend_tail(path, file)
    # First look, then copy: the file stays as it is unless something has to go.
    later = sum(_step_of(record, where) > step for _, record, where in _raw_records(path))
    if later:
        with RecordWriter(path, overwrite=True) as writer:
            for line, record, where in _raw_records(path):
                if _step_of(record, where) <= step:
                    writer.write_line(line)
    return later


def _raw_records(path: str | os.PathLike[str]) -> Generator[tuple[bytes, Record, str]]:
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{os.fspath(path)}:{number}"
            yield line, parse_line(line, where), where


def _step_of(record: Record, where: str) -> int:
    if record.step is None:
        raise InputError(
            f"{where}: field 'step': is missing, so it cannot be told whether the record is "
            "later than the step to resume from; start a new file"
        )
    return record.step


def _line(record: Record) -> bytes:
    return to_json(record).encode("utf-8") + b"\n"


@contextmanager
def _reported(path: str | os.PathLike[str]) -> Generator[None]:
    """Turn what the system refuses into one line that names the file and what to do."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        todo = {
            errno.ENOSPC: "; free some space and run it again",
            errno.EDQUOT: "; free some space and run it again",
            errno.ENOENT: "; make its folder first",
            errno.EACCES: "; choose a folder that you may write to",
        }.get(error.errno or 0, "")
        raise InputError(f"{os.fspath(path)}: cannot be written ({what}){todo}") from error


def _refuse_compressed(path: str | os.PathLike[str]) -> None:
    name = os.fspath(path)
    if name.endswith((".gz", ".zst")):
        raise InputError(
            f"{name}: a compressed file cannot grow safely; use a plain .jsonl and compress it "
            "when the run is over"
        )


def _compressed(name: str, raw: IO[bytes]) -> Any:
    if name.endswith(".gz"):
        import gzip

        # Without a time or a name inside, so that the same records give the same bytes.
        return gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0)
    if name.endswith(".zst"):
        zstandard = require_zstandard("writing a .zst file")
        return zstandard.ZstdCompressor().stream_writer(raw, closefd=False)
    return raw


def _write_all(file: IO[bytes], data: bytes) -> None:
    """One write, and further ones only if the system took a part of it."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _mend_tail(path: str | os.PathLike[str], file: Any) -> None:
    """Remove a last line without end, or end it if it is a whole record.

    Only something that looks like the beginning of a record is removed (or zeros, which some
    file systems leave after a power failure): this may be called on a wrong path.
    """
    size = cast("int", file.seek(0, os.SEEK_END))
    start = size
    tail = b""
    while start and b"\n" not in tail:
        step = min(_BLOCK, start)
        start -= step
        file.seek(start)
        tail = cast("bytes", file.read(step)) + tail
    begin = start + tail.rfind(b"\n") + 1
    if begin == size:
        return
    rest = tail[begin - start :]
    if rest.strip(b"\0") and not rest.startswith(b"{"):
        raise InputError(
            f"{os.fspath(path)}: the last line has no end and is not a record; is this the "
            "right file?"
        )
    try:
        parse_line(rest, os.fspath(path))
    except InputError:
        file.truncate(begin)
    else:
        file.seek(0, os.SEEK_END)
        _write_all(file, b"\n")


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power failure, where the system lets folders be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
