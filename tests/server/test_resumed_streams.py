"""Clients of a server that died read their streams on at its buddy, behind the last event that they have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from support.emulated_pipelines import right
from support.emulated_server import EmulatedServer, serve_emulated
from support.journals import ASKED, opening, told
from trinity.core.frontend.journal import JournalKeeper
from trinity.pipeline.adoptions import Adoptions

TEXTS = [f"<{token}>" for token in right(ASKED)]
CHAT, TEXT = "/v1/chat/completions/chatcmpl-1", "/v1/completions/cmpl-1"


@asynccontextmanager
async def adopting(*keys: str) -> AsyncIterator[EmulatedServer]:
    """A server whose pipeline has adopted requests of these ids, with ten tokens known."""
    async with serve_emulated("EPD") as served:
        made = served.pipe._adoptions = Adoptions(served.pipe._frontend)
        made._resume_s, made._keeper = 60.0, JournalKeeper()
        made.take("life", told(*(opening(replace(ASKED, request_id=key)) for key in keys)))
        made.lose("life", "it was killed")
        yield served


def read(body: str) -> tuple[str, list[int], str, list[dict[str, Any]]]:
    """Text, numbers and finish reason of a stream of events, and all of its chunks."""
    assert body.endswith("data: [DONE]\n\n")
    text, numbers, reason, chunks = "", list[int](), "", list[dict[str, Any]]()
    for event in body.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        numbers += [int(lines["id"])] if "id" in lines else []
        chunks.append(json.loads(lines["data"]))
        choice = chunks[-1]["choices"][0]
        text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        reason = choice["finish_reason"] or reason
    return text, numbers, reason, chunks


@pytest.mark.parametrize(
    ("path", "kind", "after"),
    [
        (CHAT, "chat.completion.chunk", -1),
        (CHAT, "chat.completion.chunk", 9),
        (CHAT, "chat.completion.chunk", 20),
        (TEXT, "text_completion", 4),
        (TEXT, "text_completion", 38),
    ],
)
async def test_a_client_reads_on_behind_its_last_event(path: str, kind: str, after: int) -> None:
    async with adopting("chatcmpl-1", "cmpl-1") as served:
        ways: list[dict[str, Any]] = [{"headers": {"last-event-id": str(after)}}, {"params": {"starting_after": after}}]
        answer = await served.http.get(path, **(ways[after % 2] if after >= 0 else {}))
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        text, numbers, reason, chunks = read(answer.text)
        assert (text, reason) == ("".join(TEXTS[after + 1 :]), "length")
        assert numbers == list(range(after + 1, len(TEXTS))), "a connection may be cut behind any of them"
        assert {(each["id"], each["object"]) for each in chunks} == {(path.rpartition("/")[2], kind)}
        again = await served.http.get(path)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "resume_unknown")


async def test_what_cannot_be_resumed_is_refused_by_name() -> None:
    async with adopting("chatcmpl-1") as served:
        for path, headers, status, code in (
            ("/v1/chat/completions/nobody", {}, 404, "resume_unknown"),
            ("/v1/chat/completions/chatcmpl-2", {}, 404, "resume_unknown"),
            (CHAT, {"last-event-id": "x"}, 400, "invalid_request"),
            (f"{CHAT}?starting_after=%C3%A4", {}, 400, "invalid_request"),  # it was 500
            (CHAT, {"last-event-id": "9" * 20}, 400, "invalid_request"),
            (CHAT, {"last-event-id": "40"}, 409, "not_resumed"),
        ):
            answer = await served.http.get(path, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), path
        served.server.draining = True
        assert (await served.http.get(CHAT)).status_code == 503
        served.server.draining = False
        assert (await served.http.get(CHAT, headers={"last-event-id": "38"})).status_code == 200
