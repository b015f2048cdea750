"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from tokencredit.errors import InputError

__all__ = ["write_aside"]


def write_aside(path: Path, content: str | bytes) -> None:
    """Write a file beside its place and rename it, so that it is there whole or not at all.

    Args:
        path: the file to write or to replace.
        content: its bytes, or its text, which is written as UTF-8.

    Raises:
        InputError: the file cannot be written; what stood there before is untouched.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
