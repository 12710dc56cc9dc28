"""TextStream: output tokens to text, as they come, with stop strings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol
from weakref import WeakKeyDictionary

_KEEP = 8  # tokens of context: more than the 4 bytes of the longest character, each token being at least one byte
_INCOMPLETE = "\ufffd"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers have it."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...

    def convert_ids_to_tokens(self, ids: int) -> Any: ...


@dataclass(slots=True)
class Known:
    """What is asked of a tokenizer for every token, kept in its cheapest form: a step has a token of each request.

    ``decode``: ids to text, special tokens left out, where that needs no more than the tokenizer's backend. ``kinds``:
    of each id that has come, whether its text may hang on what follows (a byte), or None where it adds nothing
    (special, or an id that only pads the vocabulary). Holds no tokenizer, for it is kept as long as that lives.
    """

    decode: Callable[[list[int]], str] | None
    special: frozenset[int]
    kinds: dict[int, bool | None] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Known:
        special = frozenset(token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special)
        return cls(_backend_decode(tokenizer), special)

    def kind(self, token_id: int, tokenizer: Tokenizer) -> bool | None:
        if token_id not in self.kinds:
            piece: str | None = None if token_id in self.special else tokenizer.convert_ids_to_tokens(token_id)
            self.kinds[token_id] = None if piece is None else _BYTE.fullmatch(piece) is not None
        return self.kinds[token_id]


_known: WeakKeyDictionary[Tokenizer, Known] = WeakKeyDictionary()


class TextStream:
    """Text of one request's output, released as soon as no later token can change it.

    All text together equals ``tokenizer.decode(ids, skip_special_tokens=True)`` of all ids pushed, up to the stop
    string that is complete first (of those complete at once: the longest). Held back are characters whose bytes are
    not all there, byte-fallback tokens until their run ends (an invalid byte changes the whole run), and what may be
    the beginning of a stop string. With ``prompt_ids`` the text is what the ids add to the prompt's text instead, so
    that a space between the two is kept; the last few of its ids are enough.

    Each push decodes at most 16 tokens and those of a run of byte-fallback tokens that ends.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> None:
        if tokenizer not in _known:
            _known[tokenizer] = Known.of(tokenizer)
        self._tokenizer, self._known = tokenizer, _known[tokenizer]
        self._text_of = self._known.decode or partial(tokenizer.decode, skip_special_tokens=True)
        self._stop = tuple(text for text in stop if text)
        self._longest = max(map(len, self._stop), default=1) - 1
        visible = (token for token in reversed(prompt_ids) if self._known.kind(token, tokenizer) is not None)
        self._window = list(islice(visible, _KEEP))[::-1]
        self._shown = len(self._decode().rstrip(_INCOMPLETE))
        self._pending = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text to release now; "" where nothing is certain yet, or after a stop string."""
        byte = self._known.kind(token_id, self._tokenizer)
        if self.stopped or byte is None:
            return ""
        self._window.append(token_id)
        if byte:
            return ""
        return self._release(self._settled()) if self._stop else self._settled()

    def finish(self) -> str:
        """What is still held back. May itself meet a stop string."""
        if self.stopped:
            return ""
        text = self._decode()[self._shown :]
        self._window, self._shown = [], 0
        released = self._release(text)
        rest, self._pending = self._pending, ""
        return released + rest

    def _decode(self) -> str:
        return self._text_of(self._window)

    def _settled(self) -> str:
        """Text of the window that is new and final; drops old tokens from the window now and then."""
        text = self._decode()
        final = _final_length(text)
        new = text[self._shown : final]
        self._shown = final
        if len(self._window) >= 2 * _KEEP:
            # The first character may now decode to something else: it does so from here on, and is never shown again.
            self._window = self._window[-_KEEP:]
            self._shown = _final_length(self._decode())
        return new

    def _release(self, text: str) -> str:
        self._pending += text
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if ends:
            self.stopped = True
            released, self._pending = self._pending[: min(ends)[1]], ""
            return released
        certain = len(self._pending) - self._beginning()
        released, self._pending = self._pending[:certain], self._pending[certain:]
        return released

    def _beginning(self) -> int:
        """Length of the longest end of the pending text with which a stop string begins."""
        for length in range(min(self._longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-length:]) for stop in self._stop):
                return length
        return 0


def _final_length(text: str) -> int:
    """Only the last character can be incomplete: an invalid byte before it stays what it is."""
    return len(text) - text.endswith(_INCOMPLETE)


def _backend_decode(tokenizer: Tokenizer) -> Callable[[list[int]], str] | None:
    """What ``decode`` calls, where transformers only passes it on to ``tokenizers``: a third of the time."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    written = {name: getattr(getattr(type(tokenizer), name, None), "__module__", "") for name in ("decode", "_decode")}
    passed_on = written == {
        "decode": "transformers.tokenization_utils_base",
        "_decode": "transformers.tokenization_utils_tokenizers",
    }
    if backend is not None and passed_on and not getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return partial(backend.decode, skip_special_tokens=True)
    return None
