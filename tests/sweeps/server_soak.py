"""A soak of ``trinity serve``: 20,000 mixed requests, and the private memory of each of its processes meanwhile.

    python tests/sweeps/server_soak.py [--requests 20000] [--placement 1E1P1D]

Chats with none to three pictures in five formats, streams, clients that leave, malformed bodies, schemas, n, logprobs
and deadlines. Undisturbed greedy answers are compared with those of transformers' ``generate()``. The table has, for
each process, the private bytes at the half and at the end, and the slope of a line through the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.checkpoint_files import checkpoint
from support.serve_command import ServeCommand, ask, chat, private_bytes
from sweeps.server_kills import Question, make_questions

AT_ONCE = 8
LOOK_EVERY = 250  # requests between two looks at memory
FLAT = 1 << 20  # bytes per 1,000 requests that count as flat: 100 MB in 100,000 requests
KINDS = (*2 * ("compared", "picture"), "text", "stream", "leave", "bad", "schema", "n")
FIELDS: dict[str, dict[str, Any]] = {
    "picture": {"max_tokens": 16},
    "text": {"max_tokens": 48},
    "stream": {"max_tokens": 24, "stream": True},
    "schema": {"max_tokens": 40, "response_format": {"type": "json_object"}},
    "n": {"max_tokens": 8, "n": 3, "temperature": 0.8, "logprobs": True, "top_logprobs": 3},
}
FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP")
BAD = (b"{", b"[]", b'{"messages": 7}', b'{"messages": []}', chat("x", ("data:image/png;base64,AAAA",)))


def draw_picture(draw: random.Random) -> str:
    """Draw a small picture in one of the formats, as a data: URL."""
    from PIL import Image

    size = draw.randint(8, 200), draw.randint(8, 200)
    picture, data = (
        Image.new("RGB", size, (draw.randrange(256), draw.randrange(256), draw.randrange(256))),
        io.BytesIO(),
    )
    picture.save(data, form := draw.choice(FORMATS))
    return f"data:image/{form.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"


class Soak:
    """Clients, and what they and the server's processes came to."""

    def __init__(self, server: ServeCommand, questions: Sequence[Question], count: int, seed: int) -> None:
        self._server, self._questions, self._left, self._draw = server, questions, count, random.Random(seed)
        self._done = 0
        self.ends, self.wrong = Counter[str](), list[str]()
        self.tokens = 0
        self.memory: dict[str, list[tuple[int, int]]] = defaultdict(list)  # (requests, bytes), by process

    async def run(self) -> None:
        await asyncio.gather(*[self._ask_on() for _ in range(AT_ONCE)])

    async def _ask_on(self) -> None:
        while self._left > 0:
            self._left -= 1
            await self._ask_one()
            self._done += 1
            if self._done % LOOK_EVERY == 0:
                for each in self._server.tree():
                    self.memory[f"{each.name} {each.pid}"].append((self._done, private_bytes(each.pid)))
            if self._done % 2000 == 0:
                print(f"{self._done} requests, {len(self.wrong)} wrong, {dict(self.ends)}", flush=True)

    async def _ask_one(self) -> None:
        draw, port = self._draw, self._server.port
        kind = draw.choice(
            ("compared", "compared", "picture", "picture", "text", "stream", "leave", "bad", "schema", "n")
        )
        pictures = tuple(draw_picture(draw) for _ in range(draw.randint(0, 3)))
        text = f"Number {draw.randrange(10**6)}: " + "tell more " * draw.randint(0, 30)
        if kind == "compared":
            question = draw.choice(self._questions)
            answer = await ask(port, question.body)
            ids = answer.json()["choices"][0]["token_ids"] if answer.status == 200 else None
            self.tokens += len(ids or ())
            if ids != question.ids:
                self.wrong.append(f"{answer.status}: {ids} and not {question.ids}")
        elif kind == "bad":
            answer = await ask(port, draw.choice(BAD))
            if not 400 <= answer.status < 500:
                self.wrong.append(f"{answer.status} for a bad body")
        elif kind == "leave":
            with suppress(TimeoutError):
                await ask(port, chat(text, pictures, max_tokens=400), timeout_s=draw.uniform(0.01, 0.5))
            self.ends["left"] += 1
            return
        else:
            answer = await ask(port, chat(text, pictures if kind == "picture" else (), **FIELDS[kind]))
        self.ends[f"{kind} {answer.status}"] += 1
        if answer.status >= 500 or answer.status == 0:
            self.wrong.append(f"{kind}: {answer.status} {answer.body[:200]!r}")

    def report(self) -> list[str]:
        """Print memory by process. Returns what grew."""
        problems = []
        for name, rows in sorted(self.memory.items()):
            half = [row for row in rows if row[0] > self._done / 2]
            if len(half) < 3:
                print(f"{name:28} gone or new: {len(rows)} looks")
                continue
            slope = statistics.linear_regression([at for at, _ in half], [size for _, size in half]).slope * 1000
            print(
                f"{name:28} {rows[0][1] / 2**20:7.1f} MiB first, {half[0][1] / 2**20:7.1f} at the half, "
                f"{half[-1][1] / 2**20:7.1f} at the end; {slope / 2**20:+.2f} MiB per 1,000 requests in the second half"
            )
            if slope > FLAT:
                problems.append(f"{name} grows")
        return problems


async def run(asked: argparse.Namespace) -> int:
    model = checkpoint("llava")
    questions = make_questions(model)
    options = ("--placement", asked.placement, "--hosting", "process", "--dtype", "float32", *asked.serve)
    with ServeCommand(model, *options, log=Path(asked.log)) as server:
        await server.until_ready()
        soak, began = Soak(server, questions, asked.requests, asked.seed), time.monotonic()
        await soak.run()
        print(f"{asked.requests} requests in {time.monotonic() - began:.0f} s; {dict(soak.ends)}")
        problems = soak.report()
        print(f"{soak.tokens} tokens compared, {len(soak.wrong)} wrong")
    print("\n".join([*soak.wrong[:20], *problems]))
    return 1 if soak.wrong or problems else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--placement", default="1E1P1D")
    parser.add_argument("--log", default=str(Path(tempfile.gettempdir()) / "server_soak.log"), help="the server's log")
    parser.add_argument("serve", nargs="*", help="further arguments of trinity serve, behind --")
    return asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
