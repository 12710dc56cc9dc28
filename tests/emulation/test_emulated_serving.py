"""Emulated pipelines: all of trinity around stages that wait. No torch in their processes; what they show says so."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from examples import emulation as example
from support.checkpoint_files import checkpoint
from support.emulated_pipelines import LIVENESS_S, MODEL, POOLS, QUICK, asked, check, serve
from support.paths import ROOT
from support.running_instances import SECRET, by_hand, tcp
from support.thinned import thinned
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepCost
from trinity.costs.emulated_cost import LinearCost, TableCost
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ConfigError, RequestError, StageError
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.process_config import ProcessConfig, kept_launcher
from trinity.request import Request
from trinity.runtime.host import InstanceHost
from trinity.traces.trace import SLO, Trace

# ---------------------------------------------------------------- in this process


@pytest.mark.parametrize("placement", ["EPD", "EP+D", "ED+P", "E+P+D", "PD+E", "2E2P2D"])
async def test_every_method_serves_the_tokens_that_the_content_gives(placement: str) -> None:
    requests = asked()
    async with Pipeline(MODEL, placement, cache=CacheConfig(pools=POOLS), rules=BatchRules(token_budget=700)) as pipe:
        check(await serve(pipe, requests), requests)
        again = [msgspec.structs.replace(each, request_id=f"again {at}") for at, each in enumerate(asked())]
        outputs = await serve(pipe, [again[3]])
        assert outputs[0].cached_tokens > 0, "the prompt's blocks were kept"
        check(outputs, [again[3]])


async def test_no_instance_runs_before_all_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thirty instances the first reports, a tenth of a second after it starts, came before the last was known."""
    start, known = InstanceHost.start, []

    def watched(host: InstanceHost) -> None:
        known.append(set(pipe._frontend.reached))
        start(host)

    monkeypatch.setattr(InstanceHost, "start", watched)
    pipe, requests = Pipeline(MODEL, "2E1P1D", cache=CacheConfig(pools=POOLS)), asked()[:1]
    async with pipe:
        assert known == [{"E0", "E1", "P0", "D0"}] * 4
        check(await serve(pipe, requests), requests)


async def test_what_it_shows_is_labelled(tmp_path: Path) -> None:
    async with Pipeline(MODEL, "E+P+D", cache=CacheConfig(pools=POOLS), slo=SLO(ttft=1.0, tbt=0.05)) as pipe:
        (output,) = await serve(pipe, asked()[1:2])
    assert "finish length (emulated)" in repr(output)
    assert pipe.metrics.summary()["emulated"] == 1
    assert "of them emulated" in str(pipe.metrics)
    stages = [each for each in pipe.timeline.slices() if each.lane == "joint"]
    assert {each.name for each in stages} == {"emulated encode", "emulated prefill", "emulated decode"}
    assert all("late us" in each.args for each in stages)
    pipe.trace.save(tmp_path / "trace.jsonl")
    assert [row.emulated for row in Trace.load(tmp_path / "trace.jsonl")] == [True]
    assert (output.prompt_tokens, output.media_tokens, len(output.transfers)) == (594, 576, 2)
    assert output.spans["encode"] >= QUICK.encode_s
    assert output.spans["decode"] >= 8 * QUICK.step_s
    assert output.text == "".join(f"<{token}>" for token in output.token_ids)


async def test_lanes_of_an_instance_share_its_pace() -> None:
    model = msgspec.structs.replace(MODEL, interference=1.5)
    requests = asked()
    async with Pipeline(model, "EPD", cache=CacheConfig(pools=POOLS), lanes=("vision", "language")) as pipe:
        check(await serve(pipe, requests), requests)
    assert {each.lane for each in pipe.timeline.slices()} == {"vision", "language"}


async def test_a_block_that_is_altered_on_its_way_ends_that_request_alone() -> None:
    """What a transport did wrong would show in the real thing as a wrong token, and here as an error."""
    async with Pipeline(MODEL, "EP+D", cache=CacheConfig(pools=POOLS)) as pipe:
        read = pipe.connector.pull

        async def spoil(instance: str, pull: Any) -> Any:
            answer = await read(instance, pull)
            if pull.request == "victim":
                pipe.hosts[instance].loaded.memory[pull.kind].raw[pull.target_blocks[0], 7] ^= 1  # type: ignore[index]
            return answer

        pipe.connector.pull = spoil  # type: ignore[method-assign]
        good = asked()[:2]
        victim = EmulatedRequest(text_tokens=50, max_tokens=5, request_id="victim")
        failed, outputs = await asyncio.gather(pipe.complete(victim), serve(pipe, good), return_exceptions=True)
        assert isinstance(failed, StageError)
        assert "stale, misplaced or altered" in str(failed)
        assert isinstance(outputs, list)
        check(outputs, good)


async def test_budgets_come_from_the_cost_model() -> None:
    model = msgspec.structs.replace(MODEL, cost=LinearCost(step_s=0.01, decode_s=0.001, prefill_s=0.001))
    async with Pipeline(model, "EP+D", cache=CacheConfig(pools=POOLS), slo=SLO(ttft=0.4, tbt=0.05)) as pipe:
        tokens = {name: host.loaded.settings.rules.token_budget for name, host in pipe.hosts.items()}
    assert tokens["EP0"] <= 190
    assert tokens["D0"] <= 40


