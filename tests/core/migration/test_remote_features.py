"""The multimodal store: features that another instance has are not encoded again, and what happens when it has not."""

from __future__ import annotations

from collections import Counter
from math import inf
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, done, emptied, holding, image_offer, lost, make_core, sent, table, work
from support.scenarios import random_durations, random_faults
from support.virtual.cluster import VirtualCluster, make_settings
from trinity.core import InstanceCore
from trinity.core.messages import (
    IMAGE,
    Cancel,
    Commit,
    Encode,
    Fetch,
    Fetched,
    Finished,
    Forget,
    Moved,
    Offer,
    Part,
    PeerDown,
    Pull,
    Pulled,
    Ready,
    Release,
    Send,
    Step,
    Submit,
    Tick,
    Work,
)
from trinity.core.prefix_cache import media_keys
from trinity.core.transfers import TransferPolicy

STILL: dict[str, Any] = {"lease_s": 10.0, "report_s": inf}
CAT = tuple(media_keys(work("r", "cat*4").media[0], 4))


def encoder(asked: Work, holder: str = "P1") -> InstanceCore:
    """E0, which has heard that ``holder`` has the images of ``asked``."""
    core = make_core("E0", image=2, peers="P0 P1", **STILL)
    core.handle(holding(holder, asked, IMAGE), 0.0)
    return core


def stored_offer(request: str = "r", holder: str = "P1") -> Offer:
    return Offer(
        id="E0:1",
        kind="image",
        source="E0",
        work=work(request, 1, "cat*4"),
        parts=(Part((), holder),),
        route=("E0",),
    )


# ---------------------------------------------------------------- the encode instance


def test_an_image_that_another_instance_has_is_offered_at_once_and_nothing_is_reserved() -> None:
    asked = work("r", 1, "cat*4")
    core = encoder(asked)
    commands = core.handle(Submit(asked, ("pixels",)), 1.0)
    (offer,) = sent(commands, Offer)
    assert offer.parts == (Part((), "P1"),)
    assert brief(commands)[1:] == ["P0: ready E0:1 0", "P0: commit E0:1"]
    assert core.state.pools["image"].held == 0
    core.handle(Release("E0:1", "pulled"), 2.0)
    core.handle(Forget("r"), 2.0)
    emptied(core)


def test_of_two_images_the_other_one_is_encoded_first() -> None:
    core = encoder(work("x", "cat*4"))
    commands = core.handle(Submit(work("r", "cat*4", "dog*4", 1)), 1.0)
    assert brief(commands) == ["step 1 joint: encode r.1 into 0"]
    (offer,) = sent(core.handle(done(1), 2.0), Offer)
    assert offer.parts == (Part((), "P1"), Part((0,)))


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("E0", {"peers": "P0 P1", "transfers": TransferPolicy(store=False)}),
        ("E0", {"peers": "P0"}),
        ("EP0", {"peers": "P1"}),
    ],
    ids=["switched off", "nobody has it", "an instance that prefills too"],
)
def test_otherwise_it_is_encoded(name: str, named: dict[str, Any]) -> None:
    core, asked = make_core(name, **named), work("r", 1, "cat*4")
    core.handle(holding("P1", asked, IMAGE), 0.0)
    assert brief(core.handle(Submit(asked), 1.0))[0] == "step 1 joint: encode r.0 into 0"


def test_what_is_cached_here_is_offered_from_here() -> None:
    asked = work("r", 1, "cat*4")
    core = make_core("E0", peers="P0 P1")
    core.handle(Submit(asked), 0.0)
    core.handle(done(1), 0.0)
    core.handle(holding("P1", asked, IMAGE), 1.0)
    (offer,) = sent(core.handle(Submit(work("s", 2, "cat*4")), 2.0), Offer)
    assert offer.parts == (Part((0,)),)


def test_what_has_gone_is_encoded_after_all() -> None:
    asked = work("r", 1, "cat*4", deadline_s=9.0)
    core = encoder(asked)
    core.handle(Submit(asked, ("pixels",)), 1.0)
    commands = core.handle(Release("E0:1", "missing"), 2.0)
    (step,) = [each for each in commands if isinstance(each, Step)]
    assert sent(commands, Moved) == [Moved("r", 0, "E0", 2)]
    assert [row.inputs for row in step.encodes] == ["pixels"]
    assert core.next_timer() == 10.0, "its deadline is the same"
    (offer,) = sent(core.handle(done(1), 3.0), Offer)
    assert (offer.id, offer.parts, offer.route) == ("E0:2", (Part((0,)),), ("E0", "P0", "E0"))


