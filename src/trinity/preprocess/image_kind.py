"""Images as a kind of media: their markup in a model's text, and their reader."""

from __future__ import annotations

from typing import Any

from trinity.errors import ConfigError, UnsupportedModel
from trinity.preprocess.image_sizes import guard_resizes
from trinity.preprocess.loader import IMAGE_TEXT, ImageText, LoadedProcessor, make_channels_contiguous
from trinity.preprocess.media import make_plain, read_image, size_of
from trinity.preprocess.media_items import ItemReader
from trinity.preprocess.media_kinds import MediaItem, MediaKind, ModelFiles, Placeholder
from trinity.preprocess.media_limits import MediaBudget, MediaLimits
from trinity.preprocess.model_types import explain_how_to_add


class ImageReader(ItemReader):
    """Reads images from sources for one model; see ``KindReader`` and ``ItemReader``."""

    def __init__(self, loaded: LoadedProcessor, limits: MediaLimits) -> None:
        super().__init__(loaded, limits)
        self._limits = limits

    def make_plain(self, source: Any, among: int, budget: MediaBudget) -> Any:
        def check(width: int, height: int) -> None:
            budget.check(self.estimate(width, height, among))

        return make_plain(source, self._limits, check)

    def read_source(self, source: Any, among: int, budget: MediaBudget) -> MediaItem:
        return self.read(self.open_image(source, among, budget), among)

    def open_image(self, source: Any, among: int, budget: MediaBudget) -> Any:
        """Read an image, and charge what will become of it. Raises ``MediaProblem`` or ``TooManyTokens``."""

        def check(width: int, height: int) -> None:
            budget.check(self.estimate(width, height, among))

        image = read_image(source, self._limits, check)
        budget.charge(self.estimate(*size_of(image), among))  # upright now, which may change the tiles
        return image


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
        if loaded.in_front:
            from trinity.preprocess.front_images import FrontReader  # a subclass of the reader above

            return FrontReader(loaded, limits)
        return ImageReader(loaded, limits)


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
