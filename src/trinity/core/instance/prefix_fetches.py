"""PrefixFetches: KV of a request's text that an instance has asked another one for, and what waits for it.

``trinity.core.migration.prefix_fetch`` says what for.
"""

from __future__ import annotations

from dataclasses import dataclass

from trinity.core.block_pool import Key
from trinity.core.instance.request_state import RequestState


@dataclass(slots=True)
class PrefixFetch:
    """KV blocks under ``keys``, those of the text from block ``start`` on, requested from ``holder`` at ``since``.

    - ``attempt``: of its ``request``, which waits for it in its queue.
    - ``ahead``: cached blocks before these, and ``places``: new ones to pull into. All are held, while the pull runs.
    - ``void``: the holder was lost meanwhile, and its next life may have been read.
    """

    request: str
    attempt: int
    holder: str
    start: int
    keys: tuple[Key, ...]
    since: float
    ahead: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    void: bool = False


class PrefixFetches(dict[str, PrefixFetch]):
    """Fetches without an end, by id."""

    def delay(self, state: RequestState) -> bool:
        """True where the prefill of this request waits for one."""
        return any((each.request, each.attempt) == (state.work.request, state.attempt) for each in self.values())
