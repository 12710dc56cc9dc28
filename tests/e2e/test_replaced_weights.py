"""A checkpoint's files that change under a running pipeline: no request goes on with other weights (decision 0096)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from e2e.test_recovered import LIVENESS_S, greedy, until_decoding, wanted
from remote.channel.test_agreement import copy_of_llava, flip_unseen, redraw
from support.pipeline_options import pipeline_options
from support.running_instances import SECRET, by_hand, started, tcp
from support.shared_launcher import sharing
from support.thinned import thinned
from trinity import FailurePolicy, Instance
from trinity.errors import LayoutMismatch, Overloaded
from trinity.memory.weight_digests import sample_digest
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.testing.oracle import Oracle

POOLS = {"image": 24, "kv": 512}
PATIENT = FailurePolicy(recoveries=9, wait_s=LIVENESS_S)
REFUSED = r"the files have changed under the running pipeline: put them back, or make a new pipeline"


@pytest.fixture(scope="module", autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[Launcher]:
    wanted()  # it takes seconds to load, which is not for an event loop
    with sharing(torch_launcher):
        yield torch_launcher


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return copy_of_llava(tmp_path / "model")


def draw_anew(model: Path) -> None:
    """Weights of another seed in a file of its own, which takes the former one's place as a download does."""
    tensors = load_file(model / "model.safetensors")
    redraw(tensors)
    save_file(tensors, model / "new")
    (model / "new").replace(model / "model.safetensors")


def flip_a_bit(model: Path) -> None:
    """One bit in a place that no sample reads: only the digest of every byte tells."""
    shutil.copy(model / "model.safetensors", model / "new")
    (model / "new").replace(model / "model.safetensors")  # those who serve have mapped the former file
    before = sample_digest(model)
    flip_unseen(model / "model.safetensors")
    assert sample_digest(model) == before


