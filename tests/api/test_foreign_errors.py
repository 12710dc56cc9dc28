"""Code that is not trinity's raises anything, or answers nonsense: that request ends, typed, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.checkpoint_files import checkpoint
from support.image_reader import image_reader
from support.pipeline_driver import GOOD, ONE, TEXT, all_tokens, good_ones, nothing_left, picture, serving
from support.thinned import in_turns, rarely
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import End, FrontendCore, FrontendOptions
from trinity.core.messages import PeerUp, Sampled, Step, Submit, Work
from trinity.errors import RequestError, StageError, describe_error, own_errors
from trinity.instance import Instance
from trinity.memory.block_memory import BlockMemory
from trinity.preprocess.text.detokenizer import TableText, WindowText
from trinity.request import Request, Sampling
from trinity.stages import IMAGE, KV, EncodeStage, LanguageStage

LIVENESS_S = 60.0


class Odd(BaseException):
    """No Exception, and without a text."""

    def __str__(self) -> str:
        raise SystemExit("no text")


class Torn(Exception):
    def __str__(self) -> str:
        return "half \ud800 " * 10_000


FOREIGN: list[BaseException] = [
    MemoryError("no room"),
    RecursionError("too deep"),
    SystemExit(3),
    GeneratorExit(),
    StopIteration(),
    TimeoutError("foreign"),
    BaseException("plain"),
    Odd(),
    Torn(),
]
errors = pytest.mark.parametrize("error", FOREIGN, ids=lambda each: type(each).__name__)


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


@given(st.sampled_from(FOREIGN) | st.builds(Exception, st.text() | st.binary() | st.integers()))
def test_any_error_becomes_the_requests_own_in_plain_words(error: BaseException) -> None:
    with pytest.raises(RequestError) as caught, own_errors("r", "the work"):
        raise error
    assert caught.value.request_id == "r"
    assert caught.value.__cause__ is error
    said = str(caught.value)
    assert said.encode().decode().startswith(f"the work failed ({type(error).__name__}")
    assert len(describe_error(error)) <= 1000


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError(), StageError("own", "s", "P")])
def test_some_keep_their_meaning(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, own_errors("r", "the work", (asyncio.CancelledError,)):
        raise error
    assert caught.value is error


async def refused(pipe: Any, request: Request, says: str) -> RequestError:
    async with asyncio.timeout(LIVENESS_S):
        with pytest.raises(RequestError, match=says) as caught:
            await pipe.complete(request)
    assert caught.value.request_id == request.request_id
    return caught.value


@errors
async def test_the_models_processor_raises(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("E+PD") as pipe:

        def raising(*_: Any, **__: Any) -> Any:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(type(image_reader(pipe.processor)), "read", raising)
            await refused(pipe, ONE.request(), type(error).__name__)
            two = [picture for one in (ONE, ONE) for picture in one.request().images]
            await refused(pipe, Request("<image><image>", images=two), type(error).__name__)
            patched.setattr(pipe.processor._prompt_tokenizer, "_tokenizer", raising)
            await refused(pipe, TEXT.request(), type(error).__name__)
        await good_ones(pipe)


NONSENSE: list[Any] = [
    None,
    7,
    {},
    {"input_ids": None},
    {"input_ids": "abc"},
    {"input_ids": [1.5]},
    {"input_ids": [-1]},
]
NONSENSE += [{"input_ids": [10**30]}, {"input_ids": [np.int64(5)]}, {"input_ids": [True]}, {"input_ids": [[1, 2]]}]


async def test_the_tokenizer_answers_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("EPD") as pipe:
        for answer in NONSENSE:
            with monkeypatch.context() as patched:
                patched.setattr(
                    pipe.processor._prompt_tokenizer, "_tokenizer", lambda *_, _answer=answer, **__: _answer
                )
                await refused(pipe, TEXT.request(), "cannot be tokenized")
        await good_ones(pipe)


@pytest.mark.parametrize(
    ("error", "method"),
    [
        pytest.param(error, method, marks=rarely(often), id=f"{type(error).__name__}-{method}")
        for error, method, often in in_turns(FOREIGN, ("__init__", "push", "finish"), 6)
    ],
)
async def test_the_detokenizer_raises(error: BaseException, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token by token, and for those that nobody reads one by one."""
    async with serving("EP+D") as pipe:

        def raising(*_: Any, **__: Any) -> Any:
            raise error

        stopping = TEXT.request(sampling=Sampling.greedy(stop=("never said",)))
        with monkeypatch.context() as patched:

            def answer(name: str, way: Callable[..., Any]) -> None:
                for kind in (TableText, WindowText):
                    patched.setattr(kind, name, way)

            answer(method, raising)
            await refused(pipe, stopping, type(error).__name__)
            if method == "push":
                answer("push_all", raising)
            await refused(pipe, TEXT.request(), type(error).__name__)
            for name in [method, *["push_all"] * (method == "push")]:
                answer(name, lambda *_: b"bytes")
            await refused(pipe, TEXT.request(), "bytes|NoneType|TypeError")
        await good_ones(pipe)


