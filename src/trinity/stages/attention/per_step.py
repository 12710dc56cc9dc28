"""PerStepAttention: one backend for steps of decodes alone, another for steps with prefill chunks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trinity.stages.attention.interface import AttentionParams, PagedRows


class PerStepAttention:
    """``AttentionBackend`` of two that can both write and read: ``decodes`` and, for batches with chunks, ``chunks``.

    Both read and write the same cache, so a request passes from one to the other as it begins to decode. Chunks of a
    recording (``ChunkSlots``), which are few, are for the backend of decodes.
    """

    def __init__(self, decodes: Any, chunks: Any) -> None:
        self._decodes, self._chunks = decodes, chunks
        self.supports_graphs: bool = getattr(decodes, "supports_graphs", False)
        self.supports_chunk_slots: bool = getattr(decodes, "supports_chunk_slots", False)
        self.reads_chunks: bool = all(getattr(each, "reads_chunks", False) for each in (decodes, chunks))

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        seen: Tensor = self._of(rows).attend(rows, cache, qkv, params)
        return seen

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """See ``SplitAttention.write``."""
        self._of(rows).write(rows, cache, key, value, layer)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """See ``SplitAttention.read``."""
        seen: Tensor = self._of(rows).read(rows, cache, query, params)
        return seen

    def warm_up(self, cache: Tensor, chunks: bool, groups: bool) -> None:
        """Warm up both; see ``TritonAttention.warm_up``."""
        for backend, many in ((self._decodes, False), (self._chunks, chunks)):
            if hasattr(backend, "warm_up"):
                backend.warm_up(cache, many, groups and many)

    def _of(self, rows: PagedRows) -> Any:
        return self._chunks if rows.chunks else self._decodes
