"""Recorded calls: what goes in, what is refused, and stages that use them, over a tape in place of CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from support.language_stage import PROMPT, Solo, work
from support.operator_tape import CPU, StaticTorch, every_operator_is_torchs, graphs
from support.stage_driver import Driver, generated, processed
from trinity.stages import decode_graphs
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.batch import Chunk, Decodes
from trinity.stages.cuda_graphs import make_graph_cache
from trinity.stages.decode_graphs import DecodeGraphs, make_static_rows, pack_decodes
from trinity.stages.encode import make_graph_key

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
    assert caplog.messages == ["no CUDA graph of key: operation not permitted when stream is capturing"], "said once"
    assert recorder.recordings == 0


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


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "LEAST_TABLE_WIDTH", 4)


def test_a_batch_as_one_array() -> None:
    decodes = Decodes(
        np.array([7, 8]), np.array([20, 31]), np.array([17, 32]), np.array([[5, 3], [9, 2]]), np.array([6, 1])
    )
    flat = torch.from_numpy(pack_decodes(decodes, 4, 3, 16))
    columns, tables = flat[:24].view(6, 4), flat[24:].view(4, 3)
    assert columns[:, :2].T.tolist() == [[7, 20, 3, 0, 17, 6], [8, 31, 2, 15, 32, 1]]
    assert columns[:, 2:].T.tolist() == [[0, 0, -1, 0, 0, 0]] * 2
    assert tables.tolist() == [[5, 3, 0], [9, 2, 0], [0, 0, 0], [0, 0, 0]]
    rows = make_static_rows(columns[2], columns[3], tables, columns[4], 16)
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
def test_decodes_are_recorded_and_their_tokens_the_same(name: str, narrow: None) -> None:
    """M-RoPE's three axes too. Sizes 1, 2, 4 and 8, tables of 4 and 8 blocks; prefill runs as it is."""
    eager, taped = Solo(name), Solo(name, backend=StaticTorch())
    made, recorder = graphs()
    taped.stage._graphs = DecodeGraphs(taped.model, taped.pool.memory.tensor, StaticTorch(), made)
    assert serve(taped) == serve(eager)
    assert all((taped.seen[at] - eager.seen[at]).abs().max() < 1e-4 for at in eager.seen)
    assert 4 <= recorder.recordings <= 8
    assert recorder.replays > 24


@pytest.mark.parametrize("name", ["llama", "qwen2_vl"])
def test_a_warm_stage_records_nothing_more(name: str, narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All sizes that the cache has blocks for, largest first, of rows that are compared; nothing stays."""
    monkeypatch.setattr(decode_graphs, "BATCH_SIZES", (1, 2, 4, 8, 1 << 20))
    eager, taped = Solo(name), Solo(name, backend=StaticTorch())
    made, recorder = graphs()
    taped.stage._graphs = DecodeGraphs(taped.model, taped.pool.memory.tensor, StaticTorch(), made)
    taped.stage.warm_up()
    assert list(made._calls) == [("decode", size, 4) for size in (8, 4, 2, 1)]
    assert not taped.pool.memory.tensor.any()
    assert serve(taped, 8) == serve(eager, 8)
    assert recorder.recordings == 4


@pytest.mark.parametrize(("letters", "recorded", "prefilled"), [("P", 0, 1), ("D", 2, 0)])
def test_a_stage_of_one_letter_warms_that(
    letters: str, recorded: int, prefilled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    solo = Solo(letters=letters, backend=StaticTorch())
    made, recorder = graphs(most=2)
    solo.stage._graphs = DecodeGraphs(solo.model, solo.pool.memory.tensor, StaticTorch(), made)
    chunks: list[int] = []
    own = solo.stage._eager

    def eager(decodes: Decodes, asked: Sequence[Chunk], group: int) -> Tensor:
        chunks.append(len(asked))
        return own(decodes, asked, group)

    monkeypatch.setattr(solo.stage, "_eager", eager)
    solo.stage.warm_up()
    assert (recorder.recordings, chunks) == (recorded, [1] * prefilled)


def test_a_batch_beyond_the_sizes_runs_as_it_is(narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "BATCH_SIZES", (1, 2))
    eager, taped = Solo(), Solo(backend=StaticTorch())
    made, recorder = graphs()
    taped.stage._graphs = DecodeGraphs(taped.model, taped.pool.memory.tensor, StaticTorch(), made)
    assert serve(taped) == serve(eager)
    assert 0 < recorder.recordings <= 4


def test_a_stage_records_only_with_a_backend_that_can() -> None:
    made, _ = graphs()
    solo = Solo()
    stage = type(solo.stage)
    for backend, can in ((TorchAttention(), False), (StaticTorch(), True)):
        asked = stage(solo.model, solo.pool.memory, None, "PD", None, backend, made)
        assert (asked._graphs is not None) is can


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_encodes_are_recorded_and_their_tokens_the_same(name: str) -> None:
    """Two requests of one image each, of one shape, then three images together, in one step."""
    driver = Driver(name)
    made, recorder = graphs()
    assert driver.encode is not None
    driver.encode._graphs = made
    for number, seed in ((1, 0), (1, 5), (3, 0)):
        driver.add(processed(name, number, seed, f"{number} of {seed}"))
    served = driver.run()
    for number, seed in ((1, 0), (1, 5), (3, 0)):
        assert served[f"{number} of {seed}"].tokens == generated(name, number, seed).ids
    assert (recorder.recordings, recorder.replays) == (2, 5)


def test_what_encodes_must_have_in_common() -> None:
    def item(height: int = 4, grid: tuple[int, ...] = (1, 2, 3)) -> dict[str, Tensor]:
        return {"pixel_values": torch.rand(1, 3, height, 4), "image_grid_thw": torch.tensor([grid])}

    one = make_graph_key("image", [item()], [6])
    assert one == make_graph_key("image", [item()], [6])
    others = [
        make_graph_key("video", [item()], [6]),
        make_graph_key("image", [item()], [7]),
        make_graph_key("image", [item(8)], [6]),
        make_graph_key("image", [item(grid=(1, 3, 2))], [6]),
        make_graph_key("image", [item()] * 2, [6, 6]),
    ]
    assert len({one, *others}) == 6
    assert make_graph_key("image", [item()] * 5, [6] * 5) is None, "many items are work enough for a GPU"
    assert make_graph_key("image", [{"ids": torch.zeros(65, dtype=torch.long)}], [6]) is None
