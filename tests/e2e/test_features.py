"""``pipe.features``: the rows that the model's own class makes of images, to the bit, under any placement."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import trinity
from support.checkpoint_files import checkpoint
from support.emulated_pipelines import MODEL, POOLS
from support.paths import PHOTOS
from support.recordings import TEXT_ONLY, oracle
from support.stage_driver import picture
from trinity.core.messages import Collected, Failure
from trinity.core.scheduler import BatchRules
from trinity.emulation.model import EmulatedRequest
from trinity.errors import (
    BadMedia,
    ClosedError,
    DeadlineExceeded,
    Overloaded,
    RequestError,
    RequestTooLarge,
    StageError,
)
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline.features import make_feature_request
from trinity.testing.checkpoints import ARCHITECTURES

LIVENESS_S = 60.0
CAT, COFFEE = PHOTOS / "cat.jpg", PHOTOS / "coffee.jpg"
QUICK = ("llava", "qwen3_vl", "smolvlm")
CACHE = CacheConfig(pools={"image": 64, "kv": 64}, image_block_size=7)
SEE = [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image", "image": str(CAT)}]}]


def architectures() -> list[Any]:
    return [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in ARCHITECTURES
        if name not in TEXT_ONLY
    ]


def served(
    name: str, use: Callable[[trinity.Pipeline], Awaitable[None]], placement: str = "1E1P1D", **said: Any
) -> None:
    async def run() -> None:
        said.setdefault("cache", CACHE)
        async with trinity.Pipeline(checkpoint(name), placement, **said) as pipe, asyncio.timeout(LIVENESS_S):
            await use(pipe)
            await pipe.wait_idle()
            for host in pipe.hosts.values():
                host.core.check()

    asyncio.run(run())


def rows_of(name: str, images: Sequence[Any]) -> torch.Tensor:
    return oracle(name).features(trinity.Request("<image>" * len(images), images=images))


# ---------------------------------------------------------------- the rows


@pytest.fixture
def own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of transformers as they are: kernels that replace them round otherwise."""
    monkeypatch.setattr("trinity.stages.models.loader.use_kernels", lambda part, **named: None)
    monkeypatch.setattr("trinity.stages.models.loader._parts", {})  # nobody else's layers


@pytest.mark.usefixtures("own_layers")
@pytest.mark.parametrize("name", architectures())
def test_rows_are_to_the_bit_those_of_the_models_class(name: str) -> None:
    """One image after the other, then one that is cached, then as many at once as a step takes."""
    pictures = [picture(2, 60, 80), picture(3, 33, 120), CAT]
    wanted = [rows_of(name, [each]) for each in pictures]  # outside of the pipeline's event loop

    async def use(pipe: trinity.Pipeline) -> None:
        for image, rows in [*zip(pictures, wanted, strict=True), (pictures[0], wanted[0])]:
            found = await pipe.features(image)
            assert [each.dtype for each in found.rows] == [torch.float32]
            torch.testing.assert_close(found.rows[0], rows, rtol=0, atol=0)
            assert (found.media_tokens, found.route) == (len(rows), ["E0"])
        several = await asyncio.gather(*(pipe.features(image) for image in pictures))
        for found, rows in zip(several, wanted, strict=True):
            torch.testing.assert_close(found.rows[0], rows, rtol=1e-4, atol=1e-5)

    served(name, use)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_kernels_in_place_of_layers_round_otherwise_at_most(name: str) -> None:
    wanted = rows_of(name, [CAT])

    async def use(pipe: trinity.Pipeline) -> None:
        found = (await pipe.features(CAT)).rows[0]
        assert float((found - wanted).abs().max()) < 1e-4 * float(wanted.std())

    served(name, use, "EPD")


