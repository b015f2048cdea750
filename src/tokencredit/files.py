"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal

from tokencredit.errors import InputError

__all__ = ["opened_aside", "what_is", "write_aside"]


def what_is(path: str | os.PathLike[str]) -> Literal["nothing", "file", "folder", "other"]:
    r"""What stands there, links followed; what cannot be looked at is nothing.

    Example:
        >>> what_is("/"), what_is("no such file"), what_is("a" * 5000), what_is("a\0b")
        ('folder', 'nothing', 'nothing', 'nothing')
    """
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return "nothing"
    if stat.S_ISDIR(mode):
        return "folder"
    return "file" if stat.S_ISREG(mode) else "other"


@contextmanager
def opened_aside(path: Path) -> Generator[BinaryIO]:
    """A file beside its place, to write bytes to; renamed when the block ends, removed if it fails.

    A symbolic link is followed, and a file that is replaced keeps its permissions. What is no
    regular file, such as ``/dev/stdout``, is written to as it is.

    Args:
        path: the file to write or to replace.

    Raises:
        InputError: the file cannot be written; what stood there before is untouched.
    """
    kind = what_is(path)
    try:
        if kind == "other":
            with path.open("wb") as file:
                yield file
            return
        final = Path(os.path.realpath(path))
        if final.is_symlink():  # what is left of a link that leads to itself
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        temporary = final.with_name(f".{final.name[:32]}.{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if kind == "file":
                temporary.chmod(stat.S_IMODE(path.stat().st_mode))
            temporary.replace(final)
        except BaseException:
            with contextlib.suppress(OSError, ValueError):
                temporary.unlink()
            raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    except ValueError as error:  # a null byte in the name; whoever writes raises its own
        if isinstance(error, InputError) or "null" not in str(error):
            raise
        raise InputError(f"{str(path)!r}: cannot be written: {error}") from error


def write_aside(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and rename it, so that it is there whole or not at all.

    Args:
        path: the file to write or to replace.
        content: its bytes, or its text, which is written as UTF-8.

    Raises:
        InputError: the file cannot be written; what stood there before is untouched.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    with opened_aside(path) as file:
        file.write(data)
