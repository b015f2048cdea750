"""`view`: rollouts from wherever they are, as a page."""

from __future__ import annotations

import dataclasses
import html
import io
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tokencredit.credit import Credit, assign
from tokencredit.errors import InputError, MissingSignalError
from tokencredit.files import opened_aside, what_is
from tokencredit.methods.registry import resolve
from tokencredit.methods.rule import Rule
from tokencredit.records.assigning import assign_file
from tokencredit.records.reading import open_source, read_groups, read_records
from tokencredit.records.schema import Record
from tokencredit.records.tensors import (
    records_from_rollouts,
    records_with_credit,
    response_columns,
)
from tokencredit.records.writing import RecordWriter
from tokencredit.rollouts import Rollouts
from tokencredit.viewer.page import PageSummary, write_page

__all__ = ["ROLLOUTS", "Page", "recorded_groups", "save_page", "view"]

ROLLOUTS = "rollouts.jsonl"
"""The records in a run folder."""
_FEW = 12

OnProgress = Callable[[int], object]
_Path = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Page:
    """A page of rollouts: shown by a notebook, or saved.

    Attributes:
        html: the whole page, which needs nothing else.
        summary: what is on it.
    """

    html: str = dataclasses.field(repr=False)
    summary: PageSummary

    def save(self, path: _Path, *, overwrite: bool = False) -> Path:
        """Write the page to a file, which appears when it is complete.

        Raises:
            InputError: the file exists and `overwrite` is False, or it cannot be written.
        """
        path = Path(path)
        _refuse_existing(path, overwrite)
        with opened_aside(path) as file:
            file.write(self.html.encode("utf-8"))
        return path

    def _repr_html_(self) -> str:
        """What Jupyter shows: the page in a frame of its own, so that neither styles the other."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" '
            'title="tokencredit view" style="width:100%;height:42rem;border:0"></iframe>'
        )


def view(
    rollouts: Rollouts | Iterable[Record] | _Path,
    *,
    credit: str | Rule | Iterable[str | Rule] | Mapping[str, Credit | str | Rule] = (),
    tokens: Sequence[Sequence[str | bytes]] | None = None,
    by: str | None = None,
    against: str | None = None,
    limit: int | None = None,
    step: int | None = None,
    title: str | None = None,
) -> Page:
    """See where the credit went: rollouts as one HTML page, shown at once in a notebook.

    The tokens of each response are coloured by an advantage, weight, shaped reward or signal, on
    a diverging scale centred on zero (weights: on one); the siblings of a prompt stand side by
    side, and two methods on one response beside their difference.

    Args:
        rollouts: a batch, whose groups are shown by their numbers; records, the responses of a
            group together; a file of records; or a run folder.
        credit: rules to assign first, by name or as objects; for a batch also a mapping from the
            names that you like to rules or to the `Credit` that you have. Records keep the credit
            that they hold: a rule of the same name is shown beside it, with a star.
        tokens: for a batch: the texts of each row's tokens, as from
            `tokencredit.records.token_texts`. Without them tokens are shown by their ids.
        by: what to colour by at first: ``"gtpo.advantage"``, ``"gtpo"`` for the same,
            ``"entropy"``. Default: the first advantage there is, else the first signal.
        against: what to show beside it at first, with the difference if both are of one kind.
        limit: at most so many responses, in whole groups; at least one group is shown.
        step: only the records of this training step; the first one is 0.
        title: what the page is called. Default: the file's name.

    Raises:
        InputError: no records, a malformed file, a rule or series that is not there.
        MissingSignalError: a rule needs a signal that the rollouts lack.

    Example:
        >>> import torch
        >>> batch = Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 2),
        ...                  entropy=torch.tensor([[0.1, 2.0], [0.2, 1.0]]))
        >>> page = view(batch, credit=["gtpo", "grpo"], tokens=[["so", " 4"], ["so", " 5"]])
        >>> page.summary.responses, page.summary.tokens, "<script src" in page.html
        (2, 4, False)
    """
    _check_texts(by=by, against=against, title=title)
    file = io.BytesIO()
    if isinstance(rollouts, (str, os.PathLike)):
        rules = _rules(credit, tokens)
        with recorded_groups(rollouts, credit=rules, limit=limit, step=step) as groups:
            summary = write_page(
                groups, file, title=title or _name(rollouts), by=by, against=against
            )
    else:
        if isinstance(rollouts, Rollouts):
            records = _of_batch(rollouts, credit, tokens)
        else:
            records = _listed(rollouts)
            if rules := _rules(credit, tokens):
                records = _assigned(records, rules)
        groups = _limited(_grouped(records), limit, step, None)
        summary = write_page(groups, file, title=title or "rollouts", by=by, against=against)
    return Page(file.getvalue().decode("utf-8"), summary)


def save_page(
    source: _Path,
    target: Path,
    *,
    overwrite: bool = False,
    credit: Iterable[Rule] = (),
    by: str | None = None,
    against: str | None = None,
    limit: int | None = None,
    step: int | None = None,
    on_progress: OnProgress | None = None,
) -> PageSummary:
    """A file of records or a run folder as a page in a file, group by group, in little memory.

    Args:
        source: as in `view`; `"-"` is standard input.
        target: the page; appears when it is complete.
        overwrite: replace `target` if it exists and is not the source.
        credit: rules to assign first.
        by: as in `view`.
        against: as in `view`.
        limit: as in `view`.
        step: as in `view`.
        on_progress: called with the number of responses read so far.

    Raises:
        InputError: as in `view`; or the target exists or cannot be written.
    """
    _refuse_existing(target, overwrite)
    records = records_of(source)
    if what_is(records) == what_is(target) == "file" and Path(records).samefile(target):
        raise InputError(f"{target}: holds the records; give the page another name")
    with (
        recorded_groups(
            source, credit=credit, limit=limit, step=step, on_progress=on_progress
        ) as groups,
        opened_aside(target) as file,
    ):
        return write_page(groups, file, title=_name(source), by=by, against=against)


@contextmanager
def recorded_groups(
    source: _Path,
    *,
    credit: Iterable[Rule] = (),
    limit: int | None = None,
    step: int | None = None,
    on_progress: OnProgress | None = None,
) -> Generator[Iterator[Sequence[Record]]]:
    """The groups of a file of records or a run folder, with more credit if that is asked for.

    Args:
        source: as in `view`; `"-"` is standard input.
        credit: rules to assign; the whole file is assigned first, to a temporary one.
        limit: as in `view`.
        step: as in `view`.
        on_progress: called with the number of responses read so far.

    Raises:
        InputError: as in `view`.
    """
    path = records_of(source)
    with tempfile.TemporaryDirectory(prefix="tokencredit-") as folder:
        taken = set[str]()
        for number, rule in enumerate(credit):
            if not number:
                path, taken = _kept(path, Path(folder) / "records.jsonl")
            name = rule.name
            while name in taken:
                name += "*"
            taken.add(name)
            assigned = Path(folder) / f"{number}.jsonl"
            with _told_of(path, os.fspath(source)):
                assign_file(path, assigned, rule, name=name)
            path = assigned
        with open_source(path) as opened:
            groups = (group for _, group in opened.groups())
            yield _limited(groups, limit, step, on_progress)


@contextmanager
def _told_of(copy: _Path, name: str) -> Generator[None]:
    """Errors name what the user knows, not a temporary copy of it."""
    try:
        yield
    except InputError as error:
        text = str(error).replace(os.fspath(copy), name)
        kind = MissingSignalError if isinstance(error, MissingSignalError) else InputError
        raise kind(text) from error


def _kept(path: _Path, copy: Path) -> tuple[_Path, set[str]]:
    """A path that can be read more than once, and the rules whose credit the records hold."""
    if os.fspath(path) == "-" or what_is(path) == "other":
        with RecordWriter(copy) as writer:
            for record in read_records(path):
                writer.write(record)
        path = copy
    first = next(read_groups(path), ())
    return path, {rule for record in first for rule in record.credit}


def records_of(source: _Path) -> _Path:
    """The file of records: the source itself, or that of a run folder.

    Raises:
        InputError: a folder that holds no records.
    """
    if os.fspath(source) == "-" or what_is(source) != "folder":
        return source
    path = Path(source) / ROLLOUTS
    if what_is(path) == "nothing":
        raise InputError(
            f"{source}: is a folder without {ROLLOUTS}; name a file of records, or a run folder "
            "of `tokencredit train` with a method (not --credit none) and record_every above 0"
        )
    return path


def _limited(
    groups: Iterable[Sequence[Record]],
    limit: int | None,
    step: int | None,
    on_progress: OnProgress | None,
) -> Iterator[Sequence[Record]]:
    for name, value in (("limit", limit), ("step", step)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"view: {name} must be an integer, got {value!r}")
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1 response, got {limit}")
    count = 0
    steps: dict[int, None] = {}
    for whole in groups:
        group = whole
        if step is not None:
            steps.update(dict.fromkeys(r.step for r in whole if r.step is not None))
            group = [record for record in whole if record.step == step]
            if not group:
                continue
        if limit is not None and count and count + len(group) > limit:
            return
        yield group
        count += len(group)
        if on_progress is not None:
            on_progress(count)
    if step is not None and not count:
        there = f"; there are {_ranges(list(steps))}" if steps else "; they do not say their step"
        raise InputError(f"there are no records of step {step}{there}")


def _ranges(steps: Sequence[int]) -> str:
    if len(steps) <= _FEW:
        return ", ".join(map(str, sorted(steps)))
    return f"{len(steps)} between {min(steps)} and {max(steps)}"


def _listed(records: object) -> list[Record]:
    """What is neither a batch nor a path."""
    if isinstance(records, Iterable) and not isinstance(records, (bytes, Mapping)):
        listed = list(cast("Iterable[object]", records))
        if all(isinstance(record, Record) for record in listed):
            return cast("list[Record]", listed)
    raise InputError(
        "view: rollouts must be Rollouts, records, or a path, got "
        f"{type(cast('object', records)).__name__}"
    )


def _grouped(records: Iterable[Record]) -> Iterator[Sequence[Record]]:
    seen = set[str | int]()
    for name, group in groupby(records, key=lambda record: record.group):
        if name in seen:
            raise InputError(
                f"view: group {name!r} reappears after another one; put its records together"
            )
        seen.add(name)
        yield tuple(group)


def _of_batch(
    rollouts: Rollouts, credit: object, tokens: Sequence[Sequence[str | bytes]] | None
) -> list[Record]:
    given: dict[str, Credit] = {}
    if isinstance(credit, Mapping):
        for name, value in cast("Mapping[str, Any]", credit).items():
            given[name] = value if isinstance(value, Credit) else assign(rollouts, resolve(value))
    else:
        for rule in _rules(credit, None):
            if rule.name in given:
                raise InputError(
                    f"view: two of the rules are called {rule.name!r}; give them names of your "
                    "own: credit={'one': ..., 'other': ...}"
                )
            given[rule.name] = assign(rollouts, rule)
    records = records_from_rollouts(rollouts, tokens=tokens)
    # Records leave out padding and the rows that are not real: so must the credit.
    real = rollouts.real
    masks = cast("list[list[int]]", rollouts.mask[real].int().tolist())
    start = torch.tensor([response_columns(mask)[0] for mask in masks], device=real.device)
    for name, value in given.items():
        if value.advantage.shape != rollouts.mask.shape:
            raise InputError(
                f"view: credit {name!r} has shape {list(value.advantage.shape)}, the rollouts "
                f"{list(rollouts.mask.shape)}; give the credit of these rollouts"
            )
        about: dict[str, Any] = {}
        if value.rule is not None:
            about = {"rule": value.rule.name, "options": value.rule.options()}

        def own(values: Tensor | None) -> Tensor | None:
            if values is None or values.dim() == 1:
                return None if values is None else values[real]
            width = values.shape[1]
            places = torch.arange(width, device=real.device) + start.unsqueeze(1)
            return values[real].gather(1, places.clamp(max=max(width - 1, 0)))

        cut = dataclasses.replace(
            value,
            advantage=cast("Tensor", own(value.advantage)),
            base=value.base[real],
            in_loss=value.in_loss[real],
            reward=own(value.reward),
            weight=own(value.weight),
        )
        records = records_with_credit(records, name, cut, meta=about)
    return sorted(records, key=_place)


def _place(record: Record) -> int:
    assert isinstance(record.group, int)
    return record.group


def _assigned(records: Sequence[Record], rules: Sequence[Rule]) -> list[Record]:
    with tempfile.TemporaryDirectory(prefix="tokencredit-") as folder:
        path = Path(folder) / ROLLOUTS
        with RecordWriter(path) as writer:
            for record in records:
                writer.write(record)
        with _told_of(path, "view"), recorded_groups(path, credit=rules) as groups:
            return [record for group in groups for record in group]


def _rules(credit: object, tokens: object) -> list[Rule]:
    """For what is no batch: rules alone, and no texts beside the records' own."""
    if isinstance(credit, Mapping):
        raise InputError("view: credit by name is for a batch of Rollouts; records hold their own")
    if tokens is not None:
        raise InputError("view: tokens are for a batch of Rollouts; records hold their own")
    listed: Any = [credit] if isinstance(credit, (str, Rule)) else credit
    if not isinstance(listed, Iterable):
        raise InputError(
            f"view: credit must be rules, or names of rules, got {type(credit).__name__}"
        )
    return [resolve(rule) for rule in cast("Iterable[Any]", listed)]


def _check_texts(**texts: object) -> None:
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise InputError(f"view: {name} must be a text, got {type(value).__name__}")


def _name(source: _Path) -> str:
    text = os.fspath(source)
    return "standard input" if text == "-" else Path(text).resolve().name


def _refuse_existing(path: Path, overwrite: bool) -> None:
    kind = what_is(path)
    if kind == "folder":
        raise InputError(f"{path}: is a folder; name a file")
    if kind == "file" and not overwrite:  # a device or a pipe is written to, not replaced
        raise InputError(f"{path}: exists already; give --overwrite (overwrite=True) to replace it")
