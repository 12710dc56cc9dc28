"""Turns: so many at once, the oldest first, whoever leaves meanwhile."""

from __future__ import annotations

import random

from trinity.core.frontend.turns import Turns


def test_so_many_at_once_and_then_the_oldest() -> None:
    turns = Turns()
    assert [turns.take(name, age, 2) for name, age in (("b", 2), ("d", 4), ("e", 5), ("c", 3), ("b", 2))] == [
        True, True, False, False, True,
    ]  # fmt: skip
    assert (turns.active, turns.waiting) == ({"b", "d"}, {"e": 5, "c": 3})
    assert turns.next(2) is None
    turns.leave("d")
    assert turns.next(2) == "c"
    assert turns.take("c", 3, 2)
    assert turns.next(2) is None
    turns.leave("e")
    turns.leave("b")
    assert turns.next(2) is None


def test_nobody_goes_ahead_of_an_older_one_that_waits() -> None:
    turns = Turns()
    assert not turns.take("old", 1, 0)
    assert not turns.take("new", 2, 5)
    assert turns.take("older", 0, 5)
    assert [turns.next(5), turns.next(5), turns.next(5)] == ["old", "new", None]


def test_a_name_that_left_and_is_used_again_waits_by_its_new_age() -> None:
    turns = Turns()
    assert not turns.take("r", 1, 0)
    turns.leave("r")
    assert not turns.take("s", 2, 0)
    assert not turns.take("r", 3, 0)
    assert [turns.next(9), turns.next(9), turns.next(9)] == ["s", "r", None]


def test_no_more_than_so_many_and_each_in_the_end() -> None:
    for seed in range(200):
        draw, turns, most = random.Random(seed), Turns(), 1 + seed % 4
        ages = {f"r{number}": number for number in range(12)}
        begun: list[str] = []
        ahead = draw.sample(sorted(ages), k=len(ages))
        while ahead or turns.waiting or turns.active:
            if ahead and draw.random() < 0.5:
                name = ahead.pop()
                begun += [name] * turns.take(name, ages[name], most)
            elif turns.active:
                turns.leave(draw.choice(sorted(turns.active)))
            while (name := turns.next(most) or "") != "":
                assert all(ages[name] < age for age in turns.waiting.values())
                assert turns.take(name, ages[name], most)
                begun.append(name)
            assert len(turns.active) <= most
        assert sorted(begun) == sorted(ages)
