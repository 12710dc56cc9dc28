"""No multimodal checkpoint is served as a text model: who is refused, by name, before anything else is read."""

from __future__ import annotations

import ast
import json
import shutil
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.paths import ROOT
from support.recordings import MULTIMODAL
from trinity.errors import UnsupportedModel
from trinity.pipeline import Pipeline
from trinity.preprocess import loader
from trinity.preprocess.checkpoint import model_types
from trinity.preprocess.checkpoint.model_types import (
    PROVEN,
    STREAMS,
    check_config,
    explain_how_to_add,
    media_fields,
    served_types,
)
from trinity.preprocess.media.media_markup import IMAGE_TEXT
from trinity.preprocess.processor import RequestProcessor
from trinity.stages.models import ModelAdapter, find_adapter, known_models, load_model, register_adapter, registry
from trinity.stages.proof import prove
from trinity.testing.checkpoints import AUDIO_ARCHITECTURES, VIDEO_ARCHITECTURES

# Of each kind: an inner text model, a flat config with parts, an outer name for one text model, audio.
UNPROVEN = """
aya_vision chameleon evolla florence2 fuyu gemma3n git glm4v idefics idefics2 llama4
mistral3 mistral4 mllama moshi musicgen paligemma phi4_multimodal pi0 voxtral
qwen3_5 qwen3_vl_moe video_llava vipllava
"""
TEXT = "llama mistral qwen2 qwen3_moe gpt_oss gemma3_text olmo2 phi3 gpt2 ministral deepseek_v3 starcoder2"


@cache
def configs() -> dict[str, Any]:
    """The default config of every type that transformers knows; the few that have none are left out."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    found = {}
    for name in CONFIG_MAPPING_NAMES:
        try:
            config_class: Any = CONFIG_MAPPING[name]
            found[name] = config_class()
        except Exception:
            continue
    return found


def causal_types() -> set[str]:
    from transformers.models.auto import modeling_auto

    return set(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def is_refused(config: Any) -> bool:
    try:
        check_config(config)
    except UnsupportedModel as error:
        return repr(config.model_type) in str(error)
    return False


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of hundreds of types: to look for installed packages takes longer than all the rest."""
    monkeypatch.setattr(model_types, "entry_points", lambda group: [])


@pytest.mark.usefixtures("no_packages")
def test_of_all_types_of_transformers_the_multimodal_ones_are_refused() -> None:
    """Compare what transformers itself lists as multimodal with the names of fields and parts of its configs."""
    from transformers.models.auto import modeling_auto

    listed = set(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    listed |= set(modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES) | {"moshi", "musicgen", "musicgen_melody"}
    served = {name for name, config in configs().items() if name in listed and not is_refused(config)}
    assert len(listed & set(configs())) > 90
    assert served <= set(PROVEN)
    assert {"llava", "qwen2_vl", "gemma3"} <= served


@pytest.mark.usefixtures("no_packages")
def test_text_models_are_let_through() -> None:
    text = {name for name in causal_types() & set(configs()) if not is_refused(configs()[name])}
    assert set(TEXT.split()) <= text
    assert len(text) > 100
    for name in causal_types() & set(configs()) - text:
        config = configs()[name]
        assert media_fields(config) or config.get_text_config(decoder=True) is not config, name


@pytest.mark.parametrize("name", [each for each in UNPROVEN.split() if each in configs()])
def test_the_refusal_comes_before_anything_else_is_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs()[name].save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "load_processor", lambda *_: pytest.fail("the processor was loaded"))
    for load in (RequestProcessor, lambda where: load_model(where, "PD")):
        with pytest.raises(UnsupportedModel, match=rf"multimodal '{name}'.*supported are audioflamingo3, .*register"):
            load(tmp_path)


@pytest.mark.parametrize("name", [each for each in STREAMS if each in configs()])
def test_a_type_that_reads_a_stream_is_refused_as_such(name: str, tmp_path: Path) -> None:
    configs()[name].save_pretrained(tmp_path)
    for load in (RequestProcessor, lambda where: load_model(where, "PD")):
        with pytest.raises(UnsupportedModel, match=rf"'{name}' reads a stream of audio in real time"):
            load(tmp_path)


async def test_a_pipeline_refuses_it_by_name(tmp_path: Path) -> None:
    configs()["paligemma"].save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="multimodal 'paligemma'"):
        async with Pipeline(tmp_path, "EPD"):
            pass


def edited(name: str, folder: Path, **fields: Any) -> Path:
    copy = Path(shutil.copytree(checkpoint(name), folder / "copy"))
    config = json.loads((copy / "config.json").read_text())
    for key, value in fields.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) and key in config else value
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(
    "fields",
    [
        {"vision_config": {"model_type": "clip_vision_model"}},
        {"audio_token_id": 7},
        {"mm_vision_tower": "openai/clip-vit-large-patch14-336"},
        {"image_token_index": 3},
        {"Vision_Tower": "clip"},
        {"visionTower": {"width": 3}},
        {"vq_config": {"channels": 3}},
    ],
)
def test_a_text_model_with_fields_of_media_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    directory = edited("llama", tmp_path, **fields)
    for load in (RequestProcessor, lambda where: load_model(where, "PD")):
        with pytest.raises(UnsupportedModel, match=f"multimodal 'llama'.*{next(iter(fields))}"):
            load(directory)


