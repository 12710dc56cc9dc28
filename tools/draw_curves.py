"""Draw goodput over time as an SVG: what docs/data/redeploy.json has, for ``tools/draw_pictures.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

LEFT, TOP, WIDE, HIGH = 60, 60, 520, 190  # pixels: of the plot within its sheet
PALE, LINE = "#5b6270", "#c9ced8"


class Curve(NamedTuple):
    """A line of a plot: its ``label``, ``colour``, dashes ("": a whole line), and values, one for each bin."""

    label: str
    colour: str
    dashes: str
    values: list[float]


class Mark(NamedTuple):
    """A moment, ``at`` in seconds, with its words."""

    at: float
    words: str


class Plot(NamedTuple):
    """Curves over bins that begin ``starts`` seconds after the shift, and moments."""

    starts: list[float]
    curves: list[Curve]
    marks: list[Mark]

    @property
    def step(self) -> float:
        return self.starts[1] - self.starts[0]

    @property
    def top(self) -> float:
        return max(value for curve in self.curves for value in curve.values)

    def x(self, seconds: float) -> float:
        return LEFT + WIDE * (seconds - self.starts[0]) / (self.starts[-1] + self.step - self.starts[0])

    def y(self, value: float) -> float:
        return TOP + HIGH * (1 - value / self.top)


def read_plot(rows: Sequence[Sequence[str]], decided: Sequence[Sequence[str]], curves: Sequence[Curve]) -> Plot:
    """Make a plot of a table: seconds, then a value for each curve; of what was decided applies are marked."""
    starts = [float(row[0]) for row in rows]
    filled = [each._replace(values=[float(row[1 + n]) for row in rows]) for n, each in enumerate(curves)]
    marks = [Mark(0.0, "traffic shifts")]
    for verdict, words in (("applies", "plan found"), ("applied", "plan runs")):
        marks += [Mark(float(at), words) for at, what in decided if f" {verdict}: " in what]
    return Plot(starts, filled, marks)


def draw_plot(plot: Plot) -> Iterator[str]:
    """Yield the elements of a plot: axes, moments, and each curve with its label at the right."""
    bottom = TOP + HIGH
    yield f'<path d="M{LEFT} {TOP} V{bottom} H{LEFT + WIDE}" stroke="{LINE}" fill="none"/>'
    for value in range(int(plot.top) + 1):
        yield _text(LEFT - 8, plot.y(value) + 4, f"{value}", PALE, "end")
    for seconds in range(int(plot.starts[0] // 60 + 1) * 60, int(plot.starts[-1] + plot.step) + 1, 60):
        yield _text(plot.x(seconds), bottom + 18, f"{seconds}", PALE, "middle")
    yield _text(LEFT + WIDE / 2, bottom + 36, "seconds since the shift", PALE, "middle")
    for mark in plot.marks:
        yield f'<path d="M{plot.x(mark.at):.1f} {TOP} V{bottom}" stroke="{PALE}" stroke-dasharray="2 4"/>'
        yield _text(plot.x(mark.at), TOP - 6, mark.words, PALE, "middle")  # above the curves, which cross all below
    ends = spread([plot.y(curve.values[-1]) for curve in plot.curves], 16)
    for curve, end in zip(plot.curves, ends, strict=True):
        yield _line(plot, curve)
        yield _text(LEFT + WIDE + 8, end + 4, curve.label, curve.colour, "start")


def spread(places: Sequence[float], least: float) -> list[float]:
    """Move places apart, downwards, until each is ``least`` from the next; in the order in which they were given."""
    moved, last = dict[int, float](), -least
    for number in sorted(range(len(places)), key=lambda each: places[each]):
        last = moved[number] = max(places[number], last + least)
    return [moved[number] for number in range(len(places))]


def _line(plot: Plot, curve: Curve) -> str:
    points = [(plot.x(at + plot.step / 2), plot.y(value)) for at, value in zip(plot.starts, curve.values, strict=True)]
    path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{curve.dashes}"' if curve.dashes else ""
    return f'<path d="{path}" stroke="{curve.colour}" stroke-width="2" fill="none"{dashes}/>'


def _text(x: float, y: float, words: str, colour: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="12" fill="{colour}" text-anchor="{anchor}">{words}</text>'
