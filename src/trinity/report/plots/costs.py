"""Pictures of measured costs: throughput and latency of each stage over its batch (TriInfer figure 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trinity.report.plots.drawing import colour, drawn, labelled, log_if_wide, marker, new_figure, noted, said

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ITEMS = {"E": "images", "P": "tokens", "D": "rows"}
TITLES = {"E": "Encode", "P": "Prefill", "D": "Decode"}
Seconds = Mapping[int, float]  # of a step, by its batch


@drawn
def saturation(measured: Mapping[str, Mapping[str, Seconds]], note: str = "") -> Figure:
    """Above what a stage does in a second, below what a step takes, over its batch; a curve for each name.

    ``measured``: seconds of a step by stage ("E", "P", "D"), name (a dtype, a device) and batch (images, prefill
    tokens, decode rows). What was not measured has no panel.
    """
    stages = [letter for letter in ITEMS if any(measured.get(letter, {}).values())]
    if not stages:
        return said(new_figure(6, 3), "Saturation of stages", "No stage was measured.")
    picture = new_figure(3.6 * len(stages) + 0.6, 5.6)
    panels = picture.subplots(2, len(stages), squeeze=False)
    for column, letter in enumerate(stages):
        above, below = panels[0][column], panels[1][column]
        for place, (name, seconds) in enumerate(measured[letter].items()):
            counts = sorted(seconds)
            style = {"color": colour(place), "marker": marker(place), "markersize": 4, "label": name}
            above.plot(counts, [count / seconds[count] for count in counts], **style)
            below.plot(counts, [1e3 * seconds[count] for count in counts], **style)
            for axes in (above, below):
                log_if_wide(axes, "x", counts)
                axes.set_ylim(bottom=0)
        labelled(above, TITLES[letter], "", f"{ITEMS[letter]}/s" if not column else "")
        labelled(below, "", f"{ITEMS[letter]} in a step", "ms a step" if not column else "")
    panels[0][0].legend()
    picture.suptitle("What each stage does, by what a step holds", fontsize=11)
    noted(picture, [note] if note else [])
    return picture
