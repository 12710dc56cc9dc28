"""Loading, proving, checking and planning leave the global random states of torch, numpy and Python as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.checkpoint_files import checkpoint
from support.planner_options import planner_options
from trinity.costs.model_shape import MODELS
from trinity.planner import HybridPlanner
from trinity.preprocess.processor import RequestProcessor
from trinity.stages.models import load_model
from trinity.stages.proof.command import print_verdict
from trinity.stages.proof.prove import prove
from trinity.testing.any_text_checkpoint import build_any_text
from trinity.traces import synthesise
from trinity.traces.trace import SLO

DRAWS = "qwen3_next"  # its constructor draws what the weights take the place of


def states() -> list[Any]:
    kind, numbers, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), (kind, list(numbers), *rest), random.getstate()]


@pytest.fixture
def _unmoved() -> Iterator[None]:
    before = states()
    yield
    assert states() == before


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_any_text(DRAWS, tmp_path_factory.mktemp("drawing") / "model")


@pytest.mark.usefixtures("drawing", "_unmoved")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_load_with_its_check(drawing: Path, dtype: str) -> None:
    load_model(drawing, "PD", dtype=dtype)


@pytest.mark.usefixtures("_unmoved")
def test_a_listed_types_parts_and_its_processor() -> None:
    load_model(checkpoint("llava"), "EPD", dtype="float16")
    RequestProcessor(checkpoint("llava")).close()


@pytest.mark.usefixtures("drawing", "_unmoved")
def test_the_command_that_checks(drawing: Path) -> None:
    assert print_verdict(drawing) == 0


@pytest.fixture(scope="module")
def hybrid() -> Path:
    return checkpoint("any-qwen3_5")


@pytest.mark.usefixtures("hybrid", "_unmoved")
def test_a_proof(hybrid: Path) -> None:
    assert prove(hybrid).failed is None


@pytest.mark.usefixtures("_unmoved")
def test_a_plan() -> None:
    trace = synthesise("MME", 250, visual_tokens=lambda width, height: 576, rate=10, seed=3)
    options = planner_options({"seeds": 0, "least_requests": 250, "engine": "eager"})
    HybridPlanner(MODELS["llava-1.5-7b"], SLO(ttft=0.3, tbt=0.5), instances=3, **options).plan(trace)
