"""Pictures of plans, replays and what was served (matplotlib, the extra ``plot``).

::

    pictures.attainment(plan).savefig("attainment.svg")
    pictures.ratios(plan)
    pictures.timeline(simulator.replay(trace, plan.placement, record=True), end_s=5)

Each gives a matplotlib ``Figure`` that belongs to no window. It draws what it is given and no more: what failed, was
not tried or met no SLO is said in words. All raise ``ConfigError`` where matplotlib is not installed.
"""

from __future__ import annotations

from trinity.report.plots.costs import saturation as saturation
from trinity.report.plots.drawing import png as png
from trinity.report.plots.drawing import svg as svg
from trinity.report.plots.plans import attainment as attainment
from trinity.report.plots.plans import best_method as best_method
from trinity.report.plots.plans import ratios as ratios
from trinity.report.plots.plans import utilisation as utilisation
from trinity.report.plots.served import breakdown as breakdown
from trinity.report.plots.served import radar as radar
from trinity.report.plots.served import scatter as scatter
from trinity.report.plots.served import timeline as timeline
