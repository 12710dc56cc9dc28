"""RequestProcessor against the models' own processors: the same ids and pixels, whichever architecture."""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.checkpoint_files import checkpoint
from trinity.errors import RequestError
from trinity.preprocess.loader import load_processor, record_texts
from trinity.preprocess.media.image_kind import make_channels_contiguous
from trinity.preprocess.media.media_markup import IMAGE_TEXT
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.request import Request
from trinity.testing.checkpoints import ARCHITECTURES

TEXT_ONLY = ("llama", "mistral")
MULTIMODAL = tuple(name for name in ARCHITECTURES if name not in TEXT_ONLY)
SIZES = ((60, 80), (130, 90), (33, 120))  # height, width


def picture(seed: int, height: int = 60, width: int = 80) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


PICTURES = [picture(seed, *size) for seed, size in enumerate(SIZES)]


@cache
def processor_of(name: str) -> RequestProcessor:
    return RequestProcessor(checkpoint(name))


@cache
def oracle_of(name: str) -> Any:
    """The model's own processor, untouched by trinity's recording of its tokenizer."""
    from transformers import AutoConfig, AutoTokenizer

    directory = checkpoint(name)
    return load_processor(directory, AutoConfig.from_pretrained(directory), AutoTokenizer.from_pretrained(directory))


def own_markers(name: str, prompt: str) -> str:
    return prompt.replace("<image>", IMAGE_TEXT[name].marker.format(token=oracle_of(name).image_token))


def expected(name: str, text: str, images: list[Image.Image], **kwargs: Any) -> dict[str, Any]:
    nested = [images] if images else None  # all of one prompt, as a chat gives them
    return dict(oracle_of(name)(text=text, images=nested, return_tensors="pt", **kwargs))


PROMPTS = {
    0: ["Hello there", " lead and trail ", "", "USER: ünïcödé 你好 🙂\n\nASSISTANT:"],
    1: ["<image>", "<image>\nWhat is this?", "What is\n<image>", " a <image> b", "one\n\n<image>\n\ntwo", "x<image>x"],
    3: [
        "<image><image><image>",
        "<image>\n<image>\n\n<image> Compare.",
        "1: <image>, 2:\n<image>\n3:\n\n<image>\n\n\nend ",
    ],
}


@pytest.mark.parametrize("name", MULTIMODAL)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_prompt_ids_equal_the_models_own_processor(name: str, count: int) -> None:
    images = PICTURES[:count]
    for prompt in PROMPTS[count]:
        wanted = expected(name, own_markers(name, prompt), images)["input_ids"][0].tolist()
        if wanted:
            assert list(processor_of(name).process(Request(prompt, images=images)).work.prompt) == wanted, prompt
            continue
        assert prompt == "", "only this one has no token, and that where the tokenizer adds none"
        with pytest.raises(RequestError, match="no tokens"):
            processor_of(name).process(Request(prompt))


@pytest.mark.parametrize("name", MULTIMODAL)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_messages_take_the_models_chat_template(name: str, count: int) -> None:
    images = PICTURES[:count]
    parts = [{"type": "image"} for _ in images]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "What do they share?"}]},
        {"role": "assistant", "content": "Little."},
        {"role": "user", "content": "Why?"},
    ]
    as_parts = [
        {**m, "content": m["content"] if isinstance(m["content"], list) else [{"type": "text", "text": m["content"]}]}
        for m in messages
    ]
    text = oracle_of(name).apply_chat_template(as_parts, add_generation_prompt=True, tokenize=False)
    first = oracle_of(name).tokenizer.bos_token
    special = not (first and text.startswith(first))
    work = processor_of(name).process(Request(messages=messages, images=images)).work
    assert list(work.prompt) == expected(name, text, images, add_special_tokens=special)["input_ids"][0].tolist()
    assert len(work.media) == count


