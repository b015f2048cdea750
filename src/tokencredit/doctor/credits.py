"""Credit that does not keep what its method promises.

Each entry of `credit` is formed again from the record's own rewards and signals, by the rule and
the options under `meta.credit.NAME`, and compared; laws of the method say more closely what is
wrong, and hold where it cannot be formed again.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tokencredit.credit import Credit, assign
from tokencredit.doctor.batch import Batch
from tokencredit.doctor.report import Finding, Place, Tally
from tokencredit.errors import InputError
from tokencredit.methods.dapo import DAPO
from tokencredit.methods.datc import DATC
from tokencredit.methods.grpo import GRPO, DrGRPO
from tokencredit.methods.grpo_s import GRPO_S
from tokencredit.methods.registry import resolve
from tokencredit.methods.rule import Rule
from tokencredit.records.schema import CreditRecord, Record

__all__ = ["Credits", "Entry", "entries_of"]

TOLERANCE = 1e-4
"""Of each number, or of 1 where the number is smaller: float32 and another order of summation
leave less, and a fault that is worth a finding more."""


@dataclass(frozen=True)
class Entry:
    """One entry of `credit` in a group: its name, and its rule, or why it has none.

    Attributes:
        name: the key in `credit`.
        rule: the rule with the stored options.
        unknown: why there is no rule to compare with.
    """

    name: str
    rule: Rule | None
    unknown: str = ""

    @property
    def whole_batch(self) -> bool:
        """Whether the rule needs all groups of a generation batch at once."""
        rule = self.rule
        return rule is not None and (rule.whole_batch or getattr(rule, "scale", "") == "batch")


def entries_of(group: tuple[Record, ...]) -> tuple[Entry, ...]:
    """The entries of a group's credit, with the rules as the first record states them.

    Example:
        >>> record = Record(group=0, tokens=["x"], mask=[1], reward=1.0,
        ...                 credit={"grpo": CreditRecord(base=0.0)},
        ...                 meta={"credit": {"grpo": {"options": {"correction": 0}}}})
        >>> entries_of((record,))
        (Entry(name='grpo', rule=GRPO(scale='group', correction=0, eps=0.0), unknown=''),)
    """
    names = dict.fromkeys(name for record in group for name in record.credit)
    given: object = group[0].meta.get("credit")
    stated = cast("dict[str, Any]", given) if isinstance(given, dict) else {}
    return tuple(_entry(name, stated.get(name)) for name in names)


def _entry(name: str, stated: object) -> Entry:
    if not isinstance(stated, dict):
        return Entry(name, None, f"meta.credit.{name} does not say with which options")
    about = cast("dict[str, Any]", stated)
    rule, options = about.get("rule", name), about.get("options")
    if not isinstance(rule, str) or not isinstance(options, dict):
        return Entry(name, None, f"meta.credit.{name} does not say with which options")
    try:
        return Entry(name, resolve(rule, cast("dict[str, Any]", options)))
    except InputError as error:
        return Entry(name, None, str(error))


class Credits:
    """Compares each entry with what its rule gives."""

    def __init__(self) -> None:
        self._broken: dict[str, list[tuple[str, Place, bool]]] = {}
        self._number: dict[str, Counter[tuple[str, bool]]] = {}
        self._responses: Counter[str] = Counter()
        self._unjudged: dict[tuple[str, str], Tally] = {}
        self._set_aside = Tally()

    def look(self, batch: Batch, entries: tuple[Entry, ...]) -> None:
        """Look at one batch whose groups all have these entries."""
        if not entries:
            return
        for entry in entries:
            self._entry(batch, entry)

    def _entry(self, batch: Batch, entry: Entry) -> None:
        stored = _Stored(batch, entry.name)
        rule = entry.rule
        spoilt = bool(batch.broken or batch.repeated)
        aside = entry.whole_batch and spoilt
        judged = [
            not aside and g not in batch.broken and here
            for g, here in zip(batch.group_of, stored.here, strict=True)
        ]
        for row, here in enumerate(stored.here):
            if here and not judged[row]:
                self._set_aside.add(batch.place(row, None, ""))
        self._responses[entry.name] += sum(stored.here)
        problems = _general_laws(batch, stored)
        if rule is not None:
            problems += _laws(batch, stored, rule)
            unknown = self._compare(batch, stored, rule, problems)
        else:
            unknown = entry.unknown
        if unknown:
            tally = self._unjudged.setdefault((entry.name, unknown), Tally())
            tally.add(batch.place(0, None, ""), sum(judged))
        seen: set[int] = set()
        for law, row, token, detail in problems:
            if judged[row] and row not in seen:
                seen.add(row)
                self._add(batch, entry.name, law, row, token, detail)

    def _add(
        self, batch: Batch, name: str, law: str, row: int, token: int | None, detail: str
    ) -> None:
        suspect = batch.group_of[row] in batch.suspect
        number = self._number.setdefault(name, Counter())
        if not number[law, suspect]:
            place = batch.place(row, token, detail)
            self._broken.setdefault(name, []).append((law, place, suspect))
        number[law, suspect] += 1

    def _compare(self, batch: Batch, stored: _Stored, rule: Rule, problems: list[_Problem]) -> str:
        """Add what differs from the rule's own credit; why not, where that cannot be formed."""
        rollouts = batch.rollouts
        absent = [name for name in rule.needs if name not in rollouts.signals]
        if absent:
            return f"the records lack the signal {' and '.join(map(repr, absent))}"
        base = torch.where(stored.base.isfinite(), stored.base, torch.nan)
        rollouts = rollouts.replace(base=base.to(torch.float32))
        best: list[_Problem] | None = None
        # What a verdict that did not come means is not in the record: the trainer leaves the
        # response out, a file without it counts it as wrong. Either is right.
        for real in _possible_rows(batch, rule):
            try:
                credit = assign(rollouts if real is None else rollouts.replace(real=real), rule)
            except InputError as error:
                return str(error)
            found = _differences(batch, stored, credit)
            if best is None or len(found) < len(best):
                best = found
            if not best:
                break
        problems += best or []
        return ""

    def findings(self, *, success_at_fault: bool, file_at_fault: bool) -> list[Finding]:
        """One finding an entry that is broken, and notes on what could not be judged.

        Args:
            success_at_fault: leave out groups whose `success` is in doubt: the cause is named.
            file_at_fault: leave out everything, as signals are at fault throughout.
        """
        found: list[Finding] = []
        left_out = 0
        for name, laws in self._broken.items():
            kept: list[tuple[str, Place]] = []
            count = 0
            parts: Counter[str] = Counter()
            for law, place, suspect in laws:
                number = self._number[name][law, suspect]
                if file_at_fault or (suspect and success_at_fault):
                    left_out += number
                    continue
                kept.append((law, place))
                parts[law] += number
                count += number
            if not kept:
                continue
            what = "; ".join(f"{law} ({number} responses)" for law, number in parts.items())
            found.append(
                Finding(
                    "credit",
                    "fault",
                    f"{name} does not keep what it promises: {what}",
                    count,
                    self._responses[name],
                    "responses",
                    kept[0][1],
                    f"assign it again (tokencredit assign --credit ...), and see what changes "
                    f"rewards, success, signals or credit between {name} and the file",
                )
            )
        for (name, why), tally in self._unjudged.items():
            if tally.count:
                found.append(
                    Finding(
                        "credit",
                        "note",
                        f"{name} could not be formed again: {why}",
                        tally.count,
                        self._responses[name],
                        "responses",
                        None,
                        "write the rule's options and the signals it needs into the records",
                    )
                )
        if left_out + self._set_aside.count:
            found.append(
                Finding(
                    "credit",
                    "note",
                    "credit was not judged where what it is made of is at fault",
                    left_out + self._set_aside.count,
                    sum(self._responses.values()),
                    "responses",
                    None,
                    "mend the other faults first, then assign the credit again",
                )
            )
        return found


