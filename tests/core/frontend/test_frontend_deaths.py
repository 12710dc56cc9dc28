"""FrontendCore where deaths are told late, twice or by others: what counts against a request, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from core.frontend.test_isolation import (
    empty,
    suspects,
    test_the_same_death_counts_once_however_it_is_heard,
    tokens,
    up,
)
from support.core_tables import brief, peer_up, sent, work
from support.recovering import emit, end_of, recovering, told
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Abort, FrontendCore, suspicion
from trinity.core.frontend.dispatch import Isolation
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.poison_detection import PoisonDetector
from trinity.core.frontend.suspicion import Life, Suspicion
from trinity.core.messages import (
    NOWHERE,
    Finished,
    Gone,
    Moved,
    PeerDown,
    PeerEmpty,
    PeerReserved,
    Submit,
    Tick,
    Value,
)


def at_e0(peers: str = "E0 E1 P0 D0", **policy: Any) -> FrontendCore:
    """Request r is at E0."""
    core = recovering(peers, **{"recoveries": 9, **policy})
    core.handle(Submit(work("r", "cat", 1, max_tokens=20)), 0.0)
    return core


def unread(name: str, attempt: int, source: str) -> Finished:
    """An end whose target could not read its source."""
    end = told(name, attempt)
    assert end.failure is not None
    return replace(end, failure=replace(end.failure, fields={"cause": "PeerLost", "source": source}))


def counted(core: FrontendCore) -> list[str]:
    return [death.life.name for death in core.entries["r"].suspicion.deaths]


def test_an_instance_that_speaks_late_of_a_former_life_and_dies_may_have_died_of_it() -> None:
    """Its word came behind the news of another death, which was taken for the end of that life."""
    core = at_e0()
    core.handle(Moved("r", 0, "P0", 1), 0.1)
    core.handle(PeerDown("P0"), 0.2)
    core.handle(Gone("r", 0, "E0", "P0", 1), 0.3)
    assert brief(core.handle(Moved("r", 0, "D0", 2, 0, "P0", 0), 0.4)) == ["D0: forget r"]
    core.handle(PeerDown("D0"), 0.5)
    assert counted(core) == ["P0", "D0"]


@pytest.mark.parametrize("late_s", [4.0, 6.0])
def test_one_that_dies_much_later_did_not_die_of_it(late_s: float) -> None:
    core = at_e0()
    core.handle(Moved("r", 0, "P0", 1), 0.1)
    core.handle(told("r", 0), 1.0)
    core.handle(PeerDown("P0"), 1.0 + late_s)
    assert counted(core) == ["P0"] * (late_s < 5)


def test_one_that_has_given_it_back_did_not_die_of_it() -> None:
    core = at_e0()
    core.handle(Moved("r", 0, "P0", 1), 0.1)
    core.handle(told("r", 0, route=("E0", "P0")), 1.0)
    core.handle(PeerDown("P0"), 1.1)
    assert counted(core) == []
    core.handle(PeerDown("E0"), 1.2)
    assert counted(core) == ["E0"]


def test_one_that_is_said_to_have_gone_with_an_instance_that_is_known_to_be_lost() -> None:
    core = at_e0()
    core.handle(told("r", 0), 1.0)
    core.handle(PeerDown("P0"), 1.1)
    assert counted(core) == []
    core.handle(Gone("r", 0, "E0", "P0", 1), 1.2)
    assert counted(core) == ["P0"]


def test_a_read_that_failed_for_a_death_counts_when_that_is_heard() -> None:
    """It was withdrawn, as the instance was up as far as anybody knew."""
    core = at_e0()
    core.handle(Moved("r", 0, "P0", 1), 0.1)
    core.handle(unread("r", 0, "E0"), 0.2)
    assert counted(core) == ["E0"]
    core.handle(PeerDown("E1"), 0.3)
    assert counted(core) == ["E1"], "the read is no proof of a death"
    core.handle(PeerDown("E0"), 0.4)
    assert counted(core) == ["E1", "E0"]


def test_a_source_that_had_died_before_its_target_counts() -> None:
    """It may still have been filling what it had offered, and the target died before it could say so."""
    core = at_e0()
    core.handle(Moved("r", 0, "P0", 1), 0.1)
    core.handle(PeerDown("E0"), 0.2)
    assert counted(core) == []
    core.handle(PeerDown("P0"), 0.3)
    assert counted(core) == ["P0", "E0"]


def test_it_is_called_back_to_run_alone_where_a_second_death_is_told_late() -> None:
    core = at_e0()
    core.handle(PeerDown("E0"), 0.1)
    up(core, "E0", 1, 0.2)
    core.handle(Moved("r~1.1", 1, "P0", 1), 0.3)
    core.handle(told("r~1.1", 1), 0.4)
    core.handle(Tick(), 1.5)
    assert core.entries["r"].place is not None
    core.handle(PeerDown("P0"), 1.6)
    entry = core.entries["r"]
    assert (entry.suspicion.row, entry.waits, core.isolation.ward, entry.recoveries) == (2, True, "", 2)
    core.handle(Tick(), 1.7)
    assert core.isolation.ward == "r"


def test_it_waits_for_news_where_a_life_of_it_ends_for_no_reason_that_is_known() -> None:
    """A second instance may have died: sent on at once it met a third one in company."""
    core = at_e0()
    core.handle(PeerDown("E0"), 0.1)
    out = brief(core.handle(told("r~1.1", 1), 0.3))
    assert not [line for line in out if "submit" in line]
    up(core, "E0", 1, 0.4)
    assert core.entries["r"].waits, "whoever comes up meanwhile"
    assert [line for line in brief(core.handle(Tick(), 1.3)) if "submit" in line]


def test_it_does_not_wait_once_it_has_got_through() -> None:
    core = at_e0()
    core.handle(PeerDown("E0"), 0.1)
    core.handle(emit("r~1.1", 1, (0, 7)), 0.2)
    assert [line for line in brief(core.handle(told("r~1.1", 1), 0.3)) if "submit" in line]


def last_alone(core: FrontendCore) -> None:
    """E0 and E1 die with r; it runs alone at E0's next life, whose end its target tells of as a pull that failed."""
    core.handle(PeerDown("E0"), 0.1)
    core.handle(PeerDown("E1"), 0.2)
    up(core, "E0", 1, 0.3)
    assert empty(core, "E0", 1, 0.4) == ["E0: submit r~1.2"]
    core.handle(Moved("r~1.2", 2, "P0", 1), 0.5)
    core.handle(told("r~1.2", 2), 0.6)


