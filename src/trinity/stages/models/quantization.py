"""Checkpoints with FP8 weights, of transformers' method "fp8": which are served, and how transformers loads them.

On a GPU that has FP8 the weights stay as they are (``fp8_linear``). Elsewhere they are widened as they are loaded, by
transformers' own rule (``FineGrainedFP8Config(dequantize=True)``), and nothing behind the loader sees a difference.
"""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.arguments import show
from trinity.memory.weight_digests import list_weight_files
from trinity.preprocess.checkpoint.config_file import list_tensors, read_json
from trinity.stages.kernels.gpu.fp8_linear import explain_no_fp8_products
from trinity.stages.models.quantizers import check_method, name_method

logger = logging.getLogger("trinity")
FP8_METHOD = "fp8"
_OWN_METHOD = "trinity_fp8"  # the same under another name: without accelerate, which no load of ours needs
_SCALE, _E4M3 = ".weight_scale_inv", "F8_E4M3"


def read_quantization(directory: Path) -> dict[str, Any] | None:
    """Return what a checkpoint's config says of its quantised weights; None if they are as they were trained.

    Raises ``UnsupportedModel`` for a method that is not served, by its name, and ``ConfigError`` for a broken config.
    Fields of another method than FP8's are transformers' own quantizers' (``quantizers``).
    """
    config = read_json(directory / "config.json")
    text = config.get("text_config")
    fields = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    if not fields:
        return None
    if not isinstance(fields, dict):
        raise ConfigError(f"{directory}: quantization_config is an object of JSON, got {show(fields)}")
    if not is_fp8(fields):
        check_method(fields, directory)
    elif fields.get("modules_to_convert"):
        raise UnsupportedModel(f"{directory} has FP8 weights besides those of linear layers, which are not served")
    return fields


def is_fp8(fields: dict[str, Any] | None) -> bool:
    """Tell if these are the fields of FP8 with scales of blocks, the method of this module."""
    return fields is not None and name_method(fields) == FP8_METHOD


def is_proven(fields: dict[str, Any] | None, directory: Path, device: torch.device) -> bool:
    """Tell if tests have proven how these weights are served; raises as ``check_method`` does, for a device too."""
    return fields is None or is_fp8(fields) or check_method(fields, directory, device).proven


def choose_fp8(fields: dict[str, Any] | None, directory: Path, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell if FP8 weights stay so on ``device``; if a GPU has to hold them widened, the log says why."""
    if fields is None or not is_fp8(fields) or device.type != "cuda":
        return False
    why = _explain_unkept(fields, directory) or explain_no_fp8_products(device, dtype)
    if why is not None:
        logger.warning("the FP8 weights in %s are widened to %s on %s: %s", directory, dtype, device, why)
    return why is None


def _explain_unkept(fields: dict[str, Any], directory: Path) -> str | None:
    """Return why no kernel takes such a checkpoint's layers as they are."""
    block = fields.get("weight_block_size", (128, 128))
    if not isinstance(block, list | tuple) or len(block) != 2 or not all(map(_is_block, block)):
        return f"its blocks are {block}, and the kernels take two powers of two of at least 16"
    if fields.get("activation_scheme", "dynamic") != "dynamic" or fields.get("scale_fmt", "float") != "float":
        return "it has scales for its activations, or others than float32"
    held = list_fp8_layers(directory)
    if not held or any(".experts." in name for name in held):
        return "it has layers in FP8 that are no linear ones, or its files do not tell which"
    return None


def _is_block(size: Any) -> bool:
    return type(size) is int and size >= 16 and not size & (size - 1)


def list_fp8_layers(directory: Path) -> list[str]:
    """List the layers whose weights a checkpoint holds with scales, as its files name them.

    Raises ``ConfigError`` if one in FP8 lacks its scales: it would be read as if it were plain.
    """
    files = [path for path in list_weight_files(directory) if path.suffix == ".safetensors"]
    tensors = {name: kind for path in files for name, kind in list_tensors(path).items()}
    bare = [name for name, kind in tensors.items() if kind == _E4M3 and f"{name}_scale_inv" not in tensors]
    if bare:
        raise ConfigError(f"{directory} has weights in FP8 without their scales, among them {', '.join(bare[:3])}")
    return sorted(name.removesuffix(_SCALE) for name in tensors if name.endswith(_SCALE))


def prepare_quantized(config: Any, fields: dict[str, Any], directory: Path, keep: bool) -> None:
    """Have transformers load a checkpoint with this ``config`` by the rules of this module.

    Raises ``ConfigError`` as ``list_fp8_layers`` does.
    """
    _register()
    layers = list_fp8_layers(directory)
    config.quantization_config = {
        **{name: value for name, value in fields.items() if name != "modules_to_not_convert"},
        **{"quant_method": _OWN_METHOD, "dequantize": not keep},
        "modules_to_not_convert": layers if keep else None,  # see ``_replace_layers``
    }


def convert_to_fp8(model: Any, fields: dict[str, Any], directory: Path) -> None:
    """Give a model without weights the layers that ``prepare_quantized`` makes transformers load."""
    from transformers.quantizers.auto import AutoHfQuantizer

    prepare_quantized(model.config, fields, directory, keep=True)
    quantizer: Any = AutoHfQuantizer.from_config(model.config.quantization_config, pre_quantized=True)
    quantizer._process_model_before_weight_loading(model)  # its public preprocess_model also marks the model


def align_dtypes(model: Any, dtype: torch.dtype) -> None:
    """Convert what was not quantised, and kept its dtype on disk, to the model's."""
    for module in model.modules():
        for name, held in module.named_parameters(recurse=False):
            if held.dtype != dtype and held.dtype.itemsize > 1 and not name.endswith("scale_inv"):
                setattr(module, name, nn.Parameter(held.detach().to(dtype), requires_grad=False))


@cache
def _register() -> None:
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config

    class Config(FineGrainedFP8Config):
        """The method's settings; when weights stay in FP8, ``modules_to_not_convert`` names those that do."""

    class Quantizer(FineGrainedFP8HfQuantizer):
        """The method's own loading, on a device that is chosen before."""

        def validate_environment(self, *given: Any, **named: Any) -> None:
            pass

        def _process_model_before_weight_loading(self, model: Any, **named: Any) -> None:
            if not self.quantization_config.dequantize:
                _replace_layers(self, model)

        def _process_model_after_weight_loading(self, model: Any, **named: Any) -> Any:
            return model

    register_quantization_config(_OWN_METHOD)(Config)
    register_quantizer(_OWN_METHOD)(Quantizer)


def _replace_layers(quantizer: Any, model: Any) -> None:
    """Replace the linear layers that the files hold in FP8, and no others, by transformers' FP8 layers.

    transformers goes by the config, whose list may be for other names than a part of the model has; a layer that it
    took for a plain one would get its numbers without their scales.
    """
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    settings = quantizer.quantization_config
    quantizer._normalize_modules_to_not_convert(model)  # into the names of the model's own modules
    held = set(settings.modules_to_not_convert)
    unknown = sorted(held - model.whole_names)
    if unknown:
        raise UnsupportedModel(f"the checkpoint has FP8 layers that the model does not name so: {unknown[:3]}")
    plain = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in held]
    replace_with_fp8_linear(model, plain, settings, pre_quantized=True)
    wrong = [name for name, module in model.named_modules() if name in held and not hasattr(module, "weight_scale_inv")]
    if wrong:
        raise ConfigError(f"layers in FP8 that are no linear ones: {', '.join(wrong[:3])}")
