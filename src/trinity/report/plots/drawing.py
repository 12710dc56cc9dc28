"""Drawing helpers: figures, colours for colour-blind readers, axes and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from trinity.stage_kinds import DECODE, ENCODE, PREFILL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; black is left for annotations.
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
RED, PINK, GREY = "#D55E00", "#CC79A7", "#999999"
SERIES = (BLUE, RED, GREEN, ORANGE, PINK, SKY, GREY)
MARKERS = "osD^vPX*"  # one more than colours, so that 56 series differ in colour or marker
STAGE_COLOURS = {ENCODE.letter: ORANGE, PREFILL.letter: BLUE, DECODE.letter: GREEN}
_LETTERS_PER_INCH = 14  # of a note
_WIDE_RANGE = 20  # factor between extremes above which an axis is logarithmic


def new_figure(width: float, height: float) -> Figure:
    """Create a figure of this size in inches; it belongs to no window, and a notebook shows it."""
    from trinity.report.plots.shown_figure import ShownFigure

    return ShownFigure(figsize=(width, height), layout="constrained")


def draw_message(figure: Figure, title: str, text: str) -> Figure:
    """Draw a message in place of a plot without data."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_title(title)
    axes.text(0.5, 0.5, text, ha="center", va="center", wrap=True, transform=axes.transAxes)
    return figure


def add_notes(figure: Figure, lines: Iterable[str]) -> None:
    """Add notes below a plot, wrapped to its width."""
    width = int(figure.get_figwidth() * _LETTERS_PER_INCH)
    text = "\n".join(row for line in lines for row in wrap(line, width))
    if text:
        figure.supxlabel(text, fontsize=9, x=0.01, ha="left")


def series_colour(place: int) -> str:
    """Colour of the series with this index."""
    return SERIES[place % len(SERIES)]


def series_marker(place: int) -> str:
    """Marker of the series with this index."""
    return MARKERS[place % len(MARKERS)]


def label_axes(axes: Axes, title: str, x: str, y: str) -> None:
    """Set the title and the labels of both axes."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def add_colour_legend(axes: Axes, colours: dict[str, str], **placed: Any) -> None:
    """Add a legend of colours."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=shade, edgecolor="none", label=name) for name, shade in colours.items()]
    axes.legend(handles=patches, **placed)


def log_if_wide(axes: Axes, along: Literal["x", "y"], values: Sequence[float]) -> None:
    """Make an axis logarithmic where its values differ by more than a factor of 20."""
    if values and min(values) > 0 and max(values) > _WIDE_RANGE * min(values):
        from matplotlib.ticker import LogLocator, NullLocator

        axis = {"x": axes.xaxis, "y": axes.yaxis}[along]
        {"x": axes.set_xscale, "y": axes.set_yscale}[along]("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
