"""Shapes by hand and from config.json: the figures of the papers, and those of transformers' own models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trinity.core.messages import IMAGE, KV
from trinity.costs import model_config
from trinity.costs.model_shape import MODELS, LayerShape, ModelShape, get_model_shape
from trinity.costs.pool_sizes import capacity
from trinity.errors import ConfigError, UnknownName, UnsupportedModel

LLAVA = {  # as such checkpoints are written: what is transformers' default is left out
    "model_type": "llava",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    },
}
QWEN2_VL = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "vocab_size": 152064,
    "vision_config": {
        "model_type": "qwen2_vl_vision",
        "depth": 32,
        "embed_dim": 1280,
        "mlp_ratio": 4,
        "num_heads": 16,
        "hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
    },
}
VISION = ("vision", "visual", "projector", "connector", "image_newline")
SIZES = ["language", "vocabulary", "kv_bytes", "feature_bytes", "read_bytes", "context"]


@pytest.mark.parametrize(
    ("name", "kv_bytes", "feature_bytes", "read_gb"),
    [
        ("llava-1.5-7b", 524_288, 8_192, 13.2),
        ("llava-next-7b", 524_288, 8_192, 13.2),
        ("qwen2-vl-7b", 57_344, 7_168, 14.1),
    ],
)
def test_bytes_of_the_papers_models(name: str, kv_bytes: int, feature_bytes: int, read_gb: float) -> None:
    shape = get_model_shape(name)
    assert (shape.kv_bytes, shape.feature_bytes) == (kv_bytes, feature_bytes)
    assert round(shape.read_bytes / 1e9, 1) == read_gb


def test_pangu_is_as_its_paper_gives_it() -> None:
    pangu = get_model_shape("openpangu-7b-vl")
    assert pangu.vision_bytes / 2 == pytest.approx(0.7e9, rel=0.05)
    assert pangu.read_bytes / 2 == pytest.approx(7e9, rel=0.02)
    assert pangu.visual_tokens(1280, 720) == pangu.image_tokens == 1196
    assert pangu.feature_bytes == 3584 * 2
    assert pangu.kv_bytes * 1024 * 16 == pytest.approx(12.58e9 * 0.71553, rel=0.02)  # table 4: GB/s times seconds
    assert pangu.kv_bytes * 2048 * 16 == pytest.approx(11.71e9 * 1.53649, rel=0.02)


@pytest.mark.parametrize(
    ("name", "parameters", "feature_bytes", "kv_bytes"),
    [  # parameters as the model hub counts them; a row of Qwen3-VL brings those of three more layers (DeepStack)
        ("qwen2.5-vl-3b", 3.755e9, 2 * 2048, 36 * 2 * 256 * 2),
        ("qwen2.5-vl-7b", 8.292e9, 2 * 3584, 28 * 2 * 512 * 2),
        ("qwen2.5-vl-32b", 33.45e9, 2 * 5120, 64 * 2 * 1024 * 2),
        ("qwen2.5-vl-72b", 73.41e9, 2 * 8192, 80 * 2 * 1024 * 2),
        ("qwen3-vl-2b", 2.128e9, 4 * 2 * 2048, 28 * 2 * 1024 * 2),
        ("qwen3-vl-4b", 4.438e9, 4 * 2 * 2560, 36 * 2 * 1024 * 2),
        ("qwen3-vl-8b", 8.767e9, 4 * 2 * 4096, 36 * 2 * 1024 * 2),
        ("qwen3-vl-32b", 33.36e9, 4 * 2 * 5120, 64 * 2 * 1024 * 2),
    ],
)
def test_published_sizes(name: str, parameters: float, feature_bytes: int, kv_bytes: int) -> None:
    shape = get_model_shape(name)
    weights = (shape.language_bytes + shape.vision_bytes) / shape.dtype_bytes
    assert weights == pytest.approx(parameters, rel=0.005)
    assert (shape.feature_bytes, shape.kv_bytes) == (feature_bytes, kv_bytes)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_what_a_planner_needs(name: str) -> None:
    shape = get_model_shape(name)
    said = re.search(r"-(\d+)b", name)  # billions of parameters, which the smallest round
    billions = float(said[1]) if said is not None else 8.0
    assert 0.85 * billions < shape.language_bytes / 2e9 < 1.15 * billions
    towers = [each for each in (shape.vision, shape.audio) if each]
    assert len(towers) == 2 if "omni" in name else len(towers) == 1
    assert 0.2e9 < shape.vision_bytes / len(towers) < 1.6e9
    assert shape.visual_tokens(1024, 768) > 0
    assert shape.weight_bytes("EPD") == shape.weight_bytes("E") + shape.weight_bytes("D")
    assert shape.weight_bytes("PD") == shape.weight_bytes("P") == shape.weight_bytes("D") == shape.language_bytes


def test_pools_fill_the_memory_that_weights_leave() -> None:
    shape = get_model_shape("llava-1.5-7b")
    only_decode = shape.pools("D", 80e9)
    assert only_decode == {KV: int(80e9 - shape.language_bytes) // (16 * 524_288)}
    both = shape.pools("EPD", 80e9)
    used = both[IMAGE] * 576 * 8192 + both[KV] * 16 * 524_288 + shape.weight_bytes("EPD")
    assert 79.9e9 < used <= 80e9
    assert set(shape.pools("E", 80e9)) == {IMAGE}
    with pytest.raises(ConfigError, match="missing"):
        shape.pools("PD", 10e9)


def test_capacity_can_be_asked_of_a_model() -> None:
    shape = get_model_shape("llava-1.5-7b")
    assert capacity("D", shape.memory(), int(80e9)).kv_tokens == int(80e9 - shape.language_bytes) // 524_288


def test_an_unknown_model_is_named_with_those_known() -> None:
    with pytest.raises(UnknownName, match=r"qwen2-vl-7b.*the folder of its checkpoint"):
        get_model_shape("gpt")


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"width": -1}, {"kv_heads": 3}])
def test_layers_without_meaning_are_refused(wrong: dict[str, int]) -> None:
    good: dict[str, Any] = {"layers": 1, "width": 8, "heads": 4, "kv_heads": 2, "head_dim": 2, "ffn": 8}
    with pytest.raises(ConfigError, match="at least 1"):
        LayerShape(**{**good, **wrong})


# ---------------------------------------------------------------- config.json


def sizes(shape: ModelShape) -> list[Any]:
    return [getattr(shape, name) for name in SIZES]


@pytest.mark.parametrize(("config", "name"), [(LLAVA, "llava-1.5-7b"), (QWEN2_VL, "qwen2-vl-7b")])
def test_a_config_gives_the_shape_by_hand(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, known = model_config.read_model_shape(tmp_path), get_model_shape(name)
    assert sizes(found) == sizes(known)
    assert found.vision is not None
    assert known.vision is not None
    assert found.vision.layers == known.vision.layers
    assert found.vision.patches == known.vision.patches
    assert found.vision_bytes == pytest.approx(known.vision_bytes, rel=0.02)
    assert sizes(model_config.read_model_shape(tmp_path / "config.json")) == sizes(found)


def test_the_preprocessor_gives_the_limits_of_the_rule(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_VL))
    assert model_config.read_model_shape(tmp_path).visual_tokens(1024, 1024) == 1225
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 12_845_056}))
    assert model_config.read_model_shape(tmp_path).visual_tokens(1024, 1024) == 1369


def test_a_model_of_text_alone() -> None:
    shape = model_config.from_config({"model_type": "llama", "num_key_value_heads": 8, "torch_dtype": "float32"})
    assert (shape.vision, shape.feature_bytes, shape.vision_bytes, shape.image_tokens) == (None, 0, 0, 0)
    assert shape.kv_bytes == 2 * 32 * 8 * 128 * 4
    assert set(shape.pools("PD", 80e9)) == {KV}


@pytest.mark.parametrize(
    ("family", "extra", "vision", "size", "tokens"),
    [
        ("llava_next", {}, {"image_size": 336, "patch_size": 14}, (1024, 1024), 2928),
        ("internvl", {"downsample_ratio": 0.5}, {"image_size": [448, 448], "patch_size": [14, 14]}, (448, 448), 256),
        ("gemma3", {"mm_tokens_per_image": 256}, {"image_size": 896, "patch_size": 14}, (500, 20), 256),
        ("idefics3", {"scale_factor": 2}, {"image_size": 364, "patch_size": 14}, (728, 728), 169 * 17),
        ("smolvlm", {"scale_factor": 4}, {"image_size": 512, "patch_size": 16}, (512, 512), 64 * 17),
        ("qwen2_5_vl", {}, {"depth": 32, "hidden_size": 1280}, (280, 280), 100),
        ("qwen3_vl", {}, {"patch_size": 16}, (320, 640), 200),
        ("qwen3_vl", {}, {"patch_size": 16}, (64, 64), 64),
    ],
)
def test_rules_by_family(
    family: str, extra: dict[str, Any], vision: dict[str, Any], size: tuple[int, int], tokens: int
) -> None:
    small = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    config = {
        "model_type": family,
        "text_config": {"model_type": "llama"},
        "vision_config": {**small, **vision},
        **extra,
    }
    shape = model_config.from_config(config)
    assert shape.visual_tokens(*size) == tokens
    assert shape.image_tokens == shape.visual_tokens(1024, 768)


def test_a_transformers_config_saved_to_disk_has_the_models_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, vocab_size=128
    )
    config.num_key_value_heads = 2
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        llama = LlamaForCausalLM(config)
    matrices = sum(each.numel() for each in llama.parameters() if each.dim() == 2)
    shape = model_config.read_model_shape(tmp_path)
    assert shape.language_bytes == matrices * shape.dtype_bytes


@pytest.mark.parametrize(
    ("family", "within"),  # what is left out: embeddings of patches and positions, of which small encoders have many
    [
        ("Llava", 0.01),
        ("LlavaNext", 0.01),
        ("Qwen2VL", 0.04),
        ("Qwen2_5_VL", 0.04),
        ("Qwen3VL", 0.01),
        ("InternVL", 0.01),
        ("Gemma3", 0.09),
        ("SmolVLM", 0.03),
        ("Idefics3", 0.03),
    ],
)
def test_configs_of_transformers_have_the_matrices_of_its_models(tmp_path: Path, family: str, within: float) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    config = getattr(transformers, f"{family}Config")()
    config.save_pretrained(tmp_path)
    shape = model_config.read_model_shape(tmp_path)
    with torch.device("meta"):  # no weights, only their shapes
        made = transformers.AutoModelForImageTextToText.from_config(config)
    sizes = {name: each.numel() for name, each in made.named_parameters() if each.dim() > 1}
    vision = sum(size for name, size in sizes.items() if any(part in name for part in VISION))
    assert shape.language_bytes == (sum(sizes.values()) - vision) * shape.dtype_bytes
    assert shape.vision_bytes == pytest.approx(vision * shape.dtype_bytes, rel=within)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config.json"):
        model_config.read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no configuration"):
        model_config.read_model_shape(tmp_path)
    with pytest.raises(ConfigError, match="language model's configuration has no embed_dim or hidden_size"):
        model_config.from_config({"model_type": "new"})
    with pytest.raises(ConfigError, match="vision model's configuration has no"):
        model_config.from_config({**LLAVA, "vision_config": {"hidden_size": 8}})
    with pytest.raises(UnsupportedModel, match="'new'"):
        model_config.from_config({**LLAVA, "model_type": "new"})


# ---------------------------------------------------------------- what a checkpoint leaves out, and odd values

SMALL = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
TILED = {**SMALL, "image_size": 336, "patch_size": 14}
QWEN2_5_VL = {
    "hidden_size": 1280,
    **{"depth": 32, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2},
    **{"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": 3584},
}


def config_of(family: str, vision: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {**QWEN2_VL, "model_type": family, "vision_config": vision, **extra}


@pytest.mark.parametrize("kind", [{}, {"model_type": "qwen2_5_vl"}, {"model_type": "qwen2_5_vl_vision"}])
@pytest.mark.parametrize(
    "left_out",
    [("fullatt_block_indexes",), ("window_size",), ("window_size", "fullatt_block_indexes"), ("patch_size", "depth")],
)
def test_what_qwen2_5_vl_leaves_out_is_transformers_default(kind: dict[str, str], left_out: tuple[str, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    given = {name: value for name, value in QWEN2_5_VL.items() if name not in left_out}
    own = transformers.Qwen2_5_VLConfig(vision_config=given).vision_config
    shape = model_config.from_config(config_of("qwen2_5_vl", {**given, **kind}))
    assert shape.vision is not None
    assert shape.vision.layers.layers == own.depth
    assert shape.vision.span == (own.window_size // own.patch_size) ** 2 == 64
    assert shape.vision.full_layers == len(own.fullatt_block_indexes) == 4


def test_a_window_is_whole_visual_tokens_and_full_layers_are_those_there_are() -> None:
    def vision(**odd: Any) -> Any:
        return model_config.from_config(config_of("qwen2_5_vl", {**QWEN2_5_VL, **odd})).vision

    assert vision(window_size=139).span == 64, "the model floors to whole visual tokens"
    assert vision(window_size=140).span == 100
    assert vision(fullatt_block_indexes=[7, 7, 31, 32, -1]).full_layers == 2
    assert vision(fullatt_block_indexes=[]).full_layers == 0


WINDOWS: tuple[Any, ...] = ("x", [112], -5, 7, 0, True, {}, float("inf"), float("nan"))
LISTED: tuple[Any, ...] = (7, "7", [7.5], [None], {"7": 1}, True)


@pytest.mark.parametrize(
    "odd",
    [
        *({"window_size": value} for value in WINDOWS),
        *({"fullatt_block_indexes": value} for value in LISTED),
        {"patch_size": 0},
        {"patch_size": [None]},
    ],
)
def test_odd_windows_are_typed(odd: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(odd))):
        model_config.from_config(config_of("qwen2_5_vl", {**QWEN2_5_VL, **odd}))


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (QWEN2_VL, {"min_pixels": 3136, "max_pixels": 10**6, "size": {"shortest_edge": 1, "longest_edge": 9}}),
    "qwen2_5_vl": (config_of("qwen2_5_vl", QWEN2_5_VL), {"size": {"shortest_edge": 3136, "longest_edge": 10**6}}),
    "qwen3_vl": (
        config_of("qwen3_vl", {**SMALL, "patch_size": 16, "deepstack_visual_indexes": [8, 16, 24]}),
        {"size": {"shortest_edge": 65536, "longest_edge": 10**6}},
    ),
    "llava": (LLAVA, {}),
    "llava_next": (config_of("llava_next", TILED, image_grid_pinpoints=[[336, 672]], tie_word_embeddings=True), {}),
    "internvl": (config_of("internvl", TILED, downsample_ratio=0.5), {"max_patches": 12}),
    "gemma3": (
        config_of("gemma3", TILED, mm_tokens_per_image=256),
        {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 4},
    ),
    "smolvlm": (config_of("smolvlm", TILED, scale_factor=2), {"size": {"longest_edge": 2048}}),
    "text": ({"model_type": "llama", "num_key_value_heads": 8, "head_dim": 128, "dtype": "float32"}, {}),
}
ODD_NUMBERS: tuple[Any, ...] = (-1, 0, 0.3, 10**400, float("nan"), 1e300)
ODD: tuple[Any, ...] = (None, "x", "12", True, *ODD_NUMBERS, [], [7], [[1, 1]], {}, {"a": 1})


@pytest.mark.parametrize("family", CONFIGS)
def test_any_value_of_any_field_gives_a_shape_or_is_typed(family: str) -> None:
    """Each field of each part takes each odd value: a shape whose images have tokens, or trinity's own error."""

    def shape(config: Any, preprocessor: Any) -> ModelShape | None:
        try:
            return model_config.from_config(config, preprocessor)
        except ConfigError:
            return None

    config, preprocessor = CONFIGS[family]
    assert shape(config, preprocessor) is not None
    for odd in ODD:
        found = [shape({**config, name: odd}, preprocessor) for name in config]
        found += [shape(config, {**preprocessor, name: odd}) for name in preprocessor]
        for part in ("text_config", "vision_config"):
            fields = config.get(part, {})
            found += [shape({**config, part: {**fields, name: odd}}, preprocessor) for name in fields]
        sizes = preprocessor.get("size", {})
        found += [shape(config, {**preprocessor, "size": {**sizes, name: odd}}) for name in sizes]
        for each in found:
            assert each is None or each.vision is None or each.visual_tokens(1024, 768) > 0


def test_a_kv_cache_in_fp8_halves_a_tokens_bytes_and_nothing_else() -> None:
    shape = MODELS["llava-1.5-7b"]
    rounded = msgspec.structs.replace(shape, kv_dtype_bytes=1)
    assert rounded.kv_bytes * 2 == shape.kv_bytes
    assert (rounded.feature_bytes, rounded.read_bytes) == (shape.feature_bytes, shape.read_bytes)
    pools = [each.pools("D", 40e9)["kv"] for each in (shape, rounded)]
    assert pools[1] == pytest.approx(2 * pools[0], rel=0.01)
