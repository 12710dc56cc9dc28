"""Tiny checkpoints with FP8 weights, as transformers' method "fp8" has them: a scale for each block of E4M3."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trinity.testing.checkpoints import build_checkpoint

SMALL_BLOCK = (32, 32)  # of tiny layers; published checkpoints have (128, 128)
_PRODUCT = re.compile(r"\b(q|k|v|o|gate|up|down)_proj\.weight$")


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
    held = {key: _quantize(value, block) for key, value in weights.items() if _is_product(key, value, block)}
    kept = [key.removesuffix(".weight") for key, value in weights.items() if value.ndim == 2 and key not in held]
    for key, (rounded, scales) in held.items():
        weights |= {key: rounded, f"{key}_scale_inv": scales}
    save_file(weights, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": kept,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _is_product(key: str, value: Any, block: tuple[int, int]) -> bool:
    whole = value.ndim == 2 and not value.shape[0] % block[0] and not value.shape[1] % block[1]
    return whole and _PRODUCT.search(key) is not None and not re.search("vision|visual|vit", key)


def _quantize(weight: Any, block: tuple[int, int]) -> tuple[Any, Any]:
    """Round [outputs, inputs]; returns E4M3 and float32 scales [outputs / block, inputs / block]."""
    import torch

    tiles = weight.float().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    scales = (tiles.abs().amax((1, 3)) / 448.0).clamp(min=1e-12)
    rounded = (tiles / scales[:, None, :, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return rounded.reshape(weight.shape).contiguous(), scales.contiguous()
