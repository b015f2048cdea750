"""Credit for a whole file of records, in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from tokencredit.credit import assign
from tokencredit.errors import InputError, MissingSignalError
from tokencredit.methods.registry import resolve
from tokencredit.methods.rule import Rule
from tokencredit.records.reading import Source, open_source
from tokencredit.records.schema import Record
from tokencredit.records.tensors import records_with_credit, rollouts_from_records
from tokencredit.records.writing import RecordWriter

__all__ = ["AssignProgress", "AssignSummary", "assign_file"]

BATCH_TOKENS = 262_144

_Group = tuple[int, tuple[Record, ...]]


@dataclass(frozen=True)
class AssignProgress:
    """How far `assign_file` has come.

    Attributes:
        responses: responses written so far.
        fraction: share of the source that has been read, 0 to 1; None if its size is not known.
    """

    responses: int
    fraction: float | None


@dataclass(frozen=True)
class AssignSummary:
    """What `assign_file` did.

    Attributes:
        rule: the rule with its options.
        name: the name under which the credit is in the records.
        responses: how many responses were read and written.
        groups: how many groups.
        tokens: how many tokens are inside the masks.
        diagnostics: `Credit.diagnostics` of all batches together: counts are added up, largest
            values stay the largest, and shares and means are averaged over the batches, each
            with the weight of what it is a share or mean of (groups, responses or tokens).
        success_guessed: the rule reads which responses are right, the records do not say it, and
            their rewards are no plain verdicts (0, 1 or -1): ``reward > 0.5`` decided.
    """

    rule: Rule
    name: str
    responses: int
    groups: int
    tokens: int
    diagnostics: dict[str, float] = field(default_factory=dict[str, float])
    success_guessed: bool = False


def assign_file(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    rule: str | Rule,
    *,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
    overwrite: bool = False,
    batch_tokens: int = BATCH_TOKENS,
    on_progress: Callable[[AssignProgress], object] | None = None,
) -> AssignSummary:
    """Read a file of records, assign credit by a rule, and write the records with it.

    Groups are streamed and put together to batches of at most `batch_tokens` padded tokens (a
    larger group is a batch of its own), which changes nothing in the result: a rule of groups
    sees whole groups. A rule with a statistic over the whole batch (`normalise_over` or
    `share_over` is `"batch"`) is given all records of one `step` at a time, whatever their size,
    as that is the batch that was trained on.

    So that the size of a batch cannot matter, the file must agree with itself: all records have
    `success` or none, all have `token_ids` or none, and a signal that no record of the first
    group has cannot appear later. One that is missing later is unknown there.

    Args:
        source: a file of records, or `"-"` for standard input; may be the same as `target` if
            `overwrite`.
        target: where to write; appears when it is complete.
        rule: a name or a rule object, as in `tokencredit.assign`.
        options: the rule's options, only together with a name.
        name: the entry of `credit` to write. Default: the rule's name. The options and the
            version are kept in `meta["credit"][name]`.
        overwrite: replace `target` if it exists.
        batch_tokens: how many tokens, padding included, to hand to the rule at once.
        on_progress: called after each batch.

    Raises:
        InputError: the source is malformed, the rule or its options are unknown, the target
            exists or cannot be written, or a rule of whole batches meets records without `step`.
        MissingSignalError: the rule needs a signal that the records lack.

    Example:
        >>> import pathlib, tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> source = pathlib.Path(folder.name) / "rollouts.jsonl"
        >>> with RecordWriter(source) as writer:
        ...     for reward in (1.0, 0.0):
        ...         writer.write(Record(group="a", tokens=["x"], mask=[1], reward=reward))
        >>> target = source.with_name("credit.jsonl")
        >>> summary = assign_file(source, target, "grpo")
        >>> summary.responses, summary.groups, summary.tokens
        (2, 1, 2)
        >>> from tokencredit.records import read_records
        >>> [round(r.credit["grpo"].base, 4) for r in read_records(target)]
        [0.7071, -0.7071]
        >>> folder.cleanup()
    """
    resolved = resolve(rule, dict(options or {}))
    name = name or resolved.name
    meta = {"rule": resolved.name, "options": resolved.options(), "version": _version()}
    totals = _Totals()
    guessed = False
    with (
        open_source(source) as opened,
        RecordWriter(target, overwrite=overwrite) as writer,
    ):
        uniform = _Uniform(opened.name)
        groups = uniform.checked(opened.groups())
        batches = (
            _steps(opened.name, groups) if resolved.whole_batch else _batches(groups, batch_tokens)
        )
        for batch in batches:
            records = [record for _, group in batch for record in group]
            rollouts = rollouts_from_records(records, signals=uniform.signals)
            try:
                credit = assign(rollouts, resolved)
            except MissingSignalError as error:
                raise _missing(opened, resolved, uniform.signals, error) from error
            for record in records_with_credit(records, name, credit, meta=meta):
                writer.write(record)
            totals.add(records, len(batch), credit.diagnostics)
            guessed = guessed or (resolved.reads_success and any(map(_undecided, records)))
            if on_progress is not None:
                on_progress(AssignProgress(totals.responses, opened.fraction))
        if not totals.responses:
            raise InputError(f"{opened.name}: holds no records")
    return AssignSummary(
        resolved,
        name,
        totals.responses,
        totals.groups,
        totals.tokens,
        totals.diagnostics(),
        success_guessed=guessed,
    )


def _undecided(record: Record) -> bool:
    """Whether a record says not what is right, and its reward is no plain verdict."""
    return record.success is None and record.reward not in (None, -1, 0, 1)


class _Uniform:
    """Refuses a file whose records differ in what they carry, which batches would bring out."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._first: tuple[int, Record] | None = None
        self.signals: dict[str, None] = {}

    def checked(self, groups: Iterator[_Group]) -> Iterator[_Group]:
        """The groups, once they agree with what came before."""
        for start, group in groups:
            if self._first is None:
                self._first = start, group[0]
                self.signals = dict.fromkeys(name for record in group for name in record.signals)
            for number, record in enumerate(group, start=start):
                self._check(number, record)
            yield start, group

    def _check(self, number: int, record: Record) -> None:
        assert self._first is not None
        first_number, first = self._first
        for name in ("success", "token_ids"):
            here, there = getattr(record, name) is not None, getattr(first, name) is not None
            if here != there:
                raise InputError(
                    f"{self._source}:{number}: field '{name}': is "
                    f"{'given' if here else 'missing'} here, but not on line {first_number}; "
                    "give it in every record or in none"
                )
        for name in record.signals:
            if name not in self.signals:
                raise InputError(
                    f"{self._source}:{number}: field 'signals.{name}': appears here first, but "
                    f"the group that begins on line {first_number} lacks it; give it there too, "
                    "as a list of null if it is unknown"
                )


