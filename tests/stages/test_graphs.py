"""Recorded calls: what goes in, what is refused, and stages that use them, over a tape in place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from support.language_stage import PROMPT, Solo, work
from support.operator_tape import CPU, StaticTorch, every_operator_is_torchs, graphs
from trinity.stages.async_steps import SPARE_SLOT, DeviceTokens
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.batch import Chunk, Decodes
from trinity.stages.gpu import decode_graphs
from trinity.stages.gpu.cuda_graphs import make_graph_cache
from trinity.stages.gpu.decode_graphs import DecodeGraphs
from trinity.stages.gpu.decode_state import ADVANCE, LENGTH, PLACE, ROPE, SLOT, DecodeState

pytestmark = pytest.mark.usefixtures(every_operator_is_torchs.__name__)


def double(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    return [inputs[0] * 2, inputs[0].sum() + inputs[1]]


def test_a_replay_follows_its_inputs_and_nothing_else() -> None:
    made, recorder = graphs()
    first = [torch.tensor([1.0, 2.0]), torch.tensor(1.0)]
    outputs = made.call("key", double, first)
    assert outputs is not None
    places = [each.data_ptr() for each in outputs]
    for number in (3.0, -1.0):
        first[0].fill_(99.0)  # what it was given first is not looked at again
        found = made.call("key", double, [torch.tensor([number, 1.0]), torch.tensor(0.5)])
        assert found is not None
        assert [each.tolist() for each in found] == [[2 * number, 2.0], number + 1.5]
        assert [each.data_ptr() for each in found] == places
    assert (recorder.recordings, recorder.replays) == (1, 4), "one replay is compared with the call itself"


def test_what_looks_at_values_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    made, recorder = graphs()

    def looks(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [inputs[0] * inputs[0].sum().item()]

    for _ in range(2):
        assert made.call("key", looks, [torch.ones(2)]) is None
    said = "no CUDA graph of key: aten._local_scalar_dense.default reads on the host what only the device knows"
    assert caplog.messages == [said], "once"
    assert recorder.recordings == 0


def test_of_a_kind_that_cannot_be_recorded_nothing_more_is_tried(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = graphs()
    runs: list[int] = []

    def looks(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        runs.append(len(inputs[0]))
        return [inputs[0][inputs[0] > 0]]

    for length in (1, 2, 3):
        assert made.call(length, looks, [torch.ones(length)], "some") is None
    assert runs == [1]
    (said,) = caplog.messages
    assert said.startswith("no CUDA graph of some: aten.index.Tensor reads")
    assert made.call(1, double, [torch.ones(1), torch.ones(())], "others") is None, "the key is known already"
    assert made.call(9, double, [torch.ones(1), torch.ones(())], "others") is not None
    assert (made.has(9), made.has(1), made.has("never")) == (True, False, False)


def test_a_call_that_raises_is_left_to_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = graphs()

    def fails(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        raise ValueError("no such size")

    assert made.call("key", fails, [torch.ones(1)]) is None
    assert caplog.messages == ["no CUDA graph of key: no such size"]


def test_a_replay_with_another_result_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    made, _ = graphs()
    calls: list[None] = []

    def counts(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        calls.append(None)
        return [inputs[0] * len(calls)]

    assert made.call("key", counts, [torch.ones(2)]) is None
    assert caplog.messages == ["no CUDA graph of key: a replay gives another result"]
    assert made.call("whole", lambda inputs: [inputs[0] + 1], [torch.tensor([3])]) is not None


def test_recordings_are_bounded_by_number_and_by_memory() -> None:
    for made, recorder in (graphs(most=2), graphs(memory=2)):
        found = [made.call(key, double, [torch.ones(2), torch.ones(())]) for key in (1, 2, 3, 1)]
        assert [each is None for each in found] == [False, False, True, False]
        assert recorder.recordings == 2


def test_a_cpu_has_none() -> None:
    assert make_graph_cache(CPU) is None


def test_a_batch_as_one_array() -> None:
    decodes = Decodes(
        np.array([7, 8]), np.array([20, 31]), np.array([17, 32]), np.array([[5, 3], [9, 2]]), np.array([6, 1])
    )
    state = DecodeState(8, 3, 16, DeviceTokens(CPU), CPU)
    state.write(decodes, 4, None, None)
    for step in range(2):
        ids, rope, rows = state.move(4)
        assert (ids.tolist(), rope.tolist()) == ([7, 8, 0, 0], [20 + step, 31 + step, 0, 0])
        assert rows.blocks.tolist() == [3, 2 if step == 0 else 0, -1, -1]
        assert rows.offsets.tolist() == [step, (15 + step) % 16, 0, 0]
        assert rows.memo["varlen"].lengths.tolist() == [17 + step, 32 + step, 0, 0]
    assert state.columns[[SLOT, ADVANCE], :4].tolist() == [[6, 1, SPARE_SLOT, SPARE_SLOT], [1, 1, 0, 0]]
    assert state.columns[[PLACE, ROPE, LENGTH], :4].T.tolist() == [[17, 21, 18], [32, 32, 33], [0, 0, 0], [0, 0, 0]]
    assert state.tables[:4].tolist() == [[5, 3, 0], [9, 2, 0], [-1, 0, 0], [-1, 0, 0]]
    assert (rows.decodes, rows.lengths.max(), rows.memo["varlen"].begins.tolist()) == (4, 48, [0, 1, 2, 3, 4])


def serve(solo: Solo, outputs: int = 24) -> dict[str, list[int]]:
    """Requests that come and go, so that batches of 1 to 5 rows and tables of several widths are decoded."""
    asked = {f"r{i}": work(f"r{i}", PROMPT[: 5 + 7 * i], seed=i, temperature=float(i == 3)) for i in range(5)}
    tokens: dict[str, list[int]] = {}
    for step in range(outputs + 5):
        if step < len(asked):
            name = f"r{step}"
            solo.open(asked[name])
            tokens[name] = [solo.fill(asked[name])]
        running = tuple(name for name, held in tokens.items() if len(held) < outputs)
        for name, one in solo.step(decodes=running).items():
            tokens[name].append(one.token)
            if len(tokens[name]) == outputs:
                solo.stage.close(name)
    return tokens


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_decodes_are_recorded_and_their_tokens_the_same(name: str) -> None:
    """M-RoPE's three axes too. Sizes 1, 2, 4 and 8, whatever the widths of the tables; prefill runs as it is."""
    eager, taped = Solo(name), Solo(name, backend=StaticTorch())
    made, recorder = graphs()
    taped.stage._graphs = DecodeGraphs(taped.model, taped.pool.memory.tensor, StaticTorch(), made, taped.stage._tokens)
    assert serve(taped) == serve(eager)
    assert all((taped.seen[at] - eager.seen[at]).abs().max() < 1e-4 for at in eager.seen)
    assert recorder.recordings == 4
    assert recorder.replays > 24


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_a_warm_stage_records_nothing_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes that the cache has blocks for, largest first, of rows that are compared; nothing stays."""
    monkeypatch.setattr(decode_graphs, "BATCH_SIZES", (1, 2, 4, 8, 1 << 20))
    eager, taped = Solo(name), Solo(name, backend=StaticTorch())
    made, recorder = graphs()
    taped.stage._graphs = DecodeGraphs(taped.model, taped.pool.memory.tensor, StaticTorch(), made, taped.stage._tokens)
    taped.stage.warm_up()
    assert list(made._calls) == [("decode", size) for size in (8, 4, 2, 1)]
    assert not taped.pool.memory.tensor.any()
    assert serve(taped, 8) == serve(eager, 8)
    assert recorder.recordings == 4


@pytest.mark.parametrize(("letters", "recorded", "prefilled"), [("P", 0, 1), ("D", 2, 0)])
def test_a_stage_of_one_letter_warms_that(
    letters: str, recorded: int, prefilled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = Solo(letters=letters, backend=StaticTorch())
    made, recorder = graphs(most=2)
    solo.stage._graphs = DecodeGraphs(solo.model, solo.pool.memory.tensor, StaticTorch(), made, solo.stage._tokens)
    chunks: list[int] = []
    own = solo.stage._eager

    def eager(decodes: Decodes, asked: Sequence[Chunk], group: int) -> Tensor:
        chunks.append(len(asked))
        return own(decodes, asked, group)

    monkeypatch.setattr(solo.stage, "_eager", eager)
    solo.stage.warm_up()
    assert (recorder.recordings, chunks) == (recorded, [prefilled])


def test_a_batch_beyond_the_sizes_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "BATCH_SIZES", (1, 2))
    eager, taped = Solo(), Solo(backend=StaticTorch())
    made, recorder = graphs()
    taped.stage._graphs = DecodeGraphs(taped.model, taped.pool.memory.tensor, StaticTorch(), made, taped.stage._tokens)
    assert serve(taped) == serve(eager)
    assert recorder.recordings == 2


def test_a_stage_records_only_with_a_backend_that_can() -> None:
    made, _ = graphs()
    solo = Solo()
    stage = type(solo.stage)
    for backend, can in ((TorchAttention(), False), (StaticTorch(), True)):
        asked = stage(solo.model, solo.pool.memory, None, "PD", None, backend, made)
        assert (asked._graphs is not None) is can


def step_at_random(solo: Solo, rng: np.random.Generator, running: dict[str, int], step: int) -> dict[str, list[int]]:
    """Take in or finish requests, then prefill the new ones, decode the others, or both in one batch."""
    if len(running) < 8 and rng.random() < 0.3:
        length, more = int(rng.integers(1, 1200)), int(rng.integers(2, 200))
        asked = work(f"r{step}", tuple(rng.integers(5, 90, length).tolist()), more)
        if -(-(length + more) // 16) <= len(solo.pool.free):
            opened = solo.open(asked)
            running[asked.request] = more - 1
            return {asked.request: [solo.fill(asked), *opened.blocks]}
    found = solo.step(decodes=tuple(running)) if running else {}
    for name in found:
        running[name] -= 1
    for name in [name for name, left in running.items() if left == 0 or rng.random() < 0.01]:
        row = solo.stage._requests.find(name)
        solo.pool.free.extend(row.table.tolist())
        solo.stage.close(name)
        del running[name]
    return {name: [one.token] for name, one in found.items()}


@pytest.mark.slow
def test_nothing_is_recorded_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 steps of up to eight texts of 1 to 1,400 tokens, in any company: each width of tables, no new graph."""
    monkeypatch.setattr(decode_graphs, "BATCH_SIZES", (1, 2, 4, 8))
    eager, taped = Solo(blocks=300), Solo(blocks=300, backend=StaticTorch())
    made, recorder = graphs()
    taped.stage._graphs = DecodeGraphs(taped.model, taped.pool.memory.tensor, StaticTorch(), made, taped.stage._tokens)
    taped.stage.warm_up()
    warm = recorder.recordings
    said, widths = list[list[dict[str, list[int]]]](), set[int]()
    for solo in (eager, taped):
        solo.pool.free.remove(299)  # ``StaticTorch`` lets padding rows write there
        rng, running = np.random.default_rng(7), dict[str, int]()
        said.append([])
        for step in range(300):
            said[-1].append(step_at_random(solo, rng, running, step))
            widths |= {len(row.table) for row in solo.stage._requests.rows.values()}
    assert said[0] == said[1]
    assert max(widths) > 64
    assert (warm, recorder.recordings) == (4, 4)
    assert recorder.replays > 200


