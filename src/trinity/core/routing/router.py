"""Routing: chooses the next instance of a request, which stays where its next stage is (TriInfer 4.3).

Where instances are on several hosts it stays on its own as far as that is fair (``HostTurns``).

Policies by name: ``round_robin``, ``random``, ``least_loaded`` and ``prefix_hits`` (EPD-Serve 3.4) and ``two_choices``.
The last three read what instances publish of themselves (``Router.loads``), so that they choose alike in any process.

KV between two hosts costs a network, and features cost it too. Always to stay would leave instances without work where
a host has many that send and few that receive. So hosts take turns by weights, out of whole numbers that every
instance has alike: of S senders and R receivers, a host with s of the one and r of the other sends s * R parts and
takes r * S. It keeps the smaller of the two; what is left of its own goes to hosts that could take more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Protocol, cast

from trinity.core.messages import MediaSpan, PeerLeaving, PeerLoad, PeerRemoved, PeerReserved, PeerSuspect, PeerUp, Work
from trinity.core.routing.stage_peers import LoadOrder, ReportedContent, Slots, StagePeers, fitting, units_of
from trinity.errors import describe_error
from trinity.errors.arguments import Whole
from trinity.plugins import load_plugin
from trinity.stage_kinds import PREFILL, encoder_of, makers_for, roles_of

UNKNOWN_UNIT_S = 1e-9  # seconds of a unit of work whose cost is unknown: the counts decide
DEFAULT_ROUTING = "round_robin"


class HostTurns:
    """Turns of hosts for the requests that one instance hands on. ``host`` (""): its own; "" is on none."""

    def __init__(self, host: str = "") -> None:
        self._host = host
        self._weights: dict[str, dict[str, int]] = {}
        self._credits: dict[str, dict[str, int]] = {}
        self._last: dict[str, tuple[StagePeers, dict[str, int], dict[str, StagePeers]]] = {}

    def choose(self, letter: str, peers: StagePeers, known: Iterable[PeerUp]) -> StagePeers:
        """Choose the host whose turn it is; return those of ``peers`` on it, all of them where it makes no difference.

        ``known``: every instance, by which a fair share is told. It may be another only where ``peers`` is.
        """
        if letter not in self._last or self._last[letter][0] is not peers:
            self._last[letter] = (peers, self._weigh(letter, peers, known), {})
        _, weights, near = self._last[letter]
        if not weights:
            return peers
        turn = self._take_turn(letter, weights)
        if turn not in near:
            near[turn] = peers.select(peers.by_host[turn])
        return near[turn]

    def _weigh(self, letter: str, peers: StagePeers, known: Iterable[PeerUp]) -> dict[str, int]:
        """Weigh the hosts of these; {} where it makes no difference. Turns begin anew where weights are others."""
        if all(host == self._host for host in peers.by_host):
            return {}
        weights = weigh_hosts(self._host, letter, peers, known)
        if weights and weights != self._weights.get(letter):
            self._weights[letter], self._credits[letter] = weights, dict.fromkeys(weights, 0)
        return weights

    def _take_turn(self, letter: str, weights: dict[str, int]) -> str:
        credits, total = self._credits[letter], sum(weights.values())
        for host, weight in weights.items():
            credits[host] += weight
        turn = max(credits, key=credits.__getitem__)  # the first of equals: its own
        credits[turn] -= total
        return turn

    def prefer(self, peers: StagePeers, mask: int) -> int:
        """Those of a set on the same host, all of it where there are none."""
        return mask & peers.by_host.get(self._host, 0) or mask if self._host else mask


def weigh_hosts(own: str, letter: str, peers: Sequence[PeerUp], known: Iterable[PeerUp]) -> dict[str, int]:
    """Weigh the hosts of ``peers`` for what is handed on from ``own``, that one first; {} where nothing is known."""
    before = makers_for(letter)
    senders = Counter(
        peer.host for peer in known if letter not in peer.roles and any(each in peer.roles for each in before)
    )
    receivers = Counter(peer.host for peer in peers)
    if not senders[own]:
        return {}
    sent = {host: count * receivers.total() for host, count in senders.items()}
    room = {host: count * senders.total() - sent.get(host, 0) for host, count in receivers.items()}
    kept = min(sent[own], receivers[own] * senders.total())
    free = {host: more for host, more in room.items() if more > 0}
    away = {host: (sent[own] - kept) * more for host, more in free.items() if host != own}
    weights = {own: kept * (sum(free.values()) or 1), **away}
    return {host: weight for host, weight in weights.items() if weight}


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
        hosts = peers.by_host if isinstance(peers, StagePeers) else {peer.host for peer in peers}
        return peers[self._turn(letter, peers[0].host if len(hosts) == 1 else "", len(peers))]

    def pick(self, letter: str, peers: StagePeers, mask: int) -> PeerUp:
        """Choose among a set of these, as ``choose`` does."""
        return peers.nth(mask, self._turn(letter, peers.host_of(mask), mask.bit_count()))

    def _turn(self, letter: str, host: str, count: int) -> int:
        turn = self._next.get((letter, host), self._first)
        self._next[letter, host] = turn + 1
        return turn % count


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
        found = router.stage_peers(peers)
        return self.pick(letter, found, found.mask, router)

    def pick(self, letter: str, peers: StagePeers, mask: int, router: Router) -> PeerUp:
        """Choose among a set of these, as ``choose`` does."""
        equal = router.least_loaded(letter, mask)
        return self._turns.pick(letter, peers, router.hosts.prefer(peers, equal))


class PrefixHits:
    """The instance with most of the request cached (prefix cache and encoder cache, in tokens); ties least loaded."""

    informed, straight = True, True

    def __init__(self) -> None:
        self._least = LeastLoaded()
        self.begin = self._least.begin

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp], router: Router) -> PeerUp:
        found = router.stage_peers(peers)
        return self._least.pick(letter, found, router.content.most_cached(letter, work, found), router)


class Predicts(Protocol):
    """Predicts the seconds of work at a stage of an instance, as ``Router`` does."""

    def seconds(self, name: str, letter: str) -> float: ...


class TwoChoices:
    """The less loaded of two drawn ones (Azar, Broder, Karlin and Upfal, Balanced Allocations).

    Where many choose by the same reports, each would send to the same least loaded one until the next report. Drawn
    from a generator that is seeded by the ``first`` turn of each, so that no two draw in step.
    """

    informed, straight = True, False

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, first: int) -> None:
        self._random = random.Random(first)

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp], router: Predicts) -> PeerUp:
        drawn = self._random.sample(peers, min(2, len(peers)))
        return min(drawn, key=lambda peer: router.seconds(peer.name, letter))


ROUTING_POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "round_robin": RoundRobin,
    "random": RandomChoice,
    "least_loaded": LeastLoaded,
    "prefix_hits": PrefixHits,
    "two_choices": TwoChoices,
}


@dataclass(frozen=True, kw_only=True)
class RoutingOptions:
    """Settings of requests on their way to instances, of a pipeline and of a simulation of one.

    - ``routing`` (None): a routing policy or its name; None: a plan's, else "round_robin".
    - ``spread`` (count, None): instances with E that may encode a request's images at once, while idle, and the tiles
      of one image; None: a plan's, else 1.
    - ``max_waiting`` (requests, 1024): that wait for their first token; more are ``Overloaded``.
    """

    routing: str | RoutingPolicy | None = None
    spread: Whole | None = None
    max_waiting: Whole = 1024


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
        self._peers: dict[str, PeerUp] = {}
        self.peers: Mapping[str, PeerUp] = MappingProxyType(self._peers)  # written here alone: what follows is kept up
        self.lost: dict[str, PeerUp] = {}
        self.replaced: dict[str, int] = {}  # epoch of the last life of an instance that was ended to change its roles
        self.suspects: set[str] = set()
        self.reserved: dict[str, int] = {}  # first epochs, by name
        self.leaving: set[str] = set()
        self.loads: dict[str, PeerLoad] = {}
        self._sent: dict[str, dict[str, int]] = {}  # units of work since an instance's last report, by letter
        self._slots = Slots()
        self.content = ReportedContent(self._slots, self.loads)
        self._stages: dict[str, StagePeers] = {}  # those with a letter; "": all
        self._trusted: dict[str, StagePeers] = {}  # those of them that are not routed past
        self._orders: dict[str, LoadOrder] = {}  # by letter

    @property
    def informed(self) -> bool:
        """True where the policy reads ``loads``."""
        return bool(getattr(self.policy, "informed", False))

    def add(self, peer: PeerUp) -> None:
        self._peers[peer.name] = peer
        self.lost.pop(peer.name, None)
        self._unload(peer.name)
        if self._slots.add(peer.name):
            self.content = ReportedContent(self._slots, self.loads)

    def take(self, load: PeerLoad) -> None:
        """Store a load report, unless its instance is gone or has restarted since."""
        peer = self.peers.get(load.name)
        if peer is not None and peer.epoch == load.epoch:
            self.loads[load.name] = load
            self._sent.pop(load.name, None)
            self.content.note(load.name)
            for order in self._orders.values():
                order.changed(load.name)

    def _unload(self, name: str) -> None:
        self.loads.pop(name, None)
        self._sent.pop(name, None)
        self.suspects.discard(name)
        self.leaving.discard(name)
        self.content.drop(name)
        for derived in (self._stages, self._trusted, self._orders):
            derived.clear()

    def drop(self, name: str, planned: bool = False) -> PeerUp | None:
        """Remove an instance, which may come back. Returns it, if it was known."""
        peer = self._peers.pop(name, None)
        if planned and peer is not None:
            self.replaced[name] = peer.epoch
        self._unload(name)
        self._slots.drop(name)
        if peer is not None:
            self.lost[name] = peer
        return peer

    def forget(self, event: PeerRemoved) -> None:
        """Remove an instance for good. One of its name that was added since has a later epoch, and stays."""
        lost = self.lost.get(event.name)
        if lost is not None and lost.epoch <= event.epoch:
            del self.lost[event.name]

    def misses(self, letter: str) -> bool:
        """True where instances with this stage were known and all of them are gone."""
        return not self.has(letter) and any(letter in peer.roles for peer in self.lost.values())

    def choose(self, letter: str, work: Work, but: str = "") -> str | None:
        """Name of the instance for stage ``letter``; None where none has both the stage and the blocks.

        ``but`` (none): an instance that is chosen only where no other is left.

        Raises ``BadChoice``, as ``enter`` does.
        """
        peers = self._offered(letter, work)
        if but:
            peers = self.stage_peers([peer for peer in peers if peer.name != but] or peers)
        return self._chosen(letter, work, peers) if peers else None

    def _offered(self, letter: str, work: Work) -> StagePeers:
        """Those that come into question: found once for all requests that fit everywhere, which most do."""
        if not (self.reserved or work.alone):
            known = self._trusted.get(letter)
            if known is None:
                known = self._trusted[letter] = self.stage_peers(self.trusted(self._stage(letter)))
            if known.all_fit(letter, work):
                return known
        return self.stage_peers(self.trusted(self.fitting(letter, work)))

    def _stage(self, letter: str) -> StagePeers:
        """All that are up and have the stage; all at all for ""."""
        known = self._stages.get(letter)
        if known is None:
            having = [peer for peer in self._peers.values() if letter in peer.roles]
            known = self._stages[letter] = StagePeers.of(having, self._slots)
        return known

    def stage_peers(self, peers: Iterable[PeerUp]) -> StagePeers:
        """Make of instances that are up, in the order of ``peers``, what is quick to choose from."""
        return peers if isinstance(peers, StagePeers) else StagePeers.of(peers, self._slots)

    @property
    def returns(self) -> bool:
        """True where an instance may send preempted requests back."""
        return self._stage("").returning

    def avoid(self, event: PeerSuspect | PeerLeaving) -> None:
        """Route past an instance that is silent or is to end, or no longer; ignored of a former life."""
        avoided, yes = (
            (self.leaving, event.leaving) if isinstance(event, PeerLeaving) else (self.suspects, event.suspected)
        )
        peer = self.peers.get(event.name)
        if peer is not None and peer.epoch == event.epoch:
            (avoided.add if yes else avoided.discard)(event.name)
            self._trusted.clear()

    def trusted(self, peers: Iterable[PeerUp]) -> list[PeerUp]:
        """Leave out those that leave or are silent, unless all are: one of these may only be slow."""
        found = list(peers)
        for avoided in filter(None, (self.leaving, self.suspects)):
            found = [peer for peer in found if peer.name not in avoided] or found
        return found

    def fitting(self, letter: str, work: Work) -> Iterator[PeerUp]:
        """Instances with the stage whose pools could ever hold the request, and that it may go to just now."""
        found = fitting(letter, work, self._peers.values())
        return found if not (self.reserved or work.alone) else self._open(found, work)

    def holding(self, letter: str, work: Work, lost: bool = False) -> Iterator[PeerUp]:
        """Those that are up, or ``lost``, whose pools could ever hold the request, reserved ones too."""
        return fitting(letter, work, (self.lost if lost else self._peers).values())

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
        return not any(self.fitting(letter, work)) and any(fitting(letter, work, known))

    def can_serve(self, letter: str, work: Work) -> bool:
        """True where the request may go to an instance with this stage now."""
        return bool(self._offered(letter, work))

    def enter(self, work: Work, but: str = "") -> str | None:
        """Name of the instance for the first stage: an encoder where there are media, unless they need not be encoded.

        ``but``: as in ``choose``.
        """
        if work.media and not work.encode_only and getattr(self.policy, "straight", False):
            peers = self._offered(PREFILL.letter, work)
            having = peers.mask
            for span in work.media:
                having = self.content.find_holders(peers, span, having)
            if having and not having & self._stage(encoder_of(work)).mask:
                return self._chosen(PREFILL.letter, work, peers.select(having))
        return self.choose(encoder_of(work) or PREFILL.letter, work, but)

    def _chosen(self, letter: str, work: Work, peers: StagePeers) -> str:
        """Ask the policy. Raises ``BadChoice`` if that fails, or names another than one of ``peers``."""
        if getattr(self.policy, "by_host", False):
            peers = self.hosts.choose(letter, peers, self._peers.values())
        try:
            if self.informed:
                picked = cast(InformedPolicy, self.policy).choose(letter, work, peers, self)
            else:
                picked = cast(SimplePolicy, self.policy).choose(letter, work, peers)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a user's policy may raise anything, and concerns this request alone
            raise BadChoice(f"the routing policy failed at stage {letter} ({describe_error(error)})") from error
        if id(picked) not in peers.ids:
            names = ", ".join(peer.name for peer in peers)
            raise BadChoice(
                f"the routing policy chose none of {names} at stage {letter}, but a {type(picked).__name__}"
            )
        if self.informed or self.counts:
            self.count(picked.name, letter, units_of(letter, work))
        return picked.name

    def count(self, name: str, letter: str, units: int) -> None:
        """Count work that was sent to an instance, until it reports."""
        sent = self._sent.setdefault(name, {})
        sent[letter] = sent.get(letter, 0) + units
        if letter in self._orders:
            self._orders[letter].changed(name)

    def least_loaded(self, letter: str, mask: int) -> int:
        """Those of a set of instances with the stage that have the fewest ``seconds``."""
        order = self._orders.get(letter)
        if order is None:
            order = LoadOrder(self._stage(letter), self._slots, lambda name: self.seconds(name, letter))
            self._orders[letter] = order
        return order.least(mask)

    def seconds(self, name: str, letter: str) -> float:
        """Predict the seconds of work at a stage of an instance: its last report, and what was sent to it since."""
        load = self.loads.get(name)
        sent = self._sent.get(name, {}).get(letter, 0)
        if load is None:
            return sent * UNKNOWN_UNIT_S
        known = load.predicted_s.get(letter, 0.0) + sent * (load.unit_s.get(letter, 0.0) or UNKNOWN_UNIT_S)
        return known if known == known else inf  # of one that says that it is no number

    def cached_tokens(self, peer: PeerUp, letter: str, work: Work) -> int:
        """Count the prompt positions and visual tokens that an instance has cached, by its last report.

        Counts those of this stage and of the stages that follow on the same instance.
        """
        return self.content.cached_tokens(peer, letter, work)

    def cached_prefix(self, peer: PeerUp, work: Work, text: Sequence[int]) -> int:
        """Count the positions of a request's text, its prompt or more, that an instance has reported as cached."""
        return self.content.cached_prefix(peer, work, text)

    def has_media(self, peer: PeerUp, work: Work) -> bool:
        """True where an instance has reported the features of all media of a request."""
        return self.content.has_media(peer, work)

    def holder(self, span: MediaSpan, but: Collection[str]) -> str:
        """An instance ``but`` these that said it has these features, a prefill instance first; "" where none did."""
        peers = self._stage("")
        others = peers.mask
        for name in but:
            others &= ~self._slots.bit(name)
        having = peers.select(self.content.find_holders(peers, span, others))
        return min(having, key=lambda peer: (not roles_of(peer.roles).prefills, peer.name)).name if having else ""

    def known(self, letter: str) -> bool:
        """True where an instance has the stage, be it up or lost."""
        return self.has(letter) or self.misses(letter)

    def has(self, letter: str) -> bool:
        return bool(self._stage(letter))
