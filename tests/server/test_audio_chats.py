"""OpenAI's ``input_audio`` over loopback: the text of transformers' own chat route, or a refusal."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import openai
import pytest

from support.http_server import serve_model
from support.recordings import oracle
from support.sounds import clip, encoded
from trinity.request import Media, Request

WAV = encoded(clip(1))
PART: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
TOKENS = 16


def chat(part: dict[str, Any]) -> Any:
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is said?"}]}]


async def test_a_spoken_question_is_answered_as_by_transformers() -> None:
    own = [{"type": "audio"}, {"type": "text", "text": "What is said?"}]
    asked = Request(messages=[{"role": "user", "content": own}], media=[Media("audio", WAV)], max_tokens=TOKENS)
    expected = await asyncio.to_thread(lambda: oracle("qwen2_audio").answer(asked))
    async with serve_model("qwen2_audio", "E+PD") as served:
        given: dict[str, Any] = {"model": "qwen2_audio", "temperature": 0, "max_tokens": TOKENS}
        found = await served.client.chat.completions.create(messages=chat(PART), **given)
        uri = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{PART['input_audio']['data']}"}}
        same = await served.client.chat.completions.create(messages=chat(uri), **given)
        text = served.pipe.processor.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
        broken = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}
        with pytest.raises(openai.BadRequestError, match=r"audio 1 of 1.*is no wav and no flac file"):
            await served.client.chat.completions.create(messages=chat(broken), **given)
    assert found.choices[0].message.content == same.choices[0].message.content == text


@pytest.mark.parametrize("name", ["llama"])
async def test_a_model_without_audio_refuses_it(name: str) -> None:
    async with serve_model(name) as served:
        with pytest.raises(openai.BadRequestError, match="takes no media of kind 'audio' here; it takes text only"):
            await served.client.chat.completions.create(model=name, messages=chat(PART), max_tokens=4)
