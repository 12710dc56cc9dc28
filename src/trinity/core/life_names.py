"""Names of a request's lives among the instances: no two lives have the same, whatever ids readers give and reuse."""

from __future__ import annotations

MARK = "~"
MOST_IDS = 65_536  # that are remembered; beyond them every id counts as used


def name_life(request: str, number: int, attempt: int) -> str:
    """Name a life: behind the mark stands which request it is, by the front end's ``number``, and which attempt."""
    return f"{request}{MARK}{number}.{attempt}"


def name_help(request: str, attempt: int, item: int) -> str:
    """Name a media item that another instance encodes for this attempt; no life of a request has such a name."""
    return f"{request}{MARK}{attempt}+{item}"


def read_help(name: str) -> tuple[str, int, int]:
    """Read life, attempt and media item from such a name."""
    request, _, rest = name.rpartition(MARK)
    attempt, _, item = rest.partition("+")
    return request, int(attempt), int(item)


class LifeNames:
    """Names first lives by their ids, where no other life can have or have had that name.

    An instance may still have a request that has ended for the front end: a step is in flight, or a message on its way.
    ``most`` (ids, 65,536): how many are remembered.
    """

    def __init__(self, most: float = MOST_IDS) -> None:
        self.most = most
        self._used: set[str] = set()

    def name_first(self, request: str, number: int) -> str:
        """Name the first life of a request. An id with the mark in it could be the name of another life."""
        fresh = MARK not in request and len(self._used) < self.most and request not in self._used
        if not fresh:
            return name_life(request, number, 0)
        self._used.add(request)
        return request
