"""Rows that recorded steps move on by themselves: requests join, leave, grow, fail and come back at any step.

The model's logits are a function of what the device says of a row: input token, position, block and offset. The oracle
knows each request's text and blocks, and samples its rows alone, on the host.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.operator_tape import StaticTorch, graphs
from support.sampler_rows import SamplerRow, batch
from trinity.core.messages import KV, Grow, Open, Prefill, ResolvedSampling, Sampled, Step, Work
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.stages import block_tables, sampler
from trinity.stages.async_steps import LaunchedStep
from trinity.stages.base import PendingStep
from trinity.stages.batch import RaggedBatch
from trinity.stages.block_tables import upload
from trinity.stages.gpu import decode_graphs, decode_state
from trinity.stages.gpu.decode_graphs import DecodeGraphs
from trinity.stages.gpu.decode_state import DecodeState
from trinity.stages.language import LanguageStage
from trinity.stages.models import RotaryPositions
from trinity.stages.token_bans import make_bans

ROWS, BLOCKS, VOCABULARY = 4, 400, 40
NOISE = torch.randn((997, VOCABULARY), generator=torch.Generator().manual_seed(1)) * 3
WAYS: list[dict[str, Any]] = [
    {},
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_k": 7, "top_p": 0.8, "logprobs": 1},
    {"temperature": 1.3, "seed": 5, "min_p": 0.05, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.4, "logprobs": 3},
    {"no_repeat_ngram_size": 2, "suppress_tokens": (3, 4)},
]


def logits_of(ids: Tensor, places: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
    return NOISE[(ids * 13 + places * 101 + blocks * 7 + offsets * 3) % len(NOISE)]


class Model:
    """A model of one layer whose logits say what it was given."""

    media_token_ids: ClassVar[frozenset[int]] = frozenset()
    language, counts_rows = None, False

    class adapter:
        axes, whole_media = 1, False

        class text_config:
            vocab_size, max_position_embeddings = VOCABULARY, 400

        @staticmethod
        def positions(*_: Any) -> RotaryPositions:
            return RotaryPositions(None, 0)

    @staticmethod
    def forward(given: RaggedBatch, kv: Tensor, image: Tensor | None, backend: Any, states: Any = None) -> Tensor:
        found = logits_of(given.ids, given.position_ids[0], given.rows.blocks, given.rows.offsets)
        return found if given.last is None else found[given.last]


@dataclass
class Text:
    """What the oracle knows of a request."""

    work: Work
    blocks: list[int]
    ids: list[int]
    promised: int = 0  # tokens that launched steps will say

    def next(self) -> Sampled:
        place = len(self.ids) - 1
        numbers = (self.ids[-1], place, self.blocks[place // ROWS], place % ROWS)
        logits = logits_of(*(torch.tensor([each]) for each in numbers))
        index = len(self.ids) - len(self.work.prompt)
        row = SamplerRow(self.work.sampling, index, np.array(self.ids), make_bans(self.work))
        return sampler.sample(logits, batch([row]))[0]


@dataclass
class Served:
    """One stage as on a GPU, whose recordings are tapes."""

    depth: int
    blocks: int = BLOCKS
    texts: dict[str, Text] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)
    flight: deque[tuple[Step, PendingStep]] = field(default_factory=deque)
    opened: int = 0
    used: int = 0

    def __post_init__(self) -> None:
        memory = BlockMemory(BlockShape(KV, (1, 2, 1, ROWS, 2), torch.float32), self.blocks)
        self.stage = LanguageStage(cast(Any, Model()), memory, None, "PD", backend=StaticTorch())
        made, self.recorder = graphs()
        self.stage._graphs = DecodeGraphs(cast(Any, Model()), memory.tensor, StaticTorch(), made, self.stage._tokens)

    def take(self, count: int) -> tuple[int, ...]:
        self.used += count
        return tuple(range(self.used - count, self.used))

    def open(self, way: int, tokens: Sequence[int] = (), prompt: tuple[int, ...] = ()) -> None:
        name = f"r{self.opened}"
        self.opened += 1
        prompt = prompt or tuple(np.random.default_rng(self.opened).integers(5, 30, 2 + self.opened % 5).tolist())
        work = Work(request=name, prompt=prompt, max_tokens=60, sampling=ResolvedSampling(**WAYS[way]))
        whole = len(prompt) + len(tokens)
        blocks = self.take(-(-whole // ROWS) + way % 2)
        self.stage.open(Open(work=work, blocks=blocks, tokens=tuple(tokens), again=bool(tokens)))
        self.texts[name] = Text(work, list(blocks), [*prompt, *tokens])
        decodes = tuple(self.running) if way % 2 else ()
        cut = 1 if way % 3 else 0  # in two chunks, and a step between them
        if cut:
            self.grow(decodes)
            self.launch(Step(0, "joint", prefills=(Prefill(name, 0, cut, False),), decodes=decodes))
            self.step(self.running)
        self.grow(decodes)
        self.running.append(name)
        self.launch(Step(0, "joint", prefills=(Prefill(name, cut, whole - cut, True),), decodes=decodes))

    def grow(self, names: Sequence[str], more: int = 0) -> None:
        """Blocks for the next token of each, ``more`` for the last."""
        grown = {}
        for name in names:
            text = self.texts[name]
            lacking = (
                -(-(len(text.ids) + text.promised) // ROWS) - len(text.blocks) + (more if name == names[-1] else 0)
            )
            if lacking > 0:
                grown[name] = self.take(lacking)
                text.blocks += grown[name]
        if grown:
            self.stage.grow(Grow(grown))

    def step(self, names: Sequence[str], more: int = 0) -> None:
        if names:
            self.grow(names, more)
            self.launch(Step(0, "joint", decodes=tuple(names)))

    def launch(self, step: Step) -> None:
        for name in (*step.decodes, *(each.request for each in step.prefills if each.last)):
            self.texts[name].promised += 1
        while len(self.flight) >= self.depth:
            self.read()
        self.flight.append((step, self.stage.launch_on_device(step)))

    def read(self) -> None:
        if self.flight:
            step, pending = self.flight.popleft()
            self.check(step, pending.wait())

    def check(self, step: Step, found: dict[str, Sampled]) -> None:
        names = [*step.decodes, *(each.request for each in step.prefills if each.last)]
        assert found.keys() == set(names)
        for name in names:
            text, wanted = self.texts[name], self.texts[name].next()
            assert found[name].token == wanted.token, name
            if wanted.logprob is not None:
                assert found[name].logprob == pytest.approx(wanted.logprob, abs=1e-5)
                assert [token for token, _ in found[name].top or ()] == [token for token, _ in wanted.top or ()]
            text.ids.append(wanted.token)
            text.promised -= 1

    def fail(self, at_once: bool) -> None:
        """All steps in flight are dropped, and launched again or, as by a lane after a failure, run one by one."""
        steps = [step for step, _ in self.flight]
        while self.flight:
            self.flight.pop()[1].drop()
        for step in steps:
            if at_once:
                self.check(step, self.stage.forward(step))
            else:
                self.flight.append((step, self.stage.launch_on_device(step)))

    def end(self, number: int, again: bool) -> None:
        """One leaves, for good or preempted: its steps have been read."""
        if not self.running:
            return
        while self.flight:
            self.read()
        name = self.running.pop(number % len(self.running))
        text = self.texts.pop(name)
        self.stage.close(name)
        if again:
            way = next(n for n, each in enumerate(WAYS) if ResolvedSampling(**each) == text.work.sampling)
            self.open(way, text.ids[len(text.work.prompt) :], text.work.prompt)


OPS = st.lists(
    st.tuples(
        st.sampled_from(["open", "step", "steps", "steps", "part", "grow", "read", "fail", "end", "again"]),
        st.integers(0, 20),
    ),
    min_size=4,
    max_size=25,
)


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=25)
@given(ops=OPS)
def test_tokens_are_those_of_each_request_alone(depth: int, ops: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_graphs, "BATCH_SIZES", (2, 6))
        served = Served(depth)
        served.open(ops[0][1] % len(WAYS))
        for op, number in ops:
            if op == "open" and len(served.running) < 7:
                served.open(number % len(WAYS))
            elif op in ("step", "steps"):
                for _ in range(1 if op == "step" else 1 + number % 9):
                    served.step(served.running)
            elif op == "part":
                served.step(served.running[number % 3 :])
            elif op == "grow":
                served.step(served.running, number % 3)
            elif op == "read":
                served.read()
            elif op == "fail":
                served.fail(at_once=number % 2 == 0)
            elif op in ("end", "again"):
                served.end(number, op == "again")
        while served.flight:
            served.read()
        table = served.stage._requests
        assert (table.steps_in_flight, table.in_flight.max(), table.suspects) == (0, 0, set())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ahead", [0, 2, 12])
def test_rows_grow_together_or_hold_more_than_the_device_has(depth: int, ahead: int) -> None:
    """Each block is at its own row; and blocks held beyond those on the device are written before they are needed."""
    served = Served(depth)
    for first in (5, 6, 7):
        served.open(0, prompt=(first, 9, 8, 7))
    for number in range(50):
        for name in served.running if number % 9 == 2 else ():
            served.grow([name], ahead)
        served.step(served.running)
    while served.flight:
        served.read()


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", range(4))
def test_a_step_of_the_same_rows_costs_one_copy(way: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the replay: no upload, no operator but the copy of the tokens to the host, no memory for them."""
    served = Served(2)
    for _ in range(3):
        served.open(way)
    for name in served.running:
        served.grow([name], 9)
    for _ in range(13):
        served.step(served.running)
    while served.flight:
        served.read()
    uploads, replays = list[Any](), list[Any]()
    monkeypatch.setattr(DecodeState, "write", lambda *given: uploads.append(given))
    for call in served.stage._graphs.graphs._calls.values():  # type: ignore[union-attr]
        monkeypatch.setattr(call, "replay", lambda: replays.append(None))
    with _Count() as count:
        for _ in range(2):
            pending = served.stage.launch_on_device(Step(0, "joint", decodes=tuple(served.running)))
            assert isinstance(pending, LaunchedStep)
    assert (len(replays), uploads) == (2 * (1 if way < 2 else 2), [])
    assert count.found == {"copy_": 2}


