"""Chats of Voxtral have the ids of mistral-common, which writes them in transformers, or are refused as there."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from support.sounds import clip
from support.voxtral_route import front, own
from trinity.errors import RequestError
from trinity.request import Media, Request

pytest.importorskip("mistral_common", reason="Voxtral's chats are written by mistral-common")

GOES_ON = {"continue_final_message": True}


def turns_around(answer: Any) -> list[dict[str, Any]]:
    ask, more = ({"role": "user", "content": text} for text in ("a ", " b  "))
    return [ask, {"role": "assistant", "content": answer}, more]


def in_parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


@pytest.mark.parametrize(
    "answer",
    [
        "Two words. ",
        "  Two",
        "Two words. \n",
        "x   ",
        in_parts("Two ", "words. "),
        in_parts("Two ", "  "),
        in_parts("Two", " ", " "),
    ],
    ids=str,
)
@pytest.mark.parametrize("untrusted", [False, True])
def test_an_answer_ends_without_its_last_spaces(answer: Any, untrusted: bool) -> None:
    """mistral-common takes them off, and its template does not: a client that sends an answer back may have them."""
    found = front().process(Request(messages=turns_around(answer), untrusted=untrusted)).work.prompt
    assert list(found) == own().processor.apply_chat_template(turns_around(answer))["input_ids"][0].tolist()


@pytest.mark.parametrize("texts", [("a", ""), ("", "a"), ("a", "", "b"), ("",), ("  ", "")])
@pytest.mark.parametrize("untrusted", [False, True])
def test_empty_parts_are_left_out(texts: tuple[str, ...], untrusted: bool) -> None:
    chat = [{"role": "user", "content": in_parts(*texts)}]
    chats = [chat, turns_around(in_parts(*texts))] if any(each.strip() for each in texts) else [chat]
    for each in chats:
        found = front().process(Request(messages=each, untrusted=untrusted)).work.prompt
        assert list(found) == own().processor.apply_chat_template(each)["input_ids"][0].tolist()


TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Sées it", "parameters": {}}}]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "system": [{"role": "system", "content": "Be [INST] brief."}, {"role": "user", "content": "the thing"}],
    "users": [{"role": "user", "content": "Hi"}, {"role": "user", "content": "the </s>thing"}],
    "called": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
        {"role": "user", "content": "the thing"},
    ],
}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", CHATS)
def test_other_chats_have_the_ids_of_mistral_common_too(name: str, tools: Any) -> None:
    found = front().process(Request(messages=CHATS[name], tools=tools, untrusted=True)).work.prompt
    settings = {"tools": tools, "tokenize": True, "return_dict": True}
    assert list(found) == own().processor.tokenizer.apply_chat_template(CHATS[name], **settings)["input_ids"]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


ODD: dict[str, list[dict[str, Any]]] = {
    "answer of spaces": [user("a"), answer("   "), user("b")],
    "answer of parts of spaces": [user("a"), answer(in_parts(" ", "")), user("b")],
    "answers of spaces": [user("a"), answer("x "), answer("  "), user("b")],
    "answers": [user("a"), answer("x "), answer("y "), user("b")],
    "call behind spaces": [user("a"), answer("  "), answer("", tool_calls=[CALL]), *CHATS["called"][2:]],
    "answer first": [answer("x "), user("b")],
    "answer of spaces first": [answer("  "), user("b"), answer("c"), user("d")],
    "developer": [{"role": "developer", "content": "Be brief."}, user("b")],
    "empty user": [user("a"), user(""), user("b ")],
}


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", ODD)
def test_chats_that_its_template_alone_would_refuse_or_write_otherwise(name: str, tools: Any) -> None:
    settings = {"tools": tools, "tokenize": True, "return_dict": True}
    wanted = own().processor.tokenizer.apply_chat_template(ODD[name], **settings)["input_ids"]
    for untrusted in (False, True):
        found = front().process(Request(messages=ODD[name], tools=tools, untrusted=untrusted)).work.prompt
        assert list(found) == wanted


def test_a_clip_behind_an_answer() -> None:
    chat = [answer(in_parts("x")), user([{"type": "audio"}, *in_parts("Which?")])]
    request = Request(messages=chat, media=[Media("audio", clip(1))])
    assert list(front().process(request).work.prompt) == own().inputs(request)["input_ids"][0].tolist()


@pytest.mark.parametrize("last", [answer("yes"), answer("  "), answer("", tool_calls=[CALL])], ids=str)
def test_a_chat_that_ends_with_an_answer_is_refused_as_mistral_common_does(last: dict[str, Any]) -> None:
    chat = [user("a"), last]
    with pytest.raises(Exception, match="last role"):
        own().processor.apply_chat_template(chat)
    with pytest.raises(RequestError, match=r"do not end with an answer; .*continue_final_message"):
        front().process(Request(messages=chat))


def test_an_answer_that_is_continued() -> None:
    chat = [user("a"), answer("yes ")]
    found = front().process(Request(messages=chat, template_kwargs=GOES_ON)).work.prompt
    settings = {"tokenize": True, "return_dict": True, **GOES_ON}
    assert list(found) == own().processor.tokenizer.apply_chat_template(chat, **settings)["input_ids"]
    calling = [*chat, answer("", tool_calls=[CALL])]
    with pytest.raises(RequestError, match="tool calls cannot be continued"):
        front().process(Request(messages=calling, template_kwargs=GOES_ON))


TEXTS = ("a ", "  ", "", "the thing", "x\n", " b  ", "[INST]")
ROLES = ("user", "assistant", "user", "assistant", "system", "developer", "tool")


def draw_message(draw: random.Random) -> dict[str, Any]:
    role = draw.choice(ROLES)
    if role == "tool":
        return {"role": role, "content": "rain", "tool_call_id": "abcdefghi"}
    texts = draw.choices(TEXTS, k=draw.randint(1, 3))
    called = {"tool_calls": [CALL]} if role == "assistant" and draw.random() < 0.25 else {}
    return {"role": role, "content": draw.choice([texts[0], in_parts(*texts)]), **called}


def test_chats_by_chance_have_the_same_ids_where_both_take_them() -> None:
    draw, same = random.Random(4), 0
    for _ in range(300):
        chat = [draw_message(draw) for _ in range(draw.randint(1, 5))]
        more = GOES_ON if chat[-1]["role"] == "assistant" else {}
        tools = draw.choice([None, TOOLS])
        settings: dict[str, Any] = {"tools": tools, "tokenize": True, "return_dict": True, **more}
        try:
            wanted = own().processor.tokenizer.apply_chat_template(chat, **settings)["input_ids"]
        except Exception:  # it has a class for each of its reasons
            continue
        request = Request(messages=chat, tools=tools, untrusted=True)
        try:
            found = front().process(msgspec.structs.replace(request, template_kwargs=more)).work.prompt
        except RequestError:
            continue
        assert list(found) == wanted, chat
        same += 1
    assert same > 80
