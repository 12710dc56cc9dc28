"""Plots of plans, replays and served requests (matplotlib, the extra ``plot``).

::

    plots.plot_attainment(plan).savefig("attainment.svg")
    plots.plot_ratios(plan)
    plots.plot_timeline(simulator.replay(trace, plan.placement, record=True), end_s=5)

Each returns a matplotlib ``Figure`` that belongs to no window, and that a notebook shows by itself. It draws only what
it is given: failures, rates not tried and SLOs not met are stated in words. All raise ``ConfigError`` where matplotlib
is not installed.
"""

from __future__ import annotations

from trinity.report.plots.costs import plot_saturation as plot_saturation
from trinity.report.plots.plans import plot_attainment as plot_attainment
from trinity.report.plots.plans import plot_best_method as plot_best_method
from trinity.report.plots.plans import plot_ratios as plot_ratios
from trinity.report.plots.plans import plot_utilisation as plot_utilisation
from trinity.report.plots.style import render_png as render_png
from trinity.report.plots.style import render_svg as render_svg
from trinity.report.plots.traffic import plot_breakdown as plot_breakdown
from trinity.report.plots.traffic import plot_radar as plot_radar
from trinity.report.plots.traffic import plot_scatter as plot_scatter
from trinity.report.plots.traffic import plot_timeline as plot_timeline
