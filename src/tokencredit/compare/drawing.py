"""The figures of a comparison, with matplotlib's Figure alone: no pyplot, no display."""

from __future__ import annotations

import importlib
import io
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokencredit.compare.comparing import Comparison, Profile
from tokencredit.errors import InputError, MissingExtraError
from tokencredit.files import write_aside
from tokencredit.texts import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FIGURES", "draw", "inline_svg", "require_matplotlib"]

INK = "#1f2329"
"""The colour of text and axes: no data has it, so the report can make it follow the page."""

# Okabe and Ito's colours, told apart by the colour-blind, but for yellow and black.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
MARKS = ("o", "s", "^", "D", "v", "P", "X")
LONGEST = 28


def require_matplotlib() -> None:
    """Raise an error that names the extra where matplotlib is missing."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise MissingExtraError("matplotlib", "trl", "drawing a comparison") from None


def draw(comparison: Comparison, folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Draw every figure into a folder, as SVG and as PNG; files appear when they are complete.

    ``correlation``: rank correlations of every two methods; ``position`` and ``entropy``: where
    each puts its absolute credit (the last only where entropies are known).

    Raises:
        InputError: a file cannot be written.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> import pathlib, tempfile, torch
        >>> from tokencredit import Rollouts
        >>> from tokencredit.compare import compare
        >>> rollouts = Rollouts(torch.tensor([1.0, 0.0]), ["p", "p"], torch.ones(2, 2))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [p.name for p in draw(compare(rollouts, ["grpo"]), pathlib.Path(folder))]
        ['correlation.svg', 'correlation.png', 'position.svg', 'position.png']
    """
    require_matplotlib()
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made a folder: {error.strerror}") from error
    written: list[Path] = []
    for name, make in FIGURES.items():
        figure = make(comparison)
        if figure is None:
            continue
        for ending in ("svg", "png"):
            path = folder / f"{name}.{ending}"
            write_aside(path, _saved(figure, ending))
            written.append(path)
    return tuple(written)


def inline_svg(figure: Figure, title: str) -> str:
    """The figure as an ``<svg>`` element whose text takes the colour of the page around it."""
    import html

    text = _saved(figure, "svg", transparent=True).decode("utf-8")
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    # Several figures on one page: no two elements of one id.
    own = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{own}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)


def _saved(figure: Figure, ending: str, *, transparent: bool = False) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    # The same bytes from the same numbers: no date, no random names.
    with matplotlib.rc_context({"svg.hashsalt": "tokencredit", "svg.fonttype": "none"}):
        figure.savefig(
            buffer,
            format=ending,
            dpi=150,
            transparent=transparent,
            metadata={"Date": None} if ending == "svg" else None,
        )
    return buffer.getvalue()


def _label(name: str) -> str:
    shown = printable(name[: LONGEST + 1])
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


# -- figures --------------------------------------------------------------------------------


def _correlation(comparison: Comparison) -> Figure:
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    names = [_label(name) for name in comparison.names]
    count = len(names)
    side = 1.8 + 0.62 * count
    figure = Figure(figsize=(side + 1.2, side), layout="constrained")
    axes: Any = figure.subplots()
    values = [[pair.correlation for pair in row] for row in comparison.pairs]
    mesh = axes.pcolormesh(
        values,
        cmap=colormaps["RdBu"].resampled(40),
        vmin=-1,
        vmax=1,
        edgecolors="white",
        linewidth=1,
    )
    ticks = [k + 0.5 for k in range(count)]
    for axis, turn in ((axes.xaxis, 40), (axes.yaxis, 0)):
        axis.set_ticks(ticks)
        axis.set_ticklabels(names, rotation=turn, ha="right", parse_math=False)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_title("Rank correlation of advantages")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            known = not math.isnan(value)
            axes.text(
                j + 0.5,
                i + 0.5,
                f"{value:.3f}" if known else "-",
                ha="center",
                va="center",
                fontsize=8,
                color="#ffffff" if abs(value) > 0.6 else "#000000" if known else INK,
            )
    bar: Any = figure.colorbar(mesh, ax=axes, shrink=0.8)
    bar.solids.set(rasterized=False, edgecolor="face")  # an image would be data to be loaded
    bar.set_label("Spearman, tokens in the loss")
    _paint(axes)
    _paint(bar.ax)
    return figure


def _position(comparison: Comparison) -> Figure:
    count = len(comparison.position_tokens)
    return _profiles(
        comparison,
        {m.name: m.position for m in comparison.methods},
        [(k + 0.5) / count for k in range(count)],
        "relative position in the response",
        "Absolute credit over position",
    )


def _entropy(comparison: Comparison) -> Figure | None:
    if not comparison.entropy_means:
        return None
    count = len(comparison.entropy_means)
    return _profiles(
        comparison,
        {m.name: m.entropy for m in comparison.methods if m.entropy is not None},
        [(k + 0.5) / count for k in range(count)],
        "quantile of entropy (low to high)",
        "Absolute credit over entropy",
    )


def _profiles(
    comparison: Comparison,
    profiles: Mapping[str, Profile],
    places: list[float],
    axis: str,
    title: str,
) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes: Any = figure.subplots()
    axes.axhline(1.0, color="#888888", linewidth=0.8, zorder=0)
    lines: list[Any] = []
    for k, profile in enumerate(profiles.values()):
        lines += axes.plot(
            places,
            profile.density,
            color=COLOURS[k % len(COLOURS)],
            marker=MARKS[k % len(MARKS)],
            linestyle=("-", "--", ":")[k // len(COLOURS) % 3],
            markersize=4,
            linewidth=1.5,
        )
    axes.set(xlim=(0, 1), xlabel=axis, ylabel="mean |A| over its mean", title=title)
    # Methods that hardly differ from uniform shall look so.
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9), max(high, 1.1))
    # matplotlib leaves out labels that begin with an underscore.
    legend = axes.legend(
        lines,
        [" " + _label(name) for name in profiles],
        frameon=False,
        fontsize=8,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        labelcolor=INK,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    _paint(axes)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _paint(axes: Any) -> None:
    """Everything that is not data in one colour."""
    axes.tick_params(colors=INK, labelcolor=INK)
    axes.title.set_color(INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
    for spine in axes.spines.values():
        spine.set_color(INK)


FIGURES: dict[str, Callable[[Comparison], Any]] = {
    "correlation": _correlation,
    "position": _position,
    "entropy": _entropy,
}
