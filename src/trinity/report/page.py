"""Report: a plan, its pictures and replays on one page of HTML that needs nothing else and loads nothing.

::

    report.save("plan.html", plan, runs={"5EPD": {20.0: replay}})
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from trinity.metrics import Metrics
from trinity.planner import Candidate, Plan
from trinity.report import plots
from trinity.simulation.simulator import Replay
from trinity.tables import Table, as_html
from trinity.traces.trace import Trace

TIMELINE_S = 10.0  # of a timeline that is shown; a longer one could not be read
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ddd; padding: 0.25rem 0.7rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { font-size: 0.85rem; color: #444; }
"""

Runs = Mapping[str, Mapping[float, Replay]]
Served = Mapping[str, Metrics | Trace | Mapping[str, float]]


def save(
    path: str | Path, plan: Plan, *, runs: Runs | None = None, plans: Sequence[Plan] = (), served: Served | None = None
) -> None:
    """Write ``html(plan, ...)``. The file is there in full or not at all."""
    target = Path(path)
    scratch = target.with_name(f"{target.name}.{os.getpid()}.part")
    scratch.write_text(html(plan, runs=runs, plans=plans, served=served), encoding="utf-8")
    scratch.replace(target)


def html(plan: Plan, *, runs: Runs | None = None, plans: Sequence[Plan] = (), served: Served | None = None) -> str:
    """One page: the plan in words, its candidates, their pictures, the trace that it is for.

    ``runs``: replays by deployment and rate, for latencies, ranks and the timelines of those that were recorded.
    ``plans``: of the same requests under other SLOs. ``served``: what ``pictures.breakdown`` shows. Pictures are in the
    page itself; nothing is loaded from anywhere, and no script runs. Raises ``ConfigError`` where matplotlib is not
    installed.
    """
    title = f"Plan for {plan.model}"
    body = "\n".join([f"<h1>{escape(title)}</h1>", *_sections(plan, runs or {}, plans, served or {})])
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _sections(plan: Plan, runs: Runs, plans: Sequence[Plan], served: Served) -> Iterator[str]:
    yield plan._repr_html_()
    yield from (f"<p>{escape(line)}</p>" for line in plan.explain().splitlines()[1:])  # the first heads the table
    yield _picture(plots.svg(plots.ratios(plan)), f"Heat map of what each ratio reaches; {_best(plan)}")
    yield _picture(plots.svg(plots.attainment(plan)), "Share of the requests in time against the request rate")
    yield f"<h2>{escape(plan.best.placement)} at its goodput</h2>"
    caption = "Share of the time that each instance works, by stage"
    yield _picture(plots.svg(plots.utilisation(plan.best)), caption)
    yield _memory(plan.best)
    if plans:
        yield "<h2>Other SLOs</h2>"
        yield _picture(plots.svg(plots.best_method(plans)), "The best method under each SLO")
    if runs:
        yield from _replays(plan, runs)
    if served:
        yield "<h2>Where the time goes</h2>"
        yield _picture(plots.svg(plots.breakdown(served)), "Mean time of a request in each span")
    yield f"<h2>The requests that it was planned on</h2>{plan.trace._repr_html_()}"


def _replays(plan: Plan, runs: Runs) -> Iterator[str]:
    yield "<h2>Replays</h2>"
    yield _picture(plots.svg(plots.scatter(runs, plan.slo)), "Latencies of every request, by rate and deployment")
    if len(runs) > 1:
        yield _picture(plots.svg(plots.radar(runs)), "Ranks of the deployments at each rate")
    for name, by_rate in runs.items():
        for rate, replay in sorted(by_rate.items()):
            if replay.timeline:
                title = f"{name} at {rate:.4g} requests/s"
                drawn = plots.timeline(replay, end_s=TIMELINE_S, title=title)
                yield _picture(plots.svg(drawn), f"What ran when: {title}")


def _best(plan: Plan) -> str:
    return f"the best is {plan.best.placement}" if plan.met else "no candidate meets the SLO"


def _picture(svg: bytes, caption: str) -> str:
    """An image, not SVG elements: what one picture defines does not reach into another."""
    source = f"data:image/svg+xml;base64,{b64encode(svg).decode()}"
    words = escape(caption)
    return f'<figure><img alt="{words}" src="{source}"><figcaption>{words}.</figcaption></figure>'


def _memory(each: Candidate) -> str:
    kinds = sorted({kind for held in each.memory.values() for kind in held})
    if not kinds:
        return ""
    rows = [(name, *(_held(kind, held.get(kind)) for kind in kinds)) for name, held in each.memory.items()]
    return as_html(Table(("memory", *(kind.replace("_", " ") for kind in kinds)), rows))


def _held(kind: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if kind.endswith("_peak") else f"{value / 1e9:.2f} GB"
