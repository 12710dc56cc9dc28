"""States of layers that keep no keys and values of each token: linear attention, Mamba, short convolutions.

A request's states have one size, whatever its length: one block holds those of all layers. Each such layer runs by the
model's own code, which reads and writes a cache of transformers' that is filled for it: all decode rows of a ragged
batch at once, each chunk by itself. New states stay beside the blocks until the whole step has succeeded, since a step
may run again after a failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from trinity.errors import UnsupportedModel
from trinity.stages.attention.interface import ChunkRows, PagedRows
from trinity.stages.block_tables import upload
from trinity.stages.models.held_rows import MOST_HELD, PromptTurn, check_inputs, run_prompt
from trinity.stages.models.picked_rows import RowPick, flatten_rows, join_rows, pick_rows, read_call

ALIGN_BYTES = 64  # of each state in a block
_running = threading.local()  # parts are shared by instances, each on a thread of its own


@dataclass(frozen=True, slots=True)
class StatePiece:
    """One state of one layer, as transformers' cache names it, at byte ``offset`` of a block.

    ``index``: which of the layer's states, "conv" and "recurrent" ones counted alike. ``shape``: without the batch.
    "held" is no state: prompt rows [2, width] that the layer's states do not cover yet (``held_rows.py``).
    """

    layer: int
    index: int
    name: Literal["conv", "recurrent", "held"]
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True)
class StateLayout:
    """All states of a model, in one block.

    - ``pieces``: the states. ``kv_layers``: layers that attend, and so have keys and values.
    - ``one_by_one`` (False): a chunk that goes on from earlier states runs token by token, because the model's own code
      does not go on with several at once. The self-check finds that out.
    - ``rows_held`` (False): the model's own code runs a row behind others by other arithmetic than several of them. So
      no row of a prompt runs alone, and each generated one does. The self-check finds that out, too.
    """

    pieces: tuple[StatePiece, ...]
    kv_layers: tuple[int, ...]
    one_by_one: bool = False
    rows_held: bool = False

    @property
    def size(self) -> int:
        """Bytes of a block."""
        last = self.pieces[-1]
        return _align(last.offset + last.nbytes)

    def in_float32(self) -> StateLayout:
        """The same states, held in float32."""
        wide = [replace(each, dtype=torch.float32) if each.dtype.is_floating_point else each for each in self.pieces]
        return StateLayout(place_pieces(wide), self.kv_layers, self.one_by_one, self.rows_held)

    def list_states(self, layer: int) -> list[StatePiece]:
        """List the states of a layer."""
        return [piece for piece in self.pieces if piece.layer == layer and piece.name != "held"]

    def reset(self) -> None:
        """Have rows run as they are, as before any check."""
        self.pieces = place_pieces([piece for piece in self.pieces if piece.name != "held"])
        self.one_by_one = self.rows_held = False

    def hold_rows(self, model: nn.Module, width: int) -> None:
        """Have the last rows [width] of prompts held back, in float32. Raises ``UnsupportedModel``."""
        layers = [module.trinity_state_layer for module in model.modules() if isinstance(module, StatefulModule)]
        if len(layers) > len(set(layers)):
            raise UnsupportedModel("one row runs by other arithmetic than several, in layers of two kinds of states")
        held = [StatePiece(layer, 0, "held", (MOST_HELD, width), torch.float32) for layer in layers]
        self.pieces, self.rows_held = place_pieces((*self.pieces, *held)), True

    def run_otherwise(self, model: nn.Module, width: int) -> bool:
        """Have chunks that go on from earlier states run token by token, and then with rows [width] held.

        False if both were tried. Raises ``UnsupportedModel`` where rows cannot be held.
        """
        if self.rows_held:
            return False
        self.one_by_one = not self.one_by_one
        if not self.one_by_one:
            self.hold_rows(model, width)
        return True


def place_pieces(pieces: Sequence[StatePiece]) -> tuple[StatePiece, ...]:
    """Place states one behind the other."""
    placed, offset = list[StatePiece](), 0
    for piece in pieces:
        placed.append(replace(piece, offset=offset))
        offset = _align(offset + piece.nbytes)
    return tuple(placed)


def _align(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows that run together: sequences of ``length`` rows from ``first`` on; ``fresh``: from no earlier state.

    ``held``, ``prompt``: rows of its prompt before and in the chunk whose rows are held back, and whether it ``ended``.
    """

    first: int
    count: int
    length: int
    fresh: bool
    sequences: slice  # of the step's blocks
    held: int = 0
    prompt: int = 0
    ended: bool = True

    @classmethod
    def of_chunk(cls, chunk: ChunkRows, place: int, turn: PromptTurn | None) -> _Run:
        """Make the run of a chunk, whose block is the step's at this place; with a ``turn`` where rows are held."""
        held, sequences = turn.held if turn else 0, slice(place, place + 1)
        run = cls(chunk.first, 1, chunk.length, chunk.start == held, sequences, held)
        if turn is None:
            return run
        rows = turn.prompt_rows(chunk.start, chunk.length)
        return replace(run, prompt=rows, ended=not turn.hold(chunk.start, chunk.length))

    def pick(self, value: Tensor) -> Tensor:
        """Pick the rows [sequences, length, ...] out of [1, T, ...]."""
        rows = value[0, self.first : self.first + self.count * self.length]
        return rows.reshape(self.count, self.length, *rows.shape[1:])


