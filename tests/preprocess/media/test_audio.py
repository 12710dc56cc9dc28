"""Clips are read as transformers' ``load_audio`` reads them, and what they would cost is refused by their size."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import wave
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from support.sounds import RATE, clip, encoded
from trinity.preprocess.media.audio import audio_digest, make_plain_audio, read_audio
from trinity.preprocess.media_limits import MediaLimits, MediaProblem

DEFAULT = MediaLimits()
STEREO = np.stack([clip(1), clip(2)])


def as_transformers(data: bytes, rate: int = RATE) -> np.ndarray:
    from transformers.audio_utils import load_audio

    return load_audio(base64.b64encode(data).decode(), sampling_rate=rate, backend="soundfile")


@pytest.mark.parametrize("form", ["WAV", "FLAC"])
@pytest.mark.parametrize("given", [8000, 16000, 22050, 44100, 48000])
@pytest.mark.parametrize("channels", [1, 2])
def test_files_are_read_to_the_bit_as_by_transformers(form: str, given: int, channels: int) -> None:
    samples = np.stack([clip(seed, 0.31, given) for seed in range(channels)])
    data = encoded(samples, given, form)
    found, wanted = read_audio(data, RATE, DEFAULT), as_transformers(data)
    assert found.dtype == np.float32
    assert np.array_equal(found, wanted)
    assert np.array_equal(read_audio(data, 24000, DEFAULT), as_transformers(data, 24000))


def test_long_files_are_decoded_in_blocks_without_a_seam() -> None:
    data = encoded(np.stack([clip(3, 9.0), clip(4, 9.0)]), RATE, "FLAC")  # more than two blocks
    assert np.array_equal(read_audio(data, RATE, DEFAULT), as_transformers(data))


def test_all_sources_of_one_clip_are_equal(tmp_path: Path) -> None:
    data = encoded(clip(1))
    path = tmp_path / "clip.wav"
    path.write_bytes(data)
    exact = read_audio(data, RATE, DEFAULT)
    uri = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    sources: list[Any] = [path, str(path), bytearray(data), memoryview(data), uri, exact, exact.astype(np.float64)]
    sources += [
        exact[None],
        torch.from_numpy(exact),
        {"array": exact, "sampling_rate": RATE},
        encoded(exact, form="FLAC"),
    ]
    for source in sources:
        assert audio_digest(read_audio(source, RATE, DEFAULT)) == audio_digest(exact), repr(source)[:60]
        sent = (
            msgspec.structs.replace(plain)
            if isinstance(plain := make_plain_audio(source, DEFAULT), msgspec.Struct)
            else plain
        )
        assert np.array_equal(read_audio(sent, RATE, DEFAULT), exact)
    assert audio_digest(exact[:-1]) != audio_digest(exact)


def test_arrays_are_mixed_and_resampled_as_files_are() -> None:
    loud = {"array": STEREO, "sampling_rate": 44100}
    data = encoded(STEREO, 44100, subtype="FLOAT")
    assert np.array_equal(read_audio(loud, RATE, DEFAULT), as_transformers(data))
    assert np.array_equal(read_audio(torch.from_numpy(STEREO), RATE, DEFAULT), STEREO.mean(axis=0))


def test_an_array_at_the_models_rate_needs_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("trinity.preprocess.media.audio.import_module", gone)
    assert np.array_equal(read_audio(clip(1), RATE, DEFAULT), clip(1))
    for source, library in ((encoded(clip(1)), "soundfile"), ({"array": clip(1), "sampling_rate": 8000}, "soxr")):
        with pytest.raises(MediaProblem, match=rf"needs {library}, .*\[audio\]"):
            read_audio(source, RATE, DEFAULT)


# ---------------------------------------------------------------- what is refused


def header(frames: int = 10, channels: int = 1, rate: int = RATE, body: bytes = b"") -> bytes:
    """A wav file of 16 bits that says what it likes."""
    size = min(frames * channels * 2, (1 << 32) - 64)
    form = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, (rate * channels * 2) & 0xFFFFFFFF, channels * 2, 16
    )
    return b"RIFF" + struct.pack("<I", size + 36) + b"WAVE" + form + b"data" + struct.pack("<I", size) + body


def flac_bomb(seconds: int) -> bytes:
    """Silence: a few bytes for every 4096 samples."""
    return encoded(np.zeros(seconds * RATE, dtype=np.float32), form="FLAC")


REFUSED: dict[str, tuple[Any, str]] = {
    "empty": (b"", "is empty"),
    "noise": (b"\0\1\2\3" * 100, "is no wav and no flac file"),
    "an image": (b"\x89PNG\r\n\x1a\n" + bytes(100), "is no wav and no flac file"),
    "an avi": (b"RIFF\0\0\0\0AVI " + bytes(100), "is no wav and no flac file"),
    "half a header": (header()[:20], "cannot be read"),
    "no samples": (encoded(np.zeros(0, dtype=np.float32)), "has no samples"),
    "1,000 channels": (header(100, 1000, body=bytes(200_000)), "channels"),
    "a thousand seconds": (flac_bomb(100), "has 1600000 samples on each of 1 channels; the limit max_audio_samples"),
    "a rate of one": (header(100, rate=1, body=bytes(200)), "has 1 samples per second; the limit max_sampling_rate"),
    "a rate of gigahertz": (header(100, rate=2_000_000_000, body=bytes(200)), "max_sampling_rate"),
    "nan": (encoded(np.full(100, np.nan, dtype=np.float32), subtype="FLOAT"), "no numbers"),
    "inf": (encoded(np.full(100, np.inf, dtype=np.float32), subtype="FLOAT"), "no numbers"),
    "an array of nan": (np.full(100, np.nan, dtype=np.float32), "no numbers"),
    "an array beyond float32": (np.full(100, 1e300), "no numbers"),
    "an array of ints": (np.zeros(100, dtype=np.int16), "int16: give floats"),
    "an array of none": (np.zeros(0, dtype=np.float32), "has no samples"),
    "an array of channels last": (np.zeros((100, 2), dtype=np.float32), "has 100 channels"),
    "an array of no channels": (np.zeros((0, 100), dtype=np.float32), "has 0 channels"),
    "an array of three axes": (np.zeros((1, 1, 100), dtype=np.float32), "of shape"),
    "a scalar": (np.float32(1.0), "of shape"),
    "a long array": (np.zeros(RATE * 61, dtype=np.float32)[None], "max_audio_samples"),
    "a rate of text": ({"array": clip(1), "sampling_rate": "16000"}, "sampling_rate that is no whole number"),
    "a rate of True": ({"array": clip(1), "sampling_rate": True}, "sampling_rate that is no whole number"),
    "a rate of nothing": ({"array": clip(1), "sampling_rate": 0}, "max_sampling_rate"),
    "a mapping": ({"array": clip(1)}, "is a dict"),
    "nothing": (None, "is a NoneType"),
    "a list": ([0.0, 1.0], "is a list"),
    "many bytes": (b"RIFF" + bytes(3 << 20), "max_audio_bytes is 2097152"),
    "a URL": ("https://example.org/a.wav", "is a URL"),
    "no file": ("/nowhere/clip.wav", "there is no file"),
    "a broken URI": ("data:audio/wav;base64,!!!", "base64 is broken"),
}
SMALL = MediaLimits(max_audio_s=60, max_audio_samples=RATE * 60, max_audio_bytes=2 << 20)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_clips_are_refused_with_the_reason(name: str) -> None:
    source, problem = REFUSED[name]
    with pytest.raises(MediaProblem, match=problem):
        read_audio(source, RATE, SMALL)


@pytest.mark.parametrize("frames", [1 << 31, 1 << 20])
def test_a_header_that_lies_costs_nothing(frames: int) -> None:
    """It says gigabytes, and has a few samples: nothing is made of what it says."""
    data = header(frames, body=bytes(2000))
    tracemalloc.start()
    try:
        assert len(read_audio(data, RATE, DEFAULT)) == 1000  # libsndfile knows the file's own size
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_flac_that_expands_is_refused_before_it_is_decoded() -> None:
    data = flac_bomb(1800)
    assert len(data) * 500 < 1800 * RATE * 2
    tracemalloc.start()
    try:
        with pytest.raises(MediaProblem, match=r"max_audio_s is 60|max_audio_samples"):
            read_audio(data, RATE, SMALL)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_flac_gives_no_more_than_it_says() -> None:
    """Its header's count of samples is 36 bits behind the rate: whoever sets it low would get past the limits."""
    data = bytearray(flac_bomb(2))
    data[21:26] = bytes([data[21] & 0xF0, 0, 0, 0, 100])
    found = read_audio(bytes(data), RATE, SMALL)
    assert len(found) == 100
    assert np.array_equal(found, as_transformers(bytes(data)))


