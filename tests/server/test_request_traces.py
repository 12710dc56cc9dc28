"""One trace a request by OpenTelemetry's own SDK: spans that follow each other, transfers, and what a client began."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import opentelemetry.propagate  # noqa: F401  (an import that takes long, and not on the loop of a test)
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

from support.http_server import ServedModel, chat_body, serve_model
from support.paths import PHOTOS
from trinity.metrics import SPANS
from trinity.server import ServerConfig
from trinity.server.request_traces import NO_TRACE, RequestTracer

CHAT = "/v1/chat/completions"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def config(exporter: InMemorySpanExporter) -> ServerConfig:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return ServerConfig(tracer_provider=provider)


def named(spans: Sequence[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def under(spans: Sequence[ReadableSpan], parent: ReadableSpan) -> list[ReadableSpan]:
    assert parent.context is not None
    return [span for span in spans if span.parent is not None and span.parent.span_id == parent.context.span_id]


def picture_chat() -> dict[str, object]:
    url = "data:image/jpeg;base64," + base64.b64encode((PHOTOS / "cat.jpg").read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 6, "ignore_eos": True}


async def all_left(served: ServedModel) -> None:
    """Wait until every exchange has ended: its client has the answer a moment before."""
    async with asyncio.timeout(120):
        while served.server.active:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_trace_of_each_request(stream: bool, config: ServerConfig, exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with serve_model("llava", "E+P+D", config) as served:
        body = {**picture_chat(), "stream": stream}
        response = await served.http.post(CHAT, json=body, headers=headers)
        assert response.status_code == 200, response.text
    spans = exporter.get_finished_spans()
    (root,) = named(spans, f"POST {CHAT}")
    assert root.parent is not None
    assert (f"{root.parent.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
    assert {span.context.trace_id for span in spans if span.context} == {int(TRACE, 16)}
    assert root.kind == SpanKind.SERVER
    assert (root.attributes or {})["http.response.status_code"] == 200
    (answer,) = under(spans, root)
    said = answer.attributes or {}
    assert said["gen_ai.usage.output_tokens"] == 6
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert said["epd.route"] == ("E0", "P0", "D0")
    inside = under(spans, answer)
    stages = [span for span in inside if span.name in SPANS]
    assert [span.name for span in stages] == [name for name in SPANS if named(stages, name)], "not in their order"
    assert {"encode", "ep_migration", "prefill", "pd_migration", "decode"} <= {span.name for span in stages}
    for span in (*inside, answer):
        assert span.start_time is not None and span.end_time is not None  # noqa: PT018
        assert (root.start_time or 0) - 1_000_000 <= span.start_time <= span.end_time
        assert span.end_time <= (root.end_time or 0) + 1_000_000, span.name
    moved = {(span.attributes or {})["epd.kind"]: span for span in named(inside, "transfer")}
    assert set(moved) == {"image", "kv"}
    fields = moved["kv"].attributes or {}
    assert (fields["epd.source"], fields["epd.target"]) == ("P0", "D0")
    assert fields["epd.bytes"] > 0  # type: ignore[operator]


async def test_answers_and_errors(config: ServerConfig, exporter: InMemorySpanExporter) -> None:
    async with serve_model("llama", "PD", config) as served:
        await served.http.post(CHAT, json=chat_body(max_tokens=2, n=3))
        await all_left(served)
        several = exporter.get_finished_spans()
        exporter.clear()
        assert (await served.http.post(CHAT, json=chat_body(model="other"))).status_code == 404
        assert (await served.http.get("/health")).status_code == 200
        await all_left(served)
        (refused,) = exporter.get_finished_spans()
    assert len(named(several, "answer")) == 3
    assert len({span.context.trace_id for span in several if span.context}) == 1
    assert refused.status.status_code == StatusCode.UNSET, "the client's own fault is no error of a server"
    assert (refused.attributes or {})["http.response.status_code"] == 404
    assert (refused.attributes or {})["error.type"] == "ApiError"


async def test_a_client_that_leaves_is_told(config: ServerConfig, exporter: InMemorySpanExporter) -> None:
    async with serve_model("llama", "PD", config) as served:
        body = chat_body(stream=True, max_tokens=1900, ignore_eos=True)
        async with served.http.stream("POST", CHAT, json=body) as response:
            await anext(response.aiter_lines())
        await all_left(served)
    (root,) = exporter.get_finished_spans()
    assert root.status.status_code == StatusCode.ERROR
    assert (root.attributes or {})["error.type"] == "client_left"


def test_nothing_is_made_without_a_provider_or_for_a_trace_that_nobody_keeps() -> None:
    assert RequestTracer("tiny").begin(CHAT, {}) is NO_TRACE
    assert RequestTracer("tiny", TracerProvider(sampler=ALWAYS_OFF)).begin(CHAT, {}) is NO_TRACE
