"""Instances that switch roles while requests run: every pair of roles, in threads and processes; kills; bad input."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from PIL import Image

import trinity
from e2e.test_recovered import PHOTOS, greedy, wanted
from support.checkpoint_files import checkpoint
from support.emulated_pipelines import LIVENESS_S, MODEL, asked, right
from support.pipeline_options import pipeline_options
from support.shared_launcher import sharing
from trinity import FailurePolicy
from trinity.core.role_changes import Switch
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ChangeRefused, ConfigError, PlacementError, UnknownName
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.process_identity import read_start
from trinity.remote.supervision.supply import InstanceProcess
from trinity.request import Request, Sampling

MANY = FailurePolicy(recoveries=9)
POOLS = {"image": 24, "kv": 512}
PAIRS = [(one, other) for one in "EPD" for other in "EPD" if one != other]


@pytest.fixture(autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    wanted()  # it takes seconds to load, which is not for an event loop
    with sharing(torch_launcher):
        yield


@asynccontextmanager
async def real(placement: str, hosting: str, **named: Any) -> AsyncIterator[Pipeline]:
    settings: dict[str, Any] = {"dtype": "float32", "hosting": hosting, "pools": POOLS, **named}
    async with Pipeline(checkpoint("llava"), placement, **pipeline_options(settings)) as pipe:
        yield pipe


@asynccontextmanager
async def emulated(placement: str, hosting: str = "process", **named: Any) -> AsyncIterator[Pipeline]:
    options: dict[str, Any] = {"pools": {"image": 12, "kv": 400}, "hosting": hosting, "failures": MANY, **named}
    async with Pipeline(MODEL, placement, **pipeline_options(options)) as pipe:
        yield pipe


async def until_tokens(pipe: Pipeline, count: int) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while len(pipe.streams) < 3 or any(each.token_count < count for each in pipe.streams):
            await asyncio.sleep(0.002)


async def until_decoding(pipe: Pipeline) -> None:
    """Until a request is at D1."""
    async with asyncio.timeout(LIVENESS_S):
        while not any(pipe._frontend.find_place(each) == "D1" for each in pipe._frontend.core.entries):
            await asyncio.sleep(0)


Asked = tuple[Any, list[int]]  # a request, and its tokens


@asynccontextmanager
async def asking(pipe: Pipeline, makes: Sequence[Callable[[], Asked]]) -> AsyncIterator[list[int]]:
    """Ask each of these again and again, and compare every output; yield how many of each have ended."""
    ended, going = [0] * len(makes), True

    async def ask(number: int) -> None:
        while going:
            request, expected = makes[number]()
            assert (await pipe.complete(request)).token_ids == expected
            ended[number] += 1

    clients = [asyncio.ensure_future(ask(number)) for number in range(len(makes))]
    try:
        yield ended
    finally:
        going = False
        await asyncio.wait_for(asyncio.gather(*clients), LIVENESS_S)


def with_tokens(request: EmulatedRequest) -> Asked:
    return request, right(request)


def one_asked(number: int) -> Asked:
    return with_tokens(asked()[number])


def one_long() -> Asked:
    """A decode that is long: of several there is always one at each of two decoders."""
    return with_tokens(EmulatedRequest(text_tokens=20, max_tokens=300))


LONG: list[Callable[[], Asked]] = [one_long] * 6
MIXED: list[Callable[[], Asked]] = [*(partial(one_asked, number) for number in range(6)), *LONG]


def sampled() -> list[Request]:
    """Requests that are sampled with a penalty and log-probabilities, and that follow a pattern."""
    way = Sampling(temperature=0.9, seed=1, repetition_penalty=1.1, logprobs=1, ignore_eos=True)
    kept = Sampling(temperature=0.8, seed=2, structured=trinity.Structured(regex="(yes|no)( and (yes|no)){80}"))
    return [Request("<image> Go on.", images=PHOTOS[:1], max_tokens=200, sampling=each) for each in (way, kept)]


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize(("one", "other", "drain_s"), [
    pytest.param(*pair, drain_s, id="-".join((*pair, "drained" if drain_s else "cut")), marks=rare)
    for number, pair in enumerate(PAIRS)
    for drain_s, turn in ((LIVENESS_S, 0), (0.0, 1))
    for rare in [[pytest.mark.slow] * (number % 6 != turn)]
])  # fmt: skip
async def test_every_pair_of_roles_in_threads(one: str, other: str, drain_s: float) -> None:
    """Amid decoding: requests end there, or go on elsewhere with the tokens that they have."""
    placement = "".join(f"{2 if letter == one else 1}{letter}" for letter in "EPD")
    async with real(placement, "thread") as pipe:
        alone = [await pipe.complete(each) for each in sampled()]
        serving = [asyncio.ensure_future(pipe.complete(each)) for each in (*greedy(), *sampled())]
        await until_tokens(pipe, 3)
        done = await pipe.switch(f"{one}1", other, drain_s=drain_s)
        outputs = await asyncio.wait_for(asyncio.gather(*serving), LIVENESS_S)
        assert [each.token_ids for each in outputs[:3]] == wanted()
        assert [each.token_ids for each in outputs[3:]] == [each.token_ids for each in alone]
        assert (done.name, done.former, done.roles) == (f"{one}1", one, other)
        assert str(pipe.placement) == "".join(f"{1 + (letter == other)}{letter}" for letter in "EPD")
        more = [*greedy(), *greedy(), *(Request("<image>?", images=[each], max_tokens=4) for each in unseen())]
        again = await asyncio.wait_for(asyncio.gather(*map(pipe.complete, more)), LIVENESS_S)
        assert [each.token_ids for each in again[:6]] == wanted() * 2
        assert pipe.hosts[f"{one}1"].steps, "it serves in its new role"
        assert {title.split()[0] for title in switches_of(pipe)} == {"offload", "migration", "onload"}


def unseen() -> list[Image.Image]:
    """Images that no cache has."""
    return [Image.new("RGB", (64, 64), (20 * number, 0, 0)) for number in range(6)]


def switches_of(pipe: Pipeline) -> list[str]:
    return [each.name for each in pipe.timeline.slices() if each.lane == "switch"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("one", "other"), [("D", "P"), *(
    pytest.param(*each, marks=pytest.mark.slow) for each in PAIRS if each != ("D", "P")
)])  # fmt: skip
async def test_every_pair_of_roles_between_processes(one: str, other: str) -> None:
    placement = "".join(f"{2 if letter == one else 1}{letter}" for letter in "EPD")
    async with real(placement, "process", failures=MANY) as pipe:
        alone = [(await pipe.complete(each)).token_ids for each in sampled()]
        expected = [*wanted(), *alone]
        make = [lambda number=number: ([*greedy(), *sampled()][number], expected[number]) for number in range(5)]
        async with asking(pipe, make):
            await until_tokens(pipe, 3)
            await pipe.switch(f"{one}1", other, drain_s=0.05)
            await pipe.switch(f"{one}1", one)
        assert pipe.health[f"{one}1"].losses == 0, "none of it was a loss"


@pytest.mark.parametrize("hosting", ["thread", "process"])
async def test_one_that_decodes_again_gets_blocks_in_its_new_pools(hosting: str) -> None:
    """On threads what P had attached to for its former life wrote into the pools of that one."""
    async with emulated("1E1P2D", hosting) as pipe:
        for roles in ("", "E", "D"):
            if roles:
                await asyncio.wait_for(pipe.switch("D1", roles), LIVENESS_S)
            requests = asked() + asked()
            outputs = await asyncio.wait_for(asyncio.gather(*map(pipe.complete, requests)), LIVENESS_S)
            assert [each.token_ids for each in outputs] == [right(each) for each in requests]
        assert any("D1" in each.route for each in outputs)


@pytest.mark.parametrize("hosting", ["thread", "process"])
async def test_a_placement_is_applied_while_requests_run(hosting: str) -> None:
    """EPDServe's shift in small: of five encoders three are to decode."""
    async with emulated("5E1P2D", hosting) as pipe:
        going, ended = True, 0

        async def ask(number: int) -> None:
            nonlocal ended
            while going:
                request = asked()[number % 5]
                assert (await pipe.complete(request)).token_ids == right(request)
                ended += 1

        traffic = [asyncio.ensure_future(ask(number)) for number in range(8)]
        done = await asyncio.wait_for(pipe.apply("2E1P5D"), LIVENESS_S)
        before = ended
        async with asyncio.timeout(LIVENESS_S):
            while ended < before + 16:
                await asyncio.sleep(0.01)
        going = False
        await asyncio.gather(*traffic)
        assert [(each.former, each.roles) for each in done] == [("E", "D")] * 3
        assert str(pipe.placement) == "2E1P5D"
        assert await pipe.apply("2E1P5D") == []


