"""Contract of every routing policy, as the function ``check_routing``, without a test framework.

Call it from your own tests: ``check_routing(MyPolicy)``. It raises ``AssertionError``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import inf
from random import Random
from typing import Any

from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import FrontendOptions
from trinity.core.instance.settings import Settings
from trinity.core.messages import IMAGE, KV, MediaSpan, PeerLoad, PeerUp, Work
from trinity.core.routing.router import Router, RoutingPolicy
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import cost_for_device
from trinity.placement import Placement
from trinity.simulation.cluster_model import SimulatedCluster
from trinity.simulation.workload import Job
from trinity.stage_kinds import all_letters, roles_of

CHOICES = 300
REQUESTS = 40
ARRIVALS_S = 0.1  # in which all requests of a run arrive, so that they overlap
MOST_EVENTS = 1_000_000  # of a run; more are a livelock
ROLE_SETS = ["".join(some) for count in (1, 2, 3) for some in combinations(all_letters(), count)]
POOLS = {IMAGE: 64, KV: 256}
MakePolicy = Callable[[], RoutingPolicy]
RoutingCheck = Callable[[MakePolicy], None]


def check_routing(make: MakePolicy) -> None:
    """Check a routing policy, made anew by ``make`` for each instance, against the contract of ``RoutingPolicy``.

    Raises ``AssertionError`` naming what broke.
    """
    for check in ROUTING_CHECKS:
        try:
            check(make)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error
        except Exception as error:
            cause = error.__cause__ or error  # the router says of any failure that it was a bad choice
            said = str(cause) if isinstance(cause, AssertionError) else f"the policy raised {cause!r}"
            raise AssertionError(f"{check.__name__}: {said}") from error


class _Recorder:
    """A policy that passes each choice on, and looks at what came back."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self.policy: Any = policy
        self.informed = bool(getattr(policy, "informed", False))
        self.straight = bool(getattr(policy, "straight", False))

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp], *router: Router) -> PeerUp:
        before = list(peers)
        chosen: PeerUp = self.policy.choose(letter, work, peers, *router)
        names = ", ".join(peer.name for peer in before)
        assert any(chosen is peer for peer in before), f"choose() returned {chosen!r:.100}, which is none of {names}"
        assert list(peers) == before, "choose() changed the list of peers, which is not its own"
        assert letter in chosen.roles, f"choose() sent stage {letter} to {chosen.name}, which has {chosen.roles}"
        return chosen


def draw_work(draw: Random, number: int) -> Work:
    """Make a request of text, or of text and an image that others have too."""
    prompt = tuple(draw.choices(range(9), k=draw.randint(4, 60)))
    media = (MediaSpan("image", 4, 0, 4, f"photo {draw.randint(0, 3)}"),) if draw.random() < 0.5 else ()
    return Work(request=str(number), prompt=prompt, media=media, max_tokens=draw.randint(1, 8))


def draw_load(draw: Random, peer: PeerUp) -> PeerLoad:
    """Make a report: anything that an instance may say, now and then less than that."""
    seconds = {letter: draw.choice([0.0, 0.5, 1e9]) for letter in peer.roles if draw.random() < 0.8}
    return PeerLoad(
        peer.name,
        peer.epoch,
        free={kind: draw.randint(0, size) for kind, size in POOLS.items() if draw.random() < 0.8},
        predicted_s=seconds,
        unit_s={letter: draw.choice([0.0, 1e-6]) for letter in seconds},
        cached={"kv": draw.randbytes(8 * draw.randint(0, 3)), "image": b""},
    )


def it_chooses_among_the_peers(make: MakePolicy) -> None:
    """Check choices while instances come, report, restart and go."""
    draw, recorder = Random(1), _Recorder(make())
    router = Router(recorder, "P3")
    for number in range(CHOICES):
        name = f"{draw.choice(ROLE_SETS)}{draw.randint(0, 2)}"
        peer = PeerUp(name, name[:-1], epoch=number, pools=POOLS, kv_block_size=4)
        if draw.random() < 0.3:
            router.drop(name)
        else:
            router.add(peer)
        for known in list(router.peers.values()) if draw.random() < 0.5 else ():
            router.take(draw_load(draw, known))
        for letter in all_letters():
            router.choose(letter, draw_work(draw, number))
        router.enter(draw_work(draw, number))


def one_peer_is_enough(make: MakePolicy) -> None:
    router = Router(_Recorder(make()))
    router.add(PeerUp("one", all_letters(), pools=POOLS))
    draw = Random(2)
    for number in range(20):
        assert router.choose(all_letters()[number % 3], draw_work(draw, number)) == "one"


def policies_of_two_instances_are_two(make: MakePolicy) -> None:
    assert make() is not make(), "each instance has a policy of its own: make a new object each time"


def every_request_is_served(make: MakePolicy) -> None:
    """Check whole runs of the real cores, in virtual time: each request ends, with all its tokens."""
    for seed, placement in enumerate(("2E2P2D", "2EP1D", "2EPD")):
        run = _prepare_run(placement, lambda: _Recorder(make()), Random(seed))
        for _ in range(MOST_EVENTS):
            if run.is_over():
                break
            run.advance()
        else:
            raise AssertionError(f"no end after {MOST_EVENTS} events")
        for number, reason in enumerate(run.reasons):
            assert reason == "length", f"request {number} ended by {reason or 'nothing'} on {placement}"


def _prepare_run(placement: str, routing: Callable[[], RoutingPolicy], draw: Random) -> SimulatedCluster:
    """Set up the cores of a placement, each with its policy, and requests at random times."""
    instances = []
    for name, roles in Placement.parse(placement).instances():
        pools = {kind: blocks for kind, blocks in POOLS.items() if kind in roles_of(roles).kinds}
        instances.append(Settings(name, roles, pools, lease_s=inf, report_s=inf))
    cluster, model = Cluster.of("H100", len(instances)), get_model_shape("llava-1.5-7b")
    return SimulatedCluster(
        instances,
        [_draw_job(draw, number) for number in range(REQUESTS)],
        cluster=cluster,
        costs=[cost_for_device(device, model, None) for device in cluster.devices],
        model=model,
        routing=routing,
        frontend=FrontendOptions(failures=NO_RECOVERY),
        interference=1.0,
        shared=True,
        record=False,
    )


def _draw_job(draw: Random, number: int) -> Job:
    work = draw_work(draw, number)
    images = tuple((span.tokens, span.content) for span in work.media)
    return Job(ARRIVALS_S * draw.random(), len(work.prompt), images, work.max_tokens)


ROUTING_CHECKS: tuple[RoutingCheck, ...] = (
    policies_of_two_instances_are_two,
    one_peer_is_enough,
    it_chooses_among_the_peers,
    every_request_is_served,
)
