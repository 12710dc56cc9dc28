"""Offers that are made again: the target is lost before it has the blocks, and another gets them in the same life."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from support.core_tables import brief, done, emitted, emptied, make_core, make_frontend, sent, table, work
from support.recovering import end_of, recovering
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from support.virtual.lives import Kill
from trinity.core import InstanceCore
from trinity.core.frontend import Abort, End
from trinity.core.instance import peers as peers_module
from trinity.core.messages import (
    Cancel,
    Commit,
    Finished,
    Forget,
    Gone,
    LayersWritten,
    Moved,
    Offer,
    PeerDown,
    PeerSuspect,
    Release,
    Sampled,
    Step,
    Submit,
    Value,
)
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import KvMode, TransferPolicy

# ---------------------------------------------------------------- the source


def prefilled(**fields: Any) -> InstanceCore:
    """P0 has prefilled r and committed it to D0."""
    core = make_core("P0", peers="D0 D1")
    core.handle(Submit(work("r", 5, **fields)), 0.0)
    core.handle(done(1, r=5), 1.0)
    return core


def test_kv_that_was_committed_goes_to_another_with_all_that_was_said() -> None:
    core = prefilled(deadline_s=9.0)
    (before,) = [lease.said for lease in core.state.outgoing.values()]
    out = core.handle(PeerDown("D0"), 3.0)
    again = ["D1: offer P0:2 kv of r [0,1] by way of P0 D0 P0", "D1: ready P0:2 0", "D1: commit P0:2 after 5"]
    assert brief(out) == again
    assert sent(out, Moved) == [Moved("r", 0, "P0", 2)]
    (commit,) = sent(out, Commit)
    assert before is not None
    assert (commit.spans, commit.tokens, commit.deadline_s) == (before.spans, before.tokens, 6.0)
    table(core, [(Cancel("r"), ["D1: cancel r"]), (Release("P0:2", "pulled"), []), (Forget("r"), [])], 4.0)
    emptied(core)


def test_features_that_were_committed_go_to_another() -> None:
    core = make_core("E0", peers="P0 P1")
    core.handle(Submit(work("r", "cat*8", 1)), 0.0)
    core.handle(done(1), 1.0)
    out = core.handle(PeerDown("P0"), 2.0)
    assert brief(out) == ["P1: offer E0:2 image of r [0,1] by way of E0 P0 E0", "P1: ready E0:2 0", "P1: commit E0:2"]
    table(core, [(Release("E0:2", "pulled"), []), (Forget("r"), [])], 3.0)
    emptied(core)


def test_features_that_are_being_encoded_are_announced_to_another_as_they_are_ready() -> None:
    core = make_core("E0", peers="P0 P1", rules=BatchRules(token_budget=64, image_budget=4))
    core.handle(Submit(work("r", "cat*4", "dog*4")), 0.0)
    core.handle(done(1), 1.0)
    rows = [
        (PeerDown("P0"), ["P1: offer E0:2 image of r [0][1] by way of E0 P0 E0", "P1: ready E0:2 0"]),
        (done(2), ["P1: ready E0:2 1", "P1: commit E0:2"]),
        (Release("E0:2", "pulled"), []),
        (Forget("r"), []),
    ]
    table(core, rows, 2.0)
    emptied(core)


def test_a_prefill_that_streams_goes_on_and_streams_to_another_from_its_next_chunk_on() -> None:
    """Chunks of eight: two blocks. What was written before goes as the second stream begins."""
    transfers = TransferPolicy(kv="layer", early=False)
    core = make_core("P0", peers="D0 D1", rules=BatchRules(token_budget=8), transfers=transfers, layers=2)
    rows = [
        (
            Submit(work("r", 22)),
            [
                "open r kv 0,1,2,3,4,5",
                "step 1 joint: prefill r 0+8",
                "D0: offer P0:1 kv of r [0,1,2,3,4,5] by way of P0",
            ],
        ),
        (LayersWritten(1, "joint", (0, 1)), ["D0: ready P0:1 0 layers 0,1 blocks 0,2"]),
        (PeerDown("D0"), []),
        (LayersWritten(1, "joint", (1, 2)), []),
        (
            done(1),
            [
                "step 2 joint: prefill r 8+8",
                "D1: offer P0:2 kv of r [0,1,2,3,4,5] by way of P0 D0 P0",
                "D1: ready P0:2 0 blocks 0,2",
            ],
        ),
        (done(2), ["D1: ready P0:2 0 blocks 2,4", "step 3 joint: prefill r 16+6 last"]),
        (
            done(3, r=5),
            ["frontend: emit r#0=5", "D1: ready P0:2 0 blocks 4,6", "D1: commit P0:2 after 5", "close r"],
        ),
        (Release("P0:2", "pulled"), []),
        (Forget("r"), []),
    ]
    table(core, rows)
    emptied(core)


def test_in_its_last_chunk_it_is_offered_as_that_ends() -> None:
    transfers = TransferPolicy(kv="grouped", early=False)
    core = make_core("P0", peers="D0 D1", transfers=transfers, layers=2)
    core.handle(Submit(work("r", 5)), 0.0)
    out = core.handle(PeerDown("D0"), 0.0)
    assert (brief(out), sent(out, Moved)) == ([], [Moved("r", 0, "P0", 2)])
    again = ["D1: offer P0:2 kv of r [0,1] by way of P0 D0 P0", "D1: ready P0:2 0", "D1: commit P0:2 after 5"]
    assert brief(core.handle(done(1, r=5), 0.0)) == ["frontend: emit r#0=5", *again, "close r"]


def second(core: InstanceCore) -> None:
    core.handle(PeerDown("D0"), 2.0)


def forgotten(core: InstanceCore) -> None:
    core.handle(Forget("r"), 2.0)


def released(core: InstanceCore) -> None:
    core.handle(Release("P0:1", "pulled"), 2.0)


@pytest.mark.parametrize(
    ("before", "fields", "lost", "gone"),
    [
        (second, {}, "D1", [Gone("r", 0, "P0", "D1", 3)]),
        (released, {}, "D0", [Gone("r", 0, "P0", "D0", 1)]),
        (forgotten, {}, "D0", []),
        (lambda core: None, {"attempt": 1}, "D0", [Gone("r", 1, "P0", "D0", 1)]),
        (lambda core: None, {}, "D1", []),
    ],
    ids=["once before", "the target has it", "it has ended", "a later life", "another is lost"],
)
def test_what_is_not_offered_again(
    before: Callable[[InstanceCore], None], fields: dict[str, Any], lost: str, gone: list[Gone]
) -> None:
    core = prefilled(**fields)
    before(core)
    out = core.handle(PeerDown(lost), 3.0)
    assert (sent(out, Gone), sent(out, Offer)) == (gone, [])


def test_without_another_the_request_goes_with_its_target() -> None:
    core = make_core("P0", peers="D0")
    core.handle(Submit(work("r", 5)), 0.0)
    core.handle(done(1, r=5), 1.0)
    assert brief(core.handle(PeerDown("D0"), 2.0)) == ["frontend: gone r with D0"]
    core.handle(Forget("r"), 3.0)
    emptied(core)


# ---------------------------------------------------------------- the front end

TO_P0, TO_D0 = Moved("r", 0, "P0", 1), Moved("r", 0, "D0", 2, 0, "P0", 0)
BACK, TO_D1 = Moved("r", 0, "P0", 3), Moved("r", 0, "D1", 4, 0, "P0", 0)
FIRST, SECOND, THIRD = (emitted(("r", 0, index, Sampled(5 + index))) for index in range(3))
WHOLE = Finished(request="r", attempt=0, reason="length", count=3, route=("E0", "P0", "D0", "P0", "D1"))
OVER = Gone("r", 0, "P0", "D0", 2)


def merges(*channels: Sequence[Value]) -> Iterator[tuple[Value, ...]]:
    if not any(channels):
        yield ()
    for number, channel in enumerate(channels):
        if channel:
            rest = (*channels[:number], channel[1:], *channels[number + 1 :])
            yield from ((channel[0], *others) for others in merges(*rest))


def ends_of(*events: Value) -> list[str]:
    core, found = make_frontend("E0 P0 D0 D1"), []
    for event in (Submit(work("r", "cat", 1, max_tokens=3)), *events):
        ends = [each for each in core.handle(event, 0.0) if isinstance(each, End)]
        found += [each.failure.error if each.failure else each.reason for each in ends]
    assert (core.entries, core.next_timer()) == ({}, None)
    return found


@pytest.mark.parametrize("heard", [[TO_D0], []], ids=["D0 had spoken", "D0 had not"])
def test_in_every_order_a_request_that_is_offered_again_is_whole_in_its_first_life(heard: list[Value]) -> None:
    orders = list(merges([TO_P0, FIRST, BACK], [*heard, PeerDown("D0")], [TO_D1, SECOND, THIRD, WHOLE]))
    assert len(orders) == (1260 if heard else 280)
    assert all(ends_of(*order) == ["length"] for order in orders)


def test_in_every_order_one_that_is_not_ends_as_both_are_heard() -> None:
    orders = list(merges([TO_P0, FIRST, OVER], [TO_D0, PeerDown("D0")]))
    assert all(ends_of(*order) == ["StageError"] for order in orders)


@pytest.mark.parametrize("source", [PeerDown("P0"), PeerSuspect("P0", 0, True)], ids=["dies", "is silent"])
def test_nobody_waits_for_a_source_that(source: Value) -> None:
    assert ends_of(TO_P0, FIRST, TO_D0, PeerDown("D0"), source) == ["StageError"]


def test_nobody_waits_for_one_with_tokens_or_that_its_reader_left() -> None:
    assert ends_of(TO_P0, FIRST, TO_D0, SECOND, PeerDown("D0")) == ["StageError"]
    assert ends_of(TO_P0, FIRST, TO_D0, Abort("r", "cancelled"), PeerDown("D0")) == ["cancelled"]


@pytest.mark.parametrize("order", list(merges([BACK], [PeerDown("D0")])), ids=["back first", "lost first"])
def test_the_death_counts_though_the_life_goes_on(order: tuple[Value, ...]) -> None:
    """Else a request that its decode instances die of would cost one more for each life."""
    core = recovering("E0 P0 D0 D1 D2")
    for event in (Submit(work("r", "cat", 1, max_tokens=3)), TO_P0, FIRST, TO_D0, *order, TO_D1):
        assert not [each for each in core.handle(event, 1.0) if isinstance(each, End)]
    assert [death.life.name for death in core.entries["r"].suspicion.deaths] == ["D0"]
    core.handle(PeerDown("D1"), 2.0)
    core.handle(Gone("r", 0, "P0", "D1", 4), 2.0)
    entry = core.entries["r"]
    assert ([death.life.name for death in entry.suspicion.deaths], entry.suspicion.row) == (["D0", "D1"], 2)
    assert entry.is_suspect(core.options.failures), "the next one is alone"


def test_a_planned_end_counts_no_death() -> None:
    core = recovering("E0 P0 D0 D1")
    for event in (Submit(work("r", "cat", 1)), TO_P0, FIRST, TO_D0, PeerDown("D0", planned=True), BACK):
        core.handle(event, 1.0)
    assert not core.entries["r"].suspicion.deaths


def test_its_end_tells_one_life_and_nothing_recomputed() -> None:
    core = recovering("E0 P0 D0 D1")
    core.handle(Submit(work("r", "cat", 1, max_tokens=3)), 0.0)
    for event in (TO_P0, FIRST, TO_D0, PeerDown("D0"), BACK, TO_D1, SECOND, THIRD):
        core.handle(event, 1.0)
    end = end_of(core.handle(WHOLE, 2.0))
    assert (end.lives, end.former, end.recomputed, end.attempts) == (1, (), 0, 1)


# ---------------------------------------------------------------- runs in virtual time

STILL = Durations(lambda *_: 0.01, lambda *_: 0.2, lambda *_: 0.3)


def run(placement: str, victim: str, at: float, kv: KvMode = "off", budget: int = 64) -> tuple[End, int, int]:
    """Its end, the positions prefilled and the images encoded."""
    settings = make_settings(
        placement,
        {"image": 64, "kv": 256},
        image_block_size=4,
        kv_block_size=4,
        layers=4,
        prefix_cache=False,
        image_cache=False,
        rules=BatchRules(token_budget=budget),
        transfers=TransferPolicy(kv=kv),
    )
    cluster = VirtualCluster(settings, durations=STILL, seed=1)
    cluster.submit(work("r", "cat", "dog", 32, max_tokens=6))
    cluster.lives.hear_all(victim, at)
    cluster.put(at, next(cluster._sequence), victim, Kill(None))
    cluster.run()
    end, tokens = cluster.outcomes["r"].end, cluster.outcomes["r"].tokens
    assert end is not None
    assert (end.reason, tokens) == ("length", [1, 2, 3, 4, 5, 6]), end
    steps = [command for _, _, command in cluster.commands if isinstance(command, Step)]
    return end, sum(row.length for step in steps for row in step.prefills), sum(len(step.encodes) for step in steps)


@pytest.mark.parametrize(
    ("placement", "victim", "kv", "budget", "first", "last"),
    [
        ("E+P+2D", "D0", "off", 64, 0.96, 1.2),
        ("2EP+2D", "D0", "off", 64, 0.66, 0.9),
        ("E+P+2D", "D0", "grouped", 16, 0.76, 1.5),
        ("E+2P+D", "P0", "off", 64, 0.06, 0.7),
    ],
)
def test_at_any_moment_of_a_transfer_the_loss_of_its_target_recomputes_nothing(
    placement: str, victim: str, kv: KvMode, budget: int, first: float, last: float
) -> None:
    """Without any cache and without any recovery: the leases alone."""
    for number in range(1 + round((last - first) / 0.05)):
        end, positions, images = run(placement, victim, first + 0.05 * number, kv, budget)
        assert (end.lives, end.recomputed, positions, images) == (1, 0, 40, 2), number


def test_without_that_rule_the_request_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "offer_again", lambda *rest: False)
    with pytest.raises(AssertionError, match="was lost"):
        run("E+P+2D", "D0", 1.0)
