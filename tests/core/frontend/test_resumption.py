"""find_cached and the front end: a request goes on at the prefill instance that has most of it, where it has half."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, holding, peer_up, work
from support.recovering import AT_D0, emit, end_of, recovering, table, told
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from support.virtual.lives import Kill
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import dispatch
from trinity.core.frontend.resumption import Prefilled, find_cached
from trinity.core.messages import (
    KV,
    Failure,
    Finished,
    Gone,
    Moved,
    PeerDown,
    PeerLoad,
    PeerSuspect,
    Step,
    Submit,
    Work,
)
from trinity.core.prefix_cache import DIGEST, prefix_keys
from trinity.core.routing.router import RoundRobin, Router

TEXT = work("r", 16)
CHAT = work("r", 2, "cat*4", 10)


def router_of(peers: str = "P0 P1 P2", *loads: PeerLoad) -> Router:
    router = Router(RoundRobin())
    for name in peers.split():
        router.add(peer_up(name))
    for load in loads:
        router.take(load)
    return router


def having(name: str, of: Work, positions: int, tokens: tuple[int, ...] = ()) -> PeerLoad:
    keys = prefix_keys((*of.prompt, *tokens)[:positions], of.media, 4)
    return PeerLoad(name, cached={KV: b"".join(key[:DIGEST] for key in keys)})


@pytest.mark.parametrize(
    ("loads", "found"),
    [
        ([], None),
        ([having("P1", TEXT, 16)], "P1"),
        ([having("P1", TEXT, 8), having("P2", TEXT, 12)], "P2"),
        ([having("P1", TEXT, 4)], None),
        ([having("P2", work("other", 16, text=7), 16)], None),
    ],
    ids=["nobody", "one", "the longest", "less than half", "another text"],
)
def test_the_longest_prefix_that_is_half_of_the_text_decides(loads: list[PeerLoad], found: str | None) -> None:
    assert find_cached(router_of("P0 P1 P2", *loads), TEXT, (), None) == found


def test_outputs_count_as_the_prompt_does() -> None:
    tokens = (5, 6, 7, 8)
    router = router_of("P0 P1", having("P0", TEXT, 16), having("P1", TEXT, 20, tokens))
    assert find_cached(router, TEXT, tokens, None) == "P1"
    assert find_cached(router, TEXT, (5, 6, 7, 9), None) == "P0", "of other outputs P1 has no block more"


@pytest.mark.parametrize(
    ("last", "loads", "found"),
    [
        (Prefilled("P1", 0, 16), [], "P1"),
        (Prefilled("P1", 0, 7), [], None),
        (Prefilled("P1", 1, 16), [], None),
        (Prefilled("P9", 0, 16), [], None),
        (Prefilled("P1", 0, 16), [PeerLoad("P1")], None),
        (Prefilled("P1", 0, 16), [having("P1", work("other", 4, text=7), 4)], "P1"),
        (Prefilled("P1", 0, 12), [having("P2", TEXT, 16)], "P2"),
    ],
    ids=["unreported", "too little", "another life", "gone", "caches nothing", "reports others", "another has more"],
)
def test_who_prefilled_it_last_has_it_though_its_report_is_to_come(
    last: Prefilled, loads: list[PeerLoad], found: str | None
) -> None:
    assert find_cached(router_of("P0 P1 P2", *loads), TEXT, (), last) == found


def test_one_that_is_lost_by_anothers_word_silent_or_too_small_is_passed_over() -> None:
    router = router_of("P0 P1", having("P1", TEXT, 16))
    assert find_cached(router, TEXT, (), None, but="P1") is None
    router.avoid(PeerSuspect("P1", 0, True))
    assert find_cached(router, TEXT, (), None) is None
    router = router_of("P0")
    router.add(peer_up("P1", kv=3))
    router.take(having("P1", TEXT, 16))
    assert find_cached(router, TEXT, (), None) is None
    assert find_cached(router_of("E0 D0"), TEXT, (), None) is None


def test_media_are_covered_there_or_cached_there_or_encoded_there() -> None:
    covered, cut = having("P0", CHAT, 16), having("P0", CHAT, 4)
    short = replace(CHAT, prompt=CHAT.prompt[:8])
    assert find_cached(router_of("P0", covered), CHAT, (), None) == "P0"
    assert find_cached(router_of("P0", cut), short, (), None) is None, "its image is cached in part alone"
    features = replace(cut, cached={**cut.cached, **holding("P0", short, "image").cached})
    assert find_cached(router_of("P0", features), short, (), None) == "P0"
    assert find_cached(router_of("EP0", replace(cut, name="EP0")), short, (), None) == "EP0"


def test_the_choice_counts_as_work_that_was_sent() -> None:
    router = router_of("P0", having("P0", TEXT, 12))
    before = router.seconds("P0", "P")
    assert find_cached(router, TEXT, (), None) == "P0"
    assert router.seconds("P0", "P") > before


# ---------------------------------------------------------------- at the front end


def test_a_first_life_is_routed_by_the_policy() -> None:
    core = recovering("P0 P1 D0")
    core.handle(having("P1", TEXT, 16), 0.0)
    assert brief(core.handle(Submit(TEXT), 0.0)) == ["P0: submit r"]


def test_a_later_one_goes_where_it_was_prefilled_also_behind_a_move() -> None:
    core = recovering()
    table(core, AT_D0)
    core.handle(Moved("r", 0, "D1", 3, 0, "D0", 0, 2), 1.0)
    core.handle(emit("r", 0, (2, 7)), 1.0)
    assert brief(core.handle(PeerDown("D1"), 2.0))[-1] == "P0: submit r~1.1"


def test_the_instance_that_another_says_is_lost_is_not_asked_again() -> None:
    """D0 hears of the end of P0 before the front end does."""
    core = recovering()
    table(core, AT_D0[:4])
    why = Failure("MigrationError", "it is lost", {"cause": "PeerLost", "source": "P0", "kind": KV})
    end = Finished(request="r", attempt=0, reason="error", failure=why, count=1, route=("E0", "P0", "D0"))
    assert brief(core.handle(end, 1.0))[-1] == "E0: submit r~1.1"


# ---------------------------------------------------------------- what was recomputed


@pytest.mark.parametrize(
    ("events", "recomputed"),
    [
        ((PeerDown("E0"),), 0),
        ((Moved("r", 0, "P0", 1), told("r", 0, cause="PeerLost")), 0),
        ((Moved("r", 0, "P0", 1), PeerDown("P0"), Gone("r", 0, "E0", "P0", 1)), 5),
        ((Moved("r", 0, "P0", 1), emit("r", 0, (0, 5)), PeerDown("P0")), 6),
    ],
    ids=["at the encoder", "ended at P before its prefill", "died at P", "a token was out"],
)
def test_what_no_life_had_prefilled_is_not_recomputed(events: tuple[Any, ...], recomputed: int) -> None:
    core = recovering("E0 E1 P0 P1 D0")
    core.handle(Submit(work("r", "cat", 1, max_tokens=4)), 0.0)
    for event in events:
        core.handle(event, 1.0)
    tokens = core.entries["r"].delivered
    core.handle(emit("r~1.1", 1, *((index, 5) for index in range(tokens, 4))), 2.0)
    end = Finished(request="r~1.1", attempt=1, reason="length", count=4, route=("E1", "P1"), spans={"prefill": 1.0})
    assert end_of(core.handle(end, 3.0)).recomputed == recomputed


# ---------------------------------------------------------------- runs in virtual time

STILL = Durations(lambda *_: 0.01, lambda *_: 0.2, lambda *_: 0.3)
POOLS = {"image": 64, "kv": 256}


def run(placement: str, victim: str, at: float, **common: Any) -> VirtualCluster:
    settings = make_settings(
        placement, POOLS, image_block_size=4, kv_block_size=4, report_s=0.1, lease_s=30.0, **common
    )
    cluster = VirtualCluster(settings, durations=STILL, failures=FailurePolicy(), seed=1)
    cluster.submit(work("r", "cat", "dog", 32, max_tokens=6))
    cluster.lives.hear_all(victim, at)
    cluster.put(at, next(cluster._sequence), victim, Kill(None))
    cluster.run()
    outcome = cluster.outcomes["r"]
    assert outcome.end is not None
    assert (outcome.end.reason, outcome.tokens) == ("length", [1, 2, 3, 4, 5, 6])
    return cluster


def computed(cluster: VirtualCluster) -> tuple[int, int]:
    """Positions that were prefilled, and images that were encoded."""
    steps = [command for _, _, command in cluster.commands if isinstance(command, Step)]
    return sum(row.length for step in steps for row in step.prefills), sum(len(step.encodes) for step in steps)


DECODES = (1.50, 1.70, 1.90, 2.10)


@pytest.mark.parametrize("placement", ["E+2P+2D", "2E+3P+2D"])
@pytest.mark.parametrize("at", DECODES)
def test_a_lost_decode_recomputes_its_outputs_alone(placement: str, at: float) -> None:
    """Of prompt and outputs only what is behind the last full block of the prompt, and no image."""
    cluster = run(placement, "D0", at)
    positions, images = computed(cluster)
    end = cluster.outcomes["r"].end
    assert end is not None
    assert images == 2
    assert end.recomputed == positions - 40 <= len(cluster.outcomes["r"].tokens)
    assert end.finished is not None
    assert end.finished.route[3:] in (("P0", "D1"), ("P0",))


def test_one_that_encodes_and_prefills_is_come_back_to() -> None:
    positions, images = computed(run("2EP+2D", "D0", 1.2))
    assert (images, positions <= 46) == (2, True)


def test_without_that_choice_all_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_cached", lambda *rest: None)
    monkeypatch.setattr(dispatch, "name_holder", lambda router, work, tokens, first, but: (work, first))
    assert computed(run("E+2P+2D", "D0", DECODES[0]))[0] > 80


def test_where_it_was_evicted_meanwhile_it_goes_on_by_way_of_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "find_cached", lambda *rest: "P0")
    cluster = run("E+2P+2D", "D0", 1.5, prefix_cache=False, image_cache=False)
    end = cluster.outcomes["r"].end
    assert end is not None
    assert end.finished is not None
    assert end.finished.route[3:5] == ("P0", "E0")
    assert computed(cluster)[0] > 80
