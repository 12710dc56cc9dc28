"""Requests of a proof: made here, since stages know no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.request import Media, Request, Sampling


def process_prompt(
    processor: RequestProcessor,
    name: str,
    prompt: str | Sequence[Any],
    images: Sequence[Any],
    outputs: int,
    clips: Sequence[Any] = (),
) -> ProcessedRequest:
    """Process a prompt, raw text or a chat's messages, that asks for so many greedy tokens.

    Raises ``RequestError`` as ``RequestProcessor.process`` does.
    """
    given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
    asked = Request(
        media=[*(Media("image", each) for each in images), *(Media("audio", each) for each in clips)],
        max_tokens=outputs,
        request_id=name,
        sampling=Sampling(ignore_eos=True),
        **given,
    )
    return processor.process(asked)
