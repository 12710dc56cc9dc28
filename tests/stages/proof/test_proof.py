"""The proof of a multimodal type that nobody listed: what agrees is served, what is broken is told by its part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from support.checkpoint_files import checkpoint
from trinity.core.messages import MediaSpan
from trinity.errors import RequestError
from trinity.preprocess.checkpoint.verdicts import MediaFacts, ProofVerdict, find_verdict
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request
from trinity.stages.models.base import MediaInputs, RotaryPositions
from trinity.stages.models.generic import GenericAdapter
from trinity.stages.proof import prove
from trinity.stages.proof.command import print_verdict
from trinity.stages.proof.prompts import make_picture

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of tensors, in ERNIE's processor
PARTS = ("processor", "prompt ids", "features", "positions", "attention", "logits", "control")
# One of each kind: three rotary axes; sizes of images beside pixels, and a processor that asks for torchvision; tiles;
# layers that keep states; four rotary axes, and tokens that must stand around a placeholder.
WITH_VIDEOS = ("qwen3_vl_moe", "qwen3_5", "ernie4_5_vl_moe", "cosmos3_omni")  # their processors take some
SLOW_TYPES = (
    "granite4_vision",
    "idefics2",
    "ernie4_5_vl_moe",
    "got_ocr2",
    "deepseek_ocr2",
    "deepseek_vl_hybrid",
    "cosmos3_omni",
    "lfm2_vl",
    "chameleon",
)
TYPES = (
    *("qwen3_vl_moe", "mistral3", "aya_vision", "qwen3_5", "hunyuan_vl"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TYPES),
)


@pytest.mark.parametrize("name", TYPES)
def test_a_type_that_nobody_listed_is_proven_and_the_verdict_kept(name: str) -> None:
    directory = checkpoint(f"any-{name}")
    verdict = prove(directory)
    assert verdict.failed is None
    assert verdict.serves == ("image", "text")
    assert tuple(dict.fromkeys(part.name for part in verdict.parts)) == PARTS
    assert verdict.model_type == name
    assert not verdict.facts.whole_media
    assert verdict.facts.refused.keys() == ({"video"} if name in WITH_VIDEOS else set())
    assert find_verdict(directory) == verdict


@pytest.mark.parametrize("name", ["gemma3", pytest.param("any-gemma4_unified", marks=pytest.mark.slow)])
def test_images_that_see_each_other_are_found_by_the_logits(name: str) -> None:
    verdict = prove(checkpoint(name))
    assert verdict.failed is None
    assert verdict.facts.whole_media


def test_a_prompt_that_sees_itself_whole_is_found_and_takes_no_text_alone() -> None:
    verdict = prove(checkpoint("any-paligemma"))
    assert verdict.failed is None
    assert verdict.serves == ("image",), "its processor refuses a text without an image"
    assert verdict.facts.whole_prompt


def test_images_that_see_each_other_in_layers_with_a_window_alone_are_found() -> None:
    verdict = prove(checkpoint("any-gemma4"))
    assert verdict.failed is None
    assert verdict.facts.whole_media
    assert verdict.facts.whole_windows


class Shifted(GenericAdapter):
    """Features one row too late."""

    def encode(self, model: Any, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        return [rows.roll(1, 0) for rows in super().encode(model, kind, items, counts)]


class WrongLayers(GenericAdapter):
    """Features of one layer added at another."""

    def language_inputs(self, further: Tensor, at: Tensor, total: int) -> dict[str, Any]:
        found = super().language_inputs(further, at, total)
        parts = found[self.facts.layer_names[1]]
        return {**found, self.facts.layer_names[1]: dict(zip(parts, reversed(parts.values()), strict=True))}


class NoTypes(GenericAdapter):
    """Tokens without their types, by which experts are chosen."""

    def token_inputs(self, text: Any, ids: Tensor, media: Tensor, written: Tensor | None = None) -> dict[str, Any]:
        return dict.fromkeys(super().token_inputs(text, ids, media, written))


class WrongAxis(GenericAdapter):
    """Rows and columns of images exchanged."""

    def positions(
        self, model: Any, prompt: np.ndarray, spans: Sequence[MediaSpan], kinds: np.ndarray
    ) -> RotaryPositions:
        found = super().positions(model, prompt, spans, kinds)
        return RotaryPositions(None if found.prompt is None else found.prompt[[0, 2, 1]], found.delta)


class LatePositions(GenericAdapter):
    """Decodes one position too late, which no prompt shows."""

    def positions(
        self, model: Any, prompt: np.ndarray, spans: Sequence[MediaSpan], kinds: np.ndarray
    ) -> RotaryPositions:
        found = super().positions(model, prompt, spans, kinds)
        return RotaryPositions(found.prompt, found.delta + (found.prompt is not None))


def forced(whole: bool) -> Any:
    """Make adapters that always have images seen in both directions, or never."""

    def make(config: Any, facts: MediaFacts) -> GenericAdapter:
        made = GenericAdapter(config, facts)
        made.whole_media = whole  # type: ignore[misc]
        made.whole_prompt = False  # type: ignore[misc]
        return made

    return make


def refused(name: str, make_adapter: Any) -> ProofVerdict:
    verdict = prove(checkpoint(name), make_adapter)
    assert verdict.failed is not None
    assert not verdict.serves
    return verdict


@pytest.mark.parametrize(
    ("name", "make_adapter", "part"),
    [
        ("any-mistral3", Shifted, "features"),
        ("any-ernie4_5_vl_moe", NoTypes, "attention among an image's tokens"),
        ("any-granite4_vision", WrongLayers, "attention among an image's tokens"),
        ("any-qwen3_vl_moe", WrongAxis, "positions"),
        ("any-qwen3_vl_moe", LatePositions, "logits under chunking"),
        ("any-mistral3", forced(True), "attention among an image's tokens"),
        ("gemma3", forced(False), "attention among an image's tokens"),
        ("any-paligemma", forced(False), "attention among an image's tokens"),
    ],
)
def test_a_broken_adapter_is_caught_by_the_part_that_it_breaks(name: str, make_adapter: Any, part: str) -> None:
    verdict = refused(name, make_adapter)
    assert verdict.failed is not None
    assert verdict.failed.name == part
    figures = any(character.isdigit() for character in verdict.failed.said) or "inf off" in verdict.failed.said
    assert figures, "it gives figures, or says that tokens differ"


def test_images_that_text_reads_by_cross_attention_are_refused_by_that_name() -> None:
    verdict = prove(checkpoint("any-blip"))
    assert verdict.failed is not None
    assert verdict.failed.name == "text model"
    assert "cross attention (text_decoder" in verdict.failed.said


def test_a_processor_that_puts_an_image_in_front_by_itself_is_proven_with_one_image_a_prompt() -> None:
    verdict = prove(checkpoint("any-blip-2"))
    assert verdict.failed is None
    assert verdict.serves == ("image",)
    assert (verdict.facts.in_front, verdict.facts.text_alone) == (True, False)


def apart(config: Any, facts: MediaFacts) -> GenericAdapter:
    """Make adapters that have the tokens of each image see each other, and not those of all."""
    made = GenericAdapter(config, facts)
    made.together = ()  # type: ignore[misc]
    return made


def lacking(config: Any, facts: MediaFacts) -> GenericAdapter:
    """Make adapters that leave the last token around placeholders out."""
    made = GenericAdapter(config, facts)
    made.together = facts.together[:1]  # type: ignore[misc]
    return made


@pytest.mark.slow
def test_images_that_all_see_each_other_with_what_is_around_them_are_found() -> None:
    directory = checkpoint("any-molmo2")
    verdict = prove(directory)
    assert verdict.failed is None
    assert verdict.serves == ("image", "text")
    assert len(verdict.facts.together) > 5, "marks of columns, of begin and end, of prompts without an image too"
    for make_adapter in (apart, lacking):
        failed = prove(directory, make_adapter).failed
        assert failed is not None
        assert failed.name == "attention among an image's tokens"


class CountsPadding(GenericAdapter):
    """Counts a padding token like others."""

    def positions(
        self, model: Any, prompt: np.ndarray, spans: Sequence[MediaSpan], kinds: np.ndarray
    ) -> RotaryPositions:
        return RotaryPositions(None, self.facts.first)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "serves"), [("kosmos-2", ("image",)), ("kosmos-2.5", ("image", "text"))])
def test_positions_that_a_text_model_counts_by_itself_are_found(name: str, serves: tuple[str, ...]) -> None:
    directory = checkpoint(f"any-{name}")
    verdict = prove(directory)
    assert verdict.failed is None
    assert verdict.serves == serves
    assert (verdict.facts.first, verdict.facts.skipped, verdict.facts.in_front) == (1, 0, True)
    failed = prove(directory, CountsPadding).failed
    assert failed is not None
    assert failed.name == "logits under chunking"
    assert "an image beside a text" in failed.said


def test_the_verdict_of_a_broken_adapter_is_not_kept() -> None:
    directory = checkpoint("any-vipllava")
    assert prove(directory, Shifted).failed is not None
    assert find_verdict(directory) is None


def test_weights_that_are_not_there_are_never_drawn(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = Path(shutil.copytree(checkpoint("any-vipllava"), tmp_path / "model"))
    weights = load_file(directory / "model.safetensors")
    left = {name: value for name, value in weights.items() if "multi_modal_projector" not in name}
    save_file(left, directory / "model.safetensors", metadata={"format": "pt"})
    verdict = prove(directory)
    assert verdict.failed is not None
    assert verdict.failed.name == "weights"
    assert "multi_modal_projector" in verdict.failed.said


def write_defaults(directory: Path, **fields: Any) -> None:
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_defaults_of_a_checkpoint_are_no_part_of_its_proof(tmp_path: Path) -> None:
    """What its generate() would say is stopped, banned and forced here, in as many ways as there are."""
    directory = Path(shutil.copytree(checkpoint("any-vipllava"), tmp_path / "model"))
    vocabulary = range(json.loads((directory / "config.json").read_text())["text_config"]["vocab_size"])
    write_defaults(
        directory,
        eos_token_id=list(vocabulary),
        suppress_tokens=list(vocabulary)[5:],
        bad_words_ids=[[number] for number in vocabulary[::2]],
        forced_eos_token_id=3,
        stop_strings=["a"],
        repetition_penalty=0.7,
        num_beams=2,
        max_time=1e-6,
    )
    verdict = prove(directory)
    assert verdict.failed is None, verdict.failed
    assert verdict.serves == ("image", "text")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["blip-2", "molmo2", "qwen3_5", "kosmos-2", "emu3"])
def test_a_model_that_would_stop_at_once_is_proven(name: str, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint(f"any-{name}"), tmp_path / "model"))
    path = directory / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text["eos_token_id"] = list(range(text["vocab_size"]))
    path.write_text(json.dumps(config))
    write_defaults(directory, eos_token_id=text["eos_token_id"])
    assert prove(directory).failed is None


@pytest.mark.slow
def test_one_image_a_prompt_is_what_serves_where_the_model_says_so_itself() -> None:
    verdict = prove(checkpoint("any-emu3"))
    (spared,) = [part for part in verdict.parts if not part.passed]
    assert (spared.name, spared.spared) == ("several images", True)
    assert verdict.failed is None
    assert verdict.serves == ("image", "text")
    assert (verdict.facts.single, verdict.facts.embeds_codes) == (True, True)


@pytest.mark.slow
def test_features_that_are_wrong_beside_others_by_our_own_fault_are_refused() -> None:
    class Shifts(GenericAdapter):
        """Moves the rows of an image where several are encoded, or it is one of several."""

        def encode(self, model: Any, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
            found = super().encode(model, kind, items, counts)
            return [rows.roll(1, 0) for rows in found] if len(items) > 1 else found

    failed = prove(checkpoint("any-aya_vision"), Shifts).failed
    assert failed is not None
    assert failed.name == "features"


def test_a_text_of_which_the_model_itself_gives_two_answers_is_left_out_and_images_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PaliGemma without a chat template: by sdpa its text sees itself in both directions, by eager it does not."""
    directory = Path(shutil.copytree(checkpoint("any-paligemma"), tmp_path / "model"))
    for path in directory.glob("chat_template*"):
        path.unlink()
    settings = directory / "tokenizer_config.json"
    fields = json.loads(settings.read_text())
    fields.pop("chat_template", None)
    settings.write_text(json.dumps(fields))
    assert print_verdict(directory) == 0
    said = capsys.readouterr().out
    assert "paligemma serves: image\n" in said
    assert "paligemma rejects prompts without media: logits under chunking: " in said
    verdict = find_verdict(directory)
    assert verdict is not None
    assert verdict.facts.refused.keys() == {"text"}
    processor = RequestProcessor(directory)
    try:
        with pytest.raises(RequestError, match=r"takes no prompt without an image: logits under chunking: .* off"):
            processor.process(Request(prompt="What is this?", max_tokens=2))
        assert processor.process(ask_picture()).work.media
    finally:
        processor.close()


def ask_picture() -> Request:
    return Request(prompt="<image>What is this?", images=[make_picture(1, 60, 60)], max_tokens=2)


@pytest.mark.slow
def test_images_that_differ_leave_the_clips_that_are_proven() -> None:
    class ShiftedImages(GenericAdapter):
        def encode(self, model: Any, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
            found = super().encode(model, kind, items, counts)
            return [rows.roll(1, 0) for rows in found] if kind == "image" else found

    verdict = prove(checkpoint("any-gemma4"), ShiftedImages)
    assert verdict.failed is None
    assert verdict.serves == ("audio", "text")
    assert verdict.facts.refused["image"].startswith("features: ")
    assert verdict.facts.media_tokens.keys() == {"audio"}
