"""Quantised weights that transformers' own quantizers load: which methods are served, and what is done around them.

A quantizer sees the whole model, as in transformers, and decides there which layers it replaces; then the other part's
modules are dropped, and only what is left is read (``loader``). Where a method's weights are widened as they are
loaded, a plain model remains, with all kernels. Where layers stay quantised they keep the library's own code, each is
run once before it serves, and none may mix the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trinity.errors import ConfigError, UnsupportedModel, describe_error
from trinity.memory.weight_digests import list_weight_files
from trinity.preprocess.checkpoint.config_file import list_sizes
from trinity.stages.kernels.swaps import is_altered

COMPRESSED, MXFP4, BITSANDBYTES = "compressed-tensors", "mxfp4", "bitsandbytes"
_LOUD = 1000.0  # of a row beside a quiet one, whose largest values it would hide in a scale that both share
_MIXED = {
    torch.float32: 1e-4
}  # mean error of a row that another has changed, of its mean; sums in another order differ
_MIXED_HALF = 2e-3
_NOT_READ = "transformers quantises with it as it loads, and reads no checkpoint that is quantised already"
_PLAIN_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # of a number in the files of safetensors
_DEPTH = 3  # of a quantised weight's own state: bitsandbytes' second level of scales


class Method(NamedTuple):
    """A method of quantisation.

    ``packages``: names on PyPI of what transformers asks for. ``proven``: by tests, with images; else each model is
    checked as it is loaded. ``gpu``: its kernels are for GPUs alone. ``widens``: its weights become plain ones as they
    are loaded. ``refused``: why it is not served, as words that end a sentence.
    """

    packages: tuple[str, ...] = ()
    proven: bool = False
    gpu: bool = False
    widens: bool = False
    refused: str = ""


QUANTIZERS: Mapping[str, Method] = {
    "aqlm": Method(("accelerate", "aqlm")),
    "auto-round": Method(("auto-round",)),
    "awq": Method(("accelerate", "gptqmodel")),
    "bitnet": Method(("accelerate",)),
    BITSANDBYTES: Method(("accelerate", BITSANDBYTES), proven=True),
    COMPRESSED: Method((COMPRESSED,), proven=True, widens=True),
    "eetq": Method(("accelerate", "kernels"), gpu=True),
    "fbgemm_fp8": Method(("accelerate", "fbgemm-gpu"), gpu=True),
    "fp_quant": Method(("fp_quant",), gpu=True),
    "gptq": Method(("optimum", "gptqmodel")),
    "higgs": Method(("accelerate", "flute-kernel"), gpu=True),
    "hqq": Method(refused=_NOT_READ),
    MXFP4: Method(proven=True, widens=True),
    "nvfp4": Method(refused=_NOT_READ),
    "quanto": Method(refused=_NOT_READ),
    "spqr": Method(("accelerate", "spqr_quant"), gpu=True),
    "torchao": Method(("torchao",), proven=True),
    "vptq": Method(("accelerate", "vptq"), gpu=True),
}
_IMPORTS = {
    "fbgemm-gpu": "fbgemm_gpu",
    "flute-kernel": "flute",
    "auto-round": "auto_round",
    COMPRESSED: "compressed_tensors",
}


def name_method(fields: Mapping[str, Any]) -> str:
    """Name the method of a config's fields as transformers does: bitsandbytes once wrote no ``quant_method``."""
    if fields.get("load_in_8bit") or fields.get("load_in_4bit"):
        return BITSANDBYTES
    return str(fields.get("quant_method"))


