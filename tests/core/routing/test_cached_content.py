"""Who has a key is told by one look-up, and is what each said last."""

from __future__ import annotations

from random import Random

from support.core_tables import holding, peer_up, work
from trinity.core import prefix_cache
from trinity.core.messages import IMAGE, KV, PeerLoad
from trinity.core.prefix_cache import DIGEST, each_prefix_key, prefix_keys
from trinity.core.routing import stage_peers
from trinity.core.routing.router import PrefixHits, Router
from trinity.core.routing.stage_peers import CachedContent

KEYS = [bytes([number]) * 16 for number in range(6)]


def say(*keys: bytes) -> bytes:
    return b"".join(key[:DIGEST] for key in keys)


def test_holders_are_those_that_said_it_last() -> None:
    draw, content = Random(3), CachedContent()
    said: dict[int, set[bytes]] = {1 << at: set() for at in range(8)}
    for _ in range(200):
        bit = draw.choice(list(said))
        said[bit] = set(draw.sample(KEYS, draw.randrange(len(KEYS))))
        content.take(bit, KV, say(*said[bit])) if said[bit] or draw.random() < 0.5 else content.drop(bit)
        asked, among = draw.sample(KEYS, draw.randrange(4)), draw.randrange(1 << 8)
        having = sum(each for each, keys in said.items() if keys and set(asked) <= keys)
        assert content.find_holders(KV, asked, among) == having & among
        assert content.find_holders(IMAGE, asked, among) == 0


def test_a_set_is_split_where_keys_are_lacking() -> None:
    content = CachedContent()
    content.take(1, KV, say(*KEYS[:3]))
    content.take(2, KV, say(KEYS[0], KEYS[2]))
    content.take(4, KV, say(*KEYS[1:]))
    assert list(content.split(KV, KEYS[:4], 0b1111)) == [(0, 0b1100), (1, 0b10), (3, 0b1)]
    assert list(content.split(KV, KEYS[:2], 0b1)) == [(2, 0b1)]
    assert list(content.split(KV, [], 0b11)) == [(0, 0b11)]
    assert list(content.split(IMAGE, KEYS, 0b11)) == [(0, 0b11)]


def test_what_is_gone_leaves_nothing_behind() -> None:
    content = CachedContent()
    for bit in (1, 2):
        content.take(bit, KV, say(*KEYS))
    content.drop(1)
    assert content.find_holders(KV, KEYS, 0b11) == 2
    content.take(2, KV, b"")
    content.drop(2)
    assert not content._holders[KV]
    assert not content._said


def test_a_key_that_was_cut_is_none() -> None:
    content = CachedContent()
    content.take(1, KV, say(KEYS[0]) + KEYS[1][:5])
    assert content.find_holders(KV, KEYS[:1], 1) == 1
    assert content.find_holders(KV, KEYS[:2], 1) == 0


def test_keys_are_made_once_for_all_instances_and_no_further_than_somebody_has_them(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    asked = work("r", 40)
    router = Router(PrefixHits())
    for number in range(30):
        router.add(peer_up(f"PD{number}"))
        router.take(holding(f"PD{number}", work("r", 12), KV))
    made = list[bytes]()

    def count(*given: object) -> object:
        for key in each_prefix_key(*given):  # type: ignore[arg-type]
            made.append(key)
            yield key

    monkeypatch.setattr(stage_peers, "each_prefix_key", count)
    assert router.choose("P", asked) == "PD0"
    assert made == prefix_keys(asked.prompt, (), 4)[:4], "three that all have, and the first that nobody has"


def test_prefix_keys_are_each_of_them() -> None:
    asked = work("r", 3, "cat*4", 9)
    assert prefix_keys(asked.prompt, asked.media, 4, "s") == list(
        prefix_cache.each_prefix_key(asked.prompt, asked.media, 4, "s")
    )
    assert len(prefix_keys(asked.prompt, asked.media, 4)) == 4


def test_a_restarted_instance_has_nothing_until_it_reports() -> None:
    asked = work("r", 8)
    router = Router(PrefixHits())
    router.add(peer_up("P0"))
    router.take(holding("P0", asked, KV))
    assert router.cached_tokens(peer_up("P0"), "P", asked) == 8
    router.add(peer_up("P0"))
    assert router.cached_tokens(peer_up("P0"), "P", asked) == 0
    router.take(PeerLoad("P0", cached={KV: say(*prefix_keys(asked.prompt, (), 4)[:1])}))
    assert router.cached_tokens(peer_up("P0"), "P", asked) == 4
    assert router.cached_tokens(peer_up("P7"), "P", asked) == 0
