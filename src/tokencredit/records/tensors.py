"""Between records and tensors: records to `Rollouts`, and `Credit` to records."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tokencredit.credit import Credit
from tokencredit.errors import InputError
from tokencredit.records.schema import CreditRecord, Record
from tokencredit.rollouts import Rollouts

__all__ = ["compact", "records_from_rollouts", "records_with_credit", "rollouts_from_records"]

# Six digits are enough for most float32 numbers that a person wrote, nine for every one.
_DIGITS = (6, 7, 8, 9)


def compact(values: Tensor) -> list[Any]:
    """A tensor as (nested) lists of the shortest decimal numbers that are the same in float32.

    `tolist` spells out a float32 as the float64 of the same value, 0.10000000149011612; here it
    is 0.1, which reads back as the same float32. NaN becomes None. Very small and very large
    numbers may keep more digits than they need.

    Args:
        values: any shape, any float type; taken as float32.

    Returns:
        What `tolist` would give.

    Example:
        >>> compact(torch.tensor([[0.1, float("nan")], [1 / 3, 2.0]]))
        [[0.1, None], [0.33333334, 2.0]]
    """
    single = values.detach().to("cpu", torch.float32)
    exact = single.double()
    magnitude = exact.abs().clamp(min=1e-300).log10().floor()
    short = exact
    for digits in reversed(_DIGITS):
        # Both the scale and the scaled integer are exact, so the quotient is the double nearest
        # to the decimal number, the one that prints with these digits.
        power = digits - 1 - magnitude
        scale = torch.pow(10.0, power.abs())
        up = torch.where(power >= 0, exact * scale, exact / scale).round()
        candidate = torch.where(power >= 0, up / scale, up * scale)
        short = torch.where(candidate.to(torch.float32) == single, candidate, short)
    return _none_for_nan(short.tolist())


def rollouts_from_records(
    records: Sequence[Record], *, signals: Iterable[str] | None = None
) -> Rollouts:
    """Records as one batch of `Rollouts`, padded on the right.

    - `reward` None: NaN, not scored, so the response is in no statistic.
    - `success` of the records if all have it, the default of `Rollouts` if none has.
    - `keep` False: counts in the statistics, not in the loss. `truncated` alone changes nothing:
      whether truncated responses train is a choice of the recipe that made the file.
    - `signals`: None in a record is NaN, unknown; so is a whole signal that this record lacks
      and another one has.
    - `token_ids` where all records have them, padded with 0.

    Args:
        records: usually whole groups; rules that read a group need all of it.
        signals: the names of the signals to carry. Default: every one that some record has.

    Raises:
        InputError: no records, some have `success` and some have not, or a reward or signal is
            beyond what float32 holds.

    Example:
        >>> records = [
        ...     Record(group="a", token_ids=[5, 7], mask=[1, 1], reward=1.0,
        ...            signals={"entropy": [0.5, None]}),
        ...     Record(group="a", token_ids=[6], mask=[1], reward=None),
        ... ]
        >>> rollouts = rollouts_from_records(records)
        >>> rollouts.mask.tolist(), rollouts.real.tolist()
        ([[True, True], [True, False]], [True, False])
        >>> rollouts.signals["entropy"].tolist()
        [[0.5, nan], [nan, nan]]
    """
    if not records:
        raise InputError("rollouts_from_records: no records; give at least one")
    with_success = sum(record.success is not None for record in records)
    if 0 < with_success < len(records):
        raise InputError(
            f"rollouts_from_records: {with_success} of {len(records)} records have 'success'; "
            "give it to all of them or to none"
        )
    if signals is None:
        signals = dict.fromkeys(name for record in records for name in record.signals)
    ids = [record.token_ids for record in records]
    return Rollouts(
        _single([math.nan if r.reward is None else r.reward for r in records], "reward"),
        [record.group for record in records],
        _padded([record.mask for record in records], 0, torch.bool),
        success=torch.tensor([bool(r.success) for r in records]) if with_success else None,
        keep=torch.tensor([record.keep is not False for record in records]),
        signals={
            name: _single(_filled([_signal(r, name) for r in records], math.nan), f"signals.{name}")
            for name in signals
        },
        token_ids=None if None in ids else _padded([i or () for i in ids], 0, torch.int64),
    )


def records_from_rollouts(
    rollouts: Rollouts, *, tokens: Sequence[Sequence[str | bytes]] | None = None
) -> list[Record]:
    """A batch of `Rollouts` as records, in its order; the other way of `rollouts_from_records`.

    Columns before a response's first masked token and after its last one are padding and left
    out. Rows that are not `real` are left out. Groups are numbered in order of appearance, as
    `Rollouts` does; a group's rows should stand together, as they must in a file.

    Args:
        rollouts: on any device.
        tokens: the texts of each row's columns, at least up to its last masked one. A record
            needs them where the rollouts have no `token_ids`; without either, a token's text
            is empty.

    Raises:
        InputError: `tokens` has not one entry a row, or too few texts in one.

    Example:
        >>> rollouts = Rollouts(torch.tensor([1.0]), [0], torch.tensor([[1, 1, 0]]),
        ...                     entropy=torch.tensor([[0.5, float("nan"), 9.0]]))
        >>> [record] = records_from_rollouts(rollouts, tokens=[["a", "b"]])
        >>> record.tokens, record.signals
        (('a', 'b'), {'entropy': (0.5, None)})
    """
    if tokens is not None and len(tokens) != rollouts.responses:
        raise InputError(
            f"records_from_rollouts: tokens has {len(tokens)} rows for {rollouts.responses} "
            "responses; give one each"
        )
    masks = cast("list[list[int]]", rollouts.mask.int().tolist())
    ids: list[list[int]] | None = None
    if rollouts.token_ids is not None:
        ids = cast("list[list[int]]", rollouts.token_ids.tolist())
    signals = {name: compact(value) for name, value in rollouts.signals.items()}
    rewards, success = compact(rollouts.rewards), cast("list[bool]", rollouts.success.tolist())
    keep, real = (cast("list[bool]", v.tolist()) for v in (rollouts.keep, rollouts.real))
    group = cast("list[int]", rollouts.group.tolist())
    records: list[Record] = []
    for row, mask in enumerate(masks):
        if not real[row]:
            continue
        own = slice(*response_columns(mask))
        if tokens is not None and len(tokens[row]) < own.stop:
            raise InputError(
                f"records_from_rollouts: tokens[{row}] has {len(tokens[row])} texts, but the "
                f"response ends in column {own.stop}"
            )
        texts = None if tokens is None else tokens[row][own]
        if texts is None and ids is None:
            texts = [""] * (own.stop - own.start)
        records.append(
            Record(
                group=group[row],
                token_ids=None if ids is None else ids[row][own],
                tokens=texts,
                mask=mask[own],
                reward=rewards[row],
                success=success[row],
                keep=keep[row],
                signals={name: values[row][own] for name, values in signals.items()},
            )
        )
    return records


def response_columns(mask: Sequence[int]) -> tuple[int, int]:
    """From the first masked token to behind the last one."""
    places = [place for place, masked in enumerate(mask) if masked]
    return (places[0], places[-1] + 1) if places else (0, 0)


def records_with_credit(
    records: Sequence[Record],
    name: str,
    credit: Credit,
    *,
    meta: Mapping[str, Any] | None = None,
) -> list[Record]:
    """The records with one more entry in `credit`, replacing one of the same name.

    Outside the mask an advantage is 0, which is what the loss multiplies there, while a weight
    or a shaped token reward is None: there is none. NaN is None as well. Numbers are `compact`:
    equal to the tensors' in float32.

    Args:
        records: those that the rollouts were made of, in the same order, padded on the right.
        name: the name of the entry, usually the rule's.
        credit: what `tokencredit.assign` gave for them.
        meta: kept under `meta["credit"][name]`: the rule's options, the version.

    Raises:
        InputError: the credit is of another batch.

    Example:
        >>> record = Record(group="a", tokens=["x", "y"], mask=[1, 0], reward=1.0)
        >>> credit = Credit(
        ...     advantage=torch.tensor([[0.1, 0.0]]),
        ...     base=torch.tensor([0.1]),
        ...     in_loss=torch.tensor([True]),
        ...     weight=torch.ones(1, 2),
        ... )
        >>> records_with_credit([record], "mine", credit)[0].credit["mine"]
        CreditRecord(base=0.1, reward=None, weight=(1.0, None), advantage=(0.1, 0.0))
    """
    longest = max((record.length for record in records), default=0)
    rows, columns = credit.advantage.shape
    if rows != len(records) or columns < longest:
        raise InputError(
            f"records_with_credit: the credit has shape [{rows}, {columns}], but there are "
            f"{len(records)} records of up to {longest} tokens; give the records it was made from"
        )
    base, advantage = compact(credit.base), compact(credit.advantage)
    reward = None if credit.reward is None else compact(credit.reward)
    weight = None if credit.weight is None else compact(credit.weight)
    extended: list[Record] = []
    for row, record in enumerate(records):

        def tokens(values: list[Any], row: int = row, record: Record = record) -> list[Any]:
            return [v if m else None for v, m in zip(values[row], record.mask, strict=False)]

        entry = CreditRecord(
            base=base[row],
            reward=None
            if reward is None
            else (tokens(reward) if isinstance(reward[row], list) else reward[row]),
            weight=None if weight is None else tokens(weight),
            advantage=[v if m else 0.0 for v, m in zip(advantage[row], record.mask, strict=False)],
        )
        changes: dict[str, Any] = {"credit": {**record.credit, name: entry}}
        if meta is not None:
            before: Any = record.meta.get("credit")
            others = cast("dict[str, Any]", before) if isinstance(before, dict) else {}
            changes["meta"] = {**record.meta, "credit": {**others, name: dict(meta)}}
        extended.append(dataclasses.replace(record, **changes))
    return extended


def _signal(record: Record, name: str) -> list[float]:
    values = record.signals.get(name)
    if values is None:
        return [math.nan] * record.length
    return [math.nan if value is None else value for value in values]


def _single(values: Sequence[Any], field: str) -> Tensor:
    """In float32; a number that would become infinite there, and then count as unknown, is refused.

    Records hold finite numbers alone.
    """
    exact = torch.tensor(values, dtype=torch.float64)
    single = exact.to(torch.float32)
    if bool(single.isinf().any()):
        beyond = float(exact[single.isinf()][0])
        raise InputError(f"records: field '{field}': {beyond:g} is beyond what float32 holds")
    return single


def _filled(rows: Sequence[Sequence[float]], padding: float) -> list[list[float]]:
    longest = max(map(len, rows))
    return [[*row, *[padding] * (longest - len(row))] for row in rows]


def _padded(rows: Sequence[Sequence[float]], padding: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(_filled(rows, padding), dtype=dtype)


def _none_for_nan(values: Any) -> Any:
    if not isinstance(values, list):
        return None if values != values else values
    items = cast("list[Any]", values)
    if items and isinstance(items[0], list):
        return [_none_for_nan(item) for item in items]
    return [None if item != item else item for item in items]
