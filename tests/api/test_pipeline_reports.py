"""What a pipeline says of itself: spans, transfers, cached tokens, trace, metrics, timeline; over several requests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.pipeline_driver import GOOD, LONG, ONE, PLACES, TEXT, TWO, Case, all_tokens, good_ones, serving
from support.wrapped_transports import WrappedTransport
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.messages import Submit
from trinity.core.scheduler import BatchRules
from trinity.errors import BadMedia, DeadlineExceeded, MigrationError
from trinity.metrics import SPANS
from trinity.pipeline import Pipeline
from trinity.request import Output, Request, Sampling
from trinity.traces.trace import SLO, Trace

MANY = Case("<image><image><image><image> Which is the odd one out?", (11, 12, 13, 14), 24)


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


# ---------------------------------------------------------------- spans


async def timed(pipe: Pipeline, case: Case) -> tuple[Output, float]:
    """The output, and the seconds from its submission to the instances until its end."""
    submitted: list[float] = []
    post = pipe._frontend.post

    def noting(event: Any) -> None:
        if isinstance(event, Submit):
            submitted.append(pipe.loop.time())
        post(event)

    pipe._frontend.post = noting  # type: ignore[method-assign]
    async with pipe.stream(case.request()) as tokens:
        async for _ in tokens:
            pass
    pipe._frontend.post = post  # type: ignore[method-assign]
    return tokens.output, pipe.loop.time() - submitted[0]


READ_S = 0.05  # that each read of the transport takes


@pytest.mark.parametrize("placement", PLACES)
async def test_spans_add_up_to_the_time_that_was_spent(placement: str) -> None:
    """They never overlap, also where images migrate while others of the request are still being encoded."""
    slow = WrappedTransport(delay_s=READ_S)
    async with serving(
        placement, connector=slow, rules=BatchRules(image_budget=1), image_cache=False, prefix_cache=False
    ) as pipe:
        for case in (TEXT, ONE, MANY):
            output, seconds = await timed(pipe, case)
            assert tuple(output.spans) == SPANS
            assert all(span >= 0 for span in output.spans.values())
            total = sum(output.spans.values())
            assert total <= seconds <= output.latency_s + 1.0
            assert case is not MANY or total >= 0.2 * seconds, f"{output.spans} leave most of {seconds} s unexplained"
            check_stages(placement, case, output)


def check_stages(placement: str, case: Case, output: Output) -> None:
    """A span is there just where the request did that."""
    spans, moves = output.spans, {record["kind"] for record in output.transfers}
    assert spans["prefill"] > 0
    assert spans["decode"] > 0
    assert (spans["encode"] > 0) == bool(case.pictures)
    assert (spans["ep_migration"] > 0) == ("image" in moves) == (bool(case.pictures) and "E" not in pd_side(placement))
    assert (spans["pd_migration"] > 0) == ("kv" in moves) == (placement in ("EP+D", "ED+P", "E+P+D"))
    if "kv" in moves:
        assert spans["pd_migration"] >= READ_S / 2  # what the transport took, but for a Commit that was heard late


def pd_side(placement: str) -> str:
    return next(roles for roles in placement.split("+") if "P" in roles)


async def test_time_in_a_queue_is_seen() -> None:
    async with serving("E+P+D", rules=BatchRules(image_budget=1), image_cache=False) as pipe:
        outputs = await asyncio.gather(*(pipe.complete(MANY.request()) for _ in range(6)))
        waited = sorted(output.spans["encode_queue"] for output in outputs)
        assert waited[-1] > waited[0]
        assert waited[-1] > 0


# ---------------------------------------------------------------- transfers and caches


async def test_transfers_are_recorded_with_what_moved() -> None:
    async with serving("E+P+D") as pipe:
        output = await pipe.complete(TWO.request())
        images, kv = output.transfers[:2], output.transfers[2:]
        assert [record["kind"] for record in output.transfers] == ["image", "image", "kv"]
        image_bytes = pipe.hosts["P0"].loaded.memory["image"].block_bytes // 576 * output.media_tokens // 2
        for record in images:
            assert (record["source"], record["target"], record["outcome"]) == ("E0", "P0", "pulled")
            assert (record["blocks"], record["bytes"], record["scheme"]) == (1, image_bytes, "inproc")
        assert kv[0]["blocks"] == -(-output.prompt_tokens // 16)
        needed = output.prompt_tokens * pipe.hosts["P0"].loaded.memory["kv"].block_bytes // 16
        assert needed <= kv[0]["bytes"] <= 1.1 * needed
        assert (kv[0]["source"], kv[0]["target"]) == ("P0", "D0")
        assert all(record["seconds"] >= 0 for record in output.transfers)
        assert output.route == ["E0", "P0", "D0"]


async def test_a_repeated_image_is_encoded_and_moved_once() -> None:
    encoded: list[str] = []
    async with serving("E+P+D", prefix_cache=False) as pipe:
        watch(pipe, encoded)
        first = await pipe.complete(ONE.request())
        again = await pipe.complete(Case("What else? <image>", ONE.pictures).request())
        assert [record["outcome"] for record in first.transfers if record["kind"] == "image"] == ["pulled"]
        moved = [record for record in again.transfers if record["kind"] == "image"]
        assert [(record["outcome"], record["bytes"]) for record in moved] == [("cached", 0)]
        assert len(encoded) == 1
    async with serving("E+P+D", prefix_cache=False, image_cache=False) as pipe:
        watch(pipe, encoded)
        assert [(await pipe.complete(ONE.request())).token_ids for _ in range(2)] == [ONE.tokens] * 2
        assert len(encoded) == 3, "the control: without the cache each is encoded"


def watch(pipe: Pipeline, encoded: list[str]) -> None:
    """Note every media item that E0 encodes."""
    stage = pipe.hosts["E0"].loaded.stages[0]
    forward = stage.forward

    def noting(step: Any) -> Any:
        encoded.extend(row.span.content for row in step.encodes)
        return forward(step)

    stage.forward = noting  # type: ignore[method-assign]


@pytest.mark.parametrize("placement", PLACES)
async def test_a_repeated_prompt_is_served_from_the_prefix_cache(placement: str) -> None:
    whole = Case("<image> A prompt that is long enough for several blocks of sixteen tokens each", (21,))
    async with serving(placement) as pipe:
        first = await pipe.complete(whole.request())
        again = await pipe.complete(whole.request())
        other = await pipe.complete(Case(whole.prompt, (22,)).request())
        assert first.token_ids == again.token_ids == whole.tokens
        assert other.token_ids == Case(whole.prompt, (22,)).tokens != whole.tokens
        assert first.cached_tokens == 0
        assert again.cached_tokens == (first.prompt_tokens - 1) // 16 * 16 > 16
        assert other.cached_tokens == 0, "the same text with another image must not match"
        assert not [record for record in again.transfers if record["outcome"] == "pulled" and record["kind"] == "image"]
        assert pipe.metrics.summary()["prefix_hits"] == 1
        assert pipe.metrics.summary()["tokens"]["cached"] == again.cached_tokens


async def test_a_failed_transfer_is_recorded() -> None:
    transport = WrappedTransport(fail=lambda kind, count: kind == "kv" and count == 1)
    async with serving("EP+D", connector=transport, failures=NO_RECOVERY) as pipe:
        with pytest.raises(MigrationError) as caught:
            await pipe.complete(TEXT.request())
        output = caught.value.output
        assert isinstance(output, Output)
        (record,) = output.transfers
        assert (record["kind"], record["source"], record["target"]) == ("kv", "EP0", "D0")
        assert (record["outcome"], record["bytes"]) == ("failed", 0)
        await good_ones(pipe)
        assert pipe.metrics.summary()["migrations"]["kv"]["failed"] == 1
        assert "failed" in pipe.timeline.to_json()


# ---------------------------------------------------------------- the whole pipeline


async def mixed(pipe: Pipeline) -> None:
    """Six requests that end in every way there is."""
    await good_ones(pipe)
    async with pipe.stream(LONG.request(request_id="left")) as tokens:
        await anext(aiter(tokens))
    with pytest.raises(DeadlineExceeded):
        await pipe.complete(LONG.request(max_tokens=1900, deadline_s=0.05, request_id="late"))
    with pytest.raises(BadMedia):
        await pipe.complete(Request("<image>"))
    words = (await pipe.complete(TEXT.request(request_id="stopped", sampling=stopping(pipe)))).finish_reason
    assert words == "stop"


def stopping(pipe: Pipeline) -> Sampling:
    return Sampling(ignore_eos=True, stop_token_ids=(TEXT.tokens[2],))


async def test_trace(tmp_path: Path) -> None:
    async with serving("E+P+D") as pipe:
        await mixed(pipe)
        pipe.trace.save(tmp_path / "trace.jsonl")
    loaded = Trace.load(tmp_path / "trace.jsonl")
    assert sorted(loaded, key=id_of) == sorted(pipe.trace, key=id_of)
    rows = {row.request_id: row for row in loaded}
    assert Counter(row.finish_reason for row in loaded) == {"length": 3, "cancelled": 1, "deadline": 1, "stop": 1}
    assert rows["stopped"].output_length == 3
    assert rows["left"].finish_reason == "cancelled"
    check_rows([row for row in loaded if row.finish_reason in ("length", "stop")])
    first = loaded[0].timestamp
    assert all(0 <= row.timestamp - first < 100_000 for row in loaded)
    assert loaded.attainment(SLO(ttft=1e6, tbt=1e6)) == 4 / 6


def id_of(row: Any) -> str:
    return str(row.request_id)


def check_rows(rows: Sequence[Any]) -> None:
    for row in rows:
        visual = sum(image.tokens for image in row.images)
        assert row.input_length == row.text_length + visual
        assert len(row.itl_s) == row.output_length - 1
        assert set(row.spans) == set(SPANS)
        assert row.ttft_s + sum(row.itl_s) <= row.latency_s
    assert sorted(len(row.images) for row in rows) == [0, 0, 1, 2]
    assert {(image.width, image.height) for row in rows for image in row.images} == {(84, 56)}
    assert all(image.content for row in rows for image in row.images)


async def test_metrics() -> None:
    async with serving("E+P+D", slo=SLO(ttft=1e6, tbt=1e6)) as pipe:
        await mixed(pipe)
        summary = pipe.metrics.summary()
        assert summary["finished"] == {"length": 3, "cancelled": 1, "deadline": 1, "refused": 1, "stop": 1}
        assert summary["refused"] == {"BadMedia": 1}
        assert summary["requests"] == 7
        assert summary["attainment"]["p90"] == 4 / 7
        assert summary["tokens"]["output"] == sum(row.output_length for row in pipe.trace)
        assert summary["tokens"]["prompt"] == sum(row.input_length for row in pipe.trace)
        assert summary["migrations"]["image"]["pulled"] >= 3
        assert summary["spans_s"]["decode"] > 0
        assert json.loads(json.dumps(summary)) == summary
        assert "TTFT" in str(pipe.metrics)
        assert "<table>" in pipe.metrics._repr_html_()


async def test_timeline_opens_as_json_with_every_step_and_pull(tmp_path: Path) -> None:
    async with serving("E+P+D") as pipe:
        outputs = [await pipe.complete(case.request()) for case in GOOD]
        pipe.timeline.save(tmp_path / "t.json")
        steps = sum(host.steps for host in pipe.hosts.values())
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    assert set(names.values()) == {"E0", "P0", "D0"}
    slices = Counter((names[event["pid"]], event["name"]) for event in events if event["ph"] == "X")
    pulls = sum(record["outcome"] == "pulled" for output in outputs for record in output.transfers)
    assert slices["P0", "pull image from E0"] + slices["D0", "pull kv from P0"] == pulls
    named = {"encode", "prefill", "decode"}
    assert sum(count for (_, name), count in slices.items() if name in named) == steps
    assert slices["D0", "decode"] == sum(len(case.tokens) - 1 for case in GOOD)


async def test_what_an_output_counts() -> None:
    async with serving("E+P+D") as pipe:
        output = await pipe.complete(TWO.request(request_id="mine"))
        assert output.request_id == "mine"
        assert output.media_tokens == sum(image.tokens or 0 for image in pipe.trace[0].images) > 0
        assert output.prompt_tokens > output.media_tokens
        assert output.max_tokens == TWO.max_tokens == len(output.token_ids)
        assert output.ttft_s is not None
        assert output.ttft_s <= output.latency_s
        assert len(output.itl_s) == len(output.token_ids) - 1
        assert output.tpot_s == pytest.approx(sum(output.itl_s) / len(output.itl_s))
