"""Streams against a real server, 2,000 at once: slow readers, clients that leave; what is left, and what it cost.

``make server-load`` runs it. The server is a process of its own, over a tiny model; its clients are plain sockets here.
Waves of all streams must give those who stay their exact tokens, and leave memory, file descriptors and blocks as they
were; what the C library keeps of freed memory for the next wave is given back before memory is read. Then the CPU time
of a server's request and token beyond the library's own is measured: the same requests once by HTTP and once by
``pipe.stream`` in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS = ("Good morning", "What a day", "Tell me of the sea", "One and two")
CHAT = "/v1/chat/completions"
LEAVES, READS_SLOWLY = 0.3, 0.1  # shares of the clients
MEMORY_BYTES = 12 << 20  # that waves may leave behind, rows of the trace aside
REQUEST_S, TOKEN_S = 1e-3, 60e-6


# ---------------------------------------------------------------- the server's process


async def serve(model: str, placement: str) -> None:
    """Serve until the standard input ends; each line of it is a question, answered by a line of JSON."""
    import uvicorn

    import trinity
    import trinity.server
    from trinity.memory.freed_memory import release_freed_memory
    from trinity.server.command import DrainingServer, keep_loaded, uvicorn_options

    pipe = trinity.Pipeline(model, placement, dtype="float32", max_waiting=8192)
    async with pipe:
        keep_loaded()
        app = trinity.server.app(pipe)
        asked = argparse.Namespace(access_log=False, tls_certificate=None, tls_key=None)
        config = uvicorn.Config(app, port=0, backlog=4096, **uvicorn_options(asked))
        server = DrainingServer(config, app.state.server, 5)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        say({"port": server.servers[0].sockets[0].getsockname()[1]})
        peak = [0]
        watching = asyncio.create_task(watch(app.state.server, peak))
        while line := await asyncio.to_thread(sys.stdin.readline):
            question = json.loads(line)
            if question["ask"] == "library":
                await run_in_library(pipe, question["count"], question["tokens"])
            if question["ask"] == "settle":
                gc.collect()
                release_freed_memory()
            active, rows = len(app.state.server.active), count_rows(pipe)
            say({"cpu_s": time.process_time(), "active": active, "peak": peak[0], "rows": rows})
        watching.cancel()
        server.should_exit = True
        await serving


def count_rows(pipe: Any) -> int:
    """Bytes of the pipeline's trace, which are bounded elsewhere (64 MiB)."""
    return sum(sys.getsizeof(msgspec.msgpack.encode(row)) for row in pipe.trace)


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


async def watch(server: Any, peak: list[int]) -> None:
    while True:
        peak[0] = max(peak[0], len(server.active))
        await asyncio.sleep(0.05)


