"""Folders as the hub has them answer as transformers' documented route does, in threads and in processes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from support.pipeline_options import pipeline_options
from support.published_chats import OUTPUTS, chats, published_answers, published_folder
from support.published_models import PUBLISHED_MODELS
from support.recordings import serve
from support.shared_launcher import sharing
from trinity.errors import RequestError
from trinity.pipeline import Pipeline
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request, Sampling
from trinity.stages.models import load_model

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of tensors, in PaliGemma's processor
SPLIT = "1E1P1D"
POOLS = {"image": 512, "kv": 1024}
QUICK_IN_PROCESSES = ("Qwen2.5-VL", "LLaVA-1.5-bin")


def check_threads(name: str, placement: str) -> None:
    known = published_answers(name)
    found = serve(known.folder, placement, [chats(name)], pools=POOLS, kv_block_size=4, image_block_size=7)
    assert {request: found.tokens(request) for request in known.tokens} == known.tokens


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_a_published_folder_answers_as_transformers_does(name: str) -> None:
    check_threads(name, SPLIT)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_a_published_folder_on_one_instance(name: str) -> None:
    check_threads(name, "EPD")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK_IN_PROCESSES else pytest.mark.slow) for name in PUBLISHED_MODELS],
)
async def test_a_published_folder_in_processes(name: str, torch_launcher: Any) -> None:
    known = await asyncio.to_thread(published_answers, name)
    settings = pipeline_options({"dtype": "float32", "pools": POOLS})
    with sharing(torch_launcher):
        async with Pipeline(known.folder, SPLIT, connector="shm", hosting="process", **settings) as pipe:
            outputs = await asyncio.gather(*map(pipe.complete, chats(name)))
    assert {each.request_id: list(each.token_ids) for each in outputs} == known.tokens


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_a_published_folder_has_just_the_weights_that_transformers_wants(name: str) -> None:
    """The folders' names are written by hand: what transformers draws at random would make any comparison pass."""
    import transformers

    published = PUBLISHED_MODELS[name]
    kind = getattr(transformers, published.model_class)
    _, report = kind.from_pretrained(published_folder(name), output_loading_info=True)
    missing = {each.rpartition(".vision_tower.")[2] for each in report["missing_keys"]}
    cut = {each for each in missing if each.startswith(("post_layernorm", "encoder.layers.2."))}
    assert missing == cut
    assert bool(cut) is (name == "LLaVA-1.5-bin")
    assert set(report["mismatched_keys"]) == set()


def test_a_text_without_an_image_is_rejected_by_the_part_that_is_not_proven() -> None:
    processor = RequestProcessor(published_answers("PaliGemma-2").folder)
    try:
        with pytest.raises(RequestError, match=r"takes no prompt without an image: logits under chunking: .* give an"):
            processor.process(Request("what is a boat", max_tokens=2))
    finally:
        processor.close()


def test_a_tower_cut_behind_its_feature_layer_loads_without_the_rest() -> None:
    part = load_model(published_folder("LLaVA-1.5-bin"), "E", dtype="float32").vision
    assert all(bool(each.isfinite().all()) for name, each in part.named_parameters() if "post_layernorm" not in name)


QUOTE = "What does <|image_pad|> stand for in <|im_start|>user?"


def test_a_chat_that_quotes_a_placeholder_is_answered_as_transformers_answers_it_sanitized() -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    folder, messages = published_folder("Qwen2.5-VL"), [{"role": "user", "content": QUOTE}]
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    template = json.loads((folder / "chat_template.json").read_text())["chat_template"]
    inputs = tokenizer.apply_chat_template(
        messages,
        chat_template=template,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
        sanitize_control_tokens=True,
    )
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        own = model.generate(**inputs, max_new_tokens=OUTPUTS, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    quoting = Request(messages=messages, max_tokens=OUTPUTS, sampling=Sampling(temperature=0), special_tokens=False)
    found = serve(folder, SPLIT, [[quoting]], pools=POOLS)
    assert [each.token_ids for each in found.outputs.values()] == [own.tolist()]
