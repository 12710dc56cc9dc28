"""Open words between siblings: who wants some, who was told of some, and whose is awaited."""

from __future__ import annotations

from support.core_tables import work
from trinity.core.instance.peer_questions import Siblings, SiblingWords
from trinity.core.messages import IMAGE, KV, WORK, Offer


def met(*names: str) -> SiblingWords:
    words = SiblingWords()
    for name in names:
        words.meet(name)
    return words


def test_two_that_meet_take_each_other_for_idle() -> None:
    words = met("P1", "P2")
    assert list(words.wanting) == ["P1", "P2"]
    assert words.wanted == {"P1", "P2"}
    assert (words.told, words.awaits) == (set(), "")


def test_who_wants_last_stands_last_and_once() -> None:
    words = met("P1", "P2")
    words.want("P1")
    assert list(words.wanting) == ["P2", "P1"]


def test_one_that_was_told_wants_no_more_until_it_says_so() -> None:
    words = met("P1", "P2")
    words.tell("P1")
    assert list(words.wanting) == ["P2"]
    assert words.told == {"P1"}
    words.want("P1")
    assert list(words.wanting) == ["P2", "P1"]


def test_what_came_from_another_is_not_what_is_awaited() -> None:
    words = met("P1")
    words.awaits = "P1"
    words.came("P2")
    assert words.awaits == "P1"
    words.came("P1")
    assert not words.awaits


def test_of_a_silent_one_no_answer_is_awaited_and_what_it_wants_stands() -> None:
    words = met("P1", "P2")
    words.tell("P1")
    words.awaits = "P2"
    for name in ("P1", "P2"):
        words.avoid(name)
    assert (words.told, words.awaits, words.wanting, words.wanted) == (set(), "", ("P2",), {"P1", "P2"})


def test_of_a_lost_one_nothing_stands() -> None:
    words = met("P1")
    words.tell("P1")
    words.want("P1")
    words.awaits = "P1"
    words.drop("P1")
    assert (words.told, words.awaits, words.wanting, words.wanted) == (set(), "", (), set())
    words.drop("P1")


# ---------------------------------------------------------------- who is to offer what was passed


def awaiting(source: str) -> SiblingWords:
    words = met("D1", "D2", "P0")
    words.answer("D1", takes=True, blocks=3)
    words.expect("D1", source, up=True)
    return words


def test_what_was_passed_is_awaited_until_its_source_is_lost_or_silent() -> None:
    for end in (lambda words: words.avoid("P0"), lambda words: words.drop("P0"), lambda words: words.came("D1")):
        words = awaiting("P0")
        assert (words.awaits, words.source) == ("D1", "P0")
        words.avoid("D2")
        assert words.awaits == "D1"
        end(words)
        assert (words.awaits, words.source) == ("", "")


def test_nothing_is_awaited_of_a_source_that_is_not_up_or_if_it_has_come_already() -> None:
    words = met("D1")
    words.answer("D1", takes=True, blocks=3)
    words.expect("D1", "P0", up=False)
    assert not words.awaits
    words = met("D1", "D2")
    words.answer("D2", takes=True, blocks=3)
    words.expect("D1", "P0", up=True)
    assert (words.awaits, words.source) == ("D2", "")


def test_what_had_no_room_is_remembered_until_it_is_said_that_there_is_some() -> None:
    words = met("D1", "D2")
    for name, blocks in (("D1", 5), ("D2", 3)):
        words.answer(name, takes=False, blocks=blocks)
    assert (words.refused, words.awaits, words.wanted) == (5, "", set())
    words.ask("D1")
    assert (words.refused, words.wanted) == (0, {"D1"})


def test_kinds_are_apart_and_a_meeting_is_of_both() -> None:
    both = Siblings()
    both.meet("PD1")
    both.about(KV).answer("PD1", takes=True, blocks=1)
    assert (both.about(WORK).awaits, both.about(KV).awaits, both.awaits) == ("", "PD1", "PD1")
    assert both.about(WORK).wanted == {"PD1"}
    both.note_offer(offer_of(IMAGE))
    assert both.awaits == "PD1", "that is features"
    both.note_offer(offer_of(KV, passed=False))
    assert both.awaits == "PD1", "that came straight from its source"
    both.note_offer(offer_of(KV))
    assert not both.awaits
    both.about(WORK).answer("PD1", takes=True, blocks=0)
    both.give_up()
    assert not both.awaits
    both.drop("PD1")
    assert not any(both.about(kind).wanting or both.about(kind).wanted for kind in (WORK, KV))


def offer_of(kind: str, passed: bool = True) -> Offer:
    return Offer(
        id="P0:1", kind=kind, source="P0", work=work("r", 4), parts=(), route=("P0", "PD1", "P0"), passed=passed
    )
