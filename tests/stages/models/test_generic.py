"""The adapter of types that nobody listed: features of an image that go to several layers of the text model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from trinity.preprocess.checkpoint.verdicts import MEDIA, MediaFacts
from trinity.stages.batch import Chunk, Decodes, build_batch
from trinity.stages.models.generic import GenericAdapter

CONFIG = LlamaConfig(hidden_size=2, num_attention_heads=1, num_hidden_layers=4)
LAYERED = MediaFacts(image_token_id=5, layers=(3, 0), layer_names=("where", "parts"))


def rows(first: float, count: int = 3) -> Any:
    return torch.arange(2.0 * count).reshape(count, 2) + first


def test_a_row_of_features_has_a_part_for_each_layer_behind_the_pooled_one() -> None:
    adapter = GenericAdapter(CONFIG, LAYERED)
    given = [(0, [rows(10, 1), rows(12, 2)]), (3, rows(20)), (0, rows(30))]
    found = adapter.feature_rows(SimpleNamespace(pooler_output=rows(0), deepstack_features=given))
    assert adapter.deepstack == 2
    assert torch.equal(found, torch.cat((rows(0), rows(20), rows(30)), dim=-1)), "of a layer's parts the last"


def test_without_a_pooled_part_the_embeddings_are_zeros() -> None:
    adapter = GenericAdapter(CONFIG, LAYERED)
    found = adapter.feature_rows(SimpleNamespace(pooler_output=None, deepstack_features=[(3, rows(1)), (0, rows(2))]))
    assert torch.equal(found, torch.cat((torch.zeros(3, 2), rows(1), rows(2)), dim=-1))


def test_the_parts_of_a_chunk_go_to_their_layers_and_tokens() -> None:
    adapter = GenericAdapter(CONFIG, LAYERED)
    given = adapter.language_inputs(torch.cat((rows(1, 2), rows(7, 2)), dim=-1), torch.tensor([1, 3]), 5)
    assert given["where"].tolist() == [[[False], [True], [False], [True], [False]]]
    assert list(given["parts"]) == [3, 0]
    assert torch.equal(given["parts"][3], rows(1, 2))
    assert torch.equal(given["parts"][0], rows(7, 2))


def test_without_layers_the_conventions_hold() -> None:
    adapter = GenericAdapter(CONFIG, MediaFacts(image_token_id=5))
    output = SimpleNamespace(pooler_output=rows(0), deepstack_features=None)
    assert torch.equal(adapter.feature_rows(output), rows(0))
    assert adapter.language_inputs(rows(0), torch.tensor([0, 1, 2]), 4) == {}


def test_types_of_tokens_go_by_their_ids_and_placeholders_have_their_own() -> None:
    adapter = GenericAdapter(CONFIG, MediaFacts(image_token_id=5, token_types={"kinds": {MEDIA: 1, 7: 2}}))
    ids, media = torch.tensor([7, 0, 0, 3, 5]), torch.tensor([False, True, True, False, False])
    given = adapter.token_inputs(None, ids, media)
    assert given["kinds"].tolist() == [[2, 1, 1, 0, 0]], "a placeholder's id outside of an image is a token (BOS)"
    assert adapter.reads_types, "no CUDA graph keeps them"


def test_what_the_model_writes_has_no_type_whatever_its_id() -> None:
    adapter = GenericAdapter(CONFIG, MediaFacts(image_token_id=5, token_types={"kinds": {MEDIA: 1, 7: 2}}))
    ids, media = torch.tensor([7, 7, 0, 7]), torch.tensor([False, False, True, False])
    given = adapter.token_inputs(None, ids, media, torch.tensor([True, False, False, True]))
    assert given["kinds"].tolist() == [[0, 2, 1, 0]]


def test_the_check_of_the_text_model_alone_has_no_token_with_a_type() -> None:
    types = {"kinds": {MEDIA: 1, 7: 2}, "more": {9: 1}}
    adapter = GenericAdapter(CONFIG, MediaFacts(image_token_id=5, token_types=types))
    assert adapter.placeholder_ids == {5, 7, 9}
    assert GenericAdapter(CONFIG, MediaFacts(image_token_id=5, skipped=0)).placeholder_ids == {0, 5}


def test_positions_leave_a_padding_token_out() -> None:
    adapter = GenericAdapter(CONFIG, MediaFacts(image_token_id=5, first=3, skipped=2))
    plain = adapter.positions(None, np.array([9, 8, 7]), (), np.zeros(3))
    assert (plain.prompt, plain.delta) == (None, 3)
    found = adapter.positions(None, np.array([9, 2, 8, 2, 2, 7]), (), np.zeros(6))
    assert found.prompt is not None
    assert found.prompt.tolist() == [[3, 2, 4, 2, 2, 5]]
    assert found.delta == 3, "outputs go on from the length of the prompt"


def test_a_padding_token_that_the_model_writes_has_no_place_and_a_row_of_an_image_does() -> None:
    adapter = GenericAdapter(CONFIG, MediaFacts(image_token_id=5, first=1, skipped=0))
    ids, places = torch.tensor([7, 0, 0, 4]), torch.tensor([[1, 2, 3, 4]])
    media = torch.tensor([False, False, True, False])  # ids of an image's rows are 0
    assert adapter.place(ids, media, places).tolist() == [[1, 0, 3, 4]]
    assert GenericAdapter(CONFIG, MediaFacts(image_token_id=5)).place(ids, media, places) is places


def test_without_types_the_text_model_is_told_none() -> None:
    adapter = GenericAdapter(CONFIG, MediaFacts(image_token_id=5))
    assert adapter.token_inputs(None, torch.tensor([1]), torch.tensor([False])) == {}
    assert not adapter.reads_types


def test_rows_that_are_computed_again_behind_a_prompt_were_written_by_the_model() -> None:
    table = np.arange(1, 4)
    chunks = [Chunk(np.arange(5), np.arange(5), 2, table, written=2), Chunk(np.arange(3), np.arange(3), 0, table)]
    one = Decodes(np.array([9]), np.array([6]), np.array([7]), table[None])
    batch = build_batch(one, chunks, 4, 1, torch.device("cpu"))
    assert batch.written.tolist() == [True, False, False, False, True, True, False, False, False]
