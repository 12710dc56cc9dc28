"""OpenAI's Responses API by its own client: the texts of transformers, typed events that build the same response."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.http_server import answer_of_transformers, serve_model
from trinity.errors import RequestError
from trinity.server.responses_fields import make_messages, read_response_call

TEXT, TOKENS = "Good morning, what a day", 24
ASKED: dict[str, Any] = {"model": "llama", "input": TEXT, "temperature": 0, "max_output_tokens": TOKENS}


@pytest.fixture(scope="module")
def expected() -> tuple[tuple[int, ...], str]:
    return answer_of_transformers("llama", TEXT, TOKENS)


async def test_whole_and_streamed(expected: tuple[tuple[int, ...], str]) -> None:
    async with serve_model() as served:
        whole = await served.client.responses.create(**ASKED)
        async with served.client.responses.stream(**ASKED) as events:
            seen = [event async for event in events]
        stop = {"stop_token_ids": [expected[0][9]]}
        async with served.client.responses.stream(**ASKED, extra_body=stop) as events:
            final = await events.get_final_response()
    assert whole.output_text == expected[1]
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == TOKENS
    assert final.status == "completed"
    assert expected[1].startswith(final.output_text)
    assert final.usage is not None
    assert final.usage.output_tokens == 10
    kinds = [event.type for event in seen]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in seen] == list(range(len(seen)))  # type: ignore[union-attr]
    assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == expected[1]


async def test_a_conversation_and_log_probabilities() -> None:
    async with serve_model() as served:
        chat = await served.client.chat.completions.create(
            model="llama",
            messages=[
                {"role": "system", "content": "Be brief"},
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Yes"},
                {"role": "user", "content": "And now?"},
            ],
            max_tokens=6,
            temperature=0,
        )
        given: Any = [
            {"role": "user", "content": "Hello"},
            {"type": "message", "role": "assistant", "content": "Yes"},
            {"role": "user", "content": "And now?"},
        ]
        found = await served.client.responses.create(
            model="llama",
            input=given,
            instructions="Be brief",
            max_output_tokens=6,
            temperature=0,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
        )
    assert found.output_text == chat.choices[0].message.content
    message: Any = found.output[0]
    part = message.content[0]
    assert len(part.logprobs) == 6
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


async def test_what_needs_a_store_is_refused_by_name() -> None:
    async with serve_model() as served:
        for fields in ({"previous_response_id": "resp_1"}, {"background": True}, {"truncation": "auto"}):
            with pytest.raises(openai.BadRequestError, match=f"{next(iter(fields))} is not served here"):
                await served.client.responses.create(**ASKED, **fields)
        with pytest.raises(openai.BadRequestError, match="web_search"):
            await served.client.responses.create(**ASKED, tools=[{"type": "web_search"}])


def test_items_become_messages() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "sun"},
    ]
    found = make_messages(items, "Be brief")
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool"]
    assert [call["id"] for call in found[2]["tool_calls"]] == ["a", "b"]
    assert found[3] == {"role": "tool", "tool_call_id": "a", "content": "sun"}
    with pytest.raises(RequestError, match="'item_reference' is not served"):
        make_messages([{"type": "item_reference", "id": "x"}], None)


def test_one_answer_only() -> None:
    with pytest.raises(RequestError, match="a response has one answer"):
        read_response_call({"input": "x", "n": 2})
