"""Serves requests through a whole pipeline and keeps what every instance was told, decided and computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from support.arrivals import arrive_together
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity.core.messages import Cancel, Encode, Prefill, Pull, Send, Step, Value, Work
from trinity.pipeline import Pipeline
from trinity.request import Output, Request
from trinity.testing.checkpoints import ARCHITECTURES
from trinity.testing.oracle import Oracle, OracleAnswer

TEXT_ONLY = ("llama", "mistral")
MULTIMODAL = tuple(name for name in ARCHITECTURES if name not in TEXT_ONLY)
WHOLE_MEDIA = ("gemma3",)  # attends to an image in both directions: no chunk and no prefix hit may cut one
METHODS = ("EPD", "EP+D", "ED+P", "E+P+D", "PD+E")
TEXT_METHODS = ("PD", "P+D")
LOGITS_WITHIN = 1e-4
PATIENCE_S, SOON_S = 120.0, 120.0

Waves = Sequence[Sequence[Request]]


def methods_of(architecture: str) -> tuple[str, ...]:
    return TEXT_METHODS if architecture in TEXT_ONLY else METHODS


@cache
def oracle(architecture: str) -> Oracle:
    return Oracle(checkpoint(architecture))


@dataclass(frozen=True)
class Handled:
    """One event that an instance's core was given, and its answer."""

    instance: str
    event: Value
    commands: tuple[Value, ...]


class Recording:
    """Everything that the cores of a pipeline handle, in order for each of them."""

    def __init__(self) -> None:
        self.log: list[Handled] = []

    def attach(self, pipe: Pipeline) -> None:
        for host in pipe.hosts.values():
            host.core.handle = self._recorded(host.name, host.core.handle)  # type: ignore[method-assign]

    def _recorded(self, name: str, handle: Callable[[Value, float], list[Value]]) -> Callable[..., list[Value]]:
        def recorded(event: Value, now: float) -> list[Value]:
            commands = handle(event, now)
            self.log.append(Handled(name, event, tuple(commands)))
            return commands

        return recorded

    def commands(self, kind: type[Any]) -> Iterator[tuple[str, Any]]:
        """(instance, command) of one kind."""
        for handled in self.log:
            yield from ((handled.instance, each) for each in handled.commands if isinstance(each, kind))

    def steps(self) -> list[Step]:
        return [step for _, step in self.commands(Step)]

    def prefills(self) -> list[Prefill]:
        return [row for step in self.steps() for row in step.prefills]

    def encodes(self) -> list[Encode]:
        return [row for step in self.steps() for row in step.encodes]

    def after_cancel(self) -> list[str]:
        """Steps and pulls that include a request although their instance had been told of its cancel.

        Who has passed the cancel on, since the request had moved, may get it back before that comes there (ED+P).
        """
        cancelled: set[tuple[str, str]] = set()
        wrong = []
        for handled in self.log:
            if isinstance(handled.event, Cancel) and not any(map(_passes_on, handled.commands)):
                cancelled.add((handled.instance, handled.event.request))
            for command in handled.commands:
                for request in _requests(command):
                    if (handled.instance, request) in cancelled:
                        wrong.append(f"{handled.instance}: {command}")
        return wrong


def _passes_on(command: Value) -> bool:
    return isinstance(command, Send) and isinstance(command.message, Cancel)


def _requests(command: Value) -> Iterable[str]:
    if isinstance(command, Step):
        encodes, prefills = (row.request for row in command.encodes), (row.request for row in command.prefills)
        return {*encodes, *prefills, *command.decodes}
    return [command.request] if isinstance(command, Pull) else []


@dataclass(repr=False)  # asyncio.run writes its task's result out: a second per thousand rows of logits
class Served:
    """What came out of a pipeline: outputs and processed work by request, logits by (request, output index)."""

    outputs: dict[str, Output] = field(default_factory=dict)
    works: dict[str, Work] = field(default_factory=dict)
    rows: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    record: Recording = field(default_factory=Recording)
    twice: list[tuple[str, int]] = field(default_factory=list)
    evictions: int = 0

    def observe(self, request: str, index: int, logits: Tensor) -> None:
        if (request, index) in self.rows:
            self.twice.append((request, index))
        self.rows[request, index] = logits.clone()

    def logits(self, request: str) -> Tensor:
        return torch.stack([self.rows[request, index] for index in range(len(self.outputs[request].token_ids))])

    def tokens(self, request: str) -> list[int]:
        return self.outputs[request].token_ids

    def transfers(self, request: str, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.outputs[request].transfers if each["kind"] == kind]


