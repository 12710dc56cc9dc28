"""Kills, freezes and continues children of ``trinity serve`` from outside, and compares every answer with generate().

    python tests/sweeps/server_kills.py [--strikes 300] [--seed 0] [--placement 1E1P1D]

A client of plain HTTP asks without a pause. Its oracle is transformers' documented route (``apply_chat_template`` and
``generate()``) on the same checkpoint. A strike counts only if a request was in flight in the part that was struck: the
server's live feed named it there, and its answer came after the strike. The part is one of the instances, their
launcher, or a process that preprocesses.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support import paths
from support.checkpoint_files import checkpoint
from support.serve_command import Answer, ServeCommand, Served, ask, chat

KINDS = ("kill", "term", "segv", "freeze", "stumble")
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV}
STUMBLE_S = 1.0  # s that a stumbling part stands still
FROZEN_S = 30.0  # s after which a frozen part that nobody has replaced goes on
AT_ONCE = 6  # requests
LAUNCHER = "launch"  # as /proc names it
END_S = 300.0  # s that a request may take on a busy machine, recoveries included
MEET_S = 20.0  # s to wait for a request in the part that was drawn
HEAL_S = 240.0  # s until all roles are back
TEXTS = ("Tell of the sea.", "What is to be seen here?", "One, two and", "Say more of it, please.")


@dataclass(frozen=True)
class Question:
    """A chat, its body without the number of tokens, and the ids that transformers answers."""

    body: bytes
    ids: list[int]


def make_questions(model: Path) -> list[Question]:
    """Ask transformers for greedy answers to chats of none to two pictures."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(model)
    made: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    photos, found = sorted(paths.PHOTOS.glob("*.jpg")), []
    for number in range(12):
        files = [photos[(number + each) % len(photos)] for each in range(number % 3)]
        text, length = f"{TEXTS[number % len(TEXTS)]} ({number})", (24, 60, 160)[number // 4]
        content = [*({"type": "image", "image": Image.open(each)} for each in files), {"type": "text", "text": text}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        with torch.inference_mode():
            out = made.generate(**inputs, do_sample=False, max_new_tokens=length, eos_token_id=None, pad_token_id=0)
        urls = tuple("data:image/jpeg;base64," + base64.b64encode(each.read_bytes()).decode() for each in files)
        body = chat(text, urls, max_tokens=length, ignore_eos=True, return_token_ids=True)
        found.append(Question(body, out[0, inputs["input_ids"].shape[1] :].tolist()))
    return found


@dataclass
class Tally:
    """Results."""

    strikes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by part and kind; those that hit a request
    missed: Counter[str] = field(default_factory=Counter)  # strikes without a request in flight there, by part
    waits: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of struck requests
    answers: int = 0
    tokens: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    heals: list[float] = field(default_factory=list)

    def report(self) -> str:
        rows = [f"{part:12} {kind:8} {count}" for (part, kind), count in sorted(self.strikes.items())]
        rows.append(f"{self.strikes.total()} strikes hit a request in flight; {self.missed.total()} did not")
        rows += [
            f"requests in flight at a {kind}: median wait {sorted(found)[len(found) // 2]:.1f} s, "
            f"longest {max(found):.1f} s, {len(found)} requests"
            for kind, found in sorted(self.waits.items())
        ]
        if self.heals:
            middle = sorted(self.heals)[len(self.heals) // 2]
            rows.append(f"all stages back after {middle:.1f} s, at most {max(self.heals):.1f} s")
        found = f"{self.answers} answers, {self.tokens} tokens compared, {len(self.wrong)} wrong"
        rows.append(f"{found}; ends {dict(self.ends)}")
        return "\n".join([*rows, *self.wrong[:20]])


class Client:
    """Asks without a pause; knows which requests are in flight, and which strike met each."""

    def __init__(self, server: ServeCommand, questions: Sequence[Question], seed: int, tally: Tally) -> None:
        self._server, self._questions, self._draw, self._tally = server, questions, random.Random(seed), tally
        self._flying: dict[int, list[str]] = {}  # struck by, by number of the request
        self.ending = False
        self.tasks = [asyncio.ensure_future(self._ask_on()) for _ in range(AT_ONCE)]
        self._numbers = 0

    def strike(self, kind: str) -> None:
        """Note that whatever is in flight met a strike."""
        for met in self._flying.values():
            met.append(kind)

    async def _ask_on(self) -> None:
        while not self.ending:
            question = self._draw.choice(self._questions)
            self._numbers += 1
            number, met = self._numbers, list[str]()
            self._flying[number] = met
            try:
                answer = await ask(self._server.port, question.body, timeout_s=END_S)
            except (TimeoutError, OSError) as error:
                self._tally.ends[type(error).__name__] += 1
                self._tally.wrong.append(f"no answer within {END_S} s, struck by {met}")
                continue
            finally:
                del self._flying[number]
            self._judge(question, answer, met)
            if answer.status != 200:
                await asyncio.sleep(0.2)

    def _judge(self, question: Question, answer: Answer, met: list[str]) -> None:
        tally = self._tally
        if answer.status != 200:
            code = answer.json()["error"]["code"] if answer.body else "none"
            tally.ends[f"{answer.status} {code}"] += 1
            return
        ids = answer.json()["choices"][0]["token_ids"]
        tally.answers += 1
        tally.tokens += len(ids)
        tally.ends["200"] += 1
        if met:
            tally.waits[met[-1]].append(answer.seconds)
        if ids != question.ids:
            tally.wrong.append(f"WRONG, struck by {met}: {ids} and not {question.ids}")


def parts(server: ServeCommand) -> dict[str, list[Served]]:
    """Sort the server's processes by part: instances by name, their launcher, what preprocesses."""
    found: dict[str, list[Served]] = defaultdict(list)
    for each in server.tree():
        if each.name.startswith("trinity:"):
            found[each.name.removeprefix("trinity:")].append(each)
    return found


def is_hit(part: str, snapshot: dict[str, Any]) -> bool:
    """True if the snapshot has a request there: at that instance, at any (launcher), or in preparation (the rest)."""
    places = [each["at"] for each in snapshot["requests"]]
    if part == LAUNCHER:
        return any(places)
    return (part if any(each["name"] == part for each in snapshot["instances"]) else "") in places


async def strike_once(server: ServeCommand, draw: random.Random, client: Client, tally: Tally) -> None:
    """Wait for a request in a part that is drawn, strike there, and wait until all stages are back."""
    known = parts(server)
    if not known:  # all are being started again
        await asyncio.sleep(0.5)
        return
    part, kind = draw.choice(sorted(known)), draw.choice(KINDS)
    hit = False
    with suppress(TimeoutError):
        async with asyncio.timeout(MEET_S):
            async for snapshot in server.snapshots():
                if hit := is_hit(part, snapshot):
                    break
    victims = parts(server).get(part)
    if not hit or not victims:
        tally.missed[part] += 1
        return
    client.strike(f"{kind} of {part}")
    began, pid = time.monotonic(), draw.choice(victims).pid
    with suppress(ProcessLookupError):
        os.kill(pid, SIGNALS.get(kind, signal.SIGSTOP))
        tally.strikes[part, kind] += 1
    if kind == "stumble":
        await asyncio.sleep(STUMBLE_S)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    await heal(server, pid, kind, tally, began)


async def heal(server: ServeCommand, pid: int, kind: str, tally: Tally, began: float) -> None:
    """Wait until every stage is served; what is frozen still goes on after a while."""
    async with asyncio.timeout(HEAL_S):
        while True:
            await asyncio.sleep(0.3)
            if kind == "freeze" and time.monotonic() - began > FROZEN_S:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            answer = await ask(server.port, path="/ready", timeout_s=60)
            if answer.status == 200 and not answer.json().get("missing_stages"):
                break
    tally.heals.append(time.monotonic() - began)


async def run(asked: argparse.Namespace) -> Tally:
    """Strike until so many strikes have hit a request."""
    model, draw, tally = checkpoint("llava"), random.Random(asked.seed), Tally()
    questions = make_questions(model)
    options = ("--placement", asked.placement, "--hosting", "process", "--dtype", "float32", *asked.serve)
    with ServeCommand(model, *options, log=Path(asked.log)) as server:
        await server.until_ready()
        client = Client(server, questions, asked.seed, tally)
        try:
            while tally.strikes.total() < asked.strikes and not (asked.seconds and time.monotonic() > asked.seconds):
                await strike_once(server, draw, client, tally)
                if tally.strikes.total() % 20 == 0:
                    print(f"{tally.strikes.total()} strikes, {tally.answers} answers", flush=True)
                await asyncio.sleep(draw.random())
        finally:
            client.ending = True
            await asyncio.gather(*client.tasks)
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--strikes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--placement", default="1E1P1D")
    parser.add_argument("--minutes", type=float, default=0.0, help="end after so long in any case")
    parser.add_argument("--log", default=str(Path(tempfile.gettempdir()) / "server_kills.log"), help="the server's log")
    parser.add_argument("serve", nargs="*", help="further arguments of trinity serve, behind --")
    asked = parser.parse_args(argv)
    asked.seconds = asked.minutes and time.monotonic() + 60 * asked.minutes
    tally = asyncio.run(run(asked))
    print(tally.report())
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