async def run_in_library(pipe: Any, count: int, tokens: int) -> None:
    from trinity import Request, Sampling

    async def run(number: int) -> None:
        messages = [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        request = Request(messages=messages, max_tokens=tokens, sampling=sampling, untrusted=True)
        async with pipe.stream(request) as stream:
            while await stream.next_tokens():
                pass

    await asyncio.gather(*map(run, range(count)))


class ServerProcess:
    """The server's process, and what the system says of it."""

    def __init__(self, model: str, placement: str) -> None:
        command = [sys.executable, __file__, "--serve", model, "--placement", placement]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self._read()["port"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def memory(self) -> int:
        """Bytes of private memory that are in use."""
        text = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon"))

    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self._process.pid}/fd").iterdir())

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def close(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(60)


# ---------------------------------------------------------------- its clients


class Answer(NamedTuple):
    """What a client came to: "read", "left" or what went wrong; the text; events of tokens that it read."""

    end: str
    prompt: str = ""
    text: str = ""
    tokens: int = 0


async def read_stream(port: int, prompt: str, tokens: int, leave_after: int = 0, slow: bool = False) -> Answer:
    """Ask for a stream and read it: to the end, slowly, or so many reads before leaving."""
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": tokens}
    data = json.dumps({**body, "temperature": 0, "ignore_eos": True, "return_token_ids": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    limit = 2048 if slow else 1 << 16
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=limit)
    received, reads = bytearray(), 0
    try:
        writer.write(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)
        while part := await reader.read(256 if leave_after else 512 if slow else 1 << 16):
            received += part
            reads += 1
            if leave_after and reads >= leave_after:
                writer.transport.abort()
                return Answer("left")
            if slow:
                await asyncio.sleep(0.02)
    except OSError as error:
        return Answer(repr(error))
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return parse_stream(bytes(received), prompt)


def parse_stream(received: bytes, prompt: str) -> Answer:
    """Read the events of a whole response."""
    head, _, body = received.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        return Answer(f"{head[:40]!r} {body[:200]!r}")
    events = [line[6:].strip() for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1] != b"[DONE]":
        return Answer(f"no [DONE] behind {len(events)} events")
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return Answer("read", prompt, text, sum(len(choice.get("token_ids") or ()) for choice in choices))


async def run_wave(port: int, count: int, tokens: int, seed: int, mixed: bool = True) -> list[Answer]:
    """Run so many clients at once; ``mixed``: some leave and some read slowly."""
    draw = random.Random(seed)

    async def run(number: int) -> Answer:
        kind = draw.random() if mixed else 1.0
        leave_after = draw.randint(1, 4) if kind < LEAVES else 0
        slow = LEAVES <= kind < LEAVES + READS_SLOWLY
        return await read_stream(port, PROMPTS[number % len(PROMPTS)], tokens, leave_after, slow)

    return await asyncio.gather(*[run(number) for number in range(count)])


def wait_until_empty(server: ServerProcess) -> dict[str, float]:
    """Wait until nothing is served and every block is free; the metrics then. Raises ``TimeoutError``."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = server.metrics()
        held = [name for name, value in found.items() if name.startswith("vllm:num_requests_") and value]
        if not held and not server.ask(ask="state")["active"]:
            return found
        time.sleep(0.2)
    raise TimeoutError("requests are left a minute after their clients")


# ---------------------------------------------------------------- the figures


def check_waves(server: ServerProcess, count: int, tokens: int, waves: int) -> list[str]:
    """Run the waves; returns what was wrong."""
    problems, memory, opened = list[str](), list[int](), list[int]()
    alone = {p: asyncio.run(read_stream(server.port, p, tokens)) for p in PROMPTS}
    asyncio.run(run_wave(server.port, count, tokens, waves))  # the first one fills pools and tables
    for wave in range(waves):
        began = time.monotonic()
        answers = asyncio.run(run_wave(server.port, count, tokens, wave))
        wait_until_empty(server)
        rows = server.ask(ask="settle")["rows"]
        ends = Counter(answer.end for answer in answers)
        wrong = [a for a in answers if a.end == "read" and a != alone[a.prompt]]
        memory.append(server.memory() - rows)
        opened.append(server.descriptors())
        print(
            f"wave {wave + 1}: {count} streams of {tokens} tokens in {time.monotonic() - began:.1f} s, {dict(ends)}, "
            f"{len(wrong)} wrong; memory {memory[-1] / 2**20:.1f} MiB beside {rows / 2**20:.1f} of rows, "
            f"{opened[-1]} descriptors",
            flush=True,
        )
        problems += [f"{len(wrong)} answers differ from those read alone"] if wrong else []
        problems += [f"{number} clients ended by {end}" for end, number in ends.items() if end not in ("read", "left")]
    peak = server.ask(ask="state")["peak"]
    print(f"most requests at once: {peak}")
    problems += [f"only {peak} requests at once"] if peak < 0.9 * count else []
    problems += ["memory grows"] if memory[-1] > memory[0] + MEMORY_BYTES else []
    problems += ["descriptors are left"] if opened[-1] > opened[0] else []
    return problems


def measure_cost(server: ServerProcess, count: int, tokens: Sequence[int], rounds: int) -> list[str]:
    """Measure CPU beyond the library's, of requests with few and with many tokens; returns what was too much."""
    beyond: dict[int, list[float]] = {number: [] for number in tokens}
    for _ in range(rounds):
        for number in tokens:
            start = server.ask(ask="settle")["cpu_s"]
            answers = asyncio.run(run_wave(server.port, count, number, 0, mixed=False))
            assert all(answer.tokens == number for answer in answers), Counter(answer.end for answer in answers)
            middle = server.ask(ask="state")["cpu_s"]
            again = server.ask(ask="settle")["cpu_s"]
            end = server.ask(ask="library", count=count, tokens=number)["cpu_s"]
            beyond[number].append((middle - start) - (end - again))
            print(f"{count} x {number} tokens: HTTP {middle - start:.2f} s, library {end - again:.2f} s", flush=True)
    few, many = tokens
    low, high = (statistics.median(beyond[number]) for number in tokens)
    token_s = (high - low) / count / (many - few)
    request_s = low / count - few * token_s
    print(f"the server beyond the library: {request_s * 1e3:.2f} ms a request, {token_s * 1e6:.1f} us a token")
    problems = [f"{request_s * 1e3:.2f} ms a request"] if request_s > REQUEST_S else []
    return problems + ([f"{token_s * 1e6:.1f} us a token"] if token_s > TOKEN_S else [])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3, help="of the measurement of CPU time")
    parser.add_argument("--placement", default="PD")
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if asked.serve:
        asyncio.run(serve(asked.serve, asked.placement))
        return 0
    sys.path.insert(0, str(ROOT / "tests"))
    from support.checkpoint_files import checkpoint

    server = ServerProcess(str(checkpoint("llama")), asked.placement)
    try:
        problems = check_waves(server, asked.streams, asked.tokens, asked.waves) if asked.waves else []
        problems += measure_cost(server, 500, (1, 33), asked.rounds)
    finally:
        code = server.close()
    problems += [f"the server's process ended with {code}"] if code else []
    print("\n".join(problems) or "nothing was left, nothing was wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
