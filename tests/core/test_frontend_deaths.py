"""FrontendCore where deaths are told late, twice or by others: what counts against a request, and what does not."""

from __future__ import annotations

from msgspec.structs import replace

from core.test_isolation import empty, suspects, tokens, up
from support.core_tables import work
from support.recovering import emit, end_of, recovering, told
from trinity.core.messages import NOWHERE, Moved, PeerDown, Submit, Tick


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
    assert [death.alone for death in core.entries["r"].deaths] == [False, False, False]


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
    assert (entry.recoveries, entry.row, entry.tried_alone) == (3, 1, False)
    assert core.isolation.ward == "r"