def test_a_death_alone_that_is_told_late_refuses_it_while_it_waits() -> None:
    core = at_e0()
    last_alone(core)
    assert end_of(core.handle(PeerDown("E0"), 0.7)).failure is not None
    assert not core.entries
    assert core.isolation.places == {}


def test_a_death_alone_that_is_told_late_refuses_it_while_it_runs_again() -> None:
    core = at_e0(peers="E0 E1 E2 P0 D0")
    core.handle(PeerDown("E0"), 0.1)
    place = core.entries["r"].place
    assert place is not None
    core.handle(PeerDown(place.name), 0.2)
    (rest,) = {"E1", "E2"} - {place.name}
    assert empty(core, rest, 0, 0.4) == [f"{rest}: submit r~1.2"]
    core.handle(told("r~1.2", 2), 0.6)
    core.handle(Tick(), 1.7)
    empty(core, rest, 0, 1.8)
    assert not core.entries["r"].waits
    core.entries["r"].hops.clear()
    core.entries["r"].hops[0] = Life("E9", 0)
    out = core.handle(PeerDown(rest), 2.0)
    end = end_of(out)
    assert end.failure is not None
    assert end.failure.error == "PoisonRequest"
    assert "E9: forget r~1.3" in brief(out)


def test_deaths_that_have_no_stage_in_common_are_not_the_doing_of_one_request() -> None:
    """What kills does so in the step of one stage. It runs alone again until that stage is known."""
    core = at_e0(peers="E0 PD0 D0")
    core.handle(PeerDown("E0"), 0.1)
    up(core, "E0", 1, 0.2)
    core.handle(Moved("r~1.1", 1, "PD0", 1), 0.3)
    core.handle(PeerDown("PD0"), 0.4)
    core.handle(Gone("r~1.1", 1, "E0", "PD0", 1), 0.4)
    up(core, "PD0", 1, 0.5)
    for name, epoch in (("E0", 1), ("PD0", 1), ("D0", 0)):
        core.isolation.note_empty(PeerEmpty(name, epoch, core.isolation._numbers.get(name, 0)))
    core.handle(Tick(), 0.6)
    assert core.entries["r"].suspicion.alone_at >= {Life("E0", 1)}
    core.handle(PeerDown("E0"), 0.7)
    assert (core.entries["r"].suspicion.row, counted(core)) == (3, ["E0", "PD0", "E0"])
    assert core.isolation.ward == "r", "it is still suspected"