@pytest.mark.usefixtures("own_layers")
@pytest.mark.parametrize("placement", ["EPD", "ED+P", "2E1PD"])
def test_any_placement_that_has_an_encoder_gives_them(placement: str) -> None:
    wanted = rows_of("llava", [CAT])

    async def use(pipe: trinity.Pipeline) -> None:
        question = trinity.Request("<image> What?", images=[CAT], max_tokens=4)
        found, output, again = await asyncio.gather(pipe.features(CAT), pipe.complete(question), pipe.features(SEE))
        assert len(output.token_ids) == 4
        for each in (found, again):
            torch.testing.assert_close(each.rows[0], wanted, rtol=0, atol=0)
        assert set("".join(found.route)) & {"E"}

    served("llava", use, placement)


@pytest.mark.usefixtures("own_layers")
def test_several_media_are_given_in_the_order_of_the_prompt() -> None:
    wanted = [rows_of("llava", [each]) for each in (CAT, COFFEE)]

    async def use(pipe: trinity.Pipeline) -> None:
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]}]
        forms: list[Any] = [
            [CAT, COFFEE],
            (str(CAT), COFFEE.read_bytes()),
            [trinity.Media("image", CAT), COFFEE],
            trinity.Request(messages=chat, images=[CAT, COFFEE]),
        ]
        for form in forms:
            found = await pipe.features(form)
            assert len(found.rows) == 2
            for rows, right in zip(found.rows, wanted, strict=True):
                torch.testing.assert_close(rows, right, rtol=0, atol=0)

    served("llava", use, "EPD", rules=BatchRules(image_budget=1))


def test_a_copy_is_the_callers_own() -> None:
    async def use(pipe: trinity.Pipeline) -> None:
        first = (await pipe.features(CAT)).rows[0]
        kept = first.clone()
        first.zero_()
        assert torch.equal((await pipe.features(CAT)).rows[0], kept)

    served("llava", use, "EPD")


def test_a_pipeline_without_await_gives_the_same() -> None:
    with trinity.SyncPipeline(checkpoint("llava"), cache=CACHE) as pipe:
        found = pipe.features(CAT, request_id="cat")
        assert found.request_id == "cat"
        assert torch.equal(found.rows[0], pipe.features([CAT]).rows[0])
        assert repr(found).startswith(f"Features('cat': {len(found.rows[0])}x")


# ---------------------------------------------------------------- limits, ends and errors


def test_what_cannot_be_encoded_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")

    async def use(pipe: trinity.Pipeline) -> None:
        for given, error, text in [
            ("nowhere.jpg", BadMedia, "nowhere.jpg"),
            (tmp_path / "broken.png", BadMedia, "image"),
            ([], RequestError, "at least one"),
            ([{"role": "user", "content": "text alone"}], RequestError, "at least one"),
            (trinity.Request("text alone"), RequestError, "at least one"),
            ([CAT] * 99, BadMedia, "max_images"),
            (trinity.Media("audio", b"noise"), BadMedia, "audio"),
            ([picture(at, 400, 300) for at in range(8)], RequestTooLarge, "at stage E"),
        ]:
            with pytest.raises(error, match=text):
                await pipe.features(given)
        with pytest.raises(RequestError, match="'deadline'"):
            await pipe.features(CAT, deadline=3.0)
        with pytest.raises(RequestError, match="first argument"):
            await pipe.features(CAT, images=[CAT])
        assert (await pipe.features(CAT)).rows
        assert pipe.metrics.summary()["finished"].keys() > {"refused", "encoded"}
        assert pipe.metrics.counts()["judged"] == 0, "none was to be in time"

    served("llava", use, cache=CacheConfig(pools={"image": 12, "kv": 64}, image_block_size=8))


def test_a_pipeline_without_an_encoder_refuses() -> None:
    async def use(pipe: trinity.Pipeline) -> None:
        with pytest.raises(RequestError):
            await pipe.features(CAT)

    served("llama", use, "PD")


