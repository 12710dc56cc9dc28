"""A request's prompt or chat: checked and split at its media, control tokens hidden, with the model's own markers."""

from __future__ import annotations

import functools
import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trinity.errors.plain_values import MOST_PARTS, Unfit, read_chat
from trinity.preprocess.media.media_kinds import LoadedProcessor, Placeholder, kind_names
from trinity.preprocess.text.chat_template import ChatTemplate
from trinity.preprocess.text.control_tokens import ControlTokens, HiddenTokens, check_roles, render_safely
from trinity.preprocess.text.prompt_problem import PromptProblem
from trinity.request import Media, Request

_PART_KEYS = {"type", "text"}
_AS_TEXT = "special_tokens=False, or untrusted=True (over HTTP: put it in a chat, whose texts are read so)"


class PromptText(msgspec.Struct, frozen=True):
    """A prompt split at its media.

    - ``pieces``: text around the items, one more than there are items.
    - ``kinds``: kind of each item, in order.
    - ``rendered`` (False): written by a chat template, which may have added the first special token.
    - ``hidden`` (None): marks in the pieces that stand for control tokens of the user's own text.
    """

    pieces: tuple[str, ...]
    kinds: tuple[str, ...]
    rendered: bool = False
    hidden: HiddenTokens | None = None


def split_at_markers(
    prompt: str,
    placeholders: Mapping[str, Placeholder],
    counts: Mapping[str, int],
    hidden: HiddenTokens | None = None,
    checked: Mapping[str, Placeholder] | None = None,
) -> PromptText:
    """Split raw text at each ``<image>``, ``<video>`` or ``<audio>``, which becomes the model's own marker.

    ``counts``: number of given items by kind. ``hidden`` takes the control tokens out of the text around markers, and
    where no item is given a marker is text too. ``checked`` (``placeholders``): markup that other text may not have.
    Raises ``PromptProblem`` if markers and items differ in number.
    """
    if hidden is not None and not counts:
        return PromptText((hidden.hide(prompt),), (), hidden=hidden)
    texts = _marker(kind_names()).split(prompt)  # text, kind, text, kind, ..., text
    plain, kinds = texts[::2], tuple(texts[1::2])
    advice = "" if counts else f"; to quote a marker as text give {_AS_TEXT}"
    _check_counts(Counter(kinds), counts, "the prompt has {wanted} <{kind}> marker(s)", advice)
    if hidden is None:
        for text in plain:
            check_user_text(text, placeholders if checked is None else checked)
    else:
        plain = hidden.hide(plain)
    pieces = [""]
    for text, kind in zip(plain, (*kinds, None), strict=True):
        pieces[-1] += text
        if kind is not None:
            before, after = placeholders[kind].marker.split(placeholders[kind].token)
            pieces[-1] += before
            pieces.append(after)
    return PromptText(tuple(pieces), kinds, hidden=hidden)


def split_rendered_chat(
    rendered: str,
    placeholders: Mapping[str, Placeholder],
    counts: Mapping[str, int],
    hidden: HiddenTokens | None = None,
) -> PromptText:
    """Split text that a chat template wrote, which has the model's own placeholders already.

    Raises ``PromptProblem`` if placeholders and items (``counts`` by kind) differ in number.
    """
    kinds_of = {placeholder.token: kind for kind, placeholder in placeholders.items()}
    if not kinds_of:
        return PromptText((rendered,), (), True, hidden)
    texts = re.split("(" + "|".join(map(re.escape, kinds_of)) + ")", rendered)
    kinds = tuple(kinds_of[token] for token in texts[1::2])
    _check_counts(Counter(kinds), counts, "the chat template wrote {wanted} {kind} placeholder(s)")
    return PromptText(tuple(texts[::2]), kinds, True, hidden)