def test_a_cancel_that_crosses_what_is_given_back_is_the_end_of_it() -> None:
    asked = work("r", 1, "cat*4")
    core = encoder(asked)
    core.handle(Submit(asked), 1.0)
    rows = [
        (Cancel("r"), ["P0: cancel r"]),
        (Release("E0:1", "missing"), ["frontend: finished r cancelled 0 by way of E0 P0 E0"]),
        (Forget("r"), []),
    ]
    table(core, rows, 2.0)
    emptied(core)


@pytest.mark.parametrize("event", [Forget("r"), PeerDown("P0"), Tick()], ids=["forgotten", "target lost", "lease"])
def test_nothing_is_kept_of_it_longer_than_its_offer(event: Any) -> None:
    asked = work("r", 1, "cat*4")
    core = encoder(asked)
    core.handle(Submit(asked), 1.0)
    core.handle(event, 11.0)
    assert not core.state.skipped_encodes
    core.handle(Release("E0:1", "missing"), 12.0)
    core.handle(Forget("r"), 12.0)
    emptied(core)


@pytest.mark.parametrize("late", [Release("E0:1", "pulled"), Tick()], ids=["released late", "taken back"])
def test_the_lease_of_a_former_attempt_takes_nothing_from_the_one_that_follows(late: Any) -> None:
    """Preempted elsewhere and sent again: its second offer names a holder too, and that has the image no more."""
    asked = work("r", 1, "cat*4")
    core = encoder(asked)
    core.handle(Submit(asked, ("pixels",)), 1.0)
    again = replace(asked, attempt=1, outputs=1)
    assert brief(core.handle(Submit(again, ("pixels",), tokens=(7,)), 6.0))[0].startswith("P1: offer E0:2")
    core.handle(late, 12.0)
    assert brief(core.handle(Release("E0:2", "missing"), 12.5)) == ["step 1 joint: encode r.0 into 0"]
    assert core.state.requests["r"].tokens == [7]


# ---------------------------------------------------------------- the holder


def holder() -> InstanceCore:
    """P1 with the image "cat" cached in block 0."""
    core = make_core("P1", image=1, peers="P0 D0 E0", **STILL)
    core.handle(image_offer("E0:1", work("x", "cat*4", 1, max_tokens=1), (0,)), 0.0)
    for event in (Ready("E0:1", (0,)), Commit("E0:1"), Pulled("E0:1", 0), done(1, x=5), Forget("x")):
        core.handle(event, 0.0)
    emptied(core)
    return core


def test_a_holder_leases_what_it_has_until_release() -> None:
    core = holder()
    commands = core.handle(Fetch("E0:7/0", "P0", IMAGE, CAT), 1.0)
    assert commands == [Send("P0", Fetched("E0:7/0", "P1", (0,), 0))]
    assert core.state.pools["image"].held == 1
    assert not core.idle()
    core.handle(Release("E0:7/0", "pulled"), 2.0)
    emptied(core)


def test_a_holder_says_what_has_gone() -> None:
    keys = tuple(media_keys(work("r", "dog*4").media[0], 4))
    assert holder().handle(Fetch("E0:7/0", "P0", IMAGE, keys), 1.0) == [Send("P0", Fetched("E0:7/0", "P1", (), 0))]


def test_a_holder_takes_back_what_is_never_released() -> None:
    core = holder()
    core.handle(Fetch("E0:7/0", "P0", IMAGE, CAT), 1.0)
    assert brief(core.handle(Tick(), 11.0)) == ["P0: withdraw E0:7/0 MigrationError"], "no request of its own ends"
    assert core.handle(Release("E0:7/0", "pulled"), 12.0) == []
    emptied(core)


# ---------------------------------------------------------------- the target


def target() -> InstanceCore:
    """P0, to which the request was offered; it has asked P1."""
    core = make_core("P0", image=1, peers="P1 D0 E0", **STILL)
    core.handle(stored_offer(), 0.0)
    commands = core.handle(Ready("E0:1", (0,)), 0.0)
    assert commands == [Send("P1", Fetch("E0:1/0", "P0", IMAGE, CAT))]
    core.handle(Commit("E0:1"), 0.0)
    return core


