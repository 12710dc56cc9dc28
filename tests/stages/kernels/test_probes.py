"""Probes look where a few random rows do not: around each number of a config, far away, at small and large values."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trinity.stages.kernels.probes import (
    FAR_POSITIONS,
    ROW_SCALES,
    find_limits,
    is_close,
    list_positions,
    make_scaled_rows,
    place_rows,
)

CONFIG = SimpleNamespace(
    hidden_size=64,
    sliding_window=4_000,
    use_cache=True,
    rope_parameters={"full": {"original_max_position_embeddings": 16_384, "factor": 8.0, "beta": 0.1}},
    name="7",
    vocab_size=1 << 40,
)


def test_positions_lie_around_every_whole_number() -> None:
    found = list_positions(CONFIG)
    assert found == sorted(set(found))
    assert found[:5] == [0, 1, 2, 3, 4]
    assert set(FAR_POSITIONS) <= set(found)
    for number in (8, 64, 4_000, 16_384):
        assert {number - 1, number, number + 1} <= set(found)
    assert max(found) < 1 << 24, "positions of a model, not sizes of its parts"


def test_limits_are_what_names_call_so() -> None:
    assert find_limits(CONFIG) == {4_000, 16_384, 8}


def test_every_position_comes_once_at_size_one_and_every_size_a_few_times() -> None:
    positions, scales = place_rows(CONFIG)
    assert positions.shape == scales.shape
    assert positions[scales == 1].tolist() == list_positions(CONFIG)
    for scale in ROW_SCALES[1:]:
        assert int((scales == scale).sum()) == 3
    assert len(scales) < 100, "a large model's layers are probed one by one"


def test_rows_are_of_every_size() -> None:
    rows = make_scaled_rows(256, torch.float32)
    sizes = rows[0].pow(2).mean(-1).sqrt()
    for index, scale in enumerate(ROW_SCALES):
        assert sizes[5 * index : 5 * index + 5].tolist() == pytest.approx([scale] * 5, rel=0.3)


def test_each_row_is_compared_by_itself() -> None:
    wanted = torch.tensor([[1e3, 1.0], [1e-3, 1e-4]])
    assert is_close(wanted, wanted, 1e-5)
    small = wanted.clone()
    small[1, 1] *= 1.1
    assert not is_close(small, wanted, 1e-5), "a hundredth of its own row, a hundred-millionth of the largest"
    assert is_close(small, wanted, 0.02)
    assert not is_close(small[:1], wanted, 1.0)
    assert not is_close(wanted.double(), wanted, 1.0)
    assert not is_close((wanted,), wanted, 1.0)
    assert not is_close(wanted / 0, wanted / 0, 1.0), "what overflows shows nothing"
