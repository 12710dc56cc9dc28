"""Pictures in chats by OpenAI's own client: as data, and by http from hosts that are allowed, and from no other."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest

from support.http_server import serve_model
from support.paths import PHOTOS
from trinity.pipeline.live_snapshot import LiveSnapshot
from trinity.preprocess.media_limits import MediaLimits
from trinity.request import Request, Sampling

PHOTO = PHOTOS / "cat.jpg"
QUESTION = {"type": "text", "text": "What is this?"}


@asynccontextmanager
async def photo_host() -> AsyncIterator[str]:
    """A host that has one photograph, on loopback."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        data = await asyncio.to_thread(PHOTO.read_bytes)
        head = (
            f"HTTP/1.1 200 OK\r\ncontent-type: image/jpeg\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as host:
        yield f"http://127.0.0.1:{host.sockets[0].getsockname()[1]}/cat.jpg"


def asked(url: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, QUESTION]}]
    return {"model": "llava", "messages": messages, "max_tokens": 8, "temperature": 0}


async def test_pictures_as_data_and_by_http() -> None:
    data = "data:image/jpeg;base64," + base64.b64encode(PHOTO.read_bytes()).decode()
    limits = MediaLimits(allowed_hosts=("127.0.0.1:*",), allowed_networks=("127.0.0.1/32",))
    async with photo_host() as address, serve_model("llava", "E+PD", limits=limits) as served:
        own = await served.pipe.complete(
            Request(
                messages=[{"role": "user", "content": [{"type": "image"}, QUESTION]}],
                images=[PHOTO],
                max_tokens=8,
                sampling=Sampling.greedy(),
            )
        )
        found = [await served.client.chat.completions.create(**asked(url)) for url in (data, address)]
        given: Any = [
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": data},
                    {"type": "input_text", "text": "What is this?"},
                ],
            }
        ]
        response = await served.client.responses.create(model="llava", input=given, max_output_tokens=8, temperature=0)
    assert [each.choices[0].message.content for each in found] == [own.text, own.text]
    assert response.output_text == own.text
    assert found[0].usage is not None
    assert found[0].usage.prompt_tokens == own.prompt_tokens


async def test_files_and_hosts_that_nobody_allowed_are_refused_alike() -> None:
    async with photo_host() as address, serve_model("llava", "EPD") as served:
        for url in (address, f"file://{PHOTO}", str(PHOTO), "/etc/passwd", "http://169.254.169.254/latest"):
            with pytest.raises(openai.BadRequestError) as caught:
                await served.client.chat.completions.create(**asked(url))
            assert caught.value.code == "invalid_media", url
            assert "127.0.0.1" not in caught.value.message or url == address


async def test_a_chat_about_a_picture_shows_on_the_live_page_by_its_own_id() -> None:
    async with serve_model("llava", "1E1P1D") as served, served.http.stream("GET", "/live/events") as events:
        given = f"data:image/jpeg;base64,{base64.b64encode(PHOTO.read_bytes()).decode()}"
        chat = asyncio.create_task(served.client.chat.completions.create(**asked(given) | {"max_tokens": 1000}))
        seen: dict[str, set[int]] = {}
        async for line in events.aiter_lines():
            if line:
                found = msgspec.json.decode(line.removeprefix("data: "), type=LiveSnapshot)
                for each in found.requests:
                    seen.setdefault(each.id, set()).add(each.media)
                if chat.done():
                    break
        assert max(seen[(await chat).id]) == 1
        moved = {(each.kind, each.source, each.target, each.scheme) for each in found.transfers}
        assert {("image", "E0", "P0", "inproc"), ("kv", "P0", "D0", "inproc")} == moved
