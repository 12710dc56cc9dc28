"""Bad input: a typed error that says what to do next, on that request alone; the others go on and stay exact."""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.checkpoint_files import checkpoint
from support.pipeline_driver import GOOD, ONE, TEXT, TWO, all_tokens, failing, failing_all, good_ones, picture, serving
from support.pipeline_options import pipeline_options
from trinity.connector import Connector
from trinity.core.messages import Submit, Work
from trinity.errors import (
    BadMedia,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    Overloaded,
    PlacementError,
    RequestError,
    RequestTooLarge,
    UnknownName,
    UnsupportedModel,
)
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.pipeline.stream import reduce_deadline
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import ProcessedRequest
from trinity.request import Media, Request, Sampling

pytestmark = pytest.mark.usefixtures("expected")


@pytest.fixture(scope="module")
def expected() -> None:
    all_tokens()


# ---------------------------------------------------------------- the pipeline itself


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ("EXD", "names unknown stage X"),
        ("", "is not a placement"),
        ("0EPD", "instance count"),
        ("E-P-D", "is not a placement"),
        ("E+P", "no instance for stage D"),
        ("1E1D", "no instance for stage P"),
        ([Instance("E"), Instance("P")], "no instance for stage D"),
        ([], "at least one instance"),
        ([Instance("PD", "one"), Instance("PD", "one")], "a name of its own"),
        ([Instance("PD", "frontend")], "a name of its own"),
    ],
)
def test_placement(placement: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Pipeline(checkpoint("llava"), placement)


@pytest.mark.parametrize("roles", ["", "X", "E+P", "2E", "EE", "E P"])
def test_roles_of_an_instance(roles: str) -> None:
    with pytest.raises(PlacementError, match=r"E.*P.*D"):
        Instance(roles)


async def refused_at_start(model: Path, placement: Any = "EPD", **settings: Any) -> BaseException:
    pipe = Pipeline(model, placement, **pipeline_options(settings))
    with pytest.raises(ConfigError) as caught:
        await pipe.start()
    assert pipe.connector._closed
    with pytest.raises(ClosedError):
        await pipe.complete(TEXT.request())
    await pipe.aclose()
    return caught.value


async def test_placement_without_the_stage_that_the_model_needs() -> None:
    error = await refused_at_start(checkpoint("llava"), "P+D")
    assert isinstance(error, PlacementError)
    assert "encode stage (E)" in str(error)
    error = await refused_at_start(checkpoint("llama"), "E+PD")
    assert "text-only" in str(error)


def test_missing_model_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; give the directory"):
        Pipeline(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        Pipeline(tmp_path)


async def test_unknown_architecture_lists_the_known_and_how_to_add_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "abacus", "architectures": ["Abacus"]}))
    error = await refused_at_start(tmp_path)
    assert isinstance(error, UnsupportedModel)
    for expected in ("llava", "qwen2_5_vl", "trinity.models", "adapter"):
        assert expected in str(error)


async def test_broken_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "not valid JSON" in str(await refused_at_start(tmp_path))


async def test_pools_without_a_block() -> None:
    error = await refused_at_start(checkpoint("llava"), "EPD", pools={"image": 4, "kv": 0})
    assert "at least one block of kv" in str(error)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UnknownName, match=r"transport 'carrier-pigeon'; known: .*inproc"):
        Pipeline(checkpoint("llava"), connector="carrier-pigeon")
    with pytest.raises(UnknownName, match=r"routing policy 'best'; known: .*round_robin"):
        Pipeline(checkpoint("llava"), routing="best")


async def test_a_connector_is_not_shared() -> None:
    connector = Connector("inproc")
    async with serving("E+PD", connector=connector):
        error = await refused_at_start(checkpoint("llava"), "E+PD", connector=connector)
    assert "one pipeline" in str(error)


# ---------------------------------------------------------------- one request among good ones


def encoded(form: str = "PNG", size: tuple[int, int] = (64, 48)) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.resize(picture(7), (*size[::-1], 3))).save(data, form)
    return data.getvalue()


BOMB = Image.new("1", (12_000, 12_000))


def bomb() -> bytes:
    data = io.BytesIO()
    BOMB.save(data, "PNG")
    return data.getvalue()


IMAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "missing": (lambda: "no/such/file.jpg", "there is no file"),
    "corrupt": (lambda: b"\x89PNG\r\n\x1a\n" + b"garbage" * 40, "corrupt"),
    "not an image": (lambda: b"hello", "supported format"),
    "truncated": (lambda: encoded("JPEG")[:400], "truncated"),
    "no bytes": (lambda: b"", "0 bytes"),
    "zero size": (lambda: np.zeros((0, 8, 3), np.uint8), "0"),
    "bomb": (bomb, "bomb|pixels"),
    "too many pixels": (lambda: encoded(size=(300, 300)), "pixels"),
    "wrong dtype": (lambda: np.zeros((8, 8, 3), complex), "no pixels"),
    "numbers out of range": (lambda: np.full((8, 8, 3), 3.5), "outside the range"),
    "not even media": (lambda: 17, "give a path"),
    "url": (lambda: "https://example.invalid/cat.jpg", "allow_urls"),
    "unknown kind": (lambda: Media("smell", b""), "kind 'smell'"),
}


