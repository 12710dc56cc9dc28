"""Loading: only the weights of a role, shared within the process; what cannot be served is refused by name."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from support.checkpoint_files import checkpoint
from trinity.errors import ConfigError, UnsupportedModel
from trinity.memory.weight_digests import sample_digest
from trinity.preprocess.checkpoint import model_types
from trinity.stages.kernels.decoder_layers import _Identity
from trinity.stages.models import (
    LoadedModel,
    ModelAdapter,
    known_models,
    load_bar,
    load_model,
    loader,
    register_adapter,
    registry,
)
from trinity.testing.checkpoints import ARCHITECTURES

TEXT_ONLY = ("llama", "mistral")
MULTIMODAL = tuple(name for name in ARCHITECTURES if name not in TEXT_ONLY)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 128,
}
SLIDING = ["sliding_attention", "full_attention", "full_attention"]
LONG = {"rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def tensors_of(model: LoadedModel) -> set[str]:
    return {name for part in (model.vision, model.language) if part is not None for name, _ in part.named_parameters()}


def stored_bytes(directory: Path, left_out: Sequence[str] = ()) -> int:
    """But for keys with one of ``left_out`` in them."""
    held = [item for path in directory.glob("*.safetensors") for item in load_file(path).items()]
    return sum(tensor.nbytes for key, tensor in held if not any(each in key for each in left_out))


def unused(model: LoadedModel) -> list[str]:
    """Layers of the encoder that no feature comes of, by the end of their names."""
    named = model.vision.named_modules()
    return [
        f"vision_tower.{name.partition('vision_tower.')[2]}." for name, each in named if isinstance(each, _Identity)
    ]


@pytest.mark.parametrize("name", MULTIMODAL)
def test_each_role_holds_its_own_weights_and_no_other(name: str) -> None:
    e, pd, both = (load_model(checkpoint(name), letters, dtype="float32") for letters in ("E", "PD", "EPD"))
    assert e.language is None
    assert pd.vision is None
    assert not any("language_model" in key or "text_model" in key or "lm_head" in key for key in tensors_of(e))
    assert all("language_model" in key or "text_model" in key or "lm_head" in key for key in tensors_of(pd) - NEWLINE)
    assert tensors_of(both) == tensors_of(e) | tensors_of(pd)
    held = e.weight_bytes + pd.weight_bytes
    assert both.weight_bytes == held
    stored = stored_bytes(checkpoint(name), unused(e))
    assert 0 <= held - stored < 4096, "rotary tables and image_newline are all that is added"


NEWLINE = {"model.image_newline"}


@pytest.mark.parametrize("name", TEXT_ONLY)
def test_a_text_only_model_has_no_encode_part(name: str) -> None:
    model = load_model(checkpoint(name), "EPD", dtype="float32")
    assert (model.multimodal, model.vision, model.image_shape(), model.media_token_ids) == (
        False,
        None,
        None,
        frozenset(),
    )
    with pytest.raises(ConfigError, match="needs no E instance"):
        load_model(checkpoint(name), "E")


def test_instances_of_one_process_share_parts_but_no_config() -> None:
    p, d, monolith = (load_model(checkpoint("llava"), letters) for letters in ("P", "D", "EPD"))
    assert p.language is d.language is monolith.language
    assert monolith.vision is load_model(checkpoint("llava"), "E").vision
    configs = [monolith.vision.config, monolith.language.config, p.config, d.config]
    assert len({id(config) for config in configs}) == 4
    assert load_model(checkpoint("llava"), "P", dtype="bfloat16").language is not p.language


def test_parts_are_dropped_with_the_last_instance() -> None:
    model = load_model(checkpoint("llava"), "P", dtype=torch.float16)
    kept = id(model.language)
    again = load_model(checkpoint("llava"), "D", dtype=torch.float16)
    assert id(again.language) == kept
    del model, again
    gc.collect()
    from trinity.stages.models import loader

    assert not [key for key in loader._parts if torch.float16 in key]


def test_shapes_of_blocks() -> None:
    model = load_model(checkpoint("qwen3_vl"), "P", dtype="float32")
    assert model.kv_shape(8).shape == (3, 2, 2, 8, 16)
    image = model.image_shape(10)
    assert image is not None
    assert image.shape == (10, 64 * 3), "two deepstack layers beside the features"
    assert image == load_model(checkpoint("qwen3_vl"), "E", dtype="float32").image_shape(10)
    assert model.kv_shape().dtype is torch.float32
    assert load_model(checkpoint("qwen3_vl"), "P", dtype="torch.bfloat16").kv_shape().dtype is torch.bfloat16
    assert model.media_token_ids == {model.config.image_token_id, model.config.video_token_id}


def test_fingerprint_tells_models_apart(tmp_path: Path) -> None:
    own = load_model(checkpoint("llama"), "P", dtype="float32").fingerprint
    copy = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    assert load_model(copy, "D", dtype="float32").fingerprint == own
    assert load_model(copy, "D", dtype="bfloat16").fingerprint != own
    edit_config(copy, rms_norm_eps=1e-3)
    assert load_model(copy, "D", dtype="float32").fingerprint != own


def edit_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_checkpoint_written_anew_is_read_anew(tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    first = load_model(copy, "P", dtype="float32")
    weights = load_file(copy / "model.safetensors")
    save_file({key: value * 2 for key, value in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    second = load_model(copy, "P", dtype="float32")
    assert not torch.equal(first.language.lm_head.weight, second.language.lm_head.weight)


def _no_change(path: Path) -> None:
    """It is only another file."""


def _other_weights(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(("change", "refused"), [(_other_weights, True), (_no_change, False)])
def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_refused(
    change: Callable[[Path], None], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of one and a fingerprint of the other would pass for a third; a new owner or link changes nothing."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "copy")
    sample = sample_digest

    def replace_behind(directory: Path) -> str:
        found = sample(directory)
        shutil.copy2(folder / "model.safetensors", folder / "new")
        change(folder / "new")
        shutil.copystat(folder / "model.safetensors", folder / "new")
        (folder / "new").replace(folder / "model.safetensors")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(loader, "sample_digest", replace_behind)
        with pytest.raises(ConfigError, match="were replaced while they were loaded") if refused else nullcontext():
            load_model(folder, "PD")
    assert load_model(folder, "PD").fingerprint


def test_the_thread_count_is_torchs() -> None:
    load_model(checkpoint("llama"), "P", threads=1)
    assert torch.get_num_threads() == 1


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize("letters", ["", "X", "EPDX", "e"])
def test_unknown_letters(letters: str) -> None:
    with pytest.raises(ConfigError, match="some of E, P and D"):
        load_model(checkpoint("llama"), letters)


def test_directories_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere' does not exist; give the directory"):
        load_model(tmp_path / "nowhere", "P")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(tmp_path, "P")
    (tmp_path / "config.json").write_text('{"model_type": "not-a-model"}')
    with pytest.raises(UnsupportedModel, match=r"(?s)supported are .*llava.*register_adapter"):
        load_model(tmp_path, "P")


def test_an_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="dtype 'float33'"):
        load_model(checkpoint("llama"), "P", dtype="float33")


@pytest.mark.parametrize(("name", "letters", "key"), [("llava", "E", "projector.linear_1"), ("llama", "D", "layers.1")])
def test_weights_that_are_not_there(name: str, letters: str, key: str, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint(name), tmp_path / "copy")
    weights = {k: value for k, value in load_file(copy / "model.safetensors").items() if key not in k}
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"lacks weights.*{key}"):
        load_model(copy, letters)


def test_weights_of_another_role_may_be_missing(tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint("llava"), tmp_path / "copy")
    weights = {k: value for k, value in load_file(copy / "model.safetensors").items() if "language_model" not in k}
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert load_model(copy, "E").weight_bytes > 0


def test_a_directory_without_weights(tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint("llama"), tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(ConfigError, match="cannot load the weights"):
        load_model(copy, "P")


def build(tmp_path: Path, model_type: str, **fields: object) -> Path:
    """A random text model of any type that transformers knows."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config_class: Any = CONFIG_MAPPING[model_type]
    config = config_class(**{**SMALL, **fields})
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) * (parameter.shape[-1] ** -0.5)
            parameter.data.add_(noise)
    model.save_pretrained(tmp_path / model_type)
    return tmp_path / model_type


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen2", {}),
        ("gemma2", {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0}),
        ("gpt_oss", {"head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("cohere2", {"sliding_window": 7, "logit_scale": 0.3}),
        ("granite", {"logits_scaling": 4.0}),
    ],
)
def test_unknown_types_that_pass_their_self_check(
    model_type: str, fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build(tmp_path, model_type, **fields)
    model = load_model(directory, "PD", dtype="float32")
    assert model.language.trinity_checked
    from trinity.stages.models import loader

    monkeypatch.setattr(loader, "self_check", lambda model: pytest.fail("checked once is enough"))
    assert load_model(directory, "D", dtype="float32").language is model.language
    monkeypatch.undo()
    half = load_model(directory, "PD", dtype="bfloat16")
    assert half.language.trinity_checked, "half precision has its own tolerance"


@pytest.mark.parametrize(
    ("model_type", "fields", "why"),
    [
        ("bloom", {}, "'bloom' cannot be served: its attention does not go through transformers' attention interface"),
        ("doge", {}, r"its logits are [\d.]+ off\. Known: .*llava.*register_adapter"),
    ],
)
def test_unknown_types_that_are_refused(model_type: str, fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        load_model(build(tmp_path, model_type, **fields), "PD", dtype="float32")


def test_the_head_of_a_registered_adapter_is_not_gone_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Louder(ModelAdapter):
        def head(self, model: Any, hidden: torch.Tensor) -> torch.Tensor:
            return super().head(model, hidden) + 1.0

    directory = build(tmp_path, "olmo")
    load_model(directory, "PD", dtype="float32")
    monkeypatch.setitem(registry._adapters, "olmo", Louder)
    monkeypatch.setattr(loader, "_parts", WeakValueDictionary())
    with pytest.raises(UnsupportedModel, match=r"through a paged cache its logits are [\d.]+ off"):
        load_model(directory, "PD", dtype="float32")


@pytest.mark.parametrize(
    ("model_type", "fields", "why"),
    [
        ("deepseek_v4", {}, "_attention layers"),
        # by these fields transformers' cache forgets what these types' masks show: generate() is not forward()
        ("llama", {"sliding_window": 8}, "'llama' has sliding_window in its config, .*; take that out"),
        ("granite", {"attention_chunk_size": 8}, "'granite' has attention_chunk_size in its config"),
        ("minimax_m2", {"sliding_window": 8}, "'minimax_m2' has sliding_window in its config"),
        ("llama", {"layer_types": SLIDING, "sliding_window": 8}, "'llama' has sliding_window and layer_types in"),
        ("deepseek_v32", {"qk_nope_head_dim": 0}, "indexed_attention layers .* no latents"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", **LONG}}, "'longrope'"),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_type": "longrope", **LONG}}}, "'longrope'"),
    ],
)
def test_layers_and_positions_that_no_paged_batch_can_serve(
    model_type: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SMALL, **fields}))
    with pytest.raises(UnsupportedModel, match=why):
        load_model(tmp_path, "P")


