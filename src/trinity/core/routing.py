"""Routing: chooses the next instance of a request, which stays where its next stage is (TriInfer 4.3).

Where instances are on several hosts it stays on its own as far as that is fair (``trinity.core.near_hosts``).

Policies by name: ``round_robin``, ``random``, ``least_loaded`` and ``prefix_hits`` (EPD-Serve 3.4). The last two read
what instances publish of themselves (``Router.loads``), so that they choose alike in any process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, cast

from trinity.core.block_pool import DIGEST, blocks_for, media_keys, prefix_keys
from trinity.core.messages import IMAGE, KV, MediaSpan, PeerLoad, PeerReserved, PeerSuspect, PeerUp, Work
from trinity.core.near_hosts import HostTurns
from trinity.core.peer_exit import PeerLeaving
from trinity.errors import describe_error
from trinity.plugins import load_plugin

UNKNOWN_UNIT_S = 1e-9  # seconds of a unit of work whose cost is unknown: the counts decide


class BadChoice(Exception):
    """A routing policy raised an error, or chose what it was not offered: that request fails (``StageError``)."""


class SimplePolicy(Protocol):
    """Chooses among instances that have the stage and the room; ``peers`` is never empty."""

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp]) -> PeerUp: ...


class InformedPolicy(Protocol):
    """A policy with ``informed = True`` is also given the router: its ``loads`` and what follows from them.

    With ``straight``, a request whose images an instance without E has cached goes there at once, past every E.
    """

    informed: bool
    straight: bool

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp], router: Router) -> PeerUp: ...


RoutingPolicy = SimplePolicy | InformedPolicy


class RoundRobin:
    """Each in turn, per stage, from the ``first``-th on. Of several hosts it is offered one at a time."""

    by_host = True

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._next: dict[tuple[str, str], int] = {}  # by stage, and host where all are on one

    def begin(self, first: int) -> None:
        self._first = first

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp]) -> PeerUp:
        place = letter, peers[0].host if len({peer.host for peer in peers}) == 1 else ""
        turn = self._next.get(place, self._first)
        self._next[place] = turn + 1
        return peers[turn % len(peers)]


class RandomChoice:
    """Any of them, from a seeded generator."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp]) -> PeerUp:
        return self._random.choice(peers)


class LeastLoaded:
    """The instance predicted to finish its present work first (EPD-Serve 3.4); ties on the same host, then in turn."""

    informed, straight = True, False

    def __init__(self) -> None:
        self._turns = RoundRobin()
        self.begin = self._turns.begin

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp], router: Router) -> PeerUp:
        seconds = [router.seconds(peer.name, letter) for peer in peers]
        least = min(seconds)
        equal = [peer for peer, each in zip(peers, seconds, strict=True) if each == least]
        return self._turns.choose(letter, work, router.hosts.prefer(equal))


class PrefixHits:
    """The instance with most of the request cached (prefix cache and encoder cache, in tokens); ties least loaded."""

    informed, straight = True, True

    def __init__(self) -> None:
        self._least = LeastLoaded()
        self.begin = self._least.begin

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp], router: Router) -> PeerUp:
        saved = [router.cached_tokens(peer, letter, work) for peer in peers]
        most = max(saved)
        best = [peer for peer, each in zip(peers, saved, strict=True) if each == most]
        return self._least.choose(letter, work, best, router)


ROUTING_POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_loaded": LeastLoaded,
    "prefix_hits": PrefixHits,
}


def routing_policy(name: str | RoutingPolicy) -> RoutingPolicy:
    """The policy of this name, or the object itself. Raises ``UnknownName``."""
    if not isinstance(name, str):
        return name
    make = ROUTING_POLICIES.get(name) or load_plugin("trinity.routing", "routing policy", name, ROUTING_POLICIES)
    made: RoutingPolicy = make()
    return made


def number_of(name: str) -> int:
    """ "P3" has number 3. Instances take turns from their own number on: all from 0, they would send to one peer at a
    time, request after request in step with each other."""
    digits = name[len(name.rstrip("0123456789")) :]
    return int(digits[-6:] or 0)