class StateStep:
    """States of the requests of one ragged batch.

    - ``memory``: uint8 [blocks, size], of the layout's size.
    - ``blocks``: block of each decode row, then of each chunk.
    - ``turns``: one for each chunk; used where rows are held.

    ``commit`` writes what the batch's layers have left, once all of its step has succeeded.
    """

    def __init__(
        self, layout: StateLayout, memory: Tensor, blocks: np.ndarray, rows: PagedRows, turns: Sequence[PromptTurn]
    ) -> None:
        self.layout, self.memory = layout, memory
        self._blocks = upload(np.asarray(blocks, dtype=np.int64), memory.device)
        decodes = rows.decodes
        assert len(blocks) == decodes + len(rows.chunks), f"{len(blocks)} blocks of states for other rows"
        self._runs = [_Run(0, decodes, 1, False, slice(0, decodes))] if decodes else []
        for place, (chunk, turn) in enumerate(zip(rows.chunks, turns, strict=True), decodes):
            self._runs.append(_Run.of_chunk(chunk, place, turn if layout.rows_held else None))
        self._new: dict[StatePiece, list[tuple[slice, Tensor]]] = {}

    def run(self, layer: int, rows: Tensor, call: Callable[[RowPick, Any], Any]) -> Any:
        """Run one module over its requests' ``rows`` [1, T, ...]; ``call`` runs it on picked ones with a cache.

        Returns [1, T, ...].
        """
        found, apart = [], self.layout.one_by_one or self.layout.rows_held
        for run in self._runs:
            cache = self._fill_cache(layer, run)
            if run.prompt or (apart and not run.fresh):
                parts = [self._run_prompt(layer, run, rows, cache, call)] if run.prompt else []
                parts += [call(_one_of(run, at), cache) for at in range(run.prompt, run.length)]
            else:
                parts = [call(run.pick, cache)]
            self._keep(layer, run, cache)
            found.append(flatten_rows(join_rows(parts, 1)))
        return join_rows(found, 1)

    def commit(self) -> None:
        """Write the new states into their blocks."""
        for piece, parts in self._new.items():
            held = self.memory[:, piece.offset : piece.offset + piece.nbytes]
            for sequences, value in parts:
                as_bytes = value.to(piece.dtype).contiguous().view(torch.uint8).view(len(value), piece.nbytes)
                held.index_copy_(0, self._blocks[sequences], as_bytes)
        self._new.clear()

    def _fill_cache(self, layer: int, run: _Run) -> Any:
        """Make a cache of transformers' with the layer's states of these sequences."""
        from transformers.cache_utils import Cache, LinearAttentionLayer

        own = self.layout.list_states(layer)
        made: Any = LinearAttentionLayer(number_of_states=1 + max(piece.index for piece in own))
        for piece in own:
            value = self._read(piece, run)
            held = getattr(made, f"{piece.name}_states")
            held[piece.index] = value
            getattr(made, f"is_{piece.name}_states_initialized")[piece.index] = True
            made.has_previous_state[piece.index] = not run.fresh
            if piece.name == "conv":
                made.conv_kernel_size[piece.index] = piece.shape[-1]
        made.device, made.dtype = self.memory.device, own[0].dtype
        return Cache(layers=[made] * (layer + 1))

    def _run_prompt(self, layer: int, run: _Run, rows: Tensor, cache: Any, call: Callable[[RowPick, Any], Any]) -> Any:
        """Run a chunk's rows of its prompt, behind those that are held."""
        piece = next(each for each in self.layout.pieces if each.layer == layer and each.name == "held")
        given = rows[0, run.first : run.first + run.prompt]
        if run.held:
            given = torch.cat((self._read_block(piece, run)[0, : run.held].to(given.dtype), given))
        output, kept = run_prompt(call, cache, given, held=run.held, ended=run.ended)
        if kept is not None:
            self._keep_piece(piece, run, kept[None])
        return output

    def _read(self, piece: StatePiece, run: _Run) -> Tensor:
        shape = (run.count, *piece.shape)
        new = next((value for at, value in self._new.get(piece, ()) if at == run.sequences), None)
        if new is not None:  # of another module of this layer
            return new
        if run.fresh:  # whatever the block holds
            return torch.zeros(shape, dtype=piece.dtype, device=self.memory.device)
        return self._read_block(piece, run)

    def _read_block(self, piece: StatePiece, run: _Run) -> Tensor:
        held = self.memory[:, piece.offset : piece.offset + piece.nbytes]
        return held.index_select(0, self._blocks[run.sequences]).view(piece.dtype).view(run.count, *piece.shape)

    def _keep(self, layer: int, run: _Run, cache: Any) -> None:
        left = cache.layers[layer]
        for piece in self.layout.list_states(layer):
            self._keep_piece(piece, run, getattr(left, f"{piece.name}_states")[piece.index])

    def _keep_piece(self, piece: StatePiece, run: _Run, value: Tensor) -> None:
        others = [each for each in self._new.get(piece, ()) if each[0] != run.sequences]
        self._new[piece] = [*others, (run.sequences, value)]