def test_a_closed_pipeline_and_a_deadline_are_told() -> None:
    async def run() -> None:
        pipe = trinity.Pipeline(MODEL, "1E1PD", cache=CacheConfig(pools=POOLS))
        with pytest.raises(ClosedError):
            await pipe.features(EmulatedRequest(image_tokens=(576,)))
        async with pipe, asyncio.timeout(LIVENESS_S):
            with pytest.raises(DeadlineExceeded):
                await pipe.features(EmulatedRequest(image_tokens=(576,)), deadline_s=1e-4)
            left = asyncio.ensure_future(pipe.features(EmulatedRequest(image_tokens=(576,) * 6)))
            await asyncio.sleep(0.001)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            await pipe.wait_idle()
            found = await pipe.features(EmulatedRequest(image_tokens=(576, 100)))
            assert ([len(each) for each in found.rows], found.emulated) == ([576, 100], True)
            ending = asyncio.ensure_future(pipe.features(EmulatedRequest(image_tokens=(576,) * 6)))
            await asyncio.sleep(0.001)
        with pytest.raises(ClosedError):
            await ending
        for host in pipe.hosts.values():
            assert not host.core.state.pools["image"].held

    asyncio.run(run())


def test_too_many_at_once_are_overloaded() -> None:
    async def run() -> None:
        async with trinity.Pipeline(MODEL, "EPD", cache=CacheConfig(pools=POOLS), max_waiting=2) as pipe:
            asked = [pipe.features(EmulatedRequest(image_tokens=(576,))) for _ in range(6)]
            found = await asyncio.gather(*asked, return_exceptions=True)
        kinds = [type(each).__name__ for each in found]
        assert sorted(set(kinds)) == ["Features", "Overloaded"]
        assert kinds.count("Overloaded") == 4
        assert Overloaded.__name__ in pipe.metrics.summary()["refused"] or pipe.metrics.summary()["finished"]["error"]

    asyncio.run(run())


def test_they_count_as_requests_that_were_encoded_and_are_no_rows_of_the_trace() -> None:
    async def use(pipe: trinity.Pipeline) -> None:
        await pipe.features(CAT)
        await pipe.complete(trinity.Request("<image> What?", images=[CAT], max_tokens=2))
        summary = pipe.metrics.summary()
        assert summary["finished"] == {"encoded": 1, "length": 1}
        assert sum(summary["attainment"].values()) == len(summary["attainment"]), "one was to have no token"
        assert len(pipe.trace) == 1

    served("llava", use, "EPD", slo=trinity.SLO(60, 60), budgets=trinity.StepBudgets(token_budget=2048))


def test_rows_that_a_stage_got_wrong_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(
        [
            lambda name: Collected(name, (torch.zeros(3, 4),)),
            lambda name: Collected(name, ("text",)),
            lambda name: Collected(name, (), Failure("StageError", "the device is gone")),
        ]
    )

    async def wrong(memory: Any, command: Any, instance: str) -> Collected:
        return next(answers)(command.request)

    async def use(pipe: trinity.Pipeline) -> None:
        for text in ("rows for media", "rows for media", "the device is gone"):
            with pytest.raises(StageError, match=text):
                await pipe.features(CAT)

    monkeypatch.setattr("trinity.runtime.host.copy_features", wrong)
    served("llava", use, "EPD")


def test_no_pixels_or_features_are_kept_after_the_end() -> None:
    async def use(pipe: trinity.Pipeline) -> None:
        found = await pipe.features(CAT)
        assert found.rows
        for host in pipe.hosts.values():
            assert any(isinstance(each, Collected) for each in host.events)
            assert not any(getattr(each, "rows", ()) for each in host.events)
        assert not pipe.streams

    served("llava", use, "EPD")


# ---------------------------------------------------------------- processes


