"""ProgressBar: shows a bar during long work, in a terminal or notebook."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Any

from trinity.errors.display import is_display_watched

Report = Callable[[int, str], None]  # replays so far, what runs
_DELAY_S = 1.0  # work that is over by then shows no bar


class ProgressBar:
    """Passes the count of replays, and what runs, to ``report``; else to a bar in a terminal or notebook."""

    def __init__(self, report: Report | None = None, watched: bool | None = None) -> None:
        self._report = report
        self._bar: Any = None
        if report is None and (is_display_watched() if watched is None else watched):
            self._bar = _bar()

    def __call__(self, runs: int, what: str) -> None:
        if self._report is not None:
            self._report(runs, what)
        elif self._bar is not None:
            self._bar.set_postfix_str(what, refresh=False)
            self._bar.update(max(0, runs - self._bar.n))

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _bar() -> Any:
    """Make a bar; None where tqdm is missing: it comes with transformers, and nothing depends on it."""
    try:
        bar = import_module("tqdm").tqdm
    except ImportError:
        return None
    return bar(desc="plan", unit=" replays", delay=_DELAY_S, leave=False, dynamic_ncols=True)
