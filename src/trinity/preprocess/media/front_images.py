"""Images that a processor puts in front of a prompt by itself, where no text stands for them (BLIP-2).

The image's tokens stand beside special tokens that the processor writes, its text may be tokenized apart, and what the
encoder is given may depend on the text (InstructBLIP). So one call of the processor makes it all, of the image and the
text behind the marker ``<image>`` together.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from trinity.errors import UnsupportedModel
from trinity.preprocess.media.image_calls import TEXT_KEYS
from trinity.preprocess.media.image_reader import ImageReader, explain_size, make_gradient
from trinity.preprocess.media.images import image_digest, size_of
from trinity.preprocess.media.media_kinds import MediaItem
from trinity.preprocess.media_limits import MediaBudget, MediaProblem

if TYPE_CHECKING:
    from trinity.preprocess.media.images import Picture

_SIZE = (224, 168)  # width, height of the image with which the processor is tried
_TEXTS = ("a", "a b c d e f", "f e d c b a")  # one longer, one as long and not the same
_READ = "_input_ids"  # end of the name of a text that the encoder reads
_WHERE = "_position_mask"  # end of the name of an output that has 1 where features are


class FrontReader(ImageReader):
    """Reads the one image of a prompt, and the whole prompt with it; see ``ImageReader``."""

    def read_beside(self, source: Any, budget: MediaBudget, text: str) -> MediaItem:
        """Read an image, and the ids of its whole prompt, which has ``text`` behind it.

        Raises as ``KindReader.read_source`` does.
        """
        return self.read(self.open_source(source, 1, budget), text=text)

    def read(self, image: Picture, among: int = 1, text: str = _TEXTS[0]) -> MediaItem:
        """Preprocess an image and the text behind it. Raises ``MediaProblem`` if the model's processor refuses it."""
        self._loaded.last_call.pixels = self._limits.max_processed_pixels
        try:
            output = self._run(image, text)
        except Exception as exc:  # processors raise anything on odd sizes
            raise MediaProblem(explain_size(exc, *size_of(image))) from exc
        finally:
            self._loaded.last_call.pixels = None
        ids = tuple(output["input_ids"][0].tolist())
        rows = self._find_rows(ids, output)
        if not rows:
            raise MediaProblem("the model's processor makes no visual token of it: give a larger image")
        inputs = {name: value for name, value in output.items() if name not in self._texts}
        self._check_told(inputs)
        found = MediaItem("image", "", len(rows), inputs, self._name(image, inputs), {}, *size_of(image))
        return msgspec.structs.replace(found, prompt=ids, rows=rows)

    def _run(self, image: Picture, text: str) -> dict[str, Any]:
        return dict(self._loaded.processor(images=[image], text=[text], return_tensors="pt"))

    def _check_told(self, inputs: dict[str, Any]) -> None:
        """Raise ``MediaProblem`` if a text has more tokens than a part of the encoder that reads it has places for.

        By transformers' names: ``qformer_input_ids`` are read by the part that ``qformer_config`` describes.
        """
        for name in (each for each in self._told if each.endswith(_READ)):
            part = getattr(self._loaded.config, f"{name.removesuffix(_READ)}_config", None)
            tokens, most = inputs[name].shape[-1], getattr(part, "max_position_embeddings", None)
            if most is not None and tokens > most:
                raise MediaProblem(
                    f"its encoder reads the text, of {tokens} tokens, and takes {most}: shorten the text"
                )

    def _find_rows(self, ids: tuple[int, ...], output: dict[str, Any]) -> tuple[int, ...]:
        """Find where features are: where a mask of the processor says so, else where the placeholder is."""
        mask = next((value for name, value in output.items() if name.endswith(_WHERE)), None)
        if mask is not None:
            return tuple((mask[0] == 1).nonzero().flatten().tolist())
        return tuple(at for at, number in enumerate(ids) if number in self._loaded.media_token_ids)

    def _name(self, image: Picture, inputs: dict[str, Any]) -> str:
        """Name the features: by image and processor, and by what else of the text the encoder reads."""
        name = f"{image_digest(image)}-{self.fingerprint}"
        if not self._told:
            return name
        read = hashlib.blake2b(digest_size=16)
        for each in sorted(self._told):
            read.update(f"{each}{tuple(inputs[each].shape)}".encode() + inputs[each].numpy().tobytes())
        return f"{name}-{read.hexdigest()}"

    def _find_most_told(self) -> int:
        """Try the processor: which outputs are the text's alone, and which of the encoder's inputs depend on it."""
        image = make_gradient(*_SIZE)
        try:
            short, long, other = (self._run(image, text) for text in _TEXTS)
        except Exception as exc:
            kind = self._loaded.config.model_type
            raise UnsupportedModel(f"the processor of model type {kind!r} fails on an image ({exc!r:.200})") from exc
        both = (short, long)
        along = {name for name in short if all(each[name].shape == each["input_ids"].shape for each in both)}
        self._texts = TEXT_KEYS | along
        inputs = short.keys() - self._texts
        self._told = {
            name for name in inputs if not (_is_same(short[name], long[name]) and _is_same(long[name], other[name]))
        }
        return 1


def _is_same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool((one == other).all())