def test_a_flac_that_ends_early_is_refused() -> None:
    data = encoded(clip(1, 3.0), form="FLAC")
    with pytest.raises(MediaProblem, match=r"says that it has 48000 samples, and has|cannot be read"):
        read_audio(data[: len(data) // 2], RATE, DEFAULT)


def test_a_clip_longer_than_the_limit_is_refused_by_its_seconds() -> None:
    limits = MediaLimits(max_audio_s=1.5)
    assert len(read_audio(clip(1, 1.5), RATE, limits)) == 1.5 * RATE
    for source in (encoded(clip(1, 1.6)), {"array": clip(1, 1.6, 8000), "sampling_rate": 8000}):
        with pytest.raises(MediaProblem, match=r"is 1.6 s long; the limit max_audio_s is 1.5"):
            read_audio(source, RATE, limits)


def test_the_check_comes_before_a_sample_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    import soundfile  # type: ignore[import-untyped, import-not-found, unused-ignore]

    monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("a sample was decoded"))

    def refuse(samples: int) -> None:
        assert samples == 3 * RATE
        raise MediaProblem("too many")

    for source in (encoded(clip(1, 3.0, 8000), 8000), {"array": clip(1, 3.0, 8000), "sampling_rate": 8000}):
        with pytest.raises(MediaProblem, match="too many"):
            read_audio(source, RATE, DEFAULT, refuse)


def test_wave_of_the_standard_library_is_read_too() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((clip(1) * 32767).astype("<i2").tobytes())
    assert np.array_equal(read_audio(file.getvalue(), RATE, DEFAULT), as_transformers(file.getvalue()))
