"""KV of a text that is fetched by content, from an instance that has it, ahead of the prefill of a later life."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from core.frontend.test_resumption import having, router_of
from core.migration.test_lost_transfers import MOMENTS, positions
from support.core_tables import brief, done, emptied, image_offer, kv_offer, lost, make_core, sent, work
from support.every_order import Search
from support.virtual.checks import check_state
from support.virtual.cluster import make_settings
from trinity.core import InstanceCore
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.resumption import name_holder
from trinity.core.instance import admission
from trinity.core.instance.state import State
from trinity.core.messages import (
    KV,
    Cancel,
    Commit,
    Fetch,
    Fetched,
    Finished,
    Forget,
    Offer,
    PeerDown,
    PeerReserved,
    PeerSuspect,
    Pull,
    Pulled,
    Ready,
    Release,
    Revoke,
    Send,
    Step,
    Submit,
    Tick,
    Value,
    Work,
)
from trinity.core.migration import prefix_fetch
from trinity.core.prefix_cache import prefix_keys
from trinity.core.routing.router import Router
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

TEXT = work("r", 18, attempt=1, holder="D0", held=16)
KEYS = tuple(prefix_keys(TEXT.prompt, (), 4))
ID = "P1:1/0"


def answer(*blocks: int, generation: int = 0) -> Fetched:
    return Fetched(ID, "D0", blocks, generation, kind=KV)


def asking(of: Work = TEXT, name: str = "P1", **settings: Any) -> InstanceCore:
    """P1, which has asked D0 for the beginning of a text."""
    core = make_core(name, peers="E0 D0 D1", **settings)
    out = core.handle(Submit(of), 0.0)
    assert [each.keys for each in sent(out, Fetch)] == [KEYS[:4]] or of is not TEXT
    assert not [each for each in out if isinstance(each, Step)], "it waits for the answer"
    return core


def after(core: InstanceCore, *events: Value) -> list[Value]:
    out: list[Value] = []
    for event in events:
        out = core.handle(event, 1.0)
        check_state(core.state)
    return out


def prefilled(out: Iterable[Value]) -> list[tuple[int, int]]:
    return [(row.start, row.length) for each in out if isinstance(each, Step) for row in each.prefills]


def test_what_the_holder_has_is_pulled_and_the_rest_is_prefilled() -> None:
    core = asking()
    assert core.state.kv.held == 0, "nothing is held for an answer"
    out = after(core, answer(9, 8, 7, 6))
    assert [each for each in out if isinstance(each, Pull)] == [
        Pull("P1:1", 0, "D0", KV, "r", (9, 8, 7, 6), (0, 1, 2, 3))
    ]
    assert core.state.kv.held == 4
    out = after(core, Pulled("P1:1", 0, None, {"kind": KV, "blocks": 4}))
    assert sent(out, Release) == [Release(ID, "pulled")]
    assert prefilled(out) == [(16, 2)]
    assert core.state.requests["r"].transfers == [{"kind": KV, "blocks": 4, "outcome": "store"}]
    assert core.state.requests["r"].cached_tokens == 16


def silence(core: InstanceCore) -> list[Value]:
    return core.handle(Tick(), 11.0)


def by(*events: Value) -> Callable[[InstanceCore], list[Value]]:
    return lambda core: after(core, *events)


@pytest.mark.parametrize(
    ("what", "start"),
    [
        (by(answer()), 0),
        (by(answer(9, 8)), 0),
        (by(answer(9, 8), Pulled("P1:1", 0)), 8),
        (by(answer(9, 8, 7, 6), lost("P1:1")), 0),
        (by(PeerDown("D0")), 0),
        (by(answer(9, 8, 7, 6), PeerDown("D0"), Pulled("P1:1", 0)), 0),
        (silence, 0),
    ],
    ids=["it has none", "its pull runs", "it has two", "the pull fails", "it is lost", "it is lost amid it", "silent"],
)
def test_what_does_not_come_is_prefilled(what: Callable[[InstanceCore], list[Value]], start: int) -> None:
    core = asking(lease_s=10.0)
    out = what(core)
    pulls = any(each.places for each in core.state.prefix_fetches.values())
    assert prefilled(out) == ([] if pulls else [(start, 18 - start)])


def test_an_answer_that_comes_too_late_is_given_back() -> None:
    core = asking(lease_s=10.0)
    silence(core)
    assert sent(after(core, answer(9, 8, 7, 6)), Release) == [Release(ID, "cancelled")]


@pytest.mark.parametrize("amid", [False, True], ids=["before the answer", "amid the pull"])
def test_a_request_that_ends_leaves_nothing_here(amid: bool) -> None:
    core = asking()
    if amid:
        after(core, answer(9, 8, 7, 6))
    after(core, Cancel("r"), Forget("r", 1))
    assert "r" not in core.state.requests
    assert not core.idle(), "it is to give back what it is leased"
    out = after(core, Pulled("P1:1", 0) if amid else answer(9, 8, 7, 6))
    assert sent(out, Release) == [Release(ID, "pulled" if amid else "cancelled")]
    emptied(core)
    assert len(core.state.kv.match(KEYS)) == (4 if amid else 0)


def test_a_life_that_comes_back_under_its_name_waits_for_no_fetch_of_another_attempt() -> None:
    core = asking()
    after(core, Cancel("r"))
    out = after(core, Submit(replace(TEXT, attempt=2, holder="")))
    assert prefilled(out) == [(0, 18)]
    assert sent(after(core, answer(9, 8, 7, 6)), Release) == [Release(ID, "cancelled")]


def test_what_has_come_by_another_way_is_not_pulled() -> None:
    core = asking()
    after(core, Submit(work("s", 9)), done(1, s=5))
    assert len(core.state.kv.match(KEYS)) == 2
    out = after(core, answer(9, 8, 7, 6))
    (pull,) = [each for each in out if isinstance(each, Pull)]
    assert pull.source_blocks == (7, 6)
    assert prefilled(after(core, Pulled("P1:1", 0))) == [(16, 2)]


def test_no_more_is_pulled_than_there_is_room_for_at_once() -> None:
    """The other one has three blocks of five; its need is whole, and it waits for nobody."""
    core = asking(kv=6)
    after(core, Submit(work("s", 15, text=50)))
    (pull,) = [each for each in after(core, answer(9, 8, 7, 6)) if isinstance(each, Pull)]
    assert pull.source_blocks == (9, 8)
    core = asking(kv=5)
    after(core, Submit(work("s", 18, text=50)))
    assert sent(after(core, answer(9, 8, 7, 6)), Release) == [Release(ID, "cancelled")]
    assert core.state.kv.held == 5


def test_what_was_cached_before_and_is_evicted_meanwhile_makes_the_rest_useless() -> None:
    core = make_core("P1", peers="D0", kv=5)
    after(core, Submit(work("s", 9, max_tokens=1)), done(1, s=5), Forget("s"))
    out = after(core, Submit(TEXT))
    assert [each.keys for each in sent(out, Fetch)] == [KEYS[2:4]]
    after(core, Submit(work("t", 17, text=50, max_tokens=1)), done(2, t=5), Forget("t"))
    assert not core.state.kv.match(KEYS)
    assert prefilled(after(core, Fetched(ID, "D0", (7, 6), kind=KV))) == [(0, 18)]


@pytest.mark.parametrize(
    "fields", [{"holder": "P1"}, {"holder": "D9"}, {"held": 3}, {"holder": ""}], ids=["itself", "gone", "less", "none"]
)
def test_nobody_is_asked_for_nothing(fields: dict[str, Any]) -> None:
    core = make_core("P1", peers="D0")
    out = after(core, Submit(replace(TEXT, **fields)))
    assert (sent(out, Fetch), prefilled(out)) == ([], [(0, 18)])


# ---------------------------------------------------------------- images

CHAT = work("r", 2, "cat*4", 12, attempt=1, holder="D0", held=16)


def test_images_that_it_covers_are_not_encoded() -> None:
    core = asking(CHAT)
    assert prefilled(after(core, answer(9, 8, 7, 6), Pulled("P1:1", 0))) == [(16, 2)]


def test_if_it_does_not_come_the_request_goes_on_to_an_encoder() -> None:
    core = asking(CHAT)
    out = after(core, answer())
    assert [each.route for each in sent(out, Submit)] == [("P1",)]
    after(core, Forget("r", 1))
    emptied(core)
    core = asking(CHAT, "EP1")
    out = after(core, Fetched("EP1:1/0", "D0", kind=KV))
    assert [len(each.encodes) for each in out if isinstance(each, Step)] == [1]


def test_it_comes_while_features_do() -> None:
    core = make_core("P1", peers="E0 D0 D1")
    out = core.handle(image_offer("E0:1", replace(CHAT, held=4), (0,)), 0.0)
    assert [len(each.keys) for each in sent(out, Fetch)] == [1]
    after(core, Ready("E0:1", (0,)), Pulled("E0:1", 0))
    assert not prefilled(after(core, Commit("E0:1")))
    assert prefilled(after(core, answer(9), Pulled("P1:1", 0))) == [(4, 14)]


# ---------------------------------------------------------------- the holder


def holder() -> InstanceCore:
    core = make_core("D0", peers="P0 P1", lease_s=10.0)
    core.handle(kv_offer("P0:1", work("r", 16, max_tokens=1), (3, 4, 5, 6)), 0.0)
    for event in (Ready("P0:1", (0,)), Pulled("P0:1", 0), Commit("P0:1", (5,), ending="length")):
        core.handle(event, 0.0)
    core.handle(Forget("r"), 0.0)
    return core


def test_a_holder_leases_what_it_has_up_to_the_first_that_it_lacks() -> None:
    core = holder()
    (said,) = sent(core.handle(Fetch(ID, "P1", KV, KEYS[1:3]), 1.0), Fetched)
    assert (len(said.blocks), said.kind, core.state.kv.held) == (2, KV, 2)
    (more,) = sent(core.handle(Fetch("P1:2/0", "P1", KV, (*KEYS[:2], b"other", KEYS[3])), 1.0), Fetched)
    assert len(more.blocks) == 2
    (none,) = sent(core.handle(Fetch("P1:3/0", "P1", KV, (b"other",)), 1.0), Fetched)
    assert none.blocks == ()
    after(core, Release(ID, "pulled"), Release("P1:2/0", "failed"))
    emptied(core)


@pytest.mark.parametrize("end", [PeerDown("P1"), Tick()], ids=["lost", "silent"])
def test_blocks_of_a_requester_that_is_gone_have_another_generation_before_others_write_there(end: Value) -> None:
    core = holder()
    core.handle(Fetch(ID, "P1", KV, KEYS[:4]), 1.0)
    core.handle(end, 11.5)
    assert core.state.kv.held == 0
    out = core.handle(kv_offer("P0:2", work("s", 60, text=50), tuple(range(15))), 12.0)
    assert [len(each.blocks) for each in out if isinstance(each, Revoke)] == [4]


# ---------------------------------------------------------------- where it decodes


@pytest.mark.parametrize(("name", "target"), [("D1", "D1"), ("", "D0"), ("D9", "D0")])
def test_it_decodes_where_its_text_is(name: str, target: str) -> None:
    core = make_core("P0", peers="D0 D1")
    core.handle(Submit(work("r", 5, attempt=1, holder=name, held=0)), 0.0)
    out = core.handle(done(1, r=5), 1.0)
    assert [each.route for each in sent(out, Offer)] == [("P0",)]
    assert brief(out)[1].startswith(f"{target}: offer")


# ---------------------------------------------------------------- the front end


def named(router: Router, of: Work = TEXT, first: str | None = None, but: str = "") -> tuple[str, int, str | None]:
    of, first = name_holder(router, of, (), first, but)
    return of.holder, of.held, first


def test_who_has_most_is_named_where_that_is_more() -> None:
    router = router_of("P0 P1 D0 D1", having("D0", TEXT, 8), having("D1", TEXT, 16), having("P1", TEXT, 12))
    assert named(router) == ("D1", 16, "P0"), "the policy chooses, as for a first life"
    assert named(router, first="P1") == ("D1", 16, "P1")
    assert named(router, first="P1", but="D1") == ("", 0, "P1")
    router.avoid(PeerSuspect("D1", 0, True))
    assert named(router, first="P0") == ("P1", 12, "P0")
    assert named(router_of("P0 P1 D0"), replace(TEXT, holder="D0", held=9)) == ("", 0, None), "nobody has it now"


def test_a_reserved_one_is_left_alone_and_one_that_runs_alone_has_nothing_to_do_with_others() -> None:
    router = router_of("P0 D0", having("D0", TEXT, 16))
    assert named(router, replace(TEXT, alone="P")) == ("", 0, None)
    router.reserve(PeerReserved("D0", 0, True))
    assert named(router) == ("", 0, None)


def test_it_goes_past_encoders_only_if_all_its_images_are_covered() -> None:
    chat = replace(CHAT, holder="", held=0)
    assert named(router_of("E0 P0 D0", having("D0", chat, 8)), chat) == ("D0", 8, "P0")
    assert named(router_of("E0 P0 D0", having("D0", chat, 4)), chat) == ("D0", 4, None)


# ---------------------------------------------------------------- runs in virtual time


@pytest.mark.parametrize("placement", ["2P1D", "2P2D"])
def test_a_prefill_goes_on_behind_whole_blocks_that_a_decode_instance_has(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for last in ("frontend", "D0", "P1"):
        assert [positions(placement, at, last=last) for at in MOMENTS] == [48, 48, 48, 48, 56]
    monkeypatch.setattr(admission, "begin_fetch", lambda *rest: False)
    assert [positions(placement, at) for at in MOMENTS] == [48, 56, 64, 72, 80]


def tight(text: int = 5) -> Search:
    """Two prefill instances and one that decodes, each with room for this request alone."""
    rules, transfers = BatchRules(token_budget=4), TransferPolicy(kv="layer")
    own = make_settings("2P1D", {"kv": 2}, kv_block_size=4, layers=1, rules=rules, transfers=transfers)
    asked = (Submit(work("r", text, max_tokens=2)),)
    return Search(own, asked, "P0", failures=FailurePolicy(recoveries=1, wait_s=0))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_in_every_order_of_a_death_a_request_that_fetches_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """212,000 states. Once lost by its target's word, and once by the front end's, it has had its one recovery."""
    seen: Counter[bool] = Counter()
    plain = prefix_fetch.take_pulled

    def count(s: State, event: Pulled) -> bool:
        taken = plain(s, event)
        seen[taken] += 1
        return taken

    monkeypatch.setattr(prefix_fetch, "take_pulled", count)
    found = tight()
    assert len(found.run()) > 200_000
    assert {reason for each in found.ends for _, reason in each} == {"length", "StageError"}
    assert seen[True] > 20, seen


def test_two_that_fetch_from_each_other_in_pools_of_one_wait_for_nobody() -> None:
    """Each has what the other one wants, and no room for it beside what it holds: both let go and prefill."""
    one, two = (make_core(name, peers="PD0 PD1 PD2", kv=5) for name in ("PD0", "PD1"))
    cores = {"PD0": one, "PD1": two}
    for number, core in enumerate(cores.values()):
        after(core, Submit(work(f"w{number}", 9, text=100 + 200 * number, max_tokens=1)), done(1, **{f"w{number}": 5}))
        after(core, Forget(f"w{number}"))
    texts = {"PD0": work("a", 14, text=300, attempt=1, holder="PD1", held=8)}
    texts["PD1"] = work("b", 14, attempt=1, holder="PD0", held=8)
    queue: list[tuple[str, Value]] = [(name, Submit(of)) for name, of in texts.items()]
    ended: set[str] = set()
    while queue:
        name, event = queue.pop(0)
        for each in after(cores[name], event):
            if isinstance(each, Send) and each.to in cores:
                queue.append((each.to, each.message))
            elif isinstance(each, Pull):
                queue.append((name, Pulled(each.offer, each.part)))
            elif isinstance(each, Step):
                rows = [row.request for row in each.prefills if row.last] + list(each.decodes)
                queue.append((name, done(each.id, **dict.fromkeys(rows, 5))))
            elif isinstance(each, Send) and isinstance(each.message, Finished):
                ended.add(each.message.request)
                queue.append((name, Forget(each.message.request, 1)))
    assert ended == {"a", "b"}
    for core in cores.values():
        emptied(core)
