"""What a model's own forward does around its text model, run with a stand-in for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.checkpoint_files import checkpoint
from trinity.errors import StageError
from trinity.stages.models.generic import GenericAdapter, below_head
from trinity.stages.models.own_forward import forward_features, forward_logits
from trinity.stages.proof.prompts import one_image
from trinity.stages.proof.reference import Expected
from trinity.stages.proof.subject import Subject, relative_error

EXACT = 1e-5


def opened(name: str) -> tuple[Subject, Expected]:
    subject = Subject.load(checkpoint(f"any-{name}"), GenericAdapter)
    return subject, subject.expect(one_image())


@torch.inference_mode()
def test_features_are_those_that_the_text_model_is_given() -> None:
    subject, own = opened("llama4")
    model, number = subject.model, subject.find_placeholder(own.ids)
    assert model.base_model.get_image_features(own.inputs["pixel_values"]).pooler_output is None, "no usual features"
    held, count = model.language_model, own.ids.count(number)
    model.language_model = None  # as on an instance that only encodes
    found = forward_features(model, "language_model", 64, number, count, {"pixel_values": own.inputs["pixel_values"]})
    assert model.language_model is None
    model.language_model = held
    assert own.embeds is not None
    wanted = own.embeds[torch.tensor(own.ids) == number]
    assert relative_error(found, wanted) < EXACT
    assert relative_error(found.roll(1, 0), wanted) > 0.1, "rows differ"


@torch.inference_mode()
@pytest.mark.parametrize("name", ["muse_glimmer", "llama4"])
def test_logits_are_those_of_the_whole_forward(name: str) -> None:
    subject, own = opened(name)
    model, ids = subject.model, torch.tensor([own.ids[:4]])
    text: Any = below_head(getattr(model.base_model, subject.language_name))
    states = text(input_ids=ids).last_hidden_state[0]
    found = forward_logits(model, subject.language_name, text, states)
    assert relative_error(found, model(input_ids=ids).logits[0]) < EXACT
    assert below_head(getattr(model.base_model, subject.language_name)) is text, "the model is as it was"


def test_a_scale_that_no_convention_names_is_found() -> None:
    subject, own = opened("muse_glimmer")
    plain = GenericAdapter(subject.config, subject.guess_facts(own)).head(subject.model, torch.ones(2, 64))
    made = forward_logits(subject.model, subject.language_name, subject.language, torch.ones(2, 64))
    assert relative_error(plain, made) > 0.01


class Beside(torch.nn.Module):
    """A model that gives its text model features beside ids, ``parts`` times."""

    base_model_prefix = "model"

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts, self.text = parts, torch.nn.Identity()

    @property
    def base_model(self) -> Any:
        return self

    def forward(self, input_ids: torch.Tensor, use_cache: bool, pixels: torch.Tensor) -> Any:
        given = {f"part_{number}": pixels + number for number in range(self.parts)}
        return self.text(input_ids=input_ids, mask=input_ids == 3, **given)


def test_features_that_a_text_model_is_given_beside_ids_are_found_by_their_shape() -> None:
    pixels = torch.arange(8.0).reshape(1, 4, 2)
    assert torch.equal(forward_features(Beside(1), "text", 2, 3, 4, {"pixels": pixels}), pixels[0])
    for parts, count in ((0, 4), (2, 4), (1, 3)):  # none, two, and of another number
        with pytest.raises(StageError, match="no embeddings"):
            forward_features(Beside(parts), "text", 2, 3, count, {"pixels": pixels})


def test_a_model_that_never_reaches_its_text_model_is_told_of() -> None:
    class Lone(torch.nn.Module):
        base_model_prefix = "model"

        @property
        def base_model(self) -> Any:
            return self

        def forward(self, input_ids: torch.Tensor, use_cache: bool, pixels: torch.Tensor) -> torch.Tensor:
            return pixels

    with pytest.raises(StageError, match="does not reach its text model"):
        forward_features(Lone(), "language_model", 4, 1, 2, {"pixels": torch.zeros(1)})
