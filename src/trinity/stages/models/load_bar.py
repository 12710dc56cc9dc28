"""The bar that transformers shows while it loads weights: where somebody watches a long load."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trinity.errors.display import is_display_watched

LONG_LOAD_BYTES = 256 << 20  # of weights: reading them takes long enough for a bar


def shows_bar(directory: Path) -> bool:
    """Tell if transformers is to show its bar: somebody watches, and it takes a while."""
    held = (each.stat().st_size for pattern in ("*.safetensors", "*.bin") for each in directory.glob(pattern))
    return is_display_watched() and sum(held) >= LONG_LOAD_BYTES


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from showing a bar."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