class Router:
    """The instances that one core knows, and its policy; one with a ``begin`` is told the number of ``own``.

    A policy with ``by_host = True`` is offered instances of one host: ``host`` (""), its own, as far as that is fair.
    """

    def __init__(self, policy: RoutingPolicy, own: str = "", host: str = "") -> None:
        self.policy, self.hosts = policy, HostTurns(host)
        begin: Callable[[int], None] | None = getattr(policy, "begin", None)
        if begin is not None:
            begin(number_of(own))
        self.counts = False  # what is sent, also where the policy does not ask
        self.peers: dict[str, PeerUp] = {}
        self.lost: dict[str, PeerUp] = {}
        self.replaced: dict[str, int] = {}  # epoch of the last life of an instance that was ended to change its roles
        self.suspects: set[str] = set()
        self.reserved: dict[str, int] = {}  # first epochs, by name
        self.leaving: set[str] = set()
        self.loads: dict[str, PeerLoad] = {}
        self._sent: dict[str, dict[str, int]] = {}  # units of work since an instance's last report, by letter
        self._digests: dict[tuple[str, str], tuple[bytes, frozenset[bytes]]] = {}

    @property
    def informed(self) -> bool:
        """True where the policy reads ``loads``."""
        return bool(getattr(self.policy, "informed", False))

    def add(self, peer: PeerUp) -> None:
        self.peers[peer.name] = peer
        self.lost.pop(peer.name, None)
        self._unload(peer.name)

    def take(self, load: PeerLoad) -> None:
        """Store a load report, unless its instance is gone or has restarted since."""
        peer = self.peers.get(load.name)
        if peer is not None and peer.epoch == load.epoch:
            self.loads[load.name] = load
            self._sent.pop(load.name, None)

    def _unload(self, name: str) -> None:
        self.loads.pop(name, None)
        self._sent.pop(name, None)
        self.suspects.discard(name)
        self.leaving.discard(name)
        for kind in (IMAGE, KV):
            self._digests.pop((name, kind), None)

    def drop(self, name: str, planned: bool = False) -> PeerUp | None:
        """Remove an instance, which may come back. Returns it, if it was known."""
        peer = self.peers.pop(name, None)
        if planned and peer is not None:
            self.replaced[name] = peer.epoch
        self._unload(name)
        if peer is not None:
            self.lost[name] = peer
        return peer

    def misses(self, letter: str) -> bool:
        """True where instances with this stage were known and all of them are gone."""
        return not self.has(letter) and any(letter in peer.roles for peer in self.lost.values())

    def choose(self, letter: str, work: Work) -> str | None:
        """Name of the instance for stage ``letter``; None where none has both the stage and the blocks.

        Raises ``BadChoice``, as ``enter`` does.
        """
        peers = self.trusted(self.fitting(letter, work))
        return self._chosen(letter, work, peers) if peers else None

    def avoid(self, event: PeerSuspect | PeerLeaving) -> None:
        """Route past an instance that is silent or is to end, or no longer; ignored of a former life."""
        avoided, yes = (
            (self.leaving, event.leaving) if isinstance(event, PeerLeaving) else (self.suspects, event.suspected)
        )
        peer = self.peers.get(event.name)
        if peer is not None and peer.epoch == event.epoch:
            (avoided.add if yes else avoided.discard)(event.name)

    def trusted(self, peers: Iterable[PeerUp]) -> list[PeerUp]:
        """Leave out those that leave or are silent, unless all are: one of these may only be slow."""
        found = list(peers)
        for avoided in filter(None, (self.leaving, self.suspects)):
            found = [peer for peer in found if peer.name not in avoided] or found
        return found

    def fitting(self, letter: str, work: Work) -> Iterator[PeerUp]:
        """Instances with the stage whose pools could ever hold the request, and that it may go to just now."""
        found = _fitting(letter, work, self.peers.values())
        return found if not (self.reserved or work.alone) else self._open(found, work)

    def holding(self, letter: str, work: Work, lost: bool = False) -> Iterator[PeerUp]:
        """Those that are up, or ``lost``, whose pools could ever hold the request, reserved ones too."""
        return _fitting(letter, work, (self.lost if lost else self.peers).values())

    def _open(self, peers: Iterator[PeerUp], work: Work) -> Iterator[PeerUp]:
        """Those reserved for a request that runs alone where it does, and the others for all others."""
        return (peer for peer in peers if work.is_alone_at(peer.roles) is self.is_reserved(peer.name, peer.epoch))

    def reserve(self, event: PeerReserved) -> None:
        """Keep an instance for a request that runs alone, from this epoch on, or no longer."""
        if event.reserved:
            self.reserved[event.name] = event.epoch
        else:
            self.reserved.pop(event.name, None)

    def is_reserved(self, name: str, epoch: int) -> bool:
        return name in self.reserved and epoch >= self.reserved[name]

    def awaits(self, letter: str, work: Work) -> bool:
        """True where the request may go to no instance with this stage now, and could to one lost or reserved."""
        known = (*self.lost.values(), *self.peers.values())
        return not any(self.fitting(letter, work)) and any(_fitting(letter, work, known))

    def enter(self, work: Work) -> str | None:
        """Name of the instance for the first stage: E where there are media, unless they need not be encoded."""
        if work.media and not work.encode_only and getattr(self.policy, "straight", False):
            having = [peer for peer in self.trusted(self.fitting("P", work)) if self.has_media(peer, work)]
            if having and not any("E" in peer.roles for peer in having):
                return self._chosen("P", work, having)
        return self.choose("E" if work.media else "P", work)

    def _chosen(self, letter: str, work: Work, peers: Sequence[PeerUp]) -> str:
        """Ask the policy. Raises ``BadChoice`` if that fails, or names another than one of ``peers``."""
        if getattr(self.policy, "by_host", False):
            peers = self.hosts.choose(letter, peers, self.peers.values())
        try:
            if self.informed:
                picked = cast(InformedPolicy, self.policy).choose(letter, work, tuple(peers), self)
            else:
                picked = cast(SimplePolicy, self.policy).choose(letter, work, tuple(peers))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's policy may raise anything, and concerns this request alone
            raise BadChoice(f"the routing policy failed at stage {letter} ({describe_error(error)})") from error
        if not any(picked is peer for peer in peers):
            names = ", ".join(peer.name for peer in peers)
            raise BadChoice(
                f"the routing policy chose none of {names} at stage {letter}, but a {type(picked).__name__}"
            )
        if self.informed or self.counts:
            self.count(picked.name, letter, _units(letter, work))
        return picked.name

    def count(self, name: str, letter: str, units: int) -> None:
        """Count work that was sent to an instance, until it reports."""
        sent = self._sent.setdefault(name, {})
        sent[letter] = sent.get(letter, 0) + units

    def seconds(self, name: str, letter: str) -> float:
        """Predict the seconds of work at a stage of an instance: its last report, and what was sent to it since."""
        load = self.loads.get(name)
        sent = self._sent.get(name, {}).get(letter, 0)
        if load is None:
            return sent * UNKNOWN_UNIT_S
        return load.predicted_s.get(letter, 0.0) + sent * (load.unit_s.get(letter, 0.0) or UNKNOWN_UNIT_S)

    def cached_tokens(self, peer: PeerUp, letter: str, work: Work) -> int:
        """Count the prompt positions and visual tokens that an instance has cached, by its last report.

        Counts those of this stage and of the stages that follow on the same instance.
        """
        stages = {letter} if work.encode_only else _stages_here(letter, peer.roles)
        spared = self.cached_prefix(peer, work, work.prompt) if stages & {"P", "D"} else 0
        if stages & {"E", "P"}:
            spared += sum(span.tokens for span in work.media if self._has_span(peer, span))
        return spared

    def has_media(self, peer: PeerUp, work: Work) -> bool:
        """True where an instance has reported the features of all media of a request."""
        return all(self._has_span(peer, span) for span in work.media)

    def _has_span(self, peer: PeerUp, span: MediaSpan) -> bool:
        known = self.digest(peer.name, IMAGE)
        return bool(known) and all(key[:DIGEST] in known for key in media_keys(span, peer.image_block_size))

    def holder(self, span: MediaSpan, but: str) -> str:
        """Another instance that said it has these features, a prefill instance first; "" where none did."""
        reported = [peer for peer in self.peers.values() if peer.name != but and peer.name in self.loads]
        having = [peer for peer in reported if self._has_span(peer, span)]
        return min(having, key=lambda peer: ("P" not in peer.roles, peer.name)).name if having else ""

    def cached_prefix(self, peer: PeerUp, work: Work, text: Sequence[int]) -> int:
        """Count the positions of a request's text, its prompt or more, that an instance has reported as cached."""
        known = self.digest(peer.name, KV)
        if not known:
            return 0
        hits = 0
        for key in prefix_keys(text, work.media, peer.kv_block_size, work.salt):
            if key[:DIGEST] not in known:
                break
            hits += 1
        return hits * peer.kv_block_size

    def digest(self, name: str, kind: str) -> frozenset[bytes]:
        """Key prefixes (``DIGEST`` bytes) of the blocks that an instance reported as cached."""
        load = self.loads.get(name)
        said = load.cached.get(kind, b"") if load is not None else b""
        old = self._digests.get((name, kind))
        if old is None or old[0] != said:
            keys = frozenset(said[at : at + DIGEST] for at in range(0, len(said), DIGEST))
            old = self._digests[name, kind] = (said, keys)
        return old[1]

    def known(self, letter: str) -> bool:
        """True where an instance has the stage, be it up or lost."""
        return self.has(letter) or self.misses(letter)

    def has(self, letter: str) -> bool:
        return any(letter in peer.roles for peer in self.peers.values())


