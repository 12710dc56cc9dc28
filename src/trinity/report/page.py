"""Renders a plan, its plots and its replays as one self-contained page of HTML.

::

    report.save_report("plan.html", plan, replays={"5EPD": {20.0: replay}})
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from trinity.errors.files import write_file
from trinity.planner import Candidate, Plan
from trinity.report import plots
from trinity.report.plots.traffic import Replays, ServedTraffic
from trinity.tables import Table, as_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMELINE_S = 10.0  # of a timeline that is shown; more would be too small to read
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { font-size: 0.85rem; color: #444; }
"""


def save_report(
    path: str | Path,
    plan: Plan,
    *,
    replays: Replays | None = None,
    plans: Sequence[Plan] = (),
    served: ServedTraffic | None = None,
) -> None:
    """Write ``render_html(plan, ...)`` to a file, which appears whole or not at all. Raises ``ConfigError``."""
    write_file(path, render_html(plan, replays=replays, plans=plans, served=served).encode())


def render_html(
    plan: Plan, *, replays: Replays | None = None, plans: Sequence[Plan] = (), served: ServedTraffic | None = None
) -> str:
    """Render one page: the plan in words, its candidates, their plots and the trace that it was made for.

    plan: the plan.
    replays (None): replays by deployment and rate (requests/s), for latencies, ranks and recorded timelines.
    plans (()): plans for the same requests under other SLOs.
    served (None): served requests, as ``plots.plot_breakdown`` takes them.

    Plots are embedded: the page loads nothing and runs no script. Raises ``ConfigError`` where matplotlib is not
    installed.
    """
    title = f"Plan for {plan.model}"
    body = "\n".join([f"<h1>{escape(title)}</h1>", *_sections(plan, replays or {}, plans, served or {})])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _sections(plan: Plan, replays: Replays, plans: Sequence[Plan], served: ServedTraffic) -> Iterator[str]:
    table = plan._repr_html_()
    yield table
    explained = map(escape, plan.explain().splitlines())
    yield from (f"<p>{line}</p>" for line in explained if line not in table)
    yield _figure(plots.plot_ratios(plan), f"Heat map of what each ratio reaches; {_best(plan)}")
    yield _figure(plots.plot_attainment(plan), "Share of the requests in time against the request rate")
    yield f"<h2>{escape(plan.best.placement)} at its goodput</h2>"
    caption = "Share of the time that each instance works, by stage"
    yield _figure(plots.plot_utilisation(plan.best), caption)
    yield _memory_table(plan.best)
    if plans:
        yield "<h2>Other SLOs</h2>"
        yield _figure(plots.plot_best_method(plans), "The best method under each SLO")
    if replays:
        yield from _replay_sections(plan, replays)
    if served:
        yield "<h2>Where the time goes</h2>"
        yield _figure(plots.plot_breakdown(served), "Mean time of a request in each span")
    yield f"<h2>The requests that it was planned on</h2>{plan.trace._repr_html_()}"


def _replay_sections(plan: Plan, replays: Replays) -> Iterator[str]:
    yield "<h2>Replays</h2>"
    yield _figure(plots.plot_scatter(replays, plan.slo), "Latencies of every request, by rate and deployment")
    if len(replays) > 1:
        yield _figure(plots.plot_radar(replays), "Ranks of the deployments at each rate")
    for name, by_rate in replays.items():
        for rate, replay in sorted(by_rate.items()):
            if replay.timeline:
                title = f"{name} at {rate:.4g} requests/s"
                drawn = plots.plot_timeline(replay, end_s=TIMELINE_S, title=title)
                yield _figure(drawn, f"What ran when: {title}")


def _best(plan: Plan) -> str:
    return f"the best is {plan.best.placement}" if plan.met else "no candidate meets the SLO"


def _figure(figure: Figure, caption: str) -> str:
    """Embed a plot as an image rather than as SVG elements, so that definitions of one plot do not affect another."""
    source = f"data:image/svg+xml;base64,{b64encode(plots.render_svg(figure)).decode()}"
    words = escape(caption)
    return f'<figure><img alt="{words}" src="{source}"><figcaption>{words}.</figcaption></figure>'


def _memory_table(each: Candidate) -> str:
    kinds = sorted({kind for held in each.memory.values() for kind in held})
    if not kinds:
        return ""
    rows = [(name, *(_format_memory(kind, held.get(kind)) for kind in kinds)) for name, held in each.memory.items()]
    return as_html(Table(("memory", *(kind.replace("_", " ") for kind in kinds)), rows))


def _format_memory(kind: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if kind.endswith("_peak") else f"{value / 1e9:.2f} GB"
