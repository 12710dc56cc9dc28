"""Decodes that move away from an instance that leaves: a table of when they do, and whole runs in virtual time.

``support.departing.run(seed)`` repeats a run: switches and removals of decoders, beside deaths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import make_frontend, peer_up, work
from support.departing import count, run
from support.moving import POLICY
from support.virtual.cluster import VirtualCluster, make_settings
from trinity.core.frontend import Abort, FrontendCore, decode_moves
from trinity.core.frontend.decode_moves import (
    ASK_AGAIN_S,
    JUDGE_AGAIN_S,
    MESSAGES_S,
    MOST_AT_ONCE,
    UNMEASURED_PULL_S,
    DecodeMoves,
)
from trinity.core.frontend.messages import MoveEnd, MoveRequest
from trinity.core.messages import (
    Emit,
    Failure,
    Finished,
    Move,
    Moved,
    NotMoved,
    PeerDown,
    PeerLeaving,
    PeerLoad,
    PeerSuspect,
    Sampled,
    Send,
    Submit,
    Value,
)
from trinity.core.values import blocks_for

PEERS = "P0 D0 D1 D2"
GOES = PeerLeaving("D0", 0, leaving=True)
AT_ALL = 36
STEP_S = 0.05


def load(name: str, free: int = 40, **fields: Any) -> PeerLoad:
    return PeerLoad(name, free={"kv": free}, **{"predicted_s": {"D": STEP_S}, "pull_s": (0.01, 0.001), **fields})


def decoding(
    count: int = 1, tokens: int = 40, peers: str = PEERS, loads: dict[str, PeerLoad] | None = None
) -> FrontendCore:
    """A front end whose requests "r0", ... decode at D0, with two tokens out; everybody has reported."""
    core = make_frontend(peers)
    for number in range(count):
        core.handle(Submit(work(f"r{number}", 9, max_tokens=tokens)), 0.0)
        come(core, f"r{number}")
    for name in peers.split():
        core.handle((loads or {}).get(name) or load(name), 0.0)
    return core


def come(core: FrontendCore, name: str) -> list[Value]:
    core.handle(Emit((name,), (0,), (0,), (Sampled(5),)), 0.0)
    core.handle(Moved(name, 0, "D0", 1, 0, "P0", 0), 0.0)
    return core.handle(Emit((name,), (0,), (1,), (Sampled(6),)), 0.0)


def asked(out: list[Value]) -> dict[str, str]:
    """Which requests are to move, and where to."""
    return {
        each.message.request: each.message.to
        for each in out
        if isinstance(each, Send) and isinstance(each.message, Move)
    }


def refuse(name: str, reason: str = "refused") -> NotMoved:
    return NotMoved(name, 0, Failure("MoveError", "no room", {"reason": reason}))


# ---------------------------------------------------------------- table


def test_a_decode_moves_as_its_instance_leaves_and_is_answered() -> None:
    core = decoding()
    out = core.handle(GOES, 1.0)
    assert asked(out) == {"r0": "D1"}
    assert next(each for each in out if isinstance(each, Send)).to == "D0"
    out = core.handle(Moved("r0", 0, "D1", 2, 0, "D0", 0, start=2), 1.1)
    assert out == [MoveEnd("r0")]
    assert core.handle(Emit(("r0",), (0,), (2,), (Sampled(7),)), 2.0) != []
    core.handle(PeerDown("D0", planned=True), 2.1)
    assert core.entries["r0"].lives == 1
    assert core.next_timer() is None


def test_nothing_moves_from_one_that_stays() -> None:
    core = decoding()
    assert asked(core.handle(load("D0"), 1.0)) == {}
    core.handle(PeerLeaving("D0", 3, leaving=True), 1.0)  # another life
    core.handle(PeerLeaving("P0", 0, leaving=True), 1.0)  # it does not decode
    assert asked(core.handle(load("D0"), 2.0)) == {}
    assert core.next_timer() is None


@pytest.mark.parametrize(
    ("left", "pull_s", "moves"),
    [
        (38, (0.01, 0.001), True),
        (38, (38 * STEP_S - MESSAGES_S - 0.0031, 0.001), True),  # three blocks of four are pulled
        (38, (38 * STEP_S - MESSAGES_S - 0.0029, 0.001), False),
        (1, (0.01, 0.001), True),
        (1, (0.01, 0.02), False),
        (38, None, True),
        (2, None, False),  # UNMEASURED_PULL_S
        (3, None, True),
    ],
)
def test_it_moves_where_the_pull_is_sooner_than_its_end(
    left: int, pull_s: tuple[float, float] | None, moves: bool
) -> None:
    assert 2 * STEP_S <= UNMEASURED_PULL_S + MESSAGES_S < 3 * STEP_S
    assert blocks_for(9 + 2, 4) == 3
    core = decoding(tokens=left + 2, loads={each: load(each, pull_s=pull_s) for each in ("D1", "D2")})
    assert bool(asked(core.handle(GOES, 1.0))) is moves


def test_before_its_pace_is_known_it_stays() -> None:
    core = decoding(loads={"D0": load("D0", predicted_s={}, unit_s={})})
    assert asked(core.handle(GOES, 1.0)) == {}
    assert core.next_timer() == 1.0 + JUDGE_AGAIN_S
    assert asked(core.handle(load("D0"), 1.0 + JUDGE_AGAIN_S)) == {"r0": "D1"}


def test_those_with_most_left_go_first_and_so_many_at_once() -> None:
    core = make_frontend(PEERS)
    for number in range(MOST_AT_ONCE + 2):
        core.handle(Submit(work(f"r{number}", 9, max_tokens=20 + number)), 0.0)
        come(core, f"r{number}")
    for name in PEERS.split():
        core.handle(load(name, free=10_000), 0.0)
    first = asked(core.handle(GOES, 1.0))
    assert list(first) == ["r5", "r4", "r3", "r2"]
    assert list(asked(core.handle(Moved("r3", 0, first["r3"], 2, 0, "D0", 0, start=2), 1.01))) == ["r1"]
    assert list(asked(core.handle(refuse("r4"), 1.02))) == ["r0"]


def test_each_goes_where_most_room_is_left_with_what_is_on_the_way() -> None:
    need = blocks_for(9 + 40 - 1, 4)
    loads = {"D1": load("D1", free=2 * need), "D2": load("D2", free=need + 1)}
    core = decoding(count=4, loads=loads)
    assert list(asked(core.handle(GOES, 1.0)).values()) == ["D1", "D2", "D1"]  # and no room for the fourth


def test_none_goes_to_one_that_leaves_or_is_silent() -> None:
    core = decoding()
    core.handle(PeerSuspect("D1", 0, suspected=True), 0.5)
    core.handle(PeerLeaving("D2", 0, leaving=True), 0.5)
    assert asked(core.handle(GOES, 1.0)) == {}
    assert asked(core.handle(PeerSuspect("D1", 0, suspected=False), 2.0)) == {"r0": "D1"}


def test_after_a_refusal_another_is_asked_and_the_pause_grows() -> None:
    core = decoding()
    assert asked(core.handle(GOES, 0.0)) == {"r0": "D1"}
    assert asked(core.handle(refuse("r0"), 1.0)) == {}
    assert asked(core.handle(load("D0"), 1.0 + 0.9 * ASK_AGAIN_S)) == {}
    assert asked(core.handle(load("D0"), 1.0 + 1.2 * ASK_AGAIN_S)) == {"r0": "D2"}
    assert asked(core.handle(refuse("r0", "late"), 5.0)) == {}
    assert asked(core.handle(load("D0"), 5.0 + 3.5 * ASK_AGAIN_S)) == {}
    assert asked(core.handle(load("D0"), 5.0 + 4.5 * ASK_AGAIN_S)) == {"r0": "D1"}


def test_a_reader_that_asks_meanwhile_is_told_that_it_moves_and_the_other_way_round() -> None:
    core = decoding()
    core.handle(GOES, 1.0)
    [answer] = core.handle(MoveRequest("r0", "D2"), 1.0)
    assert isinstance(answer, MoveEnd)
    assert answer.failure is not None
    assert answer.failure.fields["reason"] == "moving"
    core = decoding()
    core.handle(MoveRequest("r0", "D2"), 0.9)
    assert asked(core.handle(GOES, 1.0)) == {}


@pytest.mark.parametrize(
    "event",
    [
        Abort("r0", "cancelled"),
        Finished(request="r0", attempt=0, reason="length", count=40, route=("P0", "D0")),
    ],
)
def test_one_that_ends_is_left_alone(event: Value) -> None:
    core = decoding()
    core.handle(event, 0.5)
    assert asked(core.handle(GOES, 1.0)) == {}


def test_a_decode_that_comes_while_it_leaves_moves_on() -> None:
    core = make_frontend(PEERS)
    core.handle(Submit(work("r0", 9, max_tokens=40)), 0.0)
    for name in PEERS.split():
        core.handle(load(name), 0.0)
    core.handle(GOES, 0.0)
    assert core.next_timer() is None, "nothing is there"
    come(core, "r0")
    assert asked(core.handle(load("D0"), 1.0)) == {"r0": "D1"}


def test_it_is_over_once_the_instance_stays_or_is_gone() -> None:
    core = decoding(loads={"D1": load("D1", free=0), "D2": load("D2", free=0)})
    assert asked(core.handle(GOES, 1.0)) == {}
    assert core.next_timer() == 1.0 + JUDGE_AGAIN_S
    core.handle(PeerLeaving("D0", 0, leaving=False), 2.0)
    assert core.next_timer() is None
    assert asked(core.handle(load("D1"), 3.0)) == {}


def test_an_optimistic_target_needs_room_for_what_there_is() -> None:
    core = decoding(loads={"D1": load("D1", free=3), "D2": load("D2", free=3)})
    assert asked(core.handle(GOES, 1.0)) == {}
    core = make_frontend("P0 D0")
    core.handle(replace(peer_up("D1"), returns=True), 0.0)
    core.handle(Submit(work("r0", 9, max_tokens=40)), 0.0)
    come(core, "r0")
    for name, free in (("D0", 40), ("D1", 3)):
        core.handle(load(name, free=free), 0.0)
    assert asked(core.handle(GOES, 1.0)) == {"r0": "D1"}


# ---------------------------------------------------------------- virtual time


def test_decodes_move_from_instances_that_leave_with_all_invariants() -> None:
    seen: Counter[str] = Counter()
    for seed in range(AT_ALL):
        count(run(seed), seen)
    assert seen["moved"] > AT_ALL, seen
    assert seen["survived"] > AT_ALL / 4, seen
    assert seen["refused"] + seen["late"] + seen["ended"] > 3, seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(10))
def test_many_more_runs_in_which_instances_leave(part: int) -> None:
    """10,000 in all."""
    for seed in range(100_000 + part * 1000, 101_000 + part * 1000):
        run(seed)


def leaving(drain_s: float = 5.0, decode_s: float = 0.1) -> VirtualCluster:
    settings = make_settings("P+2D", {"kv": 200}, image_block_size=4, kv_block_size=4, report_s=0.1, heartbeat_s=0.1)
    cluster = VirtualCluster(settings, failures=POLICY)
    for number in range(6):
        cluster.submit(work(f"r{number}", 9, max_tokens=100))
    cluster.switch("D0", 2.0, cluster.cores["D0"].settings, drain_s=drain_s)
    return cluster


def test_an_instance_is_empty_long_before_its_decodes_would_have_ended() -> None:
    """Three of six are there, of 100 tokens of 0.05 s; all have moved within two seconds, and none is recomputed."""
    cluster = leaving(drain_s=2.0)
    cluster.run()
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        assert (outcome.end.lives, outcome.tokens) == (1, list(range(1, 101)))
    moves = [each for _, _, each in cluster.commands if isinstance(each, MoveEnd)]
    assert len(moves) == 3


# ---------------------------------------------------------------- a rule not kept is noticed


def staying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves: what is left at the end of the drain is recomputed."""
    monkeypatch.setattr(DecodeMoves, "choose", lambda self, now: [])


def unanswered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal is not taken note of: the same target is asked at once, again and again."""
    monkeypatch.setattr(DecodeMoves, "_settle", lambda self, now: None)


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All go at once."""
    monkeypatch.setattr(decode_moves, "MOST_AT_ONCE", 100)


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way takes no room."""
    monkeypatch.setattr(decode_moves, "_count_blocks", lambda entry, target: 0)


def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes are asked to move from instances that stay."""
    monkeypatch.setattr(
        DecodeMoves,
        "_list_leaving",
        lambda self: (each for each in self._entries.values() if each.place and each.delivered),
    )


NOTICED: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], object]] = {
    staying: test_an_instance_is_empty_long_before_its_decodes_would_have_ended,
    unanswered: test_after_a_refusal_another_is_asked_and_the_pause_grows,
    at_once: test_those_with_most_left_go_first_and_so_many_at_once,
    blind: test_each_goes_where_most_room_is_left_with_what_is_on_the_way,
    everywhere: test_decodes_move_from_instances_that_leave_with_all_invariants,
}


@pytest.mark.parametrize("broken", NOTICED, ids=lambda each: each.__name__)
def test_each_rule_is_needed(broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        NOTICED[broken]()
