"""ItemReader: preprocesses images one by one with the model's own processor, to cache and batch features."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import msgspec

from trinity.errors import ConfigError
from trinity.preprocess.loader import LoadedProcessor
from trinity.preprocess.media import MediaProblem, image_digest

if TYPE_CHECKING:
    from PIL import Image

_TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
_POSITION_KEYS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
_SIDES = (28, 56, 84, 112, 168, 224, 336, 448, 672, 896, 1344, 1792)  # of synthetic images, in pixels
_DEFAULT_SIDE = 336


class MediaItem(msgspec.Struct, frozen=True):
    """A preprocessed media item.

    - ``kind``: "image".
    - ``expansion``: text that replaces the item's placeholder.
    - ``tokens``: visual tokens in the expansion.
    - ``inputs``: tensors for the model's encoder, by name.
    - ``content``: digest of pixels and processor, the key of the image cache.
    - ``meta``: inputs of the position computation, by name.
    - ``width``, ``height`` (pixels, 0): size of the image that was read.
    """

    kind: str
    expansion: str
    tokens: int
    inputs: dict[str, Any]
    content: str
    meta: dict[str, Any]
    width: int = 0
    height: int = 0


class ItemReader:
    """Runs the model's own processor on one image, with only its placeholder as text."""

    def __init__(self, loaded: LoadedProcessor) -> None:
        self._loaded = loaded
        self._fingerprint = _fingerprint(loaded.processor) if loaded.processor is not None else ""

    def read(self, image: Image.Image) -> MediaItem:
        """Preprocess one RGB image. Raises ``MediaProblem`` if the model's processor refuses it."""
        loaded = self._loaded
        token = loaded.placeholders["image"].token
        try:
            output = dict(loaded.processor(images=[image], text=token, return_tensors="pt"))
        except Exception as exc:  # processors raise anything on odd sizes
            raise MediaProblem(f"the model's processor refuses it ({type(exc).__name__}: {exc})") from exc
        ids = output["input_ids"][0].tolist()
        tokens = sum(number in loaded.media_token_ids for number in ids)
        if tokens == 0:
            raise MediaProblem(
                "the model's processor makes no visual token of it: it is too small, give a larger image"
            )
        inputs = {name: value for name, value in output.items() if name not in _TEXT_KEYS}
        content = f"{image_digest(image)}-{self._fingerprint}"
        return MediaItem("image", loaded.last_call.text, tokens, inputs, content, _position_inputs(inputs), *image.size)

    def number_expansion(self, expansion: str, index: int) -> str:
        """Put the image's number into its expansion, for processors that number a prompt's images (MiniCPM-V)."""
        tokenizer = self._loaded.tokenizer
        start = getattr(tokenizer, "image_id_start_token", None)
        end = getattr(tokenizer, "image_id_end_token", None)
        alone = f"{start}0{end}"
        if start and end and expansion.startswith(alone):
            return f"{start}{index}{end}" + expansion.removeprefix(alone)
        return expansion

    def make_synthetic(self, tokens: int | None) -> MediaItem:
        """Preprocess a synthetic image of about ``tokens`` visual tokens; None: of 336 x 336 pixels.

        Raises ``ConfigError`` for a text-only model.
        """
        if self._loaded.processor is None:
            raise ConfigError("a text-only model has no images to profile")
        if tokens is None:
            return self.read(_gradient(_DEFAULT_SIDE))
        best = self.read(_gradient(_SIDES[0]))
        for side in _SIDES[1:]:
            if best.tokens >= tokens:
                break
            item = self.read(_gradient(side))
            if abs(item.tokens - tokens) < abs(best.tokens - tokens):
                best = item
        return best


def _position_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Select what positions are computed from, without the axis of items."""
    return {name: inputs[name][0].tolist() for name in _POSITION_KEYS if name in inputs}


def _fingerprint(processor: Any) -> str:
    """Hash everything but the pixels that decides features: class, backend, sizes, library versions."""
    import PIL
    import transformers

    images = processor.image_processor
    plain = {name: value for name, value in vars(processor).items() if isinstance(value, (str, int, float, bool))}
    parts = [type(images).__name__, images.to_dict(), plain, transformers.__version__, PIL.__version__]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _gradient(side: int) -> Image.Image:
    import numpy as np
    from PIL import Image

    ramp = np.linspace(0, 255, side).astype(np.uint8)
    pixels = np.stack([np.tile(ramp, (side, 1)), np.tile(ramp[:, None], (1, side)), np.full((side, side), 128)], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))
