"""JSON bodies parsed in pieces: what comes out is json's, and no call of the parser gets more than a small text."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.http_server import chat_body, serve_model
from trinity.server import body_values
from trinity.server.body_values import MOST_VALUES, JsonBodies, TooManyValues, decode_json

TEXTS = (
    'a"b',
    "\\ud83d",
    "\\\\ud83d😀",
    "漢" * 9,
    "\\",
    '\\"',
    "\n",
    "é",
    "語",
    "😀",
    "\u2028",
    "a/b",
    "x" * 70,
    "\x00",
    "é" * 40,
    '"' * 70,
    "\\" * 65,
)
MIB = 1 << 20


def draw(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 3:
        return "".join(rng.choice(TEXTS) for _ in range(rng.randrange(12)))
    if kind < 5:
        return rng.choice([None, True, 0, -1.5, 10**15])
    if kind < 7:
        return [draw(rng, depth + 1) for _ in range(rng.randrange(5))]
    keys = ("".join(rng.choice(TEXTS) for _ in range(rng.randrange(6))) for _ in range(rng.randrange(5)))
    return {key: draw(rng, depth + 1) for key in keys}


@pytest.mark.parametrize("piece", [3, 17, 2 * MIB])
def test_values_are_those_of_json(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_values, "_PIECE", piece)
    monkeypatch.setattr(body_values, "_LONG", 8)
    rng, parsed = random.Random(122), 0
    for number in range(600):
        value = draw(rng)
        text = json.dumps(value, ensure_ascii=number % 2 == 0, indent=[None, 1][number % 3 == 0]).encode()
        parsed += 1
        assert decode_json(text) == json.loads(text)
        assert json.dumps(decode_json(text)) == json.dumps(value), "in the same order"
        cut = text[: rng.randrange(len(text))]
        try:
            expected = json.loads(cut)
        except ValueError:
            with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
                decode_json(cut)
        else:
            assert decode_json(cut) == expected
    assert parsed == 600


def test_a_key_that_is_there_twice() -> None:
    """At 44286955 the first of two was taken where one was spelled with escapes: a filter in front read another."""
    name = "k" * 70
    escaped = "\\u006b" * 12
    assert decode_json(f'{{"{name}": 1, "b": 2, "{name}": 3}}'.encode()) == {name: 3, "b": 2}
    for keys in ((escaped, "k" * 12), ("k" * 12, escaped), ("k" * 12, escaped, "k" * 12)):
        pairs = ", ".join(f'"{key}": {at}' for at, key in enumerate(keys))
        with pytest.raises(msgspec.DecodeError, match="a key twice"):
            decode_json(f"{{{pairs}}}".encode())


BODIES: dict[str, tuple[bytes, bool | None]] = {  # served, refused for its values, or no JSON
    "a picture": (b'{"a":"' + b"A" * 20 * MIB + b'"}', True),
    "pictures": (b'{"a":[' + b",".join(b'"' + b"A" * MIB + b'"' for _ in range(20)) + b"]}", True),
    "a picture in lines": (b'{"a":"' + (b"A" * 76 + b"\\n") * (20 * MIB // 78) + b'"}', True),
    "a long text": (('["' + "語" * 5 * MIB + '"]').encode(), True),
    "a longer text": (('["' + "語" * 7 * MIB + '"]').encode(), False),
    "many texts": (b"[" + b",".join(b'"' + b"a" * 150 + b'"' for _ in range(120_000)) + b"]", True),
    "empty lists": (b"[" + b"[]," * MOST_VALUES + b"1]", False),
    "deep": (b"[" * 4 * MIB, False),
    "numbers": (b"[" + b"1," * MOST_VALUES + b"1]", False),
    "one number": (b"1" * 20 * MIB, False),
    "spaces": (b'{"a":' + b" " * 20 * MIB + b"1}", False),
    "quotes": (b'["' + b'\\"' * 2 * MIB + b'"]', False),
    "backslashes": (b'["' + b"\\\\" * 10 * MIB + b'"]', False),
    "escapes": (b'["' + b"\\ud83d\\ude00" * MIB + b'"]', True),
    "escapes of text": (json.dumps(["漢字" * 400_000]).encode(), True),
    "escaped quotes": (b'["' + b'\\"' * (MIB // 4) + b'"]', True),
    "no UTF-8": (b'["' + b"\x80" * 4 * MIB + b'"]', None),
}


@pytest.mark.parametrize("name", BODIES)
def test_no_call_of_the_parser_gets_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call holds the interpreter until it returns: at 9df71424 for 2.6 s of CPU for the worst 60 MB."""
    content, served = BODIES[name]
    sizes, decode = [0], msgspec.json.decode

    def count(text: bytes, **named: Any) -> Any:
        sizes.append(len(text))
        return decode(text, **named)

    monkeypatch.setattr(msgspec.json, "decode", count)
    if served:
        assert decode_json(content) == decode(content)
    elif served is None:
        with pytest.raises(ValueError, match=r"UTF-8|utf-8|codec"):
            decode_json(content)
    else:
        with pytest.raises(TooManyValues):
            decode_json(content)
    assert max(sizes) <= 4 * MIB


