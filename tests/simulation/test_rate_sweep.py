"""RateSweep: a simulator's replays by the compiled twin, and what goodput asks of it, are what Python comes to."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.simulations import row, simulator
from support.virtual.cluster import make_settings
from trinity.core.prefix_cache import prefix_keys
from trinity.core.transfers import TransferPolicy
from trinity.errors import ConfigError, TraceError
from trinity.memory.native import extension
from trinity.placement import Placement
from trinity.simulation import compiled_engine as twin
from trinity.simulation import rate_sweep
from trinity.simulation.compiled_engine import CompiledPlacement
from trinity.simulation.compiled_workload import CompiledRequest, CompiledWorkload, compile_request
from trinity.simulation.rate_sweep import RateSweep, prepare_requests
from trinity.simulation.simulator import Replay, Simulator
from trinity.simulation.workload import OUTPUT, Job, work_of
from trinity.traces.goodput import RatePoint, RequestOutcome, measure_point, score_outcomes
from trinity.traces.trace import COMPLETE, SLO, SLO_RULES, SLORule, Trace, TraceImage, TraceRow

COMPLETED = np.array([twin.REASONS.index(each) for each in COMPLETE], np.uint8)
needs_twin = pytest.mark.skipif(bool(twin.why_unavailable()), reason=f"no compiled twin: {twin.why_unavailable()}")

PLACEMENTS = ("8EPD", "1E3P4D", "3EP5D", "5ED3P", "6PD2E", "1E2EP3D2PD")


def traffic(seed: int, requests: int, contents: int = 0) -> Trace:
    """Images that are all different or of few contents, shared prefixes, requests beyond the model's context."""
    draw = Random(seed)
    rows: list[TraceRow] = []
    for _ in range(requests):
        names = [f"image{draw.randrange(contents)}" if contents else None for _ in range(draw.choice([0, 1, 1, 2]))]
        text = draw.choice([1, 17, 200, 900, 4085 - 576 * len(names)])
        rows.append(
            TraceRow(
                timestamp=1000 * draw.uniform(0.0, requests / 30),
                input_length=text + 576 * len(names),
                output_length=9000 if text > 1000 else draw.choice([0, 1, 8, 60]),
                text_length=text if draw.random() < 0.95 else 5000,
                images=[TraceImage(tokens=576, content=name) for name in names],
                hash_ids=[draw.randrange(3), draw.randrange(9)] if contents and draw.random() < 0.5 else [],
            )
        )
    rows.sort(key=lambda each: each.timestamp)
    return Trace(rows)


def simulators(count: int = 8, **options: Any) -> tuple[Simulator, Simulator]:
    """The same by both engines: Python, compiled."""
    fields = {"cost": None, "budgets": None} | options
    return simulator(count, backend="python", **fields), simulator(count, backend="compiled", **fields)


def alike(replay: Replay) -> Replay:
    return msgspec.structs.replace(replay, backend="")


def told(point: RatePoint) -> RatePoint:
    """Without what only the compiled engine says."""
    return msgspec.structs.replace(point, load={})


@needs_twin
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("contents", [0, 6])
def test_both_engines_give_the_same_replay(placement: str, contents: int) -> None:
    trace = traffic(len(placement), 60, contents)
    python, compiled = (each.replay(trace, placement) for each in simulators())
    assert (python.backend, compiled.backend) == ("python", "compiled")
    assert alike(python) == alike(compiled)
    assert {"length", "error"} <= {each.finish_reason for each in compiled.outcomes}


@needs_twin
def test_both_engines_agree_where_devices_hosts_and_lanes_differ() -> None:
    from trinity.costs.cluster import Cluster

    cluster = Cluster.of(("H100", 2), ("L40S", 2), per_host=2)
    options = {"cluster": cluster, "lanes": ("vision", "language"), "interference": 1.25}
    python, compiled = (each.replay(traffic(7, 80, 5), "2EP2D") for each in simulators(4, **options))
    assert alike(python) == alike(compiled)
    assert python.moved_bytes["kv"] > 0