_Problem = tuple[str, int, "int | None", str]


class _Stored:
    """One entry of all rows as tensors; NaN where a number is unknown or not given."""

    def __init__(self, batch: Batch, name: str) -> None:
        entries = [record.credit.get(name) for record in batch.records]
        width = batch.rollouts.mask.shape[1]
        self.here = [entry is not None for entry in entries]

        def tokens(field: str) -> Tensor:
            rows: list[list[float | None]] = []
            for entry in entries:
                values: object = None if entry is None else getattr(entry, field)
                row = (
                    list(cast("tuple[float | None, ...]", values))
                    if isinstance(values, tuple)
                    else [cast("float | None", values)] * width
                )
                rows.append(row + [None] * (width - len(row)))
            flat = [[math.nan if v is None else v for v in row] for row in rows]
            return torch.tensor(flat, dtype=torch.float64).reshape(len(rows), width)

        def base(entry: CreditRecord | None) -> float:
            return math.nan if entry is None or entry.base is None else entry.base

        given = [entry is not None and entry.advantage is not None for entry in entries]
        self.given = torch.tensor(given, dtype=torch.bool)
        self.advantage, self.weight = tokens("advantage"), tokens("weight")
        self.reward = tokens("reward")
        self.base = torch.tensor([base(entry) for entry in entries], dtype=torch.float64)


