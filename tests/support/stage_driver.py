"""Drives encode and language stages by hand: no core, no pipeline; blocks are copied between three instances."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from support.checkpoint_files import checkpoint
from trinity.core.messages import Encode, Open, Prefill, Step
from trinity.memory.block_memory import BlockMemory
from trinity.preprocess.loader import load_processor
from trinity.preprocess.media.media_markup import IMAGE_TEXT
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.request import Request
from trinity.stages.encode import EncodeStage
from trinity.stages.language import LanguageStage
from trinity.stages.models import load_model

OUTPUTS = 32
SIZES = ((60, 80), (130, 90), (33, 120))  # height, width
TEXTS = {
    0: "USER: Describe a red boat in a few words. ASSISTANT:",
    1: "USER: <image>\nWhat is this? ASSISTANT:",
    3: "USER: <image> and <image>\nthen <image> Compare them. ASSISTANT:",
}


def picture(seed: int, height: int = 60, width: int = 80) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


def pictures(count: int, seed: int = 0) -> list[Image.Image]:
    return [picture(seed + number, *SIZES[number % len(SIZES)]) for number in range(count)]


@cache
def processor_of(name: str) -> RequestProcessor:
    return RequestProcessor(checkpoint(name))


def processed(name: str, count: int, seed: int = 0, request: str | None = None) -> ProcessedRequest:
    asked = Request(
        TEXTS[count], images=pictures(count, seed), max_tokens=OUTPUTS, request_id=request or f"{count} images"
    )
    return processor_of(name).process(asked)


@dataclass(frozen=True)
class Generated:
    """What ``generate()`` of the whole model says: ids [outputs] and logits [outputs, vocabulary]."""

    ids: list[int]
    logits: torch.Tensor


@cache
def whole_model(name: str) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint(name))
    return getattr(transformers, config.architectures[0]).from_pretrained(checkpoint(name), attn_implementation="sdpa")


@cache
def generated(name: str, count: int, seed: int = 0) -> Generated:
    """``generate()`` with inputs from the model's own processor: nothing here is trinity's."""
    inputs = _own_inputs(name, TEXTS[count], pictures(count, seed))
    result = whole_model(name).generate(
        **inputs,
        max_new_tokens=OUTPUTS,
        min_new_tokens=OUTPUTS,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Generated(result.sequences[0, -OUTPUTS:].tolist(), torch.cat(result.logits))


def _own_inputs(name: str, text: str, images: list[Image.Image]) -> dict[str, Any]:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint(name))
    processor = load_processor(checkpoint(name), AutoConfig.from_pretrained(checkpoint(name)), tokenizer)
    if processor is None:
        return dict(tokenizer(text, return_tensors="pt"))
    marked = text.replace("<image>", IMAGE_TEXT[name].marker.format(token=processor.image_token))
    nested = [images] if images else None  # all of one prompt, as a chat gives them
    return dict(processor(text=marked, images=nested, return_tensors="pt"))


class Pool:
    """A memory with scattered free blocks, filled with numbers that must never show."""

    def __init__(self, memory: BlockMemory, seed: int) -> None:
        self.memory = memory
        self.free = np.random.default_rng(seed).permutation(memory.blocks).tolist()
        memory.tensor.fill_(7.0)

    def take(self, number: int) -> tuple[int, ...]:
        return tuple(self.free.pop() for _ in range(number))


def pull(source: Pool, theirs: Sequence[int], target: Pool, ours: Sequence[int]) -> None:
    target.memory.words[list(ours)] = source.memory.words[list(theirs)]


@dataclass
class Served:
    """A request on its way, and what came out."""

    made: ProcessedRequest
    at_prefill: list[tuple[int, ...]] = field(default_factory=list)
    kv: tuple[int, ...] = ()
    done: int = 0
    tokens: list[int] = field(default_factory=list)
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.made.work.request


class Driver:
    """Instances E, P and D of one model, each with its own weights and memories; without ``split`` one that does all.

    Chunks of all requests go into one batch and cut images anywhere, unless the model forbids it; a monolith decodes
    those that are ready in the same batch.
    """

    def __init__(self, name: str, *, split: bool = True, image_rows: int = 5, chunk: int = 7) -> None:
        self.split, self.chunk = split, chunk
        letters = ("E", "P", "D") if split else ("EPD",) * 3
        text_only = not load_model(checkpoint(name), "P", dtype="float32").multimodal
        loaded = [load_model(checkpoint(name), letter.replace("E", "P" if text_only else "E")) for letter in letters]
        self.models = loaded
        self.e, self.p, self.d = loaded
        self.block = 16
        self.kv = [Pool(BlockMemory(self.p.kv_shape(), 90), 1), Pool(BlockMemory(self.d.kv_shape(), 100), 2)]
        self.image = self._image_pools(image_rows)
        at_p, at_d = ("P", "D") if split else ("PD", "PD")
        self.encode = EncodeStage(self.e, self.image[0].memory) if self.image else None
        self.prefill = LanguageStage(self.p, self.kv[0].memory, self._at(1), at_p, self._observe)
        self.decode = LanguageStage(self.d, self.kv[1].memory, None, at_d, self._observe) if split else self.prefill
        self.served: dict[str, Served] = {}
        self.steps = 0

    def _image_pools(self, rows: int) -> list[Pool]:
        shape = self.e.image_shape(rows)
        return [] if shape is None else [Pool(BlockMemory(shape, 120), seed) for seed in (3, 4)]

    def _at(self, index: int) -> BlockMemory | None:
        return self.image[index].memory if self.image else None

    def _observe(self, request: str, index: int, logits: torch.Tensor) -> None:
        assert index not in self.served[request].logits
        self.served[request].logits[index] = logits.clone()

    def _step(self, **rows: Any) -> Step:
        self.steps += 1
        return Step(self.steps, "joint", **rows)

    def add(self, *made: ProcessedRequest) -> None:
        """Encode the media of ``made`` in one step, move the features to P and open the requests there."""
        encodes = []
        for each in made:
            served = self.served[each.work.request] = Served(each)
            for item, (span, inputs) in enumerate(zip(each.work.media, each.inputs, strict=True)):
                blocks = self.image[0].take(-(-span.tokens // self.image[0].memory.shape.shape[0]))
                encodes.append(Encode(served.name, item, span, blocks, inputs))
        if self.encode is not None:
            assert self.encode.forward(self._step(encodes=tuple(encodes))) == {}
        for encode in encodes:
            ours = self.image[1].take(len(encode.blocks))
            pull(self.image[0], encode.blocks, self.image[1], ours)
            self.served[encode.request].at_prefill.append(ours)
        for each in made:
            self._open_at_prefill(self.served[each.work.request])

    def _open_at_prefill(self, served: Served) -> None:
        work = served.made.work
        served.kv = self.kv[0].take(-(-(len(work.prompt) + OUTPUTS) // self.block))
        self.prefill.open(Open(work=work, blocks=served.kv, images=tuple(served.at_prefill)))

    def _next_chunk(self, served: Served) -> Prefill:
        work, start = served.made.work, served.done
        end = min(len(work.prompt), start + self.chunk)
        for span in work.media:
            if span.atomic and span.offset < end < span.end:
                end = span.end
        served.done = end
        return Prefill(served.name, start, end - start, end == len(work.prompt))

    def run(self) -> dict[str, Served]:
        """Serve all that was added to the end."""
        while any(len(served.tokens) < OUTPUTS for served in self.served.values()):
            self.run_once()
        return self.served

    def run_once(self) -> None:
        """A chunk of every request that waits and a decode of every one that is ready."""
        waiting = [served for served in self.served.values() if served.done < len(served.made.work.prompt)]
        ready = [served.name for served in self.served.values() if 0 < len(served.tokens) < OUTPUTS]
        prefills = tuple(self._next_chunk(served) for served in waiting)
        if self.split:
            self._take(self.prefill.forward(self._step(prefills=prefills)), migrate=True)
            self._take(self.decode.forward(self._step(decodes=tuple(ready))))
        else:
            self._take(self.prefill.forward(self._step(prefills=prefills, decodes=tuple(ready))))

    def _take(self, sampled: dict[str, Any], migrate: bool = False) -> None:
        for name, one in sampled.items():
            served = self.served[name]
            served.tokens.append(one.token)
            if migrate:
                self._migrate(served)

    def _migrate(self, served: Served) -> None:
        held = -(-len(served.made.work.prompt) // self.block)
        ours = self.kv[1].take(len(served.kv))
        pull(self.kv[0], served.kv[:held], self.kv[1], ours[:held])
        self.kv[0].memory.tensor[list(served.kv)] = 3.0
        self.prefill.close(served.name)
        self.decode.open(Open(work=served.made.work, blocks=ours, tokens=tuple(served.tokens)))
