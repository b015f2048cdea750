"""Reading records as a stream: one line at a time, whatever the size of the file.

A line is refused, by file, line and field, if anything in it is not as the format says; nothing
is guessed or repaired. In particular: NaN and infinities, a key given twice, bytes that are not
UTF-8, a byte-order mark, and an empty line before the last record are all refused.
"""

from __future__ import annotations

import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

from tokencredit.errors import InputError, MissingExtraError
from tokencredit.records.schema import Record, parse_record

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["LONGEST_LINE", "Source", "open_source", "read_groups", "read_records"]

LONGEST_LINE = 512 * 1024 * 1024
"""Lines longer than this many bytes are refused: something else than records, or damage."""

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
# Small, because what comes out of one piece is held in memory at once.
_COMPRESSED_PIECE = 16 * 1024


def read_records(path: str | os.PathLike[str]) -> Iterator[Record]:
    r"""The records of a file, one after another, in the order of its lines.

    Args:
        path: a `.jsonl` file; `.gz` and `.zst` (extra `zstd`) are decompressed; `"-"` is
            standard input. The file is opened when the first record is asked for.

    Raises:
        InputError: the file cannot be read, or a line is not a record.
        MissingExtraError: a `.zst` file, and `zstandard` is not installed.

    Example:
        >>> import tempfile
        >>> line = '{"schema":1,"group":"a","tokens":["x"],"mask":[1],"reward":1.0}\n'
        >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        ...     _ = file.write(line), file.flush()
        ...     [record.reward for record in read_records(file.name)]
        [1.0]
    """
    with open_source(path) as source:
        for _, record in source:
            yield record


def read_groups(path: str | os.PathLike[str]) -> Iterator[tuple[Record, ...]]:
    r"""The groups of a file, one after another: the contiguous lines that share `group`.

    Only one group is in memory at a time, besides the name of each group and its first line.

    Args:
        path: as in `read_records`.

    Raises:
        InputError: as in `read_records`; or a group reappears after another one has begun, in
            which case the message names both lines.

    Example:
        >>> import tempfile
        >>> line = '{"schema":1,"group":"%s","tokens":["x"],"mask":[1],"reward":1.0}\n'
        >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        ...     _ = file.write(line % "a" + line % "a" + line % "b"), file.flush()
        ...     [(group[0].group, len(group)) for group in read_groups(file.name)]
        [('a', 2), ('b', 1)]
    """
    with open_source(path) as source:
        for _, group in source.groups():
            yield group


class Source:
    """An open file of records: iterate over it for `(line number, record)`.

    Made by `open_source`; the line numbers count from 1.
    """

    def __init__(self, name: str, lines: IO[bytes], fraction: Callable[[], float | None]) -> None:
        self.name = name
        self._lines = lines
        self._fraction = fraction

    @property
    def fraction(self) -> float | None:
        """How much of the file has been read, 0 to 1; None if its size is not known."""
        return self._fraction()

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        blank = 0
        for number, line in self._numbered_lines():
            if not line.strip():
                blank = blank or number
                continue
            if blank:
                raise InputError(
                    f"{self.name}:{blank}: the line is empty, but records follow; remove it"
                )
            yield number, parse_line(line, f"{self.name}:{number}")

    def groups(self) -> Iterator[tuple[int, tuple[Record, ...]]]:
        """The contiguous groups, each with the number of its first line."""
        first: dict[str | int, int] = {}
        group: list[Record] = []
        for number, record in self:
            if not group or record.group != group[0].group:
                if group:
                    yield first[group[0].group], tuple(group)
                    group = []
                if record.group in first:
                    raise InputError(
                        f"{self.name}:{number}: field 'group': {record.group!r} began on line "
                        f"{first[record.group]} and reappears here; put the lines of a group "
                        "next to each other, or give the second one a name of its own"
                    )
                first[record.group] = number
            group.append(record)
        if group:
            yield first[group[0].group], tuple(group)

    def _numbered_lines(self) -> Iterator[tuple[int, bytes]]:
        number = 0
        while True:
            number += 1
            try:
                line = self._lines.readline(LONGEST_LINE + 1)
            except EOFError:
                _refuse(f"{self.name}:{number}", "the compressed file is cut off; make it again")
            except OSError as error:
                reason = error.strerror or str(error)
                _refuse(f"{self.name}:{number}", f"cannot be read ({reason})")
            except Exception as error:
                # zlib.error and zstandard.ZstdError, the second of an optional package.
                if not (isinstance(error, zlib.error) or type(error).__name__ == "ZstdError"):
                    raise
                _refuse(f"{self.name}:{number}", f"the compressed file is damaged ({error})")
            if not line:
                return
            if len(line) > LONGEST_LINE:
                _refuse(
                    f"{self.name}:{number}",
                    f"the line is longer than {LONGEST_LINE} bytes; is this a file of records?",
                )
            yield number, line


