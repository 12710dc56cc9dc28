"""The reader of images in a request processor, with what its class has beyond ``KindReader``."""

from __future__ import annotations

from trinity.preprocess.media.image_kind import ImageReader
from trinity.preprocess.processor import RequestProcessor


def image_reader(processor: RequestProcessor) -> ImageReader:
    """Return the processor's reader of images."""
    reader = processor.readers["image"]
    assert isinstance(reader, ImageReader)
    return reader
