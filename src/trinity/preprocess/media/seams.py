"""Seams: what a model's processor writes around a prompt, and where expanded images and text meet.

Expansions are made image by image, and a prompt is put together of them. Most processors replace each placeholder and
change nothing else. Some put a text before or behind the whole prompt (Emu3, Chameleon), have neighbouring images share
a separator, or keep a word away from one (Idefics 2). What a processor does is found by showing it short prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

_BEFORE, _BEHIND = "qzq", "zqz"  # no tokenizer has them, and no processor looks for them
_SPARED = " \n<"  # before these no gap is left
_GAPPED = ("a", "1", ".", "é")


class Seams(msgspec.Struct, frozen=True):
    """Texts that stand beside a prompt's own and its expansions.

    - ``before``, ``behind`` (""): around the whole prompt.
    - ``last`` (""): behind the last expansion alone (PaliGemma).
    - ``shared`` (""): end of an expansion and begin of the next, which is written once where they touch.
    - ``gap`` (""): between an expansion and text right behind it that begins with neither white space nor "<".
    """

    before: str = ""
    behind: str = ""
    last: str = ""
    shared: str = ""
    gap: str = ""

    def join(self, pieces: Sequence[str], expansions: Sequence[str]) -> str:
        """Put a prompt together: ``pieces`` of text, one more than there are expansions between them."""
        parts = [pieces[0]]
        end = pieces[0]
        for number, (expansion, piece) in enumerate(zip(expansions, pieces[1:], strict=True), 1):
            touches = self.shared and end.endswith(self.shared)
            whole = expansion + self.last * (number == len(expansions))
            parts += [whole.removeprefix(self.shared) if touches else whole, self._after(piece)]
            end = parts[-1] or expansion
        return "".join(parts)

    def frame(self, text: str, special: bool) -> str:
        """Write a prompt with what stands around it; ``special`` (bool): special tokens are added to it."""
        return f"{self.before if special else ''}{text}{self.behind}"

    def unframe(self, text: str) -> str:
        """Take off what stands around a prompt that ends with an image."""
        return text.removeprefix(self.before).removesuffix(self.behind).removesuffix(self.last)

    def _after(self, piece: str) -> str:
        return self.gap + piece if self.gap and piece and not (piece[0].isspace() or piece[0] == "<") else piece


def find_seams(expand: Callable[[str, int], str], marker: str) -> Seams:
    """Find the seams of a processor: ``expand(text, images)`` gives what it passes to its tokenizer.

    Raises ``ValueError`` if it changes texts in another way, or what the processor raises.
    """
    framed = expand(f"{_BEFORE}{marker}{_BEHIND}", 1)
    found = _find_frame(framed)
    bare = found.unframe(expand(marker, 1))
    two = found.unframe(expand(marker * 2, 2))
    shared = _find_shared(two, bare)
    if found.unframe(framed) == f"{_BEFORE}{bare}{_BEHIND}":
        return Seams(found.before, found.behind, "" if shared else _find_last(two, bare), shared)
    gaps = {first: _find_gap(found.unframe(expand(marker + first, 1)), bare, first) for first in (*_SPARED, *_GAPPED)}
    seen = {gaps[first] for first in _GAPPED}
    if len(seen) > 1 or None in seen or any(gaps[first] != "" for first in _SPARED):
        raise ValueError("what the processor writes between an image and the text behind it cannot be told")
    return Seams(found.before, found.behind, "", shared, gaps[_GAPPED[0]] or "")


def _find_frame(text: str) -> Seams:
    before, found, _ = text.partition(_BEFORE)
    _, also, behind = text.rpartition(_BEHIND)
    if not (found and also):
        raise ValueError("the processor does not keep the text around an image")
    return Seams(before, behind)


def _find_gap(text: str, bare: str, first: str) -> str | None:
    if not (text.startswith(bare) and text.endswith(first)):
        return None
    return text[len(bare) : -len(first)]


def _find_shared(two: str, bare: str) -> str:
    """Find the end of an expansion that is the next one's begin, too; "" if two are just twice one, or another two."""
    length = 2 * len(bare) - len(two)
    shared = bare[:length] if 0 < length < len(bare) else ""
    return shared if shared and bare.endswith(shared) and two == bare + bare.removeprefix(shared) else ""


def _find_last(two: str, bare: str) -> str:
    """Find the end of an expansion that only the last one has; "" if two are just twice one, or another two."""
    length = 2 * len(bare) - len(two)
    last = bare[-length:] if 0 < length < len(bare) else ""
    return last if last and two == bare.removesuffix(last) + bare else ""
