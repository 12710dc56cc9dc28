"""Images as a kind of media: their markup in a model's text, and their readers."""

from __future__ import annotations

from typing import Any

from trinity.errors import ConfigError, UnsupportedModel
from trinity.preprocess.checkpoint.model_types import explain_how_to_add
from trinity.preprocess.media.front_images import FrontReader
from trinity.preprocess.media.image_reader import ImageReader
from trinity.preprocess.media.image_sizes import guard_resizes
from trinity.preprocess.media.media_kinds import LoadedProcessor, MediaKind, ModelFiles, Placeholder
from trinity.preprocess.media.media_markup import IMAGE_TEXT, ImageText
from trinity.preprocess.media_limits import MediaLimits


class ImageKind(MediaKind):
    """Images, as ``media.read_image`` reads them."""

    name = "image"
    parts = {"input_image": ("image_url",)}  # noqa: RUF012
    accept = "image/*"

    def find_placeholder(self, files: ModelFiles) -> Placeholder | None:
        """Find the image token, and prepare the image processor. Raises ``UnsupportedModel`` if there is no token."""
        config, processor = files.config, files.processor
        images = getattr(processor, "image_processor", None)
        if images is None:
            return None
        token = files.image_token or getattr(processor, "image_token", None)
        if not isinstance(token, str) or not files.media_ids:
            raise UnsupportedModel(
                f"model type {config.model_type!r} has no placeholder token for images; {explain_how_to_add()}"
            )
        make_channels_contiguous(images)
        guard_resizes(images, files.last_call)
        marker = files.image_marker or IMAGE_TEXT.get(config.model_type, ImageText()).marker.format(token=token)
        return Placeholder(token=token, marker=marker, reserved=reserved_tokens(files))

    def open_reader(self, loaded: LoadedProcessor, limits: MediaLimits) -> ImageReader:
        return FrontReader(loaded, limits) if loaded.in_front else ImageReader(loaded, limits)


def reserved_tokens(files: ModelFiles) -> tuple[str, ...]:
    """List the tokens that stand for media and must not occur in a user's text. Raises ``ConfigError``."""
    added = files.tokenizer.added_tokens_decoder
    media_ids = {each for each in files.media_ids if each in added or not files.in_front}  # others: words of a text
    reserved = tuple(files.tokenizer.convert_ids_to_tokens(sorted(media_ids)))
    others = (files.tokenizer.convert_ids_to_tokens(number) for number in sorted(files.other_ids - files.media_ids))
    if None in reserved:
        raise ConfigError(
            f"the config names tokens {sorted(files.media_ids)} for media, and the tokenizer lacks some of them; are "
            "both of one checkpoint?"
        )
    return (*reserved, *(token for token in others if token is not None))


def make_channels_contiguous(images: Any) -> None:
    """Make an image processor copy each image to contiguous channels before it rescales it.

    Its arrays have shape [channels, height, width] but lie in memory pixel by pixel, where numpy takes three times as
    long for a channel's mean. The results stay the same, to the bit.
    """
    import numpy as np
    from transformers.image_processing_backends import PilBackend

    if not isinstance(images, PilBackend):
        return

    class ContiguousChannels(type(images)):  # type: ignore[misc]
        def rescale(self, image: Any, *args: Any, **kwargs: Any) -> Any:
            return super().rescale(np.ascontiguousarray(image), *args, **kwargs)

    ContiguousChannels.__name__ = type(images).__name__  # transformers keys settings by this name
    images.__class__ = ContiguousChannels