def serve(model: Path, placement: Any, waves: Waves, **options: Any) -> Served:
    """Serve ``waves`` on one pipeline in float32: each starts when every request before it decodes.

    The first is all there before an only instance begins, if its reservation is optimistic: how many are preempted
    would hang on the machine's load otherwise. Afterwards no block may be held and nothing remembered.
    """
    return asyncio.run(served(model, placement, waves, **options))


async def served(model: Path, placement: Any, waves: Waves, **options: Any) -> Served:
    found = Served()
    async with asyncio.timeout(PATIENCE_S):
        async with Pipeline(
            model, placement, dtype="float32", observe=found.observe, **pipeline_options(options)
        ) as pipe:
            found.record.attach(pipe)
            if options.get("reservation") == "optimistic" and len(pipe.hosts) == 1:
                arrive_together(pipe, len(waves[0]))
            async with asyncio.TaskGroup() as group:
                for wave in waves:
                    begun = [asyncio.Event() for _ in wave]
                    for request, event in zip(wave, begun, strict=True):
                        group.create_task(_read(pipe, request, event, found))
                    for event in begun:
                        await event.wait()
            await pipe.wait_idle()
            await nothing_held(pipe)
    nothing_left(pipe)
    found.evictions = sum(pool.evictions for host in pipe.hosts.values() for pool in host.core.state.pools.values())
    assert found.twice == [], "a row was computed twice"
    return found


async def _read(pipe: Pipeline, request: Request, begun: asyncio.Event, found: Served) -> None:
    try:
        async with pipe.stream(request) as tokens:
            async for token in tokens:
                if token.index:  # the first one comes before its KV has moved to where it is decoded
                    begun.set()
            assert tokens.processed is not None
            found.works[request.request_id] = tokens.processed.work
            found.outputs[request.request_id] = tokens.output
    finally:
        begun.set()


async def nothing_held(pipe: Pipeline) -> None:
    """Every pool must soon have all its blocks back: the last Release may still be under way."""
    until = asyncio.get_running_loop().time() + SOON_S
    while held := _held(pipe):
        assert asyncio.get_running_loop().time() < until, f"leaked blocks: {held}"
        await asyncio.sleep(0.005)


def _held(pipe: Pipeline) -> dict[str, int]:
    pools = [(host.name, pool) for host in pipe.hosts.values() for pool in host.core.state.pools.values()]
    return {f"{name} {pool.kind}": pool.held for name, pool in pools if pool.held}


def nothing_left(pipe: Pipeline) -> None:
    """Of a closed pipeline no core may hold or remember anything but cached blocks."""
    for host in pipe.hosts.values():
        host.core.check()
        state = host.core.state
        assert host.core.idle()
        kept = (state.requests, state.incoming, state.outgoing, state.tombstones, state.pending)
        assert kept == ({}, {}, {}, {}, {}), f"{host.name} remembers {kept}"
        queues = (state.encode_queue, state.prefill_queue, state.migrated_queue, state.image_offers, state.kv_offers)
        assert not any(queues), f"{host.name} still queues {queues}"
        assert not any((state.encoding, state.prefilling, state.decoding, state.moving))
    assert pipe._frontend.core.entries == {}
    assert pipe._frontend.core.waiting == 0


def case_of(request: str) -> str:
    """The case of which a request is a copy: "one#2" is asked what "one" is."""
    return request.partition("#")[0]


def copy_of(request: Request, number: int, **changes: Any) -> Request:
    return msgspec.structs.replace(request, request_id=f"{case_of(request.request_id)}#{number}", **changes)


def problems(found: Served, answers: dict[str, OracleAnswer]) -> dict[str, str]:
    """Every request whose tokens are not the oracle's, or whose logits are too far from the oracle's."""
    wrong = {}
    for request in found.outputs:
        answer, tokens = answers[case_of(request)], found.tokens(request)
        if tokens != answer.token_ids:
            at = parting(tokens, answer.token_ids)
            wrong[request] = f"tokens differ from output {at} on: {tokens[at:][:8]} != {answer.token_ids[at:][:8]}"
        else:
            error = float((found.logits(request) - answer.logits).abs().max())
            if not error < LOGITS_WITHIN:
                wrong[request] = f"logits differ by {error:.2g}"
    return wrong


def parting(one: Sequence[int], other: Sequence[int]) -> int:
    """The first index at which two sequences differ; where one begins with the other, the shorter's length."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
