"""Requests that are wrong, too large, too slow or malicious: each is answered by the table, and harms itself alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from support.http_server import chat_body, serve_model
from trinity import errors
from trinity.errors import ConfigError
from trinity.server import ServerConfig, connection
from trinity.server.connection import HeldBytes
from trinity.server.error_table import ERROR_TABLE, ApiError, describe_failure
from trinity.server.fields import REFUSED_FIELDS

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def depth_bomb(depth: int = 200_000) -> bytes:
    return b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"


BODIES: dict[str, tuple[bytes, int, str]] = {
    "nothing": (b"", 400, "invalid_json"),
    "no JSON": (b"{'messages': []}", 400, "invalid_json"),
    "a list": (b"[]", 400, "invalid_json"),
    "no UTF-8": (b'{"messages": "\xff"}', 400, "invalid_json"),
    "half a character": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_json"),
    "NaN": (b'{"messages": [], "temperature": NaN}', 400, "invalid_json"),
    "a depth bomb": (depth_bomb(), 400, "too_many_values"),
    "millions of values": (b'{"messages": [' + b"[]," * (1 << 21) + b"[]]}", 400, "too_many_values"),
    "a deep unknown field": (
        b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}",
        200,
        "",
    ),
    "no messages": (b"{}", 400, "invalid_request"),
    "messages of numbers": (b'{"messages": [1]}', 400, "invalid_request"),
    "no message": (b'{"messages": []}', 400, "invalid_request"),
    "a message of a number": (b'{"messages": [{"role": 1, "content": 2}]}', 400, "invalid_request"),
    "a file of the server": (
        json.dumps(chat_body([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])).encode(),  # type: ignore[arg-type]
        400,
        "invalid_media",
    ),
}
FIELDS: dict[str, Any] = {
    "temperature": [-1, 1e300, "hot"],
    "top_p": [-0.5, 2],
    "top_k": [-2, 1.5],
    "max_tokens": [0, -1, "many"],
    "n": [0, -1, 10**9],
    "stop": [5, [1]],
    "seed": [2**70, "x"],
    "logprobs": ["yes", 3],
    "top_logprobs": [5],
    "logit_bias": [{"a": 1}, {"99999999999": 1}],
    "stop_token_ids": [[-1], ["a"]],
    "deadline_s": [0, -3],
}


async def test_bodies_that_are_wrong_are_refused_by_name() -> None:
    async with serve_model() as served:
        for name, (body, status, code) in BODIES.items():
            response = await served.http.post(CHAT, content=body, headers=JSON)
            assert response.status_code == status, (name, response.text)
            assert status == 200 or response.json()["error"]["code"] == code, name
        for field, values in FIELDS.items():
            for value in values:
                response = await served.http.post(CHAT, json=chat_body(**{field: value}))
                assert response.status_code == 400, (field, value, response.text)
                assert field.partition("_")[0] in response.json()["error"]["message"] or field == "n", response.text
        assert (await served.http.post(CHAT, json=chat_body(max_tokens=1))).status_code == 200
        assert not served.pipe.streams


async def test_fields_that_would_change_the_answer_are_refused_and_unknown_ones_ignored() -> None:
    async with serve_model() as served:
        for name in REFUSED_FIELDS:
            fields: dict[str, Any] = {name: {"x": 1}}
            response = await served.http.post(CHAT, json=chat_body(max_tokens=1, **fields))
            assert response.status_code == 400, name
            assert name in response.json()["error"]["message"]
        harmless = {name: off[0] for name, off in REFUSED_FIELDS.items() if off} | {"user": "me", "future_field": [1]}
        assert (await served.http.post(CHAT, json=chat_body(max_tokens=1, **harmless))).status_code == 200


async def test_other_paths_methods_and_types() -> None:
    async with serve_model() as served:
        found = {
            "path": await served.http.get("/v1/nothing"),
            "method": await served.http.get(CHAT),
            "type": await served.http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}),
            "model": await served.http.post(CHAT, json=chat_body(model="../../etc/passwd")),
        }
        assert {name: each.status_code for name, each in found.items()} == {
            "path": 404,
            "method": 405,
            "type": 415,
            "model": 404,
        }
        assert all(set(each.json()["error"]) == {"message", "type", "param", "code"} for each in found.values())
        assert not any("access-control-allow-origin" in each.headers for each in found.values())


async def test_long_slow_and_many_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    async def pieces(count: int, wait_s: float = 0.0) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b" " * 1000
            await asyncio.sleep(wait_s)

    async def held(go_on: asyncio.Event) -> AsyncIterator[bytes]:
        yield b" " * 8000
        await go_on.wait()

    config = ServerConfig(max_body_bytes=10_000, max_held_bytes=30_000)
    async with serve_model(config=config) as served:
        announced = await served.http.post(CHAT, content=b" " * 20_000, headers=JSON)
        chunked = await served.http.post(CHAT, content=pieces(20), headers=JSON)
        first = asyncio.create_task(served.http.post(CHAT, content=held(go_on := asyncio.Event()), headers=JSON))
        async with asyncio.timeout(120):
            while served.server.held.held < 8000:
                await asyncio.sleep(0.01)
        second = await served.http.post(CHAT, content=pieces(9), headers=JSON)
        go_on.set()
        assert (second.status_code, (await first).status_code) == (429, 400), "more than one client's bodies may hold"
        monkeypatch.setattr(config, "body_timeout_s", 0.5)
        monkeypatch.setattr(connection, "LINGER_S", 60.0)  # a busy machine may send slowly
        slow = await served.http.post(CHAT, content=pieces(9, 0.1), headers=JSON)
        assert (announced.status_code, chunked.status_code, slow.status_code) == (413, 413, 408)
        assert (await served.http.post(CHAT, json=chat_body(max_tokens=1))).status_code == 200


async def test_long_bodies_leave_room_for_short_ones() -> None:
    go_on = asyncio.Event()

    async def held(size: int) -> AsyncIterator[bytes]:
        yield b" " * size
        await go_on.wait()

    async with serve_model(config=ServerConfig(max_body_bytes=5 << 20, max_held_bytes=14 << 20)) as served:
        first = asyncio.create_task(served.http.post(CHAT, content=held(5 << 20), headers=JSON))
        async with asyncio.timeout(120):
            while served.server.held.held < 5 << 20:
                await asyncio.sleep(0.01)
        long = await served.http.post(CHAT, content=b" " * (2 << 20), headers=JSON)
        short = await served.http.post(CHAT, json=chat_body(max_tokens=1))
        assert (long.status_code, short.status_code) == (429, 200)
        assert long.json()["error"]["code"] == "too_many_bytes"
        go_on.set()
        assert (await first).status_code == 400, "it is no JSON"


def test_whatever_bodies_a_client_sends_there_is_room_for_another_s() -> None:
    """At 82dc40f9 one client's 192 bodies of 1 MiB left no byte for anybody, as long as their requests ran."""
    held = HeldBytes(96 << 20)
    left: dict[str, int] = {}
    for client, least in (("a", 48), ("b", 23), ("c", 11), ("d", 5)):
        left[client] = 0
        with suppress(ApiError):
            while True:
                held.take(1 << 20, 0, client)
                left[client] += 1
        assert left[client] >= least
        with pytest.raises(ApiError, match="of them this client's"):
            held.take(1 << 20, 0, client)
    for client, count in left.items():
        for _ in range(count):
            held.give_back(1 << 20, client)
    assert not held.held
    assert not held._of


