"""Responses as clients of OpenAI's Responses API read them: whole, or as typed events with numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from trinity.request import Output, Token
from trinity.server.fields import ParsedCall, new_id
from trinity.server.protocol import ToolCall, encode_json, encode_part
from trinity.server.responses_fields import ResponsesBody
from trinity.server.token_texts import TokenTexts
from trinity.server.tool_calls import make_finder


class ResponsesReply:
    """One response: a message, calls of functions, or both. The message begins with its first text."""

    def __init__(self, call: ParsedCall, asked: ResponsesBody, model: str, texts: TokenTexts, tool_format: str) -> None:
        self._call, self._asked, self._model, self._texts = call, asked, model, texts
        self._id, self._created, self._number = call.requests[0].request_id, time.time(), 0
        self._finder = make_finder(tool_format, call.tools.schemas, call.tools.forced)
        self._items: list[dict[str, Any]] = []
        self._message: dict[str, Any] | None = None
        self._part: dict[str, Any] = {}
        self._pieces: list[str] = []
        self._sent = 0

    # ------------------------------------------------------------ as events

    def begin(self, index: int, prompt: tuple[int, ...]) -> bytes:
        """Encode the events that open a response."""
        started = self._describe("in_progress")
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def add(self, index: int, tokens: Sequence[Token]) -> bytes:
        """Encode tokens: an event each, but for those that add nothing to be seen."""
        return b"".join([self._add(token) for token in tokens])

    def _add(self, token: Token) -> bytes:
        self._sent += len(token.text)
        text, calls = (token.text, []) if self._finder is None else self._finder.push(token.text)
        return self._add_text(text, [token]) + b"".join(map(self._add_call, calls))

    def _add_text(self, text: str, tokens: Sequence[Token]) -> bytes:
        logprobs = self._logprobs(tokens)
        if not text and not logprobs:
            return b""
        opened = b"" if self._message is not None else self._open_message()
        assert self._message is not None
        self._pieces.append(text)
        if self._call.logprobs is not None:
            self._part.setdefault("logprobs", []).extend(logprobs)
        place = self._place(self._message)
        return opened + self._event("response.output_text.delta", **place, delta=text, logprobs=logprobs)

    def _open_message(self) -> bytes:
        self._part = {"type": "output_text", "text": "", "annotations": []}
        message = {"id": new_id("msg"), "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        self._message = message
        self._items.append(message)
        added = self._event("response.output_item.added", output_index=len(self._items) - 1, item=message)
        return added + self._event("response.content_part.added", **self._place(message), part=self._part)

    def _close_message(self, status: str) -> bytes:
        if self._message is None:
            return b""
        message, text = self._message, "".join(self._pieces)
        self._part["text"] = text
        message |= {"status": status, "content": [self._part]}
        place, logprobs = self._place(message), self._part.get("logprobs", [])
        done = self._event("response.output_text.done", **place, text=text, logprobs=logprobs)
        done += self._event("response.content_part.done", **place, part=self._part)
        self._message, self._pieces = None, []
        return done + self._event("response.output_item.done", output_index=place["output_index"], item=message)

    def _add_call(self, call: ToolCall) -> bytes:
        closed = self._close_message("completed")
        named = {"id": new_id("fc"), "type": "function_call", "call_id": call.id, "name": call.function.name}
        opened = {**named, "arguments": "", "status": "in_progress"}
        item = {**named, "arguments": call.function.arguments, "status": "completed"}
        self._items.append(item)
        at, said = len(self._items) - 1, call.function.arguments
        place = {"item_id": named["id"], "output_index": at}
        return b"".join(
            [
                closed,
                self._event("response.output_item.added", output_index=at, item=opened),
                self._event("response.function_call_arguments.delta", **place, delta=said),
                self._event("response.function_call_arguments.done", **place, name=call.function.name, arguments=said),
                self._event("response.output_item.done", output_index=at, item=item),
            ]
        )

    def end(self, index: int, output: Output) -> bytes:
        """Encode the end of the text and of the items that are open."""
        text, calls = output.text[self._sent :], list[ToolCall]()
        if self._finder is not None:
            text, calls = self._finder.finish(text)
        ended = self._add_text(text, []) + b"".join(map(self._add_call, calls))
        if not self._items:
            ended += self._open_message()
        return ended + self._close_message("completed" if output.finish_reason == "stop" else "incomplete")

    def close(self, outputs: Sequence[Output]) -> bytes:
        """Encode the last event, which has the whole response."""
        status = "completed" if outputs[0].finish_reason == "stop" else "incomplete"
        return self._event(f"response.{status}", response=self._describe(status, outputs[0]))

    def whole(self, outputs: Sequence[Output], tokens: Sequence[Sequence[Token]], prompt: tuple[int, ...]) -> bytes:
        """Encode the whole response: what its events would have built."""
        (output,) = outputs
        text, calls = output.text, list[ToolCall]()
        if self._finder is not None:
            text, calls = self._finder.push(text)
        self._sent = len(output.text)
        self._add_text(text, tokens[0])
        for call in calls:
            self._add_call(call)
        self.end(0, output)
        return encode_json(self._describe("completed" if output.finish_reason == "stop" else "incomplete", output))

    # ------------------------------------------------------------ parts

    def _place(self, message: dict[str, Any]) -> dict[str, Any]:
        return {"item_id": message["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode_json(event) + b"\n\n"

    def _logprobs(self, tokens: Sequence[Token]) -> list[msgspec.Raw]:
        if self._call.logprobs is None:
            return []
        found = (self._texts.describe(each.id, each.logprob, each.top_logprobs) for each in tokens)
        return [encode_part(each) for each in found]

    def _describe(self, status: str, output: Output | None = None) -> dict[str, Any]:
        asked, sampling = self._asked, self._call.requests[0].sampling
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": list(self._items) if output is not None else [],
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None if output is None else _usage(output),
        }


def _usage(output: Output) -> dict[str, Any]:
    prompt, made = output.prompt_tokens, len(output.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + made,
    }
