"""CPU time that the server adds to the library, per request and per token, over loopback.

    python benchmarks/serving/server_cost.py

The same streamed chats are served twice, each time in another process: by ``trinity serve`` to a client in this one,
and by ``pipe.stream`` alone. The difference of the two processes' CPU times, at two lengths of output, gives both
figures. ``--at-once`` of them run side by side, because batches share what they cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import trinity
from trinity.testing.checkpoints import build_checkpoint

LENGTHS = (4, 64)  # tokens of an output
TEXT = "Good morning, what a day"


def chat(tokens: int) -> dict[str, Any]:
    """Make the body of a chat."""
    return {
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def serve_directly(model: str, tokens: int, count: int, at_once: int) -> float:
    """CPU seconds of ``count`` chats by the library alone, in this process."""
    turn = asyncio.Semaphore(at_once)
    sampling = trinity.Sampling.greedy(ignore_eos=True)

    async def one(pipe: trinity.Pipeline) -> None:
        async with turn:
            asked = trinity.Request(messages=chat(tokens)["messages"], max_tokens=tokens, sampling=sampling)
            async with pipe.stream(asked) as stream:
                while await stream.next_tokens():
                    pass

    async with trinity.Pipeline(model, "PD") as pipe:
        await asyncio.gather(*(one(pipe) for _ in range(at_once)))
        before = time.process_time()
        await asyncio.gather(*(one(pipe) for _ in range(count)))
        return time.process_time() - before


async def serve_over_http(address: str, pid: int, tokens: int, count: int, at_once: int) -> float:
    """CPU seconds of a server's process for ``count`` chats, which this process asks for."""
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps(chat(tokens)).encode()
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: x", "content-type: application/json"]
    asked = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body

    async def client(each: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(each):
            writer.write(asked)
            await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()

    await asyncio.gather(*(client(1) for _ in range(at_once)))
    before = cpu_seconds(pid)
    await asyncio.gather(*(client(count // at_once) for _ in range(at_once)))
    return cpu_seconds(pid) - before


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_server(model: str, count: int, at_once: int) -> list[float]:
    """CPU seconds of the server at each length."""
    command = [sys.executable, "-m", "trinity", "serve", model, "--placement", "PD", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].split("/v1")[0]
        server.stdout.readline()  # it serves
        try:
            return [asyncio.run(serve_over_http(address, server.pid, n, count, at_once)) for n in LENGTHS]
        finally:
            server.terminate()


def run_library(model: str, count: int, at_once: int) -> list[float]:
    """CPU seconds of the library alone at each length, in a process of its own."""
    code = "import asyncio, sys; from benchmarks.serving.server_cost import serve_directly as s\n"
    code += "print(asyncio.run(s(sys.argv[1], *map(int, sys.argv[2:]))))"
    runs = [[sys.executable, "-c", code, model, *map(str, (n, count, at_once))] for n in LENGTHS]
    return [float(subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()[-1]) for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--at-once", type=int, default=32)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(build_checkpoint("llama", Path(folder) / "llama"))
        served = run_server(model, given.requests, given.at_once)
        alone = run_library(model, given.requests, given.at_once)
    print(
        "CPU ms a request:",
        *(
            f"{n} tokens: server {a / given.requests * 1e3:.2f}, library {b / given.requests * 1e3:.2f};"
            for n, a, b in zip(LENGTHS, served, alone, strict=True)
        ),
    )
    more = [(a - b) / given.requests for a, b in zip(served, alone, strict=True)]
    token_s = (more[1] - more[0]) / (LENGTHS[1] - LENGTHS[0])
    print(
        f"the server adds {1e3 * (more[0] - LENGTHS[0] * token_s):.2f} ms a request and {1e6 * token_s:.0f} us a token"
    )


if __name__ == "__main__":
    main()