def check_method(fields: Mapping[str, Any], directory: Path, device: torch.device | None = None) -> Method:
    """Return the method of a checkpoint's weights.

    Raises ``UnsupportedModel`` by its name if it is not served, not on this ``device``, or not without a package.
    """
    name = name_method(fields)
    held = f"the weights in {directory} are quantised by {name!r}, which"
    method = QUANTIZERS.get(name)
    if method is None or method.refused:
        why = f": {method.refused}" if method is not None else ""
        raise UnsupportedModel(f"{held} is not served{why}. Served: {', '.join(list_served())}; or give plain weights")
    if method.gpu and device is not None and device.type != "cuda":
        raise UnsupportedModel(
            f"{held} runs on GPUs alone, and this instance is on {device}; give it one, or plain weights"
        )
    missing = [each for each in method.packages if find_spec(_IMPORTS.get(each, each)) is None]
    if missing:
        raise UnsupportedModel(f"{held} needs packages that are not installed: pip install {' '.join(missing)}")
    if name == COMPRESSED and fields.get("kv_cache_scheme"):
        raise UnsupportedModel(f"{held} rounds keys and values too (kv_cache_scheme), as no paged cache here does")
    return method


def list_served() -> list[str]:
    """List the names of the methods that are served somewhere, FP8 with scales of blocks among them."""
    return sorted([*(name for name, method in QUANTIZERS.items() if not method.refused), "fp8"])