def _rows_of(bad: Tensor) -> list[int]:
    """The indices of the True values of a row of flags."""
    return cast("list[int]", bad.nonzero().flatten().tolist())


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """Where two known numbers differ by more than the tolerance."""
    return (a - b).abs() > TOLERANCE * b.abs().clamp(min=1)


def _problems(
    law: str, bad: Tensor, name: str, values: Tensor, should: Tensor | float
) -> list[_Problem]:
    """The first bad token of each row."""
    found: list[_Problem] = []
    for row in _rows_of(bad.any(dim=1)) if bad.numel() else ():
        token = int(bad[row].int().argmax())
        right = float(should[row, token]) if isinstance(should, Tensor) else should
        detail = f"{name} {float(values[row, token]):.6g}, should be {right:.6g}"
        found.append((law, row, token, detail))
    return found


def _general_laws(batch: Batch, stored: _Stored) -> list[_Problem]:
    mask, keep = batch.rollouts.mask, batch.rollouts.keep.unsqueeze(1)
    given = ~stored.advantage.isnan() & (stored.advantage != 0)
    unknown = batch.rollouts.live & stored.advantage.isnan() & stored.given.unsqueeze(1)
    return [
        *_problems("unknown inside the mask", unknown, "advantage", stored.advantage, 0.0),
        *_problems("not 0 outside the mask", given & ~mask, "advantage", stored.advantage, 0.0),
        *_problems(
            "not 0 where keep is false", given & mask & ~keep, "advantage", stored.advantage, 0.0
        ),
    ]


def _laws(batch: Batch, stored: _Stored, rule: Rule) -> list[_Problem]:
    rollouts = batch.rollouts
    live = rollouts.live & ~stored.advantage.isnan()
    found: list[_Problem] = []
    if isinstance(rule, (GRPO, DrGRPO, DAPO, GRPO_S)):
        number = live.sum(dim=1, keepdim=True).clamp(min=1)
        mean = (torch.where(live, stored.advantage, 0.0).sum(1, True) / number).expand_as(live)
        bad = live & _apart(stored.advantage, mean)
        law = "not constant along a response"
        found += _problems(law, bad, "advantage", stored.advantage, mean)
    if isinstance(rule, DATC):
        weighed = rollouts.live & ~stored.weight.isnan()
        outside = (stored.weight > rule.bound * (1 + TOLERANCE)) | (
            stored.weight < (1 - TOLERANCE) / rule.bound
        )
        found += _problems(
            f"weights beyond [1/{rule.bound:g}, {rule.bound:g}]",
            weighed & outside,
            "weight",
            stored.weight,
            1.0,
        )
        number = weighed.sum(dim=1, keepdim=True).clamp(min=1)
        mean = torch.where(weighed, stored.weight, 0.0).sum(1, True) / number
        bad = weighed & ((mean - 1).abs() > TOLERANCE)
        law = "weights whose mean is not 1"
        found += _problems(law, bad, "mean weight", mean.expand_as(bad), 1.0)
        product = stored.base.unsqueeze(1) * stored.weight
        bad = live & rollouts.keep.unsqueeze(1) & _apart(stored.advantage, product)
        found += _problems("not base times weight", bad, "advantage", stored.advantage, product)
    return found + _uncentred(batch, stored, rule)


