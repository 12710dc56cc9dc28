"""Names of a request's lives among the instances: no two lives have the same, whatever ids readers give and reuse.

Of two front ends neither knows the other's ids. All but the first put their own name into each name of a life.
"""

from __future__ import annotations

from trinity.core.values import FRONTEND, is_frontend

MARK = "~"
MOST_IDS = 65_536  # that are remembered; beyond them every id counts as used


def name_life(request: str, number: int, attempt: int, owner: str = FRONTEND) -> str:
    """Name a life: behind the mark stands which request of its owner it is, by the ``number``, and which attempt."""
    whose = "" if owner == FRONTEND else f"{owner}."
    return f"{request}{MARK}{whose}{number}.{attempt}"


def id_of(name: str) -> str:
    """Read the reader's id from the name of a life. The name of a first life may be the id itself."""
    return name.rpartition(MARK)[0] or name


def check_owner(name: str) -> str:
    """Return a front end's name. Raises ``ValueError`` for one that could make the names of two lives equal."""
    if not is_frontend(name) or MARK in name:
        raise ValueError(f"a front end is called {FRONTEND!r} or {FRONTEND + ':'!r} and a word, not {name!r}")
    return name


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
    ``most`` (ids, 65,536): how many are remembered. ``owner``: the front end.
    """

    def __init__(self, most: float = MOST_IDS, owner: str = FRONTEND) -> None:
        self.most, self.owner = most, owner
        self._used: set[str] = set()

    def name_first(self, request: str, number: int) -> str:
        """Name the first life of a request. An id with the mark in it could be the name of another life."""
        if self.owner != FRONTEND:
            return name_life(request, number, 0, self.owner)
        fresh = MARK not in request and len(self._used) < self.most and request not in self._used
        if not fresh:
            return name_life(request, number, 0)
        self._used.add(request)
        return request
