"""Style of every plot, and its files: matplotlib loaded when first needed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import BytesIO
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from trinity.errors import ConfigError, pip_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

P = ParamSpec("P")
T = TypeVar("T")
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
