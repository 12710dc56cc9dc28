"""Rules that are not kept: which run in virtual time notices one, the run first that did when it was tried last."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = (AssertionError, KeyError, ValueError, RecursionError)


def is_noticed(
    play: Callable[[int], object],
    seeds: Sequence[int],
    known: int,
    errors: tuple[type[Exception], ...] = BROKEN,
) -> bool:
    """Tell if a check stops one of these runs. ``known``: the one that is played first, which may spare a search."""
    for seed in (known, *seeds):
        try:
            play(seed)
        except errors:
            return True
    return False
