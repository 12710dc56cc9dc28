"""Offers that wait for room, and that a sibling takes: who has room, which of them go, and what each of three says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, done, emptied, image_offer, make_core, peer_up, sent, table, work
from trinity.core.instance.instance_core import InstanceCore
from trinity.core.instance.siblings import free_blocks, has_room
from trinity.core.messages import (
    KV,
    WORK,
    Cancel,
    Commit,
    Forget,
    Gone,
    Moved,
    Offer,
    Part,
    PeerDown,
    PeerLeaving,
    PeerReserved,
    PeerSuspect,
    Pulled,
    Ready,
    Release,
    Said,
    Spare,
    Value,
    Work,
)
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

ON = TransferPolicy(early=False, hand_over=True)


def _own(settings: dict[str, Any]) -> dict[str, Any]:
    return {"transfers": ON, "prefix_cache": False} | settings


def word(name: str, said: Said, blocks: int = 0, kind: str = KV, **fields: Any) -> Spare:
    return Spare(name, said, kind, blocks, **fields)


def decode(request: str, tokens: int = 5, **fields: Any) -> list[Value]:
    """A prompt of so many tokens that P0 has prefilled, and offers with all that it has to say."""
    told = {each: fields.pop(each) for each in ("passed", "moves", "holder") if each in fields}
    part = Part(tuple(range(-(-tokens // 4))), told.pop("holder", ""))
    of = work(request, tokens, text=hash(request) % 1000 * 50, max_tokens=4, **fields)
    id = f"P0:{request}"
    offer = Offer(id=id, kind=KV, source="P0", work=of, parts=(part,), route=("P0",), **told)
    return [offer, Ready(id, (0,)), Commit(id, (7,), spans={"prefill": 1.0}, deadline_s=of.deadline_s)]


def full(*waiting: list[Value], kv: int = 2, peers: str = "P0 D1 D2", **settings: Any) -> InstanceCore:
    """D0, whose two blocks ``run`` decodes in, while others wait."""
    core = make_core("D0", peers=peers, kv=kv, **_own(settings))
    for events in (decode("run", 4 * kv - 3), *waiting):
        for event in events:
            core.handle(event, 0.0)
    if core.state.incoming.get("P0:run"):
        core.handle(Pulled("P0:run", 0, None, {"source": "P0"}), 0.0)
    assert "run" in core.state.decoding
    return core


def test_what_waits_is_told_of_passed_and_gone() -> None:
    core = full()
    offered, ready, commit = decode("r")
    table(
        core,
        [
            (offered, []),
            (ready, []),
            (commit, ["D2: spare have"]),
            (word("D2", "take", 2), ["P0: release P0:r passed", "D2: spare sent"]),
            (Cancel("r"), ["P0: cancel r"]),
            (Forget("r"), []),
        ],
        1.0,
    )
    assert list(core.state.requests) == ["run"]


def test_its_words_say_how_much_it_needs_who_has_it_and_how_long_it_has_waited() -> None:
    core = full(decode("r", 5))
    assert core.state.siblings.about(KV).told == {"D2"}
    out = core.handle(word("D2", "take", 2), 3.5)
    (release,), (said,) = sent(out, Release), sent(out, Spare)
    assert release == Release("P0:r", "passed", to="D2", waited_s=3.5)
    assert said == Spare("D0", "sent", KV, 0, "P0", 0)
    (told,) = sent(full().handle(decode("s", 5)[0], 0.0), Moved)
    assert told.hop == 1


def test_have_names_the_blocks_that_the_first_one_takes() -> None:
    """Five tokens of text, and three to come: two blocks."""
    core = full()
    for event in decode("r", 5)[:2]:
        assert not sent(core.handle(event, 0.0), Spare)
    assert sent(core.handle(decode("r", 5)[2], 0.0), Spare) == [word("D0", "have", 2)]


def test_the_first_that_the_taker_has_room_for_goes() -> None:
    core = full(decode("long", 20), decode("r", 4), kv=8)
    assert brief(core.handle(word("D2", "take", 1), 0.0)) == ["D2: spare none"]
    assert brief(core.handle(word("D2", "take", 2), 0.0))[0] == "P0: release P0:r passed"
    assert brief(core.handle(word("D1", "take", 6), 0.0))[0] == "P0: release P0:long passed"


# ---------------------------------------------------------------- the taker


def taker(**settings: Any) -> InstanceCore:
    return make_core("D1", peers="P0 D0 D2", kv=6, **_own(settings))


def test_who_has_room_takes_and_awaits_the_offer() -> None:
    core = taker()
    assert sent(core.handle(word("D0", "have", 2), 0.0), Spare) == [word("D1", "take", 6)]
    assert brief(core.handle(word("D2", "have", 2), 0.0)) == ["D2: spare no"], "one at a time"
    assert brief(core.handle(word("D0", "sent", source="P0"), 0.0)) == []
    assert core.state.siblings.awaits == "D0"
    offered = replace(decode("r")[0], route=("P0", "D0", "P0"), passed=True)
    out = core.handle(offered, 1.0)
    assert sent(out, Moved) == [Moved("r", 0, "D1", 3, 0, "P0")]
    assert [each.said for each in sent(out, Spare)] == ["want", "want"], "there is still room"
    assert not core.state.siblings.awaits


def test_an_offer_that_comes_ahead_of_the_word_of_it_is_awaited_no_longer() -> None:
    core = taker()
    core.handle(word("D0", "have", 2), 0.0)
    core.handle(replace(decode("r")[0], route=("P0", "D0", "P0"), passed=True), 0.0)
    core.handle(word("D0", "sent", source="P0"), 0.0)
    assert not core.state.siblings.awaits


@pytest.mark.parametrize(
    "news",
    [
        PeerDown("P0"),
        PeerSuspect("P0", 0, suspected=True),
        PeerDown("D0"),
        Spare("P0", "none"),
        word("D0", "none"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_nothing_is_awaited_that_is_not_to_come(news: Value, first: bool) -> None:
    core = taker()
    core.handle(word("D0", "have", 2), 0.0)
    for event in (news, word("D0", "sent", source="P0")) if first else (word("D0", "sent", source="P0"), news):
        core.handle(event, 0.0)
    assert not core.state.siblings.awaits


def test_of_another_life_of_the_source_nothing_is_to_come() -> None:
    core = taker()
    core.handle(word("D0", "have", 2), 0.0)
    core.handle(word("D0", "sent", source="P0", epoch=1), 0.0)
    assert not core.state.siblings.awaits


def test_who_has_too_little_says_no_and_wants_again_once_it_has_enough() -> None:
    core = taker()
    for event in decode("run", 13):  # four blocks
        core.handle(event, 0.0)
    assert brief(core.handle(word("D0", "have", 3), 0.0)) == ["D0: spare no"]
    assert "spare" not in " ".join(brief(core.handle(Pulled("P0:run", 0, None, {"source": "P0"}), 0.0)))
    assert "D0: spare want" in brief(core.handle(Cancel("run"), 0.0) + core.handle(done(1, run=9), 0.0))


def waits(core: InstanceCore) -> None:
    for event in decode("w", 24):
        core.handle(event, 0.0)
    for event in decode("x", 24):
        core.handle(event, 0.0)


@pytest.mark.parametrize(
    ("change", "settings", "room"),
    [
        (lambda core: None, {}, True),
        (lambda core: core.handle(PeerReserved("D1", 0, True, 1), 0.0), {}, False),
        (waits, {}, False),
        (
            lambda core: [core.handle(each, 0.0) for each in decode("w", 2)],
            {"rules": BatchRules(token_budget=1)},
            False,
        ),
        (lambda core: [core.handle(each, 0.0) for each in decode("w", 2)], {}, True),
        (lambda core: core.handle(word("D0", "have", 1), 0.0), {}, False),
    ],
    ids=["empty", "reserved", "others wait", "rows are full", "rows are not", "one is to come"],
)
def test_room(change: Callable[[InstanceCore], object], settings: dict[str, Any], room: bool) -> None:
    core = taker(**settings)
    change(core)
    assert has_room(core.state, 1) is room


def test_room_is_what_decodes_leave_that_grow() -> None:
    core = taker(reservation="optimistic")
    for event in decode("run", 2):
        core.handle(event, 0.0)
    core.handle(Pulled("P0:run", 0, None, {"source": "P0"}), 0.0)
    free = core.state.kv.available
    assert free_blocks(core.state) == free - 1
    assert has_room(core.state, free - 1)
    assert not has_room(core.state, free)


def test_one_without_decode_has_no_room() -> None:
    assert not has_room(make_core("P1", peers="P0 D0", transfers=ON).state, 1)


# ---------------------------------------------------------------- what stays


@pytest.mark.parametrize(
    "fields", [{"attempt": 1}, {"alone": "D"}, {"passed": True}, {"holder": "E0"}], ids=lambda each: next(iter(each))
)
def test_of_decodes(fields: dict[str, Any]) -> None:
    core = full()
    for event in decode("r", **fields):
        assert not sent(core.handle(event, 0.0), Spare)
    assert brief(core.handle(word("D2", "take", 9), 0.0)) == ["D2: spare none"]


def test_one_that_its_source_still_fills_stays_until_it_has() -> None:
    core = full(decode("r")[:2])
    assert brief(core.handle(word("D2", "take", 9), 0.0)) == ["D2: spare none"]
    core.handle(decode("r")[2], 0.0)
    assert brief(core.handle(word("D2", "take", 9), 0.0))[0] == "P0: release P0:r passed"


def test_one_with_half_of_its_text_cached_stays() -> None:
    for alike, goes in ((8, False), (4, True)):
        core = full(kv=4, prefix_cache=True)  # the 13 tokens of run
        text = core.state.requests["run"].work.prompt[:alike] + tuple(range(9000, 9016 - alike))
        for event in decode("r", 16):
            core.handle(_with_text(event, text), 0.0)
        out = brief(core.handle(word("D2", "take", 9), 0.0))
        assert ("release P0:r passed" in out[0]) is goes, alike


def _with_text(event: Value, text: tuple[int, ...]) -> Value:
    return replace(event, work=replace(event.work, prompt=text)) if isinstance(event, Offer) else event


def test_a_move_is_refused_at_once_and_never_passed() -> None:
    core = full()
    out = core.handle(decode("r", moves=True)[0], 0.0)
    assert [each.outcome for each in sent(out, Release)] == ["refused"]
    assert not sent(out, Spare)


@pytest.mark.parametrize(
    "news",
    [
        PeerSuspect("D1", 0, suspected=True),
        PeerLeaving("D1", 0, leaving=True),
        PeerReserved("D1", 0, True, 1),
        PeerDown("D1"),
    ],
)
def test_one_that_is_silent_leaves_is_reserved_or_lost_gets_nothing(news: Value) -> None:
    core = full(peers="P0 D1")
    core.handle(news, 0.0)
    for event in decode("r"):
        assert not sent(core.handle(event, 0.0), Spare)
    assert brief(core.handle(word("D1", "take", 9), 0.0)) == ["D1: spare none"]


def test_what_a_sibling_can_never_hold_stays() -> None:
    core = full(peers="P0", kv=4)
    core.handle(peer_up("D1", kv=1), 0.0)
    for event in decode("r", 5):
        assert not sent(core.handle(event, 0.0), Spare)


def test_off_nothing_is_said() -> None:
    core = full(transfers=TransferPolicy())
    for event in decode("r"):
        assert not sent(core.handle(event, 0.0), Spare)


# ---------------------------------------------------------------- features


def images_of(id: str, of: Work) -> Offer:
    places, parts = iter(range(99)), []
    for span in of.media:
        parts.append(tuple(next(places) for _ in range(-(-span.tokens // 4))))
    return image_offer(id, of, *parts)


def features(request: str, *media: str, holder: str = "") -> list[Value]:
    """Encoded by E0, which offers them with all that it has to say."""
    of = work(request, *media, 1)
    offer = images_of(f"E0:{request}", of)
    if holder:
        offer = replace(offer, parts=tuple(replace(part, blocks=(), holder=holder) for part in offer.parts))
    parts = tuple(range(len(media)))
    return [offer, Ready(offer.id, parts), Commit(offer.id, spans={"encode": 1.0})]


def crowded(*waiting: list[Value], **settings: Any) -> InstanceCore:
    """P0, whose two image blocks ``run`` has."""
    core = make_core("P0", peers="E0 E1 P1 D0", image=2, **_own(settings))
    for events in (features("run", "cat*8"), *waiting):
        for event in events:
            core.handle(event, 0.0)
    return core


def test_features_that_wait_for_room_go_to_a_sibling_that_has_nothing_to_do() -> None:
    core = crowded()
    offered, ready, commit = features("r", "dog*4")
    table(core, [(offered, []), (ready, []), (commit, ["P1: spare have"])], 1.0)
    out = core.handle(word("P1", "take", kind=WORK), 3.0)
    assert brief(out) == ["E0: release E0:r passed", "P1: spare sent"]
    assert sent(out, Release)[0].waited_s == 2.0
    assert sent(out, Spare) == [Spare("P0", "sent", WORK, 0, "E0", 0)]


@pytest.mark.parametrize(
    ("waiting", "settings", "goes"),
    [
        (features("r", "dog*4"), {}, True),
        (features("r", "dog*4")[:2], {}, False),
        (features("r", "dog*4", holder="E1"), {}, False),
        (features("r", "cat*8", "dog*4"), {}, True),
        (features("r", "cat*8", "dog*4"), {"pulled": True}, False),  # one of them is cached here
    ],
    ids=["plain", "not all is ready", "of a holder", "two", "one is here"],
)
def test_which_features_go(waiting: list[Value], settings: dict[str, Any], goes: bool) -> None:
    core = crowded(waiting)
    if settings:
        core.handle(Pulled("E0:run", 0, None, {"source": "E0"}), 0.0)
        assert core.state.image_offers
    out = brief(core.handle(word("P1", "take", kind=WORK), 0.0))
    assert ("E0: release E0:r passed" in out) is goes
    assert ("P1: spare none" in out) is not goes


def test_leading_text_that_was_prefilled_here_keeps_its_features_here() -> None:
    core = crowded([each for each in features("r", "dog*4") if not isinstance(each, Commit)])
    state = core.state.requests["r"]
    core.handle(features("r", "dog*4")[2], 0.0)
    state.lead(0, 4)
    assert brief(core.handle(word("P1", "take", kind=WORK), 0.0)) == ["P1: spare none"]


def test_decodes_are_not_for_who_wants_work() -> None:
    core = full(decode("r"))
    assert brief(core.handle(word("D2", "take", kind=WORK), 0.0)) == ["D2: spare none"]


# ---------------------------------------------------------------- losses


def test_the_loss_of_the_source_is_told_by_who_has_passed() -> None:
    core = full(decode("r"))
    core.handle(word("D2", "take", 9), 0.0)
    assert sent(core.handle(PeerDown("P0"), 0.0), Gone) == [Gone("r", 0, "D0", "P0", 2)]
    core.handle(Forget("r"), 0.0)
    assert "r" not in core.state.tombstones


def test_nothing_of_it_is_left() -> None:
    core = full(decode("r"))
    core.handle(word("D2", "take", 9), 0.0)
    core.handle(Cancel("run"), 0.0)
    for event in (done(1, run=9), Forget("run"), Forget("r")):
        core.handle(event, 0.0)
    emptied(core)


def test_the_kinds_of_one_that_prefills_and_decodes_are_apart() -> None:
    """PD0 decodes, and so has no time; it has room."""
    core = make_core("PD0", peers="P0 PD1", kv=8, transfers=ON, prefix_cache=False)
    for event in decode("run", 4):
        core.handle(event, 0.0)
    assert brief(core.handle(word("PD1", "have", 2), 0.0)) == ["PD1: spare take"]
    assert brief(core.handle(word("PD1", "have", kind=WORK), 0.0)) == ["PD1: spare no"]
    assert (core.state.siblings.about(KV).awaits, core.state.siblings.about(WORK).awaits) == ("PD1", "")