def gave_up(commands: Any) -> bool:
    """It ended the offer and did not end the request; its source will tell the front end where that is."""
    assert not sent(commands, Moved)
    assert not sent(commands, Finished)
    return replace(sent(commands, Release)[-1], lacks="") == Release("E0:1", "missing")


def test_a_target_pulls_from_the_holder_and_releases_both() -> None:
    core = target()
    commands = core.handle(Fetched("E0:1/0", "P1", (4,), 3), 1.0)
    assert commands == [Pull("E0:1", 0, "P1", IMAGE, "r", (4,), (0,), 3)]
    record = {"kind": "image", "source": "P1", "outcome": "pulled", "bytes": 64}
    commands = core.handle(Pulled("E0:1", 0, None, record), 2.0)
    assert brief(commands)[:2] == ["P1: release E0:1/0 pulled", "E0: release E0:1 pulled"]
    assert core.state.requests["r"].transfers == [{**record, "outcome": "store"}]


def test_where_the_target_has_them_itself_nothing_moves() -> None:
    core = make_core("P0", image=1, peers="P1 D0 E0")
    core.handle(image_offer("E0:0", work("x", "cat*4", 1, max_tokens=1), (0,)), 0.0)
    for event in (Ready("E0:0", (0,)), Commit("E0:0"), Pulled("E0:0", 0), done(1, x=5), Forget("x")):
        core.handle(event, 0.0)
    core.handle(stored_offer(holder="P0"), 1.0)
    core.handle(Ready("E0:1", (0,)), 1.0)
    assert sent(core.handle(Commit("E0:1"), 1.0), Release) == [Release("E0:1", "cached")]
    (record,) = core.state.requests["r"].transfers
    assert (record["outcome"], record["source"], record["bytes"]) == ("store", "P0", 0)


def test_what_has_gone_is_given_back_before_anybody_encodes() -> None:
    core = target()
    assert core.state.pools["image"].held == 1
    commands = core.handle(Fetched("E0:1/0", "P1"), 1.0)
    assert gave_up(commands)
    assert core.state.pools["image"].held == 0
    table(core, [(Cancel("r"), ["E0: cancel r"]), (Forget("r"), [])])
    emptied(core)


@pytest.mark.parametrize("how", ["itself", "unknown"])
def test_a_holder_that_cannot_be_asked_has_nothing(how: str) -> None:
    core = make_core("P0", image=1, peers="D0 E0")
    core.handle(stored_offer(holder="P0" if how == "itself" else "P9"), 0.0)
    assert gave_up(core.handle(Ready("E0:1", (0,)), 0.0))


def test_a_lost_holder_and_a_silent_one_have_nothing() -> None:
    assert gave_up(target().handle(PeerDown("P1"), 1.0))
    core = target()
    core.handle(holding("E0", work("q")), 9.0)
    assert gave_up(core.handle(Tick(), 10.0))
    assert core.handle(Fetched("E0:1/0", "P1", (4,)), 11.0) == [Send("P1", Release("E0:1/0", "cancelled"))]
    core.handle(Forget("r"), 11.0)
    emptied(core)


def test_a_pull_that_fails_is_no_failure_of_the_request() -> None:
    core = target()
    core.handle(Fetched("E0:1/0", "P1", (4,)), 1.0)
    commands = core.handle(lost("E0:1"), 2.0)
    assert sent(commands, Release)[0] == Release("E0:1/0", "failed")
    assert gave_up(commands)
    core.handle(Forget("r"), 2.0)
    emptied(core)


def test_a_pull_from_a_holder_that_is_lost_meanwhile_is_not_believed() -> None:
    """It may have read the holder's next life: its end comes behind the news of the loss."""
    core = target()
    core.handle(Fetched("E0:1/0", "P1", (4,)), 1.0)
    assert core.handle(PeerDown("P1"), 2.0) == [], "a pull is in flight"
    assert gave_up(core.handle(Pulled("E0:1", 0), 3.0))
    core.handle(Forget("r"), 3.0)
    emptied(core)


