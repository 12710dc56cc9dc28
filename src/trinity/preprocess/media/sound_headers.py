"""Headers of sound files: the table of accepted formats and codecs, with what a sample of each costs to decode."""

from __future__ import annotations

import struct
from typing import NamedTuple

from trinity.preprocess.media.file_parts import UNREADABLE, Parts
from trinity.preprocess.media_limits import MediaProblem

_BYTE_NS = 1.0  # a byte that is read and looked through
_WAV_CODECS = {  # by format tag: name, nanoseconds a sample
    1: ("PCM", 3.0),
    2: ("Microsoft ADPCM", 20.0),
    3: ("PCM of floats", 3.0),
    6: ("A-law", 4.0),
    7: ("mu-law", 4.0),
    17: ("IMA ADPCM", 20.0),
    49: ("GSM 6.10", 40.0),
}
_EXTENSIBLE = 0xFFFE  # the tag stands in the extension
_FLAC_NS, _FLAC_FRAME_NS, _FLAC_BYTE_NS = 12.0, 1500.0, 6.0
_LEAST_FRAME = 10  # bytes of a FLAC frame
_OTHERS = (
    (b"OggS", "an Ogg file"),
    (b"ID3", "an MP3 file"),
    (b"\xff\xfb", "an MP3 file"),
    (b"\xff\xf3", "an MP3 file"),
    (b"\xff\xf1", "an AAC file"),
    (b"FORM", "an AIFF file"),
    (b".snd", "an AU file"),
    (b"caff", "a CAF file"),
    (b"riff", "a W64 file"),
    (b"RIFX", "a WAV file of the other byte order"),
)


class Sound(NamedTuple):
    """Header of a sound file: its codec, samples on each channel and a second, and nanoseconds of decoding."""

    codec: str
    samples: int
    channels: int
    rate: int
    nanoseconds: float


def read_sound(data: bytes) -> Sound:
    """Read a wav or flac file's header. Raises ``MediaProblem`` for other formats and codecs, and a broken header."""
    if not data:
        raise MediaProblem("is empty (0 bytes)")
    try:
        if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
            return _read_wav(data)
        if data.startswith(b"fLaC"):
            return _read_flac(data)
    except UNREADABLE as exc:
        raise MediaProblem("has a header that cannot be read; is it truncated or corrupt?") from exc
    named = next((name for magic, name in _OTHERS if data.startswith(magic)), "")
    raise MediaProblem(f"is {named}, and no wav and no flac file" if named else "is no wav and no flac file")


def _read_wav(data: bytes) -> Sound:
    at, large, form = 12, 0, b""
    for _ in Parts(what="chunks"):
        name, size = struct.unpack_from("<4sL", data, at)
        body = at + 8
        if name == b"ds64":
            large = struct.unpack_from("<Q", data, body + 8)[0]
        elif name == b"fmt ":
            form = data[body : body + min(size, 64)]
        elif name == b"data":
            break
        at = body + size + (size & 1)
    tag, channels, rate, _, block, bits = struct.unpack_from("<HHLLHH", form)
    if tag == _EXTENSIBLE:
        tag = struct.unpack_from("<H", form, 24)[0]
    if tag not in _WAV_CODECS:
        raise MediaProblem(f"is a wav file of codec {tag:#06x}, which is not accepted; save it as PCM")
    codec, each = _WAV_CODECS[tag]
    held = min(large if size == 0xFFFFFFFF and large else size, len(data) - body)
    if tag in (1, 3, 6, 7):
        own = max(1, channels) * (1 if tag in (6, 7) else max(1, (bits + 7) // 8))  # which libsndfile counts by
        samples = held // max(1, min(block, own))
    else:  # a block of so many samples
        inside = struct.unpack_from("<H", form, 18)[0] if len(form) >= 20 else 2 * block
        samples = -(-held // max(1, block)) * inside
    nanoseconds = each * samples * max(1, channels) + _BYTE_NS * len(data)
    return Sound(f"wav file ({codec}, {bits} bits)", samples, channels, rate, nanoseconds)


def _read_flac(data: bytes) -> Sound:
    """Read the first metadata block of a FLAC. Samples that it does not count it has none of."""
    packed = int.from_bytes(data[18:26], "big")
    least_block = max(16, int.from_bytes(data[8:10], "big"))
    rate, channels, samples = packed >> 44, (packed >> 41 & 7) + 1, packed & ((1 << 36) - 1)
    frames = min(samples // least_block + 1, len(data) // _LEAST_FRAME)
    nanoseconds = _FLAC_NS * samples * channels + _FLAC_FRAME_NS * frames + (_FLAC_BYTE_NS + _BYTE_NS) * len(data)
    return Sound("flac file", samples, channels, rate, nanoseconds)
