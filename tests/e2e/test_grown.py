"""Instances that are added and removed while requests run: in threads and processes; kills; what is refused."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec
import pytest

import trinity
from e2e.test_recovered import greedy, wanted
from e2e.test_switched import MANY, emulated, real, sampled, switches_of, unseen, until_tokens
from support.emulated_pipelines import LIVENESS_S, QUICK, asked, right
from support.shared_launcher import sharing
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel
from trinity.errors import ChangeRefused, ConfigError, PlacementError, UnknownName
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.request import Output, Request

BOTH = pytest.mark.parametrize("hosting", ["thread", "process"])


@pytest.fixture(autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    wanted()  # it takes seconds to load, which is not for an event loop
    with sharing(torch_launcher):
        yield


async def until_at_d1(pipe: Pipeline, serving: Sequence[asyncio.Future[Output]]) -> None:
    """Until a request is at D1; on a busy machine all may have passed by unseen."""
    async with asyncio.timeout(LIVENESS_S):
        while not any(pipe._frontend.find_place(each) == "D1" for each in pipe._frontend.core.entries):
            if all(each.done() for each in serving):
                return
            await asyncio.sleep(0)


async def until_up(pipe: Pipeline) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while {each.state for each in pipe.health.values()} != {"up"}:
            await asyncio.sleep(0.01)


# ---------------------------------------------------------------- exact


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("roles", "hosting"),
    [("D", "thread")]
    + [pytest.param(*each, marks=pytest.mark.slow) for each in (("E", "thread"), ("P", "process"), ("D", "process"))],
)
async def test_one_comes_and_goes_amid_requests_of_a_real_model(roles: str, hosting: str) -> None:
    """Greedy and sampled requests are those of a pipeline that stays as it is, and the new one takes its share."""
    async with real("1E1P1D", hosting, failures=MANY) as pipe:
        alone = [await pipe.complete(each) for each in sampled()]
        serving = [asyncio.ensure_future(pipe.complete(each)) for each in (*greedy(), *sampled())]
        await until_tokens(pipe, 3)
        done = await asyncio.wait_for(pipe.add(Instance(roles, pools=pools_of(roles))), LIVENESS_S)
        assert (done.name, done.former, done.roles, done.drain_s) == (f"{roles}1", "", roles, 0.0)
        assert str(pipe.placement) == "".join(f"{1 + (letter == roles)}{letter}" for letter in "EPD")
        more = [*greedy(), *(Request("<image>?", images=[each], max_tokens=4) for each in unseen())]
        later = [asyncio.ensure_future(pipe.complete(each)) for each in more]
        await asyncio.gather(*later[3:])
        assert any(f"{roles}1" in each.result().route for each in later[3:]), "nobody went to the new one"
        gone = await asyncio.wait_for(pipe.remove(f"{roles}1", drain_s=0.05), LIVENESS_S)
        assert (gone.name, gone.former, gone.roles) == (f"{roles}1", roles, "")
        assert f"{roles}1" not in {*pipe.pools, *pipe.loads, *pipe.health, *pipe.processes, *pipe.hosts}
        outputs = await asyncio.wait_for(asyncio.gather(*serving, *later[:3]), LIVENESS_S)
        assert [each.token_ids for each in (*outputs[:3], *outputs[5:])] == wanted() * 2
        assert [each.token_ids for each in outputs[3:5]] == [each.token_ids for each in alone]
        again = await asyncio.wait_for(asyncio.gather(*map(pipe.complete, greedy())), LIVENESS_S)
        assert [each.token_ids for each in again] == wanted()
        assert {f"onload {roles}", f"offload {roles}"} <= set(switches_of(pipe))


def pools_of(roles: str) -> dict[str, int]:
    return {
        kind: {"image": 24, "kv": 512}[kind] for kind, letters in (("image", "EP"), ("kv", "PD")) if roles in letters
    }


@BOTH
async def test_a_name_comes_again_after_its_end(hosting: str) -> None:
    """What is late of the first one of a name meets nothing of the second: their lives have other epochs."""
    async with emulated("1E1P1D", hosting) as pipe:
        for turn in range(3):
            requests = asked() + asked()
            serving = [asyncio.ensure_future(pipe.complete(each)) for each in requests[:6]]
            await asyncio.wait_for(pipe.add(Instance("D", pools={"kv": 400})), LIVENESS_S)
            assert pipe._frontend.core.router.peers["D1"].epoch == turn
            again = [asyncio.ensure_future(pipe.complete(each)) for each in requests[6:]]
            await until_at_d1(pipe, again)
            await asyncio.wait_for(pipe.remove("D1", drain_s=0.0), LIVENESS_S)
            outputs = await asyncio.wait_for(asyncio.gather(*serving, *again), LIVENESS_S)
            assert [each.token_ids for each in outputs] == [right(each) for each in requests]
            router = pipe._frontend.core.router
            assert {*router.peers, *router.lost, *pipe._frontend.reached} == {"E0", "P0", "D0"}


@BOTH
async def test_a_placement_of_another_size_is_applied_while_requests_run(hosting: str) -> None:
    async with emulated("2E1P1D", hosting) as pipe:
        going = True

        async def ask(number: int) -> None:
            while going:
                request = asked()[number % 5]
                assert (await pipe.complete(request)).token_ids == right(request)

        traffic = [asyncio.ensure_future(ask(number)) for number in range(6)]
        with pytest.raises(PlacementError, match="resize=True"):
            await pipe.apply("2E2P3D")
        grown = await asyncio.wait_for(pipe.apply("1E2P3D", resize=True), LIVENESS_S)
        assert sorted((each.former, each.roles) for each in grown) == [("", "D"), ("", "D"), ("E", "P")]
        assert str(pipe.placement) == "1E2P3D"
        shrunk = await asyncio.wait_for(pipe.apply("1E1P1D", resize=True), LIVENESS_S)
        assert sorted((each.former, each.roles) for each in shrunk) == [("D", ""), ("D", ""), ("P", "")]
        assert str(pipe.placement) == "1E1P1D"
        going = False
        await asyncio.wait_for(asyncio.gather(*traffic), LIVENESS_S)


# ---------------------------------------------------------------- kills


@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", ["starting", "up"])
@pytest.mark.parametrize("whom", ["itself", "another"])
async def test_a_kill_while_one_is_added(phase: str, whom: str) -> None:
    requests = asked() + asked()
    async with emulated("1E2P1D") as pipe:
        serving = [asyncio.ensure_future(pipe.complete(each)) for each in requests]
        adding = asyncio.ensure_future(pipe.add(Instance("D", pools={"kv": 400})))
        victim = "D1" if whom == "itself" else "P1"
        async with asyncio.timeout(LIVENESS_S):
            while "D1" not in pipe.health or pipe.health["D1"].state != phase:
                await asyncio.sleep(0)
        strike(pipe, victim)
        assert (await asyncio.wait_for(adding, LIVENESS_S)).roles == "D"
        outputs = await asyncio.wait_for(asyncio.gather(*serving), LIVENESS_S)
        assert [each.token_ids for each in outputs] == [right(each) for each in requests]
        await until_up(pipe)
        assert str(pipe.placement) == "1E2P2D"


def strike(pipe: Pipeline, name: str) -> None:
    """Kill a process of this name, also one that is not up yet."""
    assert pipe._served.supervisor is not None
    for client in list(pipe._served.supervisor._lives.values()):
        if client.name == name and client.process:
            with suppress(ProcessLookupError):
                os.kill(client.process, signal.SIGKILL)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("phase", ["leaving", "lost"])
@pytest.mark.parametrize("whom", ["itself", "another"])
async def test_a_kill_while_one_is_removed(phase: str, whom: str) -> None:
    """It goes for good, whatever dies; ``lost``: it was killed before, and is removed while it is away."""
    requests = asked() + asked()
    async with emulated("1E2P2D") as pipe:
        serving = [asyncio.ensure_future(pipe.complete(each)) for each in requests]
        await until_at_d1(pipe, serving)
        if phase == "lost":
            strike(pipe, "D1")
            async with asyncio.timeout(LIVENESS_S):
                while pipe.health["D1"].state == "up":
                    await asyncio.sleep(0)
        removing = asyncio.ensure_future(pipe.remove("D1", drain_s=0.3))
        while phase == "leaving" and not removing.done() and pipe.health["D1"].state != "leaving":
            await asyncio.sleep(0)
        strike(pipe, "D1" if whom == "itself" else "P1")
        assert (await asyncio.wait_for(removing, LIVENESS_S)).roles == ""
        outputs = await asyncio.wait_for(asyncio.gather(*serving), LIVENESS_S)
        assert [each.token_ids for each in outputs] == [right(each) for each in requests]
        await until_up(pipe)
        assert set(pipe.health) == {"E0", "P0", "P1", "D0"}
        assert str(pipe.placement) == "1E2P1D"


# ---------------------------------------------------------------- what goes wrong


@BOTH
async def test_one_that_cannot_come_up_leaves_nothing_behind(hosting: str) -> None:
    async with emulated("1E1P1D", hosting) as pipe:
        with pytest.raises(ConfigError, match="needs at least one block of image"):
            await asyncio.wait_for(pipe.add(Instance("E", pools={"kv": 400})), LIVENESS_S)
        with pytest.raises(ConfigError, match="needs at least one block of image"):
            await asyncio.wait_for(pipe.add(Instance("E", "extra", pools={"kv": 400})), LIVENESS_S)
        assert str(pipe.placement) == "1E1P1D"
        assert set(pipe.health) <= {"E0", "P0", "D0"}
        assert (await asyncio.wait_for(pipe.add(Instance("E")), LIVENESS_S)).name == "E1"
        request = asked()[1]
        assert (await pipe.complete(request)).token_ids == right(request)


@BOTH
async def test_what_was_done_is_undone_where_a_later_change_fails(hosting: str) -> None:
    instances = [Instance("E", "a"), Instance("P", "b"), Instance("D", "c"), Instance("D", "d", pools={"kv": 400})]
    async with emulated(instances, hosting) as pipe:  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="needs at least one block of image"):
            await asyncio.wait_for(pipe.apply("2E2P1D", resize=True), LIVENESS_S)
        assert [(each.name, each.roles) for each in pipe.instances] == [("a", "E"), ("b", "P"), ("c", "D"), ("d", "D")]
        assert str(pipe.placement) == "1E1P2D"
        request = asked()[1]
        assert (await pipe.complete(request)).token_ids == right(request)


@BOTH
async def test_a_removal_that_is_cancelled_leaves_all_as_it_was(hosting: str) -> None:
    async with emulated("1E1P2D", hosting) as pipe:
        requests = asked() + asked()
        serving = [asyncio.ensure_future(pipe.complete(request)) for request in requests]
        await until_at_d1(pipe, serving)
        removing = asyncio.ensure_future(pipe.remove("D1"))
        async with asyncio.timeout(LIVENESS_S):
            while not pipe._frontend.core.router.leaving and not removing.done():
                await asyncio.sleep(0)
        removing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await removing
        assert str(pipe.placement) == "1E1P2D"
        assert not pipe._frontend.core.router.leaving
        outputs = await asyncio.wait_for(asyncio.gather(*serving), LIVENESS_S)
        assert [each.token_ids for each in outputs] == [right(each) for each in requests]


async def test_one_that_is_cancelled_while_it_is_added_is_gone() -> None:
    async with emulated("1E1P1D") as pipe:
        adding = asyncio.ensure_future(pipe.add(Instance("D")))
        async with asyncio.timeout(LIVENESS_S):
            while "D1" not in pipe.health:
                await asyncio.sleep(0)
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert set(pipe.health) == {"E0", "P0", "D0"}
        assert str(pipe.placement) == "1E1P1D"


@BOTH
async def test_a_pipeline_that_closes_meanwhile_leaves_nothing_behind(hosting: str) -> None:
    async with emulated("1E1P1D", hosting) as pipe:
        adding = asyncio.ensure_future(pipe.add(Instance("D")))
        await asyncio.sleep(0)
    with pytest.raises(trinity.TrinityError):
        await asyncio.wait_for(adding, LIVENESS_S)
    assert str(pipe.placement) == "1E1P1D"


async def test_who_waits_for_one_that_is_removed_is_told_so() -> None:
    """The request fits the pool of that one alone: it is refused as too large in place of waiting ten minutes."""
    instances = [Instance("E", "a"), Instance("P", "b"), Instance("D", "c", pools={"kv": 3}), Instance("D", "d")]
    async with emulated(instances) as pipe:  # type: ignore[arg-type]
        strike(pipe, "d")
        async with asyncio.timeout(LIVENESS_S):
            while pipe.health["d"].state == "up":
                await asyncio.sleep(0)
        waiting = asyncio.ensure_future(pipe.complete(asked()[2]))
        async with asyncio.timeout(LIVENESS_S):
            while not any(each.waits for each in pipe._frontend.core.entries.values()):
                await asyncio.sleep(0)
        await asyncio.wait_for(pipe.remove("d"), LIVENESS_S)
        with pytest.raises(trinity.RequestError, match="no instance can hold this request at stage D"):
            await asyncio.wait_for(waiting, LIVENESS_S)


# ---------------------------------------------------------------- bad input


async def test_what_cannot_be_added_or_removed_is_refused_and_changes_nothing() -> None:
    async with emulated("2E1P1D", "thread") as pipe:
        for instance in (Instance("D", "P0"), Instance("D", "frontend"), Instance("D", address="tcp:127.0.0.1:1")):
            with pytest.raises(ConfigError):
                await pipe.add(instance)
        with pytest.raises(ConfigError, match="instance"):
            await pipe.add("D")  # type: ignore[arg-type]
        for name, error in (("X", UnknownName), ("P0", PlacementError), ("D0", PlacementError)):
            with pytest.raises(error):
                await pipe.remove(name)
        with pytest.raises(ConfigError, match="drain_s"):
            await pipe.remove("E1", drain_s=-1.0)
        first = asyncio.ensure_future(pipe.remove("E1"))
        await asyncio.sleep(0)
        for again in (pipe.switch("E0", "D"), pipe.add(Instance("D")), pipe.remove("E0")):
            with pytest.raises(ChangeRefused, match="instance E1 is removed"):
                await again
        await first
        assert str(pipe.placement) == "1E1P1D"
        with pytest.raises(PlacementError, match="no instance would have stage E without E0"):
            await pipe.remove("E0")
    for late in (pipe.add(Instance("D")), pipe.remove("E0")):
        with pytest.raises(trinity.ClosedError):
            await late


async def test_nothing_is_added_while_an_instance_is_away() -> None:
    async with emulated("2E1P1D") as pipe:
        strike(pipe, "P0")
        async with asyncio.timeout(LIVENESS_S):
            while pipe.health["P0"].state == "up":
                await asyncio.sleep(0.005)
        for change in (pipe.add(Instance("D")), pipe.remove("E1")):
            with pytest.raises(ChangeRefused, match=r"P0 is (lost|starting)"):
                await change
        assert str(pipe.placement) == "2E1P1D"


async def test_one_at_an_address_needs_a_secret_and_a_transport_that_reaches_it() -> None:
    async with emulated("1E1P1D") as pipe:
        with pytest.raises(ConfigError, match=r"start the pipeline with ProcessConfig\(secret=...\)"):
            await pipe.add(Instance("D", address="tcp:127.0.0.1:1"))
    async with emulated("1E1P1D", secret="s" * 32) as pipe:
        with pytest.raises(ConfigError, match="connector that leaves the host"):
            await pipe.add(Instance("D", address="tcp:127.0.0.1:1"))
        assert set(pipe.health) == {"E0", "P0", "D0"}


async def test_a_model_of_text_gets_no_encoder() -> None:
    shape = msgspec.structs.replace(LLAVA_15_7B, image_width=0)
    model = EmulatedModel(shape=shape, cost=QUICK, scale=2048)
    async with Pipeline(model, "1P1D", cache=CacheConfig(pools={"kv": 400})) as pipe:
        with pytest.raises(PlacementError, match="a text-only model never uses"):
            await pipe.add(Instance("E"))
