"""The reader of images: from a source to an item, bounded before it costs anything."""

from __future__ import annotations

from typing import Any

from trinity.preprocess.loader import LoadedProcessor
from trinity.preprocess.media import make_plain, read_image, size_of
from trinity.preprocess.media_items import ItemReader
from trinity.preprocess.media_kinds import MediaItem
from trinity.preprocess.media_limits import MediaBudget, MediaLimits


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