async def test_a_large_body_is_served_and_one_of_too_many_values_is_refused() -> None:
    async with serve_model() as served:
        body = chat_body("Good morning", max_tokens=1, user="A" * 4 * MIB)
        assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
        body = chat_body("Good morning", max_tokens=1, metadata={"a": [{}] * (MOST_VALUES // 2)})
        answer = await served.http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_many_values")


async def test_a_short_body_of_many_strings_holds_the_loop_for_no_longer_than_its_parser() -> None:
    body = json.dumps({"schema": {str(each): [f"v{each}"] for each in range(3_000)}}).encode()
    assert len(body) < body_values.AT_ONCE_BYTES
    taken, reference = list[float](), list[float]()
    for _ in range(5):
        began = time.thread_time()
        found = await JsonBodies().decode([body], "a", list)
        taken.append(time.thread_time() - began)
        began = time.thread_time()
        assert found == list(msgspec.json.decode(body))
        reference.append(time.thread_time() - began)
    assert min(taken) <= 5 * min(reference), (taken, reference)


async def test_a_short_body_has_no_more_values_than_a_long_one() -> None:
    with pytest.raises(TooManyValues):
        await JsonBodies().decode([b"[" + b"[]," * 80_000 + b"0]"], "a", list)
    text = "," * (MOST_VALUES + 9)
    assert await JsonBodies().decode([json.dumps([text]).encode()], "a", list) == [text]


async def test_small_bodies_wait_for_no_large_one() -> None:
    bodies = JsonBodies()
    job = await bodies._large.take("a")
    assert await bodies.decode([b'{"a":"', b"A" * MIB, b'"}'], "a", dict) == {"a": "A" * MIB}
    assert await bodies.decode([b"[1]"], "a", list) == [1]
    bodies._large.leave(job, 0.0)


async def test_a_client_s_body_waits_for_one_of_another_s_at_most() -> None:
    """At 82dc40f9 a small picture waited for all bodies of another client that had come before: 27 s behind twenty."""
    bodies, order, held = JsonBodies(), list[str](), threading.Event()

    def read(body: Any) -> None:
        held.wait(60.0)

    async def parse(client: str) -> None:
        await bodies.decode([b'{"a":"', b"A" * MIB, b'"}'], client, read)
        order.append(client)

    tasks = [asyncio.create_task(parse(client)) for client in "aaaaaaaab"]
    await asyncio.sleep(0)  # all of them wait, but for the first
    held.set()
    await asyncio.gather(*tasks)
    assert order.index("b") <= 1, order
    assert len(order) == 9


@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([repr, "{:.17e}".format, "{:.60f}".format]))
@example(5e-324, repr)
def test_numbers_are_those_of_json(number: float, write: Callable[[float], str]) -> None:
    assert decode_json(f"[{write(number)}, 1]".encode()) == json.loads(f"[{write(number)}, 1]")


@pytest.mark.parametrize("text", ["1e999", "-1e400", "9" * 400 + ".0"])
def test_a_number_beyond_those_that_there_are_is_no_json(text: str) -> None:
    with pytest.raises(msgspec.DecodeError, match="out of range"):
        decode_json(f"[{text}]".encode())


def test_tiny_numbers_take_no_longer_than_others() -> None:
    """At b6e2a44b they took up to 34 microseconds each, in one call: 250 KiB held the loop for a third of a second."""
    tiny, others = (b"[" + b",".join([number] * 8_000) + b"]" for number in (b"1e-320", b"1.5e12"))
    taken, reference = list[float](), list[float]()
    for _ in range(5):
        for body, times in ((tiny, taken), (others, reference)):
            began = time.thread_time()
            decode_json(body)
            times.append(time.thread_time() - began)
    assert min(taken) <= 4 * min(reference), (taken, reference)


async def test_what_is_made_of_a_large_body_is_made_beside_the_loop() -> None:
    """At b6e2a44b the fields of 131,072 tools or choices were read on the loop, for a tenth of a second."""
    seen = list[threading.Thread]()
    for size in (10, MIB):
        await JsonBodies().decode([b'["', b"a" * size, b'"]'], "a", lambda _: seen.append(threading.current_thread()))
    assert (seen[0] is threading.main_thread(), seen[1] is threading.main_thread()) == (True, False)


@pytest.mark.parametrize("wide", ["語", "\\ud83d\\ude00"])
def test_a_text_of_wide_characters_has_a_bound(wide: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At d3eb033e 60 MB with one emoji were made by a call of 0.2 s. Base64 with escaped slashes is no such text."""
    monkeypatch.setattr(body_values, "MOST_WIDE", 100_000)
    for text in ("x" * 99_000 + wide, "x\\/" * 50_000, "é" + "x" * 200_000):
        assert decode_json(f'["{text}"]'.encode()) == json.loads(f'["{text}"]')
    with pytest.raises(TooManyValues, match="in a text with characters beyond Latin-1"):
        decode_json(f'["{"x" * 200_000}{wide}"]'.encode())
