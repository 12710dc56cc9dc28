"""Embeddings of images by OpenAI's own client: of a class that pools an image to one row, refused for all others."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import opentelemetry.propagate  # noqa: F401  (an import that takes long, and not on the loop of a test)
import pytest
import torch
from openai.types import CreateEmbeddingResponse
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import trinity
from support.checkpoint_files import checkpoint
from support.http_server import ServedModel, chat_body, serve_model
from support.paths import PHOTOS
from support.picture_pages import PicturePages, serving
from trinity.preprocess.loader import load_tokenizer_and_processor
from trinity.preprocess.media_limits import MediaLimits
from trinity.server import ServerConfig
from trinity.testing.oracle import Oracle

EMBED = "/v1/embeddings"
CAT = PHOTOS / "cat.jpg"
DATA = f"data:image/jpeg;base64,{base64.b64encode(CAT.read_bytes()).decode()}"


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3, whose class pools the patches of an image to as many rows as its config says: here to one."""
    made = tmp_path_factory.mktemp("models") / "gemma3-pooled"
    shutil.copytree(checkpoint("gemma3"), made)
    for name, field in (("config.json", "mm_tokens_per_image"), ("processor_config.json", "image_seq_length")):
        read = json.loads((made / name).read_text())
        assert field in read
        (made / name).write_text(json.dumps({**read, field: 1}))
    return made


@pytest.fixture(scope="module")
def vector(pooling: Path) -> torch.Tensor:
    """What the class itself makes of the photograph: [1, width]."""
    return Oracle(pooling).features(trinity.Request("<image>", images=[CAT]))


@pytest.fixture(scope="module")
def pages() -> Iterator[PicturePages]:
    with serving(PicturePages("127.0.0.1")) as found:
        found.pictures["/cat.jpg"] = CAT.read_bytes()
        yield found


def ask(*urls: str, **fields: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"messages": [{"role": "user", "content": parts}], **fields}


async def embed(served: ServedModel, url: str, **fields: Any) -> CreateEmbeddingResponse:
    """As vLLM documents it for OpenAI's client: ``messages`` in place of ``input``."""
    return await served.client.embeddings.create(model=served.server.models[0], input=[], extra_body=ask(url), **fields)


async def test_one_vector_of_an_image_in_both_formats_by_the_models_class(
    pooling: Path, vector: torch.Tensor, pages: PicturePages
) -> None:
    assert vector.shape[0] == 1
    limits = MediaLimits(allowed_hosts=("127.0.0.1:*",), allowed_networks=("127.0.0.1/32",))
    async with serve_model(pooling, "1E1PD", limits=limits) as served:
        urls = [DATA, f"{pages.url}/cat.jpg"]
        found = [await embed(served, url, encoding_format="float") for url in urls]
        coded = await embed(served, DATA)  # the client asks for base64 and reads it
        (raw,) = (await served.http.post(EMBED, json=ask(DATA, encoding_format="base64"))).json()["data"]
        for each in (*found, coded):
            (one,) = each.data
            torch.testing.assert_close(torch.tensor([one.embedding]), vector, rtol=1e-4, atol=1e-5)
            assert (one.object, one.index, each.object, each.model) == ("embedding", 0, "list", "gemma3-pooled")
            assert (each.usage.prompt_tokens, each.usage.total_tokens) == (1, 1)
        assert found[0].data[0].embedding == found[1].data[0].embedding == coded.data[0].embedding
        assert torch.frombuffer(bytearray(base64.b64decode(raw["embedding"])), dtype=torch.float32).tolist() == (
            found[0].data[0].embedding
        )
        assert served.pipe.metrics.summary()["finished"] == {"encoded": 4}


async def test_a_class_that_defines_no_pooling_is_refused_by_name() -> None:
    async with serve_model("llava", "EPD") as served:
        for url in (DATA, "http://127.0.0.1/a.png"):
            with pytest.raises(openai.BadRequestError) as refused:
                await embed(served, url)
            assert refused.value.code == "no_pooling"
            assert "'llava'" in refused.value.message
            assert "defines no pooling" in refused.value.message
        with pytest.raises(openai.BadRequestError, match="defines no pooling"):
            await served.client.embeddings.create(model="llava", input="text")
        assert not served.pipe.metrics.requests, "nothing was encoded for it"


