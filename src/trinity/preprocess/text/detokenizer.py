"""TextStream: decodes output tokens to text one by one and cuts it at stop strings."""

from __future__ import annotations

import re
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from tokenizers import decoders


class TextStream:
    """Decodes one request's output and releases text as soon as no later token can change it.

    - ``tokenizer``: tokenizer of the model.
    - ``stop`` (none): strings at which the text ends. The one that is complete first counts; of several complete at
      the same token, the longest.
    - ``prompt_ids`` (none): ids of the prompt; the last few are enough. The text is then what the output adds to the
      prompt's text, so that a space between the two is kept; where one changes the other, as bytes that are one
      invalid run, it is the output's own.

    All released text together equals ``tokenizer.decode(ids, skip_special_tokens=True)`` of all ids pushed, up to the
    stop string. Held back are what a later token may change (``TokenText``) and a possible beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> None:
        self._text = make_text(tokenizer, prompt_ids)
        self._stop = tuple(text for text in stop if text)
        self._longest = max(map(len, self._stop), default=1) - 1
        self._pending = ""
        self.stopped = False
        # Add a token. Returns the text to release now: "" if nothing is certain yet, or after a stop string.
        self.push: Callable[[int], str] = self._push if self._stop else self._text.push

    @property
    def has_stops(self) -> bool:
        """True where a token may end the text."""
        return bool(self._stop)

    @property
    def holds(self) -> bool:
        """True while text of the tokens that came is held back: the next one or the end releases it."""
        return self._text.holds or bool(self._pending)

    def _push(self, token_id: int) -> str:
        if self.stopped:
            return ""
        text = self._text.push(token_id)
        return self._release(text) if text else text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns what the text of each adds up to; it is decoded once, unless there are stop strings."""
        return "".join(map(self.push, token_ids)) if self._stop else self._text.push_all(token_ids)

    def finish(self) -> str:
        """End the output. Returns the text that was held back, which may itself end at a stop string."""
        if self.stopped:
            return ""
        released = self._release(self._text.finish())
        rest, self._pending = self._pending, ""
        return released + rest

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


KEEP = 8  # tokens of context: more than the 4 bytes of the longest character, each token being at least one byte
INCOMPLETE = "\ufffd"
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# What no later clean-up by transformers changes of text that it has cleaned: it drops the space of " .", " ' ", " n't",
# " 've" and others, and what is left may begin another of them.
_SETTLED = re.compile(r".*(?:[^ 'nrv]|[^ ]{2}[nrv])", re.DOTALL)
_TWICE = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))  # bytes that a vocabulary writes as they are
_HIDDEN = sorted(set(range(0x100)) - set(_PRINTED))  # and those that it writes as the characters from U+0100 on
BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(0x100 + at): byte for at, byte in enumerate(_HIDDEN)}


class Tokenizer(Protocol):
    """Members that are used of a tokenizer; tokenizers of transformers have them.

    One whose tokens are texts of their own may have ``bytes_of(id)`` as well, a static method.
    """

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]: ...

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...

    def convert_ids_to_tokens(self, ids: int) -> Any: ...


class PieceTable(dict[int, "str | bytes"]):
    """Pieces by token: whole characters (a string, "" for a special token), or bytes that are not."""

    def __init__(self, bytes_of: Callable[[int], bytes], special: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(special, ""))
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> str | bytes:
        piece = self._bytes_of(token_id)
        try:
            self[token_id] = piece.decode()
        except UnicodeDecodeError:
            self[token_id] = piece
        return self[token_id]


@dataclass(slots=True)
class TokenKinds:
    """Cached answers of one tokenizer, since each step asks them for a token of every request.

    - ``decode``: turns ids into text without special tokens by the tokenizer's backend alone; None where that is not
      enough.
    - ``special``: ids of special tokens.
    - ``pieces``: what each token is; None where that depends on others.
    - ``byte_tokens``: for each id seen, True for a byte-fallback token, whose text may depend on the tokens after it;
      None for an id that adds no text (special, or only padding the vocabulary).
    - ``tidied``: whether spaces before punctuation may be dropped from decoded text.

    It holds no reference to the tokenizer, because it is cached for as long as the tokenizer lives.
    """

    decode: Callable[[list[int]], str] | None
    special: frozenset[int]
    pieces: PieceTable | None
    tidied: bool
    byte_tokens: dict[int, bool | None] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenKinds:
        special = frozenset(token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special)
        bytes_of = find_bytes(tokenizer)
        pieces = bytes_of and PieceTable(bytes_of, special)
        return cls(backend_decode(tokenizer), special, pieces, tidies(tokenizer))

    def is_byte_token(self, token_id: int, tokenizer: Tokenizer) -> bool | None:
        """Look up an id in ``byte_tokens``, and fill in the entry at its first use."""
        if token_id not in self.byte_tokens:
            piece: str | None = None if token_id in self.special else tokenizer.convert_ids_to_tokens(token_id)
            self.byte_tokens[token_id] = None if piece is None else _BYTE.fullmatch(piece) is not None
        return self.byte_tokens[token_id]


