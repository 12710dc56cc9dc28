"""Algorithm 2 against figures worked out by hand, line by line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.costs.model_shape import MODELS
from trinity.costs.step_cost import DEVICES, Roofline
from trinity.errors import ConfigError, TraceError
from trinity.placement import Placement
from trinity.planner.algorithm2 import (
    Stages,
    Workload,
    choose_best,
    choose_placements,
    measure_workload,
    memory_bound,
    partition,
    profile_device,
    stage_seconds,
)
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

LLAVA = MODELS["llava-1.5-7b"]
IMAGE = TraceImage(tokens=576)


class Straight:
    """Seconds that grow on straight lines: fixed + each · count, for decodes, prefill tokens, visual tokens."""

    def __init__(self, decode: float = 1e-4, prefill: float = 1e-4, encode: float = 1e-4, fixed: float = 0.01) -> None:
        self.each, self.fixed = (decode, prefill, encode), fixed

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        return self.at(decodes, prefill_tokens, media_tokens, context=0.0)

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
        counts = (decodes, prefill_tokens, media_tokens)
        return self.fixed + sum(each * count for each, count in zip(self.each, counts, strict=True))


def rows(*shapes: tuple[int, int, int]) -> Trace:
    """(images, prompt with visual tokens, output) of each request."""
    return Trace(
        TraceRow(timestamp=1000.0 * n, input_length=prompt, output_length=output, images=[IMAGE] * images)
        for n, (images, prompt, output) in enumerate(shapes)
    )


def load_of(*shapes: tuple[int, int, int]) -> Workload:
    return measure_workload(rows(*shapes), LLAVA)


# ---------------------------------------------------------------- lines 1 to 5


def test_workload_adds_up_tokens() -> None:
    load = load_of((1, 600, 11), (0, 100, 1))
    assert (load.visual, load.prompt, load.decode) == (576, 700, 10)
    assert load.requests == 2
    assert load.context == pytest.approx(600 + 5.5)  # ten decodes look back on 601 to 610 tokens
    assert load.image == 576


def test_the_first_token_is_prefills() -> None:
    assert load_of((1, 600, 1)).decode == 0
    assert load_of((1, 600, 0)).decode == 0  # no pipeline gives fewer than one
    assert load_of((1, 600, 1)).context == 600


def test_a_trace_without_requests_is_refused() -> None:
    with pytest.raises(TraceError, match="serve or load some requests"):
        measure_workload(Trace(), LLAVA)


def test_requests_that_the_model_cannot_take_are_no_work() -> None:
    assert load_of((1, 600, 11), (0, 5000, 11)) == load_of((1, 600, 11))  # LLaVA's context has 4,096 tokens
    with pytest.raises(TraceError, match="with prompts of its context of 4,096 tokens or longer"):
        load_of((0, 5000, 11))


def test_images_of_unknown_tokens_have_the_models_own() -> None:
    plain = TraceRow(timestamp=0, input_length=600, output_length=4, text_length=24, images=[TraceImage()])
    assert measure_workload(Trace([plain]), LLAVA).visual == 576


# ---------------------------------------------------------------- lines 6 to 11


def test_budgets_are_the_largest_within_their_bounds_up_to_the_knee() -> None:
    """0.01 + n/10,000 s: half the TTFT of 0.4 s holds 1,900 tokens; the knee of 0.01 s fixed is where n makes 95 %."""
    found = profile_device(load_of((1, 600, 11)), Straight(), SLO(ttft=0.4, tbt=0.05), LLAVA, 80e9)
    assert found.budgets.e == found.budgets.p
    assert 0.95 * 1900 / 0.2 <= found.budgets.e / (0.01 + found.budgets.e / 1e4) <= 1900 / 0.2
    # Decodes: 0.05 s holds 400, memory 80 GB fewer: that is line 9.
    assert found.budgets.d == memory_bound(load_of((1, 600, 11)), LLAVA, 80e9) < 400


def test_throughput_is_that_at_the_budget_and_time_is_work_over_it() -> None:
    load = load_of((1, 600, 11), (1, 600, 11))
    found = profile_device(load, Straight(decode=1e-3), SLO(ttft=0.4, tbt=0.05), LLAVA, 80e9)
    assert found.budgets.d == 40  # (0.05 - 0.01) / 0.001, less than memory holds
    assert found.throughput.d == pytest.approx(40 / 0.05)
    assert found.seconds.d == pytest.approx(20 / 800)
    assert found.seconds.p == pytest.approx(1200 / found.throughput.p)
    assert found.seconds.e == pytest.approx(1152 / found.throughput.e)


def test_a_whole_image_runs_whatever_the_bound() -> None:
    found = profile_device(load_of((1, 600, 11)), Straight(encode=1.0), SLO(ttft=0.4, tbt=0.05), LLAVA, 80e9)
    assert found.budgets.e == 576


def test_where_not_even_one_item_is_in_time_the_budget_is_one() -> None:
    found = profile_device(load_of((1, 600, 11)), Straight(decode=1, prefill=1), SLO(ttft=0.4, tbt=0.05), LLAVA, 80e9)
    assert found.budgets.p == found.budgets.d == 1


def test_a_stage_that_costs_nothing_takes_next_to_nothing() -> None:
    free = Straight(encode=0.0, prefill=0.0, decode=0.0, fixed=0.0)
    found = profile_device(load_of((1, 600, 11)), free, SLO(ttft=0.4, tbt=0.05), LLAVA, 80e9)
    assert 0 < max(found.seconds) < 1e-6


def test_text_alone_has_no_encode() -> None:
    found = profile_device(load_of((0, 600, 11)), Straight(), SLO(ttft=0.4, tbt=0.05), LLAVA, 80e9)
    assert found.seconds.e == found.budgets.e == found.throughput.e == 0


def test_the_memory_bound_is_in_requests() -> None:
    """LLaVA-1.5-7B: 6,738,415,616 values less norms are 13.48 GB; a request of 610 tokens has 610 · 524,288 bytes."""
    load = load_of((1, 600, 11))
    assert LLAVA.kv_bytes == 524_288
    by_hand = math.floor(0.9 * (80e9 - LLAVA.language_bytes) / (610 * 524_288))
    assert memory_bound(load, LLAVA, 80e9) == by_hand == 187
    with_images = math.floor(0.9 * 0.9 * (80e9 - LLAVA.language_bytes - LLAVA.vision_bytes) / (610 * 524_288))
    assert memory_bound(load, LLAVA, 80e9, "ED") == with_images < by_hand


def test_the_memory_bound_is_a_mean_over_requests_and_at_least_one() -> None:
    assert memory_bound(load_of((1, 600, 11), (1, 600, 11)), LLAVA, 80e9) == 187
    assert memory_bound(load_of((1, 600, 11)), LLAVA, 13.5e9) == 1


def test_prompts_of_a_batch_do_not_see_each_other() -> None:
    """4,000 tokens of ten prompts attend to less than one prompt of 4,000 tokens."""
    cost = Roofline(model=LLAVA, device=DEVICES["H100"])
    _, prefill, _ = stage_seconds(load_of(*[(0, 400, 2)] * 3), cost)
    assert prefill(4000) == cost.at(0, 4000, 0, context=0, prefills=10) < cost.at(0, 4000, 0, context=0, prefills=1)


# ---------------------------------------------------------------- line 12


@pytest.mark.parametrize(
    ("count", "seconds", "counts"),
    [
        (8, (1, 3, 4), (1, 3, 4)),
        (8, (1, 1, 1), (3, 3, 2)),  # quotas 2.67: the two left go to E and P
        (8, (0.01, 1, 7), (1, 1, 6)),  # quotas 0.01, 0.999, 6.99
        (8, (0.1, 0.1, 20), (1, 1, 6)),  # floors of one give nine away: D gives one back
        (3, (0, 0, 5), (1, 1, 1)),
        (3, (0, 0, 0), (1, 1, 1)),
        (32, (0.6, 1.4, 2.0), (5, 11, 16)),  # 4.8, 11.2, 16
        (10, (1, 2, 7), (1, 2, 7)),
        (6, (1, 1, 2), (2, 1, 3)),  # 1.5, 1.5, 3: the one left goes to E
    ],
)
def test_partition_by_largest_remainder(
    count: int, seconds: tuple[float, float, float], counts: tuple[int, int, int]
) -> None:
    assert partition(count, seconds) == counts


@pytest.mark.parametrize(
    ("count", "seconds", "counts"),
    [
        (8, (1, 3, 4), (1, 3, 4)),
        (8, (1, 1, 1), (3, 3, 2)),
        (8, (0.1, 0.1, 20), (1, 1, 6)),
        (4, (3, 2.9, 1), (2, 1, 1)),
        (5, (3, 2.9, 1), (2, 2, 1)),
    ],
)
def test_partition_by_minimax(count: int, seconds: tuple[float, float, float], counts: tuple[int, int, int]) -> None:
    assert partition(count, seconds, "minimax") == counts


SECONDS = st.tuples(*[st.floats(0, 1e6)] * 3)


@given(st.integers(3, 200), SECONDS, st.sampled_from(["largest_remainder", "minimax"]))
def test_partition_gives_all_away_and_one_at_least(count: int, seconds: tuple[float, float, float], split: str) -> None:
    counts = partition(count, seconds, "minimax" if split == "minimax" else "largest_remainder")
    assert sum(counts) == count
    assert min(counts) >= 1


@given(st.integers(3, 40), SECONDS)
def test_minimax_is_the_least_of_the_largest(count: int, seconds: tuple[float, float, float]) -> None:
    counts = partition(count, seconds, "minimax")
    reached = max(each / n for each, n in zip(seconds, counts, strict=True))
    for e in range(1, count - 1):
        for p in range(1, count - e):
            other = (e, p, count - e - p)
            assert reached <= max(each / n for each, n in zip(seconds, other, strict=True))


def test_fewer_instances_than_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 stages need at least as many"):
        partition(2, (1, 1, 1))


# ---------------------------------------------------------------- lines 14 to 16, 13 and 17 to 23


def named(count: int, seconds: Stages) -> list[str]:
    return [str(each) for each in choose_placements(count, seconds)]


def test_three_methods_of_one_partition() -> None:
    assert named(8, Stages(1, 3, 4)) == ["1E3P4D", "4EP4D", "5ED3P"]


def test_one_and_two_instances() -> None:
    assert named(1, Stages(1, 3, 4)) == ["1EPD"]
    assert named(2, Stages(1, 3, 4)) == ["1EP1D", "1ED1P", "1PD1E"]


def test_text_alone_never_uses_e() -> None:
    assert named(8, Stages(0, 2, 2)) == ["4P4D", "8PD"]
    assert named(2, Stages(0, 2, 9)) == ["1P1D", "2PD"]
    assert named(1, Stages(0, 2, 9)) == ["1PD"]


@pytest.mark.parametrize("count", [0, -3])
def test_no_instance_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="at least 1 instance"):
        choose_placements(count, Stages(1, 1, 1))


def test_the_first_strictly_greater_goodput_wins() -> None:
    three = choose_placements(8, Stages(1, 3, 4))
    known = {"1E3P4D": 5.0, "4EP4D": 7.0, "5ED3P": 7.0}
    replayed: list[str] = []

    def replay(placement: Placement, above: float) -> float:
        replayed.append(str(placement))
        return known[str(placement)]

    found = choose_best(three, replay)
    assert (str(found[0]), found[1]) == ("4EP4D", 7.0)
    assert replayed == ["1E3P4D", "4EP4D", "5ED3P"]


def test_where_all_have_none_none_is_best() -> None:
    assert choose_best(choose_placements(8, Stages(1, 3, 4)), lambda placement, above: 0.0) == (None, 0.0)


def test_with_the_papers_baseline_workload_decode_has_most_instances() -> None:
    """The notes' case: LLaVA-NeXT on TextCaps at N = 32, H100 with an eager step of 20 ms, gives D more than half."""
    model = MODELS["llava-next-7b"]
    load = measure_workload(
        Trace(
            TraceRow(timestamp=n, input_length=2364, output_length=80, images=[TraceImage(tokens=2340)])
            for n in range(100)
        ),
        model,
    )
    cost = Roofline(model=model, device=DEVICES["H100"].under("eager"))
    found = profile_device(load, cost, SLO(ttft=4.0, tbt=0.08), model, 0.9 * 80e9)
    placed = [str(each) for each in choose_placements(32, found.seconds)]
    counts = partition(32, found.seconds)
    assert counts[2] > 16 > counts[1] > counts[0]
    assert placed[1] == f"{counts[0] + counts[1]}EP{counts[2]}D"
