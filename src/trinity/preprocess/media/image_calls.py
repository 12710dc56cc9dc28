"""ImageCalls: calls a model's own processor on images alone, in the form that it takes, and keeps what is theirs.

Processors differ in how they want images (nested by prompt, or as one list) and what must stand around a placeholder
(nothing, or the tokens that their chat template writes there). Which form a processor takes is found by trying.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trinity.preprocess.media.media_kinds import LoadedProcessor
from trinity.preprocess.media.seams import Seams, find_seams

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
