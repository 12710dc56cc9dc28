"""Random loads for the virtual cluster: placements, pools, contents that repeat, cancels, deadlines, faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from msgspec.structs import replace as replace_value

from support.virtual.cluster import Durations, Faults, VirtualCluster, make_settings
from trinity.core.instance.state import Settings
from trinity.core.messages import MediaSpan, Work
from trinity.core.routing.router import LeastLoaded, PrefixHits, RoundRobin, RoutingPolicy
from trinity.core.scheduler import BatchRules, Order
from trinity.core.transfers import KvMode, TransferPolicy
from trinity.core.values import blocks_for
from trinity.stage_kinds import feature_kinds, features_of

PLACEMENTS = (
    *("EPD", "2EPD", "EP+D", "ED+P", "E+P+D", "PD+E", "2E2P2D", "1E1EPD", "2ED1P", "1E2EP3D", "1E3P4D", "2EP2D"),
    *("1EPD1P", "1EPD1D", "1E1P1PD", "1EP1ED1PD", "2ED2P", "1ED2P1D", "1EP1PD", "EPD+E+P+D", "3E1PD", "1ED1EP"),
)
ORDERS: tuple[Order, ...] = ("fcfs", "sjf", "deadline")
MEDIA_BLOCK, KV_BLOCK = 4, 4


@dataclass(frozen=True)
class Linear:
    """Seconds of a step in proportion to its rows."""

    decode: float = 0.001
    prefill: float = 0.002
    media: float = 0.003

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        return 0.001 + decodes * self.decode + prefill_tokens * self.prefill + media_tokens * self.media


def random_document(draw: Random, atomic: bool) -> tuple[list[int], list[MediaSpan]]:
    """A beginning of few distinct tokens and few distinct images, so that prefixes and contents repeat."""
    prompt: list[int] = [7] * draw.choice([0, 3, 8])
    media: list[MediaSpan] = []
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        content = draw.randint(0, 3)
        tokens = 1 + 3 * content
        media.append(MediaSpan("image", tokens, len(prompt), tokens + content % 2, f"image{content}", atomic))
        prompt += [9] * (tokens + content % 2) + [draw.randint(1, 2)] * draw.choice([0, 1, 5])
    return prompt, media


def see_together(media: Sequence[MediaSpan], length: int) -> list[MediaSpan]:
    """The same images, because of which tokens see each other from the first one on: up to the last image, or all."""
    whole = length if len(media) % 2 else max((span.end for span in media), default=0)
    return [replace_value(span, whole=whole) for span in media]


def random_works(draw: Random, requests: int) -> list[Work]:
    """Requests that begin like others, or not, and have an end of their own."""
    kind = draw.random()
    documents = [random_document(draw, kind < 0.2) for _ in range(draw.choice([1, 3, requests]))]
    if kind < 0.1:
        documents = [(prompt, see_together(media, len(prompt))) for prompt, media in documents]
    works = []
    for index in range(requests):
        prompt, media = draw.choice(documents)
        tail = [draw.randint(1, 2) for _ in range(draw.choice([1, 2, 5, 9]))]
        work = Work(
            request=f"r{index}",
            prompt=(*prompt, *tail),
            media=tuple(media),
            max_tokens=draw.choice([1, 2, 5, 12]),
            stop_ids=frozenset({3}) if draw.random() < 0.2 else frozenset(),
            deadline_s=draw.uniform(0.0, 3.0) if draw.random() < 0.1 else None,
        )
        works.append(work)
    return works


def encode_alone(work: Work) -> Work:
    """The same request, of which only the features are wanted."""
    return replace_value(work, encode_only=True, prompt=(), max_tokens=1)


def random_rules(draw: Random) -> BatchRules:
    rules = BatchRules(
        token_budget=draw.choice([1, 4, 16, 64]),
        image_budget=draw.choice([1, 1, 8, 100]),
        order=draw.choice(ORDERS),
        chunked=draw.random() < 0.8,
        limit_encodes=draw.random() < 0.8,
        limit_decodes=draw.random() < 0.8,
    )
    if draw.random() < 0.25:
        return replace(rules, policy="time", cost=Linear(), limit_s=draw.choice([0.0, 0.02, 0.1]))
    return replace(rules, policy="prefill_first") if draw.random() < 0.3 else rules


def largest_need(works: list[Work]) -> dict[str, int]:
    """Blocks of each kind that the largest of these requests has to have."""
    kv = max(blocks_for(len(work.prompt) + work.max_tokens - 1, KV_BLOCK) for work in works)
    return {
        **{kind: max(_count_features(work, kind) for work in works) or 1 for kind in sorted(feature_kinds())},
        "kv": kv,
    }


def _count_features(work: Work, kind: str) -> int:
    return sum(blocks_for(span.tokens, MEDIA_BLOCK) for span in work.media if features_of(span.kind) == kind)


def random_patience(draw: Random) -> dict[str, float]:
    """Leases for ever, or leases that are renewed in time, or such as run out while all is well."""
    if draw.random() < 0.6:
        return {}
    lease = draw.choice([0.3, 1.0, 8.0])
    return {"lease_s": lease, "report_s": draw.choice([0.05, 0.5]), "heartbeat_s": draw.choice([0.2, 1.0])}


def random_silence(draw: Random, cluster: VirtualCluster) -> None:
    """Instances stand still for a while, and find afterwards what has come."""
    for name in draw.sample(list(cluster.cores), draw.randint(0, min(3, len(cluster.cores)))):
        for _ in range(draw.randint(1, 2)):
            cluster.freeze(name, draw.uniform(0.0, 2.0), draw.choice([0.1, 1.0, 20.0]))


def random_settings(draw: Random, placement: str, works: list[Work], leases: dict[str, float]) -> list[Settings]:
    """Pools that just hold the largest request, or more; now and then one instance's do not."""
    need = largest_need(works)
    slack = draw.choice([1.0, 1.0, 1.3, 2.0, 6.0])
    settings = make_settings(
        placement,
        {kind: int(count * slack) for kind, count in need.items()},
        rules=random_rules(draw),
        lanes=draw.choice([("joint",), ("vision", "language")]),
        image_block_size=MEDIA_BLOCK,
        kv_block_size=KV_BLOCK,
        image_cache=draw.random() < 0.8,
        prefix_cache=draw.random() < 0.8,
        **leases,
    )
    if draw.random() < 0.2:
        at = draw.randrange(len(settings))
        small = {kind: max(1, int(count * 0.6)) for kind, count in settings[at].pools.items()}
        settings[at] = replace(settings[at], pools=small)
    return settings


