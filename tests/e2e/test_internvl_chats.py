"""InternVL as OpenGVLab publishes it answers as OpenGVLab's own code does, under every placement, in processes too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from support.internvl_answers import ANSWERS, COLUMNS
from support.internvl_chats import needs_sentencepiece, published, requests
from support.internvl_folders import PUBLISHED
from support.pipeline_options import pipeline_options
from support.recordings import serve
from support.shared_launcher import sharing
from trinity.pipeline import Pipeline

METHODS = ("EPD", "E+P+D", "ED+P")


def check(name: str, placement: str) -> None:
    needs_sentencepiece()
    found = serve(published(name), placement, [[each] for each in requests()])
    for chat, answer in ANSWERS[name].items():
        assert tuple(found.tokens(chat)) == answer.tokens, (name, placement, chat)
        own = torch.tensor(answer.logits)
        assert (found.logits(chat)[-1][::COLUMNS] - own).abs().max() < 5e-4, (name, placement, chat)


@pytest.mark.parametrize("name", ["small", "qwen"])
def test_tokens_and_logits_are_those_of_the_original(name: str) -> None:
    check(name, "E+P+D")


@pytest.mark.slow
@pytest.mark.parametrize("placement", METHODS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_under_every_method(name: str, placement: str) -> None:
    check(name, placement)


@pytest.mark.slow
async def test_in_processes_that_each_convert_it(torch_launcher: Any) -> None:
    needs_sentencepiece()
    settings = pipeline_options({"dtype": "float32", "pools": {"image": 16, "kv": 256}})
    folder, wanted = await asyncio.to_thread(published, "large"), ANSWERS["large"]
    with sharing(torch_launcher):
        async with Pipeline(folder, "E+P+D", connector="shm", hosting="process", **settings) as pipe:
            outputs = await asyncio.gather(*map(pipe.complete, requests()))
    assert {each.request_id: tuple(each.token_ids) for each in outputs} == {
        chat: answer.tokens for chat, answer in wanted.items()
    }