def _batches(groups: Iterator[_Group], batch_tokens: int) -> Iterator[list[_Group]]:
    """Whole groups, as many as fit into `batch_tokens` tokens with their padding."""
    batch: list[_Group] = []
    rows = longest = 0
    for start, group in groups:
        length = max(record.length for record in group)
        if batch and (rows + len(group)) * max(longest, length) > batch_tokens:
            yield batch
            batch, rows, longest = [], 0, 0
        batch.append((start, group))
        rows, longest = rows + len(group), max(longest, length)
    if batch:
        yield batch


def _steps(source: str, groups: Iterator[_Group]) -> Iterator[list[_Group]]:
    """All groups of one step at a time."""
    began: dict[int, int] = {}
    batch: list[_Group] = []
    current: int | None = None
    for start, group in groups:
        for number, record in enumerate(group, start=start):
            if record.step is None:
                raise InputError(
                    f"{source}:{number}: field 'step': is missing, but the rule has a statistic "
                    "over the whole batch, which is all records of one step; give every record "
                    "its step, or set the option to 'group'"
                )
            if record.step != group[0].step:
                raise InputError(
                    f"{source}:{number}: field 'step': is {record.step}, but line {start} of the "
                    f"same group has {group[0].step}; a group is sampled in one step"
                )
        step = group[0].step
        assert step is not None
        if step != current:
            if step in began:
                raise InputError(
                    f"{source}:{start}: field 'step': step {step} began on line {began[step]} and "
                    "reappears here; put the records of a step next to each other"
                )
            if batch:
                yield batch
            batch, current = [], step
            began[step] = start
        batch.append((start, group))
    if batch:
        yield batch


def _missing(
    source: Source, rule: Rule, present: Mapping[str, None], error: MissingSignalError
) -> MissingSignalError:
    """The error in terms of the file: what to write into each record."""
    absent = [name for name in rule.needs if name not in present]
    if not absent:  # a rule that looks for more than it declares
        return MissingSignalError(f"{source.name}: {error}")
    listed = " and ".join(repr(name) for name in absent)
    example = ", ".join(f'"{name}": [1.5, null]' for name in absent)
    return MissingSignalError(
        f"{source.name}: field 'signals': {rule.name} needs {listed}, which the records lack; "
        f'give each record "signals": {{{example}}}, one number a token, null where unknown'
    )


class _Totals:
    """The counts and diagnostics of the batches so far."""

    def __init__(self) -> None:
        self.responses = self.groups = self.tokens = 0
        self._values: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, records: list[Record], groups: int, diagnostics: Mapping[str, float]) -> None:
        self.responses += len(records)
        self.groups += groups
        self.tokens += sum(sum(record.mask) for record in records)
        for name, value in diagnostics.items():
            if name in _COUNTS:
                self._values[name] = self._values.get(name, 0.0) + value
            elif name.startswith("largest"):
                self._values[name] = max(self._values.get(name, value), value)
            else:
                weight = diagnostics.get(_MEAN_OF.get(name, "tokens"), 1.0)
                self._values[name] = self._values.get(name, 0.0) + weight * value
                self._weights[name] = self._weights.get(name, 0.0) + weight

    def diagnostics(self) -> dict[str, float]:
        return {
            name: value / (self._weights[name] or 1.0) if name in self._weights else value
            for name, value in self._values.items()
        }


_COUNTS = ("responses", "groups", "tokens")
_MEAN_OF = {
    "groups_skipped": "groups",
    "effective_tokens": "responses",
    "effective_share": "responses",
}


def _version() -> str:
    try:
        return metadata.version("tokencredit")
    except metadata.PackageNotFoundError:
        return "unknown"