def image_requests() -> dict[str, Request]:
    made = {}
    for name, (make, _) in IMAGES.items():
        source = make()
        media = {"media": [source]} if isinstance(source, Media) else {"images": [source]}
        made[name] = Request("<image> What?", max_tokens=4, **media)
    return made


async def test_images() -> None:
    """All of them at once, beside good ones."""
    requests = image_requests()
    async with serving("E+PD", limits=MediaLimits(max_pixels=80_000)) as pipe:
        found = await failing_all(pipe, requests.values())
        await good_ones(pipe)
        assert pipe.metrics.summary()["refused"] == {"BadMedia": len(IMAGES)}
    for (name, request), error in zip(requests.items(), found, strict=True):
        assert isinstance(error, BadMedia), f"{name}: {error!r}"
        assert error.request_id == request.request_id, name
        assert re.search(IMAGES[name][1], str(error)), f"{name}: {error}"


REQUESTS: dict[str, tuple[Callable[[], Any], type[RequestError], str]] = {
    "more images": (lambda: Request("<image>", images=[picture(1), picture(2)]), BadMedia, "2 image item.*1 <image>"),
    "fewer images": (lambda: Request("<image><image>", images=[picture(1)]), BadMedia, "1 image item.*2 <image>"),
    "no image": (lambda: Request("<image> What?"), BadMedia, "0 image item"),
    "no marker": (lambda: Request("What?", images=[picture(1)]), BadMedia, "1 image item"),
    "one image, no list": (lambda: Request("<image>", images="cat.jpg"), RequestError, "images must be a list"),
    "an array, no list": (lambda: Request("<image>", images=picture(1)), RequestError, "images must be a list"),  # type: ignore[arg-type]
    "media without kind": (lambda: Request("<image>", media=[picture(1)]), RequestError, r"trinity\.Media"),  # type: ignore[list-item]
    "prompt beyond the context": (lambda: Request("word " * 5000), RequestTooLarge, "context of"),
    "images beyond the context": (
        lambda: Request("<image>" * 60 + "word " * 600, images=[picture(1)] * 60),
        RequestTooLarge,
        "fewer or smaller images",
    ),
    "no prompt": (lambda: Request(), RequestError, "prompt= .* or messages="),
    "both": (lambda: Request("a", messages=[{"role": "user", "content": "b"}]), RequestError, "not both"),
    "prompt is bytes": (lambda: Request(b"hello"), RequestError, "must be text"),  # type: ignore[arg-type]
    "zero tokens": (lambda: Request("a", max_tokens=0), RequestError, "max_tokens"),
    "negative tokens": (lambda: Request("a", max_tokens=-3), RequestError, "max_tokens"),
    "half a token": (lambda: Request("a", max_tokens=1.5), RequestError, "max_tokens"),  # type: ignore[arg-type]
    "deadline 0": (lambda: Request("a", deadline_s=0), RequestError, "deadline_s"),
    "deadline NaN": (lambda: Request("a", deadline_s=math.nan), RequestError, "deadline_s"),
    "deadline in words": (lambda: Request("a", deadline_s="soon"), RequestError, "deadline_s"),  # type: ignore[arg-type]
    "no id": (lambda: Request("a", request_id=""), RequestError, "request_id"),
    "not a request": (lambda: "hello", RequestError, r"give a trinity\.Request"),
}


async def test_requests() -> None:
    """All of them at once, beside good ones."""
    requests = {name: make() for name, (make, _, _) in REQUESTS.items()}
    async with serving("E+PD") as pipe:
        found = await failing_all(pipe, requests.values())
        await good_ones(pipe)
        assert pipe.metrics.summary()["finished"] == {"refused": len(REQUESTS), "length": 2 * len(GOOD)}
    for (name, request), error in zip(requests.items(), found, strict=True):
        _, kind, says = REQUESTS[name]
        assert type(error) is kind, f"{name}: {error!r}"
        assert error.request_id == getattr(request, "request_id", ""), name
        assert re.search(says, str(error)), f"{name}: {error}"


SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": math.nan},
    "temperature below 0": {"temperature": -0.1},
    "temperature inf": {"temperature": math.inf},
    "top_p": {"top_p": 0.0},
    "top_p NaN": {"top_p": math.nan},
    "top_k": {"top_k": -1},
    "top_k half": {"top_k": 2.5},
    "min_p": {"min_p": 1.5},
    "repetition_penalty": {"repetition_penalty": 0.0},
    "logprobs": {"logprobs": -1},
    "seed": {"seed": "7"},
    "stop": {"stop": ("",)},
    "stop is a number": {"stop": 5},
    "stop_token_ids": {"stop_token_ids": ("a",)},
    "stop_token_ids is one": {"stop_token_ids": 5},
}


async def test_sampling() -> None:
    async with serving("E+PD") as pipe:
        for name, fields in SAMPLING.items():
            request = Request("a", sampling=Sampling(**fields))
            with pytest.raises(RequestError, match=name.split()[0]) as caught:
                await pipe.complete(request)
            assert caught.value.request_id == request.request_id
        await failing(pipe, Request("a", sampling={"temperature": 1}), RequestError)  # type: ignore[arg-type]


