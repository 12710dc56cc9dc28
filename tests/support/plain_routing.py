"""Routing by its rules alone, every instance looked at for every choice: what the quick way must choose too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from trinity.core.messages import IMAGE, KV, MediaSpan, PeerLoad, PeerUp, Work
from trinity.core.prefix_cache import DIGEST, media_keys, prefix_keys
from trinity.core.routing.router import weigh_hosts
from trinity.core.routing.stage_peers import needs

FOLLOWS = {"E": "EPD", "P": "PD", "D": "D"}


class PlainRouter:
    """Keeps what was said, and nothing that follows from it but turns."""

    def __init__(self, policy: str, first: int = 0, host: str = "") -> None:
        self.policy, self.first, self.host = policy, first, host
        self.peers: dict[str, PeerUp] = {}
        self.loads: dict[str, PeerLoad] = {}
        self.sent: Counter[tuple[str, str]] = Counter()
        self.leaving: set[str] = set()
        self.silent: set[str] = set()
        self.reserved: dict[str, int] = {}
        self.turns: Counter[tuple[str, str]] = Counter()
        self.shares: dict[str, dict[str, int]] = {}
        self.credits: dict[str, Counter[str]] = {}

    def forget(self, name: str) -> None:
        self.loads.pop(name, None)
        self.leaving.discard(name)
        self.silent.discard(name)
        for letter in "EPD":
            self.sent.pop((name, letter), None)

    def take(self, load: PeerLoad) -> None:
        self.loads[load.name] = load
        for letter in "EPD":
            self.sent.pop((load.name, letter), None)

    def offered(self, letter: str, work: Work) -> list[PeerUp]:
        found = []
        for peer in self.peers.values():
            kept = peer.epoch >= self.reserved.get(peer.name, peer.epoch + 1)
            if letter not in peer.roles or kept != any(each in peer.roles for each in work.alone):
                continue
            need = needs(letter, work, peer.roles, peer.image_block_size, peer.kv_block_size)
            if all(count <= peer.pools.get(kind, 0) for kind, count in need.items()):
                found.append(peer)
        for passed in (self.leaving, self.silent):
            found = [peer for peer in found if peer.name not in passed] or found
        return found

    def enter(self, work: Work) -> str | None:
        if work.media and not work.encode_only and self.policy == "prefix_hits":
            having = [peer for peer in self.offered("P", work) if all(self.has(peer, each) for each in work.media)]
            if having and all("E" not in peer.roles for peer in having):
                return self.pick("P", work, having)
        return self.choose("E" if work.media else "P", work)

    def choose(self, letter: str, work: Work) -> str | None:
        peers = self.offered(letter, work)
        return self.pick(letter, work, peers) if peers else None

    def pick(self, letter: str, work: Work, peers: list[PeerUp]) -> str:
        if self.policy == "round_robin":
            return self.in_turn(letter, self.on_a_host(letter, peers)).name
        if self.policy == "prefix_hits":
            saved = {peer.name: self.cached_tokens(peer, letter, work) for peer in peers}
            peers = [peer for peer in peers if saved[peer.name] == max(saved.values())]
        seconds = {peer.name: self.seconds(peer.name, letter) for peer in peers}
        peers = [peer for peer in peers if seconds[peer.name] == min(seconds.values())]
        chosen = self.in_turn(letter, [peer for peer in peers if self.host and peer.host == self.host] or peers)
        units = {"E": sum(span.tokens for span in work.media), "P": len(work.prompt), "D": 1}
        self.sent[chosen.name, letter] += units[letter]
        return chosen.name

    def in_turn(self, letter: str, peers: Sequence[PeerUp]) -> PeerUp:
        hosts = {peer.host for peer in peers}
        place = letter, hosts.pop() if len(hosts) == 1 else ""
        turn = self.first + self.turns[place]
        self.turns[place] += 1
        return peers[turn % len(peers)]

    def on_a_host(self, letter: str, peers: list[PeerUp]) -> list[PeerUp]:
        away = any(peer.host != self.host for peer in peers)
        weights = weigh_hosts(self.host, letter, peers, self.peers.values()) if away else {}
        if not weights:
            return peers
        if self.shares.get(letter) != weights:
            self.shares[letter], self.credits[letter] = weights, Counter()
        credits = self.credits[letter]
        credits.update(weights)
        turn = max(weights, key=lambda host: credits[host])
        credits[turn] -= sum(weights.values())
        return [peer for peer in peers if peer.host == turn]

    def seconds(self, name: str, letter: str) -> float:
        load = self.loads.get(name, PeerLoad(name))
        unit = load.unit_s.get(letter, 0.0) or 1e-9
        return load.predicted_s.get(letter, 0.0) + self.sent[name, letter] * unit

    def keys(self, name: str, kind: str) -> set[bytes]:
        said = self.loads[name].cached.get(kind, b"") if name in self.loads else b""
        return {said[at : at + DIGEST] for at in range(0, len(said), DIGEST)}

    def has(self, peer: PeerUp, span: MediaSpan) -> bool:
        known = self.keys(peer.name, IMAGE)
        return bool(known) and {key[:DIGEST] for key in media_keys(span, peer.image_block_size)} <= known

    def cached_tokens(self, peer: PeerUp, letter: str, work: Work) -> int:
        stages = letter
        for following in FOLLOWS[letter][1:] if not work.encode_only else "":
            if following not in peer.roles:
                break
            stages += following
        spared = self.cached_prefix(peer, work, work.prompt) if set(stages) & {"P", "D"} else 0
        if set(stages) & {"E", "P"}:
            spared += sum(span.tokens for span in work.media if self.has(peer, span))
        return spared

    def cached_prefix(self, peer: PeerUp, work: Work, text: Sequence[int]) -> int:
        spared, known = 0, self.keys(peer.name, KV)
        for key in prefix_keys(text, work.media, peer.kv_block_size, work.salt):
            if key[:DIGEST] not in known:
                break
            spared += peer.kv_block_size
        return spared

    def holder(self, span: MediaSpan, but: str) -> str:
        having = [peer for peer in self.peers.values() if peer.name != but and self.has(peer, span)]
        having.sort(key=lambda peer: ("P" not in peer.roles, peer.name))
        return having[0].name if having else ""
