"""The proof of audio: a type that nobody listed serves clips, and what is broken is told by its part."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.checkpoint_files import checkpoint
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.model_types import check_config
from trinity.preprocess.checkpoint.verdicts import MediaFacts, ProofPart, ProofVerdict, find_verdict
from trinity.preprocess.text.clip_windows import ClipWindows
from trinity.stages.models.base import MediaInputs
from trinity.stages.models.generic import GenericAdapter
from trinity.stages.proof import prove

NAME = "any-moss_transcribe_diarize"
PARTS = ("processor", "clips", "prompt ids", "features", "positions", "attention", "logits", "control", "least")


def test_a_type_with_clips_alone_is_proven_and_the_verdict_kept() -> None:
    verdict = prove(checkpoint(NAME))
    assert verdict.failed is None
    assert verdict.serves == ("audio", "text")
    assert tuple(dict.fromkeys(part.name for part in verdict.parts)) == PARTS
    assert verdict.facts.media_tokens.keys() == {"audio"}
    assert find_verdict(checkpoint(NAME)) == verdict
    assert check_config(read_config(checkpoint(NAME)), checkpoint(NAME)) == verdict.facts


def with_strings(name: str, folder: Path) -> Path:
    """The checkpoint with a chat template that takes content as one string."""
    directory = Path(shutil.copytree(checkpoint(name), folder / "model"))
    template = "{% for m in messages %}<|im_start|>{{ m['role'] + ': ' + m['content'] }}<|im_end|>{% endfor %}"
    (directory / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}<|im_start|>{% endif %}")
    return directory


def test_a_chat_template_that_takes_strings_is_given_the_placeholder_in_them(tmp_path: Path) -> None:
    verdict = prove(with_strings(NAME, tmp_path))
    assert verdict.failed is None, verdict.failed
    assert verdict.serves == ("audio", "text")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["any-vipllava", "any-gemma4"])
def test_so_is_one_with_images(name: str, tmp_path: Path) -> None:
    verdict = prove(with_strings(name, tmp_path))
    assert verdict.failed is None, verdict.failed
    assert verdict.serves == prove(checkpoint(name)).serves


class Shifted(GenericAdapter):
    """Features one row too late."""

    def encode(self, model: Any, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        return [rows.roll(1, 0) for rows in super().encode(model, kind, items, counts)]


class Scaled(GenericAdapter):
    """Logits a hundredth too large."""

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        return super().head(model, hidden) * 1.01


@pytest.mark.parametrize(("make_adapter", "part"), [(Shifted, "features"), (Scaled, "attention among a clip's tokens")])
def test_a_broken_adapter_is_caught_by_the_part_that_it_breaks(make_adapter: Any, part: str) -> None:
    verdict = prove(checkpoint(NAME), make_adapter)
    assert not verdict.serves
    assert verdict.failed is not None
    assert verdict.failed.name == part


def test_a_model_that_draws_at_random_is_refused_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.moss_transcribe_diarize.modeling_moss_transcribe_diarize import MossTranscribeDiarizeModel

    own = MossTranscribeDiarizeModel.get_audio_features

    def noisy(*given: Any, **named: Any) -> Any:
        found = own(*given, **named)
        found.pooler_output = found.pooler_output + torch.randn_like(found.pooler_output)
        return found

    monkeypatch.setattr(MossTranscribeDiarizeModel, "get_audio_features", noisy)
    directory = Path(shutil.copytree(checkpoint(NAME), tmp_path / "noisy"))
    (directory / "noise.txt").write_text("another file: a verdict is kept by the files that it is of")
    verdict = prove(directory)
    assert verdict.failed is not None
    assert "draws at random" in verdict.failed.said


def test_clips_that_differ_leave_what_else_is_proven() -> None:
    """A part that is spared does not fail a verdict, and the front end takes no such media."""
    spared = ProofPart("audio", False, "features: 3 rows are 0.5 off", spared=True)
    facts = MediaFacts(image_token_id=7, image_token="<image>")
    verdict = ProofVerdict(model_type="both", parts=(spared,), serves=("image", "text"), facts=facts)
    assert verdict.failed is None
    assert facts.media_tokens == {"image": 7}


NEEDS_TORCHAUDIO = ("fun_asr_nano", "granite_speech", "granite_speech_plus")
SLOW = (*NEEDS_TORCHAUDIO, "nemo_speechlm")


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_further_types_prove_their_clips(name: str) -> None:
    if name in NEEDS_TORCHAUDIO:
        pytest.importorskip("torchaudio")
    verdict = prove(checkpoint(f"any-{name}"))
    assert verdict.failed is None
    assert verdict.serves == ("audio", "text")


@pytest.mark.slow
def test_a_type_with_images_and_clips_proves_both_and_both_in_one_prompt() -> None:
    verdict = prove(checkpoint("any-gemma4"))
    assert verdict.failed is None
    assert verdict.serves == ("image", "audio", "text")
    assert not [part for part in verdict.parts if part.spared]
    assert any("an image and a clip" in part.said for part in verdict.parts if part.name == "logits")


@pytest.mark.slow
def test_clips_that_the_model_cannot_take_leave_its_images(tmp_path: Path) -> None:
    """Gemma 4 without an audio tower: its processor expands clips all the same, and its own generate() raises."""
    import json

    directory = Path(shutil.copytree(checkpoint("any-gemma4"), tmp_path / "model"))
    config = json.loads((directory / "config.json").read_text())
    config["audio_config"] = None
    (directory / "config.json").write_text(json.dumps(config))
    verdict = prove(directory)
    assert verdict.failed is None
    assert verdict.serves == ("image", "text")
    assert [part.name for part in verdict.parts if part.spared] == ["audio"]
    assert verdict.facts.media_tokens.keys() == {"image"}


@pytest.mark.slow
def test_a_type_that_cannot_be_equal_says_why() -> None:
    verdict = prove(checkpoint("any-vibevoice_asr"))
    assert verdict.failed is not None
    assert "draws at random" in verdict.failed.said


def test_a_processor_that_takes_clips_in_chats_alone_is_proven_by_its_chats() -> None:
    pytest.importorskip("mistral_common", reason="it writes the chats")
    verdict = prove(checkpoint("any-voxtral"))
    assert verdict.failed is None, verdict.failed
    assert verdict.serves == ("audio", "text")
    said = [part.said for part in verdict.parts]
    assert any("750 rows for a long clip" in each for each in said), "no clip was longer than a window"
    assert any("776 tokens for two clips" in each for each in said)


def without_begin(self: ClipWindows, clip: Any) -> str:
    return EXPAND(self, clip).removeprefix("[BEGIN_AUDIO]")


def window_by_window(self: ClipWindows, clip: Any, rate: int | None) -> Any:
    """Each window as if it were a clip: its spectrum is then cut at what is far below its own loudest."""
    windows = [clip[at : at + self.window_samples] for at in range(0, len(clip), self.window_samples)]
    return torch.cat([EXTRACT(self, each, rate) for each in windows])


EXPAND, EXTRACT = ClipWindows._expand, ClipWindows._extract


@pytest.mark.parametrize(
    ("name", "broken", "part"),
    [("_expand", without_begin, "prompt ids"), ("_extract", window_by_window, "features")],
)
def test_other_tokens_or_features_than_its_chats_have_are_caught(
    name: str, broken: Any, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mistral_common", reason="it writes the chats")
    directory = Path(shutil.copytree(checkpoint("any-voxtral"), tmp_path / "model"))
    monkeypatch.setattr(ClipWindows, name, broken)
    verdict = prove(directory)
    assert verdict.failed is not None
    assert verdict.failed.name == part


@pytest.mark.slow
def test_clips_that_no_getter_makes_features_of_and_that_become_something_else_beside_an_image() -> None:
    verdict = prove(checkpoint("any-phi4_multimodal"))
    assert [part.name for part in verdict.parts if not part.passed] == ["several images"]
    assert verdict.serves == ("image", "audio", "text")
    assert (verdict.facts.language, verdict.facts.features) == ("", "forward")
    assert "embed_tokens_extend" in verdict.facts.towers
    assert verdict.facts.beside == "image_pixel_values"
    said = [part.said for part in verdict.parts]
    assert any("an image and a clip in chunks" in each for each in said)
    assert any("one clip in a prompt" in each for each in said)
