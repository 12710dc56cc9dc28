"""Journals between a front end and its buddy: what is told, what is kept, within which bounds."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from support.core_tables import work
from trinity.core.frontend.journal import (
    MOST_ADOPTIONS,
    OPENING_BYTES,
    TOKEN_BYTES,
    Closing,
    Journal,
    JournalKeeper,
    JournalPages,
    JournalWriter,
    Kept,
    Opening,
    may_be_adopted,
)
from trinity.core.messages import Failure, ResolvedSampling, Sampled


def opening(key: str, **fields: Any) -> Opening:
    own = {name: fields.pop(name) for name in ("deadline_s", "sampling", "number") if name in fields}
    return Opening(key=key, reader=fields.pop("reader", key), work=work(key, 3, **own), **fields)


def tokens_of(kept: Kept) -> list[int]:
    return [each.token for each in kept.sampled]


def test_tokens_are_told_behind_the_opening_and_each_once() -> None:
    writer, given = JournalWriter(), [Sampled(5)]
    writer.begin(opening("r"), given, 0.0)
    first = writer.take(0.0)
    assert first is not None
    assert (first.number, first.whole, [each.key for each in first.openings]) == (1, True, ["r"])
    assert first.pages == (JournalPages("r", 0, (5,)),)
    assert writer.take(0.1) is None
    given += [Sampled(6), Sampled(7)]
    assert writer.take(0.2) == Journal(number=2, pages=(JournalPages("r", 1, (6, 7)),))
    given.append(Sampled(8))
    writer.end(Closing("r", "length"))
    assert writer.take(0.3) == Journal(
        number=3, pages=(JournalPages("r", 3, (8,)),), closings=(Closing("r", "length"),)
    )
    assert not writer.behind


def test_log_probabilities_go_along_where_they_were_asked_for() -> None:
    writer, keeper = JournalWriter(), JournalKeeper()
    given = [Sampled(5, -0.5, ((5, -0.5), (6, -1.0)))]
    writer.begin(opening("r", sampling=ResolvedSampling(logprobs=2)), given, 0.0)
    journal = writer.take(0.0)
    assert journal is not None
    keeper.take("life", journal, 0.0)
    assert keeper.lose("life", 0.0)[0].sampled == given


def test_what_its_reader_left_or_nobody_was_told_of_is_dropped() -> None:
    writer = JournalWriter()
    writer.begin(opening("left"), [], 0.0)
    writer.take(0.0)
    writer.end(Closing("left", "cancelled"))
    writer.begin(opening("unsaid"), [], 0.0)
    writer.end(Closing("unsaid", "length"))
    writer.end(Closing("never begun", "length"))
    assert writer.take(0.0) == Journal(number=2, dropped=("left",))
    assert writer.take(0.0) is None


def test_nothing_piles_up_while_the_buddy_is_out_of_reach() -> None:
    writer, given = JournalWriter(), [Sampled(1)]
    for number in range(100):
        writer.begin(opening(f"r{number}"), given, 0.0)
        writer.end(Closing(f"r{number}", "length"))
    assert not writer.behind
    writer.begin(opening("open"), given, 0.0)
    writer.take(0.0)
    writer.end(Closing("open", "length"))
    writer.begin(opening("later"), given, 0.0)
    writer.begin_again()
    journal = writer.take(0.0)
    assert journal is not None
    assert (journal.number, journal.whole, journal.closings) == (1, True, ())
    assert [(each.key, page.tokens) for each, page in zip(journal.openings, journal.pages, strict=True)] == [
        ("later", (1,))
    ]


def test_the_time_that_is_left_counts_from_when_it_is_said() -> None:
    writer, keeper = JournalWriter(), JournalKeeper()
    writer.begin(opening("r", deadline_s=5.0), [], 10.0)
    journal = writer.take(12.0)
    assert journal is not None
    assert journal.openings[0].work.deadline_s == 3.0
    keeper.take("life", journal, 100.0)
    (kept,) = keeper.lose("life", 101.0)
    assert kept.make_adoption("new", 101.5).work.deadline_s == 1.5
    assert kept.make_adoption("new", 200.0).work.deadline_s == 0.0


def test_pixels_are_kept_within_a_bound_on_either_side() -> None:
    writer = JournalWriter(most_bytes=100)
    writer.begin(opening("a", inputs=("pixels",), input_bytes=80), [], 0.0)
    writer.begin(opening("b", inputs=("pixels",), input_bytes=80), [], 0.0)
    journal = writer.take(0.0)
    assert journal is not None
    assert [(each.input_bytes, each.unread) for each in journal.openings] == [(80, False), (0, True)]
    keeper = JournalKeeper(most_bytes=OPENING_BYTES + 3 * TOKEN_BYTES + 50)  # one without pixels
    keeper.take("life", journal, 0.0)
    assert [(kept.opening.inputs, kept.opening.unread) for kept in keeper.lose("life", 0.0)] == [((), True)]
    assert keeper.bytes == 0
    writer.end(Closing("a", "length"))
    assert writer.bytes == 0


def test_a_request_whose_note_has_no_room_is_not_told_of() -> None:
    writer = JournalWriter(most_bytes=100)
    for key in "ab":
        writer.begin(opening(key, note=b"x" * 60, inputs=("pixels",), input_bytes=80), [], 0.0)
    journal = writer.take(0.0)
    assert journal is not None
    assert [(each.key, each.inputs) for each in journal.openings] == [("a", ())]
    writer.end(Closing("b", "length"))
    writer.end(Closing("a", "length"))
    assert writer.bytes == 0


def test_openings_may_go_ahead_of_tokens() -> None:
    writer, keeper, given = JournalWriter(), JournalKeeper(), [Sampled(5)]
    writer.begin(opening("r"), given, 0.0)
    for tokens in (False, False, True):
        journal = writer.take(0.0, tokens=tokens)
        if journal is not None:
            keeper.take("life", journal, 0.0)
    (kept,) = keeper.lose("life", 0.0)
    assert tokens_of(kept) == [5]


def test_beyond_the_bound_the_oldest_that_have_ended_go_first_and_new_ones_are_refused() -> None:
    each = OPENING_BYTES + 3 * TOKEN_BYTES
    keeper = JournalKeeper(most_bytes=3 * each + TOKEN_BYTES)
    for number, key in enumerate("abc"):
        keeper.take("life", Journal(number=number, openings=(opening(key),)), 0.0)
    keeper.take("life", Journal(number=4, closings=(Closing("b", "length"),)), 1.0)
    keeper.take("life", Journal(number=5, closings=(Closing("a", "length"),)), 2.0)
    keeper.take("life", Journal(number=6, openings=(opening("d"),)), 3.0)
    assert (keeper.knows("a"), keeper.knows("b"), keeper.knows("d")) == (True, False, True)
    keeper.take("life", Journal(number=7, openings=(opening("e"), opening("f"))), 3.0)
    assert (keeper.knows("e"), keeper.knows("f"), keeper.refused) == (True, False, 1)
    keeper.take("life", Journal(number=8, pages=(JournalPages("f", 0, (1,)),)), 3.0)  # of one that is not kept
    assert keeper.bytes <= keeper.most_bytes


def test_what_has_ended_is_kept_for_a_while() -> None:
    keeper = JournalKeeper(keep_s=10.0)
    end = Closing("r", "error", Failure("BadMedia", "no image"))
    keeper.take("life", Journal(number=1, openings=(opening("r"), opening("s")), closings=(end,)), 0.0)
    assert keeper.knows("r")
    keeper.expire(9.0)
    (kept, _) = keeper.lose("life", 9.0)
    assert kept.closing == end
    keeper.take("life", Journal(number=1, openings=(opening("r"),), closings=(end,)), 0.0)
    assert not keeper.lose("life", 10.0)
    assert keeper.bytes == 0


def test_pages_that_do_not_follow_are_an_error() -> None:
    keeper = JournalKeeper()
    keeper.take("life", Journal(number=1, openings=(opening("r"),), pages=(JournalPages("r", 0, (1, 2)),)), 0.0)
    for start in (0, 1, 3):
        with pytest.raises(ValueError, match=f"from {start} on follow 2"):
            keeper.take("life", Journal(number=2, pages=(JournalPages("r", start, (3,)),)), 0.0)


def test_one_that_says_all_again_or_closes_leaves_nothing_of_before() -> None:
    keeper = JournalKeeper()
    keeper.take("life", Journal(number=1, openings=(opening("r"),)), 0.0)
    keeper.take("other", Journal(number=1, openings=(opening("r"),)), 0.0)
    keeper.take("life", Journal(number=1, openings=(opening("s"),), whole=True), 0.0)
    assert [kept.opening.key for kept in keeper.lose("life", 0.0)] == ["s"]
    keeper.take("other", Journal(number=2, closed=True), 0.0)
    assert (keeper.lives, keeper.bytes, keeper.lose("other", 0.0)) == ({}, 0, [])


def test_requests_of_a_lost_front_end_come_oldest_first_with_all_that_is_known() -> None:
    keeper = JournalKeeper()
    openings = tuple(opening(key, number=number) for key, number in (("a", 3), ("b", 1)))
    keeper.take(
        "life", Journal(number=1, openings=openings, pages=(JournalPages("a", 0, (7, 8)),), dropped=("x",)), 0.0
    )
    found = keeper.lose("life", 0.0)
    assert [(kept.opening.key, tokens_of(kept)) for kept in found] == [("b", []), ("a", [7, 8])]
    adoption = found[1].make_adoption("a@life", 0.0)
    assert (adoption.work.request, adoption.work.outputs, adoption.tokens) == ("a@life", 2, (7, 8))
    assert (adoption.former.tokens, adoption.former.why) == (2, "its front end was lost")


def test_a_request_outlives_so_many_front_ends() -> None:
    kept = [Kept(opening(str(number), adoptions=number)) for number in range(4)]
    fit, unfit = may_be_adopted(kept)
    assert [each.opening.adoptions for each in fit] == list(range(MOST_ADOPTIONS))
    assert [each.opening.adoptions for each in unfit] == list(range(MOST_ADOPTIONS, 4))


@pytest.mark.parametrize("seed", range(20))
def test_a_buddy_knows_of_each_open_request_what_its_reader_has(seed: int) -> None:
    """Whatever comes in whatever order, and however often the channel breaks."""
    draw, writer, keeper = Random(seed), JournalWriter(), JournalKeeper()
    given: dict[str, list[Sampled]] = {}
    for step in range(300):
        what = draw.choice(["begin", "token", "token", "token", "end", "leave", "tell", "break"])
        key = draw.choice(list(given)) if given else ""
        if what == "begin":
            given[f"r{step}"] = [Sampled(1)] * draw.choice([0, 2])
            writer.begin(opening(f"r{step}"), given[f"r{step}"], 0.0)
        elif what == "token" and key:
            given[key].append(Sampled(step))
        elif what in ("end", "leave") and key:
            writer.end(Closing(key, "length" if what == "end" else "cancelled"))
            del given[key]
        elif what == "break" and draw.random() < 0.2:
            keeper.lose("life", 0.0)
            writer.begin_again()
        elif what == "tell":
            journal = writer.take(0.0)
            if journal is not None:
                keeper.take("life", journal, 0.0)
            known = keeper.lives.get("life", {})
            still = {key: tokens_of(kept) for key, kept in known.items() if kept.closing is None}
            assert still == {key: [each.token for each in tokens] for key, tokens in given.items()}
