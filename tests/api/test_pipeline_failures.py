"""Stages, transports and cores that fail: the request concerned gets a typed error, nothing leaks, nothing hangs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.pipeline_driver import (
    GOOD,
    LONG,
    ONE,
    TEXT,
    TWO,
    Case,
    all_tokens,
    failing,
    good_ones,
    serving,
    threads_of,
)
from support.wrapped_transports import WrappedTransport
from trinity.connector import Connector
from trinity.core import InstanceCore
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.messages import IMAGE, KV, Open, Sampled, Step
from trinity.errors import (
    ClosedError,
    MigrationError,
    PeerLost,
    RequestError,
    StageError,
    TransferTimeout,
    TransportError,
)
from trinity.instance import Instance
from trinity.memory.block_memory import BlockMemory
from trinity.pipeline import Pipeline
from trinity.stages.base import Stage, StageFactory, StageSetup
from trinity.stages.encode import EncodeStage
from trinity.stages.language import LanguageStage
from trinity.transport.base import ByteRange, Remote
from trinity.transport.inproc import InprocTransport

Break = Callable[[Step], Any]
OWN_IMAGES = Case("<image> and <image>, but which?", (8, 9))


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


# ---------------------------------------------------------------- stages


class Broken:
    """A stage around a built-in one: ``wrong(step)`` raises, or its answer (if any) stands in for the stage's."""

    def __init__(self, inner: Stage, wrong: Break) -> None:
        self.inner, self.wrong = inner, wrong
        self.letters = inner.letters

    def open(self, request: Open) -> None:
        self.inner.open(request)

    def close(self, request: str) -> None:
        self.inner.close(request)

    def forward(self, step: Step) -> dict[str, Sampled]:
        answer = self.wrong(step)
        return self.inner.forward(step) if answer is None else answer


def broken(letters: str, wrong: Break) -> StageFactory:
    def make(setup: StageSetup) -> Stage:
        if letters == "E":
            return Broken(EncodeStage(setup.model, setup.memory[IMAGE]), wrong)
        memory = setup.memory
        return Broken(LanguageStage(setup.model, memory[KV], memory.get(IMAGE), letters=letters), wrong)

    return make


def names(step: Step) -> set[str]:
    return {row.request for row in step.encodes} | {row.request for row in step.prefills} | set(step.decodes)


def refusing(letter: str) -> Break:
    def refuse(step: Step) -> None:
        encodes, prefills = [row.request for row in step.encodes], [row.request for row in step.prefills]
        if "bad" in {"E": encodes, "P": prefills, "D": step.decodes}[letter]:
            raise OSError("no such luck")

    return refuse


def instances(roles: Sequence[str], letter: str, wrong: Break) -> list[Instance]:
    """One instance per group of roles; the one with ``letter`` runs it, and all else that it serves, brokenly."""
    made = []
    for each in roles:
        letters = letter if letter == "E" else each.replace("E", "")
        own = [broken(letters, wrong)] if letter in each else []
        made.append(Instance(each, stages=own))
    return made


@pytest.mark.parametrize("letter", ["E", "P", "D"])
@pytest.mark.parametrize("placement", ["E+P+D", "EPD", "ED+P"])
async def test_a_stage_that_raises_for_one_request(placement: str, letter: str) -> None:
    async with serving(instances(placement.split("+"), letter, refusing(letter))) as pipe:
        error = await failing(pipe, OWN_IMAGES.request(request_id="bad"), StageError)
        assert (error.stage, error.request_id) == (letter, "bad")
        assert "OSError: no such luck" in str(error)
        assert len(error.output.token_ids) == (1 if letter == "D" else 0)
        assert error.output.finish_reason == "error"
        await good_ones(pipe)


async def test_a_broken_image_does_not_spoil_the_same_image_of_another_request() -> None:
    """All wait for one encoding; when its owner fails, another one encodes for itself."""
    owner: list[str] = []

    def refuse_the_first(step: Step) -> None:
        owner.extend(sorted(names(step))[: 1 - len(owner)])
        if owner[0] in names(step):
            raise OSError("no such luck")

    async with serving(instances(["E", "PD"], "E", refuse_the_first)) as pipe:
        requests = [TWO.request() for _ in range(4)]
        found = await asyncio.gather(*map(pipe.complete, requests), return_exceptions=True)
        for request, answer in zip(requests, found, strict=True):
            if request.request_id == owner[0]:
                assert isinstance(answer, StageError)
            else:
                assert getattr(answer, "token_ids", answer) == TWO.tokens


@pytest.mark.parametrize("letter", ["E", "P", "D"])
async def test_a_stage_that_always_raises(letter: str) -> None:
    def always(step: Step) -> None:
        raise OSError("never works")

    async with serving(instances(["E", "P", "D"], letter, always)) as pipe, asyncio.timeout(120):
        outputs = await asyncio.gather(*(pipe.complete(case.request()) for case in GOOD * 3), return_exceptions=True)
        for case, found in zip(GOOD * 3, outputs, strict=True):
            if letter == "E" and not case.pictures:
                assert getattr(found, "token_ids", found) == case.tokens
            else:
                assert isinstance(found, StageError)
                assert found.stage == letter


