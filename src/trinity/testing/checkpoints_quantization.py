"""Tiny checkpoints with quantised weights, made on the spot by transformers and the libraries of the methods.

Where a library quantises on a CPU it writes the files itself. MXFP4's and those of transformers' method "fp8", with a
scale for each block of E4M3, are written in the layout that is read.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trinity.errors import UnknownName
from trinity.testing.checkpoints import build_checkpoint, no_progress_bar, write_checkpoint
from trinity.testing.checkpoints_llava import wide_llava

SMALL_BLOCK = (32, 32)  # of tiny layers; published checkpoints have (128, 128)
_PRODUCT = re.compile(r"\b(q|k|v|o|gate|up|down)_proj\.weight$")
SCALED_TOGETHER = 32  # weights that share a scale
_FP4_SCALE = 123  # 2**-4 beside fp4's values, whose mean square is near 8: about 1.6 / sqrt(64)
_TOWER = ["model.vision_tower", "model.multi_modal_projector", "lm_head"]


def build_fp8_checkpoint(name: str, directory: Path, *, seed: int = 0, block: tuple[int, int] = SMALL_BLOCK) -> Path:
    """Write the tiny checkpoint ``name`` with the decoder layers' linear weights in FP8, the rest in float32.

    ``block``: outputs and inputs that share a scale, which is their largest value divided by 448. Raises
    ``UnknownName``.
    """
    built = build_checkpoint(name, directory, seed=seed)
    quantize_checkpoint(built, block)
    return built


def quantize_checkpoint(directory: Path, block: tuple[int, int]) -> None:
    """Round the decoder layers of a checkpoint in one file of safetensors to FP8, in place."""
    from safetensors.torch import load_file, save_file

    weights, path = load_file(directory / "model.safetensors"), directory / "model.safetensors"
    held = {key: _round_to_fp8(value, block) for key, value in weights.items() if _is_product(key, value, block)}
    kept = [key.removesuffix(".weight") for key, value in weights.items() if value.ndim == 2 and key not in held]
    for key, (rounded, scales) in held.items():
        weights |= {key: rounded, f"{key}_scale_inv": scales}
    save_file(weights, path, metadata={"format": "pt"})
    fields = {"activation_scheme": "dynamic", "weight_block_size": list(block), "modules_to_not_convert": kept}
    _write_quantization(directory, {"quant_method": "fp8", **fields})


def _is_product(key: str, value: Any, block: tuple[int, int]) -> bool:
    whole = value.ndim == 2 and not value.shape[0] % block[0] and not value.shape[1] % block[1]
    return whole and _PRODUCT.search(key) is not None and not re.search("vision|visual|vit", key)


def _round_to_fp8(weight: Any, block: tuple[int, int]) -> tuple[Any, Any]:
    """Round [outputs, inputs]; returns E4M3 and float32 scales [outputs / block, inputs / block]."""
    import torch

    tiles = weight.float().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scales = (tiles.abs().amax((1, 3)) / 448.0).clamp(min=1e-12)
    rounded = (tiles / scales[:, None, :, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return rounded.reshape(weight.shape).contiguous(), scales.contiguous()


def build_quantised_checkpoint(name: str, directory: Path, *, seed: int = 0) -> Path:
    """Write the tiny checkpoint ``name``, one of ``QUANTISED``: a LLaVA, or for MXFP4 a text model.

    "-text" names one whose vision tower is not quantised, "plain" the LLaVA before it is. Raises ``UnknownName``, and
    ``ImportError`` without the method's packages.
    """
    if name not in QUANTISED:
        raise UnknownName("tiny quantised checkpoint", name, QUANTISED)
    plain = Path(directory).with_name(f"{Path(directory).name}-plain")
    try:
        QUANTISED[name](plain, Path(directory), seed)
    finally:
        shutil.rmtree(plain, ignore_errors=True)
    return Path(directory)


def _by_transformers(make: Callable[[], Any]) -> Callable[[Path, Path, int], None]:
    """Have transformers quantise a LLaVA as it loads it, by the config that ``make`` makes, and save that."""

    def build(plain: Path, directory: Path, seed: int) -> None:
        import transformers

        auto: Any = transformers.AutoModelForImageTextToText
        with no_progress_bar():
            write_checkpoint(wide_llava(), plain, seed)
            loaded = {"dtype": "float32", "quantization_config": make()}
            auto.from_pretrained(plain, **loaded, local_files_only=True, trust_remote_code=False).save_pretrained(
                directory
            )
        _copy_rest(plain, directory)

    return build


def _nf4(skipped: list[str] | None = None) -> Any:
    import torch
    import transformers

    make: Any = transformers.BitsAndBytesConfig
    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.float32}
    return make(load_in_4bit=True, llm_int8_skip_modules=skipped, **four)


def _int8(threshold: float) -> Any:
    """LLM.int8: columns with a value above ``threshold`` in any row are multiplied apart; 0: none are."""
    import transformers

    make: Any = transformers.BitsAndBytesConfig
    return make(load_in_8bit=True, llm_int8_threshold=threshold)


def _torchao(rounds_activations: bool = False) -> Any:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8DynamicActivationInt8WeightConfig() if rounds_activations else Int8WeightOnlyConfig())


def _compressed(weights: Mapping[str, Any], activations: Mapping[str, Any] | None, ignore: list[str]) -> Any:
    """Have compressed-tensors quantise the linear layers of a LLaVA, by the largest value of each group or row."""

    def build(plain: Path, directory: Path, seed: int) -> None:
        import transformers
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config

        write_checkpoint(wide_llava(), plain, seed)
        group = {
            "targets": ["Linear"],
            "weights": dict(weights),
            "input_activations": activations and dict(activations),
        }
        config = QuantizationConfig(
            config_groups={"group_0": group}, ignore=ignore, quantization_status=QuantizationStatus.FROZEN
        )
        auto: Any = transformers.AutoModelForImageTextToText
        with no_progress_bar():
            model = auto.from_pretrained(plain, dtype="float32", local_files_only=True, trust_remote_code=False)
            apply_quantization_config(model, config, show_progress=False)
            _set_scales(model)
            compressor = ModelCompressor.from_pretrained_model(model)
            compressor.compress_model(model)
            model.save_pretrained(directory)
        compressor.update_config(str(directory))
        fields = json.loads((directory / "config.json").read_text())["quantization_config"]
        _write_quantization(directory, fields | {"ignore": ignore})  # it writes names that transformers does not read
        _copy_rest(plain, directory)

    return build


def _set_scales(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            scale, bits = module.weight_scale, module.quantization_scheme.weights.num_bits
            largest = 448.0 if module.quantization_scheme.weights.type == "float" else 2 ** (bits - 1) - 1
            groups = module.weight.detach().view(len(scale), scale.shape[1], -1) if scale.ndim == 2 else module.weight
            scale.data.copy_((groups.abs().amax(-1) / largest).view_as(scale))


def _mxfp4(plain: Path, directory: Path, seed: int) -> None:
    """Write a gpt_oss model whose experts are random values of FP4, 32 of which share a power of two."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    from trinity.testing.checkpoints_recipes import TEXT_CONFIG, Recipe, llama_tokenizer, text_ids

    tokenizer = llama_tokenizer()
    config = GptOssConfig(
        **{**TEXT_CONFIG, **text_ids(tokenizer)},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=24,
        head_dim=16,
    )
    write_checkpoint(Recipe(config, GptOssForCausalLM, tokenizer), directory, seed)
    generator, path = torch.Generator().manual_seed(seed), directory / "model.safetensors"
    weights = load_file(path)
    for name in [each for each in weights if each.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        shape = (experts, outputs, inputs // SCALED_TOGETHER)
        weights[f"{name}_blocks"] = torch.randint(
            256, (*shape, SCALED_TOGETHER // 2), dtype=torch.uint8, generator=generator
        )
        weights[f"{name}_scales"] = torch.full(shape, _FP4_SCALE, dtype=torch.uint8)
    save_file(weights, path, metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _write_quantization(directory, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def _packed(method: str) -> Callable[[Path, Path, int], None]:
    """Have the text layers of a LLaVA rounded to the nearest of four bits, in the layout of GPTQ or AWQ."""

    def build(plain: Path, directory: Path, seed: int) -> None:
        from safetensors.torch import load_file, save_file

        write_checkpoint(wide_llava(), directory, seed)
        path = directory / "model.safetensors"
        weights = load_file(path)
        for name in [each for each in weights if "language" in each and each.endswith("proj.weight")]:
            fields = (_pack_gptq if method == "gptq" else _pack_awq)(*_round_to_nibbles(weights.pop(name)))
            weights |= {name.removesuffix("weight") + field: held.contiguous() for field, held in fields.items()}
        save_file(weights, path, metadata={"format": "pt"})
        _write_quantization(directory, _PACKED[method])

    return build


def _round_to_nibbles(weight: Any) -> tuple[Any, Any]:
    """Round a weight [out, in] to 0 to 15 around 8: these [out, in], and the scales [out, groups]."""
    groups = weight.view(len(weight), -1, SCALED_TOGETHER)
    scales = groups.abs().amax(-1) / 7
    return ((groups / scales[..., None]).round() + 8).int().view_as(weight), scales


def _pack_gptq(nibbles: Any, scales: Any) -> dict[str, Any]:
    """Pack eight inputs of an output into a word. A zero is stored less one."""
    import torch

    outputs, inputs = nibbles.shape
    return {
        "qweight": _to_words(nibbles.T.reshape(-1, 8, outputs).transpose(1, 2)),
        "qzeros": _to_words(torch.full((scales.shape[1], outputs // 8, 8), 7)),
        "scales": scales.T.half(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // SCALED_TOGETHER,
    }


def _pack_awq(nibbles: Any, scales: Any) -> dict[str, Any]:
    """Pack eight outputs of an input into a word, even ones first."""
    import torch

    outputs = len(nibbles)
    return {
        "qweight": _to_words(nibbles.T.reshape(-1, outputs // 8, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]),
        "qzeros": _to_words(torch.full((scales.shape[1], outputs // 8, 8), 8)),
        "scales": scales.T.half(),
    }


def _to_words(nibbles: Any) -> Any:
    """Pack the last axis, of eight, into words of 32 bits, the first one lowest."""
    import torch

    words = (nibbles.to(torch.int64) << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _plain(plain: Path, directory: Path, seed: int) -> None:
    write_checkpoint(wide_llava(), directory, seed)


def _write_quantization(directory: Path, fields: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": fields}, indent=2) + "\n")


def _copy_rest(plain: Path, directory: Path) -> None:
    """Copy what belongs to a checkpoint beside its weights: tokenizer, processor, template."""
    for path in plain.iterdir():
        if path.suffix != ".safetensors" and not (directory / path.name).exists():
            shutil.copy(path, directory / path.name)


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": SCALED_TOGETHER}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_EACH_TOKEN = {"symmetric": True, "strategy": "token", "dynamic": True}
_EACH_STEP = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": True}
_INT8_ROWS, _FP8_ROWS = {**_EACH_TOKEN, "num_bits": 8, "type": "int"}, {**_EACH_TOKEN, "num_bits": 8, "type": "float"}
_HEAD, _NO_TOWER = ["lm_head"], ["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]
_GROUPS = {"bits": 4, "group_size": SCALED_TOGETHER}
_PACKED: Mapping[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "version": "gemm", "zero_point": True, "modules_to_not_convert": _TOWER, **_GROUPS},
    "gptq": {"quant_method": "gptq", "desc_act": False, "sym": True, "checkpoint_format": "gptq", **_GROUPS},
}

QUANTISED: Mapping[str, Callable[[Path, Path, int], None]] = {
    "awq": _packed("awq"),
    "bnb-int8": _by_transformers(lambda: _int8(0.0)),
    "bnb-int8-outliers": _by_transformers(lambda: _int8(6.0)),
    "bnb-nf4": _by_transformers(_nf4),
    "bnb-nf4-text": _by_transformers(lambda: _nf4(_TOWER)),
    "compressed-int4": _compressed(_INT4, None, _HEAD),
    "compressed-int4-text": _compressed(_INT4, None, _NO_TOWER),
    "compressed-int8": _compressed(_INT8, _INT8_ROWS, _HEAD),
    "compressed-fp8": _compressed(_FP8, _FP8_ROWS, _HEAD),
    "compressed-mixed-rows": _compressed(_INT8, _EACH_STEP, _HEAD),
    "gptq": _packed("gptq"),
    "mxfp4": _mxfp4,
    "plain": _plain,
    "torchao-int8": _by_transformers(_torchao),
    "torchao-int8-rows": _by_transformers(lambda: _torchao(rounds_activations=True)),
}
