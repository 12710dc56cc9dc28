"""An encode that is long, and holds its interpreter, is borne; one that hangs costs its own request alone.

The encoder that does so is a package's own, found by its entry point in each process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support import paths
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity import FailurePolicy
from trinity.errors import PoisonRequest
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote.supervision import supervisor_core
from trinity.remote.supervision.fork_client import kept_launcher
from trinity.request import Request, Sampling
from trinity.testing.oracle import Oracle

SILENCE_S, LIVENESS_S = 2.0, 400.0
FLOOR_S = 12.0  # a step of the innocent takes a thousandth
MODULE = """
import ctypes
import time
from trinity.stages import IMAGE, EncodeStage

class OddEncoder(EncodeStage):
    def forward(self, step):
        for item in step.encodes:
            pixels = item.inputs["pixel_values"]
            if pixels.flatten(2).std(-1).max() < 1e-3:  # an image of one colour
                if pixels.mean() < 0:
                    time.sleep(1e6)
                ctypes.PyDLL(None).sleep(6)  # which holds the interpreter
        return super().forward(step)

def encoder(setup):
    return OddEncoder(setup.model, setup.memory[IMAGE])
"""
PLACEMENT = [Instance("E", stages=["odd"]), Instance("P"), Instance("D")]


@pytest.fixture(scope="module", autouse=True)
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("installed")
    (folder / "odd_package.py").write_text(MODULE)
    about = folder / "odd_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[trinity.stages]\nodd = odd_package:encoder\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", f"{folder}:{paths.ROOT}:{paths.PYTHON_PATH}")
        with kept_launcher():
            yield
    sys.modules.pop("odd_package", None)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("colours")
    files = {"long": folder / "bright.png", "hangs": folder / "dark.png"}
    for name, level in (("long", 240), ("hangs", 10)):
        Image.new("RGB", (40, 40), (level, level, level)).save(files[name])
    return files


def ask(image: Path) -> Request:
    return Request("<image>\nWhat is this?", images=[image], max_tokens=40, sampling=Sampling(ignore_eos=True))


@cache
def innocent() -> Request:
    return ask(sorted(paths.PHOTOS.glob("*.jpg"))[0])


@pytest.fixture(scope="module")
def wanted(colours: dict[str, Path]) -> list[list[int]]:
    return Oracle(checkpoint("llava")).generate_all([ask(colours["long"]), innocent()])


def serving(**named: Any) -> Pipeline:
    options = {"dtype": "float32", "hosting": "process", "pools": {"image": 24, "kv": 512}, "connector": "shm"}
    return Pipeline(checkpoint("llava"), PLACEMENT, **pipeline_options({**options, **named}))


@pytest.mark.timeout(900)
async def test_a_long_encode_that_holds_its_interpreter_is_borne(
    colours: dict[str, Path], wanted: list[list[int]]
) -> None:
    """It is silent for three times what counts as a loss: the encoder was killed for it, again and again."""
    asked = [ask(colours["long"]), innocent()]
    async with serving(silence_s=SILENCE_S) as pipe, asyncio.timeout(LIVENESS_S):
        outputs = await asyncio.gather(*map(pipe.complete, asked))
        assert [each.token_ids for each in outputs] == wanted
        assert [each.lives for each in outputs] == [1, 1]
        assert [health.epoch for health in pipe.health.values()] == [0, 0, 0]


@pytest.mark.timeout(900)
async def test_an_encode_that_does_not_end_is_named_as_what_makes_no_progress(colours: dict[str, Path]) -> None:
    """Of a process that can report nothing meanwhile."""
    async with serving() as pipe, asyncio.timeout(LIVENESS_S):
        asked, found = asyncio.ensure_future(pipe.complete(ask(colours["long"]))), set[str]()
        while not found:
            assert not asked.done(), "it was not named while it lasted"
            found = {each.part for each in pipe.find_stalled(1.5)}
            await asyncio.sleep(0.05)
        assert found == {"E0 joint"}
        await asked
        while pipe.find_stalled(1.5):
            await asyncio.sleep(0.05)


@pytest.mark.timeout(900)
async def test_an_encode_that_hangs_costs_its_own_request_alone(
    colours: dict[str, Path], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its instance says every second that it lives: the request, and all behind it, waited for ever."""
    for name in ("STEP_FLOOR_S", "STEP_UNKNOWN_S"):
        monkeypatch.setattr(supervisor_core, name, FLOOR_S)
    async with serving(failures=FailurePolicy()) as pipe, asyncio.timeout(LIVENESS_S):
        assert (await pipe.complete(innocent())).token_ids == wanted[1]
        hung = asyncio.ensure_future(pipe.complete(ask(colours["hangs"])))
        rounds = 0
        while not hung.done():
            assert (await pipe.complete(innocent())).token_ids == wanted[1]
            rounds += 1
        with pytest.raises(PoisonRequest) as told:
            await hung
        assert told.value.instances.split(", ") == ["E0"] * 3
        assert (await pipe.complete(innocent())).token_ids == wanted[1]
        assert {name: health.epoch for name, health in pipe.health.items()} == {"E0": 3, "P0": 0, "D0": 0}
        assert "a step of it hangs" in pipe.health["E0"].why
        assert pipe.metrics.summary()["failed"] == {"PoisonRequest": 1}
