"""Launchers that wait for another pipeline: who takes them, who cannot, and that none is left behind."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from support.bare_launchers import BARE, Births, has_gone, leave, take, take_and_leave
from support.bare_launchers import bare as bare
from support.bare_launchers import started as started
from support.emulated_pipelines import MODEL, POOLS, asked, check, right, serve
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ConfigError
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.channel.channel import Address
from trinity.remote.supervision import fork_client, warm_launchers
from trinity.remote.supervision.fork_client import Launcher, kept_launcher
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.remote.supervision.process_identity import describe_inheritance, is_stopped
from trinity.remote.supervision.warm_launchers import take_launcher


def pipeline(placement: str, config: ProcessConfig = ProcessConfig()) -> Pipeline:
    return Pipeline(MODEL, placement, hosting="process", cache=CacheConfig(pools=POOLS), processes=config)


async def run(pipe: Pipeline) -> Launcher:
    """Serve some requests and close; return the launcher."""
    async with pipe:
        await answer(pipe)
        (launcher,) = await launchers(pipe)
    return launcher


async def answer(pipe: Pipeline) -> None:
    requests = asked()
    check(await serve(pipe, requests), requests)


async def launchers(pipe: Pipeline) -> list[Launcher]:
    assert pipe._served.supervisor is not None
    assert pipe._served.supervisor.forks.opening is not None
    return [(await pipe._served.supervisor.forks.opening)[0]]


# ---------------------------------------------------------------- pipelines


async def test_the_next_pipelines_have_the_launcher_of_the_first(started: Births) -> None:
    """At 6aebd56 each started its own, and imported torch in it. The last one has another model."""
    first = await run(pipeline("EP+D"))
    assert await run(pipeline("E+P+D")) is first
    assert not first.ended.done()
    other = msgspec.structs.replace(MODEL, shape=msgspec.structs.replace(MODEL.shape, name="other", image_tokens=64))
    request = EmulatedRequest(text_tokens=9, image_tokens=(64,), max_tokens=7)
    async with Pipeline(other, "E+PD", hosting="process", cache=CacheConfig(pools=POOLS)) as pipe:
        assert (await serve(pipe, [request]))[0].token_ids == right(request, other)
    assert len(started) == 1


async def test_one_that_has_had_the_users_secret_is_not_kept(started: Births) -> None:
    """It opens instances that outlive the pipeline, and what the launcher forks next could find it in its memory."""
    launcher = await run(pipeline("EPD"))
    assert await run(pipeline("EPD", ProcessConfig(secret="x" * 32))) is launcher
    assert await has_gone(launcher, started)
    assert not warm_launchers._idle


async def test_two_pipelines_at_once_have_one_each(started: Births) -> None:
    """The first lets its own wait for nobody."""
    async with pipeline("EPD", ProcessConfig(launcher_waits_s=0)) as one, pipeline("EPD") as two:
        pair = await launchers(one) + await launchers(two)
        await answer(one)
        await answer(two)
    assert pair[0] is not pair[1]
    assert await has_gone(pair[0], started)
    assert await take_and_leave() is pair[1]
    assert len(started) == 2


async def test_a_pipeline_that_could_not_start_leaves_a_launcher_that_serves(started: Births) -> None:
    with pytest.raises(ConfigError, match="4095"):
        await Pipeline(MODEL, [Instance("EPD", cores=(4095,))], hosting="process").start()
    await run(pipeline("EPD"))
    assert len(started) == 1


# ---------------------------------------------------------------- launchers


async def test_one_that_was_killed_between_two_pipelines_is_replaced(started: Births, bare: None) -> None:
    launcher = await take_and_leave()
    os.kill(launcher._process.pid, signal.SIGKILL)
    assert await take_and_leave() is not launcher
    assert len(started) == 2


async def test_one_that_froze_between_two_pipelines_is_killed_and_replaced(
    started: Births, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_client, "SILENT_S", 0.3)
    launcher = await take_and_leave()
    os.kill(launcher._process.pid, signal.SIGSTOP)
    assert await take_and_leave() is not launcher
    assert await has_gone(launcher, started)


def set_variable(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("TRINITY_TEST_VARIABLE", "1")


def change_directory(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.chdir(folder)


def limit_files(patch: pytest.MonkeyPatch, folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


def take_a_processor(patch: pytest.MonkeyPatch, folder: Path) -> None:
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(own)[:-1] if len(own) > 1 else own)


def mask_files(patch: pytest.MonkeyPatch, folder: Path) -> None:
    os.umask(0o027)


def block_a_signal(patch: pytest.MonkeyPatch, folder: Path) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])


@pytest.fixture
def as_before() -> Iterator[None]:
    limits, own, mask = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0), os.umask(0o022)
    os.umask(mask)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.sched_setaffinity(0, own)
    os.umask(mask)


@pytest.mark.parametrize(
    "change", [set_variable, change_directory, limit_files, take_a_processor, mask_files, block_a_signal]
)
def test_what_a_launcher_inherits_is_seen_to_change(
    change: Callable[[pytest.MonkeyPatch, Path], None],
    as_before: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    if change is take_a_processor and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one processor")
    before = describe_inheritance()
    assert describe_inheritance() == before
    change(monkeypatch, tmp_path)
    assert describe_inheritance() != before


def test_the_test_that_pytest_runs_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what it writes for each test into the environment, launchers would never see the same."""
    before = describe_inheritance()
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another (call)")
    assert describe_inheritance() == before