def _fitting(letter: str, work: Work, peers: Iterable[PeerUp]) -> Iterator[PeerUp]:
    """Instances with the stage whose pools could ever hold the request; its need is the same for all of a kind."""
    known: dict[tuple[str, int, int], dict[str, int]] = {}
    for peer in peers:
        if letter in peer.roles:
            kind = (peer.roles, peer.image_block_size, peer.kv_block_size)
            need = known.get(kind)
            if need is None:
                need = known[kind] = needs(letter, work, *kind)
            for wanted, count in need.items():
                if count > peer.pools.get(wanted, 0):
                    break
            else:
                yield peer


def _units(letter: str, work: Work) -> int:
    """Units that a request adds to a stage: visual tokens (E), prompt positions (P), a row (D)."""
    if letter == "E":
        return sum(span.tokens for span in work.media)
    return len(work.prompt) if letter == "P" else 1


def needs(letter: str, work: Work, roles: str, image_block_size: int, kv_block_size: int) -> dict[str, int]:
    """Blocks by kind that a request holds at stage ``letter`` (and at those that follow on the same instance)."""
    stages = {letter} if work.encode_only else _stages_here(letter, roles)
    need: dict[str, int] = {}
    for span in work.media if stages & {"E", "P"} else ():
        need[IMAGE] = need.get(IMAGE, 0) + blocks_for(span.tokens, image_block_size)
    if stages & {"P", "D"}:
        need[KV] = blocks_for(kv_tokens(work, decodes="D" in stages), kv_block_size)
    return need


def _stages_here(letter: str, roles: str) -> set[str]:
    stages = {letter}
    for following in "EPD"["EPD".index(letter) + 1 :]:
        if following not in roles:
            break
        stages.add(following)
    return stages


def kv_tokens(work: Work, decodes: bool) -> int:
    """KV entries to reserve: the text, and where decoding happens one for every output but the last."""
    return len(work.prompt) + (work.max_tokens - 1 if decodes else work.outputs)
