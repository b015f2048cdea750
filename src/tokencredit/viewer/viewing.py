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

from tokencredit.credit import Credit, assign
from tokencredit.errors import InputError
from tokencredit.files import opened_aside
from tokencredit.methods.registry import resolve
from tokencredit.methods.rule import Rule
from tokencredit.records.assigning import assign_file
from tokencredit.records.reading import open_source
from tokencredit.records.schema import Record
from tokencredit.records.tensors import records_from_rollouts, records_with_credit
from tokencredit.rollouts import Rollouts
from tokencredit.viewer.page import PageSummary, write_page

__all__ = ["ROLLOUTS", "Page", "recorded_groups", "save_page", "view"]

ROLLOUTS = "rollouts.jsonl"
"""The records in a run folder."""

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
    credit: str | Rule | Iterable[str | Rule] | Mapping[str, Credit] = (),
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
        rollouts: a batch; records, the responses of a group together; a file of records; or a run
            folder.
        credit: rules to assign first, by name or as objects; for a batch also the `Credit` that
            you have, by name. Records keep the credit that they hold.
        tokens: for a batch: the texts of each row's tokens, for example
            ``[tokenizer.convert_ids_to_tokens(ids) for ids in rollouts.token_ids]``. Without
            them tokens are shown by their ids.
        by: what to colour by at first: ``"gtpo.advantage"``, ``"gtpo"`` for the same,
            ``"entropy"``. Default: the first advantage there is, else the first signal.
        against: what to show beside it at first, with the difference if both are of one kind.
        limit: at most so many responses, in whole groups; at least one group is shown.
        step: only the records of this training step.
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
    file = io.BytesIO()
    name = title
    if isinstance(rollouts, (str, os.PathLike)):
        _refuse_batch_arguments(credit, tokens)
        with recorded_groups(rollouts, credit=_rules(credit), limit=limit, step=step) as groups:
            summary = write_page(
                groups, file, title=name or _name(rollouts), by=by, against=against
            )
    else:
        if isinstance(rollouts, Rollouts):
            records = _of_batch(rollouts, credit, tokens)
        else:
            _refuse_batch_arguments(credit, tokens)
            records = list(rollouts)
            if rules := _rules(credit):
                records = _assigned(records, rules)
        groups = _limited(_grouped(records), limit, step, None)
        summary = write_page(groups, file, title=name or "rollouts", by=by, against=against)
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
        overwrite: replace `target` if it exists.
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
        for number, rule in enumerate(credit):
            assigned = Path(folder) / f"{number}.jsonl"
            assign_file(path, assigned, rule)
            path = assigned
        with open_source(path) as opened:
            groups = (group for _, group in opened.groups())
            yield _limited(groups, limit, step, on_progress)


def records_of(source: _Path) -> _Path:
    """The file of records: the source itself, or that of a run folder.

    Raises:
        InputError: a folder that holds no records.
    """
    if os.fspath(source) == "-" or not Path(source).is_dir():
        return source
    path = Path(source) / ROLLOUTS
    if not path.exists():
        raise InputError(
            f"{source}: is a folder without {ROLLOUTS}; name a run folder of `tokencredit train` "
            "(with record_every > 0) or a file of records"
        )
    return path


def _limited(
    groups: Iterable[Sequence[Record]],
    limit: int | None,
    step: int | None,
    on_progress: OnProgress | None,
) -> Iterator[Sequence[Record]]:
    if limit is not None and limit < 1:
        raise InputError(f"limit must be at least 1 response, got {limit}")
    count = 0
    for group in groups:
        if step is not None and group[0].step != step:
            continue
        if limit is not None and count and count + len(group) > limit:
            return
        yield group
        count += len(group)
        if on_progress is not None:
            on_progress(count)
    if step is not None and not count:
        raise InputError(f"there are no records of step {step}")


def _grouped(records: Iterable[Record]) -> Iterator[Sequence[Record]]:
    for _, group in groupby(records, key=lambda record: record.group):
        yield tuple(group)


def _of_batch(
    rollouts: Rollouts,
    credit: str | Rule | Iterable[str | Rule] | Mapping[str, Credit],
    tokens: Sequence[Sequence[str | bytes]] | None,
) -> list[Record]:
    given: dict[str, Credit]
    if isinstance(credit, Mapping):
        given = dict(cast("Mapping[str, Credit]", credit))
    else:
        given = {rule.name: assign(rollouts, rule) for rule in _rules(credit)}
    # Records leave out the rows that are not real and each row's padding; credit is cut to them.
    records = records_from_rollouts(rollouts, tokens=tokens)
    real = rollouts.real
    for name, value in given.items():
        if value.advantage.shape != rollouts.mask.shape:
            raise InputError(
                f"view: credit {name!r} has shape {list(value.advantage.shape)}, the rollouts "
                f"{list(rollouts.mask.shape)}; give the credit of these rollouts"
            )
        about: dict[str, Any] = {}
        if value.rule is not None:
            about = {"rule": value.rule.name, "options": value.rule.options()}
        cut = dataclasses.replace(
            value,
            advantage=value.advantage[real],
            base=value.base[real],
            in_loss=value.in_loss[real],
            reward=None if value.reward is None else value.reward[real],
            weight=None if value.weight is None else value.weight[real],
        )
        records = records_with_credit(records, name, cut, meta=about)
    return sorted(records, key=lambda record: _place(record))


def _place(record: Record) -> int:
    assert isinstance(record.group, int)
    return record.group


def _assigned(records: Sequence[Record], rules: Sequence[Rule]) -> list[Record]:
    from tokencredit.records.writing import RecordWriter

    with tempfile.TemporaryDirectory(prefix="tokencredit-") as folder:
        path = Path(folder) / ROLLOUTS
        with RecordWriter(path) as writer:
            for record in records:
                writer.write(record)
        with recorded_groups(path, credit=rules) as groups:
            return [record for group in groups for record in group]


def _rules(credit: str | Rule | Iterable[str | Rule] | Mapping[str, Credit]) -> list[Rule]:
    listed = [credit] if isinstance(credit, (str, Rule)) else credit
    return [resolve(rule) for rule in listed]


def _refuse_batch_arguments(credit: object, tokens: object) -> None:
    if isinstance(credit, Mapping):
        raise InputError("view: credit by name is for a batch of Rollouts; records hold their own")
    if tokens is not None:
        raise InputError("view: tokens are for a batch of Rollouts; records hold their own")


def _name(source: _Path) -> str:
    text = os.fspath(source)
    return "standard input" if text == "-" else Path(text).resolve().name


def _refuse_existing(path: Path, overwrite: bool) -> None:
    if path.is_dir():
        raise InputError(f"{path}: is a folder; name a file")
    if path.exists() and not overwrite:
        raise InputError(f"{path}: exists already; give --overwrite (overwrite=True) to replace it")