def test_who_comes_up_hears_also_what_is_reserved_no_longer() -> None:
    """It may have heard of the reservation, which was meant for its former life, and nobody would have lifted it."""
    core = suspects()
    up(core, "PD0", 2, 4.0)
    core.handle(PeerDown("PD0"), 4.1)
    for name in "rs":
        core.handle(Abort(name, "cancelled"), 4.2)
    out = core.handle(replace(peer_up("PD0"), epoch=3), 5.0)
    assert sent(out, PeerReserved) == [PeerReserved("PD0", 0, False)]


def test_who_is_suspected_has_no_helpers() -> None:
    """Each of them may die of an item, and none of these deaths would be known for its own."""
    core = recovering("E0 E1 E2 P0 D0")
    core.dispatch.spread, core.router.counts = 3, True
    assert len(brief(core.handle(Submit(work("r", "cat", "dog", "cow", 1, max_tokens=20)), 0.0))) > 1
    out = core.handle(PeerDown(core.entries["r"].first), 0.1)
    assert [each.work.request for each in sent(out, Submit)] == ["r~1.1"]


def test_one_that_has_had_its_recoveries_and_is_given_back_stays_alone() -> None:
    """It was taken for one that had been tried alone, went on in company, and took a fourth instance with it."""
    core = suspects(recoveries=1)
    up(core, "PD0", 2, 4.0)
    empty(core, "PD0", 2, 4.1)
    for attempt in (2, 3):
        core.handle(told(f"r~1.{attempt}", attempt, cause=NOWHERE), 4.2 + attempt)
        assert core.isolation.ward == "r"
        core.handle(Tick(), 5.0 + attempt)
        assert core.entries["r"].work.alone == "PD"
    end = end_of(core.handle(PeerDown("PD0"), 9.0))
    assert end.failure is not None
    assert end.failure.error == "PoisonRequest"
    assert end.failure.fields["instances"].count("PD0") == 3


def test_a_death_alone_is_its_own_however_late_it_is_told() -> None:
    """The next life of the instance had said that it is empty by then, and the death did not count as one alone."""
    core = recovering("E0 P0 D0", deaths=2, alone_after=1)
    core.handle(Submit(work("r", "cat", 1, max_tokens=9)), 0.0)
    core.handle(PeerDown("E0"), 1.0)
    up(core, "E0", 1, 2.0)
    assert empty(core, "E0", 1, 2.1) == ["E0: submit r~1.1"]
    core.handle(Moved("r~1.1", 1, "P0", 1), 2.2)
    core.handle(PeerDown("E0"), 2.3)
    up(core, "E0", 2, 2.4)
    empty(core, "E0", 2, 2.5)
    end = told("r~1.1", 1)
    assert end.failure is not None
    unread = replace(end, failure=replace(end.failure, fields={"cause": "PeerLost", "source": "E0"}))
    ended = end_of(core.handle(unread, 3.0))
    assert ended.failure is not None
    assert ended.failure.error == "PoisonRequest"


def test_a_death_where_others_may_have_come_since_it_got_through_is_none_alone() -> None:
    core = suspects()
    up(core, "PD0", 2, 4.0)
    empty(core, "PD0", 2, 4.1)
    core.handle(tokens("r~1.2", 2, 0), 5.0)
    core.handle(PeerDown("PD0"), 6.0)
    assert [death.alone for death in core.entries["r"].suspicion.deaths] == [False, False, False]


def test_a_life_that_its_own_death_ended_elsewhere_leaves_it_the_chance_to_run_alone() -> None:
    """It was alone at P0, and died at D0 among others: it was taken for one that had been tried alone since."""
    core = recovering("P0 D0", recoveries=2, alone_after=2)
    core.handle(Submit(work("r", 4, max_tokens=40)), 0.0)
    for epoch in range(2):
        core.handle(PeerDown("P0"), 1.0 + epoch)
        up(core, "P0", epoch + 1, 1.5 + epoch)
    assert empty(core, "P0", 2, 3.0) == ["P0: submit r~1.2"]
    core.handle(emit("r~1.2", 2, (0, 7)), 4.0)
    core.handle(Moved("r~1.2", 2, "D0", 1, 0, "P0", 2), 4.1)
    core.handle(PeerDown("D0"), 5.0)
    entry = core.entries["r"]
    assert (entry.recoveries, entry.suspicion.row, entry.suspicion.tried_alone) == (3, 1, False)
    assert core.isolation.ward == "r"


