"""The reader of images: from a source to an item, bounded before it costs anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trinity.errors import BadMedia
from trinity.preprocess.colours import Transparency
from trinity.preprocess.media import make_plain, price_picture, read_image, size_of
from trinity.preprocess.media_costs import Price, price_processing
from trinity.preprocess.media_items import ItemReader
from trinity.preprocess.media_kinds import LoadedProcessor, MediaItem
from trinity.preprocess.media_limits import Estimate, MediaBudget, MediaLimits, MediaProblem, check_pixels
from trinity.preprocess.url_fetch import UrlFetcher
from trinity.request import Media

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image


def open_image(
    source: Any, *, transparency: Transparency = "white", limits: MediaLimits | None = None
) -> Image.Image | np.ndarray:
    """Open an image as a pipeline does: what it returns is what the model's own processor gets.

    source: as in ``Request.images``.
    transparency ("white"): as in ``Pipeline``.
    limits (``MediaLimits()``): what may be read, and which URLs are fetched.

    ::

        image = trinity.open_image("cat.png")
        AutoImageProcessor.from_pretrained(model, backend="pil")(images=[image], return_tensors="pt")

    Returns a PIL image of mode RGB; for an array of numbers other than bytes an array [3, height, width]. Raises
    ``BadMedia``. Blocks: run it on a thread if you have an event loop.
    """
    limits = limits or MediaLimits()
    (item,) = UrlFetcher(limits).fetch_here([Media("image", source)], False)
    try:
        return read_image(item.source, limits, transparency=transparency)
    except MediaProblem as exc:
        raise BadMedia(f"the image {exc}") from exc


class ImageReader(ItemReader):
    """Reads images from sources for one model; see ``KindReader`` and ``ItemReader``."""

    def __init__(self, loaded: LoadedProcessor, limits: MediaLimits) -> None:
        super().__init__(loaded, limits)
        self._limits = limits

    def make_plain(self, source: Any, among: int, budget: MediaBudget) -> Any:
        def check(width: int, height: int) -> None:
            budget.check(self.estimate(width, height, among))

        return make_plain(source, self._limits, check, self._loaded.transparency)

    def price_source(self, source: Any, among: int) -> Price:
        found = price_picture(source, self._limits)
        made = self.estimate(found.width, found.height, among) if found.width else Estimate(0, 0)
        check_pixels(made, self._limits)  # it names what is wrong better than the price of so many
        return found.price.plus(price_processing(found.width * found.height, made.pixels, made.bytes))

    def read_source(self, source: Any, among: int, budget: MediaBudget) -> MediaItem:
        return self.read(self.open_source(source, among, budget), among)

    def open_source(self, source: Any, among: int, budget: MediaBudget) -> Any:
        """Read an image, and charge what will become of it. Raises ``MediaProblem`` or ``TooManyTokens``."""

        def check(width: int, height: int) -> None:
            budget.check(self.estimate(width, height, among))

        image = read_image(source, self._limits, check, self._loaded.transparency)
        budget.charge(self.estimate(*size_of(image), among))  # upright now, which may change the tiles
        return image
