"""Open words between siblings: who wants work, who was told of some, and whose is awaited."""

from __future__ import annotations

from trinity.core.instance.sibling_words import SiblingWords


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
