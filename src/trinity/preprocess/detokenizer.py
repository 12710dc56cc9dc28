"""TextStream: decodes output tokens to text one by one and cuts it at stop strings."""

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
    """Members that ``TextStream`` uses of a tokenizer; tokenizers of transformers have them."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...

    def convert_ids_to_tokens(self, ids: int) -> Any: ...


@dataclass(slots=True)
class TokenKinds:
    """Cached answers of one tokenizer, since each step asks them for a token of every request.

    - ``decode``: turns ids into text without special tokens by the tokenizer's backend alone; None where that is not
      enough.
    - ``special``: ids of special tokens.
    - ``byte_tokens``: for each id seen, True for a byte-fallback token, whose text may depend on the tokens after it;
      None for an id that adds no text (special, or only padding the vocabulary).

    It holds no reference to the tokenizer, because it is cached for as long as the tokenizer lives.
    """

    decode: Callable[[list[int]], str] | None
    special: frozenset[int]
    byte_tokens: dict[int, bool | None] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenKinds:
        special = frozenset(token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special)
        return cls(_backend_decode(tokenizer), special)

    def is_byte_token(self, token_id: int, tokenizer: Tokenizer) -> bool | None:
        """Look up an id in ``byte_tokens``, and fill in the entry at its first use."""
        if token_id not in self.byte_tokens:
            piece: str | None = None if token_id in self.special else tokenizer.convert_ids_to_tokens(token_id)
            self.byte_tokens[token_id] = None if piece is None else _BYTE.fullmatch(piece) is not None
        return self.byte_tokens[token_id]


_token_kinds: WeakKeyDictionary[Tokenizer, TokenKinds] = WeakKeyDictionary()


class TextStream:
    """Decodes one request's output and releases text as soon as no later token can change it.

    - ``tokenizer``: tokenizer of the model.
    - ``stop`` (none): strings at which the text ends. The one that is complete first counts; of several complete at
      the same token, the longest.
    - ``prompt_ids`` (none): ids of the prompt; the last few are enough. The text is then what the output adds to the
      prompt's text, so that a space between the two is kept.

    All released text together equals ``tokenizer.decode(ids, skip_special_tokens=True)`` of all ids pushed, up to the
    stop string. Held back are incomplete characters, byte-fallback tokens until their run ends (an invalid byte
    changes the whole run), and a possible beginning of a stop string.

    Each push decodes at most 16 tokens, plus those of a run of byte-fallback tokens that ends with it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> None:
        if tokenizer not in _token_kinds:
            _token_kinds[tokenizer] = TokenKinds.of(tokenizer)
        self._tokenizer, self._known = tokenizer, _token_kinds[tokenizer]
        self._text_of = self._known.decode or partial(tokenizer.decode, skip_special_tokens=True)
        self._stop = tuple(text for text in stop if text)
        self._longest = max(map(len, self._stop), default=1) - 1
        visible = (token for token in reversed(prompt_ids) if self._known.is_byte_token(token, tokenizer) is not None)
        self._window = list(islice(visible, _KEEP))[::-1]
        self._shown = len(self._decode().rstrip(_INCOMPLETE))
        self._pending = ""
        self._undecided = False  # the window's text has an end that is not shown
        self.stopped = False

    @property
    def has_stops(self) -> bool:
        """True where a token may end the text."""
        return bool(self._stop)

    @property
    def holds(self) -> bool:
        """True while text of the tokens that came is held back: the next one or the end releases it."""
        return self._undecided or bool(self._pending)

    def push(self, token_id: int) -> str:
        """Add a token. Returns the text to release now: "" if nothing is certain yet, or after a stop string."""
        byte = self._known.is_byte_token(token_id, self._tokenizer)
        if self.stopped or byte is None:
            return ""
        self._window.append(token_id)
        if byte:
            self._undecided = True
            return ""
        return self._release(self._take_final()) if self._stop else self._take_final()

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns what the text of each adds up to; it is decoded once, unless there are stop strings."""
        if self._stop:
            return "".join(map(self.push, token_ids))
        visible = [each for each in token_ids if self._known.is_byte_token(each, self._tokenizer) is not None]
        self._window += visible
        ended = [self._known.byte_tokens[each] for each in visible]
        if False not in ended:  # all are bytes of a run that may go on
            self._undecided = self._undecided or bool(ended)
            return ""
        run = ended[::-1].index(False)  # bytes at the end, whose run may go on
        held = self._window[len(self._window) - run :]
        del self._window[len(self._window) - run :]
        text = self._take_final()
        self._window += held
        self._undecided = self._undecided or bool(held)
        return text

    def finish(self) -> str:
        """End the output. Returns the text that was held back, which may itself end at a stop string."""
        if self.stopped:
            return ""
        text = self._decode()[self._shown :]
        self._window, self._shown = [], 0
        released = self._release(text)
        rest, self._pending = self._pending, ""
        return released + rest

    def _decode(self) -> str:
        return self._text_of(self._window)

    def _take_final(self) -> str:
        """Return the window's text that is new and final, and drop old tokens from the window now and then."""
        text = self._decode()
        final = _final_length(text)
        new = text[self._shown : final]
        self._shown, self._undecided = final, final < len(text)
        if len(self._window) >= 2 * _KEEP:
            # The first character may now decode differently, but it has been shown and is never shown again.
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
        certain = len(self._pending) - self._stop_prefix()
        released, self._pending = self._pending[:certain], self._pending[certain:]
        return released

    def _stop_prefix(self) -> int:
        """Measure the longest suffix of the pending text that begins a stop string, in characters."""
        for length in range(min(self._longest, len(self._pending)), 0, -1):
            if any(stop.startswith(self._pending[-length:]) for stop in self._stop):
                return length
        return 0


def _final_length(text: str) -> int:
    """Count the characters that cannot change: only the last can be incomplete, an invalid byte before it stays."""
    return len(text) - text.endswith(_INCOMPLETE)


def _backend_decode(tokenizer: Tokenizer) -> Callable[[list[int]], str] | None:
    """Return the Rust backend's ``decode`` if the tokenizer's only forwards to it: it takes a third of the time."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    written = {name: getattr(getattr(type(tokenizer), name, None), "__module__", "") for name in ("decode", "_decode")}
    passed_on = written == {
        "decode": "transformers.tokenization_utils_base",
        "_decode": "transformers.tokenization_utils_tokenizers",
    }
    if backend is not None and passed_on and not getattr(tokenizer, "clean_up_tokenization_spaces", True):
        return partial(backend.decode, skip_special_tokens=True)
    return None
