"""Runs of placeholders, of which a tokenizer sees one: an image is hundreds, and each takes it a microsecond."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Runs:
    """Tokenises texts with one placeholder in place of each run of the same one, then puts the others there again.

    ``placeholders`` are token ids. Those that the tokenizer does not keep apart from their neighbours are left in.
    """

    def __init__(self, tokenizer: Any, placeholders: Iterable[int]) -> None:
        tokens = {number: str(tokenizer.convert_ids_to_tokens(number)) for number in placeholders}
        self._tokens = {number: token for number, token in tokens.items() if _apart(tokenizer, token, number)}
        self._run = re.compile(rf"({'|'.join(map(re.escape, self._tokens.values()))})\1*")

    def ids(self, text: str, tokenise: Callable[[str], Sequence[int]]) -> list[int]:
        """What ``tokenise(text)`` returns."""
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


def _apart(tokenizer: Any, token: str, number: int) -> bool:
    """Whether three in a row are three tokens, and change nothing around them."""
    one, three = (tokenizer(f"a {token * count} b", verbose=False)["input_ids"] for count in (1, 3))
    at = one.index(number) if number in one else len(one)
    return bool(at < len(one) and three == [*one[:at], *[number] * 3, *one[at + 1 :]])
