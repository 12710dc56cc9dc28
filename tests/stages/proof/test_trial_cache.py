"""What a proof does once though it has many trials: its cost is counted, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from transformers import GenerationMixin

from support.checkpoint_files import checkpoint
from trinity.core.messages import Step
from trinity.preprocess.checkpoint.verdicts import MediaFacts
from trinity.preprocess.processor import RequestProcessor
from trinity.stages.encode import EncodeStage
from trinity.stages.language import LanguageStage
from trinity.stages.models.generic import GenericAdapter
from trinity.stages.proof import prove
from trinity.stages.proof.prompts import one_image, text_alone, three_images
from trinity.stages.proof.reference import PROOF_OUTPUTS
from trinity.stages.proof.subject import Subject
from trinity.stages.proof.trial import TriedModel
from trinity.stages.proof.trial_cache import TrialCache

NAME = "any-mistral3"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject.load(checkpoint(NAME), GenericAdapter)


@pytest.fixture(scope="module")
def facts(subject: Subject) -> MediaFacts:
    return subject.guess_facts(subject.expect(one_image()))


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., None]) -> None:
    """Have calls of a method noted before they are made."""
    own = getattr(owner, name)

    def call(*given: Any, **named: Any) -> Any:
        note(*given, **named)
        return own(*given, **named)

    monkeypatch.setattr(owner, name, call)


def test_processors_are_opened_and_media_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    encoded: list[str] = []

    def note_step(stage: Any, step: Step) -> None:
        encoded.extend(f"{len(step.encodes)} {row.span.content}" for row in step.encodes)

    counted(monkeypatch, RequestProcessor, "__init__", lambda *_, **__: seen.update(["opened"]))
    counted(monkeypatch, EncodeStage, "forward", note_step)
    counted(monkeypatch, LanguageStage, "forward", lambda *_: seen.update(["steps"]))
    assert prove(checkpoint(NAME), GenericAdapter).failed is None
    assert seen["opened"] == 1
    assert len(encoded) == 7, "one alone, two of one size at once, then one and three so"
    assert seen["steps"] == 2 + 5 + 3 + 3 + 1, "a chunk of a few rows reads all weights: there are few"


def test_generate_runs_as_short_as_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    counted(monkeypatch, GenerationMixin, "generate", lambda *_, **named: asked.append(named["max_new_tokens"]))
    assert prove(checkpoint(NAME), GenericAdapter).failed is None
    assert sorted(asked) == [1, 2, 2, PROOF_OUTPUTS]


def tried(subject: Subject, facts: MediaFacts) -> TriedModel:
    return TriedModel(subject.directory, subject.model, facts, subject.trial_cache, subject.make_adapter)


def test_chunks_end_inside_each_image_and_some_are_short(subject: Subject, facts: MediaFacts) -> None:
    trial = tried(subject, facts)
    for prompt in (one_image(), three_images(), text_alone()):
        made = trial.process(prompt)
        stops = trial._list_stops(made, cut=True)
        assert stops[-1] == len(made.work.prompt)
        assert stops == sorted(set(stops))
        for span in made.work.media:
            assert any(span.offset < stop < span.end for stop in stops)
        lengths = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
        assert min(lengths) <= 2
        assert len(stops) <= 3 + len(made.work.media)
        assert trial._list_stops(made, cut=False) == stops[-1:]


def test_no_chunk_ends_inside_an_image_that_must_not_be_cut(subject: Subject, facts: MediaFacts) -> None:
    trial = tried(subject, msgspec.structs.replace(facts, whole_media=True))
    made = trial.process(three_images())
    assert made.work.media[0].atomic
    stops = trial._list_stops(made, cut=True)
    assert not [stop for stop in stops for span in made.work.media if span.offset < stop < span.end]
    assert {span.end for span in made.work.media} <= set(stops)


def test_facts_that_a_processor_does_not_read_share_one(subject: Subject, facts: MediaFacts) -> None:
    trial_cache = TrialCache(subject.directory, templated=True)
    try:
        first = trial_cache.open(facts)
        assert trial_cache.open(msgspec.structs.replace(facts, joined=True, head="none", first=2)) is first
        assert trial_cache.open(msgspec.structs.replace(facts, whole_media=True)) is not first
        prompt = one_image()
        assert trial_cache.process(facts, prompt) is trial_cache.process(facts, prompt)
        assert trial_cache.process(facts, one_image(seed=1)) is not trial_cache.process(facts, prompt)
    finally:
        trial_cache.close()


def test_an_encoding_of_other_facts_or_other_images_is_another(subject: Subject, facts: MediaFacts) -> None:
    trial_cache = subject.trial_cache
    one, other = (trial_cache.process(facts, one_image(seed)) for seed in (0, 1))
    assert trial_cache.key_of(facts, one) != trial_cache.key_of(facts, other)
    assert trial_cache.key_of(facts, one) != trial_cache.key_of(msgspec.structs.replace(facts, joined=True), one)
    assert trial_cache.key_of(facts, one) == trial_cache.key_of(msgspec.structs.replace(facts, whole_media=True), one)