def random_durations(draw: Random) -> Durations:
    """Slow steps, slow pulls, slow channels, all or some of them; some channels much slower than others."""
    message, step, pull = (draw.choice([0.0, 0.001, 0.05, 0.5]) for _ in range(3))
    slowness: dict[tuple[str, str], float] = {}

    def channel(each: Random, source: str, target: str) -> float:
        if (source, target) not in slowness:
            slowness[source, target] = each.choice([0.0, 0.1, 1.0, 1.0, 5.0])
        return each.uniform(0.0, message) * slowness[source, target]

    return Durations(
        channel,
        lambda each, instance, running: each.uniform(0.0, step),
        lambda each, running: each.uniform(0.0, pull),
    )


def random_faults(draw: Random) -> Faults:
    """None, a few rows or pulls, or those of the encoder alone, which others may be waiting for."""
    if draw.random() < 0.25:
        return Faults(
            lambda each, name, step, request: (
                any(row.request == request for row in step.encodes) and each.random() < 0.3
            )
        )
    return Faults.at_random(draw.choice([0.0, 0.0, 0.01, 0.1]), draw.choice([0.0, 0.0, 0.1, 0.5]))


def random_transfers(draw: Random) -> TransferPolicy:
    """From a generator of its own: the seeds of the rest keep their meaning."""
    prefetch, early = draw.choice([(True, True), (True, True), (True, False), (False, True)])
    kv: list[KvMode] = ["off", "layer", "grouped", "auto"]
    return TransferPolicy(prefetch, early, draw.choice(kv))


def random_cluster(
    seed: int,
    placement: str | None = None,
    requests: int | None = None,
    depth: int | None = None,
    encode_only: float = 0.0,
) -> VirtualCluster:
    """A loaded cluster that has not run yet: everything in it follows from the seed. ``depth`` None: 1, 2 or both.

    encode_only: share of the requests with media that want nothing but features.
    """
    draw = Random(seed)
    placement = placement or draw.choice(PLACEMENTS)
    works = random_works(draw, requests or draw.choice([2, 5, 9, 14]))
    sizes = Random(-1 - seed)
    transfers, layers = random_transfers(sizes), sizes.choice([1, 2, 3, 5])
    depths = [depth] if depth else sizes.choice([[1], [2], [2], [1, 2]])
    aside = Random(seed + 1_000_000_007)
    leases = random_patience(aside)
    policies: list[Callable[[], RoutingPolicy]] = [RoundRobin, LeastLoaded, PrefixHits, PrefixHits]
    routing = aside.choice(policies)
    settings = random_settings(draw, placement, works, leases)
    cluster = VirtualCluster(
        [replace(each, transfers=transfers, layers=layers, depth=sizes.choice(depths)) for each in settings],
        routing=routing if leases else RoundRobin,
        durations=random_durations(draw),
        faults=random_faults(draw),
        max_waiting=draw.choice([1024, 1024, 1024, 3]),
        seed=seed,
    )
    hurry, cancels, patience = draw.choice([0.0, 0.5, 2.0]), draw.choice([0.0, 0.3, 0.8]), draw.choice([0.05, 1.0])
    spread = aside.choice([0.0, 2.0, 6.0]) if leases else 0.0  # what is cached must be known for it to be found
    some = Random(seed + 7_000_000_003)
    for work in works:
        at = draw.uniform(0.0, hurry) + aside.uniform(0.0, spread)
        cluster.submit(encode_alone(work) if work.media and some.random() < encode_only else work, at)
        if draw.random() < cancels:
            reason = draw.choice(["cancelled", "cancelled", "stop"])
            cluster.abort(work.request, at + draw.uniform(0.0, patience), reason)
    if leases:
        random_silence(aside, cluster)
    return cluster


