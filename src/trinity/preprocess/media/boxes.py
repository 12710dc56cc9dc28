"""Boxes of the ISO base media file format, and frames of AV1 in them: a walk that reads sizes and skips content."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from trinity.preprocess.media.file_parts import Parts

_SEQUENCE, _FRAME_HEADER, _FRAME, _REDUNDANT = 1, 3, 6, 7  # types of an AV1 unit
_SEQUENCE_PARTS = 16  # a header of a sequence counts as so many parts: it is read bit by bit


class Box(NamedTuple):
    """A box: its four letters, and where its content begins and ends in the file."""

    name: bytes
    start: int
    end: int


def walk_boxes(data: bytes, start: int, end: int, parts: Parts) -> Iterator[Box]:
    """Yield the boxes between two places of a file, cut at the latter."""
    for _ in parts:
        if start + 8 > end:
            return
        size, name = struct.unpack_from(">L4s", data, start)
        head = 8
        if size == 1:
            if start + 16 > end:
                return
            size, head = struct.unpack_from(">Q", data, start + 8)[0], 16
        stop = end if size == 0 else min(end, start + size)
        if stop < start + head:
            return
        yield Box(name, start + head, stop)
        start = stop


def find_box(data: bytes, start: int, end: int, parts: Parts, *names: bytes) -> Box | None:
    """Find the first box along a path of names; each but the last is a plain container."""
    found = None
    for name in names:
        found = next((box for box in walk_boxes(data, start, end, parts) if box.name == name), None)
        if found is None:
            return None
        start, end = found.start, found.end
    return found


class Av1(NamedTuple):
    """Content of coded AV1 data: the size in pixels, and the number of frames, hidden ones included."""

    width: int
    height: int
    frames: int


def read_av1(data: bytes, parts: Parts) -> Av1:
    """Count the frames of AV1 data, and read the largest size that a sequence header gives them."""
    width = height = frames = at = 0
    while at < len(data):
        next(parts)
        head = data[at]
        kind, at = head >> 3 & 15, at + (2 if head & 4 else 1)
        size = len(data) - at
        if head & 2:
            size, at = _read_leb128(data, at)
        if kind == _SEQUENCE:
            parts.take(_SEQUENCE_PARTS)
            sides = _read_sequence(data[at : at + 64])
            width, height = max(width, sides[0]), max(height, sides[1])
        frames += kind in (_FRAME, _FRAME_HEADER, _REDUNDANT)
        at += size
    return Av1(width, height, frames)


def _read_leb128(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for number in range(8):
        byte = data[at]
        value, at = value | (byte & 127) << (7 * number), at + 1
        if byte < 128:
            break
    return value, at


class _Bits:
    """Reads bits from the front of some bytes."""

    def __init__(self, data: bytes) -> None:
        self._value, self._left = int.from_bytes(data, "big"), 8 * len(data)

    def take(self, count: int) -> int:
        self._left -= count
        if self._left < 0:
            raise ValueError("no bits left")
        return self._value >> self._left & ((1 << count) - 1)


def _read_sequence(data: bytes) -> tuple[int, int]:
    """Read the largest width and height of a sequence header (AV1 specification, 5.5.1)."""
    bits = _Bits(data)
    bits.take(4)
    if bits.take(1):  # of one still image
        bits.take(5)
    else:
        delay_bits = 0
        if bits.take(1):  # timing
            bits.take(64)
            if bits.take(1):
                zeros = next(count for count in range(32) if bits.take(1))
                bits.take(zeros)
            if bits.take(1):  # decoder model
                delay_bits = bits.take(5) + 1
                bits.take(42)
        delays = bits.take(1)
        for _ in range(bits.take(5) + 1):
            bits.take(12)
            if bits.take(5) > 7:
                bits.take(1)
            if delay_bits and bits.take(1):
                bits.take(2 * delay_bits + 1)
            if delays and bits.take(1):
                bits.take(4)
    across, down = bits.take(4) + 1, bits.take(4) + 1
    return bits.take(across) + 1, bits.take(down) + 1
