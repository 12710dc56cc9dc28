"""PackedRows: the newest rows of something that goes on for ever, within a bound of bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from sys import getsizeof
from typing import Any, Generic, TypeVar

import msgspec

from trinity.errors import ConfigError, TraceError

Row = TypeVar("Row", bound=msgspec.Struct)


class PackedRows(Sequence[Row], Generic[Row]):
    """Holds the newest rows of one kind as msgpack, a quarter of what they are as objects. Each read unpacks them anew.

    - ``kind``: class of the rows.
    - ``most_bytes``: that they take, packed; the newest row is kept, however large.
    - ``maxlen`` (rows, None): the most of them, too.

    An iteration is over the rows that were there as it began, also where another thread appends. Raises
    ``ConfigError`` for a bound below 1.
    """

    def __init__(self, kind: type[Row], most_bytes: int, maxlen: int | None = None) -> None:
        if most_bytes < 1 or (maxlen is not None and maxlen < 1):
            raise ConfigError(f"rows are kept within at least 1 byte and 1 row, got {most_bytes!r} and {maxlen!r}")
        self._kind = kind
        self._packed: deque[bytes] = deque()
        self.most_bytes, self.maxlen, self.bytes = most_bytes, maxlen, 0

    def append(self, row: Row) -> None:
        """Add a row, and drop the oldest until all fit again. Raises ``TraceError`` for a number beyond 64 bits."""
        try:
            encoded = msgspec.msgpack.encode(row)
        except OverflowError:
            raise TraceError("a row of a bounded trace has whole numbers below 2**64; give times as floats") from None
        packed = bytes(memoryview(encoded))  # a copy: msgspec's own has up to a third in reserve
        self._packed.append(packed)
        self.bytes += getsizeof(packed)
        while len(self._packed) > 1 and self._is_full():
            self.bytes -= getsizeof(self._packed.popleft())

    def _is_full(self) -> bool:
        return self.bytes > self.most_bytes or (self.maxlen is not None and len(self._packed) > self.maxlen)

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[Row]:
        return map(self._unpack, self._packed.copy())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(map(self._unpack, list(self._packed)[index]))
        return self._unpack(self._packed[index])

    def _unpack(self, packed: bytes) -> Row:
        return msgspec.msgpack.decode(packed, type=self._kind)
