"""Chats by OpenAI's own client over loopback: the texts of transformers' generate(), whole and as they come."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

import trinity
from support.http_server import answer_of_transformers, chat_body, serve_model
from trinity.server import ServerConfig

TEXT, TOKENS = "Good morning, what a day", 24
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
MESSAGES: Any = [{"role": "user", "content": TEXT}]


@pytest.fixture(scope="module")
def expected() -> tuple[tuple[int, ...], str]:
    return answer_of_transformers("llama", TEXT, TOKENS)


async def test_whole_answers_are_those_of_transformers(expected: tuple[tuple[int, ...], str]) -> None:
    async with serve_model() as served:
        model = (await served.client.models.list()).data[0].id
        found = await served.client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
        own = await served.pipe.complete(
            trinity.Request(messages=MESSAGES, max_tokens=TOKENS, sampling=trinity.Sampling.greedy())
        )
    assert found.choices[0].message.content == expected[1] == own.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.completion_tokens == len(expected[0]) == len(own.token_ids)
    assert found.usage.prompt_tokens == own.prompt_tokens
    assert found.usage.total_tokens == own.prompt_tokens + TOKENS
    assert found.model == model == "llama"


async def test_streamed_answers_are_the_same(expected: tuple[tuple[int, ...], str]) -> None:
    async with serve_model() as served:
        asked = served.client.chat.completions.create(
            model="llama", messages=MESSAGES, **GREEDY, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in await asked]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected[1]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert [chunk.usage is not None for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == TOKENS
    assert len({chunk.id for chunk in chunks}) == 1


async def test_events_are_numbered_by_their_tokens_where_there_is_a_buddy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trinity.Pipeline, "has_buddy", True)
    async with serve_model() as served:
        own = await served.pipe.complete(
            trinity.Request(messages=MESSAGES, max_tokens=TOKENS, sampling=trinity.Sampling.greedy())
        )
        answer = await served.http.post("/v1/chat/completions", json=chat_body(**GREEDY, stream=True))
        asked = served.client.chat.completions.create(model="llama", messages=MESSAGES, **GREEDY, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in await asked]
    events = [event.split("\n") for event in answer.text.split("\n\n")]
    numbers = [int(lines[0].removeprefix("id: ")) for lines in events if lines[0].startswith("id: ")]
    assert numbers == sorted(set(numbers))
    assert 0 < len(numbers) <= TOKENS
    assert numbers[-1] < TOKENS
    assert "".join(texts) == own.text, "OpenAI's client reads them as ever"


async def test_usage_in_each_chunk() -> None:
    async with serve_model() as served:
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        asked = served.client.chat.completions.create(
            model="llama", messages=MESSAGES, **GREEDY, stream=True, stream_options=options
        )
        usages = [chunk.usage async for chunk in await asked]
    counts = [usage.completion_tokens for usage in usages if usage is not None]
    assert len(counts) == len(usages)
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, TOKENS)


async def test_the_end_of_a_stream_on_the_wire() -> None:
    async with serve_model() as served:
        body = chat_body(**GREEDY, stream=True)
        async with served.http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: {") for line in lines[:-1])
    assert "usage" not in json.loads(lines[0].removeprefix("data: "))


async def test_text_that_a_stop_string_held_back_comes_with_the_end(expected: tuple[tuple[int, ...], str]) -> None:
    stop = expected[1][-2:] + "never"  # begins at the output's end, and is not completed
    async with serve_model() as served:
        asked: dict[str, Any] = {"model": "llama", "messages": MESSAGES, **GREEDY, "stop": [stop]}
        whole = await served.client.chat.completions.create(**asked)
        chunks = [chunk async for chunk in await served.client.chat.completions.create(**asked, stream=True)]
    assert whole.choices[0].message.content == expected[1]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected[1]


async def test_stop_strings_end_the_text(expected: tuple[tuple[int, ...], str]) -> None:
    stop = expected[1][6:9]
    async with serve_model() as served:
        found = await served.client.chat.completions.create(model="llama", messages=MESSAGES, **GREEDY, stop=stop)
    assert found.choices[0].message.content == expected[1][: expected[1].index(stop)]
    assert found.choices[0].finish_reason == "stop"


async def test_log_probabilities_whole_and_streamed() -> None:
    async with serve_model() as served:
        asked: dict[str, Any] = {"model": "llama", "messages": MESSAGES, **GREEDY, "logprobs": True, "top_logprobs": 3}
        whole = await served.client.chat.completions.create(**asked)
        chunks = [chunk async for chunk in await served.client.chat.completions.create(**asked, stream=True)]
        request = trinity.Request(messages=MESSAGES, max_tokens=TOKENS, sampling=trinity.Sampling.greedy(logprobs=3))
        own = await served.pipe.complete(request)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == pytest.approx(own.logprobs)
    assert all(len(entry.top_logprobs) == 3 for entry in logprobs.content)
    assert all(entry.top_logprobs[0].token == entry.token for entry in logprobs.content), "greedy takes the likeliest"
    said = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert said.decode("utf-8", "replace") == own.text
    streamed = [entry for chunk in chunks if (found := chunk.choices[0].logprobs) for entry in found.content or []]
    assert [each.token for each in streamed] == [each.token for each in logprobs.content]
    assert [each.logprob for each in streamed] == pytest.approx([each.logprob for each in logprobs.content])


async def test_several_answers_and_seeds() -> None:
    async with serve_model() as served:
        asked: dict[str, Any] = {"model": "llama", "messages": MESSAGES, "max_tokens": 12, "temperature": 1.5}
        three = await served.client.chat.completions.create(**asked, seed=5, n=3)
        again = await served.client.chat.completions.create(**asked, seed=6)
        chunks = [
            chunk async for chunk in await served.client.chat.completions.create(**asked, seed=5, n=3, stream=True)
        ]
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[1] == again.choices[0].message.content
    streamed = ["", "", ""]
    for chunk in chunks:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    assert three.usage is not None
    assert three.usage.completion_tokens == 36


async def test_fields_of_vllm_change_what_they_say() -> None:
    async with serve_model() as served:
        asked: dict[str, Any] = {
            "model": "llama",
            "messages": MESSAGES,
            "max_tokens": 12,
            "temperature": 1.5,
            "seed": 1,
        }
        extra = {"top_k": 1, "min_p": 0.0, "repetition_penalty": 1.0, "min_tokens": 2, "ignore_eos": True}
        likeliest = await served.client.chat.completions.create(**asked, extra_body=extra)
        ids = await served.client.chat.completions.create(
            model="llama", messages=MESSAGES, **GREEDY, extra_body={"return_token_ids": True}
        )
        stopped = await served.client.chat.completions.create(
            model="llama",
            messages=MESSAGES,
            **GREEDY,
            extra_body={"stop_token_ids": [ids.choices[0].token_ids[2]]},  # type: ignore[attr-defined]
        )
    text = answer_of_transformers("llama", TEXT, 24)[1]
    assert text.startswith(likeliest.choices[0].message.content or "?")
    assert tuple(ids.choices[0].token_ids) == answer_of_transformers("llama", TEXT, 24)[0]  # type: ignore[attr-defined]
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage is not None
    assert stopped.usage.completion_tokens == 3


async def test_without_a_limit_the_context_is_the_limit(expected: tuple[tuple[int, ...], str]) -> None:
    async with serve_model() as served:
        stop = {"stop_token_ids": [expected[0][3]]}
        await served.client.chat.completions.create(model="llama", messages=MESSAGES, temperature=0, extra_body=stop)
        (row,) = served.pipe.trace
        context = served.pipe.processor.context_length
    assert row.output_length == 4
    assert (row.max_tokens or 0) + row.input_length == context


async def test_names_keys_and_models() -> None:
    config = ServerConfig(models=["big", "small"], api_keys=["first", "second"])
    async with serve_model(config=config, key="second") as served:
        assert [model.id for model in (await served.client.models.list()).data] == ["big", "small"]
        assert (await served.client.models.retrieve("small")).id == "small"
        found = await served.client.chat.completions.create(model="small", messages=MESSAGES, max_tokens=1)
        assert found.model == "small"
        with pytest.raises(openai.NotFoundError, match="there is no model 'huge' here; served: big, small"):
            await served.client.chat.completions.create(model="huge", messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError):
            await served.client.with_options(api_key="third").chat.completions.create(model="big", messages=MESSAGES)
        for path, status in {"/v1/models": 401, "/metrics": 401, "/health": 200, "/ready": 200}.items():
            assert (await served.http.get(path)).status_code == status, path


async def test_request_ids_come_back() -> None:
    async with serve_model() as served:
        body = chat_body(max_tokens=1)
        named = await served.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine-1"})
        hostile = await served.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "a b" * 100})
        twice = [
            served.http.post("/v1/chat/completions", json=body, headers={"x-request-id": "same"}) for _ in range(3)
        ]
        assert [(await each).status_code for each in twice] == [200, 200, 200]
    assert named.headers["x-request-id"] == "mine-1"
    assert " " not in hostile.headers["x-request-id"]
    assert hostile.headers["x-request-id"].isalnum()


async def test_completions_of_raw_text() -> None:
    async with serve_model() as served:
        own = await served.pipe.complete(trinity.Request("Once upon", max_tokens=8, sampling=trinity.Sampling.greedy()))
        found = await served.client.completions.create(
            model="llama", prompt=["Once upon", "The end"], max_tokens=8, temperature=0, logprobs=2
        )
        chunks = [
            chunk
            async for chunk in await served.client.completions.create(
                model="llama", prompt="Once upon", max_tokens=8, temperature=0, stream=True
            )
        ]
    assert found.choices[0].text == own.text == "".join(chunk.choices[0].text for chunk in chunks)
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.choices[0].logprobs is not None
    assert len(found.choices[0].logprobs.tokens or []) == 8
    assert all(len(entry) <= 2 for entry in found.choices[0].logprobs.top_logprobs or [])
    assert found.usage is not None
    assert found.usage.completion_tokens == 16
