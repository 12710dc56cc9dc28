"""Every architecture, split into stages, against ``generate()`` of the whole model: tokens and logits."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from support.checkpoint_files import checkpoint
from support.stage_driver import OUTPUTS, Driver, Served, generated, picture, processed, processor_of
from support.thinned import FEW, rarely
from trinity.request import Request
from trinity.stages.models import load_model
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


@pytest.mark.parametrize(
    ("name", "count", "split"),
    [pytest.param(*case, split, marks=rarely(split or case[0] in FEW)) for case in _cases() for split in (True, False)],
)
def test_equals_generate(name: str, count: int, split: bool) -> None:
    expected, found = generated(name, count), served(name, split)[f"{count} images"]
    logits = torch.stack([found.logits[index] for index in range(OUTPUTS)])
    assert found.tokens == expected.ids
    assert (logits - expected.logits).abs().max() < 1e-4
    assert len(set(found.tokens)) >= 8, "the oracle must not be a model that repeats itself"


@pytest.mark.parametrize("name", MULTIMODAL)
def test_what_the_tokens_must_depend_on(name: str) -> None:
    """Controls: without them a model that ignores its image would pass all the rest."""
    shown = served(name, True)["1 images"].tokens
    assert generated(name, 1, seed=9).ids != shown
    assert _spoilt(name, "image") != shown
    assert _spoilt(name, "kv") != shown


def _spoilt(name: str, kind: str) -> list[int]:
    """Tokens of the one-image request with its migrated blocks of one kind zeroed."""
    driver = Driver(name)
    driver.add(made := processed(name, 1))
    if kind == "image":
        driver.image[1].memory.tensor.zero_()
    while not driver.served[made.work.request].tokens:
        driver.run_once()
    if kind == "kv":
        driver.kv[1].memory.tensor.zero_()
    return driver.run()[made.work.request].tokens


@pytest.mark.parametrize("name", MULTIMODAL)
def test_items_encoded_together_equal_items_encoded_alone(name: str) -> None:
    """Items of equal and of different shapes, in any order."""
    sizes = ((60, 80), (130, 90), (60, 80), (33, 120))
    images = [picture(seed, *size) for seed, size in enumerate(sizes)]
    made = processor_of(name).process(Request("<image>" * len(images), images=images))
    model = load_model(checkpoint(name), "E", dtype="float32")
    counts = [span.tokens for span in made.work.media]
    together = model.encode("image", made.inputs, counts)
    for item, count, rows in zip(made.inputs, counts, together, strict=True):
        (alone,) = model.encode("image", [item], [count])
        assert rows.shape == alone.shape
        assert (rows - alone).abs().max() < 1e-5 * alone.abs().max()