def _one_of(run: _Run, at: int) -> RowPick:
    return lambda value: run.pick(value)[:, at : at + 1]


@contextmanager
def use_states(step: StateStep | None) -> Iterator[None]:
    """Have the stateful modules that this thread calls read and write the states of ``step``; None: their own way."""
    before = getattr(_running, "step", None)
    _running.step = step
    try:
        yield
    finally:
        _running.step = before


class StatefulModule(nn.Module):
    """Base put before the class of a module that keeps states: runs that class's forward for each of the requests."""

    trinity_state_layer: int

    def forward(self, *given: Any, **named: Any) -> Any:
        own, step = super().forward, getattr(_running, "step", None)
        if step is None:
            return own(*given, **named)
        call = read_call(type(self).__mro__[2])
        arguments = call.bind(self, given, named)
        rows = arguments[call.rows]
        total = rows.shape[1]
        if step.layout.rows_held:
            check_inputs(arguments, call.rows, total)

        def run(pick: RowPick, cache: Any) -> Any:
            picked = {name: pick_rows(value, pick, total) for name, value in arguments.items()}
            return own(**{**picked, call.cache: cache})

        return step.run(self.trinity_state_layer, rows, run)


@cache
def make_stateful_class(kind: type) -> type:
    """Derive the class of a module whose states are kept in blocks. Raises ``UnsupportedModel``."""
    read_call(kind)
    return type(kind.__name__, (StatefulModule, kind), {"__module__": kind.__module__})
