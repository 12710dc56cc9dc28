"""The check at load of a type whose own forward looks into encoders that a text instance has not loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma3nTextConfig
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextModel

from support.checkpoint_files import checkpoint
from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint.verdicts import MediaFacts
from trinity.stages.models import LoadedModel, load_model
from trinity.stages.models.checks import self_check, set_attention
from trinity.stages.models.generic import GenericAdapter, TextBelowHead, runs_on_text
from trinity.stages.proof.prove import prove

NAME = "gemma4"  # a soft cap at its head, and embeddings for each layer


@pytest.fixture(scope="module")
def proven() -> Path:
    directory = checkpoint(f"any-{NAME}")
    assert prove(directory).failed is None
    return directory


@pytest.fixture
def model(proven: Path) -> LoadedModel:
    found = load_model(proven, "PD", dtype="float32")
    set_attention(found.language, found.adapter, "eager")  # transformers' own, as the check has it
    return found


@pytest.fixture
def looking(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """As Gemma 3n's own forward does, which needs a library that is not here."""
    kind = type(model.language.base_model)
    forward = kind.forward

    def look(self: Any, *given: Any, **named: Any) -> Any:
        assert self.embed_vision.training in (True, False)
        return forward(self, *given, **named)

    monkeypatch.setattr(kind, "forward", look)
    return model


def test_a_forward_that_needs_no_encoder_is_the_models_own(model: LoadedModel) -> None:
    assert runs_on_text(model.language)
    assert model.adapter.text_alone(model.language) is model.language


@torch.inference_mode()
def test_else_it_is_the_text_models_own_with_the_head(looking: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not runs_on_text(looking.language)
    found = looking.adapter.text_alone(looking.language)
    assert isinstance(found, TextBelowHead)
    ids = torch.arange(5, 45)[None]
    logits = found(input_ids=ids, use_cache=False).logits
    monkeypatch.undo()
    torch.testing.assert_close(logits, looking.language(input_ids=ids, use_cache=False).logits)


def test_the_check_holds_it_to_that(looking: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    self_check(looking)
    monkeypatch.setattr(sys.modules["trinity.stages.models.generic"], "scale_logits", lambda logits, config: logits)
    self_check(looking)  # the head is in both; it was compared with generate() in the proof
    plain = GenericAdapter.token_inputs
    monkeypatch.setattr(
        GenericAdapter,
        "token_inputs",
        lambda *given: {name: 1.01 * each for name, each in plain(*given).items()},
    )
    with pytest.raises(UnsupportedModel, match="off"):
        self_check(looking)


def test_the_check_asks_for_it_once(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    find = GenericAdapter.text_alone

    def note(adapter: GenericAdapter, language: Any) -> Any:
        asked.append(language.get_input_embeddings().weight.dtype)
        return find(adapter, language)

    monkeypatch.setattr(GenericAdapter, "text_alone", note)
    half = load_model(model.directory, "PD", dtype="bfloat16")  # compared in float32, and in bfloat16 by two routes
    asked.clear()
    self_check(half)
    assert asked == [torch.bfloat16]


@torch.inference_mode()
def test_embeddings_of_layers_are_looked_up_as_gemma_3n_does() -> None:
    """Its table has no id of media, and takes whatever it has not for 0: so rows of media are that."""
    config = Gemma3nTextConfig(
        hidden_size=32,
        laurel_rank=32,
        vocab_size=60,
        vocab_size_per_layer_input=50,
        hidden_size_per_layer_input=8,
        intermediate_size=[64, 64],
        num_hidden_layers=2,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=3,
    )
    text: Any = Gemma3nTextModel(config)
    adapter = GenericAdapter(SimpleNamespace(get_text_config=lambda **_: config), MediaFacts())
    ids, media = torch.tensor([7, 0, 0, 9]), torch.tensor([False, True, True, False])
    found = adapter.token_inputs(text, ids, media)["per_layer_inputs"]
    assert found.shape == (1, 4, 2, 8)
    torch.testing.assert_close(found, text.get_per_layer_inputs(torch.tensor([[7, 55, 55, 9]])))