async def test_what_a_class_that_pools_does_not_embed(pooling: Path) -> None:
    config = ServerConfig(models=["mine"])
    async with serve_model(pooling, "EPD", config) as served:
        tries: list[tuple[dict[str, Any], int, str, str]] = [
            ({"input": "some text"}, 400, "invalid_request", "images alone"),
            ({"input": ["some", "texts"]}, 400, "invalid_request", "images alone"),
            ({"input": [1, 2, 3]}, 400, "invalid_request", "images alone"),
            ({}, 400, "invalid_request", "images alone"),
            (ask(DATA, input="and text"), 400, "invalid_request", "images alone"),
            (ask(), 400, "invalid_request", ""),
            ({"messages": [{"role": "user", "content": "text"}]}, 400, "invalid_request", "at least one"),
            (ask(DATA, DATA), 400, "invalid_request", "2; send them apart"),
            (ask(DATA, dimensions=8), 400, "invalid_request", "dimensions"),
            (ask(DATA, normalize=True), 400, "invalid_request", "normalize"),
            (ask(DATA, embed_dtype="float16"), 400, "invalid_request", "embed_dtype"),
            (ask(DATA, encoding_format="int8"), 400, "invalid_request", "encoding_format"),
            (ask(DATA, truncate_prompt_tokens=4), 400, "invalid_request", "truncate_prompt_tokens"),
            (ask(DATA, model="others"), 404, "model_not_found", "mine"),
            (ask(DATA, deadline_s=1e-4), 504, "deadline_exceeded", ""),
            (ask("file:///etc/passwd"), 400, "invalid_media", ""),
            (ask("/etc/passwd"), 400, "invalid_media", ""),
            (ask("http://127.0.0.1:1/a.png"), 400, "invalid_media", ""),
            (ask("data:image/png;base64,AAAA"), 400, "invalid_media", ""),
        ]
        for body, status, code, text in tries:
            answer = await served.http.post(EMBED, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (body, answer.text)
            assert text in answer.json()["error"]["message"], answer.text
        assert "encoded" not in served.pipe.metrics.summary()["finished"], "nothing was encoded to be refused then"
        found = await served.http.post(EMBED, json=ask(DATA, normalize=False, user="me", model="mine"))
        assert found.status_code == 200
        assert (await served.http.post("/v1/chat/completions", json=chat_body(max_tokens=1))).status_code == 200


async def test_a_client_that_leaves_ends_it_and_too_many_are_refused(pooling: Path) -> None:
    async with serve_model(pooling, "EPD", max_waiting=1) as served:
        with pytest.raises(httpx2.ReadTimeout):
            await served.http.post(EMBED, json=ask(DATA), timeout=httpx2.Timeout(10, read=1e-3))
        await served.pipe.wait_idle()
        codes: set[int] = set()
        async with httpx2.AsyncClient(base_url=served.url) as other:
            for _ in range(50):
                waiting = [client.post(EMBED, json=ask(DATA)) for client in (served.http, other, served.http)]
                codes.update(each.status_code for each in await asyncio.gather(*waiting))
                if 429 in codes:
                    break
        assert codes == {200, 429}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider()
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made


async def test_its_trace_has_the_encoders_spans(
    pooling: Path, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    async with serve_model(pooling, "1E1PD", ServerConfig(tracer_provider=provider)) as served:
        assert (await served.http.post(EMBED, json=ask(DATA))).status_code == 200
    names = [span.name for span in exporter.get_finished_spans()]
    assert names[-3:] == ["encode", "answer", f"POST {EMBED}"]
    assert set(names[:-3]) <= {"encode_queue"}, "which takes no time where nobody else waits"
    (answer,) = [span for span in exporter.get_finished_spans() if span.name == "answer"]
    assert (answer.attributes or {})["gen_ai.response.finish_reasons"] == ("encoded",)


def test_which_classes_pool_is_said_by_their_config(pooling: Path) -> None:
    assert load_tokenizer_and_processor(pooling).pools_images
    for name in ("gemma3", "llava", "qwen2_vl", "llama"):
        assert not load_tokenizer_and_processor(checkpoint(name)).pools_images
