"""Reads a clip from a path, bytes, a data: URI or an array, as transformers' ``load_audio`` does by soundfile and soxr.

What a header says is held against the limits before a sample is decoded, and what is decoded against the header.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from trinity.errors import describe_error, pip_install
from trinity.errors.plain_values import is_address
from trinity.preprocess.fetch.media_sources import check_bytes, read_data_uri, read_file
from trinity.preprocess.media.sound_headers import Sound, read_sound
from trinity.preprocess.media_limits import MediaLimits, MediaProblem, Price, TooManyTokens

BYTES_LIMIT = "max_audio_bytes"
LEAST_RATE = 1000  # samples per second; below there is no sound, and a clip would grow as it is resampled
_LOUDEST = 2.0**31  # integers of 32 bits as floats: far louder clips make features and logits that are no numbers
_BLOCK = 1 << 16  # frames that are decoded at a time
_QUALITY = "soxr_hq"  # as transformers and librosa resample
_GIVEN = (
    "give a path or bytes of a wav or flac file, a data: URI, an array of floats [samples] or [channels, samples] at "
    'the model\'s own rate, or {"array": ..., "sampling_rate": ...}'
)
_RESAMPLED_NS = 15.0  # of a sample, of the longer side


class Waveform(msgspec.Struct, frozen=True):
    """Samples of an array that was given, of floats [channels, samples], ``rate`` of them each second; 0: unknown."""

    samples: np.ndarray
    rate: int = 0


def read_audio(
    source: Any, rate: int, limits: MediaLimits, check: Callable[[int], None] = lambda _: None
) -> np.ndarray:
    """Read one clip: float32 [samples], its channels averaged, ``rate`` samples per second.

    - ``source``: a path, bytes or a data: URI of a wav or flac file; an array or tensor of floats [samples] or
      [channels, samples], which has the model's rate unless it is given as {"array": ..., "sampling_rate": ...}.
    - ``limits``: what may be read.
    - ``check`` (anything goes): called with the number of samples before one is decoded; what it raises is passed on.

    Raises ``MediaProblem``.
    """
    plain = _guard(_read_plain, source, limits)
    if isinstance(plain, Waveform):
        found, given = plain.samples, plain.rate or rate
        _check_length(found.shape[1], found.shape[0], given, limits)
        check(_count_after(found.shape[1], given, rate))
        mono = np.ascontiguousarray(_mix(found))
    else:
        mono, given = _guard(lambda data, _: _decode(data, rate, limits, check), plain, limits)
    loudest = float(np.abs(mono).max(initial=0.0))  # NaN if one is
    if not math.isfinite(loudest):
        raise MediaProblem("has samples that are no numbers (NaN or infinite)")
    if loudest > _LOUDEST:
        raise MediaProblem(f"has a sample of {loudest:.3g}; give floats between -1 and 1")
    return mono if given == rate else _resample(mono, given, rate)


class SoundPrice(NamedTuple):
    """Price of reading a clip, and its samples at the model's rate."""

    samples: int
    price: Price


def price_sound(source: Any, rate: int, limits: MediaLimits) -> SoundPrice:
    """Price a clip that ``read_audio`` reads, by its header, without decoding it. Raises ``MediaProblem``."""
    priced: SoundPrice = _guard(lambda given, _: _price_plain(given, rate, limits), source, limits)
    return priced


def _price_plain(source: Any, rate: int, limits: MediaLimits) -> SoundPrice:
    plain = _simplify(source, limits)
    if isinstance(plain, str) and is_address(plain):
        return SoundPrice(0, Price(0.0))
    if isinstance(plain, Waveform):
        found = Sound("sound", plain.samples.shape[1], plain.samples.shape[0], plain.rate or rate, 0.0)
        size = plain.samples.nbytes
    else:
        data = read_file(plain, limits, BYTES_LIMIT) if isinstance(plain, (str, Path)) else plain
        found, size = read_sound(data), len(data)
        _check_rate(found.rate, limits)
    _check_length(found.samples, found.channels, found.rate, limits)
    after = _count_after(found.samples, found.rate, rate)
    changed = _RESAMPLED_NS * max(after, found.samples) if found.rate != rate else 0.0
    held = size + 4 * (_BLOCK * found.channels + 3 * found.samples + 3 * after)
    what = f"is a {found.codec} of {found.samples} samples on {found.channels} channels"
    return SoundPrice(after, Price.of(found.nanoseconds + changed, held, 0, what, "give a shorter clip"))


def make_plain_audio(source: Any, limits: MediaLimits) -> Any:
    """Turn a source into a path, bytes or a ``Waveform``, for another process. Raises ``MediaProblem``."""
    return _guard(_simplify, source, limits)


def audio_digest(samples: np.ndarray) -> str:
    """Hash the samples, so that equal ones from any file or array have equal digests."""
    return hashlib.blake2b(f"{samples.dtype} {samples.shape} ".encode() + samples.tobytes(), digest_size=16).hexdigest()


def _guard(read: Callable[[Any, MediaLimits], Any], source: Any, limits: MediaLimits) -> Any:
    try:
        return read(source, limits)
    except (MediaProblem, TooManyTokens):
        raise
    except Exception as exc:  # an object of somebody's own may raise anything, and so may a decoder
        raise MediaProblem(f"cannot be read ({describe_error(exc, 200)}); {_GIVEN}") from exc


def _read_plain(source: Any, limits: MediaLimits) -> bytes | Waveform:
    plain = _simplify(source, limits)
    if isinstance(plain, str) and is_address(plain):
        raise MediaProblem("is a URL: where allow_urls or allowed_hosts allow it, a request's are fetched before")
    return read_file(plain, limits, BYTES_LIMIT) if isinstance(plain, (str, Path)) else plain


