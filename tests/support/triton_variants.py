"""Counts kernels that one stage asks Triton to compile; run by test_triton_compile.py in a process of its own.

Prints how many it asks for as it warms up, and how many more while it serves random mixed steps. Triton's own key tells
one compilation from another; none is compiled or run, so what the model computes is noise.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from support.checkpoint_files import checkpoint
from tools.kernel_table import record_launches
from trinity.memory.block_memory import BlockMemory
from trinity.stages.attention.gpu.triton import TritonAttention
from trinity.stages.batch import NO_DECODES, Chunk, Decodes
from trinity.stages.gpu import prefill_graphs
from trinity.stages.gpu.cuda_graphs import GraphCache
from trinity.stages.gpu.decode_graphs import DecodeGraphs
from trinity.stages.gpu.prefill_graphs import PrefillGraphs
from trinity.stages.language import LanguageStage, StepRows
from trinity.stages.models import load_model

STEPS, BLOCKS, BLOCK_ROWS, PROCESSORS = 300, 300, 16, 132


class Eager:
    """A recorder whose recordings are the calls themselves."""

    def has_room(self) -> bool:
        return True

    def record(
        self, run: Callable[[], Sequence[Tensor]], restore: Callable[[], None]
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        return (lambda: None), run()


def stage(name: str, letters: str) -> LanguageStage:
    model = load_model(checkpoint(name), letters, dtype="float32")
    kv, backend = BlockMemory(model.kv_shape(), BLOCKS), TritonAttention(PROCESSORS)
    made = LanguageStage(model, kv, None, letters, backend=backend)
    graphs = GraphCache(Eager(), torch.device("cpu"))
    made._graphs = DecodeGraphs(model, kv.tensor, backend, graphs)
    if "P" in letters:
        made._prefill_graphs = PrefillGraphs(model, kv.tensor, backend, graphs, made._tokens, None, letters)
    return made


def decodes(rows: int, noise: np.random.Generator) -> Decodes:
    lengths = np.sort(noise.integers(1, 1500, rows))
    tables = noise.integers(0, BLOCKS, (rows, -(-int(lengths[-1]) // BLOCK_ROWS)))
    return Decodes(np.zeros(rows, dtype=np.int64), lengths - 1, lengths, tables)


def chunk(length: int, axes: int, grouped: bool, noise: np.random.Generator) -> Chunk:
    start = int(noise.integers(0, 3)) * int(noise.integers(0, 300))
    table = noise.integers(0, BLOCKS, -(-(start + length) // BLOCK_ROWS))
    rope = np.arange(start, start + length)
    groups = noise.integers(-1, 1, length) if grouped else None
    return Chunk(np.zeros(length, dtype=np.int64), np.tile(rope, (axes, 1)) if axes > 1 else rope, start, table,
                 groups=groups, needs_logits=bool(noise.integers(0, 2)))  # fmt: skip


def mixed_steps(made: LanguageStage) -> Iterator[StepRows]:
    noise, adapter = np.random.default_rng(0), made.model.adapter
    for _ in range(STEPS):
        rows = int(noise.choice([0, 0, 1, 2, 3, 7, 16, 20, 33, 300])) if "D" in made.letters else 0
        own = decodes(rows, noise) if rows else NO_DECODES
        lengths = (
            noise.choice([1, 2, 16, 17, 31, 64, 100, 333], noise.integers(not rows, 3)) if "P" in made.letters else ()
        )
        grouped = adapter.whole_media and bool(noise.integers(0, 2))
        chunks = [chunk(int(each), adapter.axes, grouped, noise) for each in lengths]
        yield StepRows(own, chunks, [], np.empty(0, dtype=np.int64), set())


def main(name: str, letters: str) -> None:
    prefill_graphs.DECODE_COUNTS, prefill_graphs.CHUNK_ROW_COUNTS = (0, 32), (64, 384)  # others ask for the same
    logging.getLogger("trinity").setLevel(logging.ERROR)  # a replay of noise is another noise
    made = stage(name, letters)
    with record_launches() as launches, torch.inference_mode():
        made.warm_up()
        warm = {launch.key for launch in launches}
        for rows in mixed_steps(made):
            if len(rows.decodes.ids) or rows.chunks:
                made._logits(rows, 0)
    print(len(warm), len({launch.key for launch in launches} - warm), len(launches))


if __name__ == "__main__":
    main(*sys.argv[1:])
