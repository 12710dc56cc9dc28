"""What a matplotlib figure shows, read back from its artists."""

from __future__ import annotations

from typing import Any

import msgspec

from trinity.simulation.simulator import Replay
from trinity.timeline import Slice
from trinity.traces.goodput import RequestOutcome


def axes(figure: Any, place: int = 0) -> Any:
    return figure.axes[place]


def lines(of: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Points of the lines that the legend names."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in of.lines
            if not line.get_label().startswith("_")}  # fmt: skip


def words(figure: Any) -> str:
    """All text outside the axes' ticks: titles, labels, notes, cells."""
    found = [text.get_text() for text in figure.texts]
    found += [figure.get_suptitle(), figure.get_supxlabel().replace("\n", " ")]
    for each in figure.axes:
        found += [each.get_title(loc=place) for place in ("left", "center", "right")]
        found += [each.get_xlabel(), each.get_ylabel(), *(text.get_text() for text in each.texts)]
    return "\n".join(text for text in found if text)


def legend(of: Any) -> list[str]:
    return [text.get_text() for text in of.get_legend().get_texts()]


def cells(of: Any) -> dict[str, tuple[float, float]]:
    """Centre of each rectangle that bears a name."""
    named = [patch for patch in of.patches if patch.get_gid()]
    return {each.get_gid(): (each.get_x() + each.get_width() / 2, each.get_y() + each.get_height() / 2)
            for each in named}  # fmt: skip


def outcome(ttft: float | None = 0.1, gaps: tuple[float, ...] = (0.02, 0.04), reason: str = "length") -> RequestOutcome:
    return RequestOutcome(ttft, gaps, reason)


def replay(*outcomes: RequestOutcome, duration_s: float = 10.0, timeline: tuple[Slice, ...] = ()) -> Replay:
    made = Replay(
        outcomes=list(outcomes),
        duration_s=duration_s,
        busy_s={},
        peak_blocks={},
        pools={},
        moved_bytes={},
        events=0,
        backend="python",
        timeline=timeline,
    )
    return msgspec.convert(msgspec.to_builtins(made), Replay)


STEPS = (
    Slice("EP0", "joint", "simulated encode", 5.0, 0.25, {}),
    Slice("EP0", "joint", "simulated encode+prefill", 5.25, 0.5, {}),
    Slice("D0", "migration", "kv", 5.75, 0.01, {"source": "EP0"}),
    Slice("D0", "joint", "simulated decode", 6.0, 1.0, {}),
)
