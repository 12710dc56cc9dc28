"""Stage demand: seconds of a request by hand, steps under an SLO, the load of a placement against brute force."""

from __future__ import annotations

import pytest

from trinity.costs.demand import Demand, sum_by_stage
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import DEVICES, Roofline
from trinity.errors import ConfigError, TraceError
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow


class Plain:
    """1 s a decode and 0.01 s a token of its context, 0.1 s a prefill token, 0.001 s a visual token; 2 s a step."""

    def at(
        self,
        decodes: int,
        prefill_tokens: int,
        media_tokens: int,
        *,
        context: float,
        prefilled: float = 0.0,
        prefills: int = 1,
        image_tokens: float = 0.0,
    ) -> float:
        self.asked = (prefilled, prefills)
        return 2 + decodes * (1 + 0.01 * context) + 0.1 * prefill_tokens + 0.001 * media_tokens

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        return self.at(decodes, prefill_tokens, media_tokens, context=0)


def row(text: int = 60, images: tuple[int, ...] = (), out: int = 1, at: float = 0.0) -> TraceRow:
    found = [TraceImage(tokens=tokens) for tokens in images]
    return TraceRow(timestamp=1000 * at, input_length=text + sum(images), output_length=out, images=found)


def test_a_request_has_its_share_of_every_step_that_it_takes_part_in() -> None:
    demand = Demand(cost=Plain(), media=1000, tokens=200, decodes=4)
    found = demand.of(row(text=60, images=(30, 10), out=21))
    assert found["E"] == pytest.approx(40 / 1000 * (2 + 1))
    assert found["P"] == pytest.approx(100 / 200 * (2 + 20))
    assert found["D"] == pytest.approx(20 / 4 * (2 + 4 * (1 + 0.01 * (100 + 10))))


def test_text_takes_no_encoding_and_one_token_no_decoding() -> None:
    demand = Demand(cost=Plain(), media=1, tokens=1, decodes=1)
    assert demand.of(row(text=1)) == {"E": 0.0, "P": 2.1, "D": 0.0}
    assert demand.of(row(text=0, out=0)) == {"E": 0.0, "P": 0.0, "D": 0.0}


def test_long_prompts_look_back_on_their_own_chunks_and_short_ones_share_a_step() -> None:
    cost = Plain()
    demand = Demand(cost=cost, media=1, tokens=100, decodes=1)
    demand.of(row(text=500))
    assert cost.asked == (200, 1)  # chunks of 100 have 0 to 400 tokens before them
    demand.of(row(text=30))
    assert cost.asked == (0, 3)


def test_the_demand_of_a_trace_is_the_sum_over_its_span() -> None:
    demand = Demand(cost=Plain(), media=100, tokens=100, decodes=10)
    rows = [row(at=at, images=(50,), out=5) for at in (10, 12, 20)]
    each = demand.of(rows[0])
    assert demand.rate(Trace(rows)) == pytest.approx({stage: 3 * each[stage] / 10 for stage in "EPD"})
    assert sum_by_stage(map(demand.of, rows)) == pytest.approx({stage: 3 * each[stage] for stage in "EPD"})
    for none in ([], rows[:1], [rows[0], rows[0]]):
        with pytest.raises(TraceError, match="no rate"):
            demand.rate(Trace(none))


def test_steps_under_an_slo_keep_it_and_lose_little() -> None:
    demand = Demand.for_slo(Plain(), SLO(ttft=30, tbt=20), context=50)
    for found, most, each in ((demand.tokens, 130, 0.1), (demand.decodes, 12, 1.5), (demand.media, 13_000, 0.001)):
        assert found <= most  # 2 + each * most is the bound
        assert found / (2 + each * found) >= 0.95 * most / (2 + each * most)


def test_an_slo_that_nothing_meets_leaves_one_row() -> None:
    demand = Demand.for_slo(Plain(), SLO(ttft=0.1, tbt=0.1))
    assert (demand.media, demand.tokens, demand.decodes) == (1, 1, 1)
    with pytest.raises(ConfigError, match="at least 1"):
        Demand(cost=Plain(), media=1, tokens=0, decodes=1)


def test_steps_of_a_known_model_and_device_are_in_time() -> None:
    cost, slo = Roofline(model=get_model_shape("llava-1.5-7b"), device=DEVICES["H100"]), SLO(ttft=2, tbt=0.08)
    demand = Demand.for_slo(cost, slo)
    assert cost.at(0, demand.tokens, 0, context=0) <= 1
    assert 0.06 < cost.at(demand.decodes, 0, 0, context=1024) <= 0.08
    assert Demand.for_slo(cost, slo, most_decodes=50).decodes <= 50
    of = demand.of(row(text=50, images=(576,), out=100))
    assert 0 < of["E"] < of["P"] < 0.1
    assert demand.of(row(text=50, images=(576,), out=199))["D"] == pytest.approx(2 * of["D"], rel=0.1)
