"""Items of a request that other instances encode: tables of the asker and of the helper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from support.core_tables import brief, broken, done, emptied, holding, make_core, sent, table, work
from trinity.core import InstanceCore
from trinity.core.messages import (
    IMAGE,
    Cancel,
    Commit,
    Forget,
    Helped,
    Offer,
    Part,
    PeerDown,
    PeerLoad,
    PeerSuspect,
    Release,
    Step,
    Submit,
    Tick,
    Value,
    Work,
)
from trinity.core.scheduler import BatchRules
from trinity.core.values import name_help, read_help

TWO = work("r", "cat*4", "dog*4", 1)
ONE_A_STEP = BatchRules(token_budget=64, image_budget=4)


def asked(of: Work = TWO, *helpers: str, pixels: tuple[str, ...] = ()) -> Submit:
    return Submit(of, pixels, helpers=helpers or ("", "E1"))


def said(word: Any, item: int = 1, request: str = "r", helper: str = "E1", epoch: int = 0) -> Helped:
    return Helped(name_help(request, 0, item), helper, word, epoch)


def encodes(commands: Sequence[Value]) -> list[Step]:
    return [each for each in commands if isinstance(each, Step) and each.encodes]


def asker(**settings: Any) -> InstanceCore:
    return make_core("E0", peers="E1 E2 P0", **{"rules": ONE_A_STEP} | settings)


def ended(core: InstanceCore, offer: str, request: str = "r") -> None:
    core.handle(Release(offer, "pulled"), 9.0)
    core.handle(Forget(request), 9.0)
    emptied(core)


# ---------------------------------------------------------------- the asker


def test_what_a_helper_has_is_offered_from_there() -> None:
    core = asker()
    rows = [
        (asked(), ["step 1 joint: encode r.0 into 0"]),
        (said("begun"), []),
        (done(1), []),
        (said("ready"), ["P0: offer E0:1 image of r [0][] by way of E0", "P0: ready E0:1 0,1", "P0: commit E0:1"]),
    ]
    table(core, rows)
    assert core.state.pools["image"].held == 1, "the block of the second item is free again"
    ended(core, "E0:1")


def test_what_is_found_while_the_rest_is_encoded_waits_for_it() -> None:
    core = asker()
    table(core, [(asked(), ["step 1 joint: encode r.0 into 0"]), (said("ready"), [])])
    slot = core.state.requests["r"].media[1]
    assert (slot.helper, slot.holder, slot.blocks) == ("", "E1", ())
    assert core.state.pools["image"].held == 1


def test_nothing_is_recalled_while_another_request_has_an_image_of_it_in_a_step() -> None:
    core = asker(rules=BatchRules(token_budget=64, image_budget=64))
    core.handle(Submit(work("s", "cat*4")), 0.0)
    assert sent(core.handle(asked(), 0.0), Cancel) == []
    assert sent(core.handle(done(1), 1.0), Cancel) == [Cancel("r~0+1", "E0")]


def test_its_part_names_the_helper() -> None:
    core = asker()
    core.handle(asked(), 0.0)
    core.handle(said("ready"), 0.0)
    (offer,) = sent(core.handle(done(1), 0.0), Offer)
    assert offer.parts == (Part((0,)), Part((), "E1"))


def test_what_no_helper_has_begun_is_recalled_once_the_rest_is_done() -> None:
    core = asker()
    rows = [
        (asked(), ["step 1 joint: encode r.0 into 0"]),
        (done(1), ["E1: cancel r~0+1"]),
        (
            said("no"),
            [
                "step 2 joint: encode r.1 into 1",
                "P0: offer E0:1 image of r [0][1] by way of E0",
                "P0: ready E0:1 0",
            ],
        ),
        (said("ready"), []),
        (done(2), ["P0: ready E0:1 1", "P0: commit E0:1"]),
    ]
    table(core, rows)
    ended(core, "E0:1")


@pytest.mark.parametrize("answers", [["begun", "ready"], ["ready"], ["begun", "no"]], ids=" ".join)
def test_a_recall_that_comes_too_late_is_no_harm(answers: list[str]) -> None:
    core = asker()
    core.handle(asked(), 0.0)
    core.handle(done(1), 0.0)
    commands = [each for word in answers for each in core.handle(said(word), 1.0)]
    assert bool(encodes(commands)) is (answers[-1] == "no")
    if answers[-1] == "no":
        commands += core.handle(done(2), 2.0)
    assert len(sent(commands, Commit)) == 1
    ended(core, "E0:1")


def test_items_are_recalled_one_by_one() -> None:
    core = asker()
    core.handle(asked(work("r", "cat*4", "dog*4", "owl*4", 1), "", "E1", "E2"), 0.0)
    assert sent(core.handle(done(1), 1.0), Cancel) == [Cancel("r~0+1", "E0")]
    assert sent(core.handle(said("no"), 2.0), Cancel) == []
    assert sent(core.handle(done(2), 3.0), Cancel) == [Cancel("r~0+2", "E0")]


def test_one_that_waits_for_another_request_recalls_its_own() -> None:
    """The other one may be waiting for it in turn: each has first what the other one left to a helper."""
    core = asker(rules=BatchRules(token_budget=64, image_budget=64))
    core.handle(asked(work("r", "cat*4", "dog*4", 1), "E1", ""), 0.0)
    core.handle(asked(work("s", "cat*4", "fox*4", 1), "", "E2"), 0.0)
    commands = core.handle(done(1), 1.0)
    assert sent(commands, Cancel) == [Cancel("r~0+0", "E0"), Cancel("s~0+1", "E0")]


def test_all_blocks_are_reserved_so_that_nothing_is_waited_for_that_a_helper_may_not_give() -> None:
    core = asker(image=2)
    core.handle(asked(), 0.0)
    assert core.state.pools["image"].held == 2
    core.handle(said("begun"), 0.0)
    core.handle(done(1), 0.0)
    assert core.handle(said("no"), 0.0), "it is encoded here, and waits for no block"


@pytest.mark.parametrize(
    "event",
    [said("no"), PeerDown("E1"), PeerSuspect("E1", 0, suspected=True)],
    ids=["it failed there", "lost", "silent"],
)
def test_what_a_helper_gives_up_is_encoded_here(event: Any) -> None:
    core = asker()
    for each in (asked(), said("begun"), done(1)):
        core.handle(each, 0.0)
    commands = core.handle(event, 1.0)
    steps = encodes(commands)
    assert [row.item for row in steps[0].encodes] == [1]
    assert len(sent(commands, Offer)) == 1, "what is there moves meanwhile"
    assert len(sent(core.handle(done(2), 2.0), Commit)) == 1
    ended(core, "E0:1")


@pytest.mark.parametrize("before", [PeerDown("E1"), PeerSuspect("E1", 0, suspected=True)], ids=["lost", "silent"])
def test_begun_by_one_whose_loss_was_heard_is_not_waited_for(before: Any) -> None:
    """Its words come by another channel than the news of its end, which does not come again."""
    core = asker()
    core.handle(before, 0.0)
    core.handle(asked(), 0.0)
    core.handle(said("begun"), 0.0)
    (step,) = encodes(core.handle(done(1), 1.0))
    assert step.encodes[0].item == 1


def test_begun_by_a_former_life_is_not_waited_for() -> None:
    core = asker()
    core.handle(asked(), 0.0)
    core.handle(said("begun", epoch=3), 0.0)
    assert sent(core.handle(done(1), 1.0), Cancel) == [Cancel("r~0+1", "E0")]


def test_answers_of_other_lives_and_items_are_not_taken() -> None:
    core = asker()
    core.handle(asked(), 0.0)
    for event in (
        said("ready", request="s"),
        said("ready", item=0),
        said("ready", item=7),
        said("ready", item=2),
        said("ready", helper="E2"),
        Helped(name_help("r", 1, 1), "E1", "ready"),
    ):
        assert core.handle(event, 0.0) == []
    assert not any(slot.ready for slot in core.state.requests["r"].media)


def test_equal_items_are_left_to_one_helper_and_found_together() -> None:
    same = work("r", "cat*4", "dog*4", "dog*4", 1)
    core = asker()
    rows = [
        (asked(same, "", "E1", "E1"), ["step 1 joint: encode r.0 into 0"]),
    ]
    table(core, rows)
    assert brief(core.handle(done(1), 0.0)) == ["E1: cancel r~0+1"]
    assert brief(core.handle(said("no"), 0.0))[0] == "step 2 joint: encode r.1 into 1"
    assert brief(core.handle(done(2), 0.0)) == ["P0: ready E0:1 1,2", "P0: commit E0:1"]
    other = asker()
    other.handle(asked(same, "", "E1", "E1"), 0.0)
    other.handle(said("ready"), 0.0)
    (offer,) = sent(other.handle(done(1), 0.0), Offer)
    assert [part.holder for part in offer.parts] == ["", "E1", "E1"]


def test_all_found_while_it_waits_for_the_encoder_is_offered_at_once() -> None:
    core = asker(image=3)
    core.handle(Submit(work("s", "one*4", "two*4", 1)), 0.0)
    core.handle(asked(TWO, "E2", "E1"), 0.0)
    assert core.handle(said("ready"), 1.0) == []
    (offer,) = sent(core.handle(said("ready", item=0, helper="E2"), 1.0), Offer)
    assert [part.holder for part in offer.parts] == ["E2", "E1"]
    assert core.state.pools["image"].held == 2, "those of s alone"


def test_another_request_with_the_same_image_encodes_it_then() -> None:
    """It has shared the blocks, and was behind the request that left the image to a helper."""
    core = asker()
    core.handle(asked(), 0.0)
    core.handle(said("begun"), 0.0)
    core.handle(Submit(work("s", "dog*4", 2)), 0.0)
    core.handle(done(1), 0.0)
    (step,) = encodes(core.handle(said("ready"), 1.0))
    assert [(row.request, row.item) for row in step.encodes] == [("s", 0)]


@pytest.mark.parametrize("near", ["cached here", "being encoded here", "cached elsewhere"])
def test_a_helper_is_called_off_where_it_is_not_needed(near: str) -> None:
    core = asker()
    if near == "cached elsewhere":
        core.handle(holding("P0", work("x", "dog*4"), IMAGE), 0.0)
    else:
        core.handle(Submit(work("x", "dog*4")), 0.0)
        if near == "cached here":
            core.handle(done(1), 0.0)
    commands = core.handle(asked(), 1.0)
    assert sent(commands, Cancel) == [Cancel("r~0+1", "E0")]


def test_what_ends_takes_its_items_back() -> None:
    core = asker()
    core.handle(asked(work("r", "cat*4", "dog*4", "owl*4", 1), "", "E1", "E2"), 0.0)
    core.handle(said("begun"), 0.0)
    commands = core.handle(Cancel("r"), 1.0)
    assert sent(commands, Cancel) == [Cancel("r~0+1", "E0"), Cancel("r~0+2", "E0")]
    assert core.handle(done(1), 1.0)
    core.handle(Forget("r"), 2.0)
    emptied(core)


def test_its_load_leaves_out_what_others_encode() -> None:
    core = asker(report_s=0.1)
    core.handle(asked(work("r", "cat*4", "dog*4", "owl*4", 1), "", "E1", "E2"), 0.0)
    core.state.rates.per_unit["E"] = 1.0
    due = core.next_timer()
    assert due is not None
    loads = sent(core.handle(Tick(), due), PeerLoad)
    assert {load.predicted_s["E"] for load in loads} == {4.0}


# ---------------------------------------------------------------- the helper


def item(name: str = "cat", request: str = "r", asker_name: str = "E0", **fields: Any) -> Submit:
    alone = work(name_help(request, 0, 1), f"{name}*4", encode_only=True, max_tokens=1, **fields)
    return Submit(alone, ("pixels",), asker=asker_name)


def helper(**settings: Any) -> InstanceCore:
    return make_core("E1", peers="E0 P0", **settings)


def test_a_helper_says_when_it_begins_and_when_its_cache_has_the_features() -> None:
    core = helper()
    rows = [
        (item(), ["step 1 joint: encode r~0+1.0 into 0", "E0: helped r~0+1 begun"]),
        (done(1), ["E0: helped r~0+1 ready"]),
    ]
    table(core, rows)
    emptied(core)
    assert core.state.cached_media(core.state.slots(work("x", "cat*4"))[0])


def test_its_answers_say_who_it_is_and_in_which_life() -> None:
    core = helper(epoch=2)
    answers = sent(core.handle(item(), 0.0), Helped) + sent(core.handle(done(1), 1.0), Helped)
    assert answers == [Helped("r~0+1", "E1", "begun", 2), Helped("r~0+1", "E1", "ready", 2)]


def test_what_it_has_cached_is_ready_at_once() -> None:
    core = helper()
    core.handle(item(), 0.0)
    core.handle(done(1), 0.0)
    table(core, [(item(request="s"), ["E0: helped s~0+1 ready"])])
    emptied(core)


RECALL = Cancel("r~0+1", "E0")


def test_rows_that_fail_are_said() -> None:
    core = helper()
    core.handle(item(), 0.0)
    table(core, [(broken(1, "r~0+1"), ["E0: helped r~0+1 no"])])
    emptied(core)


def test_what_it_has_begun_a_helper_keeps() -> None:
    core = helper()
    core.handle(item(), 0.0)
    table(core, [(RECALL, []), (done(1), ["E0: helped r~0+1 ready"])])
    emptied(core)


@pytest.mark.parametrize("image", [8, 1], ids=["behind another step", "without a block"])
def test_what_it_has_not_begun_a_helper_gives_back_at_once(image: int) -> None:
    core = helper(image=image, rules=ONE_A_STEP)
    core.handle(Submit(work("s", "owl*4")), 0.0)
    core.handle(item(), 0.0)
    table(core, [(RECALL, ["E0: helped r~0+1 no"])])


def test_of_what_it_does_not_know_it_says_no_too() -> None:
    """It may have had it in a former life, or not have heard of it yet; who recalls waits for the answer."""
    core = helper()
    table(core, [(RECALL, ["E0: helped r~0+1 no"])])
    emptied(core)


def test_without_a_cache_nothing_would_be_left() -> None:
    core = helper(image_cache=False)
    table(core, [(item(), ["E0: helped r~0+1 no"])])
    emptied(core)


def test_one_too_large_for_it_is_refused() -> None:
    core = helper(image=1)
    alone = work("r~0+1", "cat*40", encode_only=True)
    table(core, [(Submit(alone, asker="E0"), ["E0: helped r~0+1 no"])])
    emptied(core)


def test_a_helper_of_a_lost_asker_fills_its_cache_all_the_same() -> None:
    """The next life of the request finds the features there."""
    core = helper()
    core.handle(item(), 0.0)
    core.handle(PeerDown("E0"), 0.0)
    core.handle(done(1), 0.0)
    emptied(core)
    assert core.state.cached_media(core.state.slots(work("x", "cat*4"))[0])


def test_names_of_help_are_read_as_they_are_written() -> None:
    for request in ("r", "r~17.1", "a+b~3", "", "~0+1"):
        assert read_help(name_help(request, 4, 11)) == (request, 4, 11)
