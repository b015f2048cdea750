"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tokencredit.errors import InputError

__all__ = ["opened_aside", "write_aside"]


@contextmanager
def opened_aside(path: Path) -> Generator[BinaryIO]:
    """A file beside its place, to write bytes to; renamed when the block ends, removed if it fails.

    Args:
        path: the file to write or to replace.

    Raises:
        InputError: the file cannot be written; what stood there before is untouched.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"{path}: cannot be written: {error.strerror}") from error
        raise


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
