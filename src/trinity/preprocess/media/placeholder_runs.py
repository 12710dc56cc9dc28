"""Tokenizes each run of placeholders as one: an image has hundreds, and a tokenizer takes a microsecond for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class RunTokenizer:
    """Tokenizes texts with each run of one placeholder shortened to one, then restores the others.

    - ``tokenizer``: the model's.
    - ``placeholders``: token ids. Those that the tokenizer merges with their neighbours are not shortened.
    """

    def __init__(self, tokenizer: Any, placeholders: Iterable[int]) -> None:
        tokens = {number: str(tokenizer.convert_ids_to_tokens(number)) for number in placeholders}
        self._tokens = {number: token for number, token in tokens.items() if _is_kept_apart(tokenizer, token, number)}
        self._run = re.compile(rf"({'|'.join(map(re.escape, self._tokens.values()))})\1*")

    def tokenize(self, text: str, tokenise: Callable[[str], Sequence[int]]) -> list[int]:
        """Return what ``tokenise(text)`` would, in less time."""
        if not self._tokens:
            return list(tokenise(text))
        lengths: list[int] = []

        def first(run: re.Match[str]) -> str:
            lengths.append(len(run[0]) // len(run[1]))
            return run[1]

        short = tokenise(self._run.sub(first, text))
        if sum(number in self._tokens for number in short) != len(lengths):  # part of another token, for instance
            return list(tokenise(text))
        left, found = iter(lengths), list[int]()
        for number in short:
            found += [number] * (next(left) if number in self._tokens else 1)
        return found


def _is_kept_apart(tokenizer: Any, token: str, number: int) -> bool:
    """Tell if three in a row are three tokens and leave the text around them as it was."""
    one, three = (tokenizer(f"a {token * count} b", verbose=False)["input_ids"] for count in (1, 3))
    at = one.index(number) if number in one else len(one)
    return bool(at < len(one) and three == [*one[:at], *[number] * 3, *one[at + 1 :]])
