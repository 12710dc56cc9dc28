"""ShownFigure: a figure that a notebook shows by itself. Importing this imports matplotlib."""

from __future__ import annotations

from matplotlib.figure import Figure

from trinity.report.plots.style import render_png

SHOWN_DPI = 100


class ShownFigure(Figure):
    """Figure that a notebook shows as the value of a cell, without ``%matplotlib inline`` before it."""

    def _repr_png_(self) -> bytes:
        return render_png(self, SHOWN_DPI)