@pytest.mark.parametrize("name", ["llama", "llava"])
def test_of_several_named_templates_the_default_is_taken(name: str, tmp_path: Path) -> None:
    """The oracle: the tokenizer's own ``apply_chat_template``, which says what it misses where none is the default."""
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": "hello"}]
    for names in (("default", "tool_use"), ("rag", "tool_use")):
        folder = tmp_path / names[0]
        shutil.copytree(checkpoint(name), folder, ignore=shutil.ignore_patterns("*.safetensors"))
        template = (folder / "chat_template.jinja").read_text()
        (folder / "chat_template.jinja").unlink()
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        named = [{"name": each, "template": template.replace("USER", each)} for each in names]
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        processor = RequestProcessor(folder)
        if "default" in names:
            rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(rendered, add_special_tokens=name == "llava" and not rendered.startswith("<s>"))[
                "input_ids"
            ]
            assert list(processor.process(Request(messages=chat)).work.prompt) == ids
        else:
            with pytest.raises(ValueError, match="no default"):
                tokenizer.apply_chat_template(chat, tokenize=False)
            with pytest.raises(RequestError, match="rag, tool_use, and none is the default"):
                processor.process(Request(messages=chat))
        processor.close()


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_text_only_models_tokenise_as_transformers_does(name: str) -> None:
    own, tokenizer = processor_of(name), processor_of(name).tokenizer
    for prompt in PROMPTS[0]:
        assert list(own.process(Request(prompt)).work.prompt) == tokenizer(prompt)["input_ids"]
    messages = [{"role": "user", "content": "Why?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert list(own.process(Request(messages=messages)).work.prompt) == ids
    parts = [{"role": "user", "content": [{"type": "text", "text": "Wh"}, {"type": "text", "text": "y?"}]}]
    assert list(own.process(Request(messages=parts)).work.prompt) == ids
    assert (own.multimodal, own.media_kinds, own.media_token_ids) == (False, frozenset(), frozenset())


def joined(name: str, own: list[torch.Tensor]) -> torch.Tensor:
    """Pixels of single images as the processor lays out several (models differ only in this)."""
    if name in ("idefics3", "smolvlm"):
        return torch.cat(own, dim=1)
    return torch.cat(own, dim=-1) if name == "minicpmv4_6" else torch.cat(own)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_pixels_of_each_image_equal_those_of_a_joint_call(name: str) -> None:
    same_size = [picture(seed) for seed in range(3)]  # so that the joint call pads nothing
    done = processor_of(name).process(Request("<image><image><image>", images=same_size))
    joint = expected(name, own_markers(name, "<image><image><image>"), same_size)
    assert torch.equal(joined(name, [item["pixel_values"] for item in done.inputs]), joint["pixel_values"])
    assert set(done.inputs[0]) == {key for key in joint if key not in TEXT_KEYS}


TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


@pytest.mark.parametrize("name", MULTIMODAL)
def test_spans_cover_exactly_the_placeholders(name: str) -> None:
    own = processor_of(name)
    done = own.process(Request("a <image> b\n<image><image>", images=PICTURES))
    placed = [position for position, token in enumerate(done.work.prompt) if token in own.media_token_ids]
    assert sum(span.tokens for span in done.work.media) == len(placed)
    left = placed
    for span in done.work.media:
        inside, left = left[: span.tokens], left[span.tokens :]
        assert (span.offset, span.end) == (inside[0], inside[-1] + 1)
        assert span.kind == "image"
        assert span.atomic is (name == "gemma3")
    assert len({span.content for span in done.work.media}) == 3


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_of_qwen_need_the_grid(name: str) -> None:
    done = processor_of(name).process(Request("<image>", images=[PICTURES[0]]))
    assert done.work.media[0].meta == {"image_grid_thw": done.inputs[0]["image_grid_thw"][0].tolist()}
    assert processor_of("llava").process(Request("<image>", images=[PICTURES[0]])).work.media[0].meta == {}


def test_minicpm_numbers_the_images_of_a_prompt() -> None:
    done = processor_of("minicpmv4_6").process(Request("<image> and <image>", images=PICTURES[:2]))
    text = processor_of("minicpmv4_6").tokenizer.decode(list(done.work.prompt))
    assert "<image_id>0</image_id>" in text
    assert "<image_id>1</image_id>" in text


def test_content_names_pixels_and_processor() -> None:
    def of(name: str, image: Any) -> str:
        return processor_of(name).process(Request("<image>", images=[image])).work.media[0].content

    assert of("llava", PICTURES[0]) == of("llava", np.asarray(PICTURES[0])) == of("llava", PICTURES[0].copy())
    changed = np.array(PICTURES[0])
    changed[5, 5, 1] ^= 1
    assert of("llava", changed) != of("llava", PICTURES[0])
    assert of("llava_next", PICTURES[0]) != of("llava", PICTURES[0])
    assert of("llava", PICTURES[0].transpose(Image.Transpose.ROTATE_90)) != of("llava", PICTURES[0])


@pytest.mark.parametrize("name", MULTIMODAL)
def test_dummy_inputs_come_near_the_hint(name: str) -> None:
    own = processor_of(name)
    span, inputs = own.dummy_inputs()
    assert span.tokens > 0
    assert "pixel_values" in inputs
    small, large = own.dummy_inputs(1)[0].tokens, own.dummy_inputs(10_000)[0].tokens
    assert small <= span.tokens <= large
    if name in ("qwen2_vl", "qwen3_vl"):
        assert (small, large) == (4, 36)  # the checkpoint allows 4 to 40 visual tokens
        assert own.dummy_inputs(16)[0].tokens == 16


def test_public_facts_of_a_model() -> None:
    own = processor_of("qwen2_vl")
    assert (own.model_type, own.context_length, own.multimodal) == ("qwen2_vl", 2048, True)
    assert own.media_kinds == {"image", "video"}
    assert own.eos_ids == {own.tokenizer.eos_token_id}
    names = own.tokenizer.convert_ids_to_tokens(sorted(own.media_token_ids))
    assert set(names) == {"<|image_pad|>", "<|video_pad|>"}


@pytest.mark.parametrize("text", ["one text", ["one text"]])
def test_what_a_processor_tells_its_tokenizer_is_kept_per_thread(text: Any) -> None:
    tokenizer, spoken = processor_of("llava").tokenizer, threading.local()
    twin = record_texts(tokenizer, spoken)
    assert twin(text, padding=True, truncation=True) == tokenizer(text)
    assert spoken.text == "one text"
    with ThreadPoolExecutor(1) as other:
        assert not other.submit(hasattr, spoken, "text").result()


def test_a_tokenizers_answer_for_a_processor_is_kept_and_never_written_to() -> None:
    tokenizer, spoken, read = processor_of("llava").tokenizer, threading.local(), Counter[str]()

    class Counting(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
            read[text] += 1
            return super().__call__(text, *args, **kwargs)

    counting = copy.copy(tokenizer)
    counting.__class__ = Counting
    twin = record_texts(counting, spoken)
    twin("one text")["added"] = [1]
    assert (twin("one text"), spoken.text) == (tokenizer("one text"), "one text")
    assert read["one text"] == 1
    assert twin("one text", add_special_tokens=False, return_token_type_ids=True).keys() > tokenizer("one text").keys()
    for number in range(200):
        assert twin(f"text {number}") == tokenizer(f"text {number}")
    assert twin("one text") == tokenizer("one text")
    assert 2 < read["one text"] < 5, "kept for a while, not for ever"


@pytest.mark.parametrize("name", MULTIMODAL)
def test_channels_are_apart_in_memory_before_they_are_rescaled(name: str) -> None:
    own, seen = processor_of(name).loaded.processor.image_processor, list[bool]()
    assert type(own).__name__ == type(oracle_of(name).image_processor).__name__
    assert own.to_dict() == oracle_of(name).image_processor.to_dict()
    given = np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)

    class Looking(type(own).__mro__[1]):  # type: ignore[misc]
        def rescale(self, image: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(image.flags.c_contiguous)
            return super().rescale(image, *args, **kwargs)

    looked = copy.copy(oracle_of(name).image_processor)
    looked.__class__ = Looking
    make_channels_contiguous(looked)
    for how in ({"image": np.moveaxis(given, -1, 0), "scale": 1 / 255}, {"image": given.T, "scale": 2.0}):
        right = oracle_of(name).image_processor.rescale(**how)
        assert np.array_equal(looked.rescale(**how), right)
        assert np.array_equal(own.rescale(**how), right)
    assert seen == [True, True]


def test_processed_is_plain() -> None:
    done: ProcessedRequest = processor_of("llama").process(Request("Hello"))
    assert (done.inputs, done.clipped, done.work.media) == ((), False, ())