@pytest.mark.parametrize("fields", [{"vision_config": None}, {"use_audio": False}, {"patch_size": 4}])
def test_fields_that_say_nothing_refuse_nothing(fields: dict[str, Any], tmp_path: Path) -> None:
    assert not RequestProcessor(edited("llama", tmp_path, **fields)).multimodal


# ---------------------------------------------------------------- known types vouch for what they were proven with


@pytest.mark.parametrize("name", [*MULTIMODAL, *VIDEO_ARCHITECTURES, *AUDIO_ARCHITECTURES])
def test_proven_parts_are_those_that_the_tests_compare(name: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint(name))
    towers = [getattr(getattr(config, f"{sense}_config", None), "model_type", None) for sense in ("vision", "audio")]
    assert PROVEN[name] == model_types.ProvenParts(towers[0], config.text_config.model_type, towers[1])


def test_what_is_proven_has_an_adapter_and_is_what_the_hint_lists() -> None:
    images, thinkers = {*MULTIMODAL, *VIDEO_ARCHITECTURES}, {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"}
    assert set(PROVEN) == {*images, *AUDIO_ARCHITECTURES} == set(registry._adapters) - {"llama", "mistral"}
    assert images | thinkers == set(IMAGE_TEXT)
    assert ", ".join(sorted(PROVEN)) + ", and text-only" in explain_how_to_add()
    assert served_types() == sorted(PROVEN)
    assert "mistral3" not in explain_how_to_add()


@pytest.mark.parametrize("tower", ["pixtral", "siglip_vision_model"])
def test_another_tower_inside_a_known_type_is_refused(tower: str, tmp_path: Path) -> None:
    directory = edited("llava", tmp_path, vision_config={"model_type": tower})
    failed = prove(directory).failed  # here: a process of its own takes seconds more
    assert failed is not None
    assert failed.name == "weights"
    for load in (RequestProcessor, lambda where: load_model(where, "E"), lambda where: load_model(where, "D")):
        with pytest.raises(UnsupportedModel, match=rf"'llava' is proven with .*'clip_vision_model'.*{tower}"):
            load(directory)


def test_another_text_model_inside_a_known_type_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlavaConfig, MistralConfig, OlmoConfig

    assert find_adapter(LlavaConfig(vision_config={"model_type": "clip_vision_model"}))[1]
    assert not find_adapter(LlavaConfig(text_config=MistralConfig()))[1], "known alone, and not inside of LLaVA"
    monkeypatch.setattr(model_types, "registered", {"llava"})
    assert find_adapter(LlavaConfig(text_config=MistralConfig()))[1], "known, and its author answers for the rest"
    assert not find_adapter(LlavaConfig(text_config=OlmoConfig()))[1], "nobody has proven it"
    register_adapter("olmo", ModelAdapter)
    assert not find_adapter(OlmoConfig())[1], "a registered text model is checked like any other"


def test_who_registers_an_adapter_answers_for_its_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PaliGemmaConfig

    monkeypatch.setattr(model_types, "registered", set())
    monkeypatch.setattr(registry, "_adapters", dict(registry._adapters))
    register_adapter("paligemma", ModelAdapter)
    assert find_adapter(PaliGemmaConfig())[0].multimodal
    assert "paligemma" in known_models()
    assert "paligemma" in explain_how_to_add()


def test_an_adapter_that_sees_no_media_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_types, "registered", set())
    monkeypatch.setattr(registry, "_adapters", dict(registry._adapters))
    register_adapter("chameleon", ModelAdapter)
    with pytest.raises(UnsupportedModel, match=r"'chameleon' has vq_config.*ModelAdapter sees no media"):
        find_adapter(configs()["chameleon"])


def test_a_type_that_an_installed_package_names_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("fuyu", "theirs:Adapter", model_types.ENTRY_POINTS)
    monkeypatch.setattr(model_types, "entry_points", lambda group: [point])
    check_config(configs()["fuyu"])
    assert "fuyu" in served_types()


def test_nothing_of_a_checkpoint_is_loaded_without_saying_that_its_code_is_not_trusted() -> None:
    """Left out, transformers asks at the terminal, and takes the answer from whatever stdin is."""
    asked = 0
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        loads = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and _is_load(node)]
        asked += len(loads)
        for node in loads:
            assert "trust_remote_code=False" in ast.unparse(node), f"{path}:{node.lineno}"
            assert "local_files_only=True" in ast.unparse(node), f"{path}:{node.lineno}"
    assert asked >= 8


FINDS = ("get_processor_dict", "get_video_processor_dict", "_snapshot")  # read settings, or find files


def _is_load(node: ast.Call) -> bool:
    """Calls of from_pretrained, under its own name or that of a variable, which also names local files.

    A snapshot is downloaded or found, and nothing of it is loaded there.
    """
    name, words = ast.unparse(node.func), {word.arg for word in node.keywords}
    return name.endswith(".from_pretrained") or ("local_files_only" in words and not name.endswith(FINDS))