@needs_twin
@pytest.mark.parametrize("rate", [None, 0.7, 9.0, 400.0])
@pytest.mark.parametrize("placement", ["8EPD", "1E3P4D"])
def test_a_point_is_what_measuring_outcomes_gives(placement: str, rate: float | None) -> None:
    trace, slo = traffic(3, 80), SLO(0.5, 0.04)
    python, compiled = simulators()
    offered = trace if rate is None else trace.scale(rate=rate)
    expected = score_outcomes(offered, python.replay(offered, placement).outcomes, slo)
    served = compiled.serve(placement)
    assert isinstance(served, RateSweep)
    found = served.point(trace, slo, rate)
    assert found is not None
    assert found == measure_point(served, trace, slo, rate)
    assert told(found) == expected
    replay = compiled.replay(offered, placement)
    span = min(replay.duration_s, 1.1 * found.duration_s)
    for roles, share in found.load.items():
        worked = [sum(own.values()) for own in replay.busy_s.values() if own.keys() == set(roles)]
        assert share == pytest.approx(sum(worked) / len(worked) / span)
    assert list(found.load) == [group.roles for group in Placement.parse(placement).groups]


@needs_twin
@pytest.mark.parametrize("contents", [0, 6])
@pytest.mark.parametrize("placement", ["8EPD", "1E3P4D"])
def test_what_the_instances_did_is_known_from_a_point(
    placement: str, contents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, slo, rate = traffic(3, 80, contents), SLO(0.5, 0.04), 9.0
    python, compiled = simulators()
    expected = python.replay(trace.scale(rate=rate), placement)
    served = compiled.serve(placement)
    assert isinstance(served, RateSweep)
    served.point(trace, slo, 40.0)
    served.point(trace, slo, rate)
    monkeypatch.setattr(CompiledPlacement, "score", None)  # from here on nothing is replayed
    found = served.usage(trace, slo, rate)
    assert found is not None
    assert found.utilisation == expected.utilisation
    assert (found.peak_blocks, found.pools) == (expected.peak_blocks, expected.pools)
    assert found.backend == "compiled"
    assert served.usage(trace, slo, 40.0) != found
    with pytest.raises(TypeError):  # of the same requests in another trace nothing is known
        served.usage(Trace(trace), slo, rate)


@needs_twin
def test_what_was_not_replayed_yet_is_for_what_the_instances_did() -> None:
    trace, slo = traffic(3, 80), SLO(0.5, 0.04)
    served, other = (simulators()[1].serve("8EPD") for _ in range(2))
    assert isinstance(served, RateSweep)
    assert isinstance(other, RateSweep)
    other.point(trace, slo, 9.0)
    assert served.usage(trace, slo, 9.0) == other.usage(trace, slo, 9.0) is not None
    assert served.usage(Trace(reversed(list(trace))), slo, 9.0) is None, "there is no point of it either"


@needs_twin
@pytest.mark.parametrize("block", [1, 100, 576])
def test_a_trace_without_caches_is_told_as_its_requests_one_by_one(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[Any]] = []
    monkeypatch.setattr(
        "trinity.simulation.compiled_workload.extension",
        SimpleNamespace(sim_workload=lambda *given: told.append([np.asarray(each).tolist() for each in given])),
    )
    jobs = prepare_requests(traffic(8, 60, 4), simulator(1).model).jobs
    assert any(job.refused for job in jobs)
    assert any(len(job.images) > 1 for job in jobs)
    like = make_settings("EPD", {"image": 1, "kv": 1}, image_block_size=block, image_cache=True, prefix_cache=False)[0]
    for some, ask in ((jobs, 0), (jobs, 700), ([job for job in jobs if not job.images], 0), ([], 0)):
        works = [
            CompiledRequest(1, 1) if job.refused else CompiledRequest.of(work_of(job, 0, False), job.max_tokens)
            for job in some
        ]
        works = [each._replace(max_tokens=max(each.max_tokens, min(ask, 1000 - each.length))) for each in works]
        works = [CompiledRequest(1, 1) if job.refused else each for job, each in zip(some, works, strict=True)]
        one, other = (
            CompiledWorkload.of(some, like, ask, 1000),
            CompiledWorkload([each._replace(name="") for each in works], like),
        )
        assert told[-2] == told[-1]
        assert one.first.tolist() == other.first.tolist()


@needs_twin
def test_a_point_does_not_hang_on_what_was_asked_before() -> None:
    trace, slo = traffic(5, 50), SLO(0.5, 0.04)
    _, compiled = simulators()
    served = compiled.serve("8EPD")
    first = measure_point(served, trace, slo, 20.0)
    assert measure_point(served, trace, slo, 40.0) != first
    assert measure_point(served, trace, slo, 20.0) == first
    trace.append(row(9.0, 16, 200))
    longer = measure_point(served, trace, slo, 20.0)
    assert longer == measure_point(served, Trace(trace), slo, 20.0) != first


@needs_twin
def test_what_the_short_way_does_not_know_goes_the_long_way() -> None:
    trace, slo = traffic(5, 50), SLO(0.5, 0.04)
    python, compiled = simulators()
    served = compiled.serve("8EPD")
    assert isinstance(served, RateSweep)
    backwards = Trace(reversed(list(trace)))
    assert served.point(backwards, slo, 20.0) is None
    assert measure_point(served, backwards, slo, 20.0) == measure_point(python.serve("8EPD"), backwards, slo, 20.0)
    assert served.point(Trace(), slo, None) is None
    with pytest.raises(ConfigError):
        measure_point(served, trace, slo, -1.0)
    with pytest.raises(TraceError, match="no rate"):
        measure_point(served, Trace([row(1.0, 16, 2)] * 3), slo, 5.0)
    one = Trace([row(1.0, 16, 2)])
    assert told(measure_point(served, one, slo)) == measure_point(python.serve("8EPD"), one, slo)
    assert math.isinf(measure_point(served, one, slo).rate)


@needs_twin
def test_which_engine_runs_is_said() -> None:
    assert simulator(1).why_python("EPD") == ""
    assert simulator(1, backend="python").why_python("EPD") == "it was asked for"
    assert simulator(1).why_python("EPD", record=True) == "timelines"
    moving = {"transfers": TransferPolicy(kv="layer")}
    assert simulator(2, **moving).why_python("EP+D") == "kv=layer"
    trace = Trace([row(0.0, 16, 2)])
    assert simulator(2, **moving).replay(trace, "EP+D").backend == "python"
    assert simulator(2, **moving).serve("EP+D").point(trace, SLO(1.0, 1.0), None) is None  # type: ignore[attr-defined]
    assert simulator(1).replay(trace, "EPD", record=True).backend == "python"
    for asked in ({"routing": "least_loaded"}, moving):
        with pytest.raises(ConfigError, match="backend='auto'"):
            simulator(2, backend="compiled", **asked).replay(trace, "EP+D")


def test_without_the_twin_the_python_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "extension", None)
    trace = Trace([row(0.0, 16, 2)])
    assert simulator(1).replay(trace, "EPD").backend == "python"
    assert measure_point(simulator(1).serve("EPD"), trace, SLO(1.0, 1.0)).attainment["p90"] == 1.0
    with pytest.raises(ConfigError, match="not built"):
        simulator(1, backend="compiled").replay(trace, "EPD")