def roomy_cluster(seed: int) -> VirtualCluster:
    """One EPD instance with blocks for all: its steps encode, prefill and decode at once, as tight pools rarely let."""
    draw = Random(seed + 5_000_000_029)
    works = random_works(draw, 9)
    settings = make_settings(
        "EPD",
        {kind: count * len(works) for kind, count in largest_need(works).items()},
        rules=BatchRules(token_budget=draw.choice([16, 32]), image_budget=1),
        image_block_size=MEDIA_BLOCK,
        kv_block_size=KV_BLOCK,
        depth=draw.choice([1, 2]),
    )
    cluster = VirtualCluster(settings, durations=Durations(step=lambda each, *_: each.uniform(0.0, 0.1)), seed=seed)
    for work in works:
        cluster.submit(work, draw.uniform(0.0, 0.5))
    return cluster


def small_prefill(settings: list[Settings], works: list[Work], more: int = 0) -> list[Settings]:
    """With KV blocks for the largest prompt, and so many more, where requests are prefilled and do not decode."""
    blocks = max(blocks_for(len(work.prompt), KV_BLOCK) for work in works) + more
    return [
        each if "D" in each.roles or "P" not in each.roles else replace(each, pools=each.pools | {"kv": blocks})
        for each in settings
    ]


def small_targets(settings: list[Settings], works: list[Work], slack: float) -> list[Settings]:
    """With blocks for one or two requests where offers come to, and for nearly all where they come from."""
    found, need = [], largest_need(works)
    for each in settings:
        targets = {"image": "E" not in each.roles, "kv": "P" not in each.roles}
        sizes = {kind: int(need[kind] * (slack if targets[kind] else 6.0)) for kind in each.pools}
        found.append(replace(each, pools=sizes))
    return found


def pressed_cluster(seed: int, placement: str | None = None) -> VirtualCluster:
    """Optimistic reservation where it is put to the test: long outputs, pools of one to three requests, many cancels.

    Every request has its own seeded lengths. Instances that stand still, faults and short leases come now and then.
    """
    draw = Random(seed + 2_000_000_011)
    placement = placement or draw.choice(PLACEMENTS)
    works = [
        replace_value(work, max_tokens=draw.choice([1, 4, 20, 40, 60]), stop_ids=frozenset(), deadline_s=None)
        for work in random_works(draw, draw.choice([3, 6, 12]))
    ]
    leases = random_patience(draw)
    slack = draw.choice([1.0, 1.0, 1.5, 2.0, 3.0])
    settings = make_settings(
        placement,
        {kind: int(count * slack) for kind, count in largest_need(works).items()},
        rules=random_rules(draw),
        lanes=draw.choice([("joint",), ("vision", "language")]),
        image_block_size=MEDIA_BLOCK,
        kv_block_size=KV_BLOCK,
        image_cache=draw.random() < 0.7,
        prefix_cache=draw.random() < 0.7,
        transfers=random_transfers(draw),
        layers=draw.choice([1, 3]),
        depth=draw.choice([1, 2]),
        reservation="optimistic",
        **leases,
    )
    aside = Random(seed + 3_000_000_019)
    if aside.random() < 0.3:  # where nobody decodes: what the prompts need, and no outputs behind them
        settings = small_prefill(settings, works, aside.choice([0, 0, 2]))
    calm = draw.random() < 0.7
    cluster = VirtualCluster(
        settings,
        durations=random_durations(draw),
        faults=Faults() if calm else random_faults(draw),
        seed=seed,
    )
    cancels = draw.choice([0.0, 0.0, 0.3, 0.6])
    for work in works:
        at = draw.uniform(0.0, 1.0)
        cluster.submit(work, at)
        if draw.random() < cancels:
            cluster.abort(work.request, at + draw.uniform(0.0, 5.0), draw.choice(["cancelled", "stop"]))
    if leases and not calm:
        random_silence(draw, cluster)
    return cluster
