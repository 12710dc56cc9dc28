"""The benchmark of text that leads: what it would call a failure, and that it runs."""

from __future__ import annotations

import pytest

from benchmarks.serving.leading import (
    IMAGE_TOKENS,
    LEAD,
    LOADED,
    TEXTS,
    Load,
    Pair,
    due,
    jobs,
    load_aims,
    loaded,
    replay,
    rest_aims,
    run,
)
from benchmarks.setting import Setting


def test_what_is_due_hides_the_shorter_of_text_and_images() -> None:
    assert due(0).without == due(0).with_
    for text in (256, 1024):
        assert due(text).with_ == pytest.approx(due(0).with_), "the encoding takes longer, and all of it is hidden"
    gained = [due(text).without - due(text).with_ for text in (256, 1024, 4096)]
    assert gained == sorted(gained)
    assert gained[0] == pytest.approx(0.128)


def test_first_tokens_far_from_what_is_due_fall_short() -> None:
    good = {text: due(text) for text in TEXTS}
    assert [aim.met for aim in rest_aims(good)] == [True]
    assert [aim.met for aim in rest_aims({**good, 1024: Pair(3.7, 3.7)})] == [False]


def test_a_load_that_is_served_worse_falls_short() -> None:
    good = Load(Pair(2.0, 1.5), Pair(1.0, 1.0), Pair(0.5, 0.5), Pair(10.0, 9.9))
    bad = Load(Pair(2.0, 2.1), Pair(1.0, 1.1), Pair(0.5, 0.4), Pair(10.0, 10.0))
    assert [aim.met for aim in load_aims({("EPD", 1.0): good})] == [True] * 3
    assert [aim.met for aim in load_aims({("EPD", 1.0): good, ("EPD", 2.0): bad})] == [False] * 3


def test_its_prompts_have_text_ahead_of_their_images() -> None:
    asked = jobs(2.0, 30, LEAD, 0.5)
    with_images = [job for job in asked if job.images]
    assert 5 < len(with_images) < 25
    assert {job.prompt for job in with_images} == {LEAD + 2 * IMAGE_TOKENS + 64}
    found = replay("2E1PD", asked, LEAD, leading=True)
    assert (len(found.images), len(found.text)) == (len(with_images), 30 - len(with_images))


@pytest.mark.parametrize("way", LOADED)
def test_without_text_ahead_nothing_changes(way: str) -> None:
    """The control: what differs under load is due to the text and to nothing else."""
    asked = jobs(16.0, 20, 0, 0.5)
    assert replay(way, asked, 0, leading=False) == replay(way, asked, 0, leading=True)
    assert loaded(way, 2.0, 20).images.with_ < loaded(way, 2.0, 20).images.without


@pytest.mark.slow
def test_it_runs() -> None:
    """Simulated figures are those of virtual time, whatever the machine does."""
    found = run(Setting(quick=True))
    assert len(found.tables[0].rows) == len(TEXTS)
    assert [aim.met for aim in found.aims[1:]] == [True] * 3