def test_a_fault_of_the_twin_is_no_answer() -> None:
    rate_sweep.check_ended(0, True)
    with pytest.raises(AssertionError, match="still hold"):
        rate_sweep.check_ended(1, True)
    with pytest.raises(AssertionError, match="never ended"):
        rate_sweep.check_ended(0, False)


def test_a_trace_is_read_once() -> None:
    trace = traffic(1, 20)
    shape = simulator(1).model
    assert prepare_requests(trace, shape) is prepare_requests(trace, shape)
    assert prepare_requests(trace, shape) is not prepare_requests(Trace(trace), shape)
    assert (
        prepare_requests(Trace(trace), shape).valid_rows.tolist() == prepare_requests(trace, shape).valid_rows.tolist()
    )


@needs_twin
@pytest.mark.parametrize("seed", range(30))
def test_prompts_have_equal_keys_where_their_blocks_have(seed: int) -> None:
    """The twin's numbers from a trace's rows, its numbers from whole prompts, and the pools' digests."""
    draw = Random(seed)
    jobs = []
    for _ in range(30):
        images = draw.choices([3, 40, 600], k=draw.choice([0, 0, 1, 3]))
        named = tuple((count, f"image{draw.randint(0, 1)}") for count in images)
        hashes = tuple(draw.choices(range(3), k=draw.choice([0, 1, 2, 4])))
        prompt, most = sum(images) + draw.randint(1, 1600), draw.choice([1, 2, 30])
        jobs.append(Job(at=0.0, prompt=prompt, images=named, max_tokens=most, hash_ids=hashes))
    blocks, fed = draw.choice([1, 5, 16, 512]), draw.random() < 0.5
    settings: dict[str, Any] = {"kv_block_size": blocks, "reservation": "optimistic" if fed else "full"}
    like = make_settings("EPD", {"image": 1, "kv": 1}, **settings)[0]
    works = [work_of(job, number, True) for number, job in enumerate(jobs)]
    texts = [(*work.prompt, *(OUTPUT for _ in range(1, work.max_tokens if fed else 1))) for work in works]
    digests = [prefix_keys(text, work.media, like.kv_block_size) for text, work in zip(texts, works, strict=True)]
    known: dict[bytes, int] = {}
    expected = [[known.setdefault(key, len(known)) for key in keys] for keys in digests]
    told = [compile_request(job, number, 2048) for number, job in enumerate(jobs)]
    for asked in (told, [CompiledRequest.of(each) for each in works]):
        one = CompiledWorkload(asked, like)
        seen: dict[int, int] = {}
        assert [[seen.setdefault(key, len(seen)) for key in one.prefix_keys(each)] for each in asked] == expected