WRONG_ANSWERS: dict[str, Break] = {
    "nothing": lambda step: {},
    "numbers": lambda step: dict.fromkeys(names(step), 5),
    "a list": lambda step: [Sampled(1)],
    "words": lambda step: {name: Sampled("five") for name in names(step)},  # type: ignore[arg-type]
    "exit": lambda step: sys.exit("a stage must not end a lane"),
    "not a token": lambda step: {name: Sampled(-(10**12)) for name in names(step)},
}


@pytest.mark.parametrize("name", WRONG_ANSWERS)
async def test_a_stage_that_answers_nonsense(name: str) -> None:
    def nonsense(step: Step) -> Any:
        return WRONG_ANSWERS[name](step) if "bad" in names(step) and step.decodes else None

    async with serving(instances(["E", "P", "D"], "D", nonsense)) as pipe, asyncio.timeout(120):
        error = (await asyncio.gather(pipe.complete(ONE.request(request_id="bad")), return_exceptions=True))[0]
        assert isinstance(error, RequestError), error
        assert error.request_id == "bad"
        await good_ones(pipe)


async def test_a_stage_that_cannot_open_a_request() -> None:
    class Shut(Broken):
        def open(self, request: Open) -> None:
            if request.work.request == "bad":
                raise OSError("shut")
            super().open(request)

    def make(setup: StageSetup) -> Stage:
        return Shut(LanguageStage(setup.model, setup.memory[KV], None, letters="D"), lambda step: None)

    async with serving([Instance("EP"), Instance("D", stages=[make])]) as pipe:
        error = await failing(pipe, TEXT.request(request_id="bad"), StageError)
        assert error.stage == "D"


async def test_an_observer_that_raises_fails_its_request() -> None:
    def observe(request: str, index: int, logits: object) -> None:
        if request == "bad" and index == 2:
            raise OSError("seen enough")

    async with serving("EP+D", observe=observe) as pipe:
        error = await failing(pipe, TEXT.request(request_id="bad"), StageError)
        assert "seen enough" in str(error)
        assert error.output.token_ids == TEXT.tokens[:2]


# ---------------------------------------------------------------- transports


@pytest.mark.parametrize(("kind", "source", "target"), [("image", "E0", "P0"), ("kv", "P0", "D0")])
async def test_a_read_that_fails(kind: str, source: str, target: str) -> None:
    failed: list[int] = []

    def fail(which: str, count: int) -> bool:
        if which == kind and not failed:
            failed.append(count)
            return True
        return False

    async with serving("E+P+D", connector=WrappedTransport(fail=fail), failures=NO_RECOVERY) as pipe:
        with pytest.raises(MigrationError) as caught:
            await pipe.complete(TWO.request(request_id="unlucky"))
        error = caught.value
        assert (error.source, error.target, error.kind, error.request_id) == (source, target, kind, "unlucky")
        assert type(error.__cause__) is PeerLost
        assert isinstance(error.output, object)
        await good_ones(pipe, rounds=2)


@pytest.mark.parametrize("failures", [NO_RECOVERY, FailurePolicy()], ids=["once", "recovered"])
async def test_reads_that_fail_now_and_then_among_many_requests(failures: FailurePolicy) -> None:
    options: dict[str, Any] = {"image_cache": False, "prefix_cache": False, "failures": failures}
    transport = WrappedTransport(fail=lambda kind, count: count % 5 == 2)
    async with serving("2E2P2D", connector=transport, **options) as pipe:
        cases: Sequence[Case] = GOOD * 8
        found = await asyncio.gather(*(pipe.complete(case.request()) for case in cases), return_exceptions=True)
        failed = [each for each in found if isinstance(each, BaseException)]
        assert failed or failures.recoveries
        assert {type(each) for each in failed} <= {MigrationError}, failed
        served = [(case, each) for case, each in zip(cases, found, strict=True) if not isinstance(each, BaseException)]
        assert served
        assert all(output.token_ids == case.tokens for case, output in served)


