"""RequestProcessor beside an event loop: parallel, responsive, deterministic, closed cleanly; sampling defaults."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.checkpoint_files import checkpoint
from trinity.core.messages import ResolvedSampling
from trinity.errors import BadMedia, ClosedError, RequestError
from trinity.preprocess.media.images import read_image
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.request import Media, Request, Sampling


def picture(seed: int, side: int = 56) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (side, side + 28, 3), dtype=np.uint8)


@pytest.fixture
def llava() -> Iterator[RequestProcessor]:
    processor = RequestProcessor(checkpoint("llava"))
    yield processor
    processor.close()


def same(one: ProcessedRequest, other: ProcessedRequest) -> bool:
    return (
        one.work == other.work
        and one.clipped == other.clipped
        and all(
            a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
            for a, b in zip(one.inputs, other.inputs, strict=True)
        )
    )


def requests(count: int) -> list[Request]:
    return [
        Request(
            "which " * (1 + i % 5) + "<image> of these " * (i % 4),
            images=[picture(10 * i + j, 28 + 28 * j) for j in range(i % 4)],
            sampling=Sampling(seed=i),
        )
        for i in range(count)
    ]


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "idefics3", "minicpmv4_6", "gemma3"])
async def test_many_at_once_equal_each_alone(name: str) -> None:
    processor = await asyncio.to_thread(RequestProcessor, checkpoint(name), threads=6)
    asked = requests(24)
    together = await asyncio.gather(*(processor.aprocess(request) for request in asked))
    alone = await asyncio.to_thread(lambda: [processor.process(request) for request in asked])
    assert all(same(one, other) for one, other in zip(together, alone, strict=True))
    await processor.aclose()


def test_threads_of_others_may_tokenise_meanwhile(llava: RequestProcessor) -> None:
    expected = llava.tokenizer("some text")["input_ids"]
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(llava.process, request) for request in requests(40)]
        ids = [pool.submit(lambda: llava.tokenizer("some text")["input_ids"]) for _ in range(200)]
        texts = [pool.submit(llava.tokenizer.decode, expected) for _ in range(200)]
    assert all(future.result() == expected for future in ids)
    assert len({future.result() for future in texts}) == 1
    assert all(future.result().work.prompt for future in done)


@pytest.mark.asyncio
async def test_images_of_one_request_are_read_in_parallel_off_the_loop(
    llava: RequestProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=120)  # broken unless two images are read at the same time
    threads = set()

    def meet(source: Any, *limits: Any) -> Any:
        threads.add(threading.get_ident())
        both.wait()
        return read_image(source, *limits)

    monkeypatch.setattr("trinity.preprocess.media.image_kind.read_image", meet)
    done = await llava.aprocess(Request("<image><image>", images=[picture(0), picture(1)]))
    assert len(done.work.media) == len(threads) == 2
    assert threading.get_ident() not in threads


@pytest.mark.asyncio
async def test_who_comes_first_of_a_burst_is_ready_before_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = await asyncio.to_thread(RequestProcessor, checkpoint("llava"), threads=1)
    seen, asked = list[str](), [Request("<image>", images=[picture(seed)]) for seed in range(3)] + [Request("hello")]
    names = {id(each.images[0]): each.request_id for each in asked[:3]}

    def read(source: Any, *limits: Any) -> Any:
        seen.append(f"read {names[id(source)]}")
        return read_image(source, *limits)

    async def served(request: Request) -> None:
        seen.append(f"ready {(await processor.aprocess(request)).work.request}")

    finish = processor._finish

    def finished(plan: Any, items: Any) -> ProcessedRequest:
        seen.append(plan.request.request_id)
        return finish(plan, items)

    monkeypatch.setattr("trinity.preprocess.media.image_kind.read_image", read)
    monkeypatch.setattr(processor, "_finish", finished)
    await asyncio.gather(*map(served, asked))
    first, second, third, text = (each.request_id for each in asked)
    worked = [each for each in seen if not each.startswith("ready")]
    worked.remove(text)  # which waits for none of them
    assert worked == [f"read {first}", first, f"read {second}", second, f"read {third}", third]
    ready = [each for each in seen if each.startswith("ready")]
    ready.remove(f"ready {text}")
    assert ready == [f"ready {each.request_id}" for each in asked[:3]]
    await processor.aclose()


@pytest.mark.asyncio
async def test_one_bad_request_leaves_the_others_alone(llava: RequestProcessor) -> None:
    good, bad = Request("<image>", images=[picture(0)]), Request("<image><image>", images=[b"", picture(1)])
    results = await asyncio.gather(*(llava.aprocess(r) for r in (good, bad, good)), return_exceptions=True)
    assert isinstance(results[1], BadMedia)
    assert results[1].request_id == bad.request_id
    assert isinstance(results[0], ProcessedRequest)
    assert isinstance(results[2], ProcessedRequest)


@pytest.mark.asyncio
async def test_close_ends_threads_and_answers_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = RequestProcessor(checkpoint("llava"), threads=1)
    started, go_on = threading.Event(), threading.Event()

    def slow(source: Any, *limits: Any) -> Any:
        started.set()
        go_on.wait(120)
        raise AssertionError("not needed any more")

    monkeypatch.setattr("trinity.preprocess.media.image_kind.read_image", slow)
    first = asyncio.create_task(processor.aprocess(Request("<image>", images=[picture(0)])))
    await asyncio.to_thread(started.wait, 20)
    assert (await processor.aprocess(Request("hello"))).work.prompt, "no text waits for an image"
    second = asyncio.create_task(processor.aprocess(Request("<image>", images=[picture(0)])))
    await asyncio.sleep(0)
    closing = asyncio.create_task(processor.aclose())
    with pytest.raises(ClosedError):
        await asyncio.wait_for(second, 120)
    go_on.set()
    with pytest.raises((RequestError, ClosedError)):  # what the reading of the image raised is the request's own
        await first
    await closing
    with pytest.raises(ClosedError):
        await processor.aprocess(Request("hello"))
    await processor.aclose()
    assert not [t for t in threading.enumerate() if t.name.startswith("trinity-processor")]


@pytest.mark.asyncio
async def test_cancelling_a_caller_is_no_closing(llava: RequestProcessor) -> None:
    task = asyncio.create_task(llava.aprocess(Request("<image>", images=[picture(0)])))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await llava.aprocess(Request("hello"))).work.prompt


def test_media_and_images_are_taken_in_order(llava: RequestProcessor) -> None:
    one = llava.process(Request("<image><image>", images=[picture(0)], media=[Media("image", picture(1))]))
    other = llava.process(Request("<image><image>", images=[picture(0), picture(1)]))
    assert [span.content for span in one.work.media] == [span.content for span in other.work.media]


def test_seeds_are_drawn_or_kept(llava: RequestProcessor) -> None:
    drawn = {llava.process(Request("a", sampling=Sampling(temperature=1.0))).work.sampling.seed for _ in range(8)}
    assert len(drawn) == 8
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in drawn)
    kept = llava.process(Request("a", sampling=Sampling(temperature=0.5, seed=7, top_k=3))).work.sampling
    assert kept == ResolvedSampling(temperature=0.5, seed=7, top_k=3)


def test_stop_ids(llava: RequestProcessor) -> None:
    def of(**kwargs: Any) -> frozenset[int]:
        return llava.process(Request("a", sampling=Sampling(**kwargs))).work.stop_ids

    assert of() == llava.eos_ids
    assert of(stop_token_ids=(5, 6)) == llava.eos_ids | {5, 6}
    assert of(stop_token_ids=(5,), ignore_eos=True) == {5}


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), model, ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [3, 9]}))
    own = json.loads((model / "config.json").read_text())["eos_token_id"]
    assert RequestProcessor(model).eos_ids == {3, 9}
    for ignored in (["eos_token_id"], True):
        assert RequestProcessor(model, ignore_generation_config=ignored).eos_ids == {own}
    assert RequestProcessor(model, ignore_generation_config=["top_k"]).eos_ids == {3, 9}
    (model / "generation_config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": 11}))
    assert RequestProcessor(model).eos_ids == {11}


def test_request_facts_reach_the_work(llava: RequestProcessor) -> None:
    work = llava.process(Request("a", max_tokens=9, deadline_s=3.5, request_id="mine")).work
    assert (work.request, work.max_tokens, work.deadline_s, work.attempt) == ("mine", 9, 3.5, 0)
