"""Fields of OpenAI's Responses API as a call: each request stands for itself, nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from trinity.errors import RequestError, show
from trinity.preprocess.preparation_lanes import measure_values
from trinity.server.fields import (
    ParsedCall,
    SamplingFields,
    make_call,
    read_fields,
    read_text_format,
    read_tools,
    refuse_fields,
)
from trinity.server.protocol import encode_json

STATEFUL_FIELDS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "max_tool_calls": (),
    "truncation": ("disabled",),
}
"""Fields that need what a stateless server has not, with the values that turn each off."""
MOST_REPEATED = 2 << 20  # bytes of JSON, and 64 for each value, that every event with the whole response has again


class TextOptions(msgspec.Struct):
    """Form of the output's text."""

    format: dict[str, Any] | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    """Body of a response."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: dict[str, Any] | None = None


def read_response_call(body: Mapping[str, Any]) -> tuple[ParsedCall, ResponsesBody]:
    """Read the body of a response. Raises ``RequestError`` that names the field at fault."""
    refuse_fields(body, STATEFUL_FIELDS, ": send the whole conversation as input")
    asked = read_fields(body, ResponsesBody)
    wanted = "message.output_text.logprobs" in (asked.include or ()) or asked.top_logprobs is not None
    logprobs = (asked.top_logprobs or 0) if wanted else None
    tools = read_tools([_chat_tool(tool) for tool in asked.tools or ()], asked.tool_choice)
    _check_repeated(asked)
    form = read_text_format(asked.text.format if asked.text is not None else None)
    call = make_call(
        asked,
        "resp",
        [{"messages": make_messages(asked.input, asked.instructions)}],
        max_tokens=asked.max_tokens if asked.max_output_tokens is None else asked.max_output_tokens,
        logprobs=logprobs,
        tools=tools,
        form=form,
    )
    if call.choices != 1:
        raise RequestError("n is not served here: a response has one answer")
    return call, asked


def _check_repeated(asked: ResponsesBody) -> None:
    """Bound what a response repeats; metadata as OpenAI does: 16 texts of 512 characters, by names of 64."""
    metadata = asked.metadata or {}
    short = all(len(name) <= 64 and isinstance(each, str) and len(each) <= 512 for name, each in metadata.items())
    if len(metadata) > 16 or not short:
        raise RequestError("metadata must have at most 16 texts of at most 512 characters, by names of at most 64")
    repeated = [asked.instructions, asked.text and asked.text.format, asked.tool_choice, asked.tools]
    if measure_values(repeated, MOST_REPEATED) > MOST_REPEATED or len(encode_json(repeated)) > MOST_REPEATED:
        said = f"instructions, text, tool_choice and tools are more than {MOST_REPEATED} bytes of JSON in all"
        raise RequestError(f"{said}, each value counted as 64, which a response repeats; give fewer or shorter ones")


def make_messages(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Make chat messages of input items: messages, calls of functions and their outputs. Reasoning is left out."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            _add_call(messages, item)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            raise RequestError(f"an input item of type {show(kind)} is not served here")
    return messages


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    """Add a call to the assistant's message, which has all calls of one turn."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Write a tool as chats have it: its function one level deeper."""
    if tool.get("type") != "function":
        raise RequestError(f"a tool of type {str(tool.get('type'))[:40]!r} is not served here; functions are")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
