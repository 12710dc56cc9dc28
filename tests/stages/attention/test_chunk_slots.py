"""Attention of chunks whose lengths only the device knows, by the Triton kernels in the interpreter or on a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at the imports below
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from support.attention_scenes import LAYER, LAYERS, Scene, Text
from trinity.stages.attention.backends import PerStepAttention
from trinity.stages.attention.gpu.library import LibraryAttention
from trinity.stages.attention.gpu.triton import TritonAttention, make_slots_wave
from trinity.stages.attention.gpu.varlen import ChunkSlots, VarlenRows
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.probe import find_fault
from trinity.stages.attention.torch_reference import TorchAttention

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS = 4  # chunks and padding


def make_varlen(decodes: int, lengths: list[int], rows: list[int], tables: Tensor, total: int) -> VarlenRows:
    """Decodes first, then chunks of these rows, then empty ones, then padding up to ``total`` rows."""
    ends = [decodes, *(decodes + sum(rows[: n + 1]) for n in range(len(rows)))]
    begins = [*range(decodes), *ends[:-1], *[ends[-1]] * (SLOTS - len(rows)), decodes + total]
    held = lengths + [0] * (decodes + SLOTS - len(lengths))
    slots = ChunkSlots(SLOTS, total, tables.shape[1] * 16)
    return VarlenRows(tables, torch.tensor(begins), torch.tensor(held), slots=slots)


@pytest.mark.parametrize(
    ("rows", "group", "wanted"),
    [
        ([5], 7, [[2, 0], [5, 0], [5, 18]]),
        ([37, 19], 7, [[2, 0], [2, 18], [2, 36], [3, 0], [3, 18], [5, 0]]),
        ([60], 1, [[2, 0]]),
        ([1, 1, 1], 7, [[2, 0], [3, 0], [4, 0], [5, 0], [5, 18], [5, 36], [5, 54]]),
    ],
)
def test_tiles_are_found_on_the_device(rows: list[int], group: int, wanted: list[list[int]]) -> None:
    """Tiles of 128 packed rows, 18 tokens of 7 query heads; behind them tiles of padding that have no row."""
    total = 60 if len(rows) != 1 or group == 1 else 30
    varlen = make_varlen(2, [1, 1, *rows], rows, torch.zeros((6, 1), dtype=torch.long), total)
    assert varlen.slots is not None
    wave = make_slots_wave(varlen, varlen.slots, 2, group)
    assert (wave.first, wave.rows, wave.packed, wave.spare) == (2, total, 128, True)
    found = wave.tiles.T.tolist()
    assert found[: len(wanted)] == wanted
    padding = total - sum(rows)
    assert len(found) == (total + SLOTS * (128 // group - 1)) // (128 // group)
    assert all(sequence == 5 and first >= padding for sequence, first in found[len(wanted) :])


@pytest.mark.parametrize(
    ("params", "processors"),
    [(AttentionParams(LAYER, 0.2), 6), (AttentionParams(LAYER, 0.2, window=30), 1)],
    ids=["full, split", "window"],
)
def test_equals_chunks_that_the_host_knows(params: AttentionParams, processors: int) -> None:
    """A decode behind one of padding, two chunks, an empty slot and padding, which is written nowhere and gives 0."""
    scene = Scene([Text(20, 1, True), Text(90, 33, False), Text(19, 7, False)], (4, 2), 16, 16, seed=3)
    wanted, known = scene.run(TorchAttention(), params), scene.rows()
    total, chunks = 48, [(text.length, text.rows) for text in scene.texts[1:]]
    tables = torch.zeros((2 + SLOTS, 6), dtype=torch.long)
    for at, table in zip((1, 2, 3), scene.tables, strict=True):
        tables[at, : len(table)] = table
    lengths = [0, scene.texts[0].length, *(length for length, _ in chunks)]
    varlen = make_varlen(2, lengths, [rows for _, rows in chunks], tables.to(DEVICE), total)
    real = slice(1, 1 + len(known.blocks))
    blocks, offsets = torch.full((2 + total,), -1), torch.zeros(2 + total, dtype=torch.long)
    blocks[real], offsets[real] = known.blocks, known.offsets
    batch = PagedRows(
        *(blocks.to(DEVICE), offsets.to(DEVICE), np.zeros((0, 0), dtype=np.int64), np.full(2, 96)),
        memo={"varlen": VarlenRows(tables.to(DEVICE), varlen.begins.to(DEVICE), varlen.lengths.to(DEVICE),
                                   slots=varlen.slots)},
    )  # fmt: skip
    parts = (
        torch.cat(scene.queries),
        *(torch.cat([held[-text.rows :] for text, held in zip(scene.texts, both, strict=True)])
          for both in (scene.keys, scene.values)),
    )  # fmt: skip
    padded = [part.new_full((2 + total, *part.shape[1:]), 9.0).index_copy_(0, torch.arange(2 + total)[real], part)
              for part in parts]  # fmt: skip
    cache = scene.cache.to(DEVICE)
    query, key, value = (part.to(DEVICE) for part in padded)
    seen = TritonAttention(processors).attend(batch, cache, (query, key, value), params).cpu()
    torch.testing.assert_close(seen[real], wanted, atol=2e-5, rtol=1e-4)
    assert not seen[0].any()
    assert not seen[real.stop :].any()
    assert torch.equal(cache.cpu(), scene.cache), "the other way has written the same"


class LateTiles(TritonAttention):
    """Reads chunks of a recording from a row too far on."""

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        varlen = rows.memo.get("varlen")
        if varlen is not None and varlen.slots is not None:
            varlen.lengths[-1] += 1
        return super().read(rows, cache, query, params)


def test_the_probe_refuses_a_backend_that_reads_them_wrongly() -> None:
    shape = (LAYERS, 2, 1, 4, 8)
    said = find_fault(LateTiles(1), shape, torch.float32, DEVICE)
    assert said is not None
    assert "torch" in said


class Library(LibraryAttention):
    """A library that serves nothing."""

    def _read_pages(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        raise AssertionError("a library does not know of room for chunks")


def test_recorded_chunks_are_for_trinitys_own_kernels() -> None:
    """A library's backend has them read by Triton; of two backends the one of decodes has them."""
    scene = Scene([Text(19, 7, False)], (2, 1), 8, 16, seed=3)
    wanted, known = scene.run(TorchAttention(), params := AttentionParams(LAYER, 0.2)), scene.rows()
    tables = torch.stack([scene.tables[0], torch.zeros_like(scene.tables[0])])
    begins, lengths = torch.tensor([0, 7, 7], device=DEVICE), torch.tensor([19, 0], device=DEVICE)
    varlen = VarlenRows(tables.to(DEVICE), begins, lengths, slots=ChunkSlots(2, 7, 32))
    memo = {"varlen": varlen}
    none = np.zeros((0, 0), dtype=np.int64)
    rows = PagedRows(known.blocks.to(DEVICE), known.offsets.to(DEVICE), none, np.zeros(0, dtype=np.int64), memo=memo)
    query = scene.queries[0].to(DEVICE)
    for backend in (Library(1), PerStepAttention(Library(1), None)):
        assert not backend.supports_chunk_slots, "it serves no recording"
        found = backend.read(rows, scene.cache.to(DEVICE), query, params)
        torch.testing.assert_close(found.cpu(), wanted, atol=2e-5, rtol=1e-4)
    assert PerStepAttention(TritonAttention(1), None).supports_chunk_slots