def _uncentred(batch: Batch, stored: _Stored, rule: Rule) -> list[_Problem]:
    """Groups whose bases do not sum to 0, of the rules that promise it."""
    centred = isinstance(rule, (GRPO, DrGRPO, DAPO, DATC)) or (
        isinstance(rule, GRPO_S) and rule.normalise == "joint" and rule.normalise_over == "group"
    )
    if not centred:
        return []
    rollouts = batch.rollouts
    known = rollouts.real & stored.base.isfinite()
    base = torch.where(known, stored.base, 0.0)
    zeros = torch.zeros(rollouts.groups, dtype=torch.float64)
    total = zeros.index_add(0, rollouts.group, base)
    number = zeros.index_add(0, rollouts.group, known.double())
    size = zeros.index_add(0, rollouts.group, base.abs())
    unscored = zeros.index_add(0, rollouts.group, (~known).double())
    bad = (total.abs() > TOLERANCE * torch.maximum(number, size)) & (unscored == 0)
    found: list[_Problem] = []
    for row in range(rollouts.responses):
        group = int(rollouts.group[row])
        if bool(bad[group]):
            detail = f"the bases of the group sum to {float(total[group]):.6g}, should be 0"
            found.append(("bases that do not sum to 0 over the group", row, None, detail))
    return found


def _possible_rows(batch: Batch, rule: Rule) -> list[Tensor | None]:
    names = dict.fromkeys(
        name for record in batch.records for name, value in record.rewards.items() if value is None
    )
    if not rule.reads_success or not names:
        return [None]
    present = batch.rollouts.real
    return [
        None,
        *(
            present & torch.tensor([r.rewards.get(name, 0.0) is not None for r in batch.records])
            for name in names
        ),
    ]


def _differences(batch: Batch, stored: _Stored, credit: Credit) -> list[_Problem]:
    live = batch.rollouts.live
    problems = _problems(
        "not the rule's own advantage",
        live & _apart(stored.advantage, credit.advantage.double()),
        "advantage",
        stored.advantage,
        credit.advantage,
    )
    for name, own in (("shaped reward", credit.reward), ("weight", credit.weight)):
        if own is None:
            continue
        values = stored.reward if own is credit.reward else stored.weight
        full = own.double() if own.dim() == 2 else own.double().unsqueeze(1).expand_as(values)
        bad = live & _apart(values, full)
        problems += _problems(f"not the rule's own {name}", bad, name, values, full)
    base = credit.base.double()
    for row in _rows_of(_apart(stored.base, base)):
        if bool(batch.rollouts.real[row]):
            detail = f"base {float(stored.base[row]):.6g}, should be {float(base[row]):.6g}"
            problems.append(("not the rule's own base", row, None, detail))
    return problems


def batch_key(group: tuple[Record, ...], entries: tuple[Entry, ...]) -> object:
    """What groups must share to be looked at together.

    Rules with a statistic over a whole generation batch need it together and alone: the records
    of a step, and within it of one batch, which a trainer's group names tell (`STEP.BATCH.INDEX`).
    """
    first = group[0]
    stated: Any = first.meta.get("credit")
    common = (
        json.dumps(stated, sort_keys=True),
        tuple(entry.name for entry in entries),
        first.success is None,
    )
    if not any(entry.whole_batch for entry in entries):
        return common
    parts = str(first.group).split(".")
    number = parts[1] if len(parts) == 3 and parts[0] == str(first.step) else ""
    return (*common, first.step, number)
