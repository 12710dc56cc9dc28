"""Features whose source or holder is lost: what is here already is enough, and what another one has is asked there."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, done, emptied, holding, image_offer, lost, make_core, sent, table, work
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from support.virtual.lives import Kill
from trinity.core import InstanceCore
from trinity.core.failure_policy import FailurePolicy
from trinity.core.messages import (
    IMAGE,
    Commit,
    Fetch,
    Fetched,
    Finished,
    Forget,
    Offer,
    Part,
    PeerDown,
    PeerLoad,
    Pulled,
    Ready,
    Release,
    Send,
    Step,
    Submit,
    Work,
)
from trinity.core.migration import kv_target

CHAT = work("r", "cat", "dog", 2)


def warm(image: int = 4, kv: int = 8, of: Work = CHAT, **settings: Any) -> InstanceCore:
    """P0, whose caches have the features of ``of``, and the KV of its prompt."""
    core = make_core("P0", image=image, kv=kv, peers="E0 E1 D0", **settings)
    first = replace(of, request="before", max_tokens=1)
    core.handle(image_offer("E1:1", first, (0,), (1,)), 0.0)
    core.handle(Ready("E1:1", (0, 1)), 0.0)
    for part in range(len(of.media)):
        core.handle(Pulled("E1:1", part), 0.0)
    core.handle(Commit("E1:1"), 0.0)
    core.handle(done(1, before=5), 0.0)
    core.handle(Forget("before"), 0.0)
    return core


# ---------------------------------------------------------------- the source of an offer is lost


def test_features_that_are_all_here_need_no_commit() -> None:
    """Those of its own cache: E0 was to encode them, and had not heard of that."""
    core = warm(prefix_cache=False)
    core.handle(image_offer("E0:1", CHAT, (0,), (1,)), 1.0)
    rows = [
        (
            PeerDown("E0"),
            ["E0: release E0:1 cached", "open r kv 0,1,2 images [0][1]", "step 2 joint: prefill r 0+10 last"],
        ),
        (
            done(2, r=5),
            [
                "frontend: emit r#0=5",
                "D0: offer P0:1 kv of r [0,1,2] by way of E0 P0",
                "D0: ready P0:1 0",
                "D0: commit P0:1 after 5",
                "close r",
            ],
        ),
        (Release("P0:1", "pulled"), []),
        (Forget("r"), []),
    ]
    table(core, rows, 1.0)
    emptied(core)


def test_cached_text_that_covers_the_media_needs_no_commit() -> None:
    core = warm()
    core.handle(image_offer("E0:1", CHAT, (0,), (1,)), 1.0)
    out = brief(core.handle(PeerDown("E0"), 1.0))
    assert out[0] == "E0: release E0:1 cached"
    assert out[-1] == "step 2 joint: prefill r 8+2 last"


def test_one_that_waits_for_image_blocks_takes_those_that_are_cached() -> None:
    core = warm(image=2, prefix_cache=False)
    core.handle(image_offer("E1:2", work("s", "fox", "cow", 1), (0,), (1,)), 1.0)
    assert not core.state.image_offers, "it has both blocks"
    core.handle(image_offer("E0:1", CHAT, (0,), (1,)), 1.0)
    assert "r" in core.state.image_offers
    out = brief(core.handle(PeerDown("E0"), 1.0))
    assert out[-1].endswith("finished r error 0 by way of E0 P0 MigrationError"), "the other one's took their place"


def test_pulled_features_alone_are_believed() -> None:
    """A pull in flight may read another life of the source."""
    core = make_core("P0", peers="E0 E1 D0", prefix_cache=False)
    core.handle(image_offer("E0:1", CHAT, (0,), (1,)), 1.0)
    core.handle(Ready("E0:1", (0, 1)), 1.0)
    core.handle(Commit("E0:1"), 1.0)
    core.handle(Pulled("E0:1", 0), 1.0)
    out = core.handle(PeerDown("E0"), 1.0)
    assert sent(out, PeerLoad), "who has it next hears that the cat is here"
    assert not sent(out, Finished)
    (end,) = sent(core.handle(Pulled("E0:1", 1), 1.0), Finished)
    assert end.failure is not None
    assert end.failure.fields["cause"] == "PeerLost"
    core.handle(Forget("r"), 2.0)
    emptied(core)


@pytest.mark.parametrize("committed", [False, True])
def test_outputs_so_far_are_known_by_the_commit_alone(committed: bool) -> None:
    core = warm(prefix_cache=False)
    core.handle(image_offer("E0:1", replace(CHAT, outputs=2, attempt=1), (0,), (1,)), 1.0)
    if committed:
        core.handle(Commit("E0:1", (5, 6)), 1.0)
    out = core.handle(PeerDown("E0"), 1.0)
    assert bool(sent(out, Finished)) is not committed
    assert any(isinstance(each, Step) and each.prefills[0].length == 12 for each in out) is committed


@pytest.mark.parametrize("features", [True, False])
def test_cached_text_that_is_gone_by_its_turn_leaves_its_features_or_sends_it_round(features: bool) -> None:
    """One that goes on after a loss is ahead of it and takes all blocks. Its source, which has its inputs, is lost."""
    core = warm(kv=4, image_cache=features)
    core.handle(Submit(work("t", 3, text=50, max_tokens=1)), 1.0)
    core.handle(image_offer("E0:1", CHAT, (0,), (1,)), 1.0)
    core.handle(Commit("E0:1"), 1.0)
    assert brief(core.handle(PeerDown("E0"), 1.0)) == ["E0: release E0:1 cached"]
    core.handle(Submit(work("s", 15, text=50, max_tokens=1, attempt=1)), 1.0)
    assert brief(core.handle(done(2, t=5), 1.0))[-1] == "step 3 joint: prefill s 0+15 last"
    out = brief(core.handle(done(3, s=5), 1.0))
    if features:
        assert out[-2:] == ["open r kv 0,1,3 images [0][1]", "step 4 joint: prefill r 0+10 last"]
    else:
        assert out[-1] == "frontend: finished r preempted 0 by way of E0 P0"
        for request in "tsr":
            core.handle(Forget(request, 1), 2.0)
        emptied(core)


# ---------------------------------------------------------------- a holder lacks what it had reported


def stored(*holders: str) -> InstanceCore:
    """E0, which has heard that the first has the cat and the second the dog, and a third both."""
    core = make_core("E0", image=4, peers="P0 P1 P2", report_s=9.0)
    for name, of in zip(holders, (work("r", "cat"), work("r", "dog"), CHAT), strict=False):
        core.handle(holding(name, of, IMAGE), 0.0)
    return core


def offered(out: Any) -> list[tuple[Part, ...]]:
    return [offer.parts for offer in sent(out, Offer)]


def test_another_holder_is_asked_before_anything_is_encoded() -> None:
    core = stored("P1", "P1", "P2")
    core.handle(holding("P1", CHAT, IMAGE), 0.0)
    assert offered(core.handle(Submit(CHAT), 0.0)) == [(Part((), "P1"), Part((), "P1"))]
    out = core.handle(Release("E0:1", "missing", lacks="P1"), 1.0)
    assert offered(out) == [(Part((), "P2"), Part((), "P2"))]
    assert not [each for each in out if isinstance(each, Step)]
    out = core.handle(Release("E0:2", "missing", lacks="P2"), 2.0)
    assert brief(out) == ["step 1 joint: encode r.0 into 0, encode r.1 into 1"], "nobody else has said so"
    out = core.handle(done(1), 3.0)
    assert sent(out, Offer)[0].route == ("E0", "P0", "E0", "P1", "E0")
    core.handle(Release("E0:3", "pulled"), 4.0)
    core.handle(Forget("r"), 4.0)
    emptied(core)


def test_what_other_holders_have_is_not_encoded_again() -> None:
    core = stored("P1", "P2")
    assert offered(core.handle(Submit(CHAT), 0.0)) == [(Part((), "P1"), Part((), "P2"))]
    out = core.handle(Release("E0:1", "missing", lacks="P1"), 1.0)
    assert brief(out) == ["step 1 joint: encode r.0 into 0"]
    assert offered(core.handle(done(1), 2.0)) == [(Part((0,)), Part((), "P2"))]


def test_a_target_says_who_lacks_them_and_what_it_has_got() -> None:
    core = make_core("P0", peers="E0 P1 P2 D0", report_s=9.0)
    core.handle(replace(image_offer("E0:1", CHAT, (), ()), parts=(Part((), "P1"), Part((), "P2"))), 0.0)
    out = core.handle(Ready("E0:1", (0, 1)), 0.0)
    (cat, dog) = sent(out, Fetch)
    core.handle(Fetched(cat.id, "P1", (3,)), 0.0)
    core.handle(Pulled("E0:1", 0), 0.0)
    out = core.handle(Fetched(dog.id, "P2"), 0.0)
    assert sent(out, Release) == [Release("E0:1", "missing", lacks="P2")]
    told = [each.to for each in out if isinstance(each, Send) and isinstance(each.message, PeerLoad)]
    assert told == ["E0", "frontend"], "and the encoder hears it ahead of the Release"
    assert brief([each for each in out if not isinstance(getattr(each, "message", None), PeerLoad)])[-1:] == [
        "E0: release E0:1 missing"
    ]


@pytest.mark.parametrize("how", ["lost", "pull failed", "unknown"])
def test_who_lacks_them_is_named_however_that_shows(how: str) -> None:
    core = make_core("P0", peers="E0 D0" if how == "unknown" else "E0 P1 D0", report_s=9.0)
    core.handle(replace(image_offer("E0:1", work("r", "cat", 1), ()), parts=(Part((), "P1"),)), 0.0)
    out = core.handle(Ready("E0:1", (0,)), 0.0)
    if how == "lost":
        out = core.handle(PeerDown("P1"), 0.0)
    elif how == "pull failed":
        core.handle(Fetched(sent(out, Fetch)[0].id, "P1", (3,)), 0.0)
        out = core.handle(lost("E0:1"), 0.0)
    assert sent(out, Release)[-1] == Release("E0:1", "missing", lacks="P1")


# ---------------------------------------------------------------- runs in virtual time

STILL = Durations(lambda *_: 0.01, lambda *_: 0.2, lambda *_: 0.3)


def count_encodes(at: float, report_s: float) -> int:
    sizes = {"image_block_size": 4, "kv_block_size": 4, "report_s": report_s, "lease_s": 30.0, "heartbeat_s": report_s}
    settings = make_settings("2E+P+D", {"image": 64, "kv": 256}, **sizes)
    cluster = VirtualCluster(settings, durations=STILL, failures=FailurePolicy(), seed=1)
    cluster.submit(work("r", "cat", "dog", 32, max_tokens=6))
    cluster.lives.hear_all("E0", at)
    cluster.put(at, next(cluster._sequence), "E0", Kill(None))
    cluster.run()
    end = cluster.outcomes["r"].end
    assert end is not None
    assert (end.reason, cluster.outcomes["r"].tokens) == ("length", [1, 2, 3, 4, 5, 6])
    return sum(len(command.encodes) for _, _, command in cluster.commands if isinstance(command, Step))


@pytest.mark.parametrize("report_s", [0.1, 5.0], ids=["reports soon", "reports late"])
@pytest.mark.parametrize("at", [0.60, 0.65, 0.70])
def test_of_two_images_the_one_that_had_come_is_not_encoded_again(at: float, report_s: float) -> None:
    assert count_encodes(at, report_s) == 3


def test_unless_nobody_says_that_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_target, "tell_cached", lambda *rest: None)
    assert count_encodes(0.65, 5.0) == 4
