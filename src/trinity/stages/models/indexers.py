"""Indexed attention (DeepSeek's lightning indexer): a layer's indexer chooses the tokens that each row attends to.

An indexer scores all tokens up to a row's own by a key of each, which transformers caches beside the layer's keys and
values. Here that key is the end of the token's latent row, so that it is moved, kept and dropped with it. An indexer
runs by the model's own code, with a cache that writes its keys into their rows and gives back those of the request:
the decode rows of a batch together, each chunk by itself. What it chose, the layer hands to its attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trinity.errors import UnsupportedModel
from trinity.stages.attention.fp8 import round_to, storage
from trinity.stages.attention.interface import PagedBatch, PagedRows, find_batch, kv_layer
from trinity.stages.attention.latent import find_index_width
from trinity.stages.block_tables import BlockTables, upload
from trinity.stages.models.picked_rows import flatten_rows, pick_rows, read_call

SCORE_BYTES = 128 << 20  # of the scores, and of the keys, that one call of an indexer makes
_MASK = "attention_mask"
_NOTHING = -1  # in place of a chosen position


class IndexerModule(nn.Module):
    """Base put before the class of an indexer: runs that class's forward for the requests of a batch."""

    index_topk: int
    trinity_layer: tuple[Any]  # the layer that it is of, which is no part of it
    trinity_width: int  # of a key

    def forward(self, *given: Any, **named: Any) -> Any:
        own, batch = super().forward, find_batch()
        if not isinstance(batch, PagedBatch):
            return own(*given, **named)
        call = read_call(type(self).__mro__[2])
        arguments = call.bind(self, given, named)
        total = arguments[call.rows].shape[1]
        found = []
        for run in _list_runs(batch.rows, self._count_bytes(), batch.cache):
            picked = {name: pick_rows(value, run.pick, total) for name, value in arguments.items()}
            keys = IndexKeys(run, batch.cache, kv_layer(self.trinity_layer[0]), self.trinity_width)
            chosen = own(**{**picked, _MASK: run.seen, call.cache: keys})
            if not keys.asked:
                raise UnsupportedModel(f"{type(self).__name__} chooses tokens without the keys that its cache holds")
            found.append(flatten_rows(chosen))
        most = max(each.shape[-1] for each in found)
        return torch.cat([pad(each, (0, most - each.shape[-1]), value=_NOTHING) for each in found], 1)

    def _count_bytes(self) -> int:
        """Count the bytes of scores and keys that one row makes of each token before it."""
        heads: int = getattr(self.config, "index_n_heads", 1)
        return 4 * (heads + self.trinity_width)


@dataclass(frozen=True, slots=True)
class _Run:
    """Rows that an indexer takes together: ``count`` requests of ``length`` rows each, from row ``first`` on.

    - ``table``: block tables [count, blocks]. ``blocks``, ``offsets`` ([count * length]): cache places of the
      rows.
    - ``seen``: which tokens a row may choose, bool [count, length, tokens].
    """

    first: int
    count: int
    length: int
    table: Tensor
    blocks: Tensor
    offsets: Tensor
    seen: Tensor

    def pick(self, value: Tensor) -> Tensor:
        """Pick the rows [count, length, ...] out of [1, T, ...]."""
        rows = value[0, self.first : self.first + self.count * self.length]
        return rows.reshape(self.count, self.length, *rows.shape[1:])


@dataclass(slots=True)
class IndexKeys:
    """Stands in for transformers' cache in one call of an indexer."""

    run: _Run
    cache: Tensor
    layer: int
    width: int
    asked: bool = field(default=False, init=False)

    def update_indexer(self, keys: Tensor, layer_idx: int, *given: Any, **named: Any) -> Tensor:
        """Write the keys [count, length, width] of a run's rows; return all of its requests: [count, tokens, width].

        Raises ``UnsupportedModel`` for keys of another width than the config's, or for those that come twice.
        """
        if keys.shape[-1] != self.width or self.asked:
            raise UnsupportedModel(
                f"an indexer caches {keys.shape[-1]} numbers of a token once, and its config's index_head_dim is "
                f"{self.width}"
            )
        self.asked = True
        held, run = storage(self.cache)[:, self.layer, 0, 0, :, -self.width :], self.run
        held[run.blocks, run.offsets] = storage(
            round_to(keys.reshape(-1, self.width), self.cache.dtype).to(self.cache.dtype)
        )
        found = held[run.table].flatten(1, 2)[:, : run.seen.shape[-1]]
        return found.view(self.cache.dtype).to(keys.dtype)


