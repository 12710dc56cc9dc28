"""Outputs bound to a form, and tools, by OpenAI's own client: what comes parses, whole and streamed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

import trinity
import trinity.server
from support.checkpoint_files import checkpoint
from support.http_server import listening, serve_model
from trinity.preprocess.text import grammar_trials

MESSAGES: Any = [{"role": "user", "content": "Describe it"}]
ASKED: dict[str, Any] = {"model": "llama", "messages": MESSAGES, "temperature": 1.0, "seed": 3, "max_tokens": 200}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Shape(BaseModel):
    kind: Literal["star", "circle"]
    red: bool


async def test_parse_and_the_fields_of_vllm() -> None:
    async with serve_model() as served:
        chats = served.client.chat.completions
        parsed = await chats.parse(**ASKED, response_format=Shape)
        extra = {"structured_outputs": {"regex": "[ab]{3}c"}}
        matched = await chats.create(**ASKED, extra_body=extra)
        chosen = await chats.create(**ASKED, extra_body={"guided_choice": ["left", "right"]})
        pieces = [chunk async for chunk in await chats.create(**ASKED, extra_body=extra, stream=True)]
        # not parse(), which takes seconds of this loop to build pydantic's classes
        form: Any = {"type": "json_schema", "name": "shape", "schema": Shape.model_json_schema()}
        response = await served.client.responses.create(
            model="llama", input="Describe it", temperature=0, text={"format": form}, max_output_tokens=200
        )
        with pytest.raises(openai.BadRequestError, match="regex"):
            await chats.create(**ASKED, extra_body={"guided_regex": "(unclosed"})
    assert isinstance(parsed.choices[0].message.parsed, Shape)
    assert parsed.choices[0].finish_reason == "stop"
    text = matched.choices[0].message.content or ""
    assert len(text) == 4
    assert set(text[:3]) <= {"a", "b"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == text
    assert chosen.choices[0].message.content in ("left", "right")
    assert Shape.model_validate_json(response.output_text)


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with a chat template that takes tools."""
    folder = tmp_path_factory.mktemp("tools") / "llama"
    shutil.copytree(checkpoint("llama"), folder)
    template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% if tools %}Call by <tool_call>{% endif %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}\n{% endfor %}"
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


async def test_calls_that_are_demanded(with_tools: Path) -> None:
    async with trinity.Pipeline(with_tools, "PD", dtype="float32") as pipe:
        app = trinity.server.app(pipe)
        async with (
            listening(app, app.state.server) as (url, _),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            asked = {**ASKED, "tools": [WEATHER]}
            named: Any = {"type": "function", "function": {"name": "weather"}}
            one = await client.chat.completions.create(**asked, tool_choice=named)
            any_one = await client.chat.completions.create(**asked, tool_choice="required")
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(**asked, tool_choice="required", stream=True)
            ]
            flat: Any = {"type": "function", **WEATHER["function"]}
            response = await client.responses.create(
                model="llama",
                input="Weather?",
                tools=[flat],
                tool_choice="required",
                temperature=0,
                max_output_tokens=200,
            )
            free = await client.chat.completions.create(**{**asked, "max_tokens": 5})
            back = [
                {"role": "user", "content": "Weather?"},
                one.choices[0].message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": "x", "content": "sun"},
            ]
            again = await client.chat.completions.create(**{**asked, "messages": back, "max_tokens": 2})
    for found in (one, any_one):
        (call,) = found.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        assert found.choices[0].finish_reason == "tool_calls"
        assert found.choices[0].message.content is None
    streamed: Any = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []]
    assert [each.function.arguments for each in streamed] == [call.function.arguments]
    item: Any = response.output[0]
    assert (item.type, item.name) == ("function_call", "weather")
    assert free.choices[0].message.content
    assert again.choices[0].message.content


async def test_tools_that_no_template_teaches_are_refused() -> None:
    async with serve_model() as served:
        with pytest.raises(openai.BadRequestError, match="--tool-parser"):
            await served.client.chat.completions.create(**ASKED, tools=[WEATHER])


async def test_grammars_beyond_those_that_may_wait_are_answered_429(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_model() as served:
        chats = served.client.chat.completions
        monkeypatch.setattr(grammar_trials, "MOST_TRIALS", 0)
        with pytest.raises(openai.RateLimitError, match="are being tried") as refused:
            await chats.create(**ASKED, extra_body={"guided_regex": "[xyz]"})
        assert (await chats.create(**{**ASKED, "max_tokens": 2})).choices
    assert refused.value.response.headers["retry-after"] == "1"
