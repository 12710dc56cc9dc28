"""Loading, proving, checking and planning leave the global random states of torch, numpy and Python as they were."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.any_model.text_checkpoint import build_any_text
from support.checkpoint_files import checkpoint
from support.planner_options import planner_options
from trinity.costs.model_shape import MODELS
from trinity.planner import HybridPlanner
from trinity.preprocess.processor import RequestProcessor
from trinity.stages.models import load_model
from trinity.stages.models.own_draws import own_draws
from trinity.stages.proof.command import print_verdict
from trinity.stages.proof.prove import prove
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


# ---------------------------------------------------------------- draws of a load, and of other threads


DRAWN: dict[str, Callable[[], object]] = {
    "rand": lambda: torch.rand(3),
    "randint": lambda: torch.randint(9, (3,)),
    "randperm": lambda: torch.randperm(5),
    "normal": lambda: torch.normal(torch.zeros(3), 1.0),
    "bernoulli": lambda: torch.full((3,), 0.5).bernoulli(),
    "uniform_": lambda: torch.empty(3).uniform_(1, 16),
    "Linear": lambda: torch.nn.Linear(3, 3),
    "Embedding": lambda: torch.nn.Embedding(3, 3),
    "Conv2d": lambda: torch.nn.Conv2d(3, 3, 2),
    "trunc_normal_": lambda: torch.nn.init.trunc_normal_(torch.empty(3)),
    "xavier_uniform_": lambda: torch.nn.init.xavier_uniform_(torch.empty(3, 3)),
    "orthogonal_": lambda: torch.nn.init.orthogonal_(torch.empty(3, 3)),
    "meta": lambda: (torch.rand(3, device="meta"), torch.empty(3, device="meta").normal_()),
}


@pytest.mark.usefixtures("_unmoved")
@pytest.mark.parametrize("name", DRAWN)
def test_a_draw_of_a_load_is_no_draw_of_its_user(name: str) -> None:
    with own_draws():
        DRAWN[name]()


def test_without_it_each_of_them_would_be() -> None:
    for name in DRAWN.keys() - {"meta"}:
        before = torch.get_rng_state()
        DRAWN[name]()
        assert not torch.equal(torch.get_rng_state(), before), name


@pytest.mark.usefixtures("_unmoved")
def test_a_device_that_is_set_around_it_is_kept() -> None:
    with own_draws(), torch.device("meta"):
        assert torch.nn.Linear(3, 3).weight.is_meta
        assert torch.rand(3).is_meta


def test_what_another_thread_draws_meanwhile_comes_once() -> None:
    """A state that is put back behind a load would give it the same numbers again."""
    torch.manual_seed(5)
    wanted = torch.rand(20)
    torch.manual_seed(5)
    with ThreadPoolExecutor(1) as other:
        found = [torch.rand(1)]
        with own_draws():
            torch.nn.Linear(8, 8)
            found += [other.submit(torch.rand, 1).result() for _ in range(9)]
        found.append(torch.rand(10))
    assert torch.equal(torch.cat(found), wanted)
