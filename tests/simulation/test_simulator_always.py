"""Simulator: what holds for any trace on any placement."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.simulations import LINK, MESSAGE_S, row, simulator
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.step_cost import DEVICES
from trinity.placement import Placement
from trinity.simulation.simulator import Replay, Simulator
from trinity.traces.trace import SLO, Trace, TraceRow

PLACEMENTS = ("EPD", "2EPD", "1EP1D", "1ED1P", "1E1P1D", "1E2P2D", "2PD1E", "2EP1ED2P1D")

contents = st.sampled_from(("", "", "cat", "dog"))
rows = st.builds(
    lambda at, text, out, images, hashes: row(at / 8, text, out, images, hash_ids=hashes),
    st.integers(0, 80),
    st.integers(1, 1500),
    st.integers(0, 12),
    st.lists(contents, max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
)
rules = st.builds(
    BatchRules,
    policy=st.sampled_from(("alg1", "time", "prefill_first")),
    order=st.sampled_from(("fcfs", "sjf", "deadline")),
    chunked=st.booleans(),
    limit_encodes=st.booleans(),
    limit_decodes=st.booleans(),
)
budgets = st.builds(
    lambda tokens, media: StepBudgets(token_budget=tokens, image_budget=media, limit_s=2.0),
    st.integers(1, 2048),
    st.integers(1, 2000),
)
options = st.fixed_dictionaries(
    {
        "rules": rules,
        "budgets": budgets,
        "routing": st.sampled_from(("round_robin", "random", "least_loaded", "prefix_hits")),
        "lanes": st.sampled_from((("joint",), ("vision", "language"))),
        "interference": st.sampled_from((1.0, 1.5, 2.0)),
        "transfers": st.builds(
            TransferPolicy,
            prefetch=st.booleans(),
            early=st.booleans(),
            kv=st.sampled_from(("off", "layer", "grouped")),
            store=st.booleans(),
        ),
        "memory_share": st.sampled_from((0.9, 0.2)),
    }
)


@given(st.lists(rows, max_size=12), st.sampled_from(PLACEMENTS), options)
@settings(max_examples=40, deadline=None)
def test_every_request_ends_once_and_every_block_comes_back(
    asked: list[TraceRow], placement: str, chosen: dict[str, Any]
) -> None:
    check_conserved(asked, placement, chosen)


@pytest.mark.slow
@given(st.lists(rows, max_size=40), st.sampled_from(PLACEMENTS), options)
@settings(max_examples=400, deadline=None)
def test_it_is_so_in_many_more_cases(asked: list[TraceRow], placement: str, chosen: dict[str, Any]) -> None:
    check_conserved(asked, placement, chosen)


def check_conserved(asked: list[TraceRow], placement: str, chosen: dict[str, Any]) -> None:
    size = Placement.parse(placement).size
    made = simulator(size, **chosen)
    replay = made.replay(Trace(asked), placement)  # raises where a request does not end, or a block stays
    assert len(replay.outcomes) == len(asked)
    for wanted, seen in zip(asked, replay.outcomes, strict=True):
        tokens = 0 if seen.ttft_s is None else 1 + len(seen.itl_s)
        if seen.finish_reason == "length":
            assert tokens == min(max(1, wanted.output_length), 4096 - wanted.input_length)
            assert seen.ttft_s is not None
            assert seen.ttft_s > 2 * MESSAGE_S
            assert all(gap >= 0 for gap in seen.itl_s)
        else:
            assert seen.finish_reason == "error"
            assert tokens == 0
    _check_counts(made, placement, replay)
    assert made.replay(Trace(asked), placement) == replay, "the same again"


def _check_counts(made: Simulator, placement: str, replay: Replay) -> None:
    """No device works more than all the time, or holds more than it has."""
    for core in made.settings(placement):
        lanes = len(core.lanes)
        assert sum(replay.busy_s[core.name].values()) <= lanes * replay.duration_s + 1e-9
        assert all(0 <= peak <= core.pools[kind] for kind, peak in replay.peak_blocks[core.name].items())


@given(st.lists(rows, min_size=1, max_size=8), st.sampled_from(("EPD", "PD")))
@settings(max_examples=15, deadline=None)
def test_a_faster_device_never_hurts(asked: list[TraceRow], placement: str) -> None:
    """On one instance, whose every step is in the order of arrival and none waits for another's place."""
    alone = [row(1000.0 * at, each.text_tokens, each.output_length) for at, each in enumerate(asked)]
    fast, slow = (
        Simulator("llava-1.5-7b", SLO(1.0, 0.1), cluster=Cluster.of(name), budgets=StepBudgets()).replay(
            Trace(alone), placement
        )
        for name in ("H100", "A100")
    )
    for one, other in zip(fast.outcomes, slow.outcomes, strict=True):
        assert one.finish_reason == other.finish_reason
        if one.ttft_s is not None and other.ttft_s is not None:
            assert one.ttft_s <= other.ttft_s
            assert all(quick <= long + 1e-12 for quick, long in zip(one.itl_s, other.itl_s, strict=True))


@given(st.lists(st.builds(row, st.integers(0, 9), st.integers(1, 900), st.integers(1, 5)), max_size=9))
@settings(max_examples=15, deadline=None)
def test_text_never_touches_an_encoder(asked: list[TraceRow]) -> None:
    replay = simulator(3).replay(Trace(asked), "1E1P1D")
    assert replay.busy_s["E0"] == {"E": 0.0}
    assert replay.moved_bytes["image"] == 0
    assert replay.peak_blocks["E0"] == {"image": 0}
    two = simulator(2).replay(Trace(asked), "1P1D")
    assert two.outcomes == replay.outcomes


def test_a_slower_link_moves_the_same_bytes_later() -> None:
    trace = Trace([row(at / 4, 40, 4, [""]) for at in range(8)])
    times, moved = [], set()
    for name in ("nvlink", "pcie4", "memory"):
        cluster = Cluster.of("H100", 3, link=name)
        replay = Simulator("llava-1.5-7b", SLO(1.0, 0.1), cluster=cluster).replay(trace, "1E1P1D")
        times.append(sum((each.ttft_s or 0.0) + sum(each.itl_s) for each in replay.outcomes))
        moved.add(tuple(replay.moved_bytes.items()))
    assert all(one < other for one, other in pairwise(times))
    assert len(moved) == 1
    assert DEVICES["H100"].memory > 0
    assert LINK.seconds(0) == 0.0
