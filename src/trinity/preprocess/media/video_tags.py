"""Counts what FFmpeg looks through or moves once for each further one: tags, chapters and cues of a video file.

Its dictionaries are lists: 25,000 tags of 625 KiB took 72 CPU-seconds to read. Places of tags are found by their names
anywhere in a file, whatever it is in front: FFmpeg follows pointers, skips damage and nests, where a walk does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from trinity.preprocess.media.boxes import walk_boxes
from trinity.preprocess.media.file_parts import Parts

_MOST_TAGS, _MOST_CUES = 1_000, 20_000  # some 50 and 200 ms in FFmpeg, which reads them twice
_TAGS, _TAG, _SIMPLE = b"\x12\x54\xc3\x67", 0x7373, 0x67C8  # of Matroska
_CHAPTERS, _EDITION, _CHAPTER = b"\x10\x43\xa7\x70", 0x45B9, 0xB6
_CUES, _CUE, _POSITION = b"\x1c\x53\xbb\x6b", 0xBB, 0xB7
_SCRIPT = b"\2\0\x0aonMetaData"  # of an FLV
_COMMENTS = (b"\x81theora", b"\x03vorbis", b"OpusTags")
_AMF_BYTES = {0: 8, 1: 1, 11: 10}  # of values by type; further ones have their length in front, or none


def check_tags(data: bytes, parts: Parts) -> None:
    """Raise ``MediaProblem`` for a file with more tags, chapters or cues than cost little. ``parts``: its counter."""
    tags = _count_tags()
    cues = Parts(_MOST_CUES, "cues", "save it again")
    for name in (b"udta", b"ilst"):
        for at in _find_all(data, name, parts):
            size = int.from_bytes(data[max(0, at - 4) : at], "big")
            end = at - 4 + size if size >= 8 else len(data)
            for _ in walk_boxes(data, at + (12 if size == 1 else 4), min(end, len(data)), parts):
                next(tags)
    for at in _find_all(data, _TAGS, parts):
        _count_elements(data, at, (_TAG, _SIMPLE), _SIMPLE, tags, parts)
    for at in _find_all(data, _CHAPTERS, parts):
        _count_elements(data, at, (_EDITION, _CHAPTER), _CHAPTER, tags, parts)
    for at in _find_all(data, _CUES, parts):
        _count_elements(data, at, (_CUE,), _POSITION, cues, parts)
    for at in _find_all(data, b"INFO", parts):
        if data[at - 8 : at - 4] == b"LIST":
            _count_chunks(data, at, tags, parts)
    for at in _find_all(data, _SCRIPT, parts):
        _count_keys(data, at + len(_SCRIPT), tags, parts)


def _count_tags() -> Parts:
    return Parts(_MOST_TAGS, "tags and chapters", "save it without them")


def count_comments(stream: bytes, parts: Parts) -> None:
    """Raise ``MediaProblem`` for more comments in the headers of a stream of Ogg than cost little."""
    tags = _count_tags()
    for name in _COMMENTS:
        for at in _find_all(stream, name, parts):
            at += len(name)
            at += 4 + int.from_bytes(stream[at : at + 4], "little")
            tags.take(int.from_bytes(stream[at : at + 4], "little"))


def _find_all(data: bytes, name: bytes, parts: Parts) -> Iterator[int]:
    at = data.find(name)
    while at >= 0:
        next(parts)
        yield at
        at = data.find(name, at + 1)


def read_element(data: bytes, at: int) -> tuple[int, int, int]:
    """Read the id of an element of Matroska, where its content begins, and its size; -1: unknown."""
    first = data[at]
    length = 9 - first.bit_length() if first else 9
    if length > 4:
        raise ValueError("no element")
    name, at = int.from_bytes(data[at : at + length], "big"), at + length
    first = data[at]
    length = 9 - first.bit_length() if first else 9
    if length > 8:
        raise ValueError("no size")
    value = int.from_bytes(data[at : at + length], "big") & ((1 << 7 * length) - 1)
    return name, at + length, -1 if value == (1 << 7 * length) - 1 else value


def _count_elements(data: bytes, at: int, inside: Collection[int], counted: int, found: Parts, parts: Parts) -> None:
    """Count elements of one kind in the element at a place and in those ``inside`` of it, up to what is none."""
    try:
        _, at, size = read_element(data, at)
        end = at + size if size >= 0 else len(data)
        while at < min(end, len(data)):
            next(parts)
            name, at, size = read_element(data, at)
            found.take(name == counted)
            at += 0 if name in inside else max(0, size)
    except (IndexError, ValueError):
        pass


def _count_chunks(data: bytes, at: int, tags: Parts, parts: Parts) -> None:
    """Count the chunks of a list of RIFF, of which FFmpeg seeks one that is too long a byte before."""
    end = min(len(data), at + int.from_bytes(data[at - 4 : at], "little"))
    at, moved = at + 4, False
    while at + 7 < end:
        next(parts)
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if at + 8 + size <= end:
            next(tags)
            at, moved = at + 8 + size + (size & 1), False
        elif moved:
            break
        else:
            at, moved = at - 1, True


def _count_keys(data: bytes, at: int, tags: Parts, parts: Parts) -> None:
    """Count the keys of the objects in a value of AMF."""
    left = [1]  # values of each array that is read; -1: it is an object, whose values have keys
    while left and at < len(data):
        next(parts)
        if left[-1] == 0:
            left.pop()
            continue
        if left[-1] < 0:
            length = int.from_bytes(data[at : at + 2], "big")
            if data[at : at + 3] == b"\0\0\x09":
                at, _ = at + 3, left.pop()
                continue
            next(tags)
            at += 2 + length
        else:
            left[-1] -= 1
        kind, at = data[at] if at < len(data) else 5, at + 1
        if kind in (3, 8):
            left.append(-1)
            at += 4 if kind == 8 else 0
        elif kind == 10:
            left.append(int.from_bytes(data[at : at + 4], "big"))
            at += 4
        elif kind in (2, 12):
            wide = 2 if kind == 2 else 4
            at += wide + int.from_bytes(data[at : at + wide], "big")
        else:
            at += _AMF_BYTES.get(kind, 0)