def build_chat(
    messages: Sequence[Mapping[str, Any]],
    placeholders: Mapping[str, Placeholder],
    counts: Mapping[str, int],
    hidden: HiddenTokens | None = None,
    checked: Mapping[str, Placeholder] | None = None,
) -> list[dict[str, Any]]:
    """Build messages as chat templates read them: content as parts, or for text-only models as one string.

    A part {"type": "image"} takes the next image of the request; ``take_media`` has made all other forms these. What
    else a message has ("name", "tool_call_id") stays. ``hidden``: control tokens will be taken out of its texts, whose
    roles must then be known ones. Raises ``PromptProblem``.
    """
    seen: Counter[str] = Counter()
    chat, left = [], [MOST_PARTS]
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptProblem('every message must be a dict with a "role" and a "content"', media=False)
        parts = [_part(part) for part in _content(message)]
        seen.update(part["type"] for part in parts if part["type"] != "text")
        chat.append({**message, **_tool_calls(message, left), "content": parts})
    _check_counts(seen, counts, "messages= has {wanted} {kind} part(s)")
    if hidden is None:
        for text in (part["text"] for message in chat for part in message["content"] if part["type"] == "text"):
            check_user_text(text, placeholders if checked is None else checked)
    else:
        check_roles(chat)
    if not placeholders:
        chat = [{**message, "content": "".join(part["text"] for part in message["content"])} for message in chat]
    return chat


@functools.cache
def _marker(kinds: Sequence[str]) -> re.Pattern[str]:
    return re.compile(f"<({'|'.join(kinds)})>")


def check_user_text(text: str, placeholders: Mapping[str, Placeholder]) -> None:
    """Raise ``PromptProblem`` if a user's own text contains a token that this model reserves for media."""
    for kind, placeholder in placeholders.items():
        for token in {placeholder.token, *placeholder.reserved}:
            if token in text:
                raise PromptProblem(
                    f"the text contains {token!r}, which this model reserves for media; to quote it as text give "
                    f"{_AS_TEXT}; where an item belongs write <{kind}> in prompt=, or a part "
                    f'{{"type": "{kind}"}} in messages='
                )


def _tool_calls(message: Mapping[str, Any], left: list[int]) -> dict[str, Any]:
    """Make the arguments of a message's tool calls mappings, as chat templates read them: OpenAI's are JSON texts.

    ``left``: values that the texts of a chat may still hold, which the check of its fields has not seen.
    """
    calls = message.get("tool_calls")
    return {"tool_calls": [_tool_call(call, left) for call in calls]} if isinstance(calls, list) else {}


