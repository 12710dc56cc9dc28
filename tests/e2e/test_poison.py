"""A request of which processes die, by SIGABRT in a stage: it is refused after three deaths, all others are exact.

The stage and the logits processors that abort are a package's own, found by their entry points in each process.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from support import paths
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from support.thinned import thinned
from trinity import FailurePolicy
from trinity.errors import PoisonRequest
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import kept_launcher
from trinity.request import Output, Request, Sampling
from trinity.testing.oracle import Oracle

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
LIVENESS_S = 150.0
LENGTH = 150
MODULE = """
import os
import resource
from trinity.stages import IMAGE, EncodeStage

def abort():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()

class DeadlyEncoder(EncodeStage):
    def forward(self, step):
        if any(item.inputs["pixel_values"].flatten(2).std(-1).max() < 1e-3 for item in step.encodes):
            abort()  # an image of one colour
        return super().forward(step)

def encoder(setup):
    return DeadlyEncoder(setup.model, setup.memory[IMAGE])

def at_once(prompt, output, logits):
    abort()

def later(prompt, output, logits):
    return abort() if len(output) >= 5 else logits
"""
ENTRIES = """
[trinity.stages]
deadly = deadly_package:encoder

[trinity.logits_processors]
at_once = deadly_package:at_once
later = deadly_package:later
"""
PLACEMENTS = {
    "EPD": [Instance("EPD", stages=["deadly"])],
    "EP+D": [Instance("EP", stages=["deadly"]), Instance("D")],
    "1E1P2D": [Instance("E", stages=["deadly"]), Instance("P"), Instance("D"), Instance("D")],
}


@pytest.fixture(scope="module", autouse=True)
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    wanted()
    folder = tmp_path_factory.mktemp("installed")
    (folder / "deadly_package.py").write_text(MODULE)
    about = folder / "deadly_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deadly-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", f"{folder}:{paths.ROOT}:{paths.PYTHON_PATH}")
        with kept_launcher():
            yield
    sys.modules.pop("deadly_package", None)


def innocent() -> list[Request]:
    plain = Sampling(ignore_eos=True)
    return [
        Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=LENGTH, sampling=plain),
        Request("Only text, and no picture", max_tokens=LENGTH, sampling=plain),
        Request("<image> and <image>?", images=PHOTOS[1:3], max_tokens=LENGTH, sampling=plain),
    ]


@cache
def wanted() -> list[list[int]]:
    return Oracle(checkpoint("llava")).generate_all(innocent())


def poison(kind: str, folder: Path) -> Request:
    if kind == "image":
        file = folder / "one-colour.png"
        Image.new("RGB", (40, 40), (90, 90, 90)).save(file)
        return Request("<image>?", images=[file], max_tokens=20)
    return Request("And this?", max_tokens=20, sampling=Sampling(ignore_eos=True, logits_processor=kind))


async def until_decoding(pipe: Pipeline) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while not any(each.token_count >= 3 for each in pipe.streams):
            await asyncio.sleep(0.002)


async def serve(pipe: Pipeline, asked: Sequence[Request]) -> list[Output]:
    return list(await asyncio.gather(*map(pipe.complete, asked)))


async def serve_until(pipe: Pipeline, over: asyncio.Event) -> list[list[Output]]:
    """Serve the innocent ones again and again: there is always somebody beside the poison."""
    rounds = [await serve(pipe, innocent())]
    while not over.is_set():
        rounds.append(await serve(pipe, innocent()))
    return rounds


CASES = [("EPD", "image"), ("EPD", "at_once"), ("EPD", "later"), ("EP+D", "image"), ("EP+D", "at_once")]
OFTEN = [("EP+D", "later"), ("1E1P2D", "image")]
CASES += [("1E1P2D", "image"), ("1E1P2D", "later"), ("EP+D", "later")]


@pytest.mark.parametrize(("placement", "kind"), thinned(CASES, OFTEN.__contains__))
@pytest.mark.timeout(600)
async def test_poison_is_refused_after_three_deaths_and_all_others_are_exact(
    placement: str, kind: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": {"image": 24, "kv": 512}}
    options |= {"connector": "shm", "failures": FailurePolicy()}
    async with Pipeline(checkpoint("llava"), PLACEMENTS[placement], **pipeline_options(options)) as pipe:
        over = asyncio.Event()
        serving = asyncio.ensure_future(serve_until(pipe, over))
        await until_decoding(pipe)
        with pytest.raises(PoisonRequest, match="do not send it again") as told:
            await asyncio.wait_for(pipe.complete(poison(kind, tmp_path)), LIVENESS_S)
        over.set()
        rounds = await asyncio.wait_for(serving, LIVENESS_S)
        late = await asyncio.wait_for(serve(pipe, innocent()[:2]), LIVENESS_S)
        await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)
        losses = sum(each.epoch for each in pipe.health.values())
        assert pipe.metrics.summary()["failed"] == {"PoisonRequest": 1}
    died = told.value.instances.split(", ")
    assert 3 <= len(died) <= losses <= 4, "a fourth where its death was heard late"
    assert [[each.token_ids for each in outputs] for outputs in rounds] == [wanted()] * len(rounds)
    assert [each.token_ids for each in late] == wanted()[:2]
    assert isinstance(told.value.output, Output)
    assert not any(each["alone"] for each in told.value.output.former_lives), "the one that was its own is the last"
    assert told.value.output.lives >= 3