def test_instances_in_processes_give_the_same() -> None:
    wanted: list[torch.Tensor] = []

    async def read(pipe: trinity.Pipeline) -> None:
        wanted.extend((await pipe.features([CAT, COFFEE])).rows)

    async def use(pipe: trinity.Pipeline) -> None:
        found = await pipe.features([CAT, COFFEE])
        for rows, right in zip(found.rows, wanted, strict=True):
            torch.testing.assert_close(rows, right, rtol=0, atol=0)
        assert found.rows[0].dtype == torch.float32
        with pytest.raises(BadMedia):
            await pipe.features("nowhere.jpg")

    for hosting, each in (("thread", read), ("process", use)):
        served("llava", each, "1E1PD", hosting=hosting, rules=BatchRules(image_budget=1), pack=False)


def test_a_killed_encoder_ends_requests_by_name_and_serves_again() -> None:
    async def run() -> None:
        config = CacheConfig(pools=POOLS)
        async with (
            asyncio.timeout(LIVENESS_S),
            trinity.Pipeline(MODEL, "1E1PD", hosting="process", cache=config) as pipe,
        ):
            asked = [asyncio.ensure_future(pipe.features(EmulatedRequest(image_tokens=(576,) * 4))) for _ in range(8)]
            while len(pipe.streams) < len(asked):
                await asyncio.sleep(0.001)
            os.kill(pipe.processes["E0"].process, signal.SIGKILL)
            for each in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(each, StageError | trinity.Features), repr(each)
            while True:
                try:
                    found = await pipe.features(EmulatedRequest(image_tokens=(576,)))
                    break
                except (Overloaded, StageError):
                    await asyncio.sleep(0.02)
            assert found.route == ["E0"]
            output = await pipe.complete(EmulatedRequest(text_tokens=9, image_tokens=(576,), max_tokens=4))
            assert len(output.token_ids) == 4

    asyncio.run(run())


# ---------------------------------------------------------------- the request behind it


def test_the_request_behind_media_and_messages() -> None:
    made = make_feature_request([CAT, trinity.Media("image", "b.png")], {"deadline_s": 2.0, "cache_salt": "x"})
    assert (made.prompt, made.messages, made.deadline_s, made.cache_salt) == ("<image><image>", None, 2.0, "x")
    assert [each.source for each in made.all_media()] == [CAT, "b.png"]
    chat = make_feature_request(SEE, {"request_id": "a"})
    assert (chat.messages, chat.prompt, chat.request_id) == (SEE, None, "a")
    request = trinity.Request("<image>", images=[CAT])
    assert make_feature_request(request, {}) is request
    assert make_feature_request(request, {"session": "s"}).session == "s"
    assert make_feature_request(SEE, {"images": [CAT]}).images == [CAT], "a part may take its image from there"
    emulated = make_feature_request(EmulatedRequest(image_tokens=(9,)), {"contents": ("a",)})
    assert isinstance(emulated, EmulatedRequest)
    assert emulated.contents == ("a",)


@pytest.mark.parametrize("given", [b"image", bytearray(b"image"), memoryview(b"image"), "a.png", CAT])
def test_bytes_of_any_kind_are_one_image(given: Any) -> None:
    """At 3b0380c a bytearray was an image a byte."""
    [medium] = make_feature_request(given, {}).all_media()
    assert medium.source is given


@pytest.mark.parametrize(
    ("given", "field", "text"),
    [
        (trinity.Request("<image>", images=[CAT]), "deadline", "'deadline_s' is near"),
        (trinity.Request("<image>", images=[CAT]), "temperature", "no field 'temperature'"),
        (CAT, "temperature", "those of trinity.Request are taken"),
        (CAT, "messages", "first argument"),
        (CAT, "prompt", "first argument"),
        (CAT, "media", "first argument"),
        (SEE, "messages", "first argument"),
    ],
)
def test_fields_that_cannot_be_are_refused_by_name(given: Any, field: str, text: str) -> None:
    """At 3b0380c some were a TypeError from inside, and sampling was taken where nothing is sampled."""
    with pytest.raises(RequestError, match=text):
        make_feature_request(given, {field: []})