def _list_runs(rows: PagedRows, row_bytes: int, cache: Tensor) -> tuple[_Run, ...]:
    """List the runs of a batch, each of at most ``SCORE_BYTES``; ``row_bytes``: of one row and token."""
    key = ("index runs", row_bytes)
    found: tuple[_Run, ...] | None = rows.memo.get(key)
    if found is None:
        found = rows.memo[key] = (*_decode_runs(rows, row_bytes, cache), *_chunk_runs(rows, row_bytes, cache.device))
    return found


def _decode_runs(rows: PagedRows, row_bytes: int, cache: Tensor) -> Iterator[_Run]:
    """Yield runs of decode rows, which are in order of their lengths."""
    first, tables, device = 0, BlockTables.join(rows.tables), cache.device
    while first < rows.decodes:
        end = rows.decodes
        while end > first + 1 and (end - first) * int(rows.lengths[end - 1]) * row_bytes > SCORE_BYTES:
            end = (first + 1 + end) // 2
        own, most = slice(first, end), int(rows.lengths[end - 1])
        lengths = upload(rows.lengths[own], device)[:, None]
        seen = torch.arange(most, device=device) < lengths
        table = upload(tables.take(np.arange(-(-most // cache.shape[4])), own), device)
        yield _Run(first, end - first, 1, table, rows.blocks[own], rows.offsets[own], seen[:, None])
        first = end


def _chunk_runs(rows: PagedRows, row_bytes: int, device: torch.device) -> Iterator[_Run]:
    """Yield runs of each chunk: pieces of it one behind the other, which see what came before."""
    for chunk in rows.chunks:
        done = 0
        while done < chunk.length:
            length = min(chunk.length - done, max(1, SCORE_BYTES // (row_bytes * chunk.end)))
            own, start = slice(chunk.first + done, chunk.first + done + length), chunk.start + done
            tokens, places = start + length, torch.arange(start, start + length, device=device)
            seen = torch.arange(tokens, device=device) <= places[:, None]
            yield _Run(own.start, 1, length, chunk.table[None], rows.blocks[own], rows.offsets[own], seen[None])
            done += length


def watch_indexers(model: Any) -> int:
    """Have the indexers among a text model's modules use paged rows; returns how many there are.

    May be called again.
    """
    found = 0
    for layer in model.modules():
        for indexer in layer.children():
            width = find_index_width(getattr(indexer, "config", None)) if hasattr(indexer, "index_topk") else 0
            if not width:
                continue
            found += 1
            if not isinstance(indexer, IndexerModule):
                kind: Any = type(indexer)
                indexer.__class__ = make_indexer_class(kind)
                indexer.trinity_layer, indexer.trinity_width = (layer,), width
                layer.register_forward_pre_hook(_give_mask, with_kwargs=True)
    return found


@cache
def make_indexer_class(kind: type) -> type:
    """Derive the class of an indexer whose keys are kept in paged rows. Raises ``UnsupportedModel``."""
    read_call(kind)
    return type(kind.__name__, (IndexerModule, kind), {"__module__": kind.__module__})


def _give_mask(layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Give a layer a mask that it may take apart for its indexer: paged attention needs none, and there is none."""
    if named.get(_MASK, given) is not None:
        return given, named
    return given, {**named, _MASK: torch.ones((1, 1, 1, 1), dtype=torch.bool)}


@contextmanager
def choosing_few(model: Any, most: int) -> Iterator[None]:
    """Have indexers choose at most ``most`` tokens, so that a short prompt shows what they choose.

    All indexers of a model are alike: so are the model's own forward and the paged one, which both run so.
    """
    held = {each: each.index_topk for each in model.modules() if isinstance(each, IndexerModule)}
    try:
        for each, own in held.items():
            each.index_topk = min(own, most)
        yield
    finally:
        for each, own in held.items():
            each.index_topk = own
