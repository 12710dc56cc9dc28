"""A model built from parts, by a registered adapter and a processor of one's own: exact, keyed by it, checked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoint_files import checkpoint
from support.paths import PYTHON_PATH
from support.sounds import clip
from support.ultravox import TOKEN, UltravoxProcessor, build_ultravox
from trinity.errors import ConfigError, UnsupportedModel
from trinity.pipeline import Pipeline
from trinity.preprocess.checkpoint import model_types
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request, Sampling
from trinity.stages.models import ModelAdapter, register_adapter, registry

OUTPUTS = 16


@pytest.fixture(scope="module")
def ultravox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    register_adapter("voxtral", ModelAdapter)
    yield build_ultravox(tmp_path_factory.mktemp("ultravox"))
    del registry._adapters["voxtral"]
    model_types.registered.discard("voxtral")


def ask(seed: int) -> Request:
    sampling = Sampling(ignore_eos=True)
    return Request("Listen <audio> well", media=[Media("audio", clip(seed))], max_tokens=OUTPUTS, sampling=sampling)


@cache
def answer(directory: Path, seed: int) -> list[int]:
    """What transformers' own class generates of the same processor's inputs."""
    from transformers import VoxtralForConditionalGeneration

    load: Any = VoxtralForConditionalGeneration.from_pretrained
    model = load(directory, dtype=torch.float32).eval()
    inputs = UltravoxProcessor.load(directory)(text=[f"Listen {TOKEN} well"], audio=[clip(seed)])
    settings = {"do_sample": False, "max_new_tokens": OUTPUTS, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(**inputs, **settings)
    return list(found[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("placement", ["EPD", pytest.param("1E1P1D", marks=pytest.mark.slow)])
def test_it_serves_as_transformers_generates(ultravox: Path, placement: str) -> None:
    expected = [answer(ultravox, seed) for seed in (1, 2)]

    async def run() -> list[list[int]]:
        own = UltravoxProcessor.load(ultravox)
        async with Pipeline(ultravox, placement, dtype="float32", processor=own) as pipe:
            return [(await pipe.complete(ask(seed))).token_ids for seed in (1, 2)]

    assert asyncio.run(run()) == expected
    assert expected[0] != expected[1]


class OtherProcessor(UltravoxProcessor):
    """The same, by another name."""


def test_the_processor_is_in_the_key_of_what_it_makes(ultravox: Path) -> None:
    mine = [kind(**parts(ultravox)) for kind in (UltravoxProcessor, UltravoxProcessor, OtherProcessor)]
    keys = [RequestProcessor(ultravox, processor=each).process(ask(1)).work.media[0].content for each in mine]
    assert keys[0] == keys[1] != keys[2]
    assert all(type(each.tokenizer).__name__ != "RecordingTokenizer" for each in mine), "the user's own was changed"


def parts(directory: Path) -> dict[str, Any]:
    loaded = UltravoxProcessor.load(directory)
    return {"feature_extractor": loaded.feature_extractor, "tokenizer": loaded.tokenizer}


def test_it_goes_to_processes_too(ultravox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trinity.preprocess.worker_processes import KillableProcessor

    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)  # of a process that imports the processor's class by its name
    limits = MediaLimits(processes=1)
    own = UltravoxProcessor.load(ultravox)
    own.later = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="cannot be sent to a process that preprocesses"):
        KillableProcessor(ultravox, limits=limits, processor=own)
    processor = KillableProcessor(ultravox, limits=limits, processor=UltravoxProcessor.load(ultravox))
    try:
        found = asyncio.run(processor.aprocess(ask(1)))
        assert found.work.media[0].content == processor.process(ask(1)).work.media[0].content
    finally:
        processor.close()


def test_a_directory_takes_the_place_of_the_checkpoints_own(tmp_path: Path) -> None:
    """LLaVA with an image processor of another size: fewer tokens would not fit its tower, other pixels do."""
    import json
    import shutil

    other = Path(shutil.copytree(checkpoint("llava"), tmp_path / "other"))
    for file in ("preprocessor_config.json", "processor_config.json"):
        if (other / file).is_file():
            settings = json.loads((other / file).read_text())
            for fields in (settings, settings.get("image_processor", {})):
                if "image_mean" in fields:
                    fields["image_mean"] = [0.1, 0.2, 0.3]
            (other / file).write_text(json.dumps(settings))
    request = Request("<image>", images=[torch.zeros(3, 60, 60, dtype=torch.uint8)])
    own, changed = (RequestProcessor(checkpoint("llava"), processor=each).process(request) for each in (None, other))
    assert own.work.prompt == changed.work.prompt
    assert own.work.media[0].content != changed.work.media[0].content
    assert not torch.equal(own.inputs[0]["pixel_values"], changed.inputs[0]["pixel_values"])


class Silent:
    """Has no part that reads media."""

    tokenizer = None

    def __call__(self, **_: Any) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("/nowhere", "is no directory"),
        (Silent(), "it reads no media"),
        (Silent, "a directory, or a callable object with a tokenizer"),
        (object(), "a directory, or a callable object with a tokenizer"),
    ],
)
def test_what_is_no_processor_is_refused(given: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RequestProcessor(checkpoint("llava"), processor=given)


def test_a_processor_that_fails_on_a_clip_is_refused_at_load(ultravox: Path) -> None:
    class Broken(UltravoxProcessor):
        def __call__(self, **_: Any) -> dict[str, Any]:
            raise ValueError("out of order")

    with pytest.raises(UnsupportedModel, match=r"fails on a clip .*out of order"):
        RequestProcessor(ultravox, processor=Broken(**parts(ultravox)))
