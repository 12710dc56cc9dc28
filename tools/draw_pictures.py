"""Draw the pictures of the first page into docs/pictures as SVG: ``python tools/draw_pictures.py``.

Charts take their figures from docs/data; tests/project/test_draw_pictures.py fails where a picture is not what this
draws.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.draw_curves import HIGH, PALE, TOP, Curve, draw_plot, read_plot

FOLDER = Path("docs/pictures")
DATA = Path("docs/data")
INK = "#1f2430"
WHOLE, APART = "#9aa3b2", "#0f7b6c"  # of instances that run every stage, and of those that do not
STAGES = {"E": "#b45f06", "P": "#1d5fa8", "D": "#0f7b6c"}
FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\""
WIDTH, LABELS, BAR, STEP = 720, 140, 320, 20  # pixels: of a chart, of its labels, of the longest bar; from row to row


class Bar(NamedTuple):
    """One row of a chart: ``label``, ``value``, and the ``text`` behind the bar."""

    label: str
    value: float
    text: str


class Group(NamedTuple):
    """Rows below a heading ("": none)."""

    heading: str
    bars: list[Bar]


class Chart(NamedTuple):
    """A chart of horizontal bars, with a sentence below."""

    title: str
    groups: list[Group]
    note: str


def text(x: float, y: float, words: str, *, size: int = 13, colour: str = INK, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" {more}>{escape(words)}</text>'


def sheet(width: int, height: int, title: str, lines: Sequence[str]) -> str:
    """A whole SVG file on white, so that it is read on a dark page too."""
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {FONT} role="img">'
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *lines, "</svg>"]) + "\n"


def draw_chart(chart: Chart) -> str:
    top = max(bar.value for group in chart.groups for bar in group.bars)
    lines, y = [text(20, 32, chart.title, size=16, more='font-weight="600"')], 52
    for group in chart.groups:
        if group.heading:
            y += 8
            lines.append(text(20, y + 12, group.heading, colour=PALE))
            y += STEP
        for bar in group.bars:
            lines += draw_bar(bar, y, top)
            y += STEP
    for number, line in enumerate(wrap(chart.note)):
        lines.append(text(20, y + 20 + 17 * number, line, size=12, colour=PALE))
    return sheet(WIDTH, y + 20 + 17 * len(wrap(chart.note)), chart.title, lines)


def draw_bar(bar: Bar, y: float, top: float) -> Iterator[str]:
    long, colour = max(2.0, BAR * bar.value / top), WHOLE if re.fullmatch(r"\d*EPD.*", bar.label) else APART
    yield text(LABELS, y + 12, bar.label, more='text-anchor="end"')
    yield f'<rect x="{LABELS + 10}" y="{y}" width="{long:.1f}" height="14" rx="2" fill="{colour}"/>'
    yield text(LABELS + 18 + round(long, 1), y + 12, bar.text)


def wrap(words: str, letters: int = 104) -> list[str]:
    lines = [""]
    for word in words.split():
        lines[-1:] = [f"{lines[-1]} {word}".strip()] if len(lines[-1]) + len(word) < letters else [lines[-1], word]
    return lines


# ---------------------------------------------------------------- figures


def rows_of(root: Path, name: str, table: str) -> list[list[str]]:
    """The rows of the table of docs/data/``name`` whose title begins with ``table``."""
    found = json.loads((root / DATA / f"{name}.json").read_text(encoding="utf-8"))["tables"]
    rows: list[list[str]] = next(each["rows"] for each in found if each["title"].startswith(table))
    return rows


def number(cell: str) -> float:
    """The first number of a cell: "≥ 6.52 (0.00 to 6.52)" has 6.52."""
    return float(re.findall(r"[\d.]+", cell)[0])


def waits(root: Path) -> Chart:
    rows = rows_of(root, "ttft_methods", "Latencies")
    bars = [Bar(row[0], number(row[4]), f"{number(row[4]):.0f} ms, for {row[6]} CPU s a request") for row in rows]
    note = (
        "The longest gaps between two tokens (95th percentile) while a photograph a second arrives: a small LLaVA in "
        "float32, every method on the same two cores. Decode apart, tokens do not wait behind pictures; that takes "
        "more processor time."
    )
    groups = [Group("", sorted(bars, key=lambda bar: -bar.value))]
    return Chart("Tokens do not wait behind pictures", groups, note)


def bounds(root: Path) -> Chart:
    groups: dict[str, list[Bar]] = {}
    for name, goodput, *_ in rows_of(root, "served", "Goodput"):
        slo, _, engine = name.partition(": trinity ")
        if engine:
            label = engine.replace(" x 2 threads", ", 2 threads")
            groups.setdefault(slo, []).append(Bar(label, number(goodput), f"{goodput.partition(' (')[0]} requests/s"))
    shown = [Group(name_bounds(slo), bars) for slo, bars in groups.items()]
    note = (
        "Goodput: nine requests in ten within both bounds, a small LLaVA in bfloat16 on two cores. Under tight bounds "
        "decode apart serves most; under loose ones every method reaches the highest rate tried, and one instance for "
        "everything is the simplest."
    )
    return Chart("Worth it under tight bounds, not under loose ones", shown, note)


def name_bounds(slo: str) -> str:
    first, between = slo.split(", ")
    return f"first token in {first}, then one every {between}"


def methods(root: Path) -> Chart:
    rows = [row for row in rows_of(root, "scale", "TextCaps") if row[0].startswith("best ")]
    bars = [
        Bar(row[1], number(row[2]), f"{number(row[2]):.0f} requests/s ({row[0].removeprefix('best ')})") for row in rows
    ]
    note = (
        "The best ratio of each method that the planner found for 32 emulated instances of LLaVA-1.5-7B on TextCaps' "
        "requests: first token in 4 s, then one every 80 ms. Simulated on a roofline, and held against live emulation; "
        "never against a GPU."
    )
    groups = [Group("", sorted(bars, key=lambda bar: -bar.value))]
    return Chart("Which method, and which ratio, is a question for the planner", groups, note)


def draw_redeploy(root: Path) -> str:
    """Goodput over time around a shift of traffic: left as it is, with proposals applied, and the best fixed."""
    looks = [
        Curve("left as it is", WHOLE, "", []),
        Curve("applies itself", APART, "", []),
        Curve("best fixed", INK, "5 4", []),
    ]
    plot = read_plot(rows_of(root, "redeploy", "Requests in time"), rows_of(root, "redeploy", "What was"), looks)
    note = (
        "Requests in time a second (first token in 2 s, then one every 150 ms) of recorded traffic whose outputs grow "
        "to four times their length: four paced instances of LLaVA-1.5-7B, live, on two busy cores. Best fixed: the "
        "placement that the planner chooses for the traffic after the shift, known beforehand."
    )
    title, below = "A pipeline that becomes what its traffic asks for", TOP + HIGH + 60
    lines = [text(20, 32, title, size=16, more='font-weight="600"'), *draw_plot(plot)]
    lines += [text(20, below + 17 * row, words, size=12, colour=PALE) for row, words in enumerate(wrap(note))]
    return sheet(WIDTH, below + 17 * len(wrap(note)), title, lines)


# ---------------------------------------------------------------- the idea


def draw_stages() -> str:
    """One request's way through E, P and D, and what moves between them."""
    boxes = (
        ("E", "encode", "picture to features", 20, "E0  E1"),
        ("P", "prefill", "prompt to KV cache", 285, "P0"),
        ("D", "decode", "a token a step", 550, "D0  D1  D2"),
    )
    lines = [text(20, 30, '"2E1P3D": each stage on instances of its own', size=16, more='font-weight="600"')]
    for letter, name, does, x, instances in boxes:
        colour, middle = STAGES[letter], 'text-anchor="middle"'
        look = f'fill="{colour}" fill-opacity="0.09" stroke="{colour}" stroke-width="1.5"'
        lines += [
            f'<rect x="{x}" y="52" width="150" height="104" rx="8" {look}/>',
            text(x + 75, 80, f"{letter}: {name}", size=16, colour=colour, more=f'{middle} font-weight="600"'),
            text(x + 75, 102, does, more=middle),
            text(x + 75, 138, instances, size=12, colour=PALE, more=f'{middle} font-family="monospace"'),
        ]
    lines += [*arrow(170, 285, "image blocks"), *arrow(435, 550, "KV blocks")]
    below = (
        "Images and KV caches lie in paged blocks, which the next stage pulls: within the process, over shared memory, "
        'NIXL or UCX. "EPD" is all on one instance; in "1EP1D", "2ED1P" and "1PD2E" two stages share one. The same '
        "objects and the same tokens, placed by a string, by hand, or by a planner from recorded traffic."
    )
    rows = wrap(below)
    lines += [text(20, 184 + 17 * row, words, size=12, colour=PALE) for row, words in enumerate(rows)]
    return sheet(WIDTH, 184 + 17 * len(rows), "Encode, prefill and decode on instances of their own", lines)


def arrow(start: int, end: int, words: str) -> Iterator[str]:
    yield f'<path d="M{start + 8} 104 H{end - 10}" stroke="{INK}" stroke-width="1.5"/>'
    yield f'<path d="M{end - 16} 99 L{end - 8} 104 L{end - 16} 109 Z" fill="{INK}"/>'
    yield text((start + end) / 2, 94, words, size=12, more='text-anchor="middle"')


DRAWN: dict[str, Callable[[Path], str]] = {
    "stages.svg": lambda root: draw_stages(),
    "waits.svg": lambda root: draw_chart(waits(root)),
    "bounds.svg": lambda root: draw_chart(bounds(root)),
    "methods.svg": lambda root: draw_chart(methods(root)),
    "redeploy.svg": draw_redeploy,
}


def main(root: Path) -> int:
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWN.items():
        (root / FOLDER / name).write_text(draw(root), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".")))
