"""Whatever happened before, the quick way chooses what the rules say, looked up instance by instance."""

from __future__ import annotations

import sys
from random import Random
from types import FrameType

import pytest

from support.core_tables import peer_up, work
from support.plain_routing import PlainRouter
from trinity.core.messages import IMAGE, KV, MediaSpan, PeerLeaving, PeerLoad, PeerReserved, PeerSuspect, PeerUp, Work
from trinity.core.prefix_cache import DIGEST, media_keys, prefix_keys
from trinity.core.routing.router import Router, number_of, routing_policy

POLICIES = ("round_robin", "least_loaded", "prefix_hits")
ROLES = ("E", "P", "D", "EP", "PD", "ED", "EPD")
STEPS, CHOICES = 60, 4


class Both:
    """A router and the rules beside it, which hear and are asked the same."""

    def __init__(self, policy: str, own: str, host: str, draw: Random, most: int) -> None:
        self.quick = Router(routing_policy(policy), own, host)
        self.plain = PlainRouter(policy, number_of(own), host)
        self.draw, self.most, self.epoch = draw, most, 0
        self.hosts = draw.choice((("",), ("", "a"), ("a", "b", "c")))
        self.even = draw.random() < 0.5  # pools and blocks are the same everywhere

    def step(self) -> None:
        draw, names = self.draw, list(self.plain.peers)
        event = draw.choice(("up", "report", "report", "report", "down", "silent", "leaving", "reserved"))
        if event == "up" or not names:
            self.come(f"{draw.choice(ROLES)}{draw.randrange(self.most)}")
            return
        name = draw.choice(names)
        getattr(self, event)(name, self.plain.peers[name].epoch)

    def come(self, name: str) -> None:
        draw, self.epoch = self.draw, self.epoch + 1
        pools = {"image": 40, "kv": 60} if self.even else {"image": draw.choice((2, 40)), "kv": draw.choice((3, 60))}
        blocks = (4, 4) if self.even else draw.choice(((4, 4), (6, 8)))
        peer = PeerUp(name, name.rstrip("0123456789"), self.epoch, pools, *blocks, host=draw.choice(self.hosts))
        self.quick.add(peer)
        self.plain.peers[name] = peer
        self.plain.forget(name)

    def report(self, name: str, epoch: int) -> None:
        draw = self.draw
        seen = [draw_work(draw) for _ in range(draw.randrange(5))]
        images = [key for each in seen for span in each.media for key in media_keys(span, draw.choice((4, 6)))]
        prompts = [key for each in seen for key in prefix_keys(each.prompt, each.media, draw.choice((4, 8)))]
        cached = {kind: b"".join(key[:DIGEST] for key in keys) for kind, keys in ((IMAGE, images), (KV, prompts))}
        letters = self.plain.peers[name].roles
        load = PeerLoad(
            name,
            epoch,
            predicted_s={letter: draw.choice((0.0, 0.5, 1.0)) for letter in letters if draw.random() < 0.8},
            unit_s={letter: draw.choice((0.0, 0.01)) for letter in letters},
            cached=cached,
        )
        self.quick.take(load)
        self.plain.take(load)

    def down(self, name: str, _: int) -> None:
        self.quick.drop(name)
        del self.plain.peers[name]
        self.plain.forget(name)

    def silent(self, name: str, epoch: int) -> None:
        suspected = self.draw.random() < 0.6
        self.quick.avoid(PeerSuspect(name, epoch, suspected))
        (self.plain.silent.add if suspected else self.plain.silent.discard)(name)

    def leaving(self, name: str, epoch: int) -> None:
        leaving = self.draw.random() < 0.6
        self.quick.avoid(PeerLeaving(name, epoch, leaving))
        (self.plain.leaving.add if leaving else self.plain.leaving.discard)(name)

    def reserved(self, name: str, epoch: int) -> None:
        kept = self.draw.random() < 0.3
        self.quick.reserve(PeerReserved(name, epoch, kept, 0))
        if kept:
            self.plain.reserved[name] = epoch
        else:
            self.plain.reserved.pop(name, None)

    def compare(self) -> None:
        draw, asked = self.draw, draw_work(self.draw)
        letter = draw.choice("EPD" if asked.media else "PD")
        assert self.quick.can_serve(letter, asked) == bool(self.plain.offered(letter, asked))
        assert self.quick.choose(letter, asked) == self.plain.choose(letter, asked)
        assert self.quick.enter(asked) == self.plain.enter(asked)
        for name, peer in self.plain.peers.items():
            assert self.quick.cached_tokens(peer, letter, asked) == self.plain.cached_tokens(peer, letter, asked)
            text = (*asked.prompt, 0, 1)
            assert self.quick.cached_prefix(peer, asked, text) == self.plain.cached_prefix(peer, asked, text)
            assert self.quick.has_media(peer, asked) == all(self.plain.has(peer, span) for span in asked.media)
            assert self.quick.content.has_any(name, KV) == bool(self.plain.keys(name, KV))
            assert self.quick.seconds(name, letter) == self.plain.seconds(name, letter)
        for span in asked.media:
            but = draw.choice([*self.plain.peers, ""])
            assert self.quick.holder(span, (but,)) == self.plain.holder(span, but)


