"""SiblingWords: what was said between this instance and its siblings, and has no answer yet."""

from __future__ import annotations


class SiblingWords:
    """The open words of each pair, by the sibling's name.

    - ``wanted``: it was told that this instance wants work. ``wanting``: it wants work, the latest last.
    - ``told``: it was told that something waits here.
    - ``awaits``: the sibling from which a request is to come, after a take; "" for none.
    """

    def __init__(self) -> None:
        self.wanted: set[str] = set()
        self.told: set[str] = set()
        self.awaits = ""
        self._wanting: dict[str, None] = {}

    @property
    def wanting(self) -> tuple[str, ...]:
        return tuple(self._wanting)

    def want(self, name: str) -> None:
        """Note that it has nothing to do."""
        self._wanting.pop(name, None)
        self._wanting[name] = None

    def tell(self, name: str) -> None:
        """Note that it was told of work, so that it does not want any until it says so again."""
        del self._wanting[name]
        self.told.add(name)

    def came(self, name: str) -> None:
        """Note that what this sibling was to hand over is here, or is not to come."""
        if self.awaits == name:
            self.awaits = ""

    def avoid(self, name: str) -> None:
        """Await no answer of a sibling that is silent or is to end. What it wants stands: it will not say so again."""
        self.told.discard(name)
        self.came(name)

    def meet(self, name: str) -> None:
        """Note that an instance is up: each of the two takes the other for one that wants work, without a word."""
        self.avoid(name)
        self.want(name)
        self.wanted.add(name)

    def drop(self, name: str) -> None:
        """Forget what was said to and by a sibling that is lost."""
        self._wanting.pop(name, None)
        self.wanted.discard(name)
        self.avoid(name)