def prepare_method(config: Any, fields: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Have transformers load a model of ``config`` by the method's own quantizer; returns further arguments."""
    config.quantization_config = fields | ({"dequantize": True} if name_method(fields) == MXFP4 else {})
    # It would take the first GPU, whatever device this instance has; without accelerate nothing can be said.
    named = "accelerate" in QUANTIZERS[name_method(fields)].packages
    return {"device_map": {"": "cpu" if device.type == "cpu" else str(device)}} if named else {}


def finish_layers(model: Any) -> None:
    """Do now what a library would do at the model's first call, of which stages use parts alone."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    if hasattr(quantizer, "compressor"):
        _decompress(model)
        quantizer.compressor.remove_decompression_hook(model)


def _decompress(model: Any) -> None:
    """Widen the weights that compressed-tensors holds; a layer that rounds no activations is a plain one then."""
    from compressed_tensors.compressors.base import decompress_module
    from compressed_tensors.quantization import QuantizationStatus

    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None and module.quantization_status == QuantizationStatus.COMPRESSED:
            rounds = scheme.input_activations is not None or scheme.output_activations is not None
            decompress_module(module, leave_decompressed=rounds)
            if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
                del module.forward  # it puts back the class's own, as a method of the module


def stays_quantised(fields: Mapping[str, Any]) -> bool:
    """Tell if layers of a checkpoint keep their weights as the files have them, by a library's own code."""
    method = QUANTIZERS.get(name_method(fields))
    return method is not None and not method.widens


def count_quantised_bytes(directory: Path, towers: set[str], dtype: torch.dtype) -> dict[str, int]:
    """Count the bytes of each part's weights by a checkpoint's files: what is quantised is held as it lies there.

    ``towers``: modules of the model that are no language model. What is a plain number is held in ``dtype``. Layers
    whose output is not used are counted, and so are tables of bytes that are read and not held.
    """
    found = {"vision": 0, "language": 0}
    for path in list_weight_files(directory):
        for name, (kind, size) in list_sizes(path).items() if path.suffix == ".safetensors" else ():
            part = "vision" if towers & set(name.split(".")) else "language"
            found[part] += size * dtype.itemsize // _PLAIN_BYTES[kind] if kind in _PLAIN_BYTES else size
    return found


# ---------------------------------------------------------------- layers that stay quantised


def find_quantised(model: Any, plain: Any) -> list[Any]:
    """Find the modules of ``model`` that are not as in ``plain``, the same part without quantisation."""
    own = dict(plain.named_modules())
    return [module for name, module in model.named_modules() if name not in own or not _is_plain(module, own[name])]


def _is_plain(module: Any, own: Any) -> bool:
    held = _list_own(module)
    named = all(ours.keys() == others.keys() for ours, others in zip(held, _list_own(own), strict=True))
    alike = named and _name_class(module) == _name_class(own) and not is_altered(module)
    return alike and all(map(_is_plain_tensor, held[0].values()))


def _list_own(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """List the parameters and the buffers that a module itself has; those that are None have names, too."""
    return module._parameters, module._buffers  # torch's public lists leave out what is None


def _name_class(module: Any) -> tuple[str, str]:
    """Name a module's class; a part's own is made anew for each part."""
    return type(module).__module__, type(module).__qualname__


def _is_plain_tensor(held: Any) -> bool:
    return held is None or (type(held) is nn.Parameter and held.is_floating_point() and held.dtype.itemsize > 1)


def check_dtype(model: Any, dtype: torch.dtype) -> None:
    """Raise ``ConfigError`` if a text model runs in another dtype: bitsandbytes keeps its files', whatever is asked.

    Its keys and values would not fit the blocks.
    """
    found = model.get_input_embeddings().weight
    if _is_plain_tensor(found) and found.dtype != dtype:
        own = str(found.dtype).removeprefix("torch.")
        raise ConfigError(f"this checkpoint's quantised weights run in {own} alone, not in {dtype}; give dtype={own!r}")


@torch.inference_mode()
def check_rows(modules: list[Any], head: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Run each quantised layer once, and compare a row alone with the same row beside a loud one.

    Some libraries pack weights at the first call, which two lanes may make at once. ``head``: the output head, which
    stages give rows without a batch before them. Raises ``UnsupportedModel`` if a layer's rows change each other: by a
    scale of activations that the rows of a step share, tokens would depend on what else runs.
    """
    for module in modules:
        width = getattr(module, "in_features", None)
        if not isinstance(width, int):
            continue
        rows = torch.randn((1, 3, width), generator=torch.Generator().manual_seed(7)).to(device, dtype)
        rows[0, 2] *= _LOUD
        alone, beside = _run_layer(module, rows, batched=module is not head)
        error = float((alone - beside).abs().mean() / alone.abs().mean().clamp(min=1e-30))
        if not error <= _MIXED.get(dtype, _MIXED_HALF):
            raise UnsupportedModel(
                f"a quantised layer ({type(module).__name__}) gives a row other numbers, {error:.2g} off, beside "
                "another row: tokens would depend on what else runs. Give a checkpoint whose activations have a "
                "scale for each token, or none"
            )


def _run_layer(module: Any, rows: Tensor, *, batched: bool) -> tuple[Tensor, Tensor]:
    """Run a layer on the first of ``rows`` [1, n, width] alone, and beside the others.

    Raises ``UnsupportedModel`` if its library cannot.
    """
    try:
        alone = module(rows[:, :1])[0, 0].float()
        beside = (module(rows)[0, 0] if batched else module(rows[0])[0]).float()
    except (MemoryError, torch.OutOfMemoryError):  # of this host or device, which says nothing of the layer
        raise
    except Exception as error:
        sizes = f"{rows.shape[-1]} inputs and {getattr(module, 'out_features', 'other')} outputs"
        said = f"its library cannot run a quantised layer ({type(module).__name__} of {sizes}: {describe_error(error)})"
        raise UnsupportedModel(f"{said}; give a checkpoint whose layers of this size are not quantised") from error
    return alone, beside


def list_held_tensors(model: Any) -> Iterator[Tensor]:
    """List the tensors that hold a model's weights: those inside of quantised ones, and their state, too."""
    for held in (*model.parameters(), *model.buffers()):
        yield from _inner_tensors(held, _DEPTH)


def _inner_tensors(held: Any, depth: int) -> Iterator[Tensor]:
    if hasattr(held, "__tensor_flatten__"):
        for name in held.__tensor_flatten__()[0]:
            yield from _inner_tensors(getattr(held, name), depth)
        return
    if isinstance(held, Tensor):
        yield held
    if depth and type(held) is not Tensor:
        for each in vars(held).values() if hasattr(held, "__dict__") else ():
            if isinstance(each, Tensor) or type(each).__name__ == "QuantState":
                yield from _inner_tensors(each, depth - 1)
