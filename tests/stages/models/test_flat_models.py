"""Bases that are the text model themselves, encoders that embed codes, and logits that the model's own forward bans."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from support.checkpoint_files import checkpoint
from trinity.preprocess.checkpoint.verdicts import MediaFacts
from trinity.stages.models.checks import _row_errors
from trinity.stages.models.generic import FORWARD, GenericAdapter
from trinity.stages.models.own_forward import forward_features, forward_logits
from trinity.stages.models.own_logits import BANNED, set_aside
from trinity.stages.models.partial_models import make_partial_class
from trinity.stages.proof.subject import Subject, relative_error

FLAT = MediaFacts(language="", towers=("vqmodel",), embeds_codes=True, head=FORWARD)
LEAST = torch.finfo(torch.float32).min
FAR = 1e30


@cache
def subject() -> Subject:
    return Subject.load(checkpoint("any-chameleon"), GenericAdapter)


def children(facts: MediaFacts, part: str) -> set[str]:
    """Children of the base that a part of the model has."""
    with torch.device("meta"):
        kind = make_partial_class(type(subject().model), GenericAdapter(subject().config, facts), part)
        return {name for name, _ in kind(subject().config).base_model.named_children()}


def test_children_that_no_forward_over_embeddings_calls_are_encoders() -> None:
    assert subject().language_name == ""
    assert subject().towers == ("vqmodel",)
    assert subject().language is subject().model.base_model


def test_an_encoder_has_the_embedding_where_codes_need_it_and_nothing_else_that_has_weights() -> None:
    assert children(FLAT, "vision") == {"vqmodel", "embed_tokens", "rotary_emb"}
    assert children(msgspec.structs.replace(FLAT, embeds_codes=False), "vision") == {"vqmodel", "rotary_emb"}
    assert children(FLAT, "language") == {"embed_tokens", "layers", "norm", "rotary_emb"}


@torch.inference_mode()
def test_logits_are_those_of_the_whole_forward_banned_ones_too() -> None:
    model, ids = subject().model, torch.tensor([[5, 9, 17, 4]])
    own: Tensor = model(input_ids=ids).logits[0]
    states = model.base_model(input_ids=ids).last_hidden_state[0]
    adapter = GenericAdapter(subject().config, FLAT)
    found = adapter.head(model, states)
    assert relative_error(found, own) < 1e-6
    assert torch.equal(found == LEAST, own == LEAST)
    assert 0 < int((own == LEAST).sum()) < own.numel()
    plain = adapter.__class__(subject().config, msgspec.structs.replace(FLAT, head="config")).head(model, states)
    assert relative_error(plain, own) > FAR, "a head that bans nothing is another"
    assert "forward" not in model.base_model.__dict__, "the model is as it was"


class Flat(torch.nn.Module):
    """A base with an encoder, an embedding and layers, as an E has it: without the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.Linear(3, 4)
        self.register_module("embed", None)
        self.register_module("layers", None)

    @property
    def base_model(self) -> Flat:
        return self

    def part(self, name: str) -> Any:
        return getattr(self, name)

    def forward(self, input_ids: Tensor, pixels: Tensor, use_cache: bool = False) -> Tensor:
        states: Any = self.part("embed")(input_ids)
        states = states.masked_scatter((input_ids == 7)[..., None], self.tower(pixels))
        for layer in self.part("layers")[:2]:
            states = layer(states, attention_mask=None)
        raise AssertionError("no layer was reached")


@torch.inference_mode()
def test_features_are_what_the_first_layer_is_given() -> None:
    model, pixels = Flat(), torch.rand(5, 3)
    found = forward_features(model, "", 4, 7, 5, {"pixels": pixels, "unknown": pixels})
    assert torch.equal(found, model.tower(pixels))
    assert model.layers is None
    assert model.embed is None


def test_a_banned_logit_hides_no_difference_of_others() -> None:
    own = torch.tensor([[1.0, 2.0, LEAST], [4.0, 1.0, LEAST]])
    off = own + torch.tensor([0.5, 0.0, 0.0])
    assert relative_error(own, own) == 0
    assert relative_error(off, own) == pytest.approx(0.125)
    rows = _row_errors(off.repeat(3, 1), own.repeat(3, 1))
    assert rows.flatten().tolist() == pytest.approx([0.25, 0.125] * 3)


@pytest.mark.parametrize("banned", [LEAST, float("-inf"), BANNED])
def test_one_side_that_bans_what_the_other_does_not_is_infinitely_far(banned: float) -> None:
    plain, bans = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, banned]])
    assert relative_error(bans, bans) == 0
    assert relative_error(plain, bans) > FAR
    assert relative_error(bans, plain) > FAR
    assert set_aside(bans, bans)[1].tolist() == [[1.0, 0.0]]


def test_logits_of_a_flat_base_need_no_language_model() -> None:
    model, states = subject().model, torch.randn(2, subject().config.hidden_size)
    with torch.inference_mode():
        found = forward_logits(model, "", model.base_model, states)
        wanted = model.lm_head(states)
    allowed = found > LEAST
    assert torch.allclose(found[allowed], wanted[allowed])