def test_a_cancel_before_the_answer_and_the_answer_after_it() -> None:
    core = target()
    assert [each.reason for each in sent(core.handle(Cancel("r"), 1.0), Finished)] == ["cancelled"]
    assert not core.idle()
    assert core.handle(Fetched("E0:1/0", "P1", (4,)), 2.0) == [Send("P1", Release("E0:1/0", "cancelled"))]
    core.handle(Forget("r"), 2.0)
    emptied(core)


def test_a_cancel_while_it_gives_up_is_the_end() -> None:
    """One image is on its way from E when the other turns out to be gone."""
    core = make_core("P0", image=2, peers="P1 D0 E0", **STILL)
    both = work("r", "cat*4", "dog*4", 1)
    core.handle(Offer(id="E0:1", kind="image", source="E0", work=both, parts=(Part((), "P1"), Part((3,)))), 0.0)
    core.handle(Ready("E0:1", (0, 1)), 0.0)
    assert core.handle(Fetched("E0:1/0", "P1"), 1.0) == [], "a pull is in flight"
    assert core.handle(Cancel("r"), 2.0) == []
    (finished,) = sent(core.handle(Pulled("E0:1", 1), 3.0), Finished)
    assert finished.reason == "cancelled"


# ---------------------------------------------------------------- all of them together

PLACES = ("2E2P1D", "3E1P1D", "1E3P2D", "2ED2P", "2E1EP1P1D")


def store_cluster(seed: int) -> VirtualCluster:
    """Few images, many requests over a while, small pools: digests are often right, and often not any more."""
    draw = Random(seed)
    restless = draw.random() < 0.3
    configured = make_settings(
        draw.choice(PLACES),
        {"image": draw.choice([2, 3, 4, 6]), "kv": draw.choice([8, 30])},
        image_block_size=4,
        kv_block_size=4,
        prefix_cache=False,
        lease_s=draw.choice([0.5, 2.0]) if restless else 60.0,
        report_s=draw.choice([0.05, 0.3]),
        heartbeat_s=draw.choice([0.2, 1.0]),
    )
    faults = random_faults(draw) if restless else None
    cluster = VirtualCluster(configured, durations=random_durations(draw), faults=faults, seed=seed)
    for number in range(draw.choice([6, 12, 20])):
        images = [f"image{draw.randint(0, 3)}*4" for _ in range(draw.choice([1, 1, 2]))]
        at = draw.uniform(0.0, 8.0)
        cluster.submit(work(f"r{number}", *images, 1, text=100 * number, max_tokens=draw.choice([1, 3])), at)
        if draw.random() < 0.15:
            cluster.abort(f"r{number}", at + draw.uniform(0.0, 0.5), draw.choice(["cancelled", "stop"]))
    if restless:
        for name in draw.sample(list(cluster.cores), 2):
            cluster.freeze(name, draw.uniform(0.0, 6.0), draw.choice([0.2, 3.0]))
    return cluster


@pytest.mark.slow
def test_every_interleaving_of_the_store_keeps_the_invariants() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        cluster = store_cluster(seed)
        try:
            cluster.run(100_000)
        except BaseException as error:
            error.add_note(f"store_cluster({seed})")
            raise
        for _, _, command in cluster.commands:
            message = command.message if isinstance(command, Send) else command
            if isinstance(message, Release):
                seen["from a holder" if "/" in message.id else message.outcome] += 1
            elif isinstance(message, Fetched):
                seen["held" if message.blocks else "gone"] += 1
    wanted = {"held", "gone", "missing", "from a holder", "pulled", "cached"}
    assert not {each for each in wanted if seen[each] < 2}, seen


def encodes(cluster: VirtualCluster) -> int:
    steps = [command for _, _, command in cluster.commands if isinstance(command, Step)]
    return sum(isinstance(row, Encode) for step in steps for row in step.encodes)


@pytest.mark.parametrize(("store", "count"), [(True, 1), (False, 2)])
def test_one_image_at_two_encoders_is_encoded_once(store: bool, count: int) -> None:
    configured = make_settings(
        "2E2P1D",
        {"image": 8, "kv": 40},
        image_block_size=4,
        kv_block_size=4,
        report_s=0.1,
        heartbeat_s=0.3,
        transfers=TransferPolicy(store=store),
    )
    cluster = VirtualCluster(configured)
    for number in range(6):
        cluster.submit(work(f"r{number}", 1, "cat*8", text=100 * number), at=float(number))
    cluster.run()
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}
    assert encodes(cluster) == count
