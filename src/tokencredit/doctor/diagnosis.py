"""`diagnose`: one pass over a file, some groups at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from tokencredit.doctor.batch import Batch
from tokencredit.doctor.credits import Credits, Entry, batch_key, entries_of
from tokencredit.doctor.masks import Masks
from tokencredit.doctor.numbers import Ranges, Sampler, Temperature
from tokencredit.doctor.outcomes import Repeats, Success, Truncation, Variance
from tokencredit.doctor.report import Diagnosis
from tokencredit.errors import InputError
from tokencredit.records.reading import Source, open_source
from tokencredit.records.schema import Record

__all__ = ["diagnose"]

BATCH_TOKENS = 131_072


def diagnose(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    on_progress: Callable[[int, float | None], object] | None = None,
) -> Diagnosis:
    """Say what is wrong with a file of records.

    The file is read once, a bounded number of tokens at a time (a larger group alone; a rule
    with a statistic over the whole batch needs all records of a step). Credit is judged only
    where masks, signals and success are sound, so that one fault is one finding.

    Args:
        path: a file of records, as in `tokencredit.records.read_records`; `"-"` is standard input.
        vocab_size: how many tokens the policy's vocabulary has, for the largest possible entropy.
            Default: `meta.vocab_size` of each record, else 2**20, which no vocabulary exceeds.
        on_progress: called with the responses so far and the share of the file that was read.

    Raises:
        InputError: the file cannot be read, a line is not a record, or there is none.

    Example:
        >>> import pathlib, tempfile
        >>> from tokencredit.records import Record, RecordWriter
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = pathlib.Path(folder.name) / "rollouts.jsonl"
        >>> with RecordWriter(path) as writer:
        ...     for reward in (1.0, 0.0):
        ...         writer.write(Record(group="a", tokens=["x"], mask=[1], reward=reward,
        ...                             signals={"entropy": [-0.5]}))
        >>> [(finding.code, finding.count) for finding in diagnose(path).faults]
        [('entropy', 2)]
        >>> folder.cleanup()
    """
    if vocab_size is not None and vocab_size < 2:
        raise InputError(f"vocab_size must be at least 2, got {vocab_size}")
    masks, ranges, temperature, sampler = Masks(), Ranges(vocab_size), Temperature(), Sampler()
    success, truncation, variance = Success(), Truncation(), Variance()
    repeats, credits_ = Repeats(), Credits()
    responses = groups = tokens = 0
    with open_source(path) as source:
        for batch, entries in _batches(source):
            # Causes before effects: what comes later leaves out what is already at fault.
            for check in (masks, ranges, temperature, sampler, success, truncation, variance,
                          repeats):  # fmt: skip
                check.look(batch)
            credits_.look(batch, entries)
            responses += len(batch.records)
            groups += len(batch.groups)
            tokens += sum(sum(record.mask) for record in batch.records)
            if on_progress is not None:
                on_progress(responses, source.fraction)
        if not responses:
            raise InputError(f"{source.name}: holds no records")
    contradicted = success.findings()
    findings = [
        *masks.findings(),
        *ranges.findings(),
        *temperature.findings(),
        *sampler.findings(),
        *contradicted,
        *truncation.findings(),
        *repeats.findings(),
        *credits_.findings(
            success_at_fault=bool(contradicted),
            file_at_fault=masks.whole_file or temperature.whole_file,
        ),
        *variance.findings(),
    ]
    findings.sort(key=lambda finding: finding.severity != "fault")
    return Diagnosis(source.name, responses, groups, tokens, tuple(findings))


def _batches(source: Source) -> Iterator[tuple[Batch, tuple[Entry, ...]]]:
    """Whole groups with the same credit, as many as fit, or all of a step where a rule needs it."""
    held: list[tuple[int, tuple[Record, ...]]] = []
    rows = longest = 0
    key: object = None
    entries: tuple[Entry, ...] = ()
    for start, group in source.groups():
        own = entries_of(group)
        own_key = batch_key(group, own)
        length = max(record.length for record in group)
        whole = any(entry.whole_batch for entry in own)
        full = (rows + len(group)) * max(longest, length) > BATCH_TOKENS and not whole
        if held and (own_key != key or full):
            yield Batch(source.name, held), entries
            held, rows, longest = [], 0, 0
        held.append((start, group))
        rows, longest, key, entries = rows + len(group), max(longest, length), own_key, own
    if held:
        yield Batch(source.name, held), entries
