"""ImageCalls: calls a model's own processor on images alone, in the form that it takes, and keeps what is theirs.

Processors differ in how they want images (nested by prompt, or as one list) and what must stand around a placeholder
(nothing, or the tokens that their chat template writes there). Which form a processor takes is found by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from trinity.preprocess.media.media_kinds import LoadedProcessor

if TYPE_CHECKING:
    from trinity.preprocess.media.images import Picture


TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
_FURTHER_TEXT = " a b c d e f"

Made = tuple[str, list[int], dict[str, Any]]
"""Expanded text, its ids, and the encoder's inputs by name."""


class ImageCalls:
    """Runs a model's processor on images, with nothing but their placeholders as text.

    - ``loaded``: the processor.
    - ``probe``: a plain image, on which forms are tried. Raises what the first form raises if none works.

    ``special`` tells if the processor has its tokenizer add special tokens to a prompt; ``seams`` is what it writes
    around a prompt and where images and text meet, plain ones if that cannot be told.
    """

    def __init__(self, loaded: LoadedProcessor, probe: Picture) -> None:
        self._loaded = loaded
        self._token, marker = loaded.placeholders["image"].token, loaded.placeholders["image"].marker
        self._nested, self._marker = self._find_form(probe, list(dict.fromkeys((self._token, marker))))
        self.special: bool = loaded.last_call.special
        self.seams = self._find_seams(probe)
        self._texts = TEXT_KEYS | self._find_texts(probe)

    def call(self, images: Sequence[Picture]) -> Made:
        """Run the processor on the images of one prompt, as a chat gives them. Raises what the processor raises."""
        output = self._run(images, self._marker * len(images))
        inputs = {name: value for name, value in output.items() if name not in self._texts}
        return self.seams.unframe(self._loaded.last_call.text), output["input_ids"][0].tolist(), inputs

    def strip(self, text: str) -> str:
        """Take what stands around a placeholder off the expansion of one image."""
        before, after = self._marker.split(self._token)
        return text.removeprefix(before).removesuffix(after)

    def _run(self, images: Sequence[Picture], text: str) -> dict[str, Any]:
        given = [list(images)] if self._nested else list(images)
        return dict(self._loaded.processor(images=given, text=text, return_tensors="pt"))

    def _find_form(self, probe: Picture, markers: Sequence[str]) -> tuple[bool, str]:
        refusals: list[Exception] = []
        for self._nested in (True, False):
            for self._marker in markers:
                try:
                    self._run([probe], self._marker)
                    return self._nested, self._marker
                except Exception as error:  # processors raise what they like
                    refusals.append(error)
        raise refusals[0]

    def _find_seams(self, probe: Picture) -> Seams:
        def expand(text: str, images: int) -> str:
            self._run([probe] * images, text)
            return str(self._loaded.last_call.text)

        try:
            return find_seams(expand, self._marker)
        except ValueError:
            return Seams()

    def _find_texts(self, probe: Picture) -> set[str]:
        """Find the outputs that have an entry for each token of the text: those of the prompt, not of an image."""
        outputs = [self._run([probe], self._marker + further) for further in ("", _FURTHER_TEXT)]
        shapes = [{name: getattr(value, "shape", None) for name, value in output.items()} for output in outputs]
        return {name for name in shapes[0] if all(each.get(name) == each["input_ids"] for each in shapes)}


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
