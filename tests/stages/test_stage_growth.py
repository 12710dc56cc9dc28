"""Stages whose requests get blocks while they are open: the same tokens as with all blocks at once."""

from __future__ import annotations

import pytest

from support.emulated_instances import IMAGES, SOURCE, TARGET, moved, prefilled
from support.emulated_instances import work_of as paced_work
from support.language_stage import Solo
from support.language_stage import work as text
from trinity.core.messages import Grow, Open, Prefill, Step
from trinity.errors import StageError
from trinity.stages.base import GrowableStage


def test_a_table_may_grow_a_block_at_a_time() -> None:
    """A prompt of 37 in blocks of 16, one beyond the prompt's when there is need, and others open beside it."""
    whole, solo = Solo(), Solo()
    assert isinstance(solo.stage, GrowableStage)
    wanted = whole.serve(text(), 40)
    beside = text("b", max_tokens=100)
    solo.open(beside)
    solo.fill(beside)
    blocks = solo.pool.take(6)
    solo.open(text(), blocks=blocks[:3])
    tokens = [solo.fill(text())]
    held = 3
    for _ in range(39):
        if 37 + len(tokens) > held * 16:
            solo.stage.grow(Grow({"a": blocks[held : held + 1], "nobody": (0,)}))
            held += 1
        tokens.append(solo.step(decodes=("b", "a"))["a"].token)
    assert tokens == wanted
    assert held == 5


def test_without_growing_its_next_position_has_no_place() -> None:
    solo = Solo()
    solo.open(text(), blocks=solo.pool.take(3))
    solo.fill(text())
    for _ in range(11):
        solo.step(decodes=("a",))
    with pytest.raises(StageError, match="beyond its blocks"):
        solo.step(decodes=("a",))


def test_what_is_to_be_prefilled_again_is_not_decoded_before() -> None:
    solo = Solo()
    opened = Open(work=text(), blocks=solo.pool.take(5), tokens=(1, 2, 3), again=True)
    solo.stage.open(opened)
    with pytest.raises(StageError, match="before its prefill ended"):
        solo.step(decodes=("a",))
    solo.step(Prefill("a", 0, 40, True))
    assert solo.step(decodes=("a",))


def test_an_emulated_table_grows_too() -> None:
    work = paced_work()
    site, token = prefilled(work)
    wanted = moved(work, site, token)
    tokens = [wanted.decode() for _ in range(10)]
    there = moved(work, site, token)
    there.stage.close("r")
    there.stage.open(Open(work=work, blocks=TARGET[: len(SOURCE)], tokens=(token,)))
    there.stage.grow(Grow({"r": TARGET[len(SOURCE) : -1], "nobody": (0,)}))
    there.stage.grow(Grow({"r": TARGET[-1:]}))
    assert isinstance(there.stage, GrowableStage)
    assert [there.decode() for _ in range(10)] == tokens


def test_emulated_outputs_are_prefilled_again() -> None:
    """With its features, as a prompt followed by outputs; the next token is the one that decoding would have given."""
    work = paced_work()
    site, token = prefilled(work)
    wanted = moved(work, site, token)
    tokens = [token, *(wanted.decode() for _ in range(5))]
    again, _ = prefilled(work)
    again.stage.close("r")
    again.stage.open(Open(work=work, blocks=TARGET, images=(IMAGES,), tokens=tuple(tokens[:4]), again=True))
    again.prefill(work, 0, 9)
    row = Prefill("r", 9, len(work.prompt) + 4 - 9, True)
    assert again.stage.forward(Step(4, "joint", prefills=(row,)))["r"].token == tokens[4]