class Foreign(InprocTransport):
    """Raises what no transport should: an error that is not of trinity, from ``read`` or from ``attach``."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Any:
        if self.where == "attach":
            raise KeyError("peer")
        return Unreadable(await super().attach(descriptor, into))


class Unreadable:
    def __init__(self, inner: Remote) -> None:
        self.inner = inner

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        raise OSError(113, "No route to host")

    async def generation(self, source: Sequence[int]) -> int:
        raise OSError(113, "No route to host")

    async def aclose(self) -> None:
        raise OSError(9, "Bad file descriptor")


@pytest.mark.parametrize(("where", "says"), [("read", "No route to host"), ("attach", "KeyError")])
async def test_a_transport_that_raises_foreign_errors(where: str, says: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving("EP+D", connector=Foreign(where)) as pipe, asyncio.timeout(120):
        for case in GOOD:
            with pytest.raises(MigrationError, match=says) as caught:
                await pipe.complete(case.request())
            assert type(caught.value.__cause__) is TransportError
    assert ("could not be closed" in caplog.text) == (where == "read")  # closing fails too: said, and gone on
    assert not pipe.connector.routes["kv"].transport._numbers  # type: ignore[attr-defined]


class Slow(InprocTransport):
    """Takes its time to attach; ``attached`` counts how often."""

    attached = 0

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Any:
        self.attached += 1
        await asyncio.sleep(0.02)
        return await super().attach(descriptor, into)


async def test_reads_at_once_attach_once() -> None:
    transport = Slow()
    async with serving("EP+D", connector=transport) as pipe:
        await good_ones(pipe, rounds=3)
    assert transport.attached == 1


async def test_a_read_that_never_ends_is_bounded() -> None:
    connector = Connector(WrappedTransport(delay_s=60), timeout_s=0.1)
    async with serving("EP+D", connector=connector) as pipe:
        with pytest.raises(MigrationError, match=r"more than 0\.1 s") as caught:
            await pipe.complete(TEXT.request())
        assert type(caught.value.__cause__) is TransferTimeout


# ---------------------------------------------------------------- a core that crashes


class Crash(AssertionError):
    pass


@pytest.mark.parametrize("victim", ["E0", "P0", "D0"])
async def test_a_core_that_crashes_ends_every_request_and_the_pipeline_can_be_closed(
    victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = InstanceCore.handle

    def handle(core: InstanceCore, event: Any, now: float) -> Any:
        if core.settings.name == victim and armed:
            raise Crash("an invariant is broken")
        return real(core, event, now)

    armed: list[bool] = []
    monkeypatch.setattr(InstanceCore, "handle", handle)
    async with asyncio.timeout(120):
        found, late = await crash(armed)
    assert [type(error) for error in found[:4]] == [RequestError] * 4  # were being served
    assert all(type(error) in (RequestError, ClosedError) for error in found[4:])  # were being prepared
    for error in found[:4]:
        assert victim in str(error)
        assert isinstance(error.__cause__, Crash)
        assert any("last events" in note for note in error.__cause__.__notes__)
        assert error.output is not None
    assert isinstance(late, ClosedError)
    assert isinstance(late.__cause__, Crash)


async def test_a_crash_does_not_wait_for_reads_in_flight() -> None:
    connector = Connector(WrappedTransport(delay_s=3600), timeout_s=3600)
    async with Pipeline(checkpoint("llava"), "EP+D", dtype="float32", connector=connector) as pipe:
        reading = asyncio.ensure_future(pipe.complete(TEXT.request()))
        while not pipe.hosts["D0"]._tasks:
            await asyncio.sleep(0.001)
        pipe._frontend.report_crash("EP0", Crash("an invariant is broken"))
        with pytest.raises(RequestError, match="EP0 failed"):
            await reading
        async with asyncio.timeout(120):
            await pipe.aclose()
    assert not pipe.hosts["D0"]._tasks


class Unprintable(Crash):
    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


async def test_a_crash_whose_text_cannot_be_printed_ends_every_request() -> None:
    connector = Connector(WrappedTransport(delay_s=3600), timeout_s=3600)
    async with Pipeline(checkpoint("llava"), "EP+D", dtype="float32", connector=connector) as pipe:
        reading = asyncio.ensure_future(pipe.complete(TEXT.request()))
        while not pipe.hosts["D0"]._tasks:
            await asyncio.sleep(0.001)
        pipe._frontend.report_crash("EP0", Unprintable())
        with pytest.raises(RequestError, match=r"EP0 failed .*cannot be read"):
            await asyncio.wait_for(reading, 120)


async def crash(armed: list[bool]) -> tuple[list[Any], BaseException]:
    """The errors of all that were there at the crash, and of one that comes later."""
    async with Pipeline(checkpoint("llava"), "E+P+D", dtype="float32") as pipe:
        waiting = [asyncio.ensure_future(pipe.complete(LONG.request())) for _ in range(3)]
        while len(pipe._frontend.core.entries) < 3:
            await asyncio.sleep(0.001)
        async with pipe.stream(LONG.request()) as tokens:
            await anext(aiter(tokens))
            armed.append(True)
            waiting += [asyncio.ensure_future(pipe.complete(LONG.request())) for _ in range(3)]
            with pytest.raises(RequestError, match="failed") as caught:
                async for _ in tokens:
                    pass
        found = [caught.value, *await asyncio.gather(*waiting, return_exceptions=True)]
        while any(thread.is_alive() for host in pipe.hosts.values() for thread in threads_of(host)):
            await asyncio.sleep(0.001)  # the other instances do not go on with what nobody waits for
        (late,) = await asyncio.gather(pipe.complete(TEXT.request()), return_exceptions=True)
    assert isinstance(late, BaseException)
    return found, late
