"""Checks a request's prompt and splits it at its media, with the model's own markers."""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trinity.request import Media

PROMPT_MEDIA_KINDS = ("image", "video", "audio")
_MARKER = re.compile("<(image|video|audio)>")
_PART_KEYS = {"type", "text"}


class PromptProblem(Exception):
    """Reason why a prompt cannot be used. ``media``: it concerns media, and becomes ``BadMedia``."""

    def __init__(self, message: str, media: bool = True) -> None:
        super().__init__(message)
        self.media = media


class Placeholder(msgspec.Struct, frozen=True, kw_only=True):
    """Markup of one kind of media in a model's text.

    - ``token``: placeholder that the model's processor expands.
    - ``marker``: text that replaces ``<image>`` and the like in raw text; it has ``token`` once.
    - ``reserved`` (none): tokens that must not occur in a user's own text.
    """

    token: str
    marker: str
    reserved: tuple[str, ...] = ()


class PromptText(msgspec.Struct, frozen=True):
    """A prompt split at its media.

    - ``pieces``: text around the items, one more than there are items.
    - ``kinds``: kind of each item, in order.
    - ``rendered`` (False): written by a chat template, which may have added the first special token.
    """

    pieces: tuple[str, ...]
    kinds: tuple[str, ...]
    rendered: bool = False


def find_chat_template(processor: Any, tokenizer: Any) -> str:
    """Find a model's chat template, its processor's before its tokenizer's; of several named ones the default.

    As transformers' ``get_chat_template`` without a name. Raises ``PromptProblem``.
    """
    found = getattr(processor, "chat_template", None) or tokenizer.chat_template
    if isinstance(found, Mapping):
        if "default" not in found:
            names = ", ".join(sorted(map(str, found)))
            raise PromptProblem(f"this model has chat templates {names}, and none is the default", media=False)
        found = found["default"]
    if not found:
        raise PromptProblem("this model has no chat template; give prompt= instead of messages=", media=False)
    return str(found)


def split_at_markers(prompt: str, placeholders: Mapping[str, Placeholder], counts: Mapping[str, int]) -> PromptText:
    """Split raw text at each ``<image>``, ``<video>`` or ``<audio>``, which becomes the model's own marker.

    ``counts``: number of given items by kind. Raises ``PromptProblem`` if markers and items differ in number.
    """
    texts = _MARKER.split(prompt)  # text, kind, text, kind, ..., text
    plain, kinds = texts[::2], tuple(texts[1::2])
    _check_counts(Counter(kinds), counts, "the prompt has {wanted} <{kind}> marker(s)")
    for text in plain:
        check_user_text(text, placeholders)
    pieces = [""]
    for text, kind in zip(plain, (*kinds, None), strict=True):
        pieces[-1] += text
        if kind is not None:
            before, after = placeholders[kind].marker.split(placeholders[kind].token)
            pieces[-1] += before
            pieces.append(after)
    return PromptText(tuple(pieces), kinds)


def split_rendered_chat(
    rendered: str, placeholders: Mapping[str, Placeholder], counts: Mapping[str, int]
) -> PromptText:
    """Split text that a chat template wrote, which has the model's own placeholders already.

    Raises ``PromptProblem`` if placeholders and items (``counts`` by kind) differ in number.
    """
    kinds_of = {placeholder.token: kind for kind, placeholder in placeholders.items()}
    if not kinds_of:
        return PromptText((rendered,), (), True)
    texts = re.split("(" + "|".join(map(re.escape, kinds_of)) + ")", rendered)
    kinds = tuple(kinds_of[token] for token in texts[1::2])
    _check_counts(Counter(kinds), counts, "the chat template wrote {wanted} {kind} placeholder(s)")
    return PromptText(tuple(texts[::2]), kinds, True)


def build_chat(
    messages: Sequence[Mapping[str, Any]], placeholders: Mapping[str, Placeholder], counts: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Build messages as chat templates read them: content as parts, or for text-only models as one string.

    A part {"type": "image"} takes the next image of the request. Raises ``PromptProblem``.
    """
    seen: Counter[str] = Counter()
    chat = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptProblem('every message must be a dict with a "role" and a "content"', media=False)
        parts = [_part(part) for part in _content(message.get("content"))]
        seen.update(part["type"] for part in parts if part["type"] != "text")
        chat.append({**message, "content": parts})
    _check_counts(seen, counts, "messages= has {wanted} {kind} part(s)")
    texts = [part["text"] for message in chat for part in message["content"] if part["type"] == "text"]
    for text in texts:
        check_user_text(text, placeholders)
    if not placeholders:
        chat = [{**message, "content": "".join(part["text"] for part in message["content"])} for message in chat]
    return chat


def check_user_text(text: str, placeholders: Mapping[str, Placeholder]) -> None:
    """Raise ``PromptProblem`` if a user's own text contains a token that this model reserves for media."""
    for kind, placeholder in placeholders.items():
        for token in {placeholder.token, *placeholder.reserved}:
            if token in text:
                raise PromptProblem(
                    f"the text contains {token!r}, which this model reserves for media; "
                    f'write <{kind}> in prompt=, or a part {{"type": "{kind}"}} in messages=, where an item belongs'
                )


def _content(content: Any) -> Sequence[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, Sequence):
        return content
    raise PromptProblem(f"a message's content must be text or a list of parts, got {type(content).__name__}", False)


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in PROMPT_MEDIA_KINDS and set(part) <= _PART_KEYS:
        return {"type": kind}
    known = ", ".join(f'{{"type": "{kind}"}}' for kind in PROMPT_MEDIA_KINDS)
    raise PromptProblem(
        f'a part must be {{"type": "text", "text": ...}} or one of {known}, with its item in the '
        f"request's images= or media=; got {part!r:.80}"
    )


def _check_counts(found: Mapping[str, int], given: Mapping[str, int], message: str) -> None:
    for kind in sorted({*found, *given}):
        wanted, have = found.get(kind, 0), given.get(kind, 0)
        if wanted != have:
            said = message.format(wanted=wanted, kind=kind)
            raise PromptProblem(f"{have} {kind} item(s) given, but {said}; the numbers must be equal")


def order_media(text: PromptText, media: Sequence[Media]) -> tuple[tuple[Media, ...], tuple[str, ...]]:
    """Put media into the order of the text, and name each ("image 2 of 3") for error messages."""
    waiting = {kind: iter([item for item in media if item.kind == kind]) for kind in text.kinds}
    totals, seen = Counter(text.kinds), Counter[str]()
    ordered, names = [], []
    for kind in text.kinds:
        item = next(waiting[kind])
        seen[kind] += 1
        shown = f" ({reprlib.repr(str(item.source))})" if isinstance(item.source, (str, Path)) else ""
        ordered.append(item)
        names.append(f"{kind} {seen[kind]} of {totals[kind]}{shown}")
    return tuple(ordered), tuple(names)
