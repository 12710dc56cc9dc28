"""Numbers of a processor's files that no model has: a typed error before memory is made, and none for real ones."""

from __future__ import annotations

import json
import math
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from trinity.errors import ConfigError
from trinity.preprocess.checkpoint.processor_values import check_processor_values
from trinity.preprocess.processor import RequestProcessor

FILE = "preprocessor_config.json"
MOST_MEMORY = 1 << 28  # bytes that a refusal may cost
WRONG = [-1, math.nan, math.inf, True, "many", 10**12, [math.nan]]
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2-audio": {
        **{"chunk_length": 30, "feature_size": 128, "hop_length": 160, "n_fft": 400, "n_samples": 480000},
        **{"nb_max_frames": 3000, "padding_value": 0.0, "sampling_rate": 16000},
    },
    "qwen2.5-omni": {
        **{"chunk_length": 300, "feature_size": 128, "hop_length": 160, "n_fft": 400, "n_samples": 4800000},
        **{"max_pixels": 12845056, "min_pixels": 3136, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
        **{"nb_max_frames": 30000, "sampling_rate": 16000},
    },
    "an encoder of raw sound": {"feature_size": 1, "sampling_rate": 24000, "chunk_length_s": None, "overlap": None},
    "music": {"n_fft": 16384, "hop_length": 4096, "sampling_rate": 32000, "chunk_length": 30},
    "milliseconds": {"hop_length": 16, "win_length": 64, "num_mel_bins": 80, "sampling_rate": 16000},
    "areas as edges": {"size": {"longest_edge": 100352000, "shortest_edge": 3136}, "patch_size": 14},
    "no bound": {"max_pixels": None, "min_pixels": None, "size": {"height": None}, "crop_size": 384},
    "any number of pixels": {"max_pixels": 10**15, "size": {"longest_edge": 2**31}},
    "patches of two edges": {"patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 1024}},
    "sizes as lists": {"size": [384, 384], "image_grid_pinpoints": [[336, 672]], "patch_size": [14, 14]},
}


def change(folder: Path, model: str, file: str, fields: dict[str, Any]) -> Path:
    directory = Path(shutil.copytree(checkpoint(model), folder / "copy"))
    held = json.loads((directory / file).read_text()) if (directory / file).exists() else {}
    (directory / file).write_text(json.dumps({**held, **fields}))
    return directory


def refuse(directory: Path, said: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match=said):
        RequestProcessor(directory)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_MEMORY


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Import what a processor needs, which is no cost of a refusal."""
    RequestProcessor(checkpoint("qwen2_audio"))


@pytest.mark.parametrize("value", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["sampling_rate", "n_fft", "hop_length", "feature_size", "chunk_length"])
def test_a_number_of_sounds_that_is_none(name: str, value: Any, tmp_path: Path) -> None:
    directory = change(tmp_path, "qwen2_audio", FILE, {name: value})
    refuse(directory, f"{FILE}': {name} is a number from .*got .*; mend it")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"feature_size": 0}, "feature_size is a number from 1"),
        ({"hop_length": 0}, "hop_length is a number from 1"),
        ({"n_fft": 10**9}, "n_fft is a number from 1 to 65,536"),
        ({"sampling_rate": 1}, "sampling_rate is a number from 1,000"),
        ({"chunk_length": 30_000}, "chunk_length times sampling_rate, to which clips are padded, is at most"),
        ({"hop_length": 1, "n_fft": 400}, "hop_length is at least 1/64 of n_fft, 400, got 1"),
        ({"feature_size": 3}, "feature_size is 3, and audio_config.num_mel_bins of config.json 16.*its own files"),
    ],
    ids=str,
)
def test_numbers_that_cost_memory_or_fit_no_tower(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    refuse(change(tmp_path, "qwen2_audio", FILE, fields), said)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "processor_config.json"])
@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_sizes_of_images_that_are_none(value: Any, file: str, tmp_path: Path) -> None:
    size = {"size": {"height": value, "width": 56}}
    if file.startswith("processor"):
        size = {"image_processor": size}
    refuse(change(tmp_path, "llava", file, size), "size.height is a number from 0 to")


@pytest.mark.parametrize("name", ["patch_size", "merge_size", "temporal_patch_size"])
def test_patches_of_no_size(name: str, tmp_path: Path) -> None:
    refuse(change(tmp_path, "qwen2_vl", FILE, {name: 0}), f"{name} is a number from 1")


@pytest.mark.parametrize("fields", PUBLISHED.values(), ids=PUBLISHED)
def test_numbers_of_published_models_are_within(fields: dict[str, Any], tmp_path: Path) -> None:
    for file, held in ((FILE, fields), ("processor_config.json", {"feature_extractor": fields})):
        (tmp_path / file).write_text(json.dumps(held))
    check_processor_values(tmp_path)
