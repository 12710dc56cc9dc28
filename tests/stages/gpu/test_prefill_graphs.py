"""Steps with prefill chunks as CUDA graphs, over a tape of operators and over a stand-in for the device (no GPU)."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoint_files import checkpoint
from support.cuda_stand_in import DEVICE, CudaStandIn, cuda_stand_in, move_to_device
from support.language_stage import PROMPT, Solo, work
from support.operator_tape import StaticTorch, TapeRecorder, every_operator_is_torchs, graphs
from support.stage_driver import Driver, generated, processed
from support.static_chunks import StaticChunks
from trinity.core.messages import Prefill, Step, Work
from trinity.memory.block_memory import BlockMemory
from trinity.stages.async_steps import DeviceTokens
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.base import PendingStep
from trinity.stages.batch import NO_DECODES, Chunk, Decodes
from trinity.stages.gpu import prefill_graphs
from trinity.stages.gpu.cuda_graphs import GraphCache, make_graph_cache
from trinity.stages.gpu.decode_graphs import DecodeGraphs
from trinity.stages.gpu.prefill_graphs import PrefillGraphs, StepSize, pack_step
from trinity.stages.language import LanguageStage
from trinity.stages.models import LoadedModel, load_model
from trinity.stages.request_table import OpenStates
from trinity.testing.checkpoints import ARCHITECTURES

__all__ = ["cuda_stand_in"]
pytestmark = pytest.mark.usefixtures(every_operator_is_torchs.__name__)


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_graphs, "DECODE_COUNTS", (0, 4))
    monkeypatch.setattr(prefill_graphs, "CHUNK_ROW_COUNTS", (8, 24))
    monkeypatch.setattr(prefill_graphs, "MOST_TABLE_BYTES", 8 * 9 * 16)  # wider ones take the tape long


def record_prefill(stage: LanguageStage, memory: int = 1000) -> TapeRecorder:
    """Have a stage record its steps with chunks on a tape."""
    stage._backend = StaticChunks()
    made, recorder = graphs(memory=memory)
    image = None if stage.image is None else stage.image.tensor
    own = PrefillGraphs(stage.model, stage.kv.tensor, stage._backend, made, stage._tokens, image, stage.letters)
    stage._prefill_graphs = own
    return recorder


def sizes_of(stage: LanguageStage) -> tuple[StepSize, ...]:
    assert stage._prefill_graphs is not None
    return stage._prefill_graphs.sizes


def decodes_of(*lengths: int) -> Decodes:
    held = np.array(sorted(lengths))
    tables = np.arange(len(held) * 3).reshape(len(held), 3)
    return Decodes(held % 7 + 5, held - 1, held, tables[:, : -(-int(held[-1]) // 16)])


def chunk_of(start: int, length: int, first_block: int, axes: int, **how: Any) -> Chunk:
    at = np.arange(start, start + length)
    table = np.arange(first_block, first_block + 4)
    return Chunk(at % 11 + 5, at if axes == 1 else np.stack((at, at // 2, at // 3)), start, table, **how)


def steps_of(axes: int, images: int) -> list[tuple[Decodes, list[Chunk]]]:
    """Chunks at borders of blocks and beyond, with and without logits, with features, alone and beside decodes."""
    features: dict[str, Any] = (
        {"feature_rows": np.array([3, 4, 0]), "feature_at": np.array([1, 2, 5])} if images else {}
    )
    return [
        (NO_DECODES, [chunk_of(0, 8, 20, axes)]),
        (NO_DECODES, [chunk_of(15, 2, 20, axes, needs_logits=False), chunk_of(3, 13, 24, axes, **features)]),
        (decodes_of(3), [chunk_of(16, 24, 20, axes, **features)]),
        (decodes_of(5, 17, 33), [chunk_of(0, 1, 20, axes), chunk_of(30, 5, 24, axes, needs_logits=False)]),
        (decodes_of(1, 16, 31, 32), [chunk_of(at, 6, 20 + 4 * at, axes) for at in range(4)]),
        (decodes_of(2, 9), [chunk_of(7, 9, 20, axes, needs_logits=False)]),
    ]


@pytest.fixture
def models(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LoadedModel, LoadedModel]:
    """One model as it is, and the same with weights of its own on the stand-in; loaded before that is there."""
    name = request.param
    own = shutil.copytree(checkpoint(name), tmp_path / name)
    plain, moved = (load_model(place, "PD", dtype="float32") for place in (checkpoint(name), own))
    move_to_device(moved.language)
    return plain, moved


def pick(*names: str) -> list[Any]:
    """All architectures; those that are not named are slow."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES]


