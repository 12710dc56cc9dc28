"""A whole Qwen-Omni writes as its own generate() does without speech, and its talker is never loaded."""

from __future__ import annotations

import asyncio
import math
from functools import cache
from typing import Any

import pytest
import torch

from support.checkpoint_files import checkpoint
from support.sounds import clip
from support.stage_driver import picture
from trinity.pipeline import Pipeline
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.request import Media, Request, Sampling
from trinity.stages.models import load_model
from trinity.testing.oracle import own_processor

OUTPUTS = 10
CLASSES = {
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}
TYPES = ["qwen2_5_omni", pytest.param("qwen3_omni_moe", marks=pytest.mark.slow)]
HEARD = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", "text": "What is said?"}]}]
SEEN = [{"role": "user", "content": [{"type": "image"}, {"type": "audio"}, {"type": "text", "text": "Do they agree?"}]}]


def ask(name: str, seed: int, image: Any = None) -> Request:
    media = [Media("audio", clip(seed))] if image is None else [Media("image", image), Media("audio", clip(seed))]
    asked, messages = Sampling(ignore_eos=True), HEARD if image is None else SEEN
    return Request(messages=messages, media=media, max_tokens=OUTPUTS, sampling=asked, request_id=name)


REQUESTS = [ask("one", 1), ask("other", 2), ask("both", 3, picture(1, 90, 70))]


@cache
def answers(name: str) -> dict[str, tuple[list[int], torch.Tensor]]:
    """What transformers' class of the whole generates without speech: tokens and logits by request."""
    import transformers

    directory = checkpoint(f"whole-{name}")
    whole = getattr(transformers, CLASSES[name]).from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    processor, found = own_processor(directory), {}
    settings: dict[str, Any] = {"max_new_tokens": OUTPUTS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    for request in REQUESTS:
        left = {kind: iter([each.source for each in request.media if each.kind == kind]) for kind in ("image", "audio")}
        assert request.messages is not None
        (message,) = request.messages
        parts = [
            {**each, each["type"]: next(left[each["type"]])} if each["type"] in left else each
            for each in message["content"]
        ]
        chat = [{**message, "content": parts}]
        ways: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = processor.apply_chat_template(chat, add_generation_prompt=True, **ways)
        named = {f"thinker_{name}": value for name, value in settings.items()}
        output = whole.eval().generate(**inputs, **named, generation_mode="text")
        tokens = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        found[request.request_id] = (tokens, torch.cat(list(output.logits)))
    return found


@pytest.mark.parametrize("name", TYPES)
def test_a_whole_omni_writes_as_its_own_generate(name: str) -> None:
    wanted, seen = answers(name), dict[Any, torch.Tensor]()

    def observe(request: str, index: int, logits: torch.Tensor) -> None:
        seen[request, index] = logits.float().clone()

    async def run() -> dict[str, list[int]]:
        async with Pipeline(checkpoint(f"whole-{name}"), "1E1P1D", dtype="float32", observe=observe) as pipe:
            outputs = await asyncio.gather(*(pipe.complete(each) for each in REQUESTS))
        return {each.request_id: each.token_ids for each in outputs}

    found = asyncio.run(run())
    for request, (tokens, logits) in wanted.items():
        assert found[request] == tokens, request
        mine = torch.stack([seen[request, at] for at in range(OUTPUTS)])
        assert (mine - logits).abs().max() < 1e-4 * logits.abs().max()
    assert wanted["one"][0] != wanted["other"][0], "another clip gives other tokens"


@pytest.mark.parametrize("name", TYPES)
def test_the_thinkers_weights_alone_are_loaded(name: str) -> None:
    from safetensors import safe_open

    directory, sizes = checkpoint(f"whole-{name}"), dict[str, int]()
    assert read_config(directory).model_type == f"{name}_thinker"
    with safe_open(directory / "model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118
            part = key.partition(".")[0]
            sizes[part] = sizes.get(part, 0) + math.prod(file.get_slice(key).get_shape())
    assert sizes["talker"] > 0, "the checkpoint has no talker that could be loaded"
    loaded = load_model(directory, "EPD", dtype="float32")
    held = {id(each): each.numel() for part in (loaded.vision, loaded.language) for each in part.parameters()}
    assert sum(held.values()) == sizes["thinker"]
