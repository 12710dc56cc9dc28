"""Processors of multimodal types that nobody listed, loaded with facts that no proof found; and transformers' own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from transformers import AutoTokenizer

from support.checkpoint_files import checkpoint
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.verdicts import MediaFacts, on_trial
from trinity.preprocess.loader import load_processor, load_tokenizer_and_processor
from trinity.preprocess.media.media_kinds import LoadedProcessor
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.request import Request


@cache
def own_processor(name: str) -> Any:
    directory = checkpoint(name)
    words: Any = AutoTokenizer.from_pretrained
    return load_processor(directory, read_config(directory), words(directory))


@contextmanager
def tried(name: str, token: str, marker: str = "") -> Iterator[None]:
    """Load a checkpoint in this context with such markup of images."""
    number = own_processor(name).tokenizer.convert_tokens_to_ids(token)
    facts = MediaFacts(image_token_id=number, image_token=token, image_marker=marker)
    with on_trial(checkpoint(name), facts):
        yield


@contextmanager
def processor(name: str, token: str, marker: str = "") -> Iterator[RequestProcessor]:
    with tried(name, token, marker):
        found = RequestProcessor(checkpoint(name))
    yield found
    found.close()


def process(name: str, token: str, request: Request, marker: str = "") -> ProcessedRequest:
    with processor(name, token, marker) as found:
        return found.process(request)


def load(name: str, token: str, marker: str = "") -> LoadedProcessor:
    with tried(name, token, marker):
        return load_tokenizer_and_processor(checkpoint(name))
