"""The checks of a virtual cluster, each shown what it is for."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import done, emitted, image_offer, kv_offer, make_core, work
from support.virtual.checks import Bookkeeping, check_forgotten, check_state
from support.virtual.cluster import make_settings
from support.virtual.conversation import Conversation
from support.virtual.shadow import Shadow
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import Deliver, End, FrontendCore, FrontendOptions
from trinity.core.messages import (
    Cancel,
    Commit,
    Encode,
    Finished,
    Forget,
    Open,
    Prefill,
    Pull,
    Pulled,
    Ready,
    Release,
    Sampled,
    Send,
    Step,
    Stepped,
    Submit,
    Value,
)
from trinity.core.routing.router import RoundRobin

POOLS = {"image": 16, "kv": 32}


def told(*messages: tuple[str, Value]) -> Conversation:
    """A conversation that has heard these commands."""
    conversation = Conversation({})
    for name, command in messages:
        conversation.command(name, command)
    return conversation


OFFER = image_offer("E0:1", work("r", "cat", "dog", 1), (1,), (2,))
SAID = [("E0", Send("P0", OFFER)), ("E0", Send("P0", Ready("E0:1", (0,))))]
END = End("r", "length")
PULL = Pull("E0:1", 0, "E0", "image", "r", (1,), (4,))


def fin(request: str, attempt: int = 0) -> Send:
    return Send("frontend", Finished(request=request, attempt=attempt, reason="length"))


def again(attempt: int) -> tuple[str, Send]:
    return ("frontend", Send("P0", Submit(replace(work("r", 1), attempt=attempt, owner="frontend"))))


def out(*indices: int) -> Send:
    return Send("frontend", emitted(*(("r", 0, index, Sampled(1)) for index in indices)))


@pytest.mark.parametrize(
    ("before", "wrong", "message"),
    [
        ([], ("E1", Send("P0", OFFER)), "E1 offers for E0"),
        (SAID, ("E0", Send("P0", OFFER)), "E0:1 was offered before"),
        (SAID, ("E0", Send("P0", Ready("E0:1", (0, 1)))), "names a part again"),
        (SAID, ("E0", Send("P0", Commit("E0:1"))), "before every part is ready"),
        (SAID, ("P0", Send("E0", Release("E0:1", "pulled"))), "before Commit"),
        (SAID, ("P1", Send("E0", Release("E0:1", "failed"))), "P1 releases E0:1 to E0"),
        (SAID, ("P0", Pull("E0:1", 1, "E0", "image", "r", (2,), (4,))), "is not ready or was asked before"),
        (SAID, ("P0", Pull("E0:1", 0, "E0", "image", "r", (2,), (4,))), "reads beyond its part"),
        (SAID, ("P0", Pull("E0:1", 0, "E0", "image", "r", (1,), (4, 5))), "pairs no blocks"),
        (SAID, ("P0", Pull("E0:1", 0, "E0", "image", "r", (), ())), "pairs no blocks"),
        (SAID, ("P1", PULL), "was not offered to it"),
        ([*SAID, ("P0", PULL)], ("P0", PULL), "is not ready or was asked before"),
        ([*SAID, ("P0", PULL)], ("P0", Send("E0", Release("E0:1", "failed"))), "are being pulled"),
        ([*SAID, ("P0", Send("E0", Release("E0:1", "failed")))], ("P0", PULL), "after Release"),
        (
            [*SAID, ("P0", Send("E0", Release("E0:1", "failed")))],
            ("P0", Send("E0", Release("E0:1", "failed"))),
            "E0:1 released twice",
        ),
        ([*SAID, ("P0", fin("r"))], ("P0", PULL), "after the request's end"),
        ([("D0", fin("r"))], ("D0", Step(1, "joint", decodes=("r",))), "includes r after its end"),
        ([], ("D0", Step(1, "joint", decodes=("r", "r"))), "a request has two rows"),
        ([], ("D0", Step(1, "joint", (), (Prefill("r", 0, 1, True),), ("r",))), "a request has two rows"),
        ([], ("D0", Step(1, "joint")), "an empty step"),
        ([("P0", out(0))], ("D0", out(0)), "again"),
        ([("P0", out(0))], ("D0", out(2)), "out of order"),
        ([], ("D0", Open(work=work("r", 1), blocks=(1,), tokens=(5,))), "before all was there"),
        ([("P0", out(0))], ("frontend", Deliver("r", 1, Sampled(1))), "expected index 0"),
        ([], ("frontend", Deliver("r", 0, Sampled(1))), "was not emitted"),
        ([again(1), ("P0", out(0))], ("frontend", Deliver("r", 0, Sampled(1))), "not emitted by the present attempt"),
        ([("D0", fin("r", 2)), ("D0", fin("r"))], ("D0", Step(1, "joint", decodes=("r",))), "includes r after its end"),
        ([("frontend", END)], ("frontend", END), "r ended twice"),
        (
            [("P0", out(0)), ("frontend", End("r", "length"))],
            ("frontend", Deliver("r", 0, Sampled(1))),
            "after its end",
        ),
    ],
)
def test_conversation_refuses(before: list[Any], wrong: Any, message: str) -> None:
    conversation = told(*before)
    with pytest.raises(AssertionError, match=message):
        conversation.command(*wrong)


def test_conversation_misses_what_was_never_said() -> None:
    for said, message in (
        (SAID, r"no Release of \['E0:1'\]"),
        ([("frontend", Send("P0", Submit(work("r", 1))))], "Finished"),
    ):
        with pytest.raises(AssertionError, match=message):
            told(*said).at_end()
    conversation = told(("frontend", Send("P0", Submit(work("r", 1)))), ("P0", fin("r")))
    conversation.event("P0", Submit(work("r", 1)))
    with pytest.raises(AssertionError, match=r"no Forget for \[\('P0', 'r'\)\]"):
        conversation.at_end()
    conversation = told()
    conversation.event("frontend", Submit(work("r", 1)))
    with pytest.raises(AssertionError, match=r"no end of \['r'\]"):
        conversation.at_end()
    finished = Finished(request="r", attempt=0, reason="length", count=2)
    with pytest.raises(AssertionError, match="tokens are missing"):
        told(("frontend", End("r", "length", None, finished))).at_end()


def test_conversation_hears_cancels_where_the_request_is() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("r", 1)), 0.0)
    conversation = Conversation({"PD0": core})
    conversation.event("PD0", Cancel("other"))
    conversation.command("PD0", Step(1, "joint", decodes=("r",)))
    conversation.event("PD0", Cancel("r"))
    with pytest.raises(AssertionError, match="includes r after its end"):
        conversation.command("PD0", Step(2, "joint", decodes=("r",)))


@pytest.mark.parametrize(("over", "fails"), [(0, False), (1, True), (2, True)])
def test_what_is_over_on_an_instance_is_an_attempt_and_all_before_it(over: int, fails: bool) -> None:
    core = make_core("PD0")
    core.handle(Submit(replace(work("r", 1), attempt=1)), 0.0)
    conversation = Conversation({"PD0": core})
    conversation.command("PD0", fin("r", over))
    step = Step(1, "joint", decodes=("r",))
    if fails:
        with pytest.raises(AssertionError, match="includes r after its end"):
            conversation.command("PD0", step)
    else:
        conversation.command("PD0", step)


def shadow_of(placement: str) -> Shadow:
    return Shadow({each.name: each for each in make_settings(placement, POOLS, image_block_size=4, kv_block_size=4)})


def test_shadow_sees_features_that_were_never_written() -> None:
    request = work("r", "cat", 1)
    shadow = shadow_of("EPD")
    shadow.command("EPD0", Open(work=request, blocks=(0, 1), images=((3,),)))
    with pytest.raises(AssertionError, match="item 0 of r is not in its blocks"):
        shadow.command("EPD0", Step(1, "joint", (), (Prefill("r", 0, 5, True),)))
    shadow = shadow_of("EPD")
    shadow.command("EPD0", Open(work=request, blocks=(0, 1), images=((3,),)))
    encode = Step(1, "joint", (Encode("r", 0, request.media[0], (3,), None),))
    shadow.command("EPD0", encode)
    shadow.event("EPD0", Stepped(1, "joint"))
    shadow.command("EPD0", Step(2, "joint", (), (Prefill("r", 0, 5, True),)))


def test_shadow_sees_kv_that_is_not_there_or_of_another_prompt() -> None:
    shadow = shadow_of("PD")
    with pytest.raises(AssertionError, match="the KV of r before 4 is wrong"):
        shadow.command("PD0", Open(work=work("r", 6), blocks=(0, 1), cached=4))
    shadow = shadow_of("PD")
    shadow.command("PD0", Open(work=work("r", 6), blocks=(0, 1)))
    with pytest.raises(AssertionError, match="PD0 decodes r before its first token"):
        shadow.command("PD0", Step(1, "joint", decodes=("r",)))
    shadow.command("PD0", Step(2, "joint", (), (Prefill("r", 0, 6, True),)))
    shadow.event("PD0", Stepped(2, "joint", {"r": Sampled(1)}))
    shadow.command("PD0", Open(work=work("same", 5), blocks=(0, 2), cached=4))
    with pytest.raises(AssertionError, match="the KV of other before 4 is wrong"):
        shadow.command("PD0", Open(work=work("other", 5, text=500), blocks=(0, 2), cached=4))


def test_shadow_sees_two_that_write_and_read_at_once() -> None:
    shadow = shadow_of("PD")
    shadow.command("PD0", Open(work=work("a", 4), blocks=(0, 1)))
    shadow.command("PD0", Step(1, "joint", (), (Prefill("a", 0, 4, True),)))
    with pytest.raises(AssertionError, match="the KV of b before 4 is wrong"):
        shadow.command("PD0", Open(work=work("b", 5), blocks=(0, 2), cached=4))
    with pytest.raises(AssertionError, match="PD0 closed a while"):
        shadow._close("PD0", "a")


def test_shadow_sees_a_source_that_changes_while_it_is_pulled() -> None:
    shadow = shadow_of("E+P+D")
    request = work("r", "cat", 1)
    encode = Encode("r", 0, request.media[0], (1,), None)
    shadow.command("P0", PULL)
    shadow.command("E0", Step(1, "joint", (encode,)))
    shadow.event("E0", Stepped(1, "joint"))
    with pytest.raises(AssertionError, match="changed while it ran"):
        shadow.event("P0", Pulled("E0:1", 0))


def test_shadow_sees_chunks_that_are_none() -> None:
    request = work("r", 1, "cat", 3, atomic=True)
    for chunk, message in (
        (Prefill("r", 0, 0, False), "is empty"),
        (Prefill("r", 0, 8, False), "of a text of 8"),
        (Prefill("r", 0, 1, True), "of a text of 8"),
        (Prefill("r", 0, 3, False), "cuts"),
    ):
        shadow = shadow_of("EPD")
        shadow.command("EPD0", Open(work=request, blocks=(0, 1), images=((3,),)))
        shadow.memory["EPD0", "image"].write((3,), 0, [[("image", "cat", row) for row in range(4)]])
        with pytest.raises(AssertionError, match=message):
            shadow.command("EPD0", Step(1, "joint", (), (chunk,)))


def test_shadow_misses_what_was_left_open() -> None:
    shadow = shadow_of("EPD")
    shadow.command("EPD0", Open(work=work("r", 1), blocks=(0,)))
    with pytest.raises(AssertionError, match="was opened before"):
        shadow.command("EPD0", Open(work=work("r", 1), blocks=(0,)))
    with pytest.raises(AssertionError, match="not closed"):
        shadow.at_end()


def spoil(core: Any, how: str) -> None:
    s = core.state
    state = s.requests["r"]
    if how == "reference":
        s.kv.hold(state.block_table)
    elif how == "place":
        s.prefill_queue.append("r")
    elif how == "pending":
        s.pending["cat"].in_step = False
    elif how == "providers":
        s.pending["cat"].providers.clear()
    elif how == "ready":
        state.media[0].ready = True
    elif how == "other blocks":
        s.pending["cat"].blocks = (7,)


@pytest.mark.parametrize("how", ["place", "pending", "providers", "ready", "other blocks", "reference"])
def test_bookkeeping_recounts_everything(how: str) -> None:
    core = make_core("EPD0")
    core.handle(Submit(work("r", *(["cat"] if how != "reference" else []), 1)), 0.0)
    check_state(core.state)
    spoil(core, how)
    with pytest.raises(AssertionError):
        check_state(core.state)


def test_bookkeeping_watches_what_is_in_flight() -> None:
    frontend = FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY))
    core = make_core("PD0")
    books = Bookkeeping({"PD0": core}, frontend)
    for command in core.handle(Submit(work("r", 5)), 0.0):
        books.command("PD0", command)
    books.after_event("PD0")
    with pytest.raises(AssertionError, match="2 steps at once on lane joint"):
        books.command("PD0", Step(2, "joint", decodes=("r",)))
    core.state.kv.publish(core.state.requests["r"].block_table[0], b"key")
    with pytest.raises(AssertionError, match="PD0: kv block 0 is written and matchable"):
        books.after_event("PD0")
    core = make_core("D0")
    books = Bookkeeping({"D0": core}, frontend)
    core.handle(kv_offer("P0:1", work("r", 5), (1, 2)), 0.0)
    (pull,) = core.handle(Ready("P0:1", (0,)), 0.0)
    books.command("D0", pull)
    books.after_event("D0")
    core.handle(Cancel("r"), 0.0)
    books.after_event("D0")
    core.handle(Pulled("P0:1", 0), 0.0)
    with pytest.raises(AssertionError, match="r is gone while"):
        books.after_event("D0")


def test_bookkeeping_watches_leases() -> None:
    core = make_core("E0", peers="P0")
    books = Bookkeeping({"E0": core}, FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY)))
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    core.handle(done(1), 0.0)
    books.command("P0", Pull("E0:1", 0, "E0", "image", "r", (0,), (4,)))
    books.after_event("E0")
    books.event("P0", Pulled("E0:1", 0))
    books.command("P0", Pull("E0:1", 0, "E0", "image", "r", (1,), (4,)))
    with pytest.raises(AssertionError, match="reads beyond its lease"):
        books.after_event("E0")
    core.handle(Release("E0:1", "pulled"), 0.0)
    with pytest.raises(AssertionError, match="no lease of E0:1 during its pull"):
        books.after_event("E0")


def test_bookkeeping_looks_for_what_is_left() -> None:
    core = make_core("E0", peers="P0")
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    core.handle(done(1), 0.0)
    with pytest.raises(AssertionError, match=r"E0 is quiet and still has .*tombstones.*outgoing.*blocks"):
        check_forgotten("E0", core.state)


@pytest.mark.parametrize("attempt", [0, 1])
def test_bookkeeping_sees_a_request_that_goes_on_after_its_forget(attempt: int) -> None:
    """But a later attempt than the one to forget may go on."""
    core = make_core("E0", peers="P0")
    books = Bookkeeping({"E0": core}, FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY)))
    for command in core.handle(Submit(work("r", "cat", 1, attempt=attempt)), 0.0):
        books.command("E0", command)
    books.event("E0", Forget("r"))
    if attempt == 0:
        with pytest.raises(AssertionError, match="E0 goes on with r, which it was told to forget"):
            books.after_event("E0")
        books.event("E0", Forget("r"))
    core.handle(Forget("r"), 0.0)
    books.after_event("E0")
