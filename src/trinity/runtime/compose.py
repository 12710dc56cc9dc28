"""Composition by hand, without a Pipeline: a stage loaded alone, and an instance on a network of your own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from trinity.core.messages import IMAGE, KV, STATE, Encode, Open, Prefill, Sampled, Step, Work
from trinity.core.routing.router import RoutingPolicy, routing_policy
from trinity.core.transfers import TransferPolicy
from trinity.core.values import blocks_for
from trinity.emulation.model import EmulatedModel
from trinity.errors import ClosedError, ConfigError
from trinity.errors.arguments import Count, check_value, show
from trinity.errors.live_objects import forbid_copies
from trinity.instance import Instance, name_instances
from trinity.memory.block_memory import BlockMemory
from trinity.memory.cache_config import CacheConfig
from trinity.preprocess.processor import ProcessedRequest
from trinity.runtime import loader
from trinity.runtime.cuda_stream import make_lane_stream
from trinity.runtime.host import InstanceHost, LoadedInstance, Network
from trinity.runtime.shielded_wait import wait_shielded
from trinity.stage_kinds import DECODE, ENCODE, LANGUAGE_STAGES, PREFILL
from trinity.stages.base import Stage
from trinity.timeline import Timeline

T = TypeVar("T")
LANE = "joint"
_TOKENS = tuple[Count, ...]
_Blocks = Sequence[int]


@forbid_copies("load it where it is used (load_stage)")
class LoadedStage:
    """Weights, pools and stages of some roles, run by hand, as ``load_stage`` made them.

    - ``roles``: "E", "P", "D" or several.
    - ``pools``: ``BlockMemory`` by kind of block, which ``Connector.move`` reads and writes.
    - ``model``: the loaded weights.

    A request takes blocks (``allocate``), of states too where the model's layers keep some, is opened, prefilled and
    decoded in them, and closed; each call is one step, on the stage's own thread. Raises ``StageError`` where a step
    cannot run. ``async with`` or ``aclose`` ends it.
    """

    def __init__(self, loaded: LoadedInstance) -> None:
        self.roles, self.pools, self.model = loaded.spec.roles, loaded.memory, loaded.model
        self._stages = loaded.stages
        self._opened: dict[str, ComposedRequest] = {}
        self._free = {kind: list(range(memory.blocks)) for kind, memory in loaded.memory.items()}
        self._numbers = count(1)
        self._stream = make_lane_stream(loaded.spec.device, LANE, self.roles)
        self._thread = ThreadPoolExecutor(1, f"trinity-stage-{self.roles}", self._stream.__enter__)
        self._closed = False

    async def __aenter__(self) -> LoadedStage:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def allocate(self, kind: str, rows: int) -> tuple[int, ...]:
        """Take blocks for ``rows`` rows: tokens of KV, feature rows of an image, states. Raises ``ConfigError``."""
        pool, rows = self._pool(kind), check_value("rows", rows, Count)
        free, needed = self._free[kind], blocks_for(rows, pool.shape.rows)
        if needed > len(free):
            text = f"{rows} rows need {needed} {kind} blocks, and {len(free)} of {pool.blocks} are free"
            raise ConfigError(f"{text}: free some, or enlarge the pool")
        taken, self._free[kind] = free[:needed], free[needed:]
        return tuple(taken)

    def free(self, kind: str, blocks: Sequence[int]) -> None:
        """Give back blocks that ``allocate`` returned.

        Raises ``ConfigError`` for others, for those given back, and for those that an open request still needs.
        """
        given = self._find_blocks(kind, blocks)
        if len(set(given)) < len(given) or set(given) & set(self._free[kind]):
            raise ConfigError(f"not all of the {kind} blocks {given} are taken: free each once")
        self._check_unused(kind, given)
        self._free[kind] = sorted([*self._free[kind], *given])

    async def encode(self, prompt: ProcessedRequest, blocks: Sequence[Sequence[int]]) -> None:
        """Encode the images of a prompt, each into its ``blocks`` of the image pool.

        Raises ``ConfigError`` for blocks that are not taken, too few, named twice, or of an open request.
        """
        self._of(ENCODE.letter)
        prompt = check_value("prompt", prompt, ProcessedRequest)
        features = self._check_features(prompt.work, check_value("blocks", blocks, Sequence[_Blocks]))
        written = [block for each in features for block in each]
        _check_once(IMAGE, written)
        self._check_unused(IMAGE, written)
        items = enumerate(zip(prompt.work.media, features, prompt.inputs, strict=True))
        encodes = tuple(
            Encode(prompt.work.request, item, span, places, inputs) for item, (span, places, inputs) in items
        )
        await self._step(ENCODE.letter, encodes=encodes)

    async def open(
        self,
        work: Work,
        blocks: Sequence[int],
        *,
        images: Sequence[Sequence[int]] = (),
        tokens: Sequence[int] = (),
        state: Sequence[int] = (),
    ) -> None:
        """Open a request: its KV blocks, the image blocks of a prompt to prefill, or its outputs after that.

        ``state``: the block of its states, of a model whose layers keep some: ``allocate("state", 1)``.

        Raises ``ConfigError`` for one that is open, for blocks that are not taken, of another open request or do not
        hold its prompt or images, for no block of states where it needs one, and for tokens that the model does not
        have.
        """
        stages, work, tokens = (
            self._of(LANGUAGE_STAGES),
            check_value("work", work, Work),
            check_value("tokens", tokens, _TOKENS),
        )
        if work.request in self._opened:
            raise ConfigError(f"request {work.request} is open already: close it first")
        self._check_tokens(work, tokens)
        taken, images = self._check_blocks(KV, blocks), check_value("images", images, Sequence[_Blocks])
        self._check_unused(KV, taken)
        features = self._check_features(work, images) if images else ()
        held = self._check_state(work, check_value("state", state, Sequence[int]))
        opened = Open(work=work, blocks=taken, images=features, tokens=tuple(tokens), state=held)
        rows = len(taken) * self._pool(KV).shape.rows
        if rows < len(work.prompt):
            raise ConfigError(f"{len(taken)} KV blocks hold {rows} tokens, and the prompt has {len(work.prompt)}")
        filled = len(work.prompt) if tokens else 0
        self._opened[work.request] = ComposedRequest(work, taken, features, rows, filled, len(tokens), held)
        try:
            for stage in stages:
                await self._call(partial(stage.open, opened))
        except BaseException:  # a cancellation too: some stages may have opened it
            with suppress(ClosedError):
                await self.close(work.request)
            raise

    async def prefill(self, work: Work, start: int = 0, end: int | None = None) -> int | None:
        """Prefill positions [``start``, ``end``) of an open request; return its first token at the prompt's end.

        Raises ``ConfigError`` for a request that is not open, is open with other work or has a token, for positions
        outside of the prompt, and for those behind some that are not prefilled.
        """
        self._of(PREFILL.letter)
        work, start, end = (
            check_value("work", work, Work),
            check_value("start", start, Count),
            check_value("end", end, Count | None),
        )
        opened, stop = self._find(work.request), len(work.prompt) if end is None else end
        if not start < stop <= len(work.prompt):
            raise ConfigError(f"positions {start} to {stop} are none of a prompt of {len(work.prompt)} tokens")
        opened.check_prefill(work, start)
        last = stop == len(work.prompt)
        sampled = await self._step(PREFILL.letter, prefills=(Prefill(work.request, start, stop - start, last),))
        opened.filled = max(opened.filled, stop)
        if not last:
            return None
        opened.outputs = 1
        return sampled[work.request].token

    async def decode(self, *requests: str) -> list[int]:
        """Decode the next token of each of these open requests, in one step.

        Raises ``ConfigError`` for a request that is not open or named twice, has no token yet or its ``max_tokens``,
        or fills its KV blocks.
        """
        self._of(DECODE.letter)
        requests = check_value("requests", requests, tuple[str, ...])
        if len(set(requests)) < len(requests):
            raise ConfigError(f"requests {', '.join(requests)}: name each once, since a step decodes one token of it")
        opened = list(map(self._find_decoding, requests))
        for each in opened:
            each.outputs += 1
        try:
            sampled = await self._step(DECODE.letter, decodes=requests)
        except Exception:  # but not a cancellation, behind which the step runs to its end
            for each in opened:
                each.outputs -= 1
            raise
        return [sampled[request].token for request in requests]

    async def close(self, request: str) -> None:
        """Drop the state of an open request; its blocks stay taken until they are freed."""
        self._opened.pop(check_value("request", request, str), None)
        for stage in self._of(LANGUAGE_STAGES):
            await self._call(partial(stage.close, request))

    async def aclose(self) -> None:
        """End the stage's thread. May be called twice."""
        self._closed = True
        await asyncio.to_thread(self._thread.shutdown)
        for memory in self.pools.values():
            memory.close()

    def _check_blocks(self, kind: str, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return blocks that are taken. Raises ``ConfigError`` for others, and for those that are named twice."""
        numbers = self._find_blocks(kind, blocks)
        _check_once(kind, numbers)
        if set(numbers) & set(self._free[kind]):
            raise ConfigError(f"not all of the {kind} blocks {numbers} are taken: allocate them first")
        return numbers

    def _check_state(self, work: Work, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return the block of a request's states. Raises ``ConfigError`` unless the model needs just what is given."""
        needed = 1 if STATE in self.pools else 0
        if len(blocks) != needed:
            keeps = 'keeps states: open it with state=stage.allocate("state", 1)' if needed else "keeps no states"
            raise ConfigError(f"request {work.request} has {len(blocks)} blocks of states, and the model {keeps}")
        if not needed:
            return ()
        held = self._check_blocks(STATE, blocks)
        self._check_unused(STATE, held)
        return held

    def _check_unused(self, kind: str, blocks: Sequence[int]) -> None:
        """Raise ``ConfigError`` if an open request may still read one of ``blocks``."""
        for request, opened in self._opened.items():
            if not opened.uses(kind).isdisjoint(blocks):
                raise ConfigError(
                    f"the {kind} blocks {tuple(blocks)} are in part those of request {request}, which is open: close it"
                )

    def _check_features(self, work: Work, blocks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of each image. Raises ``ConfigError`` if they do not hold its features."""
        if len(blocks) != len(work.media):
            raise ConfigError(f"the prompt has {len(work.media)} images: give blocks for each, not for {len(blocks)}")
        features = tuple(self._check_blocks(IMAGE, each) for each in blocks)
        for span, places in zip(work.media, features, strict=True):
            rows = len(places) * self._pool(IMAGE).shape.rows
            if rows < span.tokens:
                raise ConfigError(f"{len(places)} image blocks hold {rows} rows, and the image has {span.tokens}")
        return features

    def _check_tokens(self, work: Work, tokens: Sequence[int]) -> None:
        """Raise ``ConfigError`` for token ids that the model does not have: a GPU's context would end at one."""
        if isinstance(self.model, EmulatedModel):
            return
        most, beyond = self.model.vocabulary, self.model.media_token_ids
        wrong = [each for each in (*work.prompt, *tokens) if type(each) is not int or not 0 <= each < most]
        if not beyond.issuperset(wrong):
            raise ConfigError(f"a token is a whole number below {most}, got {show(wrong)}")

    def _find_blocks(self, kind: str, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return block numbers of a pool. Raises ``ConfigError`` for those that it does not have."""
        numbers, most = tuple(check_value("blocks", blocks, Sequence[int])), self._pool(kind).blocks
        if not all(0 <= number < most for number in numbers):
            raise ConfigError(f"the {kind} blocks {numbers} are not all in a pool of {most}")
        return numbers

    def _find(self, request: str) -> ComposedRequest:
        if request not in self._opened:
            raise ConfigError(f"request {request} is not open here: open it first")
        return self._opened[request]

    def _find_decoding(self, request: str) -> ComposedRequest:
        """Find a request whose next token can be decoded. Raises ``ConfigError``."""
        found = self._find(request)
        rows = len(found.work.prompt) + found.outputs
        if not found.outputs:
            raise ConfigError(f"request {request} has no token yet: prefill it, or open it with tokens=")
        if found.outputs >= found.work.max_tokens:
            raise ConfigError(f"request {request} has its max_tokens, {found.work.max_tokens}: close it")
        if rows > found.rows:
            raise ConfigError(f"the KV blocks of request {request} hold {found.rows} tokens, and it has {rows}")
        return found

    def _pool(self, kind: str) -> BlockMemory:
        if self._closed:
            raise ClosedError("this stage is closed; load it again")
        if kind not in self.pools:
            raise ConfigError(f"a stage of {self.roles} has no {kind} blocks; it has {', '.join(self.pools)}")
        return self.pools[kind]

    def _of(self, letters: str) -> list[Stage]:
        if self._closed:
            raise ClosedError("this stage is closed; load it again")
        found = [stage for stage in self._stages if set(letters) & set(stage.letters)]
        if not found:
            raise ConfigError(f"this stage serves {self.roles}: load_stage(model, {letters[0]!r}) serves {letters[0]}")
        return found

    async def _step(self, letter: str, **rows: Any) -> dict[str, Sampled]:
        (stage,) = self._of(letter)
        step = Step(next(self._numbers), LANE, **rows)
        return await self._call(partial(stage.forward, step))

    async def _call(self, call: Callable[[], T]) -> T:
        """Run on the stage's thread, to the end even if the caller is cancelled: memory must not be freed under it."""
        if self._closed:
            raise ClosedError("this stage is closed; load it again")
        return await wait_shielded(asyncio.wrap_future(self._thread.submit(self._stream.run, call)))


async def load_stage(
    model: str | Path | EmulatedModel,
    roles: str | Instance,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    cache: CacheConfig | None = None,
) -> LoadedStage:
    """Load the weights of some roles, allocate their pools, and make their stages.

    - ``model``: a checkpoint's directory, or an ``EmulatedModel``.
    - ``roles``: "E", "P", "D", "PD", ..., or an ``Instance`` with pools or stages of its own.
    - ``dtype`` ("auto"), ``device`` ("cpu"): of weights and pools.
    - ``cache`` (None): ``CacheConfig``, sizes of blocks and pools.

    Raises ``ConfigError``.
    """
    return LoadedStage(await _load(model, roles, dtype, device, cache))


async def start_instance(
    model: str | Path | EmulatedModel,
    instance: str | Instance,
    network: Network,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    cache: CacheConfig | None = None,
    transfers: TransferPolicy | None = None,
    routing: str | RoutingPolicy = "round_robin",
) -> InstanceHost:
    """Load an instance and start it on ``network``, which carries its messages; the caller stops and joins it.

    Its pools are bound to ``network.connector``. Peers hear of it by ``announcement()``, which the caller posts to
    them, and theirs to it. Requests come as ``Submit``; what is for a front end goes to ``network.send_to_frontend``.

    - ``instance``: roles such as "PD", or an ``Instance`` with settings.
    - ``transfers`` (None): ``TransferPolicy``, when blocks start to move.
    - ``routing`` ("round_robin"): chooses the instance for a request's next stage.

    The others are those of ``load_stage``. Raises ``ConfigError``.
    """
    network, policy = check_value("network", network, Network), routing_policy(routing)
    spec = _name_alone(instance)
    network.connector.check_unbound(spec.name)  # before weights are read
    loaded = await _load(model, spec, dtype, device, cache, transfers)
    host, memories = None, dict(loaded.memory)
    try:
        host = InstanceHost(loaded, network, Timeline(), policy)
        network.connector.bind(host.name, loaded.memory)
        host.post(host.announcement())
        host.start()
    except BaseException:
        if host is not None:
            host.stop(at_once=True)
            await host.join()
        network.connector.unbind(memories)
        for memory in memories.values():
            memory.close()
        raise
    return host


def _name_alone(roles: str | Instance) -> Instance:
    """Make an instance of its own, with a name. Raises ``ConfigError``."""
    roles = check_value("roles", roles, str | Instance)
    (spec,) = name_instances([Instance(roles) if isinstance(roles, str) else roles])
    if spec.image_budget is not None or spec.address is not None:
        raise ConfigError("image_budget= and address= are for instances of a Pipeline: leave them out here")
    return spec


def _check_once(kind: str, blocks: Sequence[int]) -> None:
    if len(set(blocks)) < len(blocks):
        raise ConfigError(f"{kind} blocks {tuple(blocks)}: name each once, since one holds one thing")


async def _load(
    model: str | Path | EmulatedModel,
    roles: str | Instance,
    dtype: str,
    device: str,
    cache: CacheConfig | None,
    transfers: TransferPolicy | None = None,
) -> LoadedInstance:
    model, spec = check_value("model", model, str | Path | EmulatedModel), _name_alone(roles)
    cache = check_value("cache", cache, CacheConfig | None)
    transfers = check_value("transfers", transfers, TransferPolicy | None)
    dtype, device = check_value("dtype", dtype, str), check_value("device", device, str)
    config = loader.ServingConfig(loader.resolve_model(model), shared=True, dtype=dtype, device=device)
    config = replace(config, cache=cache or CacheConfig(), transfers=transfers or TransferPolicy())
    (loaded,) = await asyncio.to_thread(loader.load_instances, config, [spec], None)
    return loaded


@dataclass
class ComposedRequest:
    """An open request: its work and blocks, the rows that these hold and that are filled, and its tokens so far.

    ``state``: the block of its states, where the model keeps some.
    """

    work: Work
    blocks: tuple[int, ...]
    images: tuple[tuple[int, ...], ...]
    rows: int
    filled: int
    outputs: int
    state: tuple[int, ...] = ()

    def uses(self, kind: str) -> set[int]:
        """List the blocks that a step of it may still read; features are in the KV blocks once all is prefilled."""
        if kind == KV:
            return set(self.blocks)
        if kind == STATE:
            return set(self.state)
        return set() if self.filled == len(self.work.prompt) else {block for each in self.images for block in each}

    def check_prefill(self, work: Work, start: int) -> None:
        """Raise ``ConfigError`` if ``work`` cannot be prefilled from ``start``: it goes on where the last ended."""
        name = f"request {work.request}"
        if work != self.work:
            raise ConfigError(f"{name} is open with other work: close it, and open it with this")
        if self.outputs:
            raise ConfigError(f"{name} has its first token: decode it, or close it and open it again")
        if start > self.filled:
            raise ConfigError(f"the KV blocks of {name} are filled up to {self.filled}: prefill it from there")
        if self.state and start not in (0, self.filled):
            raise ConfigError(
                f"the states of {name} are those of {self.filled} tokens: prefill it from there, or from 0"
            )
        if len(self.images) < len(work.media):
            raise ConfigError(f"{name} is open without its images: open it with images=")