@pytest.mark.parametrize("models", pick("qwen2_vl"), indirect=True)
def test_every_step_is_recorded(models: tuple[LoadedModel, LoadedModel], cuda_stand_in: CudaStandIn) -> None:
    """After the warm-up nothing is recorded, no step reads the device, and all logits are those of eager steps."""
    plain, moved = models
    noise, shape = torch.Generator().manual_seed(0), plain.image_shape(5)
    image = None if shape is None else BlockMemory(shape, 3)
    kv = BlockMemory(plain.kv_shape(), 40)
    for each in (kv, *([image] if image else ())):
        each.tensor.copy_(torch.randn(each.tensor.shape, generator=noise))
    eager = LanguageStage(plain, kv, image, backend=TorchAttention())
    made = make_graph_cache(DEVICE)
    assert made is not None
    with torch.inference_mode():
        there, features = kv.tensor.to(DEVICE), None if image is None else image.tensor.to(DEVICE)
        model = replace(moved, device=DEVICE)
        recorded = PrefillGraphs(model, there, StaticChunks(), made, DeviceTokens(DEVICE), features)
    recorded.warm_up()
    assert (len(recorded.sizes), cuda_stand_in.captures) == (4, 4)
    with torch.inference_mode():
        there.copy_(kv.tensor)
    for decodes, chunks in steps_of(plain.adapter.axes, 0 if image is None or plain.adapter.deepstack else 1):
        with torch.inference_mode():
            wanted = eager._eager(decodes, chunks, 0)
        cuda_stand_in.waits.clear()
        found = recorded.run(decodes, chunks)
        assert found is not None
        assert set(cuda_stand_in.waits) <= {"copy"}, "of the step's numbers"
        count = len(decodes.ids) + sum(each.needs_logits for each in chunks)
        torch.testing.assert_close(found.to("cpu"), wanted[:count], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(there.to("cpu")[:39], kv.tensor[:39], atol=1e-5, rtol=1e-4)
    assert cuda_stand_in.captures == 4


@pytest.mark.parametrize("name", pick("llava"))
def test_tokens_are_those_of_generate(name: str) -> None:
    """Chunks of seven tokens that cut images anywhere, beside the decodes of those that came before."""
    driver = Driver(name, split=False)
    recorder = record_prefill(driver.prefill)
    driver.kv[0].free.remove(89)  # ``StaticTorch`` lets padding rows write there
    counts = (0, 1, 3) if driver.image else (0,)
    eager = list[int]()
    own = driver.prefill._eager

    def note(decodes: Decodes, chunks: Sequence[Chunk], group: int, states: OpenStates | None = None) -> Tensor:
        eager.append(len(chunks))
        return own(decodes, chunks, group, states)

    driver.prefill._eager = note  # type: ignore[method-assign]
    for count in counts:
        driver.add(processed(name, count))
        driver.run_once()
        driver.run_once()
    for served, count in zip(driver.run().values(), counts, strict=True):
        wanted = generated(name, count)
        assert served.tokens == wanted.ids
        error = (torch.stack([served.logits[at] for at in range(len(wanted.ids))]) - wanted.logits).abs().max()
        assert error < 1e-4
    assert recorder.recordings >= (2 if len(counts) > 1 else 1)
    whole = driver.p.adapter.whole_media or driver.p.adapter.deepstack
    assert sum(map(bool, eager)) <= (20 if whole else 0), "only steps with images may need it"


def chunk_step(each: Work, start: int, length: int) -> Prefill:
    return Prefill(each.request, start, length, start + length == len(each.prompt))


def launch_all(solo: Solo, works: list[Work], depth: int, outputs: int = 8) -> dict[str, list[int]]:
    """Prefill in chunks of five, each request two steps behind the one before; those that are done are decoded."""
    tokens: dict[str, list[int]] = {each.request: [] for each in works}
    flight, counts = deque[PendingStep](), dict.fromkeys(tokens, 0)

    def read() -> None:
        for name, one in flight.popleft().wait().items():
            tokens[name].append(one.token)

    for each in works:
        solo.open(each)
    step = 0
    while any(count < outputs for count in counts.values()):
        names = tuple(name for name, count in counts.items() if 0 < count < outputs)
        chunks = []
        for number, each in enumerate(works):
            start = 5 * (step - 2 * number)
            if 0 <= start < len(each.prompt):
                chunks.append(chunk_step(each, start, min(5, len(each.prompt) - start)))
        for name in (*names, *(chunk.request for chunk in chunks if chunk.last)):
            counts[name] += 1
        while len(flight) >= depth:
            read()
        flight.append(solo.stage.launch_on_device(Step(step, "joint", prefills=tuple(chunks), decodes=names)))
        step += 1
    while flight:
        read()
    return tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_of_both_are_launched_behind_unread_ones(depth: int) -> None:
    """Their decodes take tokens that no host has seen, in recordings as in eager steps."""
    works = [work(f"r{n}", PROMPT[: 6 + 9 * n], seed=n, temperature=float(n == 1)) for n in range(4)]
    solo = Solo()
    solo.stage.observe = None
    recorder = record_prefill(solo.stage)
    wanted = {each.request: Solo().serve(each, 8) for each in works}
    assert launch_all(solo, works, depth) == wanted
    assert recorder.replays >= 10
    assert solo.stage._requests.steps_in_flight == 0


def test_a_step_as_one_array() -> None:
    """Padding, decodes, chunks, padding."""
    decodes = Decodes(np.array([7]), np.array([20]), np.array([17]), np.array([[5, 3]]), np.array([6]))
    chunk = Chunk(np.array([8, 9, 10]), np.array([40, 41, 42]), 15, np.array([2, 9, 4]), np.array([33]), np.array([1]))
    size = StepSize(2, 5)
    packed = pack_step(decodes, [chunk], size, 16, 1)
    columns, begins, lengths, last = np.split(packed, np.cumsum(size.split_numbers(1))[:-1])
    assert columns.reshape(6, 7).T.tolist() == [
        [0, 0, -1, 0, -1, 0],
        [7, 6, 3, 0, -1, 20],
        [8, 0, 2, 15, -1, 40],
        [9, 0, 9, 0, 33, 41],
        [10, 0, 9, 1, -1, 42],
        [0, 0, -1, 0, -1, 0],
        [0, 0, -1, 0, -1, 0],
    ]
    assert begins.tolist() == [0, 1, 2, 5, 5, 5, 5, 7]
    assert lengths.tolist() == [0, 17, 18, 0, 0, 0, 0]
    assert last.tolist() == [0, 1, 4, 6, 6, 6]


def test_a_warm_stage_records_nothing_more() -> None:
    solo = Solo()
    recorder = record_prefill(solo.stage)
    solo.stage.warm_up()
    assert recorder.recordings == 4
    assert [size.rows for size in sizes_of(solo.stage)] == [8, 12, 24, 28]
    assert not solo.pool.memory.tensor.any()
    works = [work(f"r{n}", PROMPT[: 6 + 9 * n]) for n in range(4)]
    solo.stage.observe = None
    assert launch_all(solo, works, 2) == {each.request: Solo().serve(each, 8) for each in works}
    assert recorder.recordings == 4


def test_a_stage_of_prefill_alone_has_no_decode_rows() -> None:
    solo = Solo(letters="P")
    record_prefill(solo.stage)
    assert sizes_of(solo.stage) == ((0, 8), (0, 24))


def test_sizes_need_blocks_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Solo(blocks=5)
    record_prefill(small.stage)
    assert sizes_of(small.stage) == ((0, 8), (0, 24)), "four decodes write four blocks, and two chunks two"
    short = Solo()
    recorder = record_prefill(short.stage, memory=3)
    short.stage.warm_up()
    assert [size.rows for size in sizes_of(short.stage)] == [12, 24, 28], "the largest first"
    recorder.memory = 1000
    chunk = chunk_of(0, 8, 0, 1)
    assert short.stage._prefill_graphs is not None
    assert short.stage._prefill_graphs._find_size(0, [chunk]) == (4, 8), "a larger one serves it"
    monkeypatch.setattr(prefill_graphs, "MOST_WARM_UP_S", 0.0)
    late = Solo()
    record_prefill(late.stage)
    late.stage.warm_up()
    assert sizes_of(late.stage) == ()
    works = [work("r", PROMPT)]
    late.stage.observe = None
    assert launch_all(late, works, 2) == {"r": Solo().serve(works[0], 8)}


def test_what_a_recording_cannot_serve_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    solo = Solo()
    record_prefill(solo.stage)
    own = solo.stage._prefill_graphs
    assert own is not None
    chunk = chunk_of(0, 4, 0, 1)
    assert own._find_size(0, [chunk] * 4) == (0, 24)
    assert own._find_size(0, [chunk] * 5) is None, "more chunks than there is room for"
    assert own._find_size(5, [chunk]) is None
    assert own._find_size(4, [replace(chunk, groups=np.zeros(4))]) is None, "rows that see each other"
    assert own._find_size(0, [replace(chunk, ids=np.zeros(25))]) is None
    monkeypatch.setattr(prefill_graphs, "FREE_ROWS", 10)
    assert own._find_size(0, [chunk]) == (0, 8)
    assert own._find_size(1, [replace(chunk, ids=np.zeros(9))]) is None, "28 rows for 10"
    long = chunk_of(0, 8, 0, 1)
    own.tables = own.tables[:, :1]
    assert own.run(NO_DECODES, [replace(long, start=16)]) is None, "its table is wider"


def test_streamed_chunks_run_layer_by_layer() -> None:
    solo, told = Solo(), list[tuple[int, int]]()
    recorder = record_prefill(solo.stage)
    solo.stage.on_layers = lambda first, end: told.append((first, end))
    each = work("r", PROMPT[:8])
    solo.open(each)
    solo.stage.forward(Step(0, "joint", prefills=(chunk_step(each, 0, 8),), group=1))
    assert (len(told), recorder.replays) == (solo.model.adapter.text_config.num_hidden_layers, 0)


def test_a_stage_records_them_only_with_a_backend_that_can() -> None:
    solo = Solo()
    made: GraphCache = graphs()[0]
    for backend, letters, can in (
        (StaticTorch(), "PD", False),
        (StaticChunks(), "PD", True),
        (StaticChunks(), "D", False),
    ):
        stage = LanguageStage(solo.model, solo.pool.memory, None, letters, None, backend, made)
        assert (stage._prefill_graphs is not None) is can
        assert isinstance(stage._graphs, DecodeGraphs)
