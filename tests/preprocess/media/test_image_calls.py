"""Calls of a model's processor: in the form that it takes, keeping what is the images' own, as one call of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from support.tried_processors import load, own_processor, process, processor
from trinity.errors import UnsupportedModel
from trinity.preprocess.media.image_calls import ImageCalls
from trinity.request import Request

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of tensors, in ERNIE's processor
MARKED = "<image_start><image><image_end>"  # what HunYuan-VL's processor asks for


def picture(seed: int, width: int, height: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


PICTURES = [picture(1, 80, 60), picture(2, 150, 61)]


def test_a_placeholder_stands_between_the_tokens_that_its_processor_asks_for() -> None:
    name = "any-hunyuan_vl"
    found = process(name, "<image>", Request("See <image> and <image>.", images=PICTURES), MARKED)
    own = own_processor(name)(text=[f"See {MARKED} and {MARKED}."], images=[PICTURES], return_tensors="pt")
    assert list(found.work.prompt) == own["input_ids"][0].tolist(), "no special token in front either"
    assert torch.equal(torch.cat([item["pixel_values"] for item in found.inputs]), own["pixel_values"])


def test_a_processor_that_asks_for_more_is_refused_without_it() -> None:
    with pytest.raises(UnsupportedModel, match="image_start"):
        process("any-hunyuan_vl", "<image>", Request("See <image>.", images=PICTURES[:1]))


def test_what_stands_around_a_placeholder_is_not_written_twice() -> None:
    calls = ImageCalls(load("any-hunyuan_vl", "<image>", MARKED), PICTURES[0])
    text, ids, _ = calls.call(PICTURES[:1])
    assert text.startswith("<image_start><image>")
    assert set(calls.strip(text).split("<image>")) == {""}
    assert len(ids) == calls.strip(text).count("<image>") + 2


def test_a_processor_that_takes_one_list_of_images_gets_one() -> None:
    name = "any-got_ocr2"
    with pytest.raises(ValueError, match="multi_page"):
        own_processor(name)(text=["<imgpad>"], images=[PICTURES[:1]], return_tensors="pt")
    found = process(name, "<imgpad>", Request("Read <image><image>", images=PICTURES))
    own = own_processor(name)(text=["Read <imgpad><imgpad>"], images=PICTURES, return_tensors="pt")
    assert list(found.work.prompt) == own["input_ids"][0].tolist()
    assert torch.equal(torch.cat([item["pixel_values"] for item in found.inputs]), own["pixel_values"])


def test_what_has_an_entry_for_each_token_is_the_prompts_and_not_an_images() -> None:
    name = "any-ernie4_5_vl_moe"
    own = own_processor(name)(text=["<image>"], images=[PICTURES[:1]], return_tensors="pt")
    assert own["moe_mm_token_type_ids"].shape == own["input_ids"].shape, "else this shows nothing"
    found = process(name, "<image>", Request("<image><image>", images=PICTURES))
    assert [set(item) for item in found.inputs] == [{"pixel_values", "image_grid_thw"}] * 2
    for item, one in zip(found.inputs, PICTURES, strict=True):
        alone = own_processor(name)(text=["<image>"], images=[[one]], return_tensors="pt")
        assert torch.equal(item["pixel_values"], alone["pixel_values"])


@pytest.mark.parametrize(("name", "special"), [("any-hunyuan_vl", False), ("any-ernie4_5_vl_moe", True)])
def test_special_tokens_are_added_as_the_processor_does(name: str, special: bool) -> None:
    marker = MARKED if "hunyuan" in name else ""
    with processor(name, "<image>", marker) as found:
        mine = [found.process(request).work.prompt for request in (Request("A boat."), Request("A boat.", images=[]))]
    own = own_processor(name)(text=["A boat."], return_tensors="pt")["input_ids"][0].tolist()
    assert [list(ids) for ids in mine] == [own, own]
    assert (own[0] == own_processor(name).tokenizer.bos_token_id) == special
