"""Some whole groups of a file at a time, as records and as tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from tokencredit.doctor.report import Place
from tokencredit.records.schema import Record
from tokencredit.records.tensors import rollouts_from_records
from tokencredit.rollouts import Rollouts

__all__ = ["TRUE_ABOVE", "Batch", "right"]

TRUE_ABOVE = 0.5
"""Where nothing says whether a response is right, a reward above it does."""


@dataclass(eq=False)
class Batch:
    """Whole groups, with what the checks found out about them so far.

    Attributes:
        file: the name of the file.
        groups: the first line and the records of each group.
        broken: numbers of the groups whose masks or signals are at fault, so that their credit
            cannot be judged.
        suspect: numbers of the groups in which `success` may be at fault.
        repeated: numbers of the groups that are copies of an earlier one.
    """

    file: str
    groups: list[tuple[int, tuple[Record, ...]]]
    broken: set[int] = field(default_factory=set[int])
    suspect: set[int] = field(default_factory=set[int])
    repeated: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self.records = [record for _, group in self.groups for record in group]
        self.group_of = [i for i, (_, group) in enumerate(self.groups) for _ in group]
        self.index = [k for _, group in self.groups for k in range(len(group))]

    def place(self, row: int, token: int | None, detail: str) -> Place:
        """The place of one response or token, by its row in this batch."""
        line = self.groups[self.group_of[row]][0] + self.index[row]
        return Place(self.file, line, self.index[row], token, detail)

    @cached_property
    def rollouts(self) -> Rollouts:
        """All rows as tensors; a response without `success` gets what its reward says."""
        records = self.records
        given = sum(record.success is not None for record in records)
        if 0 < given < len(records):
            records = [dataclasses.replace(r, success=right(r)) for r in records]
        return rollouts_from_records(records)

    @cached_property
    def sound(self) -> Tensor:
        """``[b]`` bool: the rows outside the broken groups, at the time of the first call."""
        return self.rollouts.mask.new_tensor([g not in self.broken for g in self.group_of])


def right(record: Record) -> bool:
    """Whether a response counts as right.

    Example:
        >>> right(Record(group=0, tokens=["x"], mask=[1], reward=1.0))
        True
    """
    if record.success is not None:
        return record.success
    return record.reward is not None and record.reward > TRUE_ABOVE
