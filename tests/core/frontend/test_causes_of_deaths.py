"""FrontendCore where instances die with a request: which deaths have one cause, and what a refusal names."""

from __future__ import annotations

from core.frontend.test_frontend_deaths import at_e0, counted, unread
from core.frontend.test_isolation import empty, up
from support.core_tables import brief
from support.recovering import emit, end_of
from trinity.core.messages import Gone, Moved, PeerDown, PeerEmpty, Tick


def test_a_death_alone_that_a_failed_read_tells_behind_its_own_news_counts_once() -> None:
    """It was the last one, which is set aside while a late one is noted: the refusal named four where three died."""
    core = at_e0(peers="E0 P0 D0")
    for epoch in range(2):
        core.handle(PeerDown("E0"), 1.0 + epoch)
        up(core, "E0", epoch + 1, 1.5 + epoch)
    assert empty(core, "E0", 2, 3.0) == ["E0: submit r~1.2"]
    core.handle(Moved("r~1.2", 2, "P0", 1), 3.1)
    core.handle(PeerDown("E0"), 3.2)
    end = end_of(core.handle(unread("r~1.2", 2, "E0"), 3.3))
    assert end.failure is not None
    assert end.failure.fields["instances"] == "E0, E0, E0"


def test_a_decode_and_a_prefill_that_goes_on_with_its_tokens_have_a_stage_in_common() -> None:
    """What kills as a token is sampled does so at both: such a request took a fourth instance with it."""
    core = at_e0(peers="E0 P0 D0")
    core.handle(Moved("r", 0, "P0", 1), 0.1)
    core.handle(emit("r", 0, (0, 7)), 0.2)
    core.handle(Moved("r", 0, "D0", 2, 0, "P0", 0), 0.3)
    core.handle(PeerDown("D0"), 0.4)
    core.handle(Gone("r", 0, "P0", "D0", 2), 0.4)
    up(core, "D0", 1, 0.5)
    core.handle(Moved("r~1.1", 1, "P0", 1), 0.6)
    core.handle(PeerDown("P0"), 0.7)
    core.handle(Gone("r~1.1", 1, "E0", "P0", 1), 0.7)
    assert counted(core) == ["D0", "P0"]
    up(core, "P0", 1, 0.8)
    core.handle(Tick(), 0.9)
    assert core.isolation.places == {"P0": 1, "D0": 1}
    said = [core.handle(PeerEmpty(name, 1, core.isolation._numbers[name]), 0.95) for name in ("P0", "D0")]
    assert brief(said[1]) == ["E0: submit r~1.2"]
    core.handle(Moved("r~1.2", 2, "P0", 1, 1), 1.0)
    end = end_of(core.handle(PeerDown("P0"), 1.1))
    assert end.failure is not None
    assert end.failure.fields["instances"] == "D0, P0, P0"


def test_one_that_died_at_a_decoder_with_tokens_is_alone_at_its_prefill_too() -> None:
    """A token was lost on its way: it dies at D twice, and then where it is prefilled, which was no death alone."""
    core = at_e0(peers="E0 P0 D0")
    for epoch, life in enumerate(("r", "r~1.1")):
        core.handle(Moved(life, epoch, "P0", 1), 0.1 + epoch)
        core.handle(emit(life, epoch, (epoch, 7)), 0.2 + epoch)
        core.handle(Moved(life, epoch, "D0", 2, epoch, "P0", 0), 0.3 + epoch)
        core.handle(PeerDown("D0"), 0.4 + epoch)
        core.handle(Gone(life, epoch, "P0", "D0", 2), 0.4 + epoch)
        up(core, "D0", epoch + 1, 0.5 + epoch)
    core.handle(Tick(), 1.6)
    assert core.isolation.places == {"P0": 0, "D0": 2}
    empty(core, "P0", 0, 1.7, core.isolation._numbers["P0"])
    assert empty(core, "D0", 2, 1.7, core.isolation._numbers["D0"]) == ["P0: submit r~1.2"]
    end = end_of(core.handle(PeerDown("P0"), 1.9))
    assert end.failure is not None
    assert end.failure.fields["instances"] == "D0, D0, P0"
