"""Checks numbers in the files of a checkpoint's processor, by their names, before transformers makes memory of them.

A clip is padded to a length that a file says, and windows of a spectrum are as long as it says. Bounds lie far beyond
all published values: a number within them may still be wrong, but costs little to find out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError
from trinity.errors.arguments import show
from trinity.preprocess.checkpoint.config_file import read_json

_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_EDGE, _WINDOW, _BINS, _SECONDS = (0, 1 << 20), (1, 1 << 16), (1, 1 << 12), (0, 36_000)
_PIXELS = (-1, 1 << 63)  # some call whole areas edges, and say "no bound" by a large number
_BOUNDS: dict[str, tuple[int, int]] = {
    "sampling_rate": (1_000, 1_000_000),
    "feature_size": _BINS,
    "num_mel_bins": _BINS,
    "n_mels": _BINS,
    "n_fft": _WINDOW,
    "fft_length": _WINDOW,
    "fft_window_size": _WINDOW,
    "win_length": _WINDOW,
    "frame_length": _WINDOW,
    "hop_length": (1, 1 << 20),
    "chunk_length": _SECONDS,
    "chunk_length_s": _SECONDS,
    "max_length_s": _SECONDS,
    "n_samples": (1, 1 << 30),
    "nb_max_frames": (1, 1 << 30),
    "height": _EDGE,
    "width": _EDGE,
    "patch_size": _WINDOW,
    "temporal_patch_size": _WINDOW,
    "merge_size": _WINDOW,
    "shortest_edge": _PIXELS,
    "longest_edge": _PIXELS,
    "min_pixels": _PIXELS,
    "max_pixels": _PIXELS,
}
_MOST_PADDED = 1 << 25  # samples to which a clip is padded: half an hour at 16 kHz
_MOST_OVERLAP = 64  # windows of a spectrum in which one sample is: 3 in published ones


def check_processor_values(model_dir: Path) -> None:
    """Raise ``ConfigError`` for a number of sounds or pixels that no model has: NaN, a text, a rate of terahertz."""
    for file in _FILES:
        for place, fields in _list_objects(read_json(model_dir / file)):
            for name, value in fields.items():
                if name in _BOUNDS and not _is_within(value, *_BOUNDS[name]):
                    least, most = _BOUNDS[name]
                    raise _refuse(model_dir / file, f"{place}{name} is a number from {least:,} to {most:,}", value)
            _check_clip(model_dir / file, place, fields)


def _check_clip(path: Path, place: str, fields: dict[str, Any]) -> None:
    """Check what a clip costs: numbers that are possible alone may not be so together."""
    seconds, rate = (_number(fields.get(name)) for name in ("chunk_length", "sampling_rate"))
    if seconds * rate > _MOST_PADDED:
        said = (
            f"{place}chunk_length times sampling_rate, to which clips are padded, is at most {_MOST_PADDED:,} samples"
        )
        raise _refuse(path, said, seconds * rate)
    window, hop = (_number(fields.get(name)) for name in ("n_fft", "hop_length"))
    if hop and window > _MOST_OVERLAP * hop:
        raise _refuse(path, f"{place}hop_length is at least 1/{_MOST_OVERLAP} of n_fft, {window:,}", hop)


def _refuse(path: Path, said: str, value: Any) -> ConfigError:
    return ConfigError(f"{str(path)!r}: {said}, got {show(value)}; mend it, or take the file of the published model")


def _list_objects(fields: dict[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield place, fields
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _list_objects(value, f"{place}{name}.")


def _is_within(value: Any, least: int, most: int) -> bool:
    """Tell if numbers are in bounds. None leaves it to the class; lists have one for each edge, objects their own."""
    if isinstance(value, list):
        return all(_is_within(each, least, most) for each in value)
    return value is None or isinstance(value, dict) or (type(value) in (int, float) and least <= value <= most)


def _number(value: Any) -> float:
    return value if type(value) in (int, float) else 0
