"""Fields of bodies: forms of outputs, tools and what is demanded, texts of tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from support.http_server import chat_body, serve_model
from trinity.errors import RequestError
from trinity.pipeline.stream import Stream
from trinity.request import Output, Request, Sampling, Token, check_sampling
from trinity.server import fields, protocol, read_chat_body, reply_loop, responses_fields
from trinity.server.chat_reply import ChatReply
from trinity.server.completion_reply import CompletionReply
from trinity.server.fields import (
    ANY_TOOL,
    FormFields,
    complete_request,
    read_completion_call,
    read_fields,
    read_form,
    read_text_format,
    read_tools,
)
from trinity.server.responses_fields import read_response_call
from trinity.server.responses_reply import ResponsesReply
from trinity.server.token_texts import LEAST_LOGPROB, TokenTexts

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "nothing": ({}, None),
    "text": ({"response_format": {"type": "text"}}, None),
    "object": ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"json_schema": SCHEMA},
    ),
    "guided": ({"guided_regex": "a+", "guided_json": None}, {"regex": "a+"}),
    "choice": ({"guided_choice": ["a", 'b"c']}, {"grammar": 'start: "a" | "b\\"c"'}),
    "structured": ({"structured_outputs": {"json": SCHEMA, "json_object": False}}, {"json_schema": SCHEMA}),
}
BAD_FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema"}},
    {"response_format": "yaml"},
    {"response_format": {"type": "json_object"}, "guided_regex": "a"},
    {"structured_outputs": {}},
    {"structured_outputs": {"json": SCHEMA, "regex": "a"}},
    {"structured_outputs": {"structural_tag": "x"}},
    {"structured_outputs": [1]},
    {"guided_choice": []},
    {"guided_choice": "ab"},
    {"guided_regex": ""},
    {"guided_json": 3},
]
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_outputs(name: str) -> None:
    body, expected = FORMS[name]
    assert read_form(read_fields(body, FormFields)) == expected


@pytest.mark.parametrize("body", BAD_FORMS)
def test_bad_forms_are_refused_by_name(body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"response_format|structured_outputs|guided_"):
        read_form(read_fields(body, FormFields))


def test_the_form_of_a_response_has_its_schema_higher() -> None:
    assert read_text_format({"type": "json_schema", "name": "x", "schema": SCHEMA}) == {"json_schema": SCHEMA}
    assert read_text_format({"type": "text"}) is None
    assert read_text_format(None) is None


def test_tools_and_what_is_demanded() -> None:
    assert read_tools(None, "auto").schemas == {}
    assert read_tools([WEATHER], "none").definitions == []
    free = read_tools([WEATHER, CLOCK], None)
    assert (list(free.schemas), free.forced) == (["weather", "clock"], "")
    named = read_tools([WEATHER], {"type": "function", "function": {"name": "weather"}})
    assert (named.forced, named.forced_schema()) == ("weather", SCHEMA)
    flat = read_tools([WEATHER], {"type": "function", "name": "weather"})
    assert flat.forced == "weather"
    anyone = read_tools([WEATHER, CLOCK], "required")
    assert anyone.forced == ANY_TOOL
    names = [each["properties"]["name"]["const"] for each in anyone.forced_schema()["anyOf"]]
    assert names == ["weather", "clock"]


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        (None, "required"),
        ([WEATHER], "weather"),
        ([WEATHER], {"function": {"name": "other"}}),
        ([{"type": "web_search"}], None),
        ([{"type": "function", "function": {"name": 3}}], None),
        ([{"type": "function", "function": {"name": "x", "parameters": "y"}}], None),
    ],
)
def test_bad_tools_are_refused_by_name(tools: Any, choice: Any) -> None:
    with pytest.raises(RequestError, match="tool"):
        read_tools(tools, choice)


def test_a_body_becomes_a_request() -> None:
    request = read_chat_body(
        {"messages": [{"role": "user", "content": "Hello"}], "max_completion_tokens": 5, "max_tokens": 9}
    )
    assert request.max_tokens == 5
    assert request.request_id.startswith("chatcmpl-")


def test_what_the_server_says_of_a_request() -> None:
    plain, own = Request("x"), Request("x", max_tokens=3, deadline_s=1.0)
    assert complete_request(plain, False, None).max_tokens == 2**31 - 1
    assert complete_request(plain, True, None) == plain
    assert complete_request(plain, True, 5.0).deadline_s == 5.0
    assert complete_request(own, False, 5.0) == own
    assert complete_request(own, False, 0.5).deadline_s == 0.5


class Pieces:
    """A tokenizer of four pieces, of sentencepiece and of byte-level BPE."""

    KNOWN = ("\u2581Hi", "<0xE4>", "Ã", "plain")

    def convert_ids_to_tokens(self, token: int) -> str:
        return self.KNOWN[token]

    def decode(self, ids: list[int]) -> str:
        return {0: "Hi", 2: "\ufffd", 3: "plain"}[ids[0]]


def test_texts_and_bytes_of_tokens() -> None:
    texts = TokenTexts(Pieces())
    found = [texts.describe(token, -1.0, None) for token in range(4)]
    assert [(each.token, each.bytes) for each in found] == [
        (" Hi", list(b" Hi")),
        ("\ufffd", [0xE4]),
        ("\ufffd", [0xC3]),
        ("plain", list(b"plain")),
    ]
    assert texts.text(99) == ""
    entry = texts.describe(0, float("-inf"), [(0, -0.5), (3, float("-inf"))])
    assert entry.logprob == LEAST_LOGPROB
    assert [each.token for each in entry.top_logprobs] == [" Hi"], "what could not come is no candidate"


def test_prompts_are_counted_before_a_request_is_made_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 8 MiB holds millions of texts: as many requests held the event loop for most of a minute."""
    assert len(read_completion_call({"prompt": ["a", "b"]}, 2).requests) == 2
    monkeypatch.setattr(fields, "make_request", lambda **_: pytest.fail("a request was made"))
    with pytest.raises(RequestError, match="prompt has 3 texts; 2 are allowed"):
        read_completion_call({"prompt": ["a", "b", "c"]}, 2)


