"""TextStream: output tokens to text, as they come, with stop strings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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


_specials: WeakKeyDictionary[Tokenizer, frozenset[int]] = WeakKeyDictionary()


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
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._stop = tuple(text for text in stop if text)
        self._longest = max(map(len, self._stop), default=1) - 1
        visible = (token for token in reversed(prompt_ids) if self._piece(token) is not None)
        self._window = list(islice(visible, _KEEP))[::-1]
        self._shown = len(self._decode().rstrip(_INCOMPLETE))
        self._pending = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text to release now; "" where nothing is certain yet, or after a stop string."""
        piece = self._piece(token_id)
        if self.stopped or piece is None:
            return ""
        self._window.append(token_id)
        return "" if _BYTE.fullmatch(piece) else self._release(self._settled())

    def finish(self) -> str:
        """What is still held back. May itself meet a stop string."""
        if self.stopped:
            return ""
        text = self._decode()[self._shown :]
        self._window, self._shown = [], 0
        released = self._release(text)
        rest, self._pending = self._pending, ""
        return released + rest

    def _piece(self, token_id: int) -> str | None:
        """The token's own string; None where it adds nothing (special, or an id that only pads the vocabulary)."""
        if token_id in self._special:
            return None
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return piece

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=True)
        return text

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


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Kept per tokenizer: some have thousands of added tokens, and the property builds a new dict each time."""
    if tokenizer not in _specials:
        added = tokenizer.added_tokens_decoder
        _specials[tokenizer] = frozenset(token for token, entry in added.items() if entry.special)
    return _specials[tokenizer]
