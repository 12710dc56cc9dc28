"""Content parts of chats, as OpenAI and Hugging Face write them: media that stand in them become the request's media.

The forms: OpenAI's ``chat/completions`` (``image_url``, ``input_audio``, ``video_url``), its ``responses``
(``input_text``, ``input_image``), and what transformers' ``apply_chat_template`` takes (``image`` with an ``image``,
``url``, ``path`` or ``base64`` of its own). A part with no medium in it takes the request's next one of its kind.
"""

from __future__ import annotations

import reprlib
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trinity.errors.plain_values import read_source
from trinity.preprocess.media.media_kinds import kind_names, part_keys
from trinity.preprocess.text.prompt_problem import PromptProblem
from trinity.request import Media, Request

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # key of the text, by type
_IGNORED = {"type", "detail"}  # OpenAI's hint of a size, which models with their own sizes have no use for


class _Shelf:
    """The media that a request has beside its chat, by kind, and those of the chat so far."""

    def __init__(self, given: Sequence[Media]) -> None:
        self.ordered: list[Media] = []
        self.inside = self.missing = 0
        self._waiting: dict[str, deque[Media]] = {}
        for item in given:
            self._waiting.setdefault(item.kind, deque()).append(item)

    @property
    def left(self) -> int:
        return sum(map(len, self._waiting.values()))

    def take_next(self, kind: str) -> None:
        waiting = self._waiting.get(kind)
        if waiting:
            self.ordered.append(waiting.popleft())
        else:
            self.missing += 1

    def put(self, kind: str, source: Any) -> None:
        self.inside += 1
        self.ordered.append(Media(kind, read_source(source)))


def take_media(request: Request) -> Request:
    """Move the media in a chat's content parts to ``Request.media``, in the order of the chat.

    Raises ``PromptProblem`` for a part of no known form, and where parts without a medium and media without a part
    differ in number beside others that have theirs.
    """
    messages = request.messages
    if messages is None or isinstance(messages, str) or not isinstance(messages, Sequence):
        return request
    given = request.all_media()
    shelf = _Shelf(given)
    chat = [_plain_message(message, shelf) for message in messages]
    if not shelf.inside:
        return msgspec.structs.replace(request, messages=chat)
    if shelf.left or shelf.missing:
        bare = len(given) - shelf.left + shelf.missing
        raise PromptProblem(
            f'the chat has {shelf.inside} part(s) with media in them and {bare} without, such as {{"type": "image"}}, '
            f"which take the {len(given)} of images= and media=: give as many of these as there are such parts"
        )
    return msgspec.structs.replace(request, messages=chat, images=(), media=tuple(shelf.ordered))


def _plain_message(message: Any, shelf: _Shelf) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, Sequence) or isinstance(content, (str, bytes)):
        return message
    return {**message, "content": [_plain_part(part, shelf) for part in content]}


def _plain_part(part: Any, shelf: _Shelf) -> Any:
    """Return the part as transformers' templates read it; one of no known type as it is."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return part
    if kind in _TEXTS:
        return {"type": "text", "text": part.get(_TEXTS[kind])}
    if kind not in part_keys():
        return part
    medium, keys = part_keys()[kind]
    source = _find_source(kind, keys, part)
    if source is None:
        shelf.take_next(medium)
    else:
        shelf.put(medium, source)
    return {"type": medium}


def _find_source(kind: str, keys: Sequence[str], part: Mapping[str, Any]) -> Any:
    """Return the medium in a part, None if it has none."""
    found = {key: value for key, value in part.items() if value is not None and key not in _IGNORED}
    if len(found) > 1 or not set(found) <= set(keys):
        names = " or ".join(map(repr, keys))
        raise PromptProblem(
            f'a part {{"type": {kind!r}}} has its medium as {names} and nothing beside it; got {reprlib.repr(part)}'
        )
    if not found and kind not in kind_names():
        raise PromptProblem(f'a part {{"type": {kind!r}}} needs {keys[0]!r} beside it; got {reprlib.repr(part)}')
    return next((_read_value(key, value) for key, value in found.items()), None)


def _read_value(key: str, value: Any) -> Any:
    if isinstance(value, Mapping) and "array" in value:  # a data set's {"array": ..., "sampling_rate": ...}
        return value
    if isinstance(value, Mapping):  # OpenAI's {"url": ...} and {"data": ..., "format": ...}
        value = value["url"] if "url" in value else _data_uri(value.get("data"))
        if not isinstance(value, str):
            raise PromptProblem(
                f'the medium in a part is {{"url": "..."}} or {{"data": "...base64..."}}; got {reprlib.repr(value)}'
            )
        return value
    if key == "base64":
        return _data_uri(value)
    return Path(value) if key == "path" and isinstance(value, str) else value


def _data_uri(value: Any) -> Any:
    return f"data:;base64,{value}" if isinstance(value, str) else value
