"""Questions to other instances that have no answer yet: to siblings, helpers and holders of KV."""

from __future__ import annotations

from dataclasses import dataclass

from trinity.core.instance.request_state import RequestState
from trinity.core.messages import KV, WORK, Offer
from trinity.core.prefix_cache import Key


class SiblingWords:
    """The open words of each pair about one kind, by the sibling's name.

    - ``wanted``: it was told that this instance wants some. ``wanting``: it wants some, the latest last.
    - ``told``: it was told that something waits here.
    - ``awaits``: the sibling from which something is to come, after a take; "" for none. ``source``: who is to offer
      it, once that sibling has said so.
    - ``refused`` (blocks): the most that had no room here, since it was said last that there is some.
    """

    def __init__(self) -> None:
        self.wanted: set[str] = set()
        self.told: set[str] = set()
        self.awaits = self.source = ""
        self.refused = 0
        self._wanting: dict[str, None] = {}

    @property
    def wanting(self) -> tuple[str, ...]:
        return tuple(self._wanting)

    def want(self, name: str) -> None:
        """Note that it has nothing to do, or room."""
        self._wanting.pop(name, None)
        self._wanting[name] = None

    def ask(self, name: str) -> None:
        """Note that it was told what this instance wants."""
        self.wanted.add(name)
        self.refused = 0

    def tell(self, name: str) -> None:
        """Note that it was told of something, so that it does not want any until it says so again."""
        del self._wanting[name]
        self.told.add(name)

    def answer(self, name: str, takes: bool, blocks: int) -> None:
        """Note that it was answered, and wants to hear anew what is wanted here: so many blocks may be too many."""
        self.wanted.discard(name)
        if takes:
            self.awaits = name
        else:
            self.refused = max(self.refused, blocks)

    def expect(self, name: str, source: str, up: bool) -> None:
        """Note who is to offer what this sibling has passed; nothing is to come from one that is not up."""
        if self.awaits == name:
            self.source = source
        if not up:
            self.came(name)

    def came(self, name: str) -> None:
        """Note that what this sibling was to hand over is here, or is not to come."""
        if self.awaits == name:
            self.awaits = self.source = ""

    def avoid(self, name: str) -> None:
        """Await nothing of an instance that is silent or is to end. What it wants stands: it will not say so again."""
        self.told.discard(name)
        self.came(self.awaits if name == self.source else name)

    def meet(self, name: str) -> None:
        """Note that an instance is up: each of the two takes the other for one that wants some, without a word."""
        self.avoid(name)
        self.want(name)
        self.wanted.add(name)

    def drop(self, name: str) -> None:
        """Forget what was said to and by a sibling that is lost."""
        self._wanting.pop(name, None)
        self.wanted.discard(name)
        self.avoid(name)


class Siblings:
    """The words about work, and about room for decodes."""

    def __init__(self) -> None:
        self._words = {WORK: SiblingWords(), KV: SiblingWords()}

    def about(self, kind: str) -> SiblingWords:
        return self._words[KV if kind == KV else WORK]

    @property
    def awaits(self) -> str:
        """A sibling from which something is to come; "" for none."""
        return self._words[WORK].awaits or self._words[KV].awaits

    def note_offer(self, offer: Offer) -> None:
        """Note that an offer has come that a sibling had no room for."""
        for sibling in offer.route[-2:-1] if offer.passed else ():
            self.about(offer.kind).came(sibling)

    def give_up(self) -> None:
        """Await nothing: a source has nothing to offer. Which one, and of what, is known to who named it alone."""
        for words in self._words.values():
            words.came(words.awaits)

    def avoid(self, name: str) -> None:
        for words in self._words.values():
            words.avoid(name)

    def meet(self, name: str) -> None:
        for words in self._words.values():
            words.meet(name)

    def drop(self, name: str) -> None:
        for words in self._words.values():
            words.drop(name)


@dataclass(slots=True)
class HomeFetch:
    """Features requested from a helper for an own request; ``void``: that one was lost while they were ``pulling``."""

    request: str
    holder: str
    pulling: bool = False
    void: bool = False


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
