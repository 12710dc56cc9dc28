"""Serve with trinity under a placement: a pipeline in its own process, its instances in further ones."""

from __future__ import annotations

import asyncio
import base64
import json
import socket as sockets
from dataclasses import fields
from typing import Any

from trinity.bench.engines.wire import WireMessage, describe_server
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets
from trinity.instance import Instance, InstanceOptions
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.request import Media, Request, Sampling
from trinity.traces.trace import SLO

REQUEST_LINE_BYTES = 1 << 28  # bytes of the longest line: a request with its images


class ReplyWriter:
    """Collects the tokens of one turn of the event loop and writes them as one line."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._out = writer, list[Any]()

    def add(self, number: int, tokens: list[int], end: str = "") -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append((number, tokens, end))

    def say(self, message: WireMessage) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _flush(self) -> None:
        out, self._out = self._out, []
        self.say({"out": out})


def make_pipeline(settings: WireMessage) -> Pipeline:
    """Make the pipeline: one instance on threads of this process, several in processes of their own, or as asked.

    ``settings["pipeline"]`` has options of ``Pipeline`` and of its instances, and these:

    - ``threads_of`` (none): threads by an instance's roles.
    - ``slo`` (seconds, none): TTFT and TBT under which the token budgets are searched, instead of the engine's tokens.
    - ``policy`` ("alg1"): the scheduler's policy.
    """
    given = dict(settings.get("pipeline", {}))
    slo, policy, threads = given.pop("slo", None), given.pop("policy", "alg1"), given.pop("threads_of", {})
    each = {"prefix_cache": settings["caches"], "image_cache": settings["caches"]}
    each |= {name: given.pop(name) for name in [*given] if name in {option.name for option in fields(InstanceOptions)}}
    named = Placement.parse(settings["placement"]).instances()
    hosting = given.pop("hosting", "process" if len(named) > 1 else "thread")
    return Pipeline(
        settings["checkpoint"],
        [Instance(roles, name, threads=threads.get(roles, settings["threads"]), **each) for name, roles in named],
        hosting=hosting,
        dtype=settings["dtype"],
        slo=SLO(*slo) if slo else None,
        budgets=None if slo else StepBudgets(token_budget=settings["tokens"], image_budget=settings["media"]),
        rules=BatchRules(policy=policy),
        max_waiting=1 << 16,
        **given,
    )


async def serve_request(pipe: Pipeline, message: WireMessage, answers: ReplyWriter) -> None:
    media = [Media("image", base64.b64decode(each)) for each in message["images"]]
    greedy = Sampling.greedy(ignore_eos=True)
    asked = Request(message["text"], media=media, max_tokens=message["tokens"], sampling=greedy)
    try:
        async with pipe.stream(asked) as tokens:
            async for token in tokens:
                answers.add(message["id"], [token.id])
        answers.add(message["id"], [], tokens.output.finish_reason)
    except Exception as error:  # whatever it is: the client waits for an end
        answers.add(message["id"], [], f"error: {type(error).__name__}: {error}")


async def serve_pipeline(socket: int, settings: WireMessage) -> None:
    reader, writer = await asyncio.open_connection(sock=sockets.socket(fileno=socket), limit=REQUEST_LINE_BYTES)
    answers, running = ReplyWriter(writer), set[asyncio.Task[None]]()
    async with make_pipeline(settings) as pipe:
        answers.say(describe_server({"engine": "trinity", "placement": str(pipe.placement)}))
        while line := await reader.readline():
            task = asyncio.create_task(serve_request(pipe, json.loads(line), answers))
            running.add(task)
            task.add_done_callback(running.discard)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    writer.close()


def main(socket: int, settings: WireMessage) -> None:
    import torch

    torch.set_num_threads(settings["threads"])
    asyncio.run(serve_pipeline(socket, settings))