def _tool_call(call: Any, left: list[int]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    given = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(given, str):
        return call
    try:
        read = msgspec.json.decode(given or "{}", type=dict[str, Any])
        arguments = read_chat("the arguments of tool calls", read, len(given), left)
    except Unfit as problem:
        raise PromptProblem(str(problem), media=False) from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise PromptProblem(f"the arguments of a tool call must be a JSON object ({error})", media=False) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _content(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if content is None and message.get("tool_calls"):  # OpenAI's null beside calls
        return []
    if isinstance(content, Sequence):
        return content
    raise PromptProblem(f"a message's content must be text or a list of parts, got {type(content).__name__}", False)


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind in kind_names() and set(part) <= _PART_KEYS:
        return {"type": kind}
    raise PromptProblem(
        'a part must be {"type": "text", "text": ...}, {"type": "image_url", "image_url": {"url": ...}}, {"type": '
        '"image", "image": ...} or, with its item in images= or media=, {"type": "image"}; got ' + reprlib.repr(part)
    )


def _check_counts(found: Mapping[str, int], given: Mapping[str, int], message: str, advice: str = "") -> None:
    for kind in sorted({*found, *given}):
        wanted, have = found.get(kind, 0), given.get(kind, 0)
        if wanted != have:
            said = message.format(wanted=wanted, kind=kind)
            raise PromptProblem(f"{have} {kind} item(s) given, but {said}; the numbers must be equal{advice}")


def check_in_front(text: PromptText) -> None:
    """Raise ``PromptProblem`` if a prompt is not one image and then plain text, read by a processor in one call."""
    if text.rendered:
        raise PromptProblem("this model's processor puts the image in front of a plain text: give prompt=, not a chat")
    if text.pieces[0]:
        raise PromptProblem("this model's processor puts the image in front of all text: write <image> first, once")
    if text.hidden is not None and text.hidden.count_hidden(text.pieces[-1]):
        raise PromptProblem(
            "the text has special tokens of this model, whose processor reads image and text at once; leave them out",
            media=False,
        )


def order_media(text: PromptText, media: Sequence[Media]) -> tuple[tuple[Media, ...], tuple[str, ...]]:
    """Put media into the order of the text, and name each ("image 2 of 3") for error messages."""
    named = list(zip(media, name_media(media), strict=True))
    waiting = {kind: iter([each for each in named if each[0].kind == kind]) for kind in text.kinds}
    ordered = [next(waiting[kind]) for kind in text.kinds]
    return tuple(item for item, _ in ordered), tuple(name for _, name in ordered)


def name_media(media: Sequence[Media]) -> tuple[str, ...]:
    """Name each of a request's media ("image 2 of 3") for error messages."""
    totals, seen, names = Counter(item.kind for item in media), Counter[str](), []
    for item in media:
        seen[item.kind] += 1
        shown = f" ({reprlib.repr(str(item.source))})" if isinstance(item.source, (str, Path)) else ""
        names.append(f"{item.kind} {seen[item.kind]} of {totals[item.kind]}{shown}")
    return tuple(names)


class PromptReader:
    """Reads prompts and chats for one model, from any thread.

    ``loaded``: its tokenizer and processor.
    """

    def __init__(self, loaded: LoadedProcessor) -> None:
        self._placeholders, self._in_front = loaded.placeholders, loaded.in_front
        self._beside = _free_marks(loaded)
        self._template = ChatTemplate(loaded.processor, loaded.tokenizer, loaded.placeholders)
        reserved = {token for each in loaded.placeholders.values() for token in (each.token, *each.reserved)}
        self._controls = ControlTokens(loaded.tokenizer, self._template.sources, reserved)

    def split(self, request: Request, counts: Mapping[str, int]) -> PromptText:
        """Split a request's prompt at its media, of which it has ``counts`` by kind. Raises ``PromptProblem``."""
        text = self._split(request, counts)
        if self._in_front and text.kinds:
            check_in_front(text)
        return text

    def _split(self, request: Request, counts: Mapping[str, int]) -> PromptText:
        act = not request.untrusted if request.special_tokens is None else request.special_tokens
        hidden = None if act else HiddenTokens(self._controls)
        if request.messages is None:
            if not isinstance(request.prompt, str):
                raise PromptProblem(f"prompt must be text, got {type(request.prompt).__name__}", media=False)
            return split_at_markers(request.prompt, self._placeholders, counts, hidden, self._list_checked(counts))
        if isinstance(request.messages, str) or not request.messages:
            raise PromptProblem("messages must be a non-empty list", media=False)
        chat = build_chat(request.messages, self._placeholders, counts, hidden, self._list_checked(counts))
        return split_rendered_chat(self._render(request, chat, hidden), self._placeholders, counts, hidden)

    def _list_checked(self, counts: Mapping[str, int]) -> Mapping[str, Placeholder]:
        """List the markup that a text may not have: not that of a processor which finds an image's tokens by a mask."""
        if self._in_front:
            return {}
        return self._beside if counts else self._placeholders

    def _render(self, request: Request, chat: list[dict[str, Any]], hidden: HiddenTokens | None) -> str:
        if hidden is None:
            return self._template.render(chat, request.tools, request.template_kwargs)
        variables = hidden.hide(request.template_kwargs)
        return render_safely(
            chat, request.tools, hidden, lambda each, tools: self._template.render(each, tools, variables)
        )


def _free_marks(loaded: LoadedProcessor) -> dict[str, Placeholder]:
    """List the markup of a prompt with media, but for marks around placeholders: they see images wherever they are."""
    ids = sorted(loaded.together - loaded.media_token_ids)
    marks = set(loaded.tokenizer.convert_ids_to_tokens(ids)) - {each.token for each in loaded.placeholders.values()}
    return {
        kind: msgspec.structs.replace(each, reserved=tuple(token for token in each.reserved if token not in marks))
        for kind, each in loaded.placeholders.items()
    }