@pytest.mark.slow
async def test_costs_can_be_those_of_a_real_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Profiled as trinity profiles its budgets, then emulated: no step is quicker than the table says."""
    monkeypatch.setenv("TRINITY_CACHE", str(tmp_path))
    slo = SLO(ttft=0.4, tbt=0.05)
    async with Pipeline(
        checkpoint("llava"), "EPD", slo=slo, cache=CacheConfig(pools={"image": 64, "kv": 1024})
    ) as real:
        cost = real.hosts["EPD0"].loaded.settings.rules.cost
    assert isinstance(cost, StepCost)
    table = TableCost.from_step_cost(cost, "profiled from trinity's tiny LLaVA checkpoint")
    requests = asked()
    async with Pipeline(msgspec.structs.replace(MODEL, cost=table), "E+P+D", cache=CacheConfig(pools=POOLS)) as pipe:
        check(await serve(pipe, requests), requests)
    steps = [(seconds, said) for lane, _, _, seconds, said in pipe.timeline.rows() if lane == "joint"]
    wanted = [table.seconds(said["decodes"], said["prefill tokens"], said["media tokens"]) for _, said in steps]
    assert all(seconds >= least > 0 for (seconds, _), least in zip(steps, wanted, strict=True))


async def test_what_needs_a_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match="compute nothing"):
        await Pipeline(MODEL, "EPD", cache=CacheConfig(pools=POOLS), observe=lambda *row: None).start()
    with pytest.raises(ConfigError, match="compute nothing"):
        await Pipeline(MODEL, [Instance("EPD", stages=["mine"])], cache=CacheConfig(pools=POOLS)).start()
    async with Pipeline(MODEL, "EPD", cache=CacheConfig(pools=POOLS)) as pipe:
        with pytest.raises(RequestError, match="EmulatedRequest"):
            await pipe.complete(Request("Hello"))


# ---------------------------------------------------------------- in processes


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with kept_launcher(torch=False) as kept:
        yield kept


@pytest.fixture
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreters that start from here on cannot import torch: ``None`` in sys.modules is an ImportError."""
    block = "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(block)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("connector", thinned(("shm", "nixl", "nixl-push", "ucx"), ("shm", "ucx").__contains__))
async def test_processes_serve_without_torch(connector: str) -> None:
    requests = asked()
    settings: dict[str, Any] = {"hosting": "process", "connector": connector, "verify": "always"}
    async with Pipeline(MODEL, "1E1P1D", cache=CacheConfig(pools=POOLS), **settings) as pipe:
        outputs = await serve(pipe, requests)
        mapped = [Path(f"/proc/{each.process}/maps").read_text() for each in pipe.processes.values()]
    check(outputs, requests)
    pulled = [record for output in outputs for record in output.transfers if record["outcome"] == "pulled"]
    assert {record["scheme"] for record in pulled} == {connector}
    assert not any("libtorch" in each for each in mapped)
    assert {each.name for each in pipe.timeline.slices() if each.lane == "joint"} >= {"emulated decode"}


@pytest.mark.usefixtures("no_torch")
def test_an_import_of_torch_would_have_been_noticed() -> None:
    tried = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True)
    assert tried.returncode == 1
    assert "import of torch halted" in tried.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("no_torch")
def test_the_program_around_them_needs_no_torch_either() -> None:
    program = "import asyncio; from examples import emulation; asyncio.run(emulation.main('1E1P1D', 500.0))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=LIVENESS_S)
    assert run.returncode == 0, run.stderr
    assert "(ms, emulated)" in run.stdout


@pytest.mark.usefixtures("launcher")
async def test_a_killed_instance_is_started_again_and_its_request_goes_on() -> None:
    long = EmulatedRequest(text_tokens=9, max_tokens=3000, request_id="long")
    async with Pipeline(MODEL, "2EP1D", cache=CacheConfig(pools=POOLS), hosting="process") as pipe:
        going = asyncio.ensure_future(pipe.complete(long))
        async with asyncio.timeout(LIVENESS_S):
            while not ("long" in pipe._frontend.streams and pipe._frontend.streams["long"].token_count):
                await asyncio.sleep(0.01)
            old = pipe.processes["D0"].process
            os.kill(old, signal.SIGKILL)
            output = await going
            check([output], [long])
            assert output.lives >= 2, "each attempt to go on before D0 is back is a life, on a busy machine"
            while pipe.processes["D0"].process == old:
                await asyncio.sleep(0.01)
            requests = asked()[:3]
            check(await serve(pipe, requests), requests)


async def test_instances_started_by_hand_can_be_paced(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp(), model="") as (there,):
        instances = [Instance("EP", address=str(there.address), pools=POOLS), Instance("D", pools=POOLS)]
        async with Pipeline(MODEL, instances, hosting="process", processes=ProcessConfig(secret=SECRET)) as pipe:
            requests = asked()
            check(await serve(pipe, requests), requests)
        assert "libtorch" not in Path(f"/proc/{there.process}/maps").read_text()


async def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = await example.main(per_second=250.0)
    assert len(outputs) == example.REQUESTS
    check(outputs, example.requests())
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("2E3P3D: emulation of llava-1.5-7b (stages wait: fitted to")
    assert [line.split()[0] for line in said[2:5]] == ["0", "1", "2"]
    assert sum(int(line.split()[1]) for line in said[2:5]) == example.REQUESTS
    assert {record["scheme"] for output in outputs for record in output.transfers if "scheme" in record} == {"shm"}
    assert "us late at the median" in said[-1]
