"""KV that streams where it pays: by the pulls that targets have measured, request by request."""

from __future__ import annotations

import pytest

from support.core_streams import layers, source
from support.core_tables import done, sent, work
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core import InstanceCore
from trinity.core.messages import Offer, Prefill, Ready, Release, Step, Submit
from trinity.core.migration.source import open_streams
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import LEAST_PULLS, KvMode, TransferPolicy


def streams(core: InstanceCore, tokens: int, number: int) -> bool:
    """Prefill a prompt; returns True where its KV was offered before the prefill had ended."""
    (_, step, *rest) = core.handle(Submit(work(f"s{number}", tokens, text=1000 * number)), 0.0)
    assert isinstance(step, Step)
    offered = bool(sent(rest, Offer))
    assert bool(step.group) is offered
    core.handle(done(step.id, **{f"s{number}": 5}), 0.0)
    return offered


def test_auto_streams_what_would_take_long_by_what_pulls_took() -> None:
    core = source(transfers=TransferPolicy(), kv=99)
    assert not streams(core, 40, 1), "no pull was measured yet"
    core.handle(Release("P0:1", "pulled", (1e-3, 1e-4)), 0.0)
    assert streams(core, 56, 2), "14 blocks of 3 layers: a millisecond and 42 of a tenth"
    assert not streams(core, 52, 3), "13 blocks: 4.9 ms"
    core.handle(Release("P0:2", "pulled", (1e-3, 1e-5)), 0.0)
    assert not streams(core, 56, 4), "the line became faster"


def test_auto_goes_on_with_a_stream_that_it_began() -> None:
    core = source(transfers=TransferPolicy(), kv=99, rules=BatchRules(token_budget=16))
    core.handle(Submit(work("a", 8)), 0.0)
    core.handle(done(1, a=5), 0.0)
    core.handle(Release("P0:1", "pulled", (9e-3, 0.0)), 0.0)
    out = core.handle(Submit(work("b", 32, text=500)), 0.0)
    (step,) = [each for each in out if isinstance(each, Step)]
    assert step.group
    core.state.pull_cost = (0.0, 0.0)
    (second,) = [each for each in core.handle(done(2), 0.0) if isinstance(each, Step)]
    assert second.group, "half of its blocks are announced"


def test_a_stream_that_begins_in_the_middle_of_a_step_is_told_of_it_at_its_end() -> None:
    """Two steps in flight, and the one that runs has reported layers when the next chunk opens the stream."""
    core = source(transfers=TransferPolicy(), kv=99, rules=BatchRules(token_budget=8))
    core.handle(Submit(work("r", 20)), 0.0)
    assert core.handle(layers(1, 0, 1), 0.0) == []
    core.state.pull_cost = (9e-3, 0.0)
    open_streams(core.state, Step(2, "joint", (), (Prefill("r", 8, 8, False),), ()), 0.0)
    assert core.state.requests["r"].kv_stream is not None
    core.handle(layers(1, 1, 3), 0.0)
    (whole,) = sent(core.handle(done(1), 0.0), Ready)
    assert (whole.layers, whole.blocks) == (None, (0, 2))


def test_a_target_tells_what_pulls_took_once_it_has_seen_some() -> None:
    told: dict[str, list[bool]] = {}
    modes: tuple[KvMode, ...] = ("auto", "grouped", "off")
    for mode in modes:
        settings = make_settings("P+D", {"kv": 9}, kv_block_size=4, layers=3, transfers=TransferPolicy(kv=mode))
        cluster = VirtualCluster(settings, durations=Durations(*(3 * [lambda *_: 1e-6])), seed=1)
        for number in range(LEAST_PULLS + 2):
            cluster.submit(work(f"r{number}", 6, text=100 * number, max_tokens=2), at=float(number))
        cluster.run()
        said = sent([command for _, _, command in cluster.commands], Release)
        told[mode] = [each.cost is not None for each in said]
    assert told["auto"] == [False] * (LEAST_PULLS - 1) + [True] * 3
    assert told["grouped"] == [True] * (LEAST_PULLS + 2)
    assert told["off"] == [False] * (LEAST_PULLS + 2)


@pytest.mark.parametrize(("pull_s", "last"), [(0.9, "grouped"), (1e-3, "off")])
def test_auto_hides_the_transfers_of_a_slow_line_and_leaves_a_fast_one_alone(pull_s: float, last: str) -> None:
    still = Durations(
        lambda *_: 0.0,
        lambda draw, name, step: 9.0 if step.prefills else 0.0,
        lambda draw, pull: pull_s / 9 * (pull.layers[1] - pull.layers[0] if pull.layers else 9),
    )
    settings = make_settings("P+D", {"kv": 9}, kv_block_size=4, layers=9)
    cluster = VirtualCluster(settings, durations=still, seed=5)
    for number in range(LEAST_PULLS + 3):
        cluster.submit(work(f"r{number}", 8, text=100 * number, max_tokens=2), at=20.0 * number)
    cluster.run()
    modes, exposed = [], []
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        assert outcome.end.finished is not None
        (record,) = outcome.end.finished.transfers
        modes.append(record["mode"])
        exposed.append(record["exposed_s"])
    assert modes == ["off"] * LEAST_PULLS + [last] * 3
    assert exposed[0] == pytest.approx(pull_s)
    assert exposed[-1] == pytest.approx(pull_s if last == "off" else 0.1, abs=0.25 * pull_s)
