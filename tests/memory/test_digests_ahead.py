"""Blocks that went ahead of a decode that moves: their digests are not computed again, and nothing else is trusted."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from memory.test_digests import Ends, offer, pull
from trinity.core.messages import Forget, PeerDown, Ready, Release, Send
from trinity.errors import IntegrityError
from trinity.memory.native import compute_digests


def went_ahead(to: str = "D0", outcome: str = "pulled", blocks: tuple[int, ...] = (1, 2)) -> Ends:
    """Blocks of request r that its target has in its cache, and the offer of the decode itself."""
    copy = replace(offer(parts=(blocks,)), moves=True, copies=True)
    ends = Ends(copy)
    ends.tell(Ready("P0:1", (0,)))
    ends.check(ends.arrive(pull(source=blocks)))
    ends.source.add_digests(Send("D0", Release("P0:1", outcome)), [])  # what it says itself is of its own sources
    ends.source.observe(Release("P0:1", outcome))
    ends.source.observe(PeerDown("D9"))
    moves = replace(offer(number=2), moves=True)
    sent = ends.source.add_digests(Send(to, moves), ["P0:2"])
    ends.target.observe(sent)
    return ends


def ready_of(ends: Ends) -> tuple[int, ...]:
    sent = ends.tell(Ready("P0:2", (0,)))
    assert isinstance(sent, Ready)
    return sent.digests


def test_what_went_ahead_of_a_decode_is_not_summed_up_again() -> None:
    ends = went_ahead()
    assert ready_of(ends) == tuple(compute_digests(ends.ours["kv"].tensor, [5]))
    ends.check(ends.arrive(replace(pull(source=(5,)), offer="P0:2")))


def test_a_target_that_has_lost_what_went_ahead_cannot_pull_it_unseen() -> None:
    """Nothing that is not compared is ever taken: the decode stays where it is."""
    ends = went_ahead()
    ready_of(ends)
    asked = ends.arrive(replace(pull(source=(2, 5)), offer="P0:2"))
    with pytest.raises(IntegrityError, match="sent 1 digests for 2 blocks"):
        ends.check(asked)


@pytest.mark.parametrize(
    "told",
    [{"outcome": "failed"}, {"outcome": "refused"}, {"to": "D1"}, {"blocks": (1, 3)}, {"blocks": (1, 2, 5, 6)}],
    ids=str,
)
def test_of_what_did_not_arrive_or_is_not_the_same_all_is_summed_up(told: dict[str, Any]) -> None:
    assert len(ready_of(went_ahead(**told))) == 3


@pytest.mark.parametrize("news", [Forget("r", 0), PeerDown("D0")], ids=str)
def test_what_went_ahead_is_forgotten_with_its_request_or_its_target(news: Forget | PeerDown) -> None:
    ends = went_ahead()
    ends.source.observe(news)
    ends.source.add_digests(Send("D0", replace(offer(number=3), moves=True)), ["P0:3"])
    sent = ends.source.add_digests(Send("D0", Ready("P0:3", (0,))), ["P0:3"])
    assert isinstance(sent, Ready)
    assert len(sent.digests) == 3


def test_it_holds_for_one_move_alone() -> None:
    ends = went_ahead()
    assert len(ready_of(ends)) == 1
    ends.tell(replace(offer(number=3), moves=True))
    sent = ends.tell(Ready("P0:3", (0,)))
    assert isinstance(sent, Ready)
    assert len(sent.digests) == 3


def test_the_rows_of_a_last_block_keep_their_digest() -> None:
    ends = went_ahead()
    ends.tell(replace(offer(number=3, tails=(2,)), moves=True))
    sent = ends.tell(Ready("P0:3", (0,)))
    assert isinstance(sent, Ready)
    ends.check(ends.arrive(replace(pull(source=(5,), tail=2), offer="P0:3")))
