"""Chats as mistral-common takes them: what it does to one before it is written, which the templates it makes do not.

Such a template is what writes the chat (``ChatTemplate``). It is given the chat without what it would write and
mistral-common would not. Where it would refuse what that takes, a mark stands there, and is cut out of the text.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from trinity.preprocess.text.prompt_problem import PromptProblem

Message = Mapping[str, Any]

_MARK = f"x{secrets.token_hex(16)}x"  # no text of a user has it
_LEAD: Message = {"role": "user", "content": _MARK}
_MERGED = ("user", "assistant")  # roles whose messages become one where they follow each other


def write_trimmed(
    chat: Sequence[Message], write: Callable[[Sequence[Message], bool], str], begin: str, goes_on: bool
) -> str:
    """Write a chat by ``write``, which has a template of mistral-common's write messages, and the last go on or not.

    ``begin``: text of the token that all chats begin with. ``goes_on``: what follows is more of the last message.
    Raises ``PromptProblem`` for a chat that ends with an answer otherwise, and what ``write`` raises.
    """
    _check_end(chat, goes_on)
    trimmed = _trim(chat)
    if trimmed[0]["role"] != "assistant" or not any(each["role"] == "user" for each in trimmed):
        return write(trimmed, goes_on).replace(_MARK, "")
    before, _, after = write([_LEAD, {"role": "assistant", "content": "x"}, _LEAD], False).split(_MARK)
    whole = write([_LEAD, *trimmed], goes_on)  # the template takes no answer in front
    return whole.replace(f"{before.removeprefix(begin)}{_MARK}{after}", "", 1).replace(_MARK, "")


def _check_end(chat: Sequence[Message], goes_on: bool) -> None:
    if chat[-1]["role"] != "assistant":
        return
    if not goes_on:
        raise PromptProblem(
            "this model's chats do not end with an answer; end with a message of the user, or have it continued by "
            'template_kwargs={"continue_final_message": True}',
            media=False,
        )
    if chat[-1].get("tool_calls"):
        raise PromptProblem("an answer with tool calls cannot be continued; send what the tools said", media=False)


def _trim(chat: Sequence[Message]) -> list[Message]:
    """Leave out empty texts and an answer's last spaces, and mark answers that have nothing else."""
    named = [{**each, "role": "system"} if each["role"] == "developer" else each for each in chat]
    found = list[Message]()
    for role, messages in groupby(named, key=lambda each: each["role"]):
        group = [_drop_empty_parts(each) for each in messages]
        if role in _MERGED:
            group = [_drop_nothing(each) for each in group if each.get("content") or each.get("tool_calls")] or group[
                :1
            ]
        found += _trim_end(group) if role == "assistant" else group
    return found


def _drop_empty_parts(message: Message) -> Message:
    content = message.get("content")
    if not content or isinstance(content, str):
        return message
    parts = [part for part in content if part["type"] != "text" or part["text"]]
    return {**message, "content": parts or ""}


def _drop_nothing(message: Message) -> Message:
    """Have a message with tool calls alone add no text to those that it becomes one with."""
    return message if message.get("content") else {**message, "content": None}


def _trim_end(answers: list[Message]) -> list[Message]:
    """Take the last spaces off answers that become one."""
    at = next((at for at in reversed(range(len(answers))) if answers[at].get("content")), None)
    if at is None:
        return answers
    content = answers[at]["content"]
    if isinstance(content, str):
        content = content.rstrip(" ")
    elif content[-1]["type"] == "text":
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"].rstrip(" ")}]
    says = content if isinstance(content, str) else "".join(part.get("text", "x") for part in content)
    if not says and len(answers) == 1 and not answers[at].get("tool_calls"):
        content = _MARK
    return [*answers[:at], {**answers[at], "content": content}, *answers[at + 1 :]]