# ---------------------------------------------------------------- too much


@pytest.mark.parametrize("placement", ["EPD", "E+P+D", "ED+P"])
async def test_beyond_the_pool_is_refused_at_once(placement: str) -> None:
    async with serving(placement, pools={"image": 2, "kv": 8}) as pipe, asyncio.timeout(120):
        for request in (
            Request("word " * 120, max_tokens=1),
            Request("short", max_tokens=300),
            Request("<image>" * 3, images=[picture(each) for each in range(3)], max_tokens=2),
        ):
            error = await failing(pipe, request, RequestTooLarge)
            assert error.request_id == request.request_id
            assert "pools" in str(error)
            assert error.output.finish_reason == "error"


async def test_output_beyond_the_context_is_clipped_and_reported() -> None:
    async with serving("E+P+D") as pipe:
        each = len(pipe.processor.tokenizer("word " * 10)["input_ids"]) // 10
        prompt = "word " * (pipe.processor.context_length // each - 8)
        output = await pipe.complete(Request(prompt, max_tokens=10**7, sampling=Sampling(ignore_eos=True)))
        assert output.prompt_tokens > 1900
        assert output.clipped
        assert output.finish_reason == "length"
        assert output.max_tokens == pipe.processor.context_length - output.prompt_tokens == len(output.token_ids)
        assert not (await pipe.complete(TEXT.request())).clipped


async def test_more_waiting_than_allowed() -> None:
    async with serving("E+PD", max_waiting=3) as pipe:
        answers = await asyncio.gather(*(pipe.complete(TWO.request()) for _ in range(12)), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, Overloaded)]
        served = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert len(refused) == 9
        assert [output.token_ids for output in served] == [TWO.tokens] * 3
        assert "max_waiting" in str(refused[0])
        assert refused[0].request_id
        await good_ones(pipe)  # the room is there again
        assert pipe.metrics.summary()["refused"] == {"Overloaded": 9}


async def test_the_same_id_twice_at_once() -> None:
    async with serving() as pipe:
        both = (ONE.request(request_id="mine"), TWO.request(request_id="mine"))
        first, second = await asyncio.gather(*map(pipe.complete, both), return_exceptions=True)
        assert not isinstance(first, BaseException)
        assert first.token_ids == ONE.tokens
        assert isinstance(second, RequestError)
        assert second.request_id == "mine"
        again = await pipe.complete(both[1])  # one after the other is fine
        assert again.token_ids == TWO.tokens


async def test_the_same_request_again_right_after_it_was_left() -> None:
    async with serving() as pipe:
        request = ONE.request()
        for _ in range(5):
            async with pipe.stream(request) as tokens:
                await anext(aiter(tokens))
        assert (await pipe.complete(request)).token_ids == ONE.tokens


# ---------------------------------------------------------------- deadlines


async def test_deadline_while_tokens_come() -> None:
    async with serving() as pipe:
        request = ONE.request(max_tokens=2000, deadline_s=0.15)
        error = await failing(pipe, request, DeadlineExceeded)
        assert error.request_id == request.request_id
        assert error.output.finish_reason == "deadline"
        assert error.output.token_ids[: len(ONE.tokens)] == ONE.tokens[: len(error.output.token_ids)]
        assert len(error.output.token_ids) < 2000
        await good_ones(pipe)


async def test_deadline_before_the_first_token() -> None:
    async with serving() as pipe:
        error = await failing(pipe, ONE.request(deadline_s=1e-9), DeadlineExceeded)
        assert error.output.finish_reason == "deadline"
        assert error.output.token_ids == []
        assert pipe.metrics.summary()["finished"]["deadline"] == 1


def test_preparing_uses_up_the_deadline() -> None:
    timed, untimed = (ProcessedRequest(Work(request="r", prompt=(1,), deadline_s=each)) for each in (2.0, None))
    assert reduce_deadline(timed, 0.5).work.deadline_s == 1.5
    assert reduce_deadline(timed, 5.0).work.deadline_s == 0.0
    assert reduce_deadline(untimed, 5.0) is untimed


async def test_the_deadline_counts_from_the_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving("EP+D") as pipe:
        prepare, post = pipe.processor.aprocess, pipe._frontend.post
        left: list[float] = []

        async def slowly(request: Request) -> ProcessedRequest:
            await asyncio.sleep(0.05)
            return await prepare(request)

        def noting(event: Any) -> None:
            left.extend([event.work.deadline_s or 0.0] if isinstance(event, Submit) else [])
            post(event)

        monkeypatch.setattr(pipe.processor, "aprocess", slowly)
        monkeypatch.setattr(pipe._frontend, "post", noting)
        await pipe.complete(TEXT.request(deadline_s=30.0))
        assert 0 < left[0] <= 29.95


async def test_a_deadline_that_is_met_changes_nothing() -> None:
    async with serving() as pipe:
        assert (await pipe.complete(TWO.request(deadline_s=60))).token_ids == TWO.tokens