PIECE = 64 << 10  # bytes: as a body arrives


def take_body(held: HeldBytes, size: int, client: str) -> None:
    """Take a body piece by piece. Raises ``ApiError`` as ``HeldBytes`` does; what was taken stays."""
    for before in range(0, size, PIECE):
        held.take(min(PIECE, size - before), before, client)


@pytest.mark.parametrize("megabytes", [1, 2, 64, 72, 73, 128, 1024])
def test_one_client_s_largest_body_fits_where_nothing_else_is_held(megabytes: int) -> None:
    """At b6e2a44b a lone client was refused at 72 MiB with 503, each time, whatever --max-body-mb said beyond that."""
    config = ServerConfig(max_body_bytes=megabytes << 20)
    take_body(HeldBytes(config.max_held_bytes), config.max_body_bytes, "a")


@pytest.mark.parametrize(("size", "least"), [(1 << 20, 2 << 20), (3 << 20, 8 << 20), (64 << 20, 178956971)])
def test_a_bound_of_all_bodies_that_is_too_small_for_one_is_refused(size: int, least: int) -> None:
    take_body(HeldBytes(ServerConfig(max_body_bytes=size, max_held_bytes=least).max_held_bytes), size, "a")
    with pytest.raises(ConfigError, match=rf"max_held_bytes.*max_body_bytes.*at least {least}"):
        ServerConfig(max_body_bytes=size, max_held_bytes=least - 1)