# ---------------------------------------------------------------- a rule not kept is noticed


def lapsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has had its recoveries, and the life alone after them, goes on in company."""
    plain = FrontendRequest.is_suspect

    def is_suspect(self: FrontendRequest, policy: FailurePolicy) -> bool:
        spent = self.recoveries > policy.recoveries
        return plain(self, policy) and not (spent and not self._has_a_chance_alone(policy))

    monkeypatch.setattr(FrontendRequest, "is_suspect", is_suspect)
    _try_each_life(monkeypatch)


def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each life that was alone at some stage was the chance that it had."""
    _try_each_life(monkeypatch)


def _try_each_life(monkeypatch: pytest.MonkeyPatch) -> None:
    end_life = FrontendRequest.end_life

    def ended(self: FrontendRequest, finished: Finished, now: float, prefilled: bool) -> None:
        end_life(self, finished, now, prefilled)
        self.suspicion.tried_alone = self.suspicion.tried_alone or bool(self.work.alone)

    monkeypatch.setattr(FrontendRequest, "end_life", ended)


def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death that is told late counts for nothing."""
    monkeypatch.setattr(Suspicion, "note_late_death", lambda self, life, roles, delivered, now: None)


def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of a former life tells nothing."""
    monkeypatch.setattr(PoisonDetector, "trace", lambda self, entry, name, place, now: False)


def unending(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death counts however much later it comes."""
    monkeypatch.setattr(suspicion, "NEWS_KEPT_S", 1e9)


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for news."""
    monkeypatch.setattr(Suspicion, "awaits_news", lambda self, delivered, now: False)


def unconcluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death that is told late refuses nobody, and calls nobody back."""
    monkeypatch.setattr(FrontendCore, "_judge", lambda self, entry, now: [])


def any_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three deaths count together, wherever they were."""
    monkeypatch.setattr(Suspicion, "_deaths_at_one_stage", lambda self: self.last_row)


def as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A death was alone where that instance is empty as the news comes."""
    plain = FrontendCore._go_on

    def go_on(self: FrontendCore, entry: FrontendRequest, *rest: Any) -> tuple[list[Value], Finished | None]:
        entry.suspicion.alone_at = self.isolation.empty_places(entry)
        return plain(self, entry, *rest)

    monkeypatch.setattr(FrontendCore, "_go_on", go_on)


def unopened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes up hears of present reservations alone."""
    monkeypatch.setattr(Isolation, "reservations", lambda self: [])


def costly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that has not heard of a death costs a recovery."""
    plain = FrontendRequest.count_loss

    def count_loss(self: FrontendRequest, finished: Finished, waits: bool, planned: bool) -> float | None:
        self.ended_by = frozenset()
        return plain(self, finished, waits, planned)

    monkeypatch.setattr(FrontendRequest, "count_loss", count_loss)


NOTICED: list[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = [
    (lapsing, test_one_that_has_had_its_recoveries_and_is_given_back_stays_alone),
    (tried, test_a_life_that_its_own_death_ended_elsewhere_leaves_it_the_chance_to_run_alone),
    (deaf, test_a_source_that_had_died_before_its_target_counts),
    (untraced, test_an_instance_that_speaks_late_of_a_former_life_and_dies_may_have_died_of_it),
    (unending, partial(test_one_that_dies_much_later_did_not_die_of_it, 6.0)),
    (impatient, test_it_waits_for_news_where_a_life_of_it_ends_for_no_reason_that_is_known),
    (unconcluded, test_it_is_called_back_to_run_alone_where_a_second_death_is_told_late),
    (unconcluded, test_a_death_alone_that_is_told_late_refuses_it_while_it_waits),
    (unconcluded, test_a_death_alone_that_is_told_late_refuses_it_while_it_runs_again),
    (any_stage, test_deaths_that_have_no_stage_in_common_are_not_the_doing_of_one_request),
    (as_told, test_a_death_alone_is_its_own_however_late_it_is_told),
    (unopened, test_who_comes_up_hears_also_what_is_reserved_no_longer),
    (costly, test_the_same_death_counts_once_however_it_is_heard),
]


@pytest.mark.parametrize(("broken", "sees"), NOTICED)
def test_a_rule_of_late_deaths_that_is_not_kept_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], sees: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sees()
    broken(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        sees()
