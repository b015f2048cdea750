"""Records to one batch of rollouts, with whole groups and no more than the methods read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokencredit.errors import InputError
from tokencredit.records.reading import open_source
from tokencredit.records.schema import Record
from tokencredit.records.tensors import rollouts_from_records
from tokencredit.rollouts import Rollouts

__all__ = ["ReadRollouts", "read_rollouts"]

AT_ONCE = 256
"""How many responses are held as Python objects, ten times the size of their tensors."""

FACTS = ("model", "tokenizer", "temperature", "tokencredit")


@dataclass(frozen=True, eq=False)
class ReadRollouts:
    """A file as one batch.

    Attributes:
        rollouts: the batch.
        source: the file's name.
        steps: the training steps that its records are of, in order of appearance.
        limited: whether groups were left out because of the limit.
        facts: model, tokenizer, temperature and tokencredit's version as the records state them.
    """

    rollouts: Rollouts
    source: str
    steps: tuple[int, ...]
    limited: bool
    facts: dict[str, str]


def read_rollouts(
    path: str | os.PathLike[str],
    *,
    signals: Iterable[str] | None = None,
    limit: int | None = None,
    step: int | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> ReadRollouts:
    """Read a file of records as one batch of rollouts.

    Args:
        path: `.jsonl`, also `.gz` and `.zst`; `"-"` is standard input.
        signals: which signals to carry; those that no record has are left out. Default: all.
        limit: at most so many responses, in whole groups; at least one group is read.
        step: only the records of this training step.
        on_progress: called with the number of responses read so far.

    Raises:
        InputError: the file is malformed or holds no such records, or some records have
            `success` and some have not.

    Example:
        >>> import pathlib, tempfile
        >>> from tokencredit.records import RecordWriter
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name) / "rollouts.jsonl"
        >>> with RecordWriter(path) as writer:
        ...     for group in ("a", "a", "b", "b"):
        ...         writer.write(Record(group=group, tokens=["x"], mask=[1], reward=1.0))
        >>> read = read_rollouts(path, limit=3)
        >>> read.rollouts.responses, read.limited
        (2, True)
        >>> folder.cleanup()
    """
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1 response, got {limit}")
    wanted = None if signals is None else tuple(dict.fromkeys(signals))
    chunks: list[Rollouts] = []
    groups: list[str | int] = []
    pending: list[Record] = []
    steps: dict[int, None] = {}
    facts: dict[str, dict[str, None]] = {}
    success: bool | None = None
    limited = False

    def convert() -> None:
        if pending:
            names = wanted
            if names is None:
                names = tuple(dict.fromkeys(n for record in pending for n in record.signals))
            present = {n for record in pending for n in record.signals}
            chunk = rollouts_from_records(pending, signals=[n for n in names if n in present])
            chunks.append(chunk)
            groups.extend(record.group for record in pending)
            pending.clear()
            if on_progress is not None:
                on_progress(len(groups))

    with open_source(path) as source:
        for line, group in source.groups():
            if step is not None and group[0].step != step:
                continue
            if limit is not None and len(groups) + len(pending) + len(group) > limit:
                limited = True
                if groups or pending:
                    break
            for number, record in enumerate(group, start=line):
                if success is None:
                    success = record.success is not None
                elif success != (record.success is not None):
                    raise InputError(
                        f"{source.name}:{number}: field 'success': is "
                        f"{'missing' if success else 'given'} here, but not in the records "
                        "before; give it in every record or in none"
                    )
                if record.step is not None:
                    steps[record.step] = None
                for name in FACTS:
                    value: Any = record.meta.get(name)
                    if value is not None:
                        facts.setdefault(name, {})[str(value)] = None
            pending += group
            if len(pending) >= AT_ONCE:
                convert()
            if limited:
                break
        convert()
        if not groups:
            which = "" if step is None else f" of step {step}"
            raise InputError(f"{source.name}: holds no records{which}")
        name = source.name
    return ReadRollouts(
        rollouts=_joined(chunks, groups),
        source=name,
        steps=tuple(steps),
        limited=limited,
        facts={name: ", ".join(list(values)[:3]) for name, values in facts.items()},
    )


def _joined(chunks: list[Rollouts], groups: list[str | int]) -> Rollouts:
    """The chunks below one another, padded on the right; each is let go once it is copied."""
    width = max(chunk.mask.shape[1] for chunk in chunks)
    names = tuple(dict.fromkeys(name for chunk in chunks for name in chunk.signals))
    rows = len(groups)
    with_ids = all(chunk.token_ids is not None for chunk in chunks)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    signals = {name: torch.full((rows, width), torch.nan) for name in names}
    ids = torch.zeros(rows, width, dtype=torch.int64) if with_ids else None
    single: dict[str, list[Tensor]] = {"rewards": [], "success": [], "keep": []}
    start = 0
    while chunks:
        chunk = chunks.pop(0)
        place = slice(start, start + chunk.responses), slice(0, chunk.mask.shape[1])
        mask[place] = chunk.mask
        for name, value in chunk.signals.items():
            signals[name][place] = value
        if ids is not None and chunk.token_ids is not None:
            ids[place] = chunk.token_ids
        for name, values in single.items():
            values.append(getattr(chunk, name))
        start += chunk.responses
    return Rollouts(
        torch.cat(single["rewards"]),
        groups,
        mask,
        success=torch.cat(single["success"]),
        keep=torch.cat(single["keep"]),
        signals=signals,
        token_ids=ids,
    )