class Unprintable(Exception):
    """An error whose text cannot be read in any way."""

    def __repr__(self) -> str:
        raise RuntimeError("no text of it")

    __str__ = __repr__


async def test_a_detokenizer_raises_what_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its own request alone: the front end is not in the middle of others' tokens when its text is made."""

    def raising(*_: Any) -> str:
        raise Unprintable

    async with serving("EP+D") as pipe:
        with monkeypatch.context() as patched:
            for kind in (TableText, WindowText):
                patched.setattr(kind, "push", raising)
            await refused(pipe, TEXT.request(sampling=Sampling.greedy(stop=("never said",))), "its text cannot be read")
        await good_ones(pipe)


class Policy:
    """Round robin, but what a request named "bad..." makes of it."""

    informed = straight = False

    def __init__(self, answer: Any, letter: str) -> None:
        self.answer, self.letter = answer, letter

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp]) -> PeerUp:
        if work.request.startswith("bad") and letter == self.letter:
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer  # type: ignore[no-any-return]
        return peers[0]


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        pytest.param(answer, letter, marks=rarely(often), id=f"{type(answer).__name__}-{letter}")
        for answer, letter, often in in_turns([*FOREIGN, None, "P0", PeerUp("stranger", "EPD")], "EPD", 6)
    ],
)
async def test_a_routing_policy_fails(answer: Any, letter: str) -> None:
    """On the front end (E) and on instances (P, D)."""
    async with serving("E+P+D", routing=Policy(answer, letter)) as pipe:
        error = await refused(pipe, ONE.request(request_id="bad"), f"the routing policy .* at stage {letter}")
        assert isinstance(error, StageError)
        await good_ones(pipe)


def test_the_front_end_keeps_nothing_of_what_a_policy_refused() -> None:
    frontend = FrontendCore(Policy(SystemExit(), "P"), FrontendOptions(failures=NO_RECOVERY))
    frontend.handle(PeerUp("A", "EPD", pools={"image": 8, "kv": 64}), 0.0)
    (end,) = frontend.handle(Submit(Work(request="bad", prompt=(1,))), 0.0)
    assert isinstance(end, End)
    assert end.failure is not None
    assert end.failure.error == "StageError"
    assert not frontend.entries
    assert not frontend.waiting
    assert frontend.handle(Submit(Work(request="good", prompt=(1,))), 0.0)


class Raising(EncodeStage):
    """Raises on every other request, or answers with tokens that are none."""

    error: BaseException | None = None

    def forward(self, step: Step) -> dict[str, Sampled]:
        if self.error is not None and any(row.request.startswith("bad") for row in step.encodes):
            raise self.error
        return super().forward(step)


@errors
async def test_a_stage_raises(error: BaseException) -> None:
    def make(setup: Any) -> Any:
        memory: BlockMemory = setup.memory[IMAGE]
        stage = Raising(setup.model, memory)
        stage.error = error
        return stage

    async with serving([Instance("E", stages=[make]), Instance("PD")]) as pipe:
        request = Request("<image>", images=[picture(99)], request_id="bad")  # nobody else encodes this one for it
        bad = asyncio.ensure_future(refused(pipe, request, type(error).__name__))
        await good_ones(pipe)
        assert isinstance(await bad, StageError)
    nothing_left(pipe)


class Beyond(LanguageStage):
    """Samples an id of no token for every other request."""

    token = 0

    def forward(self, step: Step) -> dict[str, Sampled]:
        found = super().forward(step)
        return {name: Sampled(self.token) if name.startswith("bad") else each for name, each in found.items()}


@pytest.mark.parametrize("beyond", [0, 1, 1 << 40], ids=["the first", "the next", "far"])
async def test_a_stage_samples_what_is_no_token(beyond: int) -> None:
    def make(setup: Any) -> Any:
        stage = Beyond(setup.model, setup.memory[KV], setup.memory[IMAGE])
        stage.token = setup.model.config.get_text_config().vocab_size + beyond
        return stage

    async with serving([Instance("E"), Instance("PD", stages=[make])]) as pipe:
        bad = asyncio.ensure_future(refused(pipe, TEXT.request(request_id="bad"), "Sampled.token must be an int from"))
        await good_ones(pipe)
        assert isinstance(await bad, StageError)
    nothing_left(pipe)


def test_all_cases_are_really_served() -> None:
    assert checkpoint("llava").exists()
    assert len(GOOD) == 3
