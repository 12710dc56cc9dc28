"""Drawing helpers: matplotlib loaded when first needed, colours for colour-blind readers, files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from trinity.errors import ConfigError, pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart; black is left for annotations.
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
RED, PINK, YELLOW, GREY = "#D55E00", "#CC79A7", "#F0E442", "#999999"
SERIES = (BLUE, RED, GREEN, ORANGE, PINK, SKY, GREY)
MARKERS = "osD^vPX*"  # one more than colours, so that 56 series differ in colour or marker
STAGE_COLOURS = {"E": ORANGE, "P": BLUE, "D": GREEN}
_STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "text.parse_math": False,  # a name with a $ in it is a name
    "svg.fonttype": "path",
    "svg.hashsalt": "trinity",  # equal pictures are equal files
}
_LETTERS_PER_INCH = 14  # of a note
_WIDE_RANGE = 20  # factor between extremes above which an axis is logarithmic
P = ParamSpec("P")
T = TypeVar("T")


def _style_context() -> AbstractContextManager[None]:
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: {pip_install('plot')}") from error
    return rc_context(_STYLE)


def use_style(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to draw in this style. Raises ``ConfigError`` where matplotlib is not installed."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with _style_context():
            return function(*args, **kwargs)

    return wrapped


def new_figure(width: float, height: float) -> Figure:
    """Create a figure of this size in inches; it belongs to no window and no list of figures."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


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


@use_style
def render_svg(figure: Figure) -> bytes:
    """Render a figure as SVG; equal figures give equal bytes."""
    return _render(figure, format="svg", metadata={"Date": None, "Creator": None})


@use_style
def render_png(figure: Figure, dpi: float = 150) -> bytes:
    """Render a figure as PNG, which stays small however much is drawn."""
    return _render(figure, format="png", dpi=dpi, metadata={"Software": None})


def _render(figure: Figure, **options: Any) -> bytes:
    target = BytesIO()
    figure.savefig(target, **options)
    return target.getvalue()


def log_if_wide(axes: Axes, along: Literal["x", "y"], values: Sequence[float]) -> None:
    """Make an axis logarithmic where its values differ by more than a factor of 20."""
    if values and min(values) > 0 and max(values) > _WIDE_RANGE * min(values):
        from matplotlib.ticker import LogLocator, NullLocator

        axis = {"x": axes.xaxis, "y": axes.yaxis}[along]
        {"x": axes.set_xscale, "y": axes.set_yscale}[along]("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
