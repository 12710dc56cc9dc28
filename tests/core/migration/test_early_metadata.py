"""Offers ahead of encoding (vLLM encoder separation), feature prefetch (EPD-Serve 3.2), and the baseline without."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import Row, brief, broken, done, emptied, image_offer, make_core, peer_up, sent, table, work
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core.messages import (
    Cancel,
    Commit,
    Finished,
    Forget,
    Moved,
    Offer,
    PeerDown,
    Pulled,
    Ready,
    Release,
    Submit,
)
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

TWO = ("cat", 1, "dog*6", 1)
OFFER = "P0: offer E0:1 image of r [0][1,2] by way of E0"


def encoder(peers: str = "P0", **settings: Any) -> Any:
    return make_core("E0", peers=peers, transfers=TransferPolicy(), **settings)


def test_media_are_announced_as_soon_as_their_encoding_is_scheduled() -> None:
    core = encoder(rules=BatchRules(image_budget=1))
    rows: list[Row] = [
        (Submit(work("r", *TWO)), ["step 1 joint: encode r.0 into 0", OFFER]),
        (done(1), ["P0: ready E0:1 0", "step 2 joint: encode r.1 into 1,2"]),
        (done(2), ["P0: ready E0:1 1", "P0: commit E0:1"]),
        (Release("E0:1", "pulled"), []),
        (Forget("r"), []),
    ]
    table(core, rows)
    emptied(core)


def test_a_request_that_waits_for_the_encoder_is_not_announced() -> None:
    core = encoder(rules=BatchRules(image_budget=1))
    core.handle(Submit(work("x", "fox", 1)), 0.0)
    table(core, [(Submit(work("r", *TWO)), [])])
    assert brief(core.handle(done(1), 0.0))[2:] == [
        "step 2 joint: encode r.0 into 1",
        "P0: offer E0:2 image of r [1][2,3] by way of E0",
    ]


def test_whoever_shares_an_image_is_announced_with_it() -> None:
    """b, admitted while cat is being encoded for a; and c, which waits with d for a later step."""
    core = encoder(rules=BatchRules(image_budget=1))
    core.handle(Submit(work("a", "cat", "fox", 1)), 0.0)
    table(core, [(Submit(work("b", "cat", 1)), [])])
    core.handle(done(1), 0.0)
    assert brief(core.handle(done(2), 0.0))[2:] == []
    core = encoder(rules=BatchRules(image_budget=1))
    core.handle(Submit(work("c", "owl", "fox", "dog*6", 1)), 0.0)
    core.handle(Submit(work("d", "dog*6", 1)), 0.0)
    assert brief(core.handle(done(1), 0.0)) == ["P0: ready E0:1 0", "step 2 joint: encode c.1 into 1"]
    assert "d" in core.state.encoding, "d waits for what c will encode"
    offer = "P0: offer E0:2 image of d [2,3] by way of E0"
    assert brief(core.handle(done(2), 0.0)) == ["P0: ready E0:1 1", "step 3 joint: encode c.2 into 2,3", offer]
    commits = ["P0: ready E0:1 2", "P0: commit E0:1", "P0: ready E0:2 0", "P0: commit E0:2"]
    assert brief(core.handle(done(3), 0.0)) == commits


def test_a_cached_image_beside_one_to_encode_is_ready_with_the_offer() -> None:
    core = encoder()
    core.handle(Submit(work("x", "cat", 1)), 0.0)
    core.handle(done(1), 0.0)
    assert brief(core.handle(Submit(work("r", *TWO)), 0.0)) == [
        "step 2 joint: encode r.1 into 1,2",
        "P0: offer E0:2 image of r [0][1,2] by way of E0",
        "P0: ready E0:2 0",
    ]


def test_an_encode_that_fails_withdraws_what_was_announced() -> None:
    core = encoder()
    core.handle(Submit(work("r", *TWO)), 0.0)
    table(
        core, [(broken(1, "r"), ["P0: withdraw E0:1 StageError"]), (Release("E0:1", "failed"), []), (Forget("r"), [])]
    )
    emptied(core)


def test_a_cancel_during_the_encoding_goes_on_to_the_target_which_reports_it() -> None:
    core = encoder()
    core.handle(Submit(work("r", *TWO)), 0.0)
    table(core, [(Cancel("r"), ["P0: cancel r"]), (Release("E0:1", "cancelled"), []), (done(1), []), (Forget("r"), [])])
    emptied(core)


def test_a_target_that_is_lost_or_gives_up_during_the_encoding_ends_the_request() -> None:
    nowhere = ["frontend: finished r error 0 by way of E0 P0 E0 MigrationError"]  # no other is up just now
    for event, told in ((PeerDown("P0"), nowhere), (Release("E0:1", "failed"), [])):
        core = encoder()
        core.handle(Submit(work("r", *TWO)), 0.0)
        table(core, [(event, []), (done(1), told), (Forget("r"), [])])
        emptied(core)


def test_no_target_with_room_is_an_error_once_the_step_has_ended() -> None:
    core = encoder(peers="")
    core.handle(peer_up("P0", image=0), 0.0)
    table(core, [(Submit(work("r", "cat", 1)), ["step 1 joint: encode r.0 into 0"])])
    out = core.handle(done(1), 0.0)
    assert brief(out) == ["frontend: finished r error 0 by way of E0 RequestTooLarge"]
    emptied(core)


def test_the_front_end_learns_from_the_target_where_the_request_is() -> None:
    target = make_core("P0", peers="E0 D0", epoch=3)
    early = encoder()
    commands = early.handle(Submit(work("r", *TWO)), 0.0)
    (offer,) = sent(commands, Offer)
    assert not sent(commands, Moved)
    offer = replace(offer, target_epoch=3)
    assert sent(target.handle(offer, 0.0), Moved) == [Moved("r", 0, "P0", 1, epoch=3)]


def test_without_prefetch_nothing_is_announced_before_all_is_ready() -> None:
    core = make_core("E0", peers="P0", rules=BatchRules(image_budget=1), transfers=TransferPolicy(prefetch=False))
    core.handle(Submit(work("x", "cat", 1)), 0.0)
    core.handle(done(1), 0.0)
    core.handle(Submit(work("r", *TWO, "fox", 1)), 0.0)
    assert brief(core.handle(done(2), 0.0)) == ["step 3 joint: encode r.2 into 3"]
    assert brief(core.handle(done(3), 0.0)) == [
        "P0: offer E0:2 image of r [0][1,2][3] by way of E0",
        "P0: ready E0:2 0,1,2",
        "P0: commit E0:2",
    ]


def test_without_prefetch_the_target_pulls_for_one_request_at_a_time_with_nobody_ahead() -> None:
    core = make_core("P0", peers="D0", transfers=TransferPolicy(prefetch=False), prefix_cache=False)
    for number, name in enumerate("ab", start=1):
        core.handle(image_offer(f"E0:{number}", work(name, f"{name}*4", 1), (number,)), 0.0)
        core.handle(Commit(f"E0:{number}"), 0.0)
    rows: list[Row] = [
        (Ready("E0:1", (0,)), ["pull E0:1.0 image of a from E0 1 into 0"]),
        (Ready("E0:2", (0,)), []),
        (
            Pulled("E0:1", 0),
            ["E0: release E0:1 pulled", "open a kv 0,1 images [0]", "step 1 joint: prefill a 0+5 last"],
        ),
    ]
    table(core, rows)
    assert brief(core.handle(done(1, a=5), 0.0))[-1] == "pull E0:2.0 image of b from E0 2 into 1"


def test_with_prefetch_the_features_of_the_next_move_while_the_first_is_prefilled() -> None:
    core = make_core("P0", peers="D0", transfers=TransferPolicy(), prefix_cache=False)
    for number, name in enumerate("ab", start=1):
        core.handle(image_offer(f"E0:{number}", work(name, f"{name}*4", 1), (number,)), 0.0)
        core.handle(Ready(f"E0:{number}", (0,)), 0.0)
    assert core.state.requests["b"].pulls_in_flight == 1


def test_what_cached_kv_covers_does_not_move_and_the_report_says_so() -> None:
    core = make_core("P0", peers="D0")
    for number, request in enumerate([work("a", "cat", 5), work("b", "cat", 5)], start=1):
        core.handle(image_offer(f"E0:{number}", request, (5,)), 0.0)
        if number == 1:
            for event in (Ready("E0:1", (0,)), Pulled("E0:1", 0), Commit("E0:1"), done(1, a=5)):
                core.handle(event, 0.0)
    out = brief(core.handle(Commit("E0:2"), 0.0))
    assert out[:1] == ["E0: release E0:2 cached"]
    assert core.state.requests["b"].transfers == [
        {"kind": "image", "source": "E0", "target": "P0", "outcome": "cached", "bytes": 0, "blocks": 0, "seconds": 0.0}
    ]


@pytest.mark.parametrize("chosen", [TransferPolicy(), TransferPolicy(early=False), TransferPolicy(prefetch=False)])
@pytest.mark.parametrize("placement", ["E+P+D", "2E1P1D", "3E1PD", "2ED1P", "1E1EPD"])
def test_encoders_far_slower_than_prefill_starve_nobody(placement: str, chosen: TransferPolicy) -> None:
    """Pools of one request each: what several encoders announce early must not hold each other up (rule 4)."""
    rules = BatchRules(token_budget=64, image_budget=1)
    settings = make_settings(
        placement,
        {"image": 3, "kv": 4},
        image_block_size=4,
        kv_block_size=4,
        rules=rules,
        transfers=chosen,
        image_cache=False,
    )
    slow = Durations(step=lambda draw, name, step: draw.uniform(0.0, 9.0) if step.encodes else 0.01)
    cluster = VirtualCluster(settings, durations=slow)
    for number in range(8):
        cluster.submit(work(f"r{number}", *(f"{number}{item}*4" for item in "abc"), 1, max_tokens=4), at=number * 0.1)
    cluster.run()
    ends = [outcome.end for outcome in cluster.outcomes.values() if outcome.end]
    assert [end.reason for end in ends] == ["length"] * 8


def test_prefetch_takes_transfers_out_of_the_way_of_the_first_token() -> None:
    """Quick encoding, a second for each pull and each prefill: the baseline has them all behind one another."""
    still = Durations(lambda *_: 0.0, lambda draw, name, step: 0.1 if step.encodes else 1.0, lambda *_: 1.0)
    first: dict[TransferPolicy, float] = {}
    for chosen in (TransferPolicy(), TransferPolicy(prefetch=False)):
        pools = {"image": 9, "kv": 9}
        cluster = VirtualCluster(
            make_settings("E+P+D", pools, image_block_size=4, kv_block_size=4, transfers=chosen), durations=still
        )
        for number in range(2):
            cluster.submit(work(f"r{number}", f"a{number}*4", 1, text=100 * number))
        cluster.run()
        first[chosen] = cluster.outcomes["r1"].times[0]
    assert first[TransferPolicy()] == pytest.approx(3.1)
    assert first[TransferPolicy(prefetch=False)] == pytest.approx(4.1)


def test_the_end_of_a_request_before_its_commit_is_told_once() -> None:
    """Deadlines and cancels at every instant of a slow encoding; ``Conversation`` counts each Finished."""
    slow = Durations(step=lambda draw, name, step: 1.0, message=lambda draw, *_: draw.uniform(0.0, 0.7))
    settings = make_settings(
        "2E1P1D", {"image": 6, "kv": 8}, image_block_size=4, kv_block_size=4, rules=BatchRules(image_budget=1)
    )
    cluster = VirtualCluster(settings, durations=slow, seed=3)
    for number in range(40):
        cluster.submit(work(f"r{number}", "a*4", f"{number}*4", 1, text=100 * number))
        cluster.abort(f"r{number}", at=number * 0.1)
    cluster.run()
    finished = sent([command for _, _, command in cluster.commands], Finished)
    assert len({each.request for each in finished}) == len(finished) == 40


def test_one_that_finds_no_prefill_instance_ends_once_though_it_waits_for_the_same_image_twice() -> None:
    """It has no row in the step that encodes for another one, so that it is gone at once."""
    core = encoder(image=12, rules=BatchRules(image_budget=1))
    for request, media in {"a": ("fox", "dog", "cat"), "b": ("cat",), "r": ("cat", "cat")}.items():
        core.handle(Submit(work(request, *media, 1)), 0.0)
    core.handle(done(1), 1.0)
    core.handle(PeerDown("P0"), 2.0)
    out = [*core.handle(done(2), 3.0), *core.handle(done(3), 4.0)]
    assert sorted(each.request for each in sent(out, Finished)) == ["a", "b", "r"]
    core.handle(Forget("a"), 5.0)
    emptied(core)