@contextmanager
def open_source(path: str | os.PathLike[str]) -> Generator[Source]:
    """Open a file of records for reading; `read_records` is the simpler way.

    Args:
        path: as in `read_records`.

    Raises:
        InputError: the file is missing, a folder, or not readable.
        MissingExtraError: a `.zst` file, and `zstandard` is not installed.

    Example:
        >>> with open_source("nowhere.jsonl") as source:
        ...     pass
        Traceback (most recent call last):
        ...
        tokencredit.errors.InputError: nowhere.jsonl: cannot be read (No such file or directory)
    """
    name = os.fspath(path)
    if name == "-":
        if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
            _refuse(name, "standard input is closed; name a file")
        yield Source("<stdin>", sys.stdin.buffer, lambda: None)
        return
    if name.endswith(".zst"):
        require_zstandard("reading a .zst file")
    with _opened(name) as raw:
        size = os.fstat(raw.fileno()).st_size

        def fraction() -> float | None:
            return min(raw.tell() / size, 1.0) if size else None

        with _decompressed(name, raw) as lines:
            yield Source(name, lines, fraction)


def parse_line(line: bytes, where: str) -> Record:
    """The record on one line of a file; the line feed may be missing."""
    if line.startswith(_UTF8_BOM):
        _refuse(where, "begins with a byte-order mark; save the file as UTF-8 without one")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        hint = "the file is UTF-16; save it as UTF-8" if line[:2] in _UTF16_BOMS else "write UTF-8"
        byte = line[error.start]
        _refuse(where, f"is not UTF-8 at byte {error.start + 1} (0x{byte:02x}); {hint}")
    try:
        obj: object = _DECODER.decode(text.rstrip("\r\n"))
    except _RefusedError as error:
        _refuse(where, str(error))
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}"
        if not line.endswith(b"\n"):
            problem += "; the last line is cut off, its writer was probably stopped: remove it"
        _refuse(where, problem)
    except RecursionError:
        _refuse(where, "is nested too deeply")
    except ValueError as error:  # an integer of more digits than Python converts
        _refuse(where, f"holds a number that cannot be read ({error})")
    return parse_record(obj, where)


def require_zstandard(purpose: str) -> Any:
    """The module `zstandard`, or an error that names the extra."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtraError("zstandard", "zstd", purpose) from None
    return zstandard


class _RefusedError(Exception):
    """Something that Python's JSON parser accepts and the format does not."""


def _refuse_constant(literal: str) -> NoReturn:
    raise _RefusedError(f"holds {literal}, which is not JSON; write null for an unknown number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _RefusedError(f"field {key!r}: is given twice; keep one")
            seen.add(key)
    return entries


_DECODER = json.JSONDecoder(object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)


def _refuse(where: str, problem: str) -> NoReturn:
    raise InputError(f"{where}: {problem}") from None


def _opened(name: str) -> IO[bytes]:
    try:
        return Path(name).open("rb")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        _refuse(name, f"cannot be read ({getattr(error, 'strerror', None) or error})")


@contextmanager
def _decompressed(name: str, raw: IO[bytes]) -> Generator[IO[bytes]]:
    if name.endswith(".gz"):
        import gzip

        with gzip.GzipFile(fileobj=raw, mode="rb") as lines:
            yield cast("IO[bytes]", lines)
    elif name.endswith(".zst"):
        with io.BufferedReader(_ZstdReader(raw), buffer_size=256 * 1024) as lines:
            yield lines
    else:
        yield raw


class _ZstdReader(io.RawIOBase):
    """The bytes of a .zst file, frame after frame.

    zstandard's own reader ends in silence where a file is cut off, so the frames are followed
    here: a file that ends inside one raises EOFError, as gzip does.
    """

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._decompressor = require_zstandard("reading a .zst file").ZstdDecompressor()
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        while not self._ready:
            if not self._compressed:
                self._compressed = self._raw.read(_COMPRESSED_PIECE)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(self._compressed))
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
