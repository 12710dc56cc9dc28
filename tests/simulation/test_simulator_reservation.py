"""Reservation in the simulator: requests that ask for much and use little, as a planner sees them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trinity.costs.cluster import Cluster
from trinity.costs.step_cost import get_device
from trinity.errors import ConfigError, UnknownName
from trinity.simulation import compiled_engine
from trinity.simulation.simulator import Replay, Simulator
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

SLO_ = SLO(4.0, 0.1)


def together(count: int = 60, output: int = 30) -> Trace:
    """All within a second, each with an image of its own."""
    image = TraceImage(width=336, height=336, tokens=576)
    return Trace(
        [
            TraceRow(
                timestamp=1000 * number / count, input_length=600, text_length=24, output_length=output, images=[image]
            )
            for number in range(count)
        ]
    )


def replayed(placement: str = "EPD", trace: Trace | None = None, **options: Any) -> Replay:
    size = {"EPD": 1, "EP+D": 2, "E+P+D": 3}[placement]
    # of an eager engine: decodes pile up while steps are long
    simulator = Simulator("llava-1.5-7b", SLO_, cluster=Cluster.of(get_device("H100", "eager"), size), **options)
    return simulator.replay(trace or together(), placement, record=True)


def most_at_once(found: Replay) -> int:
    return max(int(each.args.get("decodes", 0)) for each in found.timeline)


@pytest.mark.parametrize("placement", ["EPD", "EP+D", "E+P+D"])
def test_requests_that_ask_for_more_than_they_use_decode_at_once_only_where_blocks_come_as_they_decode(
    placement: str,
) -> None:
    """1,400 more tokens than are used are 0.7 GB each of the 60 GB that an H100 has for KV."""
    full, found = (
        replayed(placement, ask=2048, reservation=each, memory_share=0.35) for each in ("full", "optimistic")
    )
    assert most_at_once(found) > 2 * most_at_once(full)
    assert found.duration_s < full.duration_s
    for each in (full, found):
        assert {outcome.finish_reason for outcome in each.outcomes} == {"stop"}
        assert {len(outcome.itl_s) for outcome in each.outcomes} == {29}
    assert full.preemptions == 0


def test_preemptions_are_counted_and_everybody_still_has_all_tokens() -> None:
    found = replayed(trace=together(80, 120), ask=2048, reservation="optimistic", memory_share=0.3)
    assert found.preemptions > 0
    assert {len(outcome.itl_s) for outcome in found.outcomes} == {119}


def test_who_asks_for_what_it_uses_ends_by_its_length_and_asking_is_bounded_by_the_context() -> None:
    assert {outcome.finish_reason for outcome in replayed(ask=10).outcomes} == {"length"}
    assert {outcome.finish_reason for outcome in replayed(ask=10**6, trace=together(2)).outcomes} == {"stop"}


def test_rows_ask_for_what_they_say() -> None:
    def said(most: int | None) -> Trace:
        return Trace([msgspec.structs.replace(row, max_tokens=most) for row in together(20)])

    (none, few, many, asked) = (
        replayed(trace=each, ask=ask, memory_share=0.35).outcomes
        for each, ask in ((said(None), 0), (said(5), 0), (said(2048), 0), (said(None), 2048))
    )
    assert none == few
    assert many == asked
    assert [{each.finish_reason for each in found} for found in (none, many)] == [{"length"}, {"stop"}]


@pytest.mark.skipif(
    bool(compiled_engine.why_unavailable()), reason=f"no compiled twin: {compiled_engine.why_unavailable()}"
)
@pytest.mark.parametrize("placement", ["EPD", "EP+D", "E+P+D"])
def test_the_twin_comes_to_the_same(placement: str) -> None:
    def told(backend: str, **options: Any) -> Replay:
        size = {"EPD": 1, "EP+D": 2, "E+P+D": 3}[placement]
        made = Simulator("llava-1.5-7b", SLO_, cluster=Cluster.of("H100", size), backend=backend, **options)
        found = made.replay(together(80, 120), placement)
        assert found.backend == backend
        return msgspec.structs.replace(found, backend="")

    tight: dict[str, Any] = {"reservation": "optimistic", "memory_share": 0.3}
    for options in ({"ask": 2048, "memory_share": 0.35}, {**tight, "ask": 2048}, tight):
        assert told("python", **options) == told("compiled", **options)


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(UnknownName, match="optimistic"):
        Simulator("llava-1.5-7b", SLO_, cluster=Cluster.of("H100", 1), reservation="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ask"):
        Simulator("llava-1.5-7b", SLO_, cluster=Cluster.of("H100", 1), ask=-1)