_token_kinds: WeakKeyDictionary[Tokenizer, TokenKinds] = WeakKeyDictionary()


class TokenText(Protocol):
    """Text of one request's tokens. All that comes of it equals one decode of all tokens, special ones skipped."""

    @property
    def holds(self) -> bool:
        """True while text of the tokens that came is held back, as a later one may change it."""

    def push(self, token_id: int) -> str:
        """Add a token. Returns the text that is certain now."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Add tokens. Returns what the text of each adds up to."""

    def finish(self) -> str:
        """Return the text that was held back. Nothing comes after it."""


def make_text(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> TokenText:
    """Make the text of an output behind this prompt."""
    known = _token_kinds.get(tokenizer)
    if known is None:
        known = _token_kinds[tokenizer] = TokenKinds.of(tokenizer)
    return WindowText(tokenizer, known, prompt_ids) if known.pieces is None else TableText(known.pieces, prompt_ids)


class TableText:
    """Text of tokens that are bytes of their own: held back is the beginning of a character alone."""

    __slots__ = ("_pieces", "_rest")

    def __init__(self, pieces: PieceTable, prompt_ids: Sequence[int]) -> None:
        self._pieces, self._rest = pieces, b""
        visible = (piece for token in reversed(prompt_ids) if (piece := pieces[token]))
        for piece in list(islice(visible, KEEP))[::-1]:
            self._add(piece)

    @property
    def holds(self) -> bool:
        return bool(self._rest)

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        return piece if isinstance(piece, str) and not self._rest else self._add(piece)

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def finish(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")

    def _add(self, piece: str | bytes) -> str:
        data = self._rest + (piece.encode() if isinstance(piece, str) else piece)
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text


class WindowText:
    """Text of tokens that depends on their neighbours: an end that may change is held back.

    That is an incomplete character, byte-fallback tokens until their run ends, as an invalid byte changes the whole
    run, and what a clean-up may still change. The window begins with the prompt's last tokens. An output that changes
    their text, or whose own text they change (bytes of both are one run, and invalid), is decoded by itself.

    Each push decodes at most 16 tokens, plus those of a run of byte-fallback tokens that ends with it, and with a
    clean-up those since the last one that it cannot change.
    """

    __slots__ = ("_before", "_known", "_prompt", "_shown", "_text_of", "_tokenizer", "_window", "holds")

    def __init__(self, tokenizer: Tokenizer, known: TokenKinds, prompt_ids: Sequence[int]) -> None:
        self._tokenizer, self._known, self.holds = tokenizer, known, False
        self._text_of = known.decode or partial(tokenizer.decode, skip_special_tokens=True)
        self._begin(self._last_visible(prompt_ids, KEEP))
        if known.tidied and self._final_length(self._before) < self._shown:
            self._begin(self._last_visible(prompt_ids, len(prompt_ids)))

    def push(self, token_id: int) -> str:
        byte = self._known.is_byte_token(token_id, self._tokenizer)
        if byte is None:
            return ""
        self._window.append(token_id)
        if byte:
            self.holds = True
            return ""
        return self._take_final()

    def push_all(self, token_ids: Sequence[int]) -> str:
        visible = [each for each in token_ids if self._known.is_byte_token(each, self._tokenizer) is not None]
        self._window += visible
        ended = [self._known.byte_tokens[each] for each in visible]
        if False not in ended:  # all are bytes of a run that may go on
            self.holds = self.holds or bool(ended)
            return ""
        run = ended[::-1].index(False)  # bytes at the end, whose run may go on
        held = self._window[len(self._window) - run :]
        del self._window[len(self._window) - run :]
        text = self._take_final()
        self._window += held
        self.holds = self.holds or bool(held)
        return text

    def finish(self) -> str:
        text = self._added(self._decode())
        self._begin([])
        self.holds = False
        return text

    def _begin(self, prompt: list[int]) -> None:
        """Begin an output behind these tokens, which are counted until it is known whether it is decoded by itself."""
        self._window, self._prompt = prompt, len(prompt)
        self._before = self._decode() if prompt else ""
        self._shown = len(self._before)

    def _last_visible(self, prompt_ids: Sequence[int], least: int) -> list[int]:
        """Return the prompt's last tokens with text, and all of a run of bytes that ends it: it is decoded as one."""
        found, in_run = list[int](), True
        for token in reversed(prompt_ids):
            byte = self._known.is_byte_token(token, self._tokenizer)
            in_run = in_run and byte is not False
            if len(found) >= least and not in_run:
                break
            if byte is not None:
                found.append(token)
        return found[::-1]

    def _decode(self) -> str:
        return self._text_of(self._window)

    def _final_length(self, text: str) -> int:
        """Count the characters that cannot change: only the last can be incomplete, an invalid byte before it stays."""
        length = len(text) - text.endswith(INCOMPLETE)
        if not self._known.tidied:
            return length
        settled = _SETTLED.match(text, 0, length)
        return settled.end() if settled else 0

    def _take_final(self) -> str:
        """Return the window's text that is new and final, and drop old tokens from the window now and then."""
        text = self._decode()
        final = self._final_length(text)
        if self._prompt:
            if final < self._shown and self._before.startswith(text[:final]):
                self.holds = bool(self._added(text))  # whether the prompt's text is changed is not known yet
                return ""
            return self._leave_prompt(self._is_changed(text))
        new = text[self._shown : final]
        self._shown, self.holds = final, final < len(text)
        if len(self._window) >= 2 * KEEP:
            self._drop_old()
        return new

    def _added(self, text: str) -> str:
        """Return what is not shown yet of the window's text, if nothing comes after it."""
        return self._own() if self._is_changed(text) else text[self._shown :]

    def _own(self) -> str:
        return self._text_of(self._window[self._prompt :])

    def _is_changed(self, text: str) -> bool:
        """Tell whether the output changes the prompt's text in the window, or bytes of the prompt the output's."""
        if not text.startswith(self._before):
            return True
        meeting = self._window[self._prompt - 1 : self._prompt + 1] if self._prompt else []
        if not meeting or not all(map(self._known.byte_tokens.get, meeting)):
            return False
        own = self._own()
        return text[self._shown :] not in (own, " " + own)

    def _leave_prompt(self, changed: bool) -> str:
        """Go on with the output's tokens alone, if that is what was found, or with all."""
        if changed:
            del self._window[: self._prompt]
            self._shown = 0
        self._prompt, self._before = 0, ""
        return self._take_final()

    def _drop_old(self) -> None:
        """Keep the last few tokens, unless a clean-up may change text that began before them."""
        window = self._window[-KEEP:]
        text = self._text_of(window)
        final = self._final_length(text)
        if not (self._known.tidied and (self.holds or final < len(text))):
            # The first character may now decode differently, but it has been shown and is never shown again.
            self._window, self._shown = window, final


def backend_decode(tokenizer: Tokenizer) -> Callable[[list[int]], str] | None:
    """Return the Rust backend's ``decode`` if the tokenizer's only forwards to it: it takes a third of the time."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    written = {name: getattr(getattr(type(tokenizer), name, None), "__module__", "") for name in ("decode", "_decode")}
    passed_on = written == {
        "decode": "transformers.tokenization_utils_base",
        "_decode": "transformers.tokenization_utils_tokenizers",
    }
    if backend is not None and passed_on and not tidies(tokenizer):
        return partial(backend.decode, skip_special_tokens=True)
    return None


def tidies(tokenizer: Tokenizer) -> bool:
    """Tell whether its decode drops spaces before punctuation: where set to, and for BPE only where told so twice."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    asked = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
    if backend is None or type(backend.model).__name__ != "BPE":
        return asked
    return asked and bool(getattr(tokenizer, _TWICE, True))


def find_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes] | None:
    """Return what gives the bytes of a token, where these depend on nothing else; None elsewhere."""
    own: Callable[[int], bytes] | None = getattr(tokenizer, "bytes_of", None)
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if own is None and backend_decode(tokenizer) and isinstance(backend.decoder, decoders.ByteLevel):
        return partial(_read_piece, backend.id_to_token)
    return own


def _read_piece(id_to_token: Callable[[int], str | None], token_id: int) -> bytes:
    """Read a token of a byte-level vocabulary: a character for each byte, or the text of an added one as it is."""
    piece = id_to_token(token_id) or ""
    found = [BYTE_OF.get(char) for char in piece]
    return piece.encode() if None in found else bytes(byte for byte in found if byte is not None)
