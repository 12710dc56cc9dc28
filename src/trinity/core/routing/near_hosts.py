"""Near hosts: a request's next stage stays on its host, as far as each instance of that stage gets its equal share.

KV between two hosts costs a network, and features cost it too. Always to stay would leave instances without work where
a host has many that send and few that receive. So hosts take turns by weights, out of whole numbers that every
instance has alike: of S senders and R receivers, a host with s of the one and r of the other sends s * R parts and
takes r * S. It keeps the smaller of the two; what is left of its own goes to hosts that could take more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from trinity.core.messages import PeerUp
from trinity.core.routing.stage_peers import StagePeers
from trinity.stage_kinds import makers_for


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
