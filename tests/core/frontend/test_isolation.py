"""FrontendCore where instances die in a row with a request: it runs alone, and is refused or gets through."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import brief, emitted, peer_up, sent, work
from support.recovering import emit, end_of, quiet, recovering, told
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Abort, End, FrontendCore
from trinity.core.messages import (
    NOWHERE,
    Finished,
    Gone,
    Moved,
    PeerDown,
    PeerEmpty,
    PeerReserved,
    PeerUp,
    Sampled,
    Submit,
    Tick,
)
from trinity.errors import ConfigError


def up(core: FrontendCore, name: str, epoch: int, now: float) -> list[str]:
    return brief(core.handle(replace(peer_up(name), epoch=epoch), now))


def empty(core: FrontendCore, name: str, epoch: int, now: float, number: int | None = None) -> list[str]:
    said = core.isolation._count if number is None else number
    return brief(core.handle(PeerEmpty(name, epoch, said), now))


def suspects(peers: str = "PD0", **policy: Any) -> FrontendCore:
    """Requests r and s were at PD0 as it died, twice: its third life is about to come."""
    core = recovering(peers, **{"recoveries": 2, **policy})
    for name in "rs":
        core.handle(Submit(work(name, 4, max_tokens=20)), 0.0)
    core.handle(PeerDown("PD0"), 1.0)
    up(core, "PD0", 1, 2.0)
    core.handle(PeerDown("PD0"), 3.0)
    return core


def tokens(name: str, attempt: int, first: int, count: int = 8) -> Any:
    return emitted(*((name, attempt, index, Sampled(7)) for index in range(first, first + count)))


def test_after_two_deaths_each_runs_alone_on_an_instance_that_said_it_is_empty() -> None:
    core = suspects()
    assert core.isolation.places == {"PD0": 2}, "the next life, before it is up"
    assert up(core, "PD0", 2, 4.0) == ["PD0: reserve PD0.2"]
    assert brief(core.handle(Submit(work("t", 4)), 4.0)) == []
    out = core.handle(PeerEmpty("PD0", 2, 1), 4.1)
    assert [(each.work.request, each.work.alone) for each in sent(out, Submit)] == [("r~1.2", "PD")]
    assert brief(core.handle(tokens("r~1.2", 2, 0, 7), 5.0))[7:] == []
    out = core.handle(emit("r~1.2", 2, (7, 7)), 5.1)
    assert brief(out) == ["deliver r#7=7", "PD0: open PD0.2", "PD0: reserve PD0.2"]
    assert sent(empty_out(core), Submit)[0].work.request == "s~2.2"
    core.handle(tokens("s~2.2", 2, 0), 6.0)
    assert core.isolation.places == {}
    assert core.entries["t"].place is not None, "nobody runs alone any more"
    assert {entry.suspicion.row for entry in core.entries.values()} == {0}


def empty_out(core: FrontendCore) -> Any:
    return core.handle(PeerEmpty("PD0", 2, core.isolation._count), 5.2)


def test_the_third_death_alone_is_its_own_and_the_others_are_tried_and_forgiven() -> None:
    core = suspects()
    up(core, "PD0", 2, 4.0)
    empty(core, "PD0", 2, 4.1)
    end = end_of(core.handle(PeerDown("PD0"), 5.0))
    assert end.failure is not None
    assert (end.request, end.failure.error) == ("r", "PoisonRequest")
    assert end.failure.fields == {"instances": "PD0, PD0, PD0"}
    assert "do not send it again unchanged" in end.failure.message
    assert [each.alone for each in end.former] == [False, False]
    assert core.entries["s"].recoveries == 0, "what r did is not counted to s"
    assert core.isolation.ward == "s"
    up(core, "PD0", 3, 6.0)
    assert empty(core, "PD0", 3, 6.1) == ["PD0: submit s~2.2"]
    core.handle(tokens("s~2.2", 2, 0), 7.0)
    core.handle(Finished(request="s~2.2", attempt=2, reason="length", count=8, route=("PD0",)), 8.0)
    quiet(core)


def test_the_word_of_an_earlier_reservation_or_life_is_none() -> None:
    core = suspects()
    up(core, "PD0", 2, 4.0)
    assert empty(core, "PD0", 2, 4.1, number=0) == []
    assert empty(core, "PD9", 2, 4.1) == []
    core.handle(PeerDown("PD0"), 4.2)
    assert up(core, "PD0", 3, 5.0) == ["PD0: reserve PD0.2", "PD0: open PD0.2", "PD0: reserve PD0.3"]
    assert empty(core, "PD0", 2, 5.1) == [], "of the life before"
    assert empty(core, "PD0", 3, 5.2) == ["PD0: submit r~1.2"]


def test_another_that_is_empty_serves_at_once_and_every_instance_hears_of_it() -> None:
    core = recovering("PD0 PD1 PD2")
    core.handle(Submit(work("r", 4, max_tokens=20)), 0.0)
    core.handle(PeerDown("PD0"), 1.0)
    at = core.entries["r"].place
    assert at is not None
    rest = ({"PD1", "PD2"} - {at.name}).pop()
    assert brief(core.handle(PeerDown(at.name), 2.0))[-1] == f"{rest}: reserve {rest}.0"
    assert f"{rest}: reserve {rest}.0" not in up(core, "PD0", 1, 3.0)
    assert brief(core.handle(Submit(work("t", 4)), 3.0)) == ["PD0: submit t"], "past the one that is reserved"


def test_one_that_others_are_at_is_emptied_after_some_patience() -> None:
    core = recovering("PD0 PD1")
    core.handle(Submit(work("r", 4, max_tokens=20)), 0.0)
    core.handle(PeerDown("PD0"), 1.0)
    up(core, "PD0", 1, 1.2)
    for name in "tu":
        core.handle(Submit(work(name, 4, max_tokens=20)), 1.5)
    core.handle(PeerDown("PD1"), 2.0)
    assert (core.isolation.ward, core.isolation.places) == ("r", {"PD1": 1})
    core.handle(Tick(), 11.9)
    assert core.isolation.places == {"PD1": 1}
    assert brief(core.handle(Tick(), 12.1)) == ["PD0: open PD1.1", "PD0: reserve PD0.1"]
    assert brief(core.handle(Submit(work("v", 4)), 12.2)) == []
    assert up(core, "PD1", 1, 13.0)[-2:] == ["PD1: reserve PD1.1", "PD0: submit v"], "PD1 is empty at once"


def test_a_death_in_company_after_it_got_through_is_the_first_of_a_row() -> None:
    core = recovering("PD0", recoveries=9)
    core.handle(Submit(work("r", 4, max_tokens=40)), 0.0)
    for epoch in range(4):
        core.handle(tokens(f"r~1.{epoch}" if epoch else "r", epoch, 8 * epoch), epoch)
        core.handle(PeerDown("PD0"), epoch + 0.5)
        assert core.entries["r"].suspicion.row == 1
        up(core, "PD0", epoch + 1, epoch + 0.6)


@pytest.mark.parametrize("count", [7, 8])
def test_it_has_got_through_a_decode_once_it_is_past_what_the_lost_one_may_have_been_at(count: int) -> None:
    core = recovering("PD0", recoveries=9)
    core.handle(Submit(work("r", 4, max_tokens=40)), 0.0)
    core.handle(PeerDown("PD0"), 1.0)
    up(core, "PD0", 1, 1.5)
    core.handle(tokens("r~1.1", 1, 0, count), 2.0)
    core.handle(PeerDown("PD0"), 3.0)
    assert core.entries["r"].suspicion.row == (2 if count < 8 else 1)


def test_the_same_death_counts_once_however_it_is_heard() -> None:
    core = recovering("E0 P0 D0", recoveries=9)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    core.handle(Gone("r", 0, "E0", "P0", 1), 1.0)
    core.handle(Gone("r~1.1", 1, "E0", "P0", 1), 1.5)
    assert (core.entries["r"].suspicion.row, core.entries["r"].recoveries) == (1, 1), (
        "E0 had not heard of it when it offered again"
    )
    core.handle(PeerDown("P0"), 2.0)
    assert core.entries["r"].suspicion.row == 1


def test_a_target_that_says_first_that_its_source_is_lost_tells_of_a_death() -> None:
    core = recovering("E0 P0 D0", recoveries=9)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    core.handle(Moved("r", 0, "P0", 1), 0.5)
    end = told("r", 0, cause="PeerLost")
    assert end.failure is not None
    fields = {"cause": "PeerLost", "source": "E0"}
    core.handle(replace(end, failure=replace(end.failure, fields=fields)), 1.0)
    assert [death.life.name for death in core.entries["r"].suspicion.deaths] == ["E0"]


def test_reads_that_fail_from_instances_that_are_up_are_no_deaths() -> None:
    """To a target a source that cannot be read looks like a lost one, whether it died or not."""
    core = recovering("E0 E1 P0 D0", recoveries=9)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    for life in range(4):
        name = "r" if not life else f"r~1.{life}"
        first = core.entries["r"].first
        core.handle(Moved(name, life, "P0", 1), life + 0.2)
        end = replace(told("r", life, cause="PeerLost"), request=name)
        assert end.failure is not None
        fields = {"cause": "PeerLost", "source": first}
        assert core.handle(replace(end, failure=replace(end.failure, fields=fields)), life + 0.5)
        assert core.entries["r"].suspicion.row == (life < 2), "the read before this one was no death: its source is up"


def test_a_source_that_can_never_be_read_costs_a_request_its_recoveries() -> None:
    core = recovering("E0 P0 D0", recoveries=2)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    ends: list[End] = []
    for life in range(3):
        core.handle(Moved(f"r~1.{life}" if life else "r", life, "P0", 1), life + 0.2)
        end = replace(told("r", life, cause="PeerLost"), request=f"r~1.{life}" if life else "r")
        assert end.failure is not None
        failed = replace(end, failure=replace(end.failure, fields={"cause": "PeerLost", "source": "E0"}))
        ends += [each for each in core.handle(failed, life + 0.5) if isinstance(each, End)]
    assert [end.failure.error for end in ends if end.failure] == ["MigrationError"]


def test_a_death_that_explains_an_earlier_loss_is_counted_when_it_is_heard() -> None:
    core = recovering("E0 P0 P1 D0", recoveries=9)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    core.handle(Moved("r", 0, "P0", 1), 0.5)
    core.handle(told("r", 0, cause="TransferTimeout"), 1.0)
    core.handle(Moved("r~1.1", 1, "P1", 1), 1.2)
    core.handle(PeerDown("P0"), 1.5)
    assert (core.entries["r"].suspicion.row, core.entries["r"].work.attempt) == (1, 1)
    core.handle(PeerDown("D0"), 1.6)
    assert core.entries["r"].suspicion.row == 1


def test_one_that_is_lost_otherwise_whenever_it_runs_alone_is_given_up() -> None:
    """Where leases are short it was begun again for ever: no life of it ended by a death, so none was its last."""
    core = recovering("PD0", recoveries=1)
    core.handle(Submit(work("r", 4, max_tokens=20)), 0.0)
    core.handle(told("r", 0, cause="TransferTimeout"), 0.5)
    core.handle(PeerDown("PD0"), 1.0)
    up(core, "PD0", 1, 2.0)
    assert empty(core, "PD0", 1, 2.1) == ["PD0: submit r~1.2"]
    core.handle(replace(told("r", 2, cause="LeaseExpired"), request="r~1.2"), 3.0)
    end = end_of(core.handle(replace(told("r", 3, cause="LeaseExpired"), request="r~1.3"), 4.0))
    assert end.failure is not None
    assert end.failure.error == "MigrationError"


def test_one_that_has_had_its_recoveries_runs_alone_before_it_is_given_up() -> None:
    """Its last instance may have died of another."""
    core = recovering("PD0", recoveries=1)
    core.handle(Submit(work("r", 4, max_tokens=20)), 0.0)
    core.handle(told("r", 0, cause="TransferTimeout"), 0.5)
    assert core.handle(PeerDown("PD0"), 1.0)
    assert core.isolation.ward == "r"
    up(core, "PD0", 1, 2.0)
    assert empty(core, "PD0", 1, 2.1) == ["PD0: submit r~1.2"]
    end = end_of(core.handle(PeerDown("PD0"), 3.0))
    assert end.failure is not None
    assert end.failure.error == "StageError", "two deaths are no three"


def test_an_instance_that_is_not_empty_gives_it_back_and_stays_reserved() -> None:
    core = suspects()
    up(core, "PD0", 2, 4.0)
    empty(core, "PD0", 2, 4.1)
    core.handle(told("r~1.2", 2, cause=NOWHERE), 4.2)
    assert (core.isolation.ward, core.isolation.places) == ("r", {"PD0": 2})
    assert brief(core.handle(Tick(), 4.3))[-1] == "PD0: submit r~1.3"


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_its_reader_may_leave_at_any_time(reason: str) -> None:
    for started in (False, True):
        core = suspects()
        up(core, "PD0", 2, 4.0)
        if started:
            empty(core, "PD0", 2, 4.1)
        core.handle(Abort("r", reason), 4.2)
        core.handle(Finished(request="r~1.2", attempt=2, reason="cancelled", route=("PD0",)), 4.3)
        assert core.isolation.ward == "s"
        core.handle(Abort("s", reason), 4.4)
        assert core.isolation.places == {}
        quiet(core)


def test_where_nothing_may_wait_nothing_runs_alone() -> None:
    core = recovering("PD0 PD1 PD2 PD3", recoveries=9, wait_s=0.0)
    core.handle(Submit(work("r", 4, max_tokens=20)), 0.0)
    for _ in range(3):
        place = core.entries["r"].place
        assert place is not None
        core.handle(PeerDown(place.name), 1.0)
    assert core.entries["r"].suspicion.row == 3
    assert not core.isolation.ward


def test_a_stage_that_is_away_keeps_nothing_reserved() -> None:
    core = recovering("E0 P0 D0", recoveries=9)
    core.handle(Submit(work("r", "cat", 1, max_tokens=20)), 0.0)
    core.handle(Moved("r", 0, "P0", 1), 0.1)
    core.handle(PeerDown("P0"), 1.0)
    core.handle(Gone("r", 0, "E0", "P0", 1), 1.1)
    up(core, "P0", 1, 2.0)
    core.handle(Moved("r~1.1", 1, "P0", 1, 1), 2.1)
    core.handle(PeerDown("P0"), 3.0)
    assert core.isolation.places == {"P0": 2}
    core.handle(PeerDown("E0"), 3.1)
    up(core, "P0", 2, 4.0)
    assert (core.isolation.places, core.isolation.ward) == ({}, "")
    up(core, "E0", 1, 5.0)
    assert core.isolation.places == {"P0": 2}


def test_alone_after_the_first_death_and_refused_after_the_second() -> None:
    core = recovering("PD0", deaths=2, alone_after=1)
    core.handle(Submit(work("r", 4, max_tokens=20)), 0.0)
    core.handle(PeerDown("PD0"), 1.0)
    assert up(core, "PD0", 1, 2.0) == ["PD0: reserve PD0.1"]
    empty(core, "PD0", 1, 2.1)
    end = end_of(core.handle(PeerDown("PD0"), 3.0))
    assert end.failure is not None
    assert end.failure.error == "PoisonRequest"
    quiet(core)


def test_one_that_no_instance_could_ever_hold_is_refused() -> None:
    core = suspects()
    small = PeerUp("PD0", "PD", 2, {"kv": 1, "image": 1}, 4, 4)
    ends = [line for line in brief(core.handle(small, 4.0)) if line.startswith("end ")]
    assert ends == ["end r error RequestTooLarge", "end s error RequestTooLarge"]
    quiet(core)


def test_what_is_reserved_is_told_with_the_numbers_that_are_answered() -> None:
    core = suspects()
    out = core.handle(replace(peer_up("PD0"), epoch=2), 4.0)
    assert sent(out, PeerReserved) == [PeerReserved("PD0", 2, True, 1)]


@pytest.mark.parametrize(
    "wrong", [{"deaths": 0}, {"deaths": -1}, {"deaths": 2}, {"alone_after": 3}, {"alone_after": 0}, {"deaths": 2.5}]
)
def test_a_policy_of_deaths_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        FailurePolicy(**wrong)


def test_where_the_one_encoder_decodes_too_but_cannot_hold_it_the_decoder_is_reserved_as_well() -> None:
    """The encoder was taken for the place of both stages, and the request waited for ever for a decoder of its own."""
    core = recovering("E0 P0 D0", recoveries=9)
    small = replace(peer_up("ED1"), pools={"image": 64, "kv": 1})
    core.handle(small, 0.0)
    core.handle(PeerDown("E0"), 0.0)
    core.handle(Submit(work("r", "cat", 4, max_tokens=20)), 0.0)
    for epoch, life in enumerate(("r", "r~1.1")):
        core.handle(Moved(life, epoch, "P0", 1, 0, "ED1", 0), 0.5)
        core.handle(emit(life, epoch, (epoch * 2, 5)), 0.5)
        core.handle(Moved(life, epoch, "D0", 2, epoch, "P0", 0), 0.5)
        core.handle(emit(life, epoch, (epoch * 2 + 1, 5)), 0.5)  # of D0: nobody has its KV but that one
        core.handle(PeerDown("D0"), 1.0 + epoch)
        up(core, "D0", epoch + 1, 1.5 + epoch)
    assert core.isolation.places == {"ED1": 0, "P0": 0, "D0": 2}, "P, which goes on with its tokens, as well"


def test_one_that_is_to_run_alone_and_that_no_prefill_can_hold_any_more_is_refused_at_once() -> None:
    """It waited for ever for an encoder to be reserved, which none was, since nothing could come of it."""
    core = recovering("ED0 P0 P1", alone_after=1, deaths=2)
    core.handle(Submit(work("r", "cat", 4, max_tokens=20)), 0.0)
    for name in ("P0", "P1"):
        core.handle(PeerDown(name), 0.5)
    small = [replace(peer_up(name), epoch=1, pools={"image": 64, "kv": 1}) for name in ("P0", "P1")]
    core.handle(small[0], 1.0)
    core.handle(PeerDown("ED0"), 2.0)
    assert core.entries["r"].work.alone == "ED"
    up(core, "ED0", 1, 3.0)
    assert core.isolation.ward == "", "P1 is away, and may hold it"
    end = end_of(core.handle(small[1], 4.0))
    assert end.failure is not None
    assert end.failure.error == "RequestTooLarge"
    quiet(core)