@pytest.mark.parametrize(("name", "token"), [("0" * 25 + "5", 5), ("0" * 30, 0), ("7", 7)])
def test_zeros_before_a_token_id_do_not_make_another(name: str, token: int) -> None:
    messages = [{"role": "user", "content": "a"}]
    sampling = read_chat_body({"messages": messages, "logit_bias": {name: 1}}).sampling
    assert sampling is not None
    assert dict(sampling.logit_bias or {}) == {token: 1.0}


TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "choices": ({"guided_choice": ["a" * 100] * 200}, "guided_choice has more than 16384 characters"),
    "wide choices": ({"guided_choice": ["é" * 100] * 40}, "guided_choice has more than 16384 characters"),
    "biases": ({"logit_bias": {str(each): 1.0 for each in range(1025)}}, "logit_bias has 1025 token ids; 1024 are"),
    "the name of a bias": ({"logit_bias": {"0" * 2000: 1.0}}, "logit_bias has '0+' for a token id"),
    "tools": ({"tools": [CLOCK] * 4097}, "tools has 4097 items; 4096 are allowed"),
    "a name": ({"tools": [CLOCK], "tool_choice": {"name": []}}, "name one of the tools, got {'name': \\[\\]}"),
    "a long name": (
        {"tools": [CLOCK], "tool_choice": {"name": "x" * 9999}},
        r"x{40}\.\.\.x+\.\.\. \(dict\)",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_is_too_much_is_refused_before_anything_is_made_of_it(name: str) -> None:
    """At b6e2a44b each of them took from 0.1 to 1.3 s of the loop, and a name that is no text was no typed error."""
    body, message = TOO_MUCH[name]
    with pytest.raises(RequestError, match=message):
        read_chat_body({"messages": [], **body})


@pytest.mark.parametrize(
    "metadata", [{"a": "x" * 513}, {"x" * 65: "a"}, {"a": 1}, {str(each): "a" for each in range(17)}]
)
def test_what_a_response_repeats_is_bounded(metadata: dict[str, Any]) -> None:
    """At c83aff7b a response of 60 MB of metadata was written three times on the loop, for 1.4 s."""
    body = {"input": "a", "metadata": {str(each): "x" * 512 for each in range(16)}}
    assert read_response_call(body)[1].metadata == body["metadata"]
    with pytest.raises(RequestError, match="metadata must have at most 16 texts of at most 512 characters"):
        read_response_call({**body, "metadata": metadata})


def test_a_type_that_is_none_is_not_written_out_whole() -> None:
    with pytest.raises(RequestError, match=r"an input item of type \['x{40}.*\.\.\. \(list\) is not served here"):
        read_response_call({"input": [{"type": ["x" * 9999]}]})


@pytest.mark.parametrize(
    "more",
    [
        {"instructions": "x" * responses_fields.MOST_REPEATED},
        {"tools": [{"type": "function", "name": "a", "description": "x" * responses_fields.MOST_REPEATED}]},
        {"tools": [{"type": "function", "name": "a", "parameters": {"a": [[]] * 70_000}}], "tool_choice": "none"},
        {"text": {"format": {"type": "text", "x": "\x01" * (responses_fields.MOST_REPEATED // 5)}}},
        {"tool_choice": "none", "text": {"format": {"type": "text", "x": "x" * responses_fields.MOST_REPEATED}}},
    ],
    ids=["instructions", "tool", "values", "control characters", "format"],
)
def test_texts_and_tools_that_a_response_repeats_are_bounded_together(more: dict[str, Any]) -> None:
    """At d3eb033e 60 MB of them were written again in every event with the response: 0.3 to 0.45 s."""
    with pytest.raises(RequestError, match="which a response repeats; give fewer or shorter ones"):
        read_response_call({"input": "a", **more})


def test_stop_strings_are_bounded_together() -> None:
    """At c83aff7b a stream with 4,096 long ones held the loop for seconds: each token is compared with all of them."""
    check_sampling(Sampling(stop=("x" * 1024,) * 16))
    with pytest.raises(RequestError, match="stop has more than 16384 characters in all"):
        check_sampling(Sampling(stop=("x" * 1024,) * 17))
    check_sampling(Sampling(stop=("x",) * 64))
    with pytest.raises(RequestError, match="stop has 65 strings; give 64 at most"):  # 4,096 took 0.3 s at d3eb033e
        check_sampling(Sampling(stop=("x",) * 65))


async def test_an_answer_of_many_likely_tokens_is_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """At c83aff7b one of 146 MB held the loop for 4 s."""
    seen, whole = list[threading.Thread](), ChatReply.whole

    def write(self: ChatReply, *given: Any) -> bytes:
        seen.append(threading.current_thread())
        return whole(self, *given)

    monkeypatch.setattr(ChatReply, "whole", write)
    body = chat_body(max_tokens=8, temperature=0, ignore_eos=True, logprobs=True, top_logprobs=5)
    async with serve_model() as served:
        answers = []
        for most in (1000, 10):
            monkeypatch.setattr(reply_loop, "MOST_DESCRIBED", most)
            answers.append((await served.http.post("/v1/chat/completions", json=body)).json()["choices"])
    assert answers[0][0]["message"] == answers[1][0]["message"]
    assert [len(each[0]["logprobs"]["content"]) for each in answers] == [8, 8]
    assert [each is threading.main_thread() for each in seen] == [True, False]


def count_values(value: Any) -> int:
    """Count what one call of an encoder writes; what has been encoded already counts as one."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, (dict, list, tuple)):
        return 1 + sum(map(count_values, value.values() if isinstance(value, dict) else value))
    return 1


class CountedEncoder:
    """Encodes, and notes the most values that a call was given."""

    def __init__(self) -> None:
        self.most = 0

    def encode(self, value: Any) -> bytes:
        self.most = max(self.most, count_values(value))
        return msgspec.json.encode(value)


ENDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**chat_body(), "logprobs": True, "top_logprobs": 5, "max_tokens": 40},
    "/v1/completions": {"model": "llama", "prompt": "Say", "logprobs": 5, "max_tokens": 40},
    "/v1/responses": {
        "model": "llama", "input": "Say", "top_logprobs": 5, "include": ["message.output_text.logprobs"],
        "max_output_tokens": 40,
    },
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDS)
async def test_likely_tokens_are_encoded_one_by_one_and_written_in_pieces(
    path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At d3eb033e sixteen choices with 100 likely tokens were one call, in which no other thread ran for 0.9 s."""
    encoder, next_tokens, writes = CountedEncoder(), Stream.next_tokens, list[int]()
    ends_on_loop = list[bool]()

    async def all_tokens(self: Stream) -> list[Token]:
        found = list[Token]()
        while some := await next_tokens(self):
            found += some
        return found

    def add(self: Any, index: int, tokens: Sequence[Token]) -> bytes:
        writes.append(len(tokens))
        return written[type(self)](self, index, tokens)

    def end(self: Any, index: int, output: Output) -> bytes:
        ends_on_loop.append(threading.current_thread() is threading.main_thread())
        return ended[type(self)](self, index, output)

    replies = (ChatReply, CompletionReply, ResponsesReply)
    written, ended = {each: each.add for each in replies}, {each: each.end for each in replies}
    for each in replies:
        monkeypatch.setattr(each, "add", add)
        monkeypatch.setattr(each, "end", end)
    monkeypatch.setattr(protocol, "_encoder", encoder)
    monkeypatch.setattr(Stream, "next_tokens", all_tokens)
    monkeypatch.setattr(reply_loop, "MOST_DESCRIBED", 18)
    async with serve_model() as served:
        body = {**ENDS[path], "temperature": 0, "ignore_eos": True, "stream": stream}
        answer = await served.http.post(path, json=body)
    assert answer.text.count('"top_logprobs"') >= (1 if path == "/v1/completions" else 40), answer.text
    assert encoder.most < 40 * 5
    assert writes == ([3] * 13 + [1] if stream else [])
    assert not any(ends_on_loop), "a response's end has all of it again"
    assert len(ends_on_loop) >= stream