def test_a_kind_of_positions_that_is_no_text_is_a_typed_error(tmp_path: Path) -> None:
    rope = {"rope_type": ["dynamic"], "rope_theta": 1e4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, "rope_parameters": rope}))
    with pytest.raises(ConfigError):
        load_model(tmp_path, "P")


def test_a_window_that_the_cache_does_not_heed_is_no_matter(tmp_path: Path) -> None:
    """Where a config names the kind of each layer, transformers' cache goes by that alone."""
    config = AutoConfig.for_model("llama", **SMALL, layer_types=["full_attention"] * 3, sliding_window=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_model(tmp_path, "PD", dtype="float32").adapter.text_config.sliding_window == 8


def test_a_multimodal_model_without_an_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry._adapters, "llava")
    monkeypatch.setattr(model_types, "registered", set())
    with pytest.raises(UnsupportedModel, match=r"multimodal 'llava'.*Known: .*gemma3.*register_adapter"):
        load_model(checkpoint("llava"), "P")
    register_adapter("llava", ModelAdapter)
    assert load_model(checkpoint("llava"), "P").multimodal


def test_a_text_model_that_nobody_proved_is_checked_inside_a_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(model_types.PROVEN, "internvl", model_types.ProvenParts("internvl_vision", "llama"))
    assert load_model(checkpoint("internvl"), "P", dtype=torch.float64).language.trinity_checked