def test_a_size_without_room_at_the_start_is_not_recorded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger ones serve it, and what no graph serves runs as it is."""
    monkeypatch.setattr(decode_graphs, "BATCH_SIZES", (1, 2, 4, 8))
    eager, taped = Solo(), Solo(backend=StaticTorch())
    made, recorder = graphs(memory=2)
    own = DecodeGraphs(taped.model, taped.pool.memory.tensor, StaticTorch(), made, taped.stage._tokens)
    taped.stage._graphs = own
    taped.stage.warm_up()
    recorder.memory = 1000
    assert own.sizes == (4, 8)
    assert serve(taped, 8) == serve(eager, 8)
    assert recorder.recordings == 2


def test_static_tables_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the cache, by the model's context and by bytes; a text that is longer runs as it is."""
    solo = Solo(backend=StaticTorch())
    made, recorder = graphs()

    def own() -> DecodeGraphs:
        return DecodeGraphs(solo.model, solo.pool.memory.tensor, StaticTorch(), made)

    assert own().sizes[-1] == 96
    assert own().state.tables.shape == (96, 120), "no table is longer than the cache"
    monkeypatch.setattr(solo.model.adapter.text_config, "max_position_embeddings", 100)
    assert own().state.tables.shape[1] == 7, "100 tokens in blocks of 16"
    monkeypatch.setattr(decode_graphs, "MOST_TABLE_BYTES", 4 * 96 * 2)
    short = own()
    assert short.state.tables.shape[1] == 2
    one = np.array([5])
    assert short.run(Decodes(one, one, one + 28, np.array([[1, 2, 3]]))) is None
    assert short.run(Decodes(one, one, one + 24, np.array([[1, 2]]))) is not None
    assert recorder.recordings == 1
