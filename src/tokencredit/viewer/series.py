"""What the tokens of a response can be coloured by: credit and signals, and their scales."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokencredit.errors import InputError, nearest
from tokencredit.records.schema import Record
from tokencredit.texts import printable

__all__ = ["Scale", "Series", "chosen", "first_choice", "level", "token_values"]

QUANTILE = 0.98
"""The share of values that a scale covers; the rest is drawn like its ends."""
LEVELS = 10
"""How many shades a side has."""
_TITLES = {"reward": "shaped reward", "logprob": "log-probability", "": '""'}
_KEPT = 1 << 20
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Series:
    """One number a token.

    Attributes:
        key: what users call it: ``gtpo.advantage``, ``gtpo.reward``, ``gtpo.weight``; a signal's
            name.
        kind: "advantage", "reward" or "weight", or the signal's name: what may be compared.
        rule: whose credit it is; None for a signal.
    """

    key: str
    kind: str
    rule: str | None

    @property
    def id(self) -> str:
        """Tells a rule's credit from a signal that is called like it."""
        return f"{'signal' if self.rule is None else 'credit'}:{self.key}"

    @property
    def title(self) -> str:
        """How it is called on the screen."""
        kind = _TITLES.get(self.kind, self.kind)
        return printable(kind if self.rule is None else f"{self.rule} {kind}")

    @property
    def unit(self) -> str | None:
        """Of what its numbers are."""
        return "nats" if self.kind == "entropy" or self.kind.endswith("logprob") else None

    @property
    def factor(self) -> bool:
        """A weight multiplies: 1 changes nothing, and a quarter is as far from it as 4."""
        return self.rule is not None and self.kind == "weight"


def token_values(record: Record) -> dict[Series, Sequence[float | None]]:
    """Everything that a record says of each token.

    A shaped reward of the whole response is that of each of its own tokens.

    Example:
        >>> from tokencredit.records import CreditRecord
        >>> record = Record(group=0, tokens=["a", "b"], mask=[1, 0], reward=1.0,
        ...     signals={"entropy": [0.5, None]},
        ...     credit={"grpo_s": CreditRecord(base=1.0, reward=1.1, advantage=[0.9, 0.0])})
        >>> {series.key: list(values) for series, values in token_values(record).items()}
        {'grpo_s.advantage': [0.9, 0.0], 'grpo_s.reward': [1.1, None], 'entropy': [0.5, None]}
    """
    found: dict[Series, Sequence[float | None]] = {}
    for rule, credit in record.credit.items():
        reward = credit.reward
        if reward is not None and not isinstance(reward, Sequence):
            reward = [reward if masked else None for masked in record.mask]
        for kind, values in (
            ("advantage", credit.advantage),
            ("reward", reward),
            ("weight", credit.weight),
        ):
            if values is not None:
                found[Series(f"{rule}.{kind}", kind, rule)] = values
    for name, values in record.signals.items():
        found[Series(name, name, None)] = values
    return found


def chosen(name: str, known: Iterable[Series]) -> Series:
    """The series that a user means: a key, a rule (its advantage), or the kind (the first rule's).

    Raises:
        InputError: none is meant.

    Example:
        >>> both = [Series("gtpo.advantage", "advantage", "gtpo"), Series("work", "work", None)]
        >>> [chosen(name, both).key for name in ("gtpo", "advantage", "work")]
        ['gtpo.advantage', 'gtpo.advantage', 'work']
    """
    listed = sorted(known, key=lambda series: series.rule is None)
    for wanted in (name, f"{name}.advantage"):
        for series in listed:
            if series.key == wanted:
                return series
    for series in listed:
        if series.kind == name:
            return series
    keys = [series.key for series in listed]
    there = f"; there are {', '.join(keys)}" if keys else "; they have neither credit nor signals"
    raise InputError(f"the records have no {name!r}{nearest(name, keys)}{there}")


