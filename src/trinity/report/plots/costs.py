"""Plots of measured costs: throughput and latency of each stage over its batch (TriInfer figure 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trinity.report.plots.drawing import (
    add_notes,
    draw_message,
    label_axes,
    log_if_wide,
    new_figure,
    series_colour,
    series_marker,
)
from trinity.report.plots.style import use_style
from trinity.stage_kinds import all_letters, stage_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Seconds = Mapping[int, float]  # of a step, by batch


@use_style
def plot_saturation(measured: Mapping[str, Mapping[str, Seconds]], note: str = "") -> Figure:
    """Plot throughput (above) and step time (below) of each stage over its batch, with a curve for each name.

    ``measured``: seconds of a step by stage ("E", "P", "D"), name (a dtype, a device) and batch (images, prefill
    tokens, decode rows). Stages without measurements have no panel. ``note``: text below the plot.
    """
    stages = [letter for letter in all_letters() if any(measured.get(letter, {}).values())]
    if not stages:
        return draw_message(new_figure(6, 3), "Saturation of stages", "No stage was measured.")
    picture = new_figure(3.6 * len(stages) + 0.6, 5.6)
    panels = picture.subplots(2, len(stages), squeeze=False)
    for column, letter in enumerate(stages):
        above, below = panels[0][column], panels[1][column]
        for place, (name, seconds) in enumerate(measured[letter].items()):
            counts = sorted(seconds)
            style = {"color": series_colour(place), "marker": series_marker(place), "markersize": 4, "label": name}
            above.plot(counts, [count / seconds[count] for count in counts], **style)
            below.plot(counts, [1e3 * seconds[count] for count in counts], **style)
            for axes in (above, below):
                log_if_wide(axes, "x", counts)
                axes.set_ylim(bottom=0)
        title, unit = stage_of(letter).name.capitalize(), stage_of(letter).unit
        label_axes(above, title, "", f"{unit}/s" if not column else "")
        label_axes(below, "", f"{unit} in a step", "ms a step" if not column else "")
    panels[0][0].legend()
    picture.suptitle("What each stage does, by what a step holds", fontsize=11)
    add_notes(picture, [note] if note else [])
    return picture
