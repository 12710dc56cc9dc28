"""``pipe.chat`` and ``pipe.complete_n``: what a user writes, against transformers' own tokens."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.emulated_pipelines import LIVENESS_S
from support.pipeline_driver import ONE, TWO, nothing_left, oracle, picture
from support.pipeline_options import pipeline_options
from trinity.errors import BadMedia, ConfigError, RequestError
from trinity.pipeline import Pipeline
from trinity.pipeline.chat import make_chat_request
from trinity.pipeline.copies import MOST_COPIES, copy_request
from trinity.request import Media, Request, Sampling

pytestmark = pytest.mark.xdist_group("llava")
GREEDY = Sampling(ignore_eos=True)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def pipe(runner: asyncio.Runner) -> Iterator[Pipeline]:
    settings = pipeline_options({"pools": {"image": 16, "kv": 256}})
    started = Pipeline(checkpoint("llava"), "E+PD", dtype="float32", **settings)
    runner.run(started.start())
    yield started
    runner.run(started.aclose())
    nothing_left(started)


# ---------------------------------------------------------------- chat


def test_a_text_with_an_image_is_a_user_message(pipe: Pipeline, runner: asyncio.Runner) -> None:
    said = "What is this?"
    content = [{"type": "image"}, {"type": "text", "text": said}]
    whole = Request(messages=[{"role": "user", "content": content}], images=[picture(1)], max_tokens=8, sampling=GREEDY)
    output = runner.run(pipe.chat(said, images=[picture(1)], max_tokens=8, ignore_eos=True))
    assert output.token_ids == list(oracle().generate(whole))
    assert output.media_tokens > 0


def test_messages_and_fields_go_where_they_belong() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    made = make_chat_request(messages, max_tokens=5, temperature=0.5, session="s", request_id="mine", seed=3)
    assert made == Request(
        messages=messages,
        max_tokens=5,
        session="s",
        request_id="mine",
        sampling=Sampling(temperature=0.5, seed=3),
    )
    mixed = make_chat_request("Hello", Sampling(top_k=4, seed=1), seed=2)
    assert mixed.sampling == Sampling(top_k=4, seed=2)
    assert mixed.messages == [{"role": "user", "content": "Hello"}]
    media = make_chat_request("Hello", media=[Media("image", "a.png")])
    assert media.messages == [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hello"}]}]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_token": 5}, "no field 'max_token'; 'max_tokens' is near"),
        ({"zzz": 5}, "no field 'zzz'; those of trinity.Request and trinity.Sampling are taken"),
        ({"prompt": "x"}, "no field 'prompt'"),
        ({"sampling": 3}, "sampling must be a trinity.Sampling, got 3"),
    ],
)
def test_a_field_that_nobody_has_is_named(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        make_chat_request("Hello", **fields, request_id="mine")
    assert caught.value.request_id == "mine"


@pytest.mark.parametrize("images", ["cat.jpg", 7, None, b"\x89PNG"])
def test_images_that_are_no_list_are_refused_by_name(images: Any, pipe: Pipeline, runner: asyncio.Runner) -> None:
    with pytest.raises(RequestError, match="images"):
        runner.run(pipe.chat("What is this?", images=images))


# ---------------------------------------------------------------- n outputs


def test_copies_have_names_and_seeds_of_their_own() -> None:
    made = copy_request(Request("x", request_id="r", sampling=Sampling(seed=(1 << 64) - 2)), 4)
    assert [each.request_id for each in made] == ["r", "r.1", "r.2", "r.3"]
    assert [each.sampling.seed for each in made] == [(1 << 64) - 2, (1 << 64) - 1, 0, 1]
    assert {each.prompt for each in made} == {"x"}
    assert [each.sampling.seed for each in copy_request(Request("x"), 3)] == [None] * 3
    assert copy_request(made[0], 1) == made[:1]


@pytest.mark.parametrize("n", [0, -1, MOST_COPIES + 1, 1.0, True, "2", None])
def test_a_wrong_count_is_refused(n: Any) -> None:
    with pytest.raises(ConfigError, match=f"n is a whole number of 1 to {MOST_COPIES}"):
        copy_request(Request("x"), n)


def test_n_outputs_are_those_of_their_seeds_and_the_prompt_is_computed_once(
    pipe: Pipeline, runner: asyncio.Runner
) -> None:
    text = "<image> A long enough prompt that fills some blocks of the cache, to be found there again."
    sampling = Sampling(temperature=1.0, seed=11, ignore_eos=True)
    request = Request(text, images=[picture(5)], max_tokens=12, sampling=sampling, request_id="many")
    encoded = transfers(pipe)
    outputs = runner.run(pipe.complete_n(request, 3))
    assert [each.request_id for each in outputs] == ["many", "many.1", "many.2"]
    assert len({tuple(each.token_ids) for each in outputs}) == 3
    assert outputs[0].cached_tokens == 0
    assert all(each.cached_tokens > each.prompt_tokens / 2 for each in outputs[1:])
    assert transfers(pipe) == encoded + 1, "the image is encoded and sent once"
    for seed, output in enumerate(outputs, 11):
        drawn = Sampling(temperature=1.0, seed=seed, ignore_eos=True)
        alone = Request(text, images=[picture(5)], max_tokens=12, sampling=drawn)
        assert runner.run(pipe.complete(alone)).token_ids == output.token_ids


def test_outputs_of_one_token_are_n_too(pipe: Pipeline, runner: asyncio.Runner) -> None:
    """The first has ended when the others begin."""
    outputs = runner.run(pipe.complete_n(Request("Hello", max_tokens=1, sampling=GREEDY), 3))
    assert len({tuple(each.token_ids) for each in outputs}) == 1
    assert [len(each.token_ids) for each in outputs] == [1, 1, 1]


def transfers(pipe: Pipeline) -> int:
    return int(pipe.metrics.summary()["migrations"].get("image", {}).get("pulled", 0))


def test_one_error_ends_all_and_is_raised(pipe: Pipeline, runner: asyncio.Runner) -> None:
    with pytest.raises(BadMedia):
        runner.run(pipe.complete_n(Request("<image> of nothing"), 3))

    async def taken() -> None:
        async with pipe.stream(Request("Go on", max_tokens=400, sampling=GREEDY, request_id="n.1")) as other:
            await other.wait_first()
            with pytest.raises(RequestError, match=r"'n\.1' is in use"):
                await pipe.complete_n(Request("Hello", max_tokens=400, sampling=GREEDY, request_id="n"), 3)
            assert [each.request.request_id for each in pipe.streams] == ["n.1"]
        await pipe.wait_idle()

    runner.run(taken())
    assert pipe.streams == ()


def test_leaving_ends_all(pipe: Pipeline, runner: asyncio.Runner) -> None:
    async def leave() -> None:
        asked = Request("Hello", max_tokens=400, sampling=GREEDY)
        serving = asyncio.ensure_future(pipe.complete_n(asked, 4))
        while len(pipe.streams) < 4:
            await asyncio.sleep(0.001)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert pipe.streams == ()
        await pipe.wait_idle()

    runner.run(leave())


# ---------------------------------------------------------------- many


def test_inputs_that_fill_the_memory_wait_for_room(pipe: Pipeline, runner: asyncio.Runner) -> None:
    """Two images at once are more bytes than may wait, so that one waits; two of one request never fit."""

    async def read() -> list[str]:
        one = await pipe.processor.aprocess(ONE.request())
        core.options = dataclasses.replace(core.options, max_waiting_bytes=int(1.5 * one.input_bytes))
        requests = [*(ONE.request(images=[picture(seed)], request_id=f"i{seed}") for seed in range(5)), TWO.request()]
        async with asyncio.timeout(LIVENESS_S):
            found = [each async for each in pipe.map(requests, on_error="return")]
        return [getattr(each, "finish_reason", type(each).__name__) for each in found]

    core = pipe._frontend.core
    before = core.options
    assert runner.run(read()) == ["length"] * 5 + ["RequestTooLarge"]
    core.options = before
    assert pipe.metrics.summary()["refused"].get("Overloaded", 0) == 0
