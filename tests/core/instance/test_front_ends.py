"""Several front ends of one instance: who hears what, what a loss ends, what is refused, and which request is older."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import (
    brief,
    done,
    emitted,
    emptied,
    image_offer,
    kv_offer,
    make_core,
    peer_up,
    sent,
    table,
    work,
)
from support.recovering import recovering
from support.virtual.checks import check_state
from trinity.core import InstanceCore
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import FrontendCore, FrontendOptions
from trinity.core.frontend.messages import MoveRequest
from trinity.core.frontend.suspicion import Death, Life
from trinity.core.instance.front_ends import lose_frontend
from trinity.core.instance.instance_core import RepeatedStep
from trinity.core.messages import (
    Finished,
    Forget,
    Move,
    Moved,
    NotMoved,
    PeerDown,
    PeerLoad,
    PeerReserved,
    Release,
    Sampled,
    Send,
    Stepped,
    Submit,
    Tick,
    Work,
)
from trinity.core.routing.router import RoundRobin
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.core.values import (
    FRONTEND,
    FrontendUp,
    LifeNames,
    NotTaken,
    check_owner,
    is_frontend,
    name_help,
    name_life,
    read_help,
)

OTHER = "frontend:b"


def shared(name: str, **settings: Any) -> InstanceCore:
    """An instance in touch with two front ends."""
    core = make_core(name, **settings)
    core.handle(FrontendUp(OTHER), 0.0)
    return core


def ask(name: str, *pieces: int | str, owner: str = OTHER, **fields: Any) -> Work:
    return work(name, *pieces, owner=owner, **fields)


# ---------------------------------------------------------------- who hears what


def serve(core: InstanceCore, token: int = 1) -> list[str]:
    """The running step ends with this token for every row. Returns what the instance answers."""
    step = core.state.lanes["joint"][0].step
    rows = [*(row.request for row in step.prefills if row.last), *step.decodes]
    out = core.handle(Stepped(step.id, "joint", dict.fromkeys(rows, Sampled(token))), 0.0)
    check_state(core.state)
    return brief(out)


def test_each_front_end_hears_of_its_own_requests_alone() -> None:
    core = shared("PD0")
    core.handle(Submit(work("a", 2, max_tokens=3)), 0.0)
    core.handle(Submit(ask("b", 3, max_tokens=3)), 0.0)
    assert serve(core, 5)[0] == "frontend: emit a#0=5"
    assert serve(core, 6)[:2] == [f"{OTHER}: emit b#0=6", "frontend: emit a#1=6"], "a first token beside a later one"
    assert serve(core, 7) == [
        *("frontend: emit a#2=7", f"{OTHER}: emit b#1=7"),
        *("frontend: finished a length 3 by way of PD0", "close a", "step 4 joint: decode b"),
    ], "tokens go ahead of the ends that they bring about"
    assert serve(core, 8) == [f"{OTHER}: emit b#2=8", f"{OTHER}: finished b length 3 by way of PD0", "close b"]
    emptied(core)


def test_a_step_that_repeats_is_answered_to_each_owner() -> None:
    core = shared("PD0", kv=99)
    for each in (work("a", 2, max_tokens=40), ask("b", 2, max_tokens=40), work("c", 2, max_tokens=40)):
        core.handle(Submit(each), 0.0)
    for _ in range(4):
        serve(core)
    assert isinstance(core._repeated, RepeatedStep)
    assert serve(core, 4) == ["frontend: emit a#4=4 c#3=4", f"{OTHER}: emit b#3=4", "step 6 joint: decode a b c"]
    core.handle(PeerDown(OTHER), 0.0)
    serve(core)
    assert serve(core) == ["frontend: emit a#6=1 c#5=1", "step 8 joint: decode a c"]


def test_words_of_where_a_request_is_go_to_its_owner() -> None:
    target = shared("D0", peers="P0")
    out = target.handle(kv_offer("P0:1", ask("r", 3), (0,)), 0.0)
    assert [each.to for each in out if isinstance(each, Send) and isinstance(each.message, Moved)] == [OTHER]
    out = target.handle(Move("r", 0, "D1", OTHER), 0.0)
    assert [each.to for each in out if isinstance(each, Send) and isinstance(each.message, NotMoved)] == [OTHER]


def test_a_front_end_that_asks_for_a_move_is_answered_by_one_that_has_not_the_request() -> None:
    core = FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY), name=OTHER)
    for peer in ("PD0", "PD1"):
        core.handle(peer_up(peer), 0.0)
    core.handle(Submit(work("r", 3)), 0.0)
    life = "r~frontend:b.1.0"
    assert core.lives[life].work.owner == OTHER
    core.handle(emitted((life, 0, 0, Sampled(1))), 0.0)
    (asked,) = sent(core.handle(MoveRequest("r", "PD1"), 0.0), Move)
    assert brief(shared("PD0", peers="PD1").handle(asked, 0.0)) == [f"{OTHER}: not moved {life} not decoding"]


def test_the_loss_of_a_target_is_said_to_the_owner() -> None:
    core = shared("P0", peers="D0")
    core.handle(Submit(ask("r", 3)), 0.0)
    core.handle(done(1, r=5), 0.0)
    assert [line for line in brief(core.handle(PeerDown("D0"), 1.0)) if "gone" in line] == [f"{OTHER}: gone r with D0"]


def test_load_reports_go_to_all_and_one_that_comes_gets_one_at_once() -> None:
    core = make_core("PD0", report_s=0.1)
    core.handle(Submit(work("a", 2, number=7)), 0.0)
    assert brief(core.handle(FrontendUp(OTHER), 0.05)) == [f"{OTHER}: load up to 7"]
    assert brief(core.handle(FrontendUp(OTHER), 0.05)) == [], "it is known"
    found = [line for line in brief(core.handle(Tick(), 2.0)) if "load" in line]
    assert found == ["frontend: load up to 7", f"{OTHER}: load up to 7"]
    core.handle(PeerDown(OTHER), 2.0)
    assert [line for line in brief(core.handle(Tick(), 9.0)) if "load" in line] == ["frontend: load up to 0"]


def test_with_one_front_end_no_report_tells_of_numbers() -> None:
    """A report that differs from the one before is sent: one by that number alone would cost a message."""
    core = make_core("PD0", report_s=0.1)
    core.handle(Submit(work("a", 2, number=7)), 0.0)
    assert sent(core.handle(Tick(), 2.0), PeerLoad)[0].newest == 0


# ---------------------------------------------------------------- the loss of one


@pytest.mark.parametrize("steps", range(4))
def test_a_loss_ends_what_it_owned_and_nothing_else(steps: int) -> None:
    core = shared("PD0", kv=99)
    for each in (work("a", 2, max_tokens=9), ask("b", 2, max_tokens=9)):
        core.handle(Submit(each), 0.0)
    for _ in range(steps):
        serve(core)
    core.handle(PeerDown(OTHER), 0.0)
    check_state(core.state)
    said: list[str] = []
    while core.state.requests:
        said += serve(core)
    assert "frontend: finished a length 9 by way of PD0" in said
    assert not any("emit b" in line for line in said), "it is in no step, or its last one counts no more"
    emptied(core)


def test_the_loss_of_the_first_one_leaves_the_others() -> None:
    core = shared("PD0", kv=99)
    for each in (work("a", 2, max_tokens=2), ask("b", 2, max_tokens=2)):
        core.handle(Submit(each), 0.0)
    core.handle(PeerDown(FRONTEND), 0.0)
    said = [line for _ in range(3) for line in serve(core) if line.startswith(OTHER)]
    assert said == [*(f"{OTHER}: emit b#{index}=1" for index in (0, 1)), f"{OTHER}: finished b length 2 by way of PD0"]
    emptied(core)


def test_an_offer_that_was_not_committed_is_withdrawn_with_a_reason() -> None:
    """Its target may be in touch with the owner, which hears then that it is to go on, if it lives."""
    core = shared("E0", peers="P0", rules=BatchRules(image_budget=1), transfers=TransferPolicy())
    core.handle(Submit(ask("r", 1, "cat*4", "dog*4", max_tokens=2)), 0.0)
    core.handle(Stepped(1, "joint"), 0.0)
    assert core.state.outgoing
    core.handle(PeerDown(OTHER), 1.0)
    out = core.handle(Stepped(2, "joint"), 1.0)
    assert brief(out)[0] == "P0: withdraw E0:1 MigrationError"


def test_a_hand_over_is_forgotten_with_its_owner() -> None:
    core = shared("P0", peers="D0")
    for each in (work("a", 3), ask("b", 3)):
        core.handle(Submit(each), 0.0)
    core.handle(done(1, a=5, b=5), 0.0)
    core.handle(done(2, b=5), 0.0)
    assert core.state.tombstones.keys() == {"a", "b"}
    core.handle(PeerDown(OTHER), 1.0)
    assert core.state.tombstones.keys() == {"a"}
    for lease in list(core.state.outgoing):
        core.handle(Release(lease, "pulled"), 2.0)
    core.handle(Forget("a"), 2.0)
    emptied(core)


def test_the_first_ones_reservation_ends_with_it() -> None:
    core = shared("PD0")
    assert brief(core.handle(PeerReserved("PD0", 0, True, 1), 0.0)) == [
        *(f"{OTHER}: reserve PD0.0", "frontend: empty PD0.0 of 1")
    ]
    late = "frontend:c"
    assert brief(core.handle(FrontendUp(late), 0.0))[1:] == [f"{late}: reserve PD0.0"]
    assert brief(core.handle(PeerDown(FRONTEND), 0.0)) == [f"{OTHER}: open PD0.0", f"{late}: open PD0.0"]
    assert not core.state.router.reserved


# ---------------------------------------------------------------- of an owner that it is not in touch with


@pytest.mark.parametrize(("committed", "state"), [(False, "offered"), (True, "handed on")])
def test_an_offer_of_a_stranger_is_refused_and_its_source_tells_the_owner(committed: bool, state: str) -> None:
    source = shared("P0" if committed else "E0", peers="D0 P0" if committed else "P0")
    source.handle(Submit(ask("r", 3) if committed else ask("r", 1, "cat*4")), 0.0)
    out = source.handle(done(1, r=5) if committed else Stepped(1, "joint"), 0.0)
    offers = [each.message for each in out if isinstance(each, Send) and type(each.message).__name__ == "Offer"]
    target = make_core("D0" if committed else "P0", peers="P0" if committed else "E0 D0")
    (release,) = sent(target.handle(offers[0], 0.0), Release)
    assert release.outcome == "untaken"
    emptied(target)
    told = [each for each in source.handle(release, 1.0) if isinstance(each, Send)]
    assert [(each.to, type(each.message)) for each in told] == [(OTHER, Finished)], state
    (finished,) = sent(told, Finished)
    assert finished.failure is not None
    assert (finished.failure.error, finished.failure.fields["cause"]) == ("MigrationError", "Nowhere")
    source.handle(Forget("r"), 2.0)
    emptied(source)


def test_a_copy_or_a_move_of_a_stranger_is_refused_as_for_want_of_room() -> None:
    target = make_core("D0", peers="D1")
    offer = replace(kv_offer("D1:1", ask("r", 3), (0,), source="D1"), moves=True)
    assert brief(target.handle(offer, 0.0)) == ["D1: release D1:1 refused"]


def test_a_strangers_request_that_was_passed_on_goes_back_to_its_owner() -> None:
    source, target = shared("P0", peers="E0 D0"), make_core("E0", peers="P0 D0")
    (passed,) = sent(source.handle(Submit(ask("r", 1, "cat*4")), 0.0), Submit)
    (answer,) = sent(target.handle(passed, 0.0), NotTaken)
    emptied(target)
    (told,) = source.handle(answer, 0.0)
    assert isinstance(told, Send)
    assert told.to == OTHER
    assert isinstance(told.message, Finished)
    assert source.handle(replace(answer, attempt=1), 0.0) == [], "of another attempt"
    source.handle(Forget("r"), 0.0)
    assert source.handle(answer, 0.0) == []


def test_what_a_lost_one_still_sends_is_dropped() -> None:
    core = shared("PD0")
    core.handle(PeerDown(OTHER), 0.0)
    assert core.handle(Submit(ask("r", 2)), 0.0) == []
    core.handle(FrontendUp(OTHER), 0.0)
    assert brief(core.handle(Submit(ask("r", 2)), 0.0))[0] == "open r kv 0", "one that comes back is served again"


def test_to_lose_a_front_end_twice_changes_nothing() -> None:
    core = shared("PD0")
    lose_frontend(core.state, OTHER, 0.0)
    lose_frontend(core.state, OTHER, 0.0)
    assert core.state.frontends == [FRONTEND]


def test_features_of_a_stranger_are_refused_too() -> None:
    target = make_core("P0", peers="E0 D0")
    assert brief(target.handle(image_offer("E0:1", ask("r", 1, "cat*4"), (0,)), 0.0)) == ["E0: release E0:1 untaken"]


# ---------------------------------------------------------------- names and age


def test_names_of_lives_of_several_front_ends_differ() -> None:
    """Ids are whatever readers give, and two front ends give the same: no two lives have one name."""
    ids = ["r", "r~1.0", "r~frontend:b.1.0", "", "~", "frontend:b", "r~0+1", "r~frontend:b"]
    names: list[str] = []
    for owner in (FRONTEND, OTHER, "frontend:bb", "frontend:b.1", "frontend:"):
        first = LifeNames(owner=owner)
        for number, each in enumerate(ids * 2, start=1):
            names.append(first.name_first(each, number))
            names += [name_life(each, number, attempt, owner) for attempt in (1, 2)]
            names += [name_help(names[-1], 2, item) for item in (0, 1)]
    assert len(set(names)) == len(names)
    assert read_help(name_help("r~frontend:b.1.0", 3, 4)) == ("r~frontend:b.1.0", 3, 4)


def test_with_one_front_end_the_first_life_has_the_readers_id() -> None:
    assert LifeNames().name_first("r", 1) == "r"
    assert name_life("r", 1, 2) == "r~1.2"


@pytest.mark.parametrize("name", ["E0", "frontends", "frontend:a~1", "", "Frontend"])
def test_an_owner_is_named_so_that_nothing_is_mistaken(name: str) -> None:
    with pytest.raises(ValueError, match="a front end is called"):
        check_owner(name)
    with pytest.raises(ValueError, match="a front end is called"):
        FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY), name=name)


def test_instances_have_no_name_of_a_front_end() -> None:
    assert is_frontend("frontend")
    assert is_frontend("frontend:x")
    assert not is_frontend("frontendx")
    assert not is_frontend("E0")


def test_a_front_end_counts_on_from_the_highest_number_of_any() -> None:
    core = FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY), name=OTHER)
    core.handle(peer_up("PD0"), 0.0)
    core.handle(PeerLoad("PD0", newest=1000), 0.0)
    core.handle(Submit(work("r", 3)), 0.0)
    core.handle(PeerLoad("PD0", newest=3), 0.0)
    core.handle(Submit(work("s", 3)), 0.0)
    assert [entry.work.number for entry in core.entries.values()] == [1001, 1002]


def test_requests_of_one_number_have_one_order_and_the_older_one_goes_on() -> None:
    """No block is free and both need one: with no order between them each would wait for the other for ever."""
    core = shared("PD0", kv=5, reservation="optimistic", prefix_cache=False)
    for each in (work("a", 3, max_tokens=13, number=5), ask("b", 3, max_tokens=13, number=5)):
        core.handle(Submit(each), 0.0)
    said = [line for _ in range(80) if core.state.lanes["joint"] for line in serve(core)]
    assert [line for line in said if "finished" in line] == [
        *("frontend: finished a length 13 by way of PD0", f"{OTHER}: finished b length 13 by way of PD0")
    ]
    assert core.state.preemptions > 0, "the pool is too small for both"
    emptied(core)


# ---------------------------------------------------------------- what the others know of one that runs alone


def test_another_front_end_routes_past_what_the_first_one_reserved() -> None:
    core = FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY), name=OTHER)
    for peer in ("PD0", "PD1"):
        core.handle(peer_up(peer), 0.0)
    core.handle(PeerReserved("PD0", 0, True), 0.0)
    assert {brief(core.handle(Submit(work(f"r{n}", 3)), 0.0))[0][:3] for n in range(4)} == {"PD1"}
    core.handle(PeerReserved("PD0", 0, False), 0.0)
    assert {brief(core.handle(Submit(work(f"s{n}", 3)), 0.0))[0][:3] for n in range(4)} == {"PD0", "PD1"}


def test_a_new_life_of_an_instance_is_open_unless_it_says_otherwise() -> None:
    """The first front end may have lifted the reservation while nobody could tell this one."""
    core = FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY), name=OTHER)
    core.handle(peer_up("PD0"), 0.0)
    core.handle(PeerReserved("PD0", 0, True), 0.0)
    core.handle(PeerDown("PD0"), 0.0)
    core.handle(replace(peer_up("PD0"), epoch=1), 0.0)
    assert brief(core.handle(Submit(work("r", 3)), 0.0)) == ["PD0: submit r~frontend:b.1.0"]


def test_what_waits_for_a_reserved_instance_goes_on_as_it_is_open() -> None:
    core = FrontendCore(RoundRobin(), FrontendOptions(), name=OTHER)
    core.handle(peer_up("PD0"), 0.0)
    core.handle(PeerReserved("PD0", 0, True), 0.0)
    assert brief(core.handle(Submit(work("r", 3)), 0.0)) == []
    assert brief(core.handle(PeerReserved("PD0", 0, False), 0.0)) == ["PD0: submit r~frontend:b.1.0"]


def test_one_that_is_not_the_first_has_nothing_run_alone() -> None:
    """Two that each empty an instance for a request of theirs might wait for each other for ever."""
    for name, suspect in ((FRONTEND, True), (OTHER, False)):
        core = recovering("PD0 PD1")
        core.name = name
        core.handle(Submit(work("r", 3)), 0.0)
        entry = core.entries["r"]
        for epoch in range(2):
            entry.suspicion.note_death(Death(Life("PD0", epoch), "PD", 0, False), 0.0)
        assert entry.is_suspect(core.options.failures) is suspect


def test_tables_of_one_front_end_are_what_they_were() -> None:
    table(
        make_core("PD0"),
        [
            (Submit(work("r", 2, max_tokens=1)), ["open r kv 0", "step 1 joint: prefill r 0+2 last"]),
            (done(1, r=5), ["frontend: emit r#0=5", "frontend: finished r length 1 by way of PD0", "close r"]),
        ],
    )
