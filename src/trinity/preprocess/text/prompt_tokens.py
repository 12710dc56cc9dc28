"""PromptTokenizer: token ids of a whole prompt, its media expanded and hidden control tokens as plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from trinity.preprocess.checkpoint.tokenizer_files import READS_WHOLE_TEXTS
from trinity.preprocess.media.image_calls import Seams
from trinity.preprocess.media.media_kinds import LoadedProcessor
from trinity.preprocess.text.control_tokens import HiddenTokens
from trinity.preprocess.text.prompt import PromptText

_NO_LIMIT = 1 << 30


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