def _note(sent: list[int], values: np.ndarray, *rest: Any) -> Tensor:
    sent.append(values.nbytes)
    return upload(values, *rest)


def test_a_change_sends_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 rows, one of 8,192 blocks: bytes that are sent as rows grow, as one joins, and as one leaves."""
    monkeypatch.setattr(Model.adapter.text_config, "max_position_embeddings", 1 << 16)
    monkeypatch.setattr(decode_graphs, "BATCH_SIZES", (256,))
    served, sent = Served(1, 10_000), list[int]()
    served.open(0, prompt=tuple(np.random.default_rng(0).integers(5, 30, 8192 * ROWS - 2).tolist()))
    for _ in range(254):
        served.open(0)
    served.step(served.running)
    for module in (decode_state, block_tables):
        monkeypatch.setattr(module, "upload", partial(_note, sent))
    for _ in range(6):
        used = served.used
        sent.clear()
        served.step(served.running)
        assert 0 < sum(sent) <= (8 + 4 + 2 * 4) * (served.used - used), "a row, its start, a block and its place"
    served.open(0)
    for _ in range(2):
        sent.clear()
        served.step(served.running)
        assert sum(sent) <= 256 * (7 * 8 + 4) + 8 * 256, "ids, columns and starts of all; blocks of the one, and growth"
        served.end(7, again=False)
    while served.flight:
        served.read()
