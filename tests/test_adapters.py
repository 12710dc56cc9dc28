"""Every architecture, split into stages, against ``generate()`` of the whole model: tokens and logits."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from stage_driver import OUTPUTS, Driver, Served, generated, processed
from trinity.testing.checkpoints import ARCHITECTURES

TEXT_ONLY = ("llama", "mistral")
MULTIMODAL = tuple(name for name in ARCHITECTURES if name not in TEXT_ONLY)


def counts(name: str) -> tuple[int, ...]:
    return (0,) if name in TEXT_ONLY else (0, 1, 3)


@cache
def served(name: str, split: bool) -> dict[str, Served]:
    """Text only, one image and three images, all in the same batches."""
    driver = Driver(name, split=split)
    driver.add(*(processed(name, count) for count in counts(name)))
    return driver.run()


def _cases() -> list[tuple[str, int]]:
    return [(name, count) for name in ARCHITECTURES for count in counts(name)]


@pytest.mark.parametrize(("name", "count"), _cases())
@pytest.mark.parametrize("split", [True, False], ids=["E+P+D", "EPD"])
def test_equals_generate(name: str, count: int, split: bool) -> None:
    expected, found = generated(name, count), served(name, split)[f"{count} images"]
    logits = torch.stack([found.logits[index] for index in range(OUTPUTS)])
    assert found.tokens == expected.ids
    assert (logits - expected.logits).abs().max() < 1e-4
    assert len(set(found.tokens)) >= 8, "the oracle must not be a model that repeats itself"