def first_choice(known: Iterable[Series]) -> Series | None:
    """What is shown if nobody says: the first advantage, else the first signal, else anything."""
    order = {"advantage": 0, "signal": 1, "other": 2}

    def rank(series: Series) -> int:
        kind = series.kind if series.kind == "advantage" and series.rule else "other"
        return order["signal" if series.rule is None else kind]

    return min(known, key=rank, default=None)


class Scale:
    """How far a series goes from its centre, over the tokens inside the masks.

    The centre is 0; for weights it is 1, and distances are those of logarithms. The range is a
    quantile of the distances that are not zero, so that few extreme tokens do not leave all
    others without colour. Of a long file every second value is kept, or every fourth and so on.

    Args:
        factor: whether these are weights.
    """

    def __init__(self, factor: bool = False) -> None:
        self.factor = factor
        self.least: float | None = None
        self.most: float | None = None
        self._kept: list[Tensor] = []
        self._count = 0
        self._stride = 1

    def add(self, values: Tensor) -> None:
        """Take note of the values (float32) of tokens inside the mask; NaN is unknown."""
        values = values[~values.isnan()]
        if not len(values):
            return
        least, most = float(values.min()), float(values.max())
        self.least = least if self.least is None else min(self.least, least)
        self.most = most if self.most is None else max(self.most, most)
        if self.factor:
            values = values[values > 0].log()
        distances = values.abs()
        distances = distances[distances > 0]
        self._kept.append(distances[:: self._stride])
        self._count += len(self._kept[-1])
        if self._count > _KEPT:
            self._stride *= 2
            self._kept = [torch.cat(self._kept)[::2]]
            self._count = len(self._kept[0])

    @property
    def range(self) -> float:
        """The distance that is drawn in the strongest colour; 1 if no value is off the centre."""
        values = torch.cat(self._kept) if self._kept else torch.empty(0)
        if not len(values):
            return 1.0
        rank = min(math.ceil(QUANTILE * len(values)), len(values))
        return float(values.kthvalue(rank).values)

    def ends(self, extent: float) -> tuple[float, float]:
        """The values that are drawn in the strongest colours, of a scale of this range."""
        if self.factor:
            # Only a broken weight is beyond what a double holds.
            return math.exp(-min(extent, 700.0)), math.exp(min(extent, 700.0))
        return -extent, extent


def level(value: float | None, extent: float, *, factor: bool = False) -> int | None:
    """The shade of a value: -10 to 10, 0 only for the centre itself; None if it is unknown.

    Example:
        >>> [level(v, 2.0) for v in (0.0, 1e-9, 1.0, -5.0, None)]
        [0, 1, 5, -10, None]
        >>> [level(v, math.log(4), factor=True) for v in (1.0, 2.0, 0.5, 0.0)]
        [0, 5, -5, -10]
    """
    if value is None or value != value:
        return None
    distance = value
    if factor:
        distance = math.log(value) if value > 0 else -math.inf
    if distance == 0:
        return 0
    # So that a number rounded to float32 has the shade of the exact one.
    shade = math.ceil(LEVELS * min(abs(distance) / extent, 1.0) - 1e-5)
    shade = min(max(shade, 1), LEVELS)
    return shade if distance > 0 else -shade


def floats(values: Sequence[float | None]) -> array[float]:
    """As float32, unknown ones NaN, and what is beyond float32 its largest number."""
    single = array("f", [math.nan if value is None else value for value in values])
    if math.inf in single or -math.inf in single:
        return array("f", [min(max(value, -_LARGEST), _LARGEST) for value in single])
    return single


def scales_of(records: Iterable[Record]) -> Mapping[Series, Scale]:
    """The scales of everything that these records hold, in order of appearance."""
    scales: dict[Series, Scale] = {}
    for record in records:
        mask = torch.tensor(record.mask, dtype=torch.bool)
        for series, values in token_values(record).items():
            scale = scales.setdefault(series, Scale(series.factor))
            scale.add(torch.tensor(floats(values))[mask])
    return scales
