"""Every request that ``check_request`` passes ends or is refused, whatever its fields hold."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import End, FrontendCore, FrontendOptions
from trinity.core.messages import PeerUp, Submit, Work
from trinity.core.routing.router import RoundRobin
from trinity.errors import RequestError
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling, check_request

MODEL = "qwen2_vl"  # its tokenizer adds no first token: "" has none at all
LONGEST_S = 60.0  # no request of this file needs more than a few milliseconds


def serving(**settings: Any) -> Pipeline:
    chosen = {"dtype": "float32", "pools": {"image": 8, "kv": 64}, **settings}
    return Pipeline(checkpoint(MODEL), "E+P+D", **pipeline_options(chosen))


EMPTY: dict[str, Request] = {
    "prompt": Request(""),
    "prompt, sampled": Request("", sampling=Sampling(temperature=1.0, seed=1)),
    "one token": Request("", max_tokens=1),
}


async def test_prompts_without_a_token_are_refused_and_leave_the_room_to_others() -> None:
    async with serving(max_waiting=2) as pipe, asyncio.timeout(LONGEST_S):
        for _ in range(2):
            for name, request in EMPTY.items():
                with pytest.raises(RequestError, match="no tokens; give it text") as caught:
                    await pipe.complete(Request(**{**_fields(request), "request_id": name}))
                assert caught.value.request_id == name
        assert (await pipe.complete(Request("Hello", max_tokens=2))).token_ids
        await pipe.wait_idle()


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__struct_fields__}


@pytest.mark.parametrize("work", [Work(request="r", prompt=()), Work(request="r", prompt=(1,), max_tokens=0)])
def test_the_front_end_refuses_work_that_no_instance_would_ever_end(work: Work) -> None:
    """Whoever makes it: a request processor, an emulated one, or a user's."""
    frontend = FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY))
    frontend.handle(PeerUp("A", "EPD", pools={"image": 8, "kv": 64}), 0.0)
    (end,) = frontend.handle(Submit(work), 0.0)
    assert isinstance(end, End)
    assert end.failure is not None
    assert end.failure.error == "RequestError"
    assert not frontend.entries
    assert not frontend.waiting


# ---------------------------------------------------------------- whatever its fields hold

TEXTS = st.text(max_size=12) | st.sampled_from(["", " ", "\x00", "<image>", "<image><image>", "<|image_pad|>", "Why?"])
ROLES = st.sampled_from(["user", "assistant", "system", "", "\U0001f600"])
PARTS = st.lists(
    st.one_of(
        st.just({"type": "image"}),
        st.builds(lambda text: {"type": "text", "text": text}, TEXTS),
        st.just({"type": "smell"}),
    ),
    max_size=3,
)
MESSAGES = st.lists(st.builds(lambda role, said: {"role": role, "content": said}, ROLES, TEXTS | PARTS), max_size=3)
PICTURES = st.lists(
    st.builds(lambda high, wide: np.zeros((high, wide, 3), np.uint8), st.integers(1, 60), st.integers(1, 60)),
    max_size=2,
)
NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0, 1, 1e-30, 1e30, -1])
WHOLE = st.integers(-2, 12) | st.sampled_from([2**31, 2**62, 10**30, None])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": NUMBERS,
    "top_k": WHOLE,
    "top_p": NUMBERS,
    "min_p": NUMBERS,
    "repetition_penalty": NUMBERS,
    "seed": WHOLE,
    "stop": st.lists(TEXTS, max_size=2).map(tuple),
    "stop_token_ids": st.lists(st.integers(-1, 300), max_size=3).map(tuple),
    "ignore_eos": st.booleans(),
    "logprobs": WHOLE,
}
SAMPLING = st.fixed_dictionaries({}, optional=FIELDS).map(lambda fields: Sampling(**fields))
PROMPTS = st.builds(lambda prompt: {"prompt": prompt}, TEXTS) | st.builds(lambda said: {"messages": said}, MESSAGES)
REQUESTS = st.builds(
    lambda prompt, rest: Request(**prompt, **rest),
    PROMPTS,
    st.fixed_dictionaries(
        {"max_tokens": st.integers(-1, 5) | st.sampled_from([10**6, 10**30])},
        optional={
            "images": PICTURES,
            "sampling": SAMPLING,
            "deadline_s": st.sampled_from([None, 0, -1.0, 1e-9, 1e3, float("inf")]),
            "session": TEXTS,
        },
    ),
)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def pipe(runner: asyncio.Runner) -> Iterator[Pipeline]:
    started = serving(max_waiting=4)
    runner.run(started.start())
    yield started
    runner.run(started.wait_idle())
    assert not started._frontend.streams
    runner.run(started.aclose())


@settings(max_examples=120, suppress_health_check=[*HealthCheck])
@given(request=REQUESTS)
def test_every_request_ends_or_is_refused(runner: asyncio.Runner, pipe: Pipeline, request: Request) -> None:
    async def serve() -> str:
        async with asyncio.timeout(LONGEST_S):
            try:
                return (await pipe.complete(request)).finish_reason
            except RequestError as error:
                return "refused" if error.request_id == request.request_id else f"refused as {error.request_id!r}"

    try:
        check_request(request)
    except RequestError:
        assert runner.run(serve()) == "refused"
    else:
        assert runner.run(serve()) in {"stop", "length", "refused"}
