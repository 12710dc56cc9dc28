"""Random chats with random images: ids and pixels are those of transformers' ``apply_chat_template``.

The default run compares a few; ``make test-all`` some thousand.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import pad

from support.checkpoint_files import checkpoint
from support.recordings import MULTIMODAL
from trinity.errors import BadMedia, RequestTooLarge
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request
from trinity.testing.oracle import load_as_transformers, own_processor

WORDS = ("What", " is\n", "this", "  two", "ü", "🙂", "\n\n", "the picture")
KINDS = ("RGB", "RGBA", "L", "P", "LA", "array", "floats", "tensor")


@cache
def processor_of(name: str) -> RequestProcessor:
    return RequestProcessor(checkpoint(name))


@cache
def transformers_of(name: str) -> Any:
    return own_processor(checkpoint(name))


def picture(draw: random.Random) -> Any:
    width, height = (int(2 ** draw.uniform(3, 8.5)) for _ in range(2))
    pixels = np.random.default_rng(draw.randrange(10**6)).integers(0, 255, (height, width, 3), dtype=np.uint8)
    match draw.choice(KINDS):
        case "array":
            return pixels
        case "floats":
            return (pixels / 255).astype(np.float32)
        case "tensor":
            return torch.from_numpy(np.moveaxis(pixels, -1, 0).copy())
        case mode:
            return Image.fromarray(pixels).convert(mode)


def chat(draw: random.Random) -> tuple[list[dict[str, Any]], list[Any]]:
    """Up to three turns, with images before, between and behind words, some of them twice."""
    pool, images, messages = [picture(draw) for _ in range(3)], list[Any](), list[dict[str, Any]]()
    for _ in range(draw.choice([1, 1, 2, 3])):
        parts: list[dict[str, Any]] = []
        for _ in range(draw.choice([1, 1, 2, 3])):
            if draw.random() < 0.5:
                parts.append({"type": "image"})
                images.append(draw.choice(pool))
            parts.append({"type": "text", "text": "".join(draw.choices(WORDS, k=draw.randint(0, 3)))})
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": "Yes."}]
    return messages[:-1], images


def made_by_transformers(name: str, messages: list[dict[str, Any]], images: list[Any]) -> Any:
    left = iter(images)

    def filled(content: Any) -> Any:
        if isinstance(content, str):
            return content
        return [
            {**part, "image": load_as_transformers(next(left))} if part["type"] == "image" else part for part in content
        ]

    conversation = [{**each, "content": filled(each["content"])} for each in messages]
    settings = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    return transformers_of(name).apply_chat_template(conversation, **settings)


def joined(name: str, own: list[torch.Tensor]) -> torch.Tensor | None:
    """Pixels of single images as the processor lays out several; None where it pads them to each other's size."""
    if name in ("idefics3", "smolvlm"):
        return torch.cat(own, 1) if len({each.shape[2:] for each in own}) == 1 else None
    if name == "minicpmv4_6":
        return torch.cat(own, -1)
    if name in ("llava_next", "llava_onevision"):
        most = max(each.shape[1] for each in own)
        own = [pad(each, (0, 0) * 3 + (0, most - each.shape[1])) for each in own]
    return torch.cat(own)


def compare(name: str, draw: random.Random) -> bool:
    """Compare one chat; False where it is longer than the context."""
    messages, images = chat(draw)
    try:
        made = processor_of(name).process(Request(messages=messages, images=images))
    except RequestTooLarge:
        return False
    except BadMedia:  # its processor pads floats of 0 to 1 with a colour of 0 to 255, and refuses what comes of it
        with pytest.raises(ValueError, match="outside the range"):
            made_by_transformers(name, messages, images)
        return True
    wanted = made_by_transformers(name, messages, images)
    assert list(made.work.prompt) == wanted["input_ids"][0].tolist()
    if images:
        pixels = joined(name, [each["pixel_values"] for each in made.inputs])
        assert pixels is None or torch.equal(pixels, wanted["pixel_values"])
    return True


@pytest.mark.parametrize("name", MULTIMODAL)
def test_random_chats(name: str) -> None:
    draw = random.Random(name)
    assert sum(compare(name, draw) for _ in range(12)) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", MULTIMODAL)
def test_many_random_chats(name: str) -> None:
    draw = random.Random(f"many of {name}")
    assert sum(compare(name, draw) for _ in range(300)) >= 280