@needs_twin
def test_replays_of_one_trace_may_run_at_once() -> None:
    """The extension lets go of the interpreter's lock; what a trace is to a model is shared."""
    trace, slo = traffic(9, 400), SLO(0.5, 0.04)
    _, compiled = simulators()
    rates = [float(rate) for rate in range(5, 45)]
    alone = [measure_point(compiled.serve("1E3P4D"), trace, slo, rate) for rate in rates]
    served = compiled.serve("1E3P4D")
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda rate: measure_point(served, trace, slo, rate), rates * 3))
    assert together == alone * 3


# ------------------------------------------------------------ judging


class Judged(NamedTuple):
    p90: int
    p99: int
    guard: int
    tpot: int
    first: int
    finishes: Any


def judged(lists: list[list[float]], arrivals: list[float], slo: SLO) -> Judged:
    """By the extension, of requests with these token times."""
    found = extension.sim_judged(
        np.array([each for times in lists for each in times], np.float64),
        np.cumsum([0, *map(len, lists)], dtype=np.int64)[:-1],
        np.array([len(times) for times in lists], np.int32),
        np.resize(COMPLETED, len(lists)),
        np.array(arrivals, np.float64),
        slo.ttft,
        slo.tbt,
    )
    return Judged(*found)


def expected(lists: list[list[float]], arrivals: list[float], slo: SLO) -> tuple[dict[SLORule, int], list[float]]:
    served = [
        RequestOutcome(times[0] - at, [b - a for a, b in pairwise(times)], "length")
        for at, times in zip(arrivals, lists, strict=True)
    ]
    counts = {rule: sum(slo.is_met(each, rule) for each in served) for rule in SLO_RULES}
    finishes = [at + (each.ttft_s or 0.0) + math.fsum(each.itl_s) for at, each in zip(arrivals, served, strict=True)]
    return counts, finishes


gap_lists = st.lists(
    st.one_of(st.sampled_from([0.0, 0.04, 0.05, 0.1, 1e-17, 3e-9]), st.floats(0.0, 2.0)), min_size=0, max_size=40
)


@needs_twin
@given(st.lists(st.tuples(st.floats(0.0, 1e3), st.floats(0.0, 2.0), gap_lists), min_size=1, max_size=8))
def test_requests_are_judged_as_an_slo_does(drawn: list[tuple[float, float, list[float]]]) -> None:
    """Sums to the last bit as well: gaps near the start of a trace are rounded, and their sum is no difference."""
    lists, arrivals = [], []
    for arrival, ttft, gaps in drawn:
        times = [arrival + ttft]
        for gap in gaps:
            times.append(times[-1] + gap)
        lists.append(times)
        arrivals.append(arrival)
    for slo in (SLO(1.0, 0.05), SLO(0.3, 0.1), SLO(2.0, sum(drawn[0][2], 0.01) / max(1, len(drawn[0][2])))):
        counts, finishes = expected(lists, arrivals, slo)
        found = judged(lists, arrivals, slo)
        assert {rule: getattr(found, rule) for rule in SLO_RULES} == counts
        assert found.finishes.tolist() == finishes
        assert found.first == sum(times[0] - at < slo.ttft for times, at in zip(lists, arrivals, strict=True))


@needs_twin
def test_gaps_that_cannot_be_told_from_their_bound_are_summed_exactly() -> None:
    # 1 + 2^-53 + 2^-53: one after the other the small ones vanish, together they count.
    times = [0.0, 2.0**-53, 2.0**-52, 1.0 + 2.0**-52]
    counts, finishes = expected([times], [0.0], SLO(1.0, 1 / 3))
    found = judged([times], [0.0], SLO(1.0, 1 / 3))
    assert (found.guard, found.tpot, found.finishes.tolist()) == (counts["guard"], counts["tpot"], finishes)
