"""trinity itself, under a placement: a pipeline in a process of its own, its instances in further ones."""

from __future__ import annotations

import asyncio
import base64
import json
import socket as sockets
from typing import Any

from trinity.bench.engines.wire import Message, about
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets
from trinity.deploy import InstanceOptions
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.request import Media, Request, Sampling
from trinity.traces.trace import SLO

LINE = 1 << 28  # bytes of the longest line: a request's pictures


class Answers:
    """Tokens of one turn of the loop leave as one line."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._out = writer, list[Any]()

    def add(self, number: int, tokens: list[int], end: str = "") -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append((number, tokens, end))

    def say(self, message: Message) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _flush(self) -> None:
        out, self._out = self._out, []
        self.say({"out": out})


def pipeline(settings: Message) -> Pipeline:
    """One instance on threads of this process, several in processes of their own.

    Options: those of ``Pipeline`` and of its instances; ``threads_of``, threads by roles; ``slo``, TTFT and TBT in
    seconds: budgets are searched under it, and the engine's tokens are left out; ``policy`` of the scheduler.
    """
    given = dict(settings.get("pipeline", {}))
    slo, policy, threads = given.pop("slo", None), given.pop("policy", "alg1"), given.pop("threads_of", {})
    each = {"prefix_cache": settings["caches"], "image_cache": settings["caches"]}
    each |= {name: given.pop(name) for name in [*given] if name in InstanceOptions.__annotations__}
    named = Placement.parse(settings["placement"]).instances()
    return Pipeline(
        settings["checkpoint"],
        [Instance(roles, name, threads=threads.get(roles, settings["threads"]), **each) for name, roles in named],
        hosting="process" if len(named) > 1 else "thread",
        dtype=settings["dtype"],
        slo=SLO(*slo) if slo else None,
        budgets=None if slo else StepBudgets(token_budget=settings["tokens"], image_budget=settings["media"]),
        rules=BatchRules(policy=policy),
        max_waiting=1 << 16,
        **given,
    )


async def one(pipe: Pipeline, message: Message, answers: Answers) -> None:
    media = [Media("image", base64.b64decode(each)) for each in message["images"]]
    asked = Request(message["text"], media=media, max_tokens=message["tokens"], sampling=Sampling(ignore_eos=True))
    try:
        async with pipe.stream(asked) as tokens:
            async for token in tokens:
                answers.add(message["id"], [token.id])
        answers.add(message["id"], [], tokens.output.finish_reason)
    except Exception as error:  # of any sort: the client waits for an end
        answers.add(message["id"], [], f"error: {type(error).__name__}: {error}")


async def served(socket: int, settings: Message) -> None:
    reader, writer = await asyncio.open_connection(sock=sockets.socket(fileno=socket), limit=LINE)
    answers, running = Answers(writer), set[asyncio.Task[None]]()
    async with pipeline(settings) as pipe:
        answers.say(about({"engine": "trinity", "placement": str(pipe.placement)}))
        while line := await reader.readline():
            task = asyncio.create_task(one(pipe, json.loads(line), answers))
            running.add(task)
            task.add_done_callback(running.discard)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    writer.close()


def main(socket: int, settings: Message) -> None:
    import torch

    torch.set_num_threads(settings["threads"])
    asyncio.run(served(socket, settings))
