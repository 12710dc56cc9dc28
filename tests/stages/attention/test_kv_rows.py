"""One shape serves layers of several: heads are repeated and widths filled up, and what attends is what it was."""

from __future__ import annotations

import pytest
import torch

from trinity.errors import UnsupportedModel
from trinity.stages.attention.kv_rows import KvRow, LayerSurvey, find_kv_row, fit_rows


def survey(*layers: tuple[int, int, int, int]) -> LayerSurvey:
    """Each layer: its index, KV heads, width of a key and of a value; one query of eight heads."""
    found = LayerSurvey()
    for index, heads, key, value in layers:
        parts = [torch.zeros(1, count, 1, width) for count, width in ((8, key), (heads, key), (heads, value))]
        assert found.note(index, *parts).shape == (1, 1, 8, value)
    return found


def test_the_row_holds_what_the_widest_layer_has() -> None:
    assert find_kv_row(survey((0, 4, 16, 16), (1, 4, 16, 16)), 2, None) == KvRow(2, 4, 16)
    assert find_kv_row(survey((0, 2, 24, 16), (1, 4, 16, 16)), 2, None) == KvRow(2, 4, 24)
    assert find_kv_row(survey((0, 8, 24, 16)), 1, KvRow(1, 1, 32)) == KvRow(1, 1, 32)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (survey(), "does not go through transformers' attention interface"),
        (survey((0, 4, 16, 16), (1, 4, 16, 16), (0, 4, 16, 16)), "layer 0 attends several times"),
        (survey((2, 4, 16, 16)), "layer 2 attends, and its config says that there are 2"),
    ],
)
def test_layers_that_cannot_be_paged_are_named(found: LayerSurvey, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        find_kv_row(found, 2, None)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of each query head over its KV head, with a scale of its own."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    return (query @ key.transpose(2, 3)).softmax(-1) @ value


def test_fitted_rows_give_the_same_attention() -> None:
    noise = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 5, width, generator=noise) for heads, width in ((8, 24), (2, 24), (2, 12))
    )
    fitted = fit_rows(query, key, value, KvRow(2, 4, 32))
    assert fitted is not None
    assert [part.shape[1:] for part in fitted] == [(8, 5, 32), (4, 5, 32), (4, 5, 32)]
    assert torch.allclose(attend(*fitted)[..., :12], attend(query, key, value), atol=1e-6)
    assert not attend(*fitted)[..., 12:].any()


def test_rows_that_fit_are_left_alone_and_others_refused() -> None:
    query, key = torch.zeros(1, 8, 5, 16), torch.zeros(1, 4, 5, 16)
    fitted = fit_rows(query, key, key, KvRow(2, 4, 16))
    assert fitted is not None
    assert fitted[0] is query
    assert fitted[1] is key
    assert fit_rows(query, key, key, KvRow(2, 4, 8)) is None
    assert fit_rows(query, key, key, KvRow(2, 3, 16)) is None
    assert fit_rows(query, key, key, KvRow(2, 16, 16)) is None
