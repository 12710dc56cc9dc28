"""MapProgress: tells how many results of a map have come, by a bar or to a function."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from trinity.errors import ConfigError
from trinity.errors.arguments import show
from trinity.errors.display import is_display_watched

Progress = Callable[[int, int | None], None]  # results so far, and how many there will be, where that is known


class MapProgress:
    """Counts results.

    - ``shown``: a function to call, True for a bar, False for none; None shows a bar in a terminal or notebook.
    - ``total``: how many there will be; None where nobody knows.

    Raises ``ConfigError`` for anything else, and for True where tqdm is not installed.
    """

    def __init__(self, shown: bool | Progress | None, total: int | None) -> None:
        if not (shown is None or isinstance(shown, bool) or callable(shown)):
            raise ConfigError(f"progress is True, False, None or a function of two counts, got {show(shown)}")
        self._report = shown if callable(shown) else None
        self._total, self._count = total, 0
        wanted = shown is True or (shown is None and is_display_watched())
        self._make_bar = find_bar(required=shown is True) if wanted else None
        self._bar: Any = None

    def __enter__(self) -> MapProgress:
        if self._make_bar is not None:
            self._bar = self._make_bar(desc="requests", total=self._total, unit="", dynamic_ncols=True)
        return self

    def count(self) -> None:
        """Count one result."""
        self._count += 1
        if self._report is not None:
            self._report(self._count, self._total)
        elif self._bar is not None:
            self._bar.update()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def find_bar(*, required: bool) -> Callable[..., Any] | None:
    """Return tqdm's bar; None where it is missing, which is a ``ConfigError`` if it is required."""
    try:
        found: Callable[..., Any] = import_module("tqdm").tqdm
    except ImportError as error:
        if required:
            raise ConfigError("progress=True needs tqdm: pip install tqdm, or give a function") from error
        return None
    return found
