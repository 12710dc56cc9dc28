"""Transfers that break off: what has come of a prompt as whole blocks is kept, and found by the next life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_streams import ready, target
from support.core_tables import emptied, kv_offer, lost, sent, work
from support.every_order import Search
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from support.virtual.lives import Kill
from trinity.core import InstanceCore
from trinity.core.failure_policy import FailurePolicy
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import (
    KV,
    Cancel,
    Commit,
    Failure,
    Finished,
    Forget,
    PeerDown,
    PeerLoad,
    Pulled,
    Send,
    Step,
    Submit,
    Tick,
    Value,
    Withdraw,
)
from trinity.core.migration import kv_target
from trinity.core.prefix_cache import DIGEST, prefix_keys
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

TEXT = work("r", 18)  # four blocks of four, and two positions
KEYS = prefix_keys(TEXT.prompt, (), 4)
DEATH = PeerDown("P0")


def offered(*events: Value, **settings: Any) -> InstanceCore:
    """D0, to which P0 streams the prompt in chunks of two blocks, in three layers."""
    core = target(**settings)
    core.handle(kv_offer("P0:1", TEXT, (3, 4, 5, 6, 7)), 0.0)
    for event in events:
        core.handle(event, 0.0)
    return core


def kept(core: InstanceCore) -> int:
    return len(core.state.kv.match(KEYS))


def pulled(part: int) -> Pulled:
    return Pulled("P0:1", part)


ENDED = ready(blocks=(0, 2))  # by a step that has ended
RUNNING = ready(0, 3, blocks=(0, 2))  # by one that may begin anew
NEXT = ready(0, 1, blocks=(2, 4))
AGAIN = ready(blocks=(0, 2), void=True)


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ((ENDED, pulled(0)), 2),
        ((ENDED, pulled(0), NEXT, pulled(1)), 2),
        ((ENDED, pulled(0), ready(blocks=(2, 4)), pulled(1)), 4),
        ((ENDED, ready(blocks=(2, 4)), pulled(1)), 0),
        ((ENDED,), 0),
        ((RUNNING, pulled(0)), 0),
        ((RUNNING, pulled(0), NEXT), 2),
        ((RUNNING, NEXT, pulled(1)), 0),
        ((ready(0, 2, blocks=(0, 2)), pulled(0), ready(2, 3, blocks=(0, 2)), NEXT, pulled(2)), 0),
        ((ready(0, 2, blocks=(0, 2)), pulled(0), ready(2, 3, blocks=(0, 2)), NEXT, pulled(1)), 2),
        ((RUNNING, pulled(0), AGAIN), 0),
        ((RUNNING, pulled(0), AGAIN, pulled(1)), 2),
        ((ready(0, 2, blocks=(0, 2)), pulled(0), ready(2, 3, blocks=(0, 2)), AGAIN, NEXT), 0),
        ((), 0),
    ],
    ids=[
        "a chunk",
        "and a layer of the next",
        "two chunks",
        "the second alone",
        "its pull has not ended",
        "its step may begin anew",
        "but for a later one that has begun",
        "which is here, and not the first",
        "a layer is to come",
        "all layers have come",
        "its step has begun anew",
        "and is here again",
        "the void is still read",
        "nothing",
    ],
)
def test_blocks_are_kept_that_are_whole_and_are_not_written_again(events: tuple[Value, ...], found: int) -> None:
    core = offered(*events)
    assert kept(core) == 0, "nobody reads them before the Commit"
    out = core.handle(DEATH, 1.0)
    assert kept(core) == found
    left = [state.incoming for state in core.state.requests.values() if state.incoming is not None]
    for number in [number for incoming in left for number in incoming.kv_pulls]:
        out += core.handle(pulled(number), 1.0)
    assert kept(core) == found, "what was in flight may have read another life of the source"
    assert [each.request for each in sent(out, Finished)] == ["r"]
    core.handle(Forget("r"), 1.0)
    emptied(core)


def test_they_are_reported_ahead_of_the_end() -> None:
    core = offered(ENDED, pulled(0))
    out = [each for each in core.handle(DEATH, 1.0) if isinstance(each, Send) and each.to == "frontend"]
    assert [type(each.message) for each in out][-2:] == [PeerLoad, Finished]
    load = out[-2].message
    assert isinstance(load, PeerLoad)
    said = load.cached[KV]
    assert {said[at : at + DIGEST] for at in range(0, len(said), DIGEST)} == {key[:DIGEST] for key in KEYS[:2]}


def by_silence(core: InstanceCore) -> None:
    core.handle(Tick(), 11.0)


def by_withdrawal(core: InstanceCore) -> None:
    core.handle(Withdraw("P0:1", Failure("MigrationError", "it was silent", {"cause": "LeaseExpired"})), 1.0)


def by_a_pull(core: InstanceCore) -> None:
    core.handle(ready(blocks=(2, 4)), 1.0)
    core.handle(lost("P0:1", 1), 1.0)


def by_a_digest(core: InstanceCore) -> None:
    core.handle(ready(0, 1, blocks=(2, 4)), 1.0)
    wrong = Failure("MigrationError", "wrong bytes", {"cause": "IntegrityError"})
    core.handle(Pulled("P0:1", 1, wrong), 1.0)
    core.handle(Commit("P0:1", (5,)), 1.0)


@pytest.mark.parametrize("end", [by_silence, by_withdrawal, by_a_pull, by_a_digest])
def test_so_they_are_however_a_transfer_breaks_off(end: Callable[[InstanceCore], None]) -> None:
    core = offered(ENDED, pulled(0), lease_s=10.0)
    end(core)
    assert ("r" in core.state.requests, kept(core)) == (False, 2)


def test_what_its_reader_gave_up_is_not_kept_and_nothing_without_a_cache() -> None:
    core = offered(ENDED, pulled(0))
    core.handle(Cancel("r"), 1.0)
    assert kept(core) == 0
    core = offered(ENDED, pulled(0), prefix_cache=False)
    core.handle(DEATH, 1.0)
    assert kept(core) == 0


def test_a_decode_that_moved_here_and_whose_source_is_lost_is_kept_with_its_outputs() -> None:
    core = target()
    offer = kv_offer("P0:1", work("r", 10), (3, 4, 5))
    core.handle(replace(offer, moves=True, tokens=(5, 6)), 0.0)
    core.handle(ready(blocks=(0, 3)), 0.0)
    core.handle(pulled(0), 0.0)
    core.handle(DEATH, 1.0)
    assert len(core.state.kv.match(prefix_keys((*work("r", 10).prompt, 5, 6), (), 4))) == 3


def test_the_end_is_evicted_first_so_that_the_rest_is_found() -> None:
    core = offered(ENDED, pulled(0), ready(blocks=(2, 4)), pulled(1), kv=6)
    core.handle(DEATH, 1.0)
    assert kept(core) == 4
    core.handle(kv_offer("P1:1", work("s", 11, text=50), (0, 1, 2)), 1.0)
    assert kept(core) == 2, "it took four blocks, two of which were free"


def test_the_next_offer_of_the_same_text_moves_the_rest_alone() -> None:
    core = offered(ENDED, pulled(0))
    core.handle(DEATH, 1.0)
    core.handle(kv_offer("P1:1", work("again", 18), (9, 8, 7, 6, 5), "P1"), 2.0)
    progress = core.state.requests["again"].incoming
    assert progress is not None
    assert progress.progress is not None
    assert progress.progress.cached == 2


# ---------------------------------------------------------------- runs in virtual time

STILL = Durations(lambda *_: 0.01, lambda *_: 0.2, lambda *_: 0.05)
MOMENTS = (0.1, 0.35, 0.55, 0.75, 0.95)
RULES = BatchRules(token_budget=8)


def positions(placement: str, at: float, kv: Any = "layer", last: str = "frontend", **settings: Any) -> int:
    """Positions prefilled for a prompt of 40 in chunks of 8, whose prefill instance dies. ``last``: to hear of that."""
    common = {"image_block_size": 4, "kv_block_size": 4, "layers": 2, "rules": RULES, "lease_s": 30.0, "report_s": 5.0}
    own = make_settings(placement, {"image": 64, "kv": 64}, **{**common, **settings}, transfers=TransferPolicy(kv=kv))
    cluster = VirtualCluster(own, durations=STILL, failures=FailurePolicy(), seed=1)
    cluster.submit(work("r", 40, max_tokens=6))
    cluster.lives.next_news = lambda name, peer, after: after + 0.05 * (name.startswith(last))  # type: ignore[method-assign]
    cluster.lives.hear_all("P0", at)
    cluster.put(at, next(cluster._sequence), "P0", Kill(None))
    cluster.run()
    outcome = cluster.outcomes["r"]
    assert outcome.end is not None
    assert (outcome.end.reason, outcome.tokens) == ("length", [1, 2, 3, 4, 5, 6])
    steps = [command for _, _, command in cluster.commands if isinstance(command, Step)]
    return sum(row.length for step in steps for row in step.prefills if step.id)


def test_a_prefill_goes_on_behind_its_whole_blocks_where_these_have_come_to_one_that_prefills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it was at is prefilled again, and what was on its way: a chunk or two, however far it was."""
    for last in ("frontend", "PD0"):
        assert [positions("1P1PD", at, last=last) for at in MOMENTS] == [48, 48, 48, 48, 56]
    monkeypatch.setattr(kv_target, "keep_whole_blocks", lambda *rest: None)
    assert [positions("1P1PD", at) for at in MOMENTS] == [48, 56, 64, 72, 80]


# ---------------------------------------------------------------- every order


def search(text: int) -> Search:
    rules, transfers = BatchRules(token_budget=4), TransferPolicy(kv="layer")
    own = make_settings("1P1PD", {"kv": 8}, kv_block_size=4, layers=2, rules=rules, transfers=transfers)
    asked = (Submit(work("r", text, max_tokens=2)),)
    return Search(own, asked, "P0", failures=FailurePolicy(recoveries=2, wait_s=0))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_in_every_order_of_the_death_of_its_prefill_a_request_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[bool] = Counter()
    keep = kv_target.keep_whole_blocks

    def count(s: State, state: RequestState) -> None:
        before = state.published_blocks
        keep(s, state)
        seen[state.published_blocks > before] += 1

    monkeypatch.setattr(kv_target, "keep_whole_blocks", count)
    found = search(5)
    assert len(found.run()) > 10_000
    assert set(found.ends) == {(("r", "length"),)}
    assert min(seen[True], seen[False]) > 5, seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_in_every_order_one_of_three_chunks_is_whole() -> None:
    found = search(9)
    assert len(found.run()) > 100_000
    assert set(found.ends) == {(("r", "length"),)}
