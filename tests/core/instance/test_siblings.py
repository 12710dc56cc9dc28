"""What an idle instance and its siblings say to each other, and which of the requests that wait is handed over."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, done, emptied, make_core, peer_up, sent, table, work
from trinity.core.instance.instance_core import InstanceCore
from trinity.core.instance.siblings import is_free
from trinity.core.messages import (
    Cancel,
    Finished,
    Forget,
    Gone,
    Moved,
    PeerDown,
    PeerLeaving,
    PeerReserved,
    PeerSuspect,
    Release,
    Said,
    Spare,
    Submit,
    Value,
)
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.core.values import NotTaken

ON = TransferPolicy(early=False, hand_over=True)


def core_of(name: str, peers: str, **settings: Any) -> InstanceCore:
    settings = {"transfers": ON} | settings
    return make_core(name, peers=peers, **settings)


def word(name: str, said: Said) -> Spare:
    return Spare(name, said)


def busy(name: str = "P0", peers: str = "P1 D0", *waiting: Value, **settings: Any) -> InstanceCore:
    """One that prefills ``run``, while others wait."""
    core = core_of(name, peers, **settings)
    core.handle(Submit(work("run", 8)), 0.0)
    for each in waiting:
        core.handle(each, 0.0)
    return core


WAITS = Submit(work("r", 8, text=500))


def test_one_that_waits_is_told_of_taken_and_passed_on() -> None:
    core = busy()
    table(
        core,
        [
            (WAITS, ["P1: spare have"]),
            (word("P1", "take"), ["P1: submit r"]),
            (Cancel("r"), ["P1: cancel r"]),
            (Forget("r"), []),
            (done(1, run=7), ["frontend: emit run#0=7", *_offer("run")]),
            (Release("P0:1", "pulled"), []),  # nobody has told it of work, so that what it wants stands
        ],
    )
    core.handle(Forget("run"), 0.0)
    emptied(core)


def _offer(request: str) -> list[str]:
    made = busy()
    said = brief(made.handle(done(1, run=7), 0.0))
    assert request in " ".join(said)
    return said[1:]


def test_the_taker_says_that_it_has_it_and_hears_how_long_it_has_waited() -> None:
    source, target = busy("P0", "P1 D0", WAITS), core_of("P1", "P0 D0")
    assert brief(target.handle(word("P0", "have"), 1.0)) == ["P0: spare take"]
    (passed,) = sent(source.handle(word("P1", "take"), 1.5), Submit)
    assert (passed.route, passed.spans, passed.target_epoch) == (
        ("P0",),
        {"encode_queue": 0.0, "prefill_queue": 1.5},
        0,
    )
    out = target.handle(passed, 2.0)
    assert sent(out, Moved) == [Moved("r", 0, "P1", 1)]
    assert target.state.requests["r"].spans["prefill_queue"] == 1.5
    assert not target.state.siblings.awaits


def test_with_the_time_that_is_left() -> None:
    core = busy("P0", "P1 D0", Submit(work("r", 8, text=500, deadline_s=4.0)))
    (passed,) = sent(core.handle(word("P1", "take"), 1.5), Submit)
    assert passed.work.deadline_s == pytest.approx(2.5)


def test_who_has_nothing_any_more_says_none() -> None:
    core = busy("P0", "P1 D0", WAITS)
    core.handle(Cancel("r"), 0.0)
    assert brief(core.handle(word("P1", "take"), 0.0)) == ["P1: spare none"]


def test_who_has_something_by_now_says_no_and_wants_again_once_it_has_not() -> None:
    core = core_of("PD0", "PD1")
    table(
        core,
        [
            (Submit(work("s", 4, max_tokens=1)), ["open s kv 0", "step 1 joint: prefill s 0+4 last"]),
            (word("PD1", "have"), ["PD1: spare no"]),
        ],
    )
    assert brief(core.handle(done(1, s=7), 0.0))[-1] == "PD1: spare want"
    assert not [each for each in brief(core.handle(Forget("s"), 0.0)) if "spare" in each], "once"


def test_one_sibling_at_a_time() -> None:
    core = core_of("P0", "P1 P2 D0")
    table(
        core,
        [
            (word("P1", "have"), ["P1: spare take"]),
            (word("P2", "have"), ["P2: spare no"]),
            (word("P1", "none"), ["P1: spare want", "P2: spare want"]),
            (word("P2", "have"), ["P2: spare take"]),
        ],
    )


def test_each_that_waits_is_told_of_to_one_that_had_nothing_to_do_last() -> None:
    core = busy("P0", "P1 P2 P3 D0")
    assert brief(core.handle(WAITS, 0.0)) == ["P3: spare have"]
    assert brief(core.handle(Submit(work("t", 8, text=900)), 0.0)) == ["P2: spare have"]
    assert brief(core.handle(word("P3", "no"), 0.0)) == ["P1: spare have"], "one is still to be told of"
    assert brief(core.handle(word("P3", "want"), 0.0)) == [], "both are"
    assert brief(core.handle(word("P2", "no"), 0.0)) == ["P3: spare have"]


def test_the_first_that_waits_goes_first() -> None:
    core = busy("P0", "P1 P2 D0", WAITS, Submit(work("t", 8, text=900)))
    assert brief(core.handle(word("P1", "take"), 0.0)) == ["P1: submit r"]
    assert brief(core.handle(word("P2", "take"), 0.0)) == ["P2: submit t"]


def test_off_nothing_is_said() -> None:
    assert brief(busy("P0", "P1 D0", transfers=TransferPolicy()).handle(WAITS, 0.0)) == []
    quiet = make_core("PD0", peers="PD1")
    quiet.handle(Submit(work("s", 4, max_tokens=1)), 0.0)
    assert not [each for each in brief(quiet.handle(done(1, s=7), 0.0)) if "spare" in each]


# ---------------------------------------------------------------- what stays


ONE = BatchRules(token_budget=64, image_budget=1)


@pytest.mark.parametrize(
    ("waits", "settings"),
    [
        (Submit(work("r", 8, text=500), route=("P2",)), {}),
        (Submit(replace(work("r", 8, text=500), attempt=1)), {}),
        (Submit(work("r", 8)), {}),  # the text of the one that runs, as soon as that is cached
    ],
)
def test_of_text(waits: Submit, settings: dict[str, Any]) -> None:
    core = busy("PD0", "PD1", **settings)
    core.handle(done(1, run=7), 0.0)
    core.handle(waits, 0.0)
    assert brief(core.handle(word("PD1", "take"), 0.0))[0] == "PD1: spare none"


def test_what_stays_would_go_if_it_were_as_the_others() -> None:
    """The control of the rows above."""
    core = busy("PD0", "PD1")
    core.handle(done(1, run=7), 0.0)
    core.handle(WAITS, 0.0)
    assert brief(core.handle(word("PD1", "take"), 0.0))[0] == "PD1: submit r"


def test_half_of_the_text_elsewhere_is_worth_less_than_none() -> None:
    """Of 12 tokens that wait 8 are cached at the second one, and 4 at the first."""
    for cached, goes in ((8, False), (4, True)):
        core = busy("PD0", "PD1")
        core.handle(done(1, run=7), 0.0)
        text = tuple(range(100, 100 + cached)) + tuple(range(900, 912 - cached))
        core.handle(Submit(replace(work("r", 12), prompt=text)), 0.0)
        assert ("submit r" in brief(core.handle(word("PD1", "take"), 0.0))[0]) is goes, cached


@pytest.mark.parametrize(
    ("image", "fields", "goes"),
    [
        ("dog", {}, True),
        ("cat", {}, False),  # is being encoded here
        ("dog", {"helpers": ("E2",)}, False),
        ("dog", {"asker": "E2"}, False),
    ],
)
def test_of_images(image: str, fields: dict[str, Any], goes: bool) -> None:
    core = core_of("E0", "E1 E2 P0", rules=ONE)
    core.handle(Submit(work("run", "cat", 1)), 0.0)
    core.handle(Submit(work("r", image, 1), **fields), 0.0)
    assert ("E1: submit r" in brief(core.handle(word("E1", "take"), 0.0))) is goes


def test_an_encoder_takes_images_and_no_text() -> None:
    core = core_of("EP0", "E1 D0", rules=ONE)
    core.handle(Submit(work("run", 8)), 0.0)
    core.handle(WAITS, 0.0)
    assert brief(core.handle(word("E1", "take"), 0.0)) == ["E1: spare none"]


def test_what_a_sibling_can_never_hold_stays() -> None:
    core = core_of("P0", "D0")
    core.handle(peer_up("P1", kv=1), 0.0)
    core.handle(Submit(work("run", 8)), 0.0)
    assert brief(core.handle(WAITS, 0.0)) == []
    assert brief(core.handle(word("P1", "take"), 0.0)) == ["P1: spare none"]


@pytest.mark.parametrize(
    "news",
    [
        PeerSuspect("P1", 0, suspected=True),
        PeerLeaving("P1", 0, leaving=True),
        PeerReserved("P1", 0, True, 1),
        PeerDown("P1"),
    ],
)
def test_one_that_is_silent_leaves_is_reserved_or_lost_gets_nothing(news: Value) -> None:
    core = busy()
    core.handle(news, 0.0)
    assert brief(core.handle(WAITS, 0.0)) == []
    assert brief(core.handle(word("P1", "take"), 0.0)) == ["P1: spare none"]


# ---------------------------------------------------------------- losses


def test_one_whose_giver_is_lost_or_silent_waits_for_it_no_longer() -> None:
    for news in (PeerDown("P1"), PeerSuspect("P1", 0, suspected=True)):
        core = core_of("P0", "P1 P2 D0")
        core.handle(word("P1", "have"), 0.0)
        assert not is_free(core.state)
        core.handle(news, 0.0)
        assert is_free(core.state)


def test_the_loss_of_the_taker_is_told_to_the_owner() -> None:
    core = busy("P0", "P1 D0", WAITS)
    core.handle(word("P1", "take"), 0.0)
    assert sent(core.handle(PeerDown("P1"), 0.0), Gone) == [Gone("r", 0, "P0", "P1", 1)]


def test_a_new_life_is_told_of_work_without_a_word_and_one_that_speaks_again_stands_where_it_stood() -> None:
    core = busy("P0", "P1 D0", WAITS)
    core.handle(PeerDown("P1"), 0.0)
    assert brief(core.handle(replace(peer_up("P1"), epoch=1), 0.0)) == []
    assert brief(core.handle(Submit(work("t", 8, text=900)), 0.0)) == ["P1: spare have"]
    core = busy()
    core.handle(PeerSuspect("P1", 0, suspected=True), 0.0)
    core.handle(WAITS, 0.0)
    assert brief(core.handle(PeerSuspect("P1", 0, suspected=False), 0.0)) == ["P1: spare have"]


def test_who_is_reserved_takes_nothing() -> None:
    core = core_of("P0", "P1 D0")
    core.handle(PeerReserved("P0", 0, True, 1), 0.0)
    assert brief(core.handle(word("P1", "have"), 0.0)) == ["P1: spare no"]


def test_one_whose_blocks_are_still_read_has_something() -> None:
    core = core_of("P0", "P1 D0")
    core.handle(Submit(work("s", 4)), 0.0)
    core.handle(done(1, s=7), 0.0)
    assert brief(core.handle(word("P1", "have"), 0.0)) == ["P1: spare no"]
    assert brief(core.handle(Release("P0:1", "pulled"), 0.0)) == ["P1: spare want"]


def test_a_taker_that_is_not_in_touch_with_the_owner_is_as_for_all_that_is_passed_on() -> None:
    core = busy("P0", "P1 D0", WAITS)
    core.handle(word("P1", "take"), 0.0)
    target = core_of("P1", "P0 D0")
    other = Submit(replace(WAITS.work, owner="frontend:b"), route=("P0",))
    (refused,) = sent(target.handle(other, 0.0), NotTaken)
    (end,) = sent(core.handle(refused, 0.0), Finished)
    assert end.failure is not None
    assert end.failure.error == "MigrationError"
