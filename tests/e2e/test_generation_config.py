"""A checkpoint's generation config: tokens are those of ``generate(do_sample=False)`` on it, however they are served.

The oracle is transformers alone: ``from_pretrained()`` of the same directory, ``generate()`` with nothing but inputs.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from PIL import Image

from support.arrivals import arrive_together
from support.checkpoint_files import checkpoint
from support.paths import PHOTOS
from support.pipeline_options import pipeline_options
from trinity.core.scheduler import BatchRules
from trinity.pipeline import Pipeline
from trinity.request import DEFAULT_MAX_TOKENS, Output, Request, Sampling

pytestmark = pytest.mark.xdist_group("llava")

CAT = PHOTOS / "cat.jpg"
PROMPTS = (
    "Tell me about a small red boat that lies on the shore in the morning, and in the morning, and in the",
    "<image>\nWhat is in this picture?",
    "Why?",
)
OUTPUTS = 24
PLAIN = Sampling(temperature=0.0)  # do_sample off, all else as the file says


def images_of(prompt: str) -> list[Path]:
    return [CAT] * prompt.count("<image>")


@cache
def inputs(prompt: str) -> Any:
    processor: Any = transformers.AutoProcessor.from_pretrained(checkpoint("llava"), backend="pil")
    images = [Image.open(each) for each in images_of(prompt)]
    return processor(text=prompt, images=images or None, return_tensors="pt")


@cache
def model_of(directory: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


def generated(directory: Path, prompt: str, **fields: Any) -> list[int]:
    """What the model itself says, with its file and ``fields``."""
    given = inputs(prompt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a shortest output beyond the longest
        found = model_of(directory).generate(**given, do_sample=False, **fields)
    ids: list[int] = found[0, given["input_ids"].shape[1] :].tolist()
    return ids


@cache
def plain(prompt: str) -> tuple[int, ...]:
    return tuple(generated(checkpoint("llava"), prompt, max_new_tokens=OUTPUTS))


def checkpoint_with(folder: Path, name: str = "generation_config.json", **fields: Any) -> Path:
    """The tiny LLaVA with these fields in its generation config (or another of its files)."""
    copied = folder / f"llava{len(list(folder.iterdir()))}"
    shutil.copytree(checkpoint("llava"), copied, copy_function=lambda one, two: Path(two).hardlink_to(one))
    file = copied / name
    said = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    file.write_text(json.dumps({**said, **fields}))
    return copied


async def serve(model: Path, placement: str, requests: Sequence[Request], **settings: Any) -> list[Output]:
    chosen = {"dtype": "float32", "pools": {"image": 32, "kv": 400}, "rules": BatchRules(token_budget=13), **settings}
    async with Pipeline(model, placement, **pipeline_options(chosen)) as pipe:
        if settings.get("reservation") == "optimistic" and len(pipe.hosts) == 1:
            arrive_together(pipe, len(requests))
        return await asyncio.gather(*(pipe.complete(request) for request in requests))


def fields_of_files() -> dict[str, dict[str, Any]]:
    """By name; each changes the tokens of at least one prompt."""
    one, two, three = (plain(prompt) for prompt in PROMPTS)
    length = max(inputs(prompt)["input_ids"].shape[1] for prompt in PROMPTS)
    ends = [one[2], two[3], three[1]]
    return {
        "repetition_penalty": {"repetition_penalty": 1.3, "max_new_tokens": OUTPUTS},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "max_new_tokens": 60},
        "suppress_tokens": {"suppress_tokens": [one[0], two[2], one[5]], "max_new_tokens": OUTPUTS},
        "begin_suppress_tokens": {"begin_suppress_tokens": [one[0], two[0]], "max_new_tokens": OUTPUTS},
        "bad_words_ids": {
            "bad_words_ids": [[one[1]], [two[0], two[1]], [three[0], three[1], three[2]], [one[2]]],
            "eos_token_id": [one[2]],  # a bad word that ends the output is none
            "max_new_tokens": OUTPUTS,
        },
        "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": ends, "max_new_tokens": OUTPUTS},
        "min_length": {"min_length": length - 4, "eos_token_id": ends, "max_new_tokens": OUTPUTS},
        "max_length": {"max_length": length + 7},
        "max_new_tokens": {"max_new_tokens": 5},
        "forced_eos_token_id": {"forced_eos_token_id": one[4], "max_new_tokens": 7},
        "sampling without do_sample": {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": OUTPUTS},
        "all": {
            "repetition_penalty": 1.1,
            "no_repeat_ngram_size": 3,
            "suppress_tokens": [two[1]],
            "begin_suppress_tokens": [one[0]],
            "bad_words_ids": [[two[2]], [one[3], one[4]]],
            "min_new_tokens": 4,
            "eos_token_id": ends,
            "forced_eos_token_id": [one[7], two[7]],
            "max_new_tokens": 14,
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
        },
    }


NO_CHANGE = {"sampling without do_sample"}


@pytest.mark.parametrize("placement", ["EPD", pytest.param("E+P+D", marks=pytest.mark.slow)])
async def test_a_file_has_the_effect_that_it_has_in_generate(placement: str, tmp_path: Path) -> None:
    for name, fields in (await asyncio.to_thread(fields_of_files)).items():
        directory = checkpoint_with(tmp_path, **fields)
        wanted = [await asyncio.to_thread(generated, directory, prompt) for prompt in PROMPTS]
        asked = [Request(prompt, images=images_of(prompt), sampling=PLAIN) for prompt in PROMPTS]
        outputs = await serve(directory, placement, asked)
        assert [output.token_ids for output in outputs] == wanted, name
        if name not in NO_CHANGE:
            assert [tuple(tokens) for tokens in wanted] != [plain(prompt) for prompt in PROMPTS], f"{name} does nothing"


def sampling_fields() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """By name: fields of ``Sampling``, and those of ``generate()`` that mean the same."""
    one, two, three = (plain(prompt) for prompt in PROMPTS)
    ends = (one[2], two[3], three[1])
    words = ((one[1],), (two[0], two[1]), (three[0], three[1], three[2]))
    return {
        "plain": ({}, {}),
        "repetition_penalty": ({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
        "no_repeat_ngram_size": ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 1}),
        "suppress_tokens": ({"suppress_tokens": one[:4]}, {"suppress_tokens": list(one[:4])}),
        "begin": ({"begin_suppress_tokens": (one[0], two[0])}, {"begin_suppress_tokens": [one[0], two[0]]}),
        "bad_words_ids": ({"bad_words_ids": words}, {"bad_words_ids": [list(word) for word in words]}),
        "min_tokens": (
            {"min_tokens": 8, "stop_token_ids": ends, "ignore_eos": True},
            {"min_new_tokens": 8, "eos_token_id": list(ends)},
        ),
        "forced": ({"forced_eos_token_id": (one[9],)}, {"forced_eos_token_id": one[9]}),
        "all": (
            {
                "repetition_penalty": 0.9,
                "no_repeat_ngram_size": 2,
                "suppress_tokens": two[1:2],
                "bad_words_ids": words,
                "forced_eos_token_id": one[5:7],
            },
            {
                "repetition_penalty": 0.9,
                "no_repeat_ngram_size": 2,
                "suppress_tokens": list(two[1:2]),
                "bad_words_ids": [list(word) for word in words],
                "forced_eos_token_id": list(one[5:7]),
            },
        ),
    }


@cache
def wanted_of_requests() -> dict[tuple[str, str], list[int]]:
    fields = {name: given for name, (_, given) in sampling_fields().items()}
    return {
        (name, prompt): generated(checkpoint("llava"), prompt, max_new_tokens=OUTPUTS, **given)
        for name, given in fields.items()
        for prompt in PROMPTS
    }


def only(*kept: int) -> list[int]:
    """All other tokens of the model."""
    return [token for token in range(model_of(checkpoint("llava")).config.text_config.vocab_size) if token not in kept]


def less_likely(token: int) -> int:
    """Another token, which is not sampled where ``token`` may be."""
    bare = {"max_new_tokens": 1, "eos_token_id": None}
    others = (each for each in range(token + 1, token + 500))
    return next(
        each
        for each in others
        if generated(checkpoint("llava"), PROMPTS[2], suppress_tokens=only(token, each), **bare) == [token]
    )


async def test_a_shortest_output_delays_no_stop_string_that_is_a_token() -> None:
    """A special token that is sampled at once ends the output as a stop string; as an id it has to wait."""
    load = transformers.AutoTokenizer.from_pretrained
    tokenizer: Any = await asyncio.to_thread(load, checkpoint("llava"))
    ends = tokenizer.eos_token_id
    banned = only(ends, await asyncio.to_thread(less_likely, ends))
    given: dict[str, Any] = {"suppress_tokens": banned, "min_new_tokens": 6, "max_new_tokens": 9}
    named = {"stop_strings": [tokenizer.eos_token], "tokenizer": tokenizer, "eos_token_id": None}
    wanted, late = [
        await asyncio.to_thread(generated, checkpoint("llava"), PROMPTS[2], **given, **each)
        for each in (named, {"eos_token_id": ends})
    ]
    assert len(wanted) < 6 <= len(late)
    plain = Sampling.greedy(min_tokens=6, suppress_tokens=tuple(banned), ignore_eos=True)
    asked: list[dict[str, Any]] = [{"stop": (tokenizer.eos_token,)}, {"stop_token_ids": (ends,)}]
    samplings = [msgspec.structs.replace(plain, **each) for each in asked]
    outputs = await serve(
        checkpoint("llava"), "EPD", [Request(PROMPTS[2], sampling=each, max_tokens=9) for each in samplings]
    )
    assert [output.token_ids for output in outputs] == [wanted, late]


TIGHT = {"reservation": "optimistic", "pools": {"image": 32, "kv": 40}, "kv_block_size": 4}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "EPD": ("EPD", {}),
    "E+P+D": ("E+P+D", {}),
    "EP+D": ("EP+D", {}),
    "preempted": ("EPD", TIGHT),
    "preempted elsewhere": ("E+P+D", TIGHT),
}


@pytest.mark.parametrize("way", WAYS)
async def test_each_request_has_rules_of_its_own_in_one_batch(way: str) -> None:
    """Chunked prefill, all requests at once, over the P/D boundary, and computed again after a preemption."""
    wanted = await asyncio.to_thread(wanted_of_requests)
    placement, settings = WAYS[way]
    asked = {
        (name, prompt): Request(prompt, images=images_of(prompt), max_tokens=OUTPUTS, sampling=Sampling(**fields))
        for name, (fields, _) in sampling_fields().items()
        for prompt in PROMPTS
    }
    outputs = dict(
        zip(asked, await serve(checkpoint("llava"), placement, list(asked.values()), **settings), strict=True)
    )
    assert {key: output.token_ids for key, output in outputs.items()} == wanted
    assert any(output.preemptions for output in outputs.values()) == ("preempted" in way)
    for name in sampling_fields():
        changed = any(wanted[name, prompt] != wanted["plain", prompt] for prompt in PROMPTS)
        assert changed == (name != "plain"), f"{name} does nothing"


async def test_what_a_request_sets_goes_before_the_file(tmp_path: Path) -> None:
    one = await asyncio.to_thread(plain, PROMPTS[0])
    directory = checkpoint_with(
        tmp_path,
        repetition_penalty=1.5,
        suppress_tokens=[one[0]],
        min_new_tokens=3,
        max_new_tokens=6,
        do_sample=True,
        temperature=5.0,
        top_k=0,
        stop_strings="zzz",
    )
    sampled = [Request(PROMPTS[0], sampling=Sampling(seed=seed)) for seed in range(4)]
    asked = [
        Request(PROMPTS[0], sampling=Sampling.greedy(), max_tokens=OUTPUTS),
        Request(PROMPTS[0], sampling=Sampling(temperature=0, repetition_penalty=1, suppress_tokens=()), max_tokens=8),
        Request(PROMPTS[0], sampling=PLAIN),
        *sampled,
    ]
    greedy, own, file, *drawn = await serve(directory, "EPD", asked)
    assert tuple(greedy.token_ids) == one
    assert tuple(own.token_ids) == one[:8]
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    assert file.token_ids == await asyncio.to_thread(generated, directory, PROMPTS[0], tokenizer=tokenizer)
    assert len(file.token_ids) == 6
    assert len({tuple(output.token_ids) for output in drawn}) > 1, "do_sample: true draws"


async def test_checkpoints_that_say_nothing_stay_greedy(tmp_path: Path) -> None:
    """No generation_config.json at all: transformers reads config.json then, where old checkpoints have such fields."""
    silent, old = checkpoint_with(tmp_path), checkpoint_with(tmp_path, "config.json", repetition_penalty=1.3)
    for directory in (silent, old):
        (directory / "generation_config.json").unlink()
    asked = [Request(prompt, images=images_of(prompt), max_tokens=OUTPUTS) for prompt in PROMPTS]
    outputs = await serve(silent, "EPD", asked)
    assert [tuple(output.token_ids) for output in outputs] == [plain(prompt) for prompt in PROMPTS]
    (long,) = await serve(silent, "EPD", [Request(PROMPTS[2], sampling=Sampling(ignore_eos=True))])
    assert len(long.token_ids) == long.max_tokens == DEFAULT_MAX_TOKENS
    wanted = [await asyncio.to_thread(generated, old, prompt, max_new_tokens=OUTPUTS) for prompt in PROMPTS]
    assert [output.token_ids for output in await serve(old, "EPD", asked)] == wanted