# ---------------------------------------------------------------- what changes nothing


async def test_what_cannot_be_loaded_changes_nothing() -> None:
    """No room for an encoder's pool: the error says so, and all is as it was: the same life decodes on."""
    instances = [trinity.Instance("E", "a"), trinity.Instance("P", "b"), trinity.Instance("D", "c"),
                 trinity.Instance("D", "d", pools={"kv": 400})]  # fmt: skip
    async with emulated(instances) as pipe:  # type: ignore[arg-type]
        serving = [asyncio.ensure_future(pipe.complete(each)) for each in asked()]
        await until_tokens(pipe, 1)
        before = pipe.processes["d"].process
        with pytest.raises(ConfigError, match="needs at least one block of image"):
            await asyncio.wait_for(pipe.switch("d", "E"), LIVENESS_S)
        assert str(pipe.placement) == "1E1P2D"
        assert (pipe.health["d"].state, pipe.health["d"].epoch) == ("up", 0)
        assert pipe.processes["d"].process == before
        outputs = await asyncio.wait_for(asyncio.gather(*serving), LIVENESS_S)
        assert [each.lives for each in outputs] == [1] * len(outputs)
        assert pipe.processes["d"].announcement().roles == "D"
        request = asked()[1]
        assert (await pipe.complete(request)).token_ids == right(request)
        with pytest.raises(ConfigError, match="needs at least one block of image"):
            await asyncio.wait_for(pipe.apply("2E1P1D"), LIVENESS_S)
        assert str(pipe.placement) == "1E1P2D"