def draw_work(draw: Random) -> Work:
    media, prompt = [], list[int]()
    for _ in range(draw.randrange(3)):
        tokens = draw.choice((4, 9))
        media.append(MediaSpan("image", tokens, len(prompt), tokens, f"photo {draw.randrange(3)}"))
        prompt += [0] * tokens
    prompt += [draw.randrange(2)] * draw.choice((3, 8, 17, 40))
    return Work(
        request="r",
        prompt=tuple(prompt),
        media=tuple(media),
        max_tokens=draw.randrange(1, 40),
        alone=draw.choice(("", "", "", "", "P")),
        salt=draw.choice(("", "", "s")),
        encode_only=bool(media) and draw.random() < 0.1,
    )


def compare_runs(policy: str, most: int, seeds: range) -> None:
    """Up to ``most`` instances of each roles, on up to three hosts, come, report, fall silent, are reserved and go."""
    for seed in seeds:
        draw = Random(f"{policy} {most} {seed}")
        both = Both(policy, draw.choice(("", "P3", "E1")), draw.choice(("", "a")), draw, most)
        for _ in range(most):
            both.come(f"{draw.choice(ROLES)}{draw.randrange(most)}")
        for _ in range(STEPS):
            both.step()
            for _ in range(CHOICES):
                both.compare()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_quick_way_chooses_what_the_rules_say(policy: str) -> None:
    compare_runs(policy, 2, range(3))
    compare_runs(policy, 12, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_in_hundreds_of_histories_too(policy: str) -> None:
    compare_runs(policy, 3, range(100, 250))
    compare_runs(policy, 12, range(100, 140))


@pytest.mark.parametrize("policy", POLICIES)
def test_after_hundreds_of_lives_choices_are_still_the_same(policy: str) -> None:
    """Numbers of instances that are gone are given up now and then, with what is known by these numbers."""
    both = Both(policy, "", "", Random(policy), 3)
    for life in range(400):
        both.come(f"PD{life % 5}")
        both.report(f"PD{life % 5}", both.epoch)
        if life % 3 == 0:
            both.down(f"PD{life % 5}", 0)
        both.compare()


def count_lines(router: Router, asked: Work) -> int:
    """Lines of the product that run for one choice, each turn of a loop again."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal lines
        if "trinity" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        assert router.enter(asked) is not None
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("policy", [*POLICIES, "random", "two_choices"])
@pytest.mark.parametrize("image", [False, True])
def test_a_choice_among_many_does_not_look_at_each(policy: str, image: bool) -> None:
    """A few steps more find the n-th of a set by halves; what a scan would take are hundreds."""
    counted = []
    for size in (8, 512):
        router = Router(routing_policy(policy))
        for number in range(size):
            name = f"{('E', 'PD', 'PD', 'PD')[number % 4]}{number}"
            router.add(PeerUp(name, name.rstrip("0123456789"), 0, {"image": 40, "kv": 60}, 4, 4, host=str(number // 8)))
            router.take(PeerLoad(name, predicted_s=dict.fromkeys("EPD", number / 7), cached={KV: bytes(8)}))
        asked = work("r", 9, "cat*4") if image else work("r", 9)
        router.enter(asked)  # what is found once
        router.take(PeerLoad("PD1", predicted_s={"P": 0.1}))
        counted.append(count_lines(router, asked))
    assert counted[1] <= counted[0] + 40, counted


def test_what_is_offered_is_found_anew_only_after_a_change() -> None:
    router = Router(routing_policy("least_loaded"))
    for name in ("P0", "P1", "D0"):
        router.add(peer_up(name))
    asked, large = work("r", 9), work("large", 395)
    known = router._offered("P", asked)
    router.take(PeerLoad("P0"))
    assert router._offered("P", work("other", 20)) is known
    assert router._offered("P", large) is known
    assert router._stage("P") is router._stage("P")
    router.add(peer_up("P2", kv=9))
    assert [peer.name for peer in router._offered("P", asked)] == ["P0", "P1", "P2"]
    assert [peer.name for peer in router._offered("P", large)] == ["P0", "P1"]
    router.avoid(PeerSuspect("P1", 0, True))
    assert [peer.name for peer in router._offered("P", asked)] == ["P0", "P2"]
    router.reserve(PeerReserved("P0", 0, True))
    assert [peer.name for peer in router._offered("P", asked)] == ["P2"]
    router.drop("P2")
    assert [peer.name for peer in router._offered("P", asked)] == ["P1"], "silent, but none other is open"