def _simplify(source: Any, limits: MediaLimits) -> bytes | str | Path | Waveform:
    if isinstance(source, (MediaProblem, TooManyTokens)):  # found by the process that sent the request
        raise source
    if isinstance(source, Waveform):
        return source
    if isinstance(source, (bytes, bytearray, memoryview)):
        check_bytes(memoryview(source).nbytes, limits, BYTES_LIMIT)
        return bytes(source)
    if isinstance(source, str):
        text = str.__str__(source)
        return read_data_uri(text, limits, BYTES_LIMIT) if text[:5].lower() == "data:" else text
    if isinstance(source, os.PathLike):
        return Path(os.fsdecode(os.fspath(source)))
    if isinstance(source, Mapping) and {"array", "sampling_rate"} <= set(source):
        return _from_array(source["array"], _plain_rate(source["sampling_rate"], limits), limits)
    return _from_array(source, 0, limits)


def _plain_rate(rate: Any, limits: MediaLimits) -> int:
    if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)):
        raise MediaProblem(f"has a sampling_rate that is no whole number but a {type(rate).__name__}")
    _check_rate(int(rate), limits)
    return int(rate)


def _from_array(source: Any, rate: int, limits: MediaLimits) -> Waveform:
    torch: Any = sys.modules.get("torch")  # where nobody has imported it, this is none of its tensors
    if not hasattr(source, "ndim") or not hasattr(source, "shape"):
        raise MediaProblem(f"is a {type(source).__name__}; {_GIVEN}")
    shape = [int(each) for each in source.shape]
    if len(shape) not in (1, 2):
        raise MediaProblem(f"is an array of shape {shape}; {_GIVEN}")
    _check_length(shape[-1], 1 if len(shape) == 1 else shape[0], rate, limits)
    if torch is not None and isinstance(source, torch.Tensor):
        source = source.detach().cpu().float().numpy() if source.is_floating_point() else source.cpu().numpy()
    array = np.asarray(source)
    if array.dtype.kind != "f":
        raise MediaProblem(f"is an array of {array.dtype}: give floats from -1 to 1, of int16 the values / 32768")
    with np.errstate(over="ignore"):  # what is beyond float32 becomes infinite, and is refused as such
        return Waveform(np.ascontiguousarray(np.atleast_2d(array), dtype=np.float32), rate)


def _check_rate(rate: int, limits: MediaLimits) -> None:
    if not LEAST_RATE <= rate <= limits.max_sampling_rate:
        raise MediaProblem(
            f"has {rate} samples per second; the limit max_sampling_rate allows {LEAST_RATE} to "
            f"{limits.max_sampling_rate}"
        )


def _check_length(samples: int, channels: int, rate: int, limits: MediaLimits) -> None:
    """Refuse a clip by its size alone; ``rate`` 0: it is not known yet."""
    if not 1 <= channels <= limits.max_audio_channels:
        raise MediaProblem(
            f"has {channels} channels; the limit max_audio_channels allows 1 to {limits.max_audio_channels} (an array "
            "is [channels, samples])"
        )
    if samples < 1:
        raise MediaProblem("has no samples")
    if samples * channels > limits.max_audio_samples:
        raise MediaProblem(
            f"has {samples} samples on each of {channels} channels; the limit max_audio_samples allows "
            f"{limits.max_audio_samples} in all"
        )
    if rate and samples > limits.max_audio_s * rate:
        raise MediaProblem(f"is {samples / rate:.1f} s long; the limit max_audio_s is {limits.max_audio_s:g}")


def _decode(data: bytes, rate: int, limits: MediaLimits, check: Callable[[int], None]) -> tuple[np.ndarray, int]:
    """Decode a file to float32 [samples], its channels averaged, and return its rate too."""
    read_sound(data)
    with _import("soundfile").SoundFile(io.BytesIO(data)) as file:
        given, said, channels = int(file.samplerate), int(file.frames), int(file.channels)
        _check_rate(given, limits)
        _check_length(said, channels, given, limits)
        check(_count_after(said, given, rate))
        blocks, held = [], 0
        while held <= said:
            block = file.read(min(_BLOCK, said + 1 - held), dtype="float32", always_2d=True)
            if not len(block):
                break
            blocks.append(_mix(block.T))
            held += len(block)
    if held != said:
        raise MediaProblem(f"says that it has {said} samples, and has {'more' if held > said else held}; is it broken?")
    return np.concatenate(blocks), given


def _mix(samples: np.ndarray) -> np.ndarray:
    """Average channels [channels, samples] to [samples]."""
    mixed: np.ndarray = samples.mean(axis=0) if len(samples) > 1 else samples[0]
    return mixed


def _count_after(samples: int, given: int, rate: int) -> int:
    return math.ceil(samples * rate / given)


def _resample(samples: np.ndarray, given: int, rate: int) -> np.ndarray:
    """Resample as transformers does: by soxr, then cut or padded to the length that the rates say."""
    count = _count_after(len(samples), given, rate)
    made = _import("soxr").resample(samples, given, rate, quality=_QUALITY)
    return np.ascontiguousarray(np.pad(made, (0, max(0, count - len(made))))[:count], dtype=np.float32)


def _import(name: str) -> Any:
    try:
        return import_module(name)
    except (ImportError, OSError) as error:  # OSError: libsndfile is not there
        raise MediaProblem(f"needs {name}, which is not installed here: {pip_install('audio')}") from error