def test_who_holds_the_bytes_tells_the_status() -> None:
    """A balancer takes out a server for 503: not for what one client does while others would be served."""
    held = HeldBytes(192 << 20)  # 144 MiB for long bodies
    take_body(held, 40 << 20, "a")
    with pytest.raises(ApiError, match="of them this client's") as own:
        take_body(held, 60 << 20, "a")
    assert (own.value.status, own.value.code) == (429, "too_many_bytes")
    with pytest.raises(ApiError) as full:
        take_body(held, 60 << 20, "b")
    assert (full.value.status, full.value.code) == (503, "too_many_bytes")
    assert full.value.headers["retry-after"] == own.value.headers["retry-after"] == "1"


async def test_an_unknown_path_is_not_repeated_whole() -> None:
    async with serve_model() as served:
        answer = await served.http.get("/" + "a" * 30_000)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")
        assert len(answer.content) < 600


@pytest.mark.parametrize("refusal", ["draining", "no key", "no JSON"])
async def test_a_client_that_still_sends_reads_why_it_was_refused(
    refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drain that closed at once met the rest of the body with a reset, which wipes out the answer."""
    monkeypatch.setattr(connection, "LINGER_S", 60.0)  # a busy machine may send slowly

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 1000
            await asyncio.sleep(0.05)

    async with serve_model(config=ServerConfig(api_keys=("known",))) as served:
        key = {} if refusal == "no key" else {"authorization": "Bearer known"}
        kind = {"content-type": "text/plain"} if refusal == "no JSON" else JSON
        served.server.draining = refusal == "draining"
        found = await served.http.post(CHAT, content=pieces(), headers=kind | key)
        assert found.status_code == {"draining": 503, "no key": 401, "no JSON": 415}[refusal]
        served.server.draining = False
        answer = await served.http.post(CHAT, json=chat_body(max_tokens=1), headers={"authorization": "Bearer known"})
        assert answer.status_code == 200


async def test_what_the_pipeline_refuses_comes_before_the_200() -> None:
    async with serve_model(max_waiting=1) as served:
        long = [served.http.post(CHAT, json=chat_body("word " * 3000, stream=True))]
        late = [served.http.post(CHAT, json=chat_body(deadline_s=1e-4, stream=True, max_tokens=400))]
        assert [(await each).status_code for each in [*long, *late]] == [413, 504]
        burst = await asyncio.gather(
            *(served.http.post(CHAT, json=chat_body(stream=True, max_tokens=200, ignore_eos=True)) for _ in range(6))
        )
    codes = [each.status_code for each in burst]
    assert set(codes) == {200, 429}
    refused = burst[codes.index(429)]
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"


async def test_an_error_after_the_200_is_an_event() -> None:
    async with serve_model() as served:
        for deadline_s in (0.3, 3.0, 30.0):  # a busy machine has no first token within the shortest: 504
            body = chat_body(deadline_s=deadline_s, stream=True, max_tokens=1500, ignore_eos=True)
            response = await served.http.post(CHAT, json=body)
            if response.status_code == 200:
                break
        assert response.status_code == 200
    events = [line for line in response.text.split("\n\n") if line]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in response.text


def test_the_table_of_errors() -> None:
    away = errors.Overloaded("no instance is up at stage P")
    away.stage = "P"  # type: ignore[attr-defined]
    expected: list[tuple[BaseException, int]] = [
        (errors.RequestError("x"), 400),
        (errors.BadMedia("x"), 400),
        (errors.RequestTooLarge("x"), 413),
        (errors.Overloaded("x"), 429),
        (away, 503),
        (errors.ClosedError("x"), 503),
        (errors.DeadlineExceeded("x"), 504),
        (errors.PoisonRequest("it dies"), 422),
        (errors.ResumeError("x", "r", "unknown"), 404),
        (errors.ResumeError("x", "r", "alive"), 409),
        (errors.StageError("secret"), 500),
        (errors.MigrationError("secret"), 500),
        (errors.PeerLost("secret"), 500),
        (ValueError("secret"), 500),
        (MemoryError("secret"), 500),
        (ApiError(418, "teapot", "x"), 418),
    ]
    for error, status in expected:
        found = describe_failure(error, "id-1")
        assert found.status == status, error
        assert b"secret" not in found.body(), "what went wrong inside is for the log"
        assert ("retry-after" in found.headers) is (status in (429, 503))
    assert ERROR_TABLE[-1].error is BaseException


@pytest.mark.parametrize("kind", [kind for kind in vars(errors).values() if isinstance(kind, type)])
def test_every_error_of_the_library_has_a_row(kind: type) -> None:
    if issubclass(kind, errors.TrinityError) and kind is not errors.UnknownName:
        arguments = ("x", 1.0) if kind is errors.TraceTooShort else ("x",)
        assert describe_failure(kind(*arguments)).status in (400, 409, 413, 422, 429, 500, 503, 504)