def make_shallow(model: Path) -> None:
    text = (model / "config.json").read_text()
    assert '"num_hidden_layers": 2' in text
    (model / "config.json").write_text(text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 1'))


def write_again(model: Path) -> None:
    """The same bytes in new files."""
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes((model / name).read_bytes())


def put_back(model: Path, kept: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(kept / name, model / "new")
        (model / "new").replace(model / name)


@pytest.fixture
def kept(tmp_path: Path, model: Path) -> Path:
    return shutil.copytree(model, tmp_path / "kept")


@asynccontextmanager
async def serving(model: Path, placement: Any, hosting: str = "process", **named: Any) -> AsyncIterator[Pipeline]:
    settings: dict[str, Any] = {"dtype": "float32", "hosting": hosting, "pools": POOLS, "failures": PATIENT, **named}
    async with Pipeline(model, placement, **pipeline_options(settings)) as pipe:
        yield pipe


async def until_digest_known(pipe: Pipeline) -> None:
    """Until an instance has read every byte of its weights."""
    assert pipe._served.supervisor is not None
    async with asyncio.timeout(LIVENESS_S):
        while (served := pipe._served.supervisor._weights.served) is None or not served.weights:
            await asyncio.sleep(0.01)


def kill_all(pipe: Pipeline) -> None:
    for each in list(pipe.processes.values()):
        os.kill(each.process, signal.SIGKILL)


# ---------------------------------------------------------------- all instances are lost


@pytest.mark.parametrize(("change", "placement"), [
    (draw_anew, "EPD"),
    pytest.param(flip_a_bit, "EPD", marks=pytest.mark.slow),
    pytest.param(make_shallow, "EPD", marks=pytest.mark.slow),
    *(pytest.param(change, "1E1P1D", marks=pytest.mark.slow) for change in (draw_anew, flip_a_bit, make_shallow)),
])  # fmt: skip
async def test_a_request_waits_for_the_weights_that_it_began_with(
    change: Callable[[Path], None], placement: str, model: Path, kept: Path
) -> None:
    """All die, so that nobody is left to compare with: every later life is refused until the files are back."""
    async with serving(model, placement) as pipe:
        await until_digest_known(pipe)
        await asyncio.to_thread(change, model)
        answer = asyncio.ensure_future(pipe.complete(greedy()[0]))
        await until_decoding(pipe, answer, 20)
        kill_all(pipe)
        async with asyncio.timeout(LIVENESS_S):
            while not all(REFUSED in each.why and each.epoch for each in pipe.health.values()):
                await asyncio.sleep(0.05)
        assert not answer.done()
        await asyncio.to_thread(put_back, model, kept)
        output = await asyncio.wait_for(answer, LIVENESS_S)
    assert (output.token_ids, output.lives) == (wanted()[0], 2)


@pytest.mark.slow
async def test_a_reader_who_waits_no_longer_is_told_why(model: Path) -> None:
    async with serving(model, "EPD", failures=FailurePolicy(recoveries=9, wait_s=2.0)) as pipe:
        await asyncio.to_thread(draw_anew, model)
        answer = asyncio.ensure_future(pipe.complete(greedy()[0]))
        await until_decoding(pipe, answer, 20)
        kill_all(pipe)
        with pytest.raises(Overloaded, match=rf"EPD0 is started again: instance EPD0 has model .*{REFUSED}"):
            await asyncio.wait_for(answer, LIVENESS_S)


@pytest.mark.slow
async def test_who_attaches_goes_on_with_the_weights_that_it_began_with(
    model: Path, kept: Path, launcher: Launcher
) -> None:
    """Another pipeline may set up the instance with others, which that one began with: its fellow waits."""
    async with by_hand(launcher, tcp(), model=str(model)) as [one], AsyncExitStack() as stack:
        instance, address = one.instance("EPD"), one.address
        async with serving(model, [instance], secret=SECRET):
            fellow = await stack.enter_async_context(serving(model, [instance], secret=SECRET, attach=True))
            answer = asyncio.ensure_future(fellow.complete(greedy()[0]))
            await until_decoding(fellow, answer, 20)
        for change, taken in ((draw_anew, False), (lambda model: put_back(model, kept), True)):
            await one.kill()
            await asyncio.to_thread(change, model)
            one = await started(launcher, address, str(model))
            async with serving(model, [instance], secret=SECRET), asyncio.timeout(LIVENESS_S):
                while REFUSED not in fellow.health["EPD0"].why and not taken:
                    await asyncio.sleep(0.05)
                if taken:
                    assert (await answer).token_ids == wanted()[0]
        await one.kill()


# ---------------------------------------------------------------- a change of the placement


@pytest.mark.parametrize("change", thinned((draw_anew, flip_a_bit, make_shallow), (draw_anew,).__contains__))
async def test_a_switch_is_refused_and_nothing_has_changed(
    change: Callable[[Path], None], model: Path, kept: Path
) -> None:
    async with serving(model, "1E2P1D") as pipe:
        await until_digest_known(pipe)
        await asyncio.to_thread(change, model)
        await check_refused(pipe)
        await asyncio.to_thread(put_back, model, kept)
        assert (await asyncio.wait_for(pipe.switch("P1", "D"), LIVENESS_S)).roles == "D"
        assert (await asyncio.wait_for(pipe.complete(greedy()[0]), LIVENESS_S)).token_ids == wanted()[0]


async def check_refused(pipe: Pipeline) -> None:
    """A switch and one more instance are refused; all that was there serves on, in the same processes."""
    before = {name: (each.process, each.setup.epoch) for name, each in pipe.processes.items()}
    with pytest.raises(LayoutMismatch, match=REFUSED):
        await asyncio.wait_for(pipe.switch("P1", "D"), LIVENESS_S)
    with pytest.raises(LayoutMismatch, match=REFUSED):
        await asyncio.wait_for(pipe.add(Instance("D")), LIVENESS_S)
    assert {name: (each.process, each.setup.epoch) for name, each in pipe.processes.items()} == before
    assert str(pipe.placement) == "1E2P1D"
    assert not any(each.losses or each.state != "up" for each in pipe.health.values())
    output = await asyncio.wait_for(pipe.complete(greedy()[0]), LIVENESS_S)
    assert (output.token_ids, output.lives) == (wanted()[0], 1)


async def test_on_threads_a_switch_is_refused_too(model: Path, kept: Path) -> None:
    async with serving(model, "1E2P1D", "thread") as pipe:
        for change in (draw_anew, flip_a_bit, write_again):  # what nobody has read in full is not said to be the same
            await asyncio.to_thread(change, model)
            with pytest.raises(LayoutMismatch, match=REFUSED):
                await asyncio.wait_for(pipe.switch("P1", "D"), LIVENESS_S)
            await asyncio.to_thread(put_back, model, kept)
        assert (await asyncio.wait_for(pipe.complete(greedy()[0]), LIVENESS_S)).token_ids == wanted()[0]
        shutil.copystat(kept / "model.safetensors", model / "model.safetensors")
        shutil.copystat(kept / "config.json", model / "config.json")
        assert (await asyncio.wait_for(pipe.switch("P1", "D"), LIVENESS_S)).roles == "D"
        assert (await asyncio.wait_for(pipe.complete(greedy()[0]), LIVENESS_S)).token_ids == wanted()[0]


async def test_an_instance_that_runs_already_looks_before_it_leaves(
    model: Path, kept: Path, launcher: Launcher
) -> None:
    """Nothing of it is prepared, as its place is taken: what its next life would load is looked at all the same."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(by_hand(launcher, *(tcp() for _ in "EPPD"), model=str(model)))
        instances = [one.instance(roles) for one, roles in zip(running, "EPPD", strict=True)]
        pipe = await stack.enter_async_context(serving(model, instances, secret=SECRET))
        await asyncio.to_thread(draw_anew, model)
        with pytest.raises(LayoutMismatch, match=REFUSED):
            await asyncio.wait_for(pipe.switch("P1", "D"), LIVENESS_S)
        assert all((each.state, each.epoch) == ("up", 0) for each in pipe.health.values())
        await asyncio.to_thread(put_back, model, kept)
        assert (await asyncio.wait_for(pipe.switch("P1", "D"), LIVENESS_S)).roles == "D"
        assert (await asyncio.wait_for(pipe.complete(greedy()[0]), LIVENESS_S)).token_ids == wanted()[0]


def test_the_other_weights_would_be_told_apart(model: Path) -> None:
    """The control of this file: with the other weights ``generate()`` says something else."""
    draw_anew(model)
    assert Oracle(model).generate_all(greedy()[:1])[0] != wanted()[0]