async def test_one_that_inherited_something_else_is_not_taken(
    started: Births, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await take_and_leave()
    monkeypatch.setenv("TRINITY_TEST_VARIABLE", "1")
    second = await take_and_leave()
    assert second is not first
    assert b"TRINITY_TEST_VARIABLE=1" in Path(f"/proc/{second._process.pid}/environ").read_bytes()
    assert await has_gone(first, started)
    assert await take_and_leave() is second


async def test_a_kept_launcher_leaves_the_idle_one(started: Births, bare: None) -> None:
    idle = await take_and_leave()
    async with kept_launcher(torch=False) as kept:
        assert await take_launcher(torch=False) == (kept, False)
    assert await take_and_leave() is idle


async def test_one_of_each_kind_waits_at_most(started: Births, bare: None) -> None:
    some = [await take() for _ in range(2)]
    for each in some:
        await leave(each)
    assert await has_gone(some[0], started)
    assert not some[1].ended.done()


async def test_one_that_imports_still_is_left_and_taken(
    started: Births, bare: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That its pipeline was given up at once is no sign of a frozen one: it was killed, and imports began anew."""
    monkeypatch.setattr(fork_client, "SILENT_S", 0.05)
    go = tmp_path / "go"
    waits = f"import os, time\nwhile os.getppid() > 1 and not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    monkeypatch.setattr(Launcher, "program", ("-c", waits + BARE))
    launcher, _ = await take_launcher(torch=False)
    await leave(launcher)
    again, _ = await take_launcher(torch=False)
    assert again is launcher
    go.touch()
    await asyncio.wrap_future(launcher.ready)
    await leave(launcher)
    assert await take_and_leave() is launcher


async def test_one_that_was_stopped_amid_its_imports_is_replaced(
    started: Births, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 57e75377 the next pipeline failed to start: a sweep of 500 kills met that at its 470th."""
    waits = "import os, time\nfirst = os.getppid()\nwhile os.getppid() == first: time.sleep(0.01)\n"
    with monkeypatch.context() as patch:
        patch.setattr(Launcher, "program", ("-c", waits + BARE))
        launcher, _ = await take_launcher(torch=False)
    os.kill(launcher._process.pid, signal.SIGSTOP)
    while not is_stopped(launcher._process.pid):
        await asyncio.sleep(0.01)
    await leave(launcher)
    assert await take_and_leave() is not launcher
    assert await has_gone(launcher, started)


# What importing a model's classes may do to the launcher that does it.
SPOILS = {
    "a thread": "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    "an open file": "import os; s.held = os.open('/dev/zero', os.O_RDONLY)",
    "a variable": "import os; os.environ['TRINITY_TEST_VARIABLE'] = '1'",
    "nothing": "",
}


@pytest.mark.parametrize("what", SPOILS)
async def test_one_that_is_no_more_as_it_began_is_not_kept(
    what: str, started: Births, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context on a GPU, which has threads and open files, would be every later instance's end."""
    ends = "s.importlib.invalidate_caches = lambda: os._exit(0)"  # of the instance
    patched = f"import os; s.preload_model = lambda model: exec({SPOILS[what]!r}); {ends}; s.main()"
    monkeypatch.setattr(Launcher, "program", ("-c", BARE.replace("s.main()", patched)))
    launcher = await take()
    await (await launcher.launch(Address("unix", path="nowhere"), b"", "")).wait()
    await leave(launcher)
    if what == "nothing":
        assert await take() is launcher
        await asyncio.to_thread(launcher.close)
    else:
        assert await has_gone(launcher, started)
        assert await take_and_leave() is not launcher


HIDES_PROCESSES = """
import os
own = os.listdir
def shown(place="."):
    if str(place).startswith("/proc"): raise FileNotFoundError(place)
    return own(place)
os.listdir = shown
"""


async def test_one_that_cannot_look_at_itself_serves_and_is_not_kept(
    started: Births, bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At e136b4c it ended before its first order, in a sandbox without /proc: no pipeline in processes could start."""
    monkeypatch.setattr(Launcher, "program", ("-c", HIDES_PROCESSES + BARE))
    launcher = await take()
    assert not launcher.ended.done()
    await leave(launcher)
    assert await has_gone(launcher, started)


FROZEN_AT_WORK = """
import json, os, sys, time
def say(**words): os.write(1, json.dumps(words).encode() + b"\\n")
say(ready=1)
say(taken=json.loads(sys.stdin.readline())["id"]); time.sleep(1000)
"""


async def test_one_that_is_at_work_still_is_not_kept() -> None:
    launcher = type("ScriptedLauncher", (Launcher,), {"program": ("-c", FROZEN_AT_WORK)})(torch=False)
    launch = asyncio.ensure_future(launcher.launch(Address("unix", path="nowhere"), b"", ""))
    while not launcher._at_work:
        await asyncio.sleep(0.01)
    launch.cancel()
    await asyncio.gather(launch, return_exceptions=True)
    launcher.silent = True  # as its pipeline's core says of one that does not answer; it is killed then
    await leave(launcher)
    assert launcher.ended.done()
    assert not warm_launchers._idle
