"""Texts and bytes of single tokens, for log-probabilities."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from trinity.server.protocol import LikelyToken, TokenLogprob

LEAST_LOGPROB = -9999.0  # OpenAI's word for "never": JSON has no infinity
_MOST_KEPT = 1 << 17  # tokens: about a vocabulary
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # sentencepiece's


class TokenTexts:
    """Texts of a tokenizer's tokens as they stand in an output, a leading space included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def text(self, token: int) -> str:
        return self._look_up(token)[0]

    def describe(self, token: int, logprob: float | None, top: Iterable[tuple[int, float]] | None) -> TokenLogprob:
        """Describe a token and the most likely ones in its place; those that could not be are left out."""
        likely = [LikelyToken(*self._fields(each, value)) for each, value in top or () if value > LEAST_LOGPROB]
        return TokenLogprob(*self._fields(token, LEAST_LOGPROB if logprob is None else logprob), likely)

    def _fields(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        text, data = self._look_up(token)
        return text, max(logprob, LEAST_LOGPROB), data

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        found = self._known.get(token)
        if found is None:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()  # another thread may be about to look up
            found = self._known[token] = self._read(token)
        return found

    def _read(self, token: int) -> tuple[str, list[int]]:
        try:
            piece = self._tokenizer.convert_ids_to_tokens(token)
            if isinstance(piece, str) and (byte := _BYTE.fullmatch(piece)):
                value = int(byte.group(1), 16)
                return bytes([value]).decode("utf-8", "replace"), [value]
            spaced = isinstance(piece, str) and _SPACE in piece
            text = piece.replace(_SPACE, " ") if spaced else str(self._tokenizer.decode([token]))
            data = _byte_level(piece) if "\ufffd" in text else text.encode()
        except Exception:  # a token beyond the vocabulary, which a stage invented
            return "", []
        return text, list(data)


def _byte_level(piece: str) -> bytes:
    """Return the bytes of a byte-level piece (GPT-2's alphabet), or of its text where it is none."""
    return bytes(_ALPHABET[sign] for sign in piece) if all(sign in _ALPHABET for sign in piece) else piece.encode()


def _make_alphabet() -> dict[str, int]:
    """Map the signs by which byte-level tokenizers write bytes: printable ones by themselves, others from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in plain]
    return {chr(value): value for value in plain} | {chr(256 + index): value for index, value in enumerate(others)}


_ALPHABET = _make_alphabet()