class NoModel:
    pass


@pytest.fixture
def entry_point(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.delitem(registry._adapters, "llava")

    def publish(value: str) -> None:
        point = EntryPoint("llava", value, model_types.ENTRY_POINTS)
        monkeypatch.setattr(
            registry, "entry_points", lambda **asked: [point] if asked.get("name", "llava") == "llava" else []
        )

    return publish


def test_an_adapter_from_an_entry_point(entry_point: Callable[[str], None]) -> None:
    entry_point("trinity.stages.models:ModelAdapter")
    assert "llava" in known_models()
    assert type(load_model(checkpoint("llava"), "P").adapter) is ModelAdapter


@pytest.mark.parametrize(
    ("value", "why"), [(f"{__name__}:NoModel", "no.* subclass of ModelAdapter"), ("nowhere:X", "cannot be imported")]
)
def test_a_broken_entry_point(entry_point: Callable[[str], None], value: str, why: str) -> None:
    entry_point(value)
    with pytest.raises(UnsupportedModel, match=why):
        load_model(checkpoint("llava"), "P")


@pytest.mark.parametrize(("watched", "large"), [(True, True), (True, False), (False, True)])
def test_a_long_load_shows_a_bar_to_who_watches(
    watched: bool, large: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_bar, "is_display_watched", lambda: watched)
    monkeypatch.setattr(load_bar, "LONG_LOAD_BYTES", 1 if large else 1 << 30)
    monkeypatch.setattr(loader, "_parts", {})  # what another test has loaded is not loaded again
    load_model(checkpoint("llava"), "P", dtype="float32")
    assert ("Loading weights: 100%" in capsys.readouterr().err) == (watched and large)


@pytest.mark.parametrize(
    ("dtype", "device", "forbidden"),
    [("float32", "cuda", True), ("bfloat16", "cuda", False), ("float32", "cpu", False)],
)
def test_float32_on_a_gpu_is_never_rounded_to_tf32(
    dtype: str, device: str, forbidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN's convolutions are by default, and with them an image's first rows: 1e-3 off, whatever a user has set."""

    def stop(*_: object) -> None:
        raise InterruptedError("its settings are what is looked at")

    monkeypatch.setattr(loader, "check_device", torch.device)
    monkeypatch.setattr(loader, "is_proven", lambda *_: True)
    monkeypatch.setattr(loader, "_part", stop)
    with _restore_precision():
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
        with pytest.raises(InterruptedError):
            load_model(checkpoint("llava"), "EPD", dtype=dtype, device=device)
        cudnn: Any = torch.backends.cudnn
        kinds = (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul)
        assert {each.fp32_precision for each in kinds} == {"ieee" if forbidden else "tf32"}
        assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is not forbidden
        with torch.backends.cudnn.flags(enabled=True):  # torch's own look at them, which wants them to agree
            pass


@contextmanager
def _restore_precision() -> Iterator[None]:
    both: Any = torch.backends
    before = both.fp32_precision, both.cudnn.allow_tf32, both.cuda.matmul.allow_tf32
    try:
        yield
    finally:
        both.fp32_precision, both.cudnn.allow_tf32, both.cuda.matmul.allow_tf32 = before
