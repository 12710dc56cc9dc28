"""Several encoders for one request in the simulator: EPDServe's table 4, and what is left of that under load."""

from __future__ import annotations

import random
from math import ceil
from statistics import mean
from typing import Any

import pytest

from support.thinned import thinned
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.errors import ConfigError
from trinity.simulation.simulator import Replay, Simulator
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

TOKENS = 64
BASE_S, ENCODE_S, PREFILL_S = 0.52, 0.413, 0.055  # fitted to table 4: of a pass, an image, an image's prefill
TABLE_4 = {2: 1.39, 4: 2.14, 6: 2.66, 8: 2.39}  # what these give on six encoders
LIGHT = LinearCost(step_s=0.02, prefill_s=0.005 / TOKENS, media_s=ENCODE_S / TOKENS)  # encoders alone are the limit


def simulator(spread: int, **options: Any) -> Simulator:
    cost = LinearCost(step_s=BASE_S, prefill_s=PREFILL_S / TOKENS, media_s=ENCODE_S / TOKENS)
    settings: dict[str, Any] = {"cost": cost, "budgets": StepBudgets(token_budget=16384, image_budget=TOKENS)}
    shape, cluster = get_model_shape("minicpm-v-2.6"), Cluster.of("A100", 8)
    return Simulator(shape, SLO(3.0, 1.0), cluster=cluster, spread=spread, **settings | options)


def row(seconds: float, images: int, name: str) -> TraceRow:
    shown = [TraceImage(tokens=TOKENS, content=f"{name}.{item}") for item in range(images)]
    return TraceRow(
        timestamp=1000 * seconds, input_length=2 + images * TOKENS, text_length=2, output_length=1, images=shown
    )


def at_rest(images: int) -> Trace:
    return Trace([row(30.0 * number, images, str(number)) for number in range(4)])


def crowd(images: int, load: float, requests: int = 150) -> Trace:
    """Requests at random, ``load`` times as many as six encoders can do."""
    draw, at, rows = random.Random(5), 0.0, []
    for number in range(requests):
        at += draw.expovariate(load * 6 / (images * ENCODE_S))
        rows.append(row(at, images, str(number)))
    return Trace(rows)


def ttft(replay: Replay) -> float:
    return mean(outcome.ttft_s for outcome in replay.outcomes if outcome.ttft_s is not None)


def encoding(replay: Replay) -> float:
    return sum(replay.busy_s[name]["E"] for name in replay.busy_s if name.startswith("E"))


@pytest.mark.parametrize("images", TABLE_4)
def test_the_gain_at_rest_is_that_of_the_formula(images: int) -> None:
    one, six = (ttft(simulator(spread).replay(at_rest(images), "6E1P1D")) for spread in (1, 6))
    assert one == pytest.approx(BASE_S + images * (ENCODE_S + PREFILL_S), rel=0.05)
    assert six == pytest.approx(BASE_S + ceil(images / 6) * ENCODE_S + images * PREFILL_S, rel=0.05)
    assert one / six == pytest.approx(TABLE_4[images], rel=0.15)


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
@pytest.mark.parametrize("load", thinned((0.5, 0.9, 1.2), (1.2).__eq__))
def test_no_load_is_served_worse_and_no_image_encoded_twice(routing: str, load: float) -> None:
    trace = crowd(4, load)
    one, six = (simulator(n, cost=LIGHT, routing=routing).replay(trace, "6E1P1D") for n in (1, 6))
    assert ttft(six) < (0.6 if load == 0.5 else 1.0) * ttft(one)
    assert six.duration_s < 1.01 * one.duration_s
    assert encoding(six) == pytest.approx(encoding(one))


def test_the_compiled_engine_says_that_it_has_one_encoder_a_request() -> None:
    assert "spread=6" in simulator(6).why_python("6E1P1D")
    assert not simulator(6).screens("6E1P1D")
    with pytest.raises(ConfigError, match="spread=6"):
        simulator(6, backend="compiled").replay(at_rest(2), "6E1P1D")


@pytest.mark.parametrize("placement", ["1EPD7PD", "1E6P1D", "1EP7D"])
def test_where_nobody_could_help_nothing_changes(placement: str) -> None:
    assert simulator(6).why_python(placement) == simulator(1).why_python(placement)
    assert simulator(6).settings(placement) == simulator(1).settings(placement)