@pytest.mark.parametrize("hosting", ["thread", "process"])
async def test_a_switch_that_is_cancelled_leaves_all_as_it_was(hosting: str) -> None:
    async with emulated("1E1P2D", hosting) as pipe:
        async with asking(pipe, LONG):
            await until_decoding(pipe)
            switching = asyncio.ensure_future(pipe.switch("D1", "E"))
            async with asyncio.timeout(LIVENESS_S):
                while not pipe._frontend.core.router.leaving:
                    await asyncio.sleep(0)
            switching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await switching
            assert str(pipe.placement) == "1E1P2D"
            assert not pipe._frontend.core.router.leaving
        done = await asyncio.wait_for(pipe.switch("D1", "E"), LIVENESS_S)
        assert isinstance(done, Switch)


async def test_a_switch_that_is_cancelled_while_its_next_life_loads_ends_that() -> None:
    async with emulated("1E1P2D") as pipe:
        assert pipe._served.supervisor is not None
        member = pipe._served.supervisor.core.members["D1"]
        switching = asyncio.ensure_future(pipe.switch("D1", "E"))
        async with asyncio.timeout(LIVENESS_S):
            while member.next is None or not (client := pipe._served.supervisor._lives["D1", 1]).process:
                await asyncio.sleep(0)
        switching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await switching
        process = InstanceProcess(client.process, read_start(client.process))
        async with asyncio.timeout(LIVENESS_S):
            while member.dismissed or not process.has_ended():
                await asyncio.sleep(0.005)
        assert (pipe.health["D1"].state, pipe.health["D1"].epoch, str(pipe.placement)) == ("up", 0, "1E1P2D")
        assert ("D1", 1) not in pipe._served.supervisor._lives
        await asyncio.wait_for(pipe.switch("D1", "E"), LIVENESS_S)
        assert str(pipe.placement) == "2E1P1D"


# ---------------------------------------------------------------- bad input


async def test_what_cannot_be_changed_is_refused_and_changes_nothing() -> None:
    async with emulated("2E1P1D", "thread") as pipe:
        for name, roles, error in (("X", "D", UnknownName), ("P0", "D", PlacementError), ("E1", "X", PlacementError)):
            with pytest.raises(error):
                await pipe.switch(name, roles)
        for placement in ("1E1P1D", "2EP", "4PD", "nonsense"):
            with pytest.raises(PlacementError):
                await pipe.apply(placement)
        with pytest.raises(ConfigError, match="drain_s"):
            await pipe.switch("E1", "D", drain_s=-1.0)
        first = asyncio.ensure_future(pipe.switch("E1", "D"))
        await asyncio.sleep(0)
        for again in (pipe.switch("E0", "D"), pipe.apply("1E1P2D")):
            with pytest.raises(ChangeRefused, match="instance E1 switches to D"):
                await again
        await first
        assert str(pipe.placement) == "1E1P2D"
    with pytest.raises(trinity.ClosedError):
        await pipe.switch("E1", "E")


async def test_a_switch_that_is_overtaken_by_the_close_says_so() -> None:
    """Once its next life is prepared and the former one has ended."""
    async with emulated("2E1P1D") as pipe:
        changing = asyncio.ensure_future(pipe.switch("E1", "D"))
        async with asyncio.timeout(LIVENESS_S):
            while pipe.health["E1"].state == "up":
                await asyncio.sleep(0)
        await pipe.aclose()
        with pytest.raises(trinity.ClosedError, match="closed meanwhile"):
            await changing


async def test_nothing_is_changed_while_an_instance_is_away() -> None:
    async with emulated("2E1P1D") as pipe:
        os.kill(pipe.processes["P0"].process, signal.SIGKILL)
        async with asyncio.timeout(LIVENESS_S):
            while pipe.health["P0"].state == "up":
                await asyncio.sleep(0.005)
        with pytest.raises(ChangeRefused, match=r"P0 is (lost|starting)"):
            await pipe.switch("E1", "D")
        assert str(pipe.placement) == "2E1P1D"
