"""Rollouts in the terminal, coloured as on the page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any

from tokencredit.errors import InputError, MissingExtraError
from tokencredit.records.schema import Record
from tokencredit.texts import printable
from tokencredit.viewer.pieces import Piece, pieces
from tokencredit.viewer.provenance import Provenance
from tokencredit.viewer.series import (
    LEVELS,
    QUANTILE,
    Scale,
    Series,
    chosen,
    level,
    scales_of,
    token_values,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["print_responses"]

# Okabe and Ito's blue and vermilion; the ink on them is chosen by their brightness.
_POSITIVE, _NEGATIVE = (0, 114, 178), (213, 94, 0)
_WEAKEST = 0.2


def print_responses(
    groups: Iterable[Sequence[Record]],
    *,
    by: str | None = None,
    against: str | None = None,
    title: str = "rollouts",
    file: IO[str] | None = None,
    width: int | None = None,
    colour: bool | None = None,
) -> int:
    """Print the responses, group by group, their tokens coloured by a series.

    Blue is above the centre, orange below it; tokens outside the mask are struck through, those
    of unknown value are in italics, and where the value is exactly the centre there is no colour.
    ``◆`` stands before the first token that differs from the group's first response.

    Args:
        groups: the responses of a prompt together; all are held in memory for the scale.
        by: as in `tokencredit.view`.
        against: what to print below it, with the difference if both are of one kind.
        title: what the rollouts are called.
        file: where to. Default: standard output.
        width: columns. Default: the terminal's.
        colour: whether to colour. Default: if it is a terminal (and as ``NO_COLOR`` and
            ``FORCE_COLOR`` say).

    Returns:
        How many responses were printed.

    Raises:
        InputError: no records, or there is no such series.
        MissingExtraError: rich is not installed.

    Example:
        >>> records = [Record(group="p", tokens=["4", "2"], mask=[1, 1], reward=1.0,
        ...                   signals={"entropy": [0.5, 0.0]})]
        >>> print_responses([records], width=99, colour=False)  # doctest: +ELLIPSIS
        rollouts
        colour: entropy  -0.5 ... +0.5 ...
        <BLANKLINE>
        group p
        #1  reward 1  tokens 2
          42
        1
    """
    console = _console(file, width, colour)
    listed = [tuple(group) for group in groups]
    records = [record for group in listed for record in group]
    if not records:
        raise InputError(f"{title}: holds no records")
    scales = scales_of(records)
    lanes = _lanes(scales, by, against)
    console.print(_plain(title), style="bold")
    provenance = Provenance()
    for record in records:
        provenance.add(record)
    for name, value in provenance.facts():
        console.print(_plain(f"{name}: {value}"), style="dim")
    for lane in lanes:
        console.print(lane.legend())
    number = 0
    for group in listed:
        console.print()
        first = group[0]
        about = f"group {first.group}" + ("" if first.step is None else f"  step {first.step}")
        console.print(_plain(about), style="bold")
        if isinstance(first.prompt, str) and first.prompt:
            console.print(_plain(first.prompt), style="dim")
        for record in group:
            number += 1
            console.print(_facts(number, record, lanes))
            parting = _parting(first, record)
            for lane in lanes:
                if len(lanes) > 1:
                    console.print(_plain(f"  {lane.title}"), style="dim")
                console.print(_indented(lane.tokens(record, parting)))
    return number


class _Lane:
    """One series, or the difference of two, with its scale."""

    def __init__(self, title: str, first: Series, minus: Series | None, extent: float) -> None:
        self.title = title
        self.first = first
        self.minus = minus
        self.extent = extent
        self.centre = 0.0 if minus is not None else first.centre

    def legend(self) -> Text:
        text = _text()
        low, high = self.centre - self.extent, self.centre + self.extent
        text.append(f"colour: {printable(self.title)}  {low:.4g} ")
        for shade in range(-LEVELS, LEVELS + 1):
            text.append(" ", style=_style(shade))
        text.append(f" {high:+.4g}  ({QUANTILE:.0%} of the values off {self.centre:g} are within)")
        return text

    def values(self, record: Record) -> Sequence[float | None]:
        known = token_values(record)
        first = known.get(self.first, [None] * record.length)
        if self.minus is None:
            return first
        second = known.get(self.minus, [None] * record.length)
        return [
            None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)
        ]

    def tokens(self, record: Record, parting: int | None) -> Text:
        text = _text()
        shown = zip(pieces(record), record.mask, self.values(record), strict=True)
        for place, (piece, masked, value) in enumerate(shown):
            if place == parting:
                text.append("\u25c6", style="bold")
            text.append(piece.text, style=self._style(piece, bool(masked), value))
        return text

    def _style(self, piece: Piece, masked: bool, value: float | None) -> str:
        styles = ["bold"] if piece.kind == "special" else []
        if not masked:
            return " ".join([*styles, "dim strike"])
        shade = level(value, self.centre, self.extent)
        styles.append("italic underline" if shade is None else _style(shade))
        return " ".join(styles)


def _lanes(scales: Any, by: str | None, against: str | None) -> list[_Lane]:
    known: dict[Series, Scale] = dict(scales)
    if not known:
        raise InputError("the records have neither credit nor signals to colour by")
    first = chosen(by, known) if by is not None else next(iter(known))
    extent = known[first].range
    if against is None:
        return [_Lane(first.key, first, None, extent)]
    second = chosen(against, known)
    if second.kind != first.kind:
        return [
            _Lane(first.key, first, None, extent),
            _Lane(second.key, second, None, known[second].range),
        ]
    extent = max(extent, known[second].range)
    return [
        _Lane(first.key, first, None, extent),
        _Lane(second.key, second, None, extent),
        _Lane(f"{first.key} - {second.key}", first, second, extent),
    ]


def _facts(number: int, record: Record, lanes: Sequence[_Lane]) -> Text:
    parts = [f"#{number}", f"reward {_number(record.reward)}"]
    if record.success is not None:
        parts.append("right" if record.success else "wrong")
    if record.truncated:
        parts.append("truncated")
    if record.keep is False:
        parts.append("kept out of the loss")
    for rule in dict.fromkeys(lane.first.rule for lane in lanes if lane.first.rule is not None):
        credit = record.credit.get(rule)
        if credit is not None:
            parts.append(f"base ({rule}) {_number(credit.base)}")
            if not isinstance(credit.reward, Sequence) and credit.reward is not None:
                parts.append(f"shaped {_number(credit.reward)}")
    parts.append(f"tokens {sum(record.mask)}")
    return _plain("  ".join(parts))


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _parting(first: Record, record: Record) -> int | None:
    """The first token that differs from the group's first response; None in that one itself."""
    if record is first:
        return None
    one, other = (
        r.token_ids if r.token_ids is not None else r.tokens or () for r in (first, record)
    )
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _style(shade: int) -> str:
    """A shade as rich names it: colours of their own, as a terminal's background is not known."""
    if shade == 0:
        return ""
    hue = _POSITIVE if shade > 0 else _NEGATIVE
    share = _WEAKEST + (1 - _WEAKEST) * (abs(shade) - 1) / (LEVELS - 1)
    red, green, blue = (round(255 + share * (c - 255)) for c in hue)
    ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "black"
    return f"{ink} on rgb({red},{green},{blue})"


def _indented(text: Text) -> Any:
    from rich.padding import Padding

    return Padding(text, (0, 0, 0, 2), expand=False)


def _plain(text: str) -> Text:
    return _text("\n".join(printable(line) for line in text.split("\n")))


def _text(text: str = "") -> Text:
    """Rich's Text, in which nothing is markup."""
    from rich.text import Text

    return Text(text, overflow="fold")


def _console(file: IO[str] | None, width: int | None, colour: bool | None) -> Console:
    try:
        from rich.console import Console
    except ImportError:
        raise MissingExtraError("rich", "terminal", "the view in the terminal") from None
    return Console(
        file=file,
        width=width,
        highlight=False,
        no_color=None if colour is None else not colour,
        force_terminal=colour or None,
        color_system="truecolor" if colour else "auto",
    )
