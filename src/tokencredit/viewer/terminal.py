"""Rollouts in the terminal, coloured as on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, NoReturn

import torch

from tokencredit.errors import InputError, MissingExtraError
from tokencredit.records.schema import Record
from tokencredit.texts import printable
from tokencredit.viewer.pieces import Piece, parting, pieces, prompt_text
from tokencredit.viewer.provenance import Provenance
from tokencredit.viewer.series import (
    LEVELS,
    QUANTILE,
    Scale,
    Series,
    chosen,
    first_choice,
    floats,
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
_NARROWEST = 20


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
    Without colours the shade, -10 to 10, stands behind each token instead. ``◆`` stands before the
    first token that differs from the group's first response.

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
        entropy: [-10] is -0.5, [+10] is 0.5 ...
        <BLANKLINE>
        group p
        #1  reward 1  tokens 2
          4[+10]2
        1
    """
    console = _console(file, width, colour)
    listed = [tuple(group) for group in groups]
    records = [record for group in listed for record in group]
    if not records:
        raise InputError(f"{title}: holds no records")
    lanes = _lanes(records, by, against)
    paint = _painter(console)
    console.print(_plain(title), style="bold")
    provenance = Provenance()
    for record in records:
        provenance.add(record)
    for name, value in provenance.facts():
        console.print(_plain(f"{name}: {value}"), style="dim")
    for lane in lanes:
        console.print(paint.legend(lane))
    number = 0
    for group in listed:
        console.print()
        first = group[0]
        about = f"group {first.group}" + ("" if first.step is None else f"  step {first.step}")
        console.print(_plain(about), style="bold")
        if prompt := prompt_text(first):
            console.print(_text(prompt), style="dim")
        for record in group:
            number += 1
            console.print(_facts(number, record, lanes))
            for lane in lanes:
                if len(lanes) > 1:
                    console.print(_plain(f"  {lane.title}"), style="dim")
                console.print(_indented(paint.tokens(lane, record, parting(first, record))))
    return number


@dataclass(frozen=True)
class _Lane:
    """One series, or the difference of two, with its scale."""

    title: str
    first: Series
    minus: Series | None
    scale: Scale
    extent: float

    def values(self, record: Record) -> Sequence[float | None]:
        known = token_values(record)
        first = known.get(self.first, [None] * record.length)
        if self.minus is None:
            return first
        second = known.get(self.minus, [None] * record.length)
        return [
            None if a is None or b is None else a - b for a, b in zip(first, second, strict=True)
        ]

    def shades(self, record: Record) -> list[int | None]:
        values = self.values(record)
        return [level(value, self.extent, factor=self.scale.factor) for value in values]


def _lanes(records: Sequence[Record], by: str | None, against: str | None) -> list[_Lane]:
    known: Mapping[Series, Scale] = scales_of(records)
    first = chosen(by, known) if by is not None else first_choice(known)
    if first is None:
        raise InputError("the records have neither credit nor signals to colour by")
    second = chosen(against, known) if against is not None else first

    def lane(series: Series, extent: float | None = None) -> _Lane:
        scale = known[series]
        return _Lane(series.title, series, None, scale, extent or scale.range)

    if second == first:
        return [lane(first)]
    if (second.kind, second.rule is None) != (first.kind, first.rule is None):
        return [lane(first), lane(second)]
    extent = max(known[first].range, known[second].range)
    difference = _Lane(f"{first.title} - {second.title}", first, second, Scale(), 1.0)
    for record in records:
        mask = torch.tensor(record.mask, dtype=torch.bool)
        difference.scale.add(torch.tensor(floats(difference.values(record)))[mask])
    difference = replace(difference, extent=difference.scale.range)
    return [lane(first, extent), lane(second, extent), difference]


class _Paint:
    """Colours, with the ink that can be read on them."""

    def legend(self, lane: _Lane) -> Text:
        text = _text()
        low, high = lane.scale.ends(lane.extent)
        text.append(f"{lane.title}: {low:.4g} ")
        for shade in range(-LEVELS, LEVELS + 1):
            text.append(" ", style=self.shade(shade))
        text.append(f" {high:.4g}{_reach(lane)}")
        return text

    def tokens(self, lane: _Lane, record: Record, parts: int | None) -> Text:
        text = _text()
        shown = zip(pieces(record), record.mask, lane.shades(record), strict=True)
        for place, (piece, masked, shade) in enumerate(shown):
            if place == parts:
                text.append("\u25c6", style="bold")
            self.token(text, piece, bool(masked), shade)
        if parts is not None and parts >= record.length:
            text.append("\u25c6", style="bold")
        return text

    def token(self, text: Text, piece: Piece, masked: bool, shade: int | None) -> None:
        styles = ["bold"] if piece.kind == "special" else []
        if not masked:
            styles.append("dim strike")
        else:
            styles.append("italic underline" if shade is None else self.shade(shade))
        text.append(piece.text, style=" ".join(styles))

    def shade(self, shade: int) -> str:
        if shade == 0:
            return ""
        hue = _POSITIVE if shade > 0 else _NEGATIVE
        share = _WEAKEST + (1 - _WEAKEST) * (abs(shade) - 1) / (LEVELS - 1)
        red, green, blue = (round(255 + share * (c - 255)) for c in hue)
        ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 128 else "black"
        return f"{ink} on rgb({red},{green},{blue})"


class _FewColours(_Paint):
    """Sixteen colours have no pale ones: weak shades colour the letters, strong ones the ground."""

    def shade(self, shade: int) -> str:
        if shade == 0:
            return ""
        hue = "blue" if shade > 0 else "yellow"
        return hue if abs(shade) <= LEVELS // 2 else f"black on {hue}"


class _NoColours(_Paint):
    """Numbers in their place."""

    def legend(self, lane: _Lane) -> Text:
        low, high = lane.scale.ends(lane.extent)
        what = f"[-{LEVELS}] is {low:.4g}, [+{LEVELS}] is {high:.4g}"
        return _text(f"{lane.title}: {what}{_reach(lane)}; [?] unknown, [-] outside the mask")

    def token(self, text: Text, piece: Piece, masked: bool, shade: int | None) -> None:
        text.append(piece.text)
        if not masked:
            text.append("[-]")
        elif shade is None:
            text.append("[?]")
        elif shade:
            text.append(f"[{shade:+d}]")


def _painter(console: Console) -> _Paint:
    if console.no_color or console.color_system is None:
        return _NoColours()
    return _FewColours() if console.color_system == "standard" else _Paint()


def _reach(lane: _Lane) -> str:
    """What the scale covers, where it is the series' own."""
    least, most = lane.scale.least, lane.scale.most
    if least is None or most is None or lane.extent != lane.scale.range:
        return ""
    centre = 1 if lane.scale.factor else 0
    return (
        f" ({QUANTILE:.0%} of the values other than {centre} are within; "
        f"all from {least:.4g} to {most:.4g})"
    )


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

    class OurConsole(Console):
        def on_broken_pipe(self) -> NoReturn:
            """Whoever read our output left: the command line knows what to do."""
            raise BrokenPipeError

    console = OurConsole(
        file=file,
        width=width,
        highlight=False,
        no_color=None if colour is None else not colour,
        force_terminal=colour or None,
        color_system="truecolor" if colour else "auto",
    )
    if console.width < _NARROWEST:
        console.width = _NARROWEST
    return console
