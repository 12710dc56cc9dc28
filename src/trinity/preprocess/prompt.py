"""From a request's prompt to text with the model's own media placeholders, and what is said about a wrong one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

KINDS = ("image", "video", "audio")
_MARKER = re.compile("<(image|video|audio)>")
_PART_KEYS = {"type", "text"}


class PromptProblem(Exception):
    """Why a prompt cannot be used. ``media``: it is about media, and becomes BadMedia."""

    def __init__(self, message: str, media: bool = True) -> None:
        super().__init__(message)
        self.media = media


class Placeholder(msgspec.Struct, frozen=True, kw_only=True):
    """How a model marks a media item in its text.

    ``token`` is what its processor replaces by the expanded placeholder; ``marker`` what stands for a neutral marker
    in raw text (it contains ``token`` once). ``reserved`` must not occur in a user's own text.
    """

    token: str
    marker: str
    reserved: tuple[str, ...] = ()


class PromptText(msgspec.Struct, frozen=True):
    """``pieces`` has the text around each media item: one more than ``kinds``, which names the items in order."""

    pieces: tuple[str, ...]
    kinds: tuple[str, ...]
    rendered: bool = False  # by a chat template, which may have written the first special token


def from_markers(prompt: str, placeholders: Mapping[str, Placeholder], counts: Mapping[str, int]) -> PromptText:
    """Raw text in which each ``<image>``, ``<video>`` or ``<audio>`` becomes the model's own marker.

    ``counts`` are the given items by kind. Raises ``PromptProblem`` where markers and items differ in number.
    """
    texts = _MARKER.split(prompt)  # text, kind, text, kind, ..., text
    plain, kinds = texts[::2], tuple(texts[1::2])
    _check_counts(Counter(kinds), counts, "the prompt has {wanted} <{kind}> marker(s)")
    for text in plain:
        check_plain(text, placeholders)
    pieces = [""]
    for text, kind in zip(plain, (*kinds, None), strict=True):
        pieces[-1] += text
        if kind is not None:
            before, after = placeholders[kind].marker.split(placeholders[kind].token)
            pieces[-1] += before
            pieces.append(after)
    return PromptText(tuple(pieces), kinds)


def from_template(rendered: str, placeholders: Mapping[str, Placeholder], counts: Mapping[str, int]) -> PromptText:
    """Text that a chat template wrote, in which the model's own placeholders stand already."""
    kinds_of = {placeholder.token: kind for kind, placeholder in placeholders.items()}
    if not kinds_of:
        return PromptText((rendered,), (), True)
    texts = re.split("(" + "|".join(map(re.escape, kinds_of)) + ")", rendered)
    kinds = tuple(kinds_of[token] for token in texts[1::2])
    _check_counts(Counter(kinds), counts, "the chat template wrote {wanted} {kind} placeholder(s)")
    return PromptText(tuple(texts[::2]), kinds, True)


def chat_parts(
    messages: Sequence[Mapping[str, Any]], placeholders: Mapping[str, Placeholder], counts: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Messages as chat templates read them: content as parts, or for text-only models as one string.

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
        check_plain(text, placeholders)
    if not placeholders:
        chat = [{**message, "content": "".join(part["text"] for part in message["content"])} for message in chat]
    return chat


def check_plain(text: str, placeholders: Mapping[str, Placeholder]) -> None:
    """Raise ``PromptProblem`` where a user's own text holds what stands for media in this model."""
    for kind, placeholder in placeholders.items():
        for token in {placeholder.token, *placeholder.reserved}:
            if token in text:
                raise PromptProblem(
                    f"the text holds {token!r}, which this model reserves for media; "
                    f'write <{kind}> in prompt=, or a part {{"type": "{kind}"}} in messages=, where an item goes'
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
    if kind in KINDS and set(part) <= _PART_KEYS:
        return {"type": kind}
    known = ", ".join(f'{{"type": "{kind}"}}' for kind in KINDS)
    raise PromptProblem(
        f'a part must be {{"type": "text", "text": ...}} or one of {known}, whose items are given in images= or media= '
        f"of the request; got {part!r:.80}"
    )


def _check_counts(found: Mapping[str, int], given: Mapping[str, int], what: str) -> None:
    for kind in sorted({*found, *given}):
        wanted, have = found.get(kind, 0), given.get(kind, 0)
        if wanted != have:
            said = what.format(wanted=wanted, kind=kind)
            raise PromptProblem(f"{have} {kind} item(s) given, but {said}; the numbers must be equal")
