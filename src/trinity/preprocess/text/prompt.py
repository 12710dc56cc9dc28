"""A request's prompt or chat: its media taken out, control tokens hidden, split and tokenized with media expanded.

The forms: OpenAI's ``chat/completions`` (``image_url``, ``input_audio``, ``video_url``), its ``responses``
(``input_text``, ``input_image``), and what transformers' ``apply_chat_template`` takes (``image`` with an ``image``,
``url``, ``path`` or ``base64`` of its own). A part with no medium in it takes the request's next one of its kind.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from trinity.errors.plain_values import MOST_PARTS, Unfit, read_chat, read_source
from trinity.preprocess.checkpoint.tokenizer_files import READS_WHOLE_TEXTS
from trinity.preprocess.media.image_calls import Seams
from trinity.preprocess.media.media_kinds import LoadedProcessor, Placeholder, kind_names, part_keys
from trinity.preprocess.text.chat_template import ChatTemplate
from trinity.preprocess.text.control_tokens import ControlTokens, HiddenTokens, check_roles, render_safely
from trinity.preprocess.text.prompt_problem import PromptProblem
from trinity.request import Media, Request

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # key of the text, by type
_IGNORED = {"type", "detail"}  # OpenAI's hint of a size, which models with their own sizes have no use for
_PART_KEYS = {"type", "text"}
_AS_TEXT = "special_tokens=False, or untrusted=True (over HTTP: put it in a chat, whose texts are read so)"
_NO_LIMIT = 1 << 30


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


class PromptTokenizer:
    """Tokenizes prompts with the model's own tokenizer, for any thread.

    - ``loaded``: the processor.
    - ``vocabulary`` (tokens): rows of the model's embedding, None if its config does not say.
    - ``reader`` (None): of images, which knows what the processor adds to a prompt: its seams, and special tokens.
    """

    def __init__(self, loaded: LoadedProcessor, vocabulary: int | None, reader: Any = None) -> None:
        self._loaded, self._vocabulary = loaded, vocabulary
        self._special: bool = getattr(reader, "adds_special", True)
        self._seams: Seams = getattr(reader, "seams", Seams())
        self._tokenizer: Any = loaded.tokenizer

    def tokenize(self, text: PromptText, expansions: Sequence[str]) -> tuple[int, ...]:
        """Tokenize a prompt with an expansion for each medium in it. Raises whatever the tokenizer raises."""
        # As one text: split at the images, the borders would tokenize differently than in the model's processor.
        whole = self._seams.join(text.pieces, expansions)
        special = self._needs_special(whole, text.rendered)
        whole = self._seams.frame(whole, special)
        ids = tuple(
            self._loaded.run_tokenizer.tokenize(whole, lambda short: self._tokenise(short, special, text.hidden))
        )
        self.check_ids(ids)
        return ids

    def _needs_special(self, text: str, rendered: bool) -> bool:
        """Decide as transformers does: a chat template may have written the first special token itself."""
        if not rendered or not self._special:
            return self._special
        first = self._tokenizer.bos_token
        return self._loaded.processor is not None and not (first is not None and text.startswith(first))

    def _tokenise(self, text: str, special: bool, hidden: HiddenTokens | None) -> Sequence[int]:
        pieces = [text] if hidden is None else hidden.split(text)
        return self._encode(text, special) if len(pieces) == 1 else self._encode_pieces(pieces, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        found: list[int] = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return found

    def _encode_pieces(self, pieces: Sequence[str], special: bool) -> list[int]:
        """Encode text and hidden tokens, with the tokens at either end of a text if ``special``."""
        whole = getattr(self._tokenizer, READS_WHOLE_TEXTS, False)
        ids = self._encode_joined(pieces) if whole else self._encode_in_turn(pieces)
        if special:
            before, after = self._find_ends()
            ids = [*before, *ids, *after]
        return ids

    def _encode_in_turn(self, pieces: Sequence[str]) -> list[int]:
        """Encode text and hidden tokens in turn, as transformers does for sanitized chats."""
        ids = self._encode(pieces[0], False)
        known: dict[tuple[str, bool], list[int]] = {}  # a text of one control token again and again is cheap to send
        for at, piece in enumerate(pieces[1:], 1):
            key = (piece, at % 2 == 1)
            if key not in known:
                known[key] = self._encode_inside(*key)
            ids += known[key]
        return ids

    def _encode_joined(self, pieces: Sequence[str]) -> list[int]:
        """Encode hidden tokens with the text around them, from one special token to the next, as mistral-common."""
        ids, text = list[int](), ""
        for at, piece in enumerate(pieces):
            for part in [piece] if at % 2 else self._special_pattern.split(piece):
                number = None if at % 2 else self._special_ids.get(part)
                if number is None:
                    text += part
                    continue
                ids += [*self._encode_text(text), number]
                text = ""
        return ids + self._encode_text(text)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {each.content: number for number, each in self._tokenizer.added_tokens_decoder.items()}

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        longest = sorted(self._special_ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest))})")

    def _encode_text(self, text: str) -> list[int]:
        """Encode a text in which no special token is read. Raises ``ValueError`` if it becomes one all the same."""
        ids = self._encode_plain(text)
        if made := set(ids).intersection(self._special_ids.values()):
            token = self._tokenizer.convert_ids_to_tokens(min(made))
            raise ValueError(f"this model's tokenizer makes the special token {token!r} of plain text; leave it out")
        return ids

    def _encode_inside(self, piece: str, plain: bool) -> list[int]:
        """Encode a piece behind others: after a newline, so that no space is added where a text would begin."""
        if not piece:
            return []
        encode = self._encode_plain if plain else lambda text: self._encode(text, False)
        line, ids = self._encode("\n", False), encode(f"\n{piece}")
        ids = ids[len(line) :] if ids[: len(line)] == line else encode(piece)
        if plain and self._makes_special(piece, ids):
            raise ValueError(f"this model's tokenizer makes the special token {piece!r} of plain text; leave it out")
        return ids

    def _makes_special(self, piece: str, ids: Sequence[int]) -> bool:
        """Tell if a special token's text became the token. That of unknown words may: any of them makes it."""
        token = self._tokenizer.convert_tokens_to_ids(piece)
        return token in ids and token != self._tokenizer.unk_token_id

    def _encode_plain(self, text: str) -> list[int]:
        """Encode without any added token. The tokenizer's own switch for that is shared by all threads."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            found: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            return found
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]

    def _find_ends(self) -> tuple[list[int], list[int]]:
        """Find the special tokens that the tokenizer puts before and behind a text."""
        bare, whole = self._encode("a", False), self._encode("a", True)
        for at in range(len(whole) - len(bare) + 1):
            if whole[at : at + len(bare)] == bare:
                return whole[:at], whole[at + len(bare) :]
        raise ValueError("this model's tokenizer changes a text as it adds special tokens; leave others out")

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ``ValueError`` for what is no token: an id beyond the embeddings would end a GPU's context."""
        kinds = set(map(type, ids)) - {int}
        if kinds:
            raise ValueError(f"the tokenizer gives {kinds.pop().__name__} where token ids belong")
        plain = set(ids) - self._loaded.media_token_ids
        if plain and not 0 <= min(plain) <= max(plain) < (self._vocabulary or _NO_LIMIT):
            raise ValueError(f"the tokenizer gives ids {min(plain)} to {max(plain)} of {self._vocabulary} tokens")
