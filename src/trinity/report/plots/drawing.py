"""What pictures are drawn with: matplotlib loaded when first needed, colours that can be told apart, files."""

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

# Okabe and Ito's colours, which colour-blind readers tell apart too; black is left for what is said about data.
ORANGE, SKY, GREEN, BLUE = "#E69F00", "#56B4E9", "#009E73", "#0072B2"
RED, PINK, YELLOW, GREY = "#D55E00", "#CC79A7", "#F0E442", "#999999"
SERIES = (BLUE, RED, GREEN, ORANGE, PINK, SKY, GREY)
MARKERS = "osD^vPX*"  # one more than colours, so that 56 series differ in one or the other
STAGES = {"E": ORANGE, "P": BLUE, "D": GREEN}
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
_LETTERS = 14  # of a note, in an inch
_WIDE = 20  # times the lowest rate from which on an axis is logarithmic
P = ParamSpec("P")
T = TypeVar("T")


def _styled() -> AbstractContextManager[None]:
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError(f"pictures need matplotlib: {pip_install('plot')}") from error
    return rc_context(_STYLE)


def drawn(function: Callable[P, T]) -> Callable[P, T]:
    """With matplotlib there and in this style. Raises ``ConfigError`` that names the extra where it is not."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with _styled():
            return function(*args, **kwargs)

    return wrapped


def new_figure(width: float, height: float) -> Figure:
    """In inches. It belongs to no window and no list of figures."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def said(figure: Figure, title: str, text: str) -> Figure:
    """A picture of what there is nothing to draw of: words."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set_title(title)
    axes.text(0.5, 0.5, text, ha="center", va="center", wrap=True, transform=axes.transAxes)
    return figure


def noted(figure: Figure, lines: Iterable[str]) -> None:
    """Words below a picture, for what it cannot show, in lines that it has the width for."""
    width = int(figure.get_figwidth() * _LETTERS)
    text = "\n".join(row for line in lines for row in wrap(line, width))
    if text:
        figure.supxlabel(text, fontsize=9, x=0.01, ha="left")


def colour(place: int) -> str:
    return SERIES[place % len(SERIES)]


def marker(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def labelled(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def swatches(axes: Axes, colours: dict[str, str], **placed: Any) -> None:
    """A legend of colours."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=shade, edgecolor="none", label=name) for name, shade in colours.items()]
    axes.legend(handles=patches, **placed)


@drawn
def svg(figure: Figure) -> bytes:
    """A figure as a file that scales."""
    return _saved(figure, format="svg", metadata={"Date": None, "Creator": None})


@drawn
def png(figure: Figure, dpi: float = 150) -> bytes:
    """A figure as a file of pixels, small however much is drawn."""
    return _saved(figure, format="png", dpi=dpi, metadata={"Software": None})


def _saved(figure: Figure, **how: Any) -> bytes:
    target = BytesIO()
    figure.savefig(target, **how)
    return target.getvalue()


def log_if_wide(axes: Axes, along: Literal["x", "y"], values: Sequence[float]) -> None:
    """Values of very different size are shown by their logarithm."""
    if values and min(values) > 0 and max(values) > _WIDE * min(values):
        from matplotlib.ticker import LogLocator, NullLocator

        axis = {"x": axes.xaxis, "y": axes.yaxis}[along]
        {"x": axes.set_xscale, "y": axes.set_yscale}[along]("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:g}")
