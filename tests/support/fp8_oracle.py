"""transformers' own models of a checkpoint with FP8 weights: widened, as on a CPU, or in FP8, as on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

from trinity.testing.oracle import Oracle

QUANTIZER = "transformers.quantizers.quantizer_finegrained_fp8"
LAYERS = "transformers.integrations.finegrained_fp8"


@contextmanager
def loadable(*, widened: bool) -> Iterator[None]:
    """Let transformers load FP8 weights here: without accelerate, which it asks for and does not use.

    ``widened``: as where there is no GPU; else as where there is one with FP8.
    """
    with patch(f"{QUANTIZER}.is_accelerate_available", return_value=True):
        if widened:
            yield
            return
        with (
            patch("torch.cuda.is_available", return_value=True),
            patch("torch.cuda.get_device_capability", return_value=(9, 0)),
        ):
            yield


class WidenedOracle(Oracle):
    """``generate()`` as transformers has it on a CPU: the weights are widened as they are loaded."""

    def _load_model(self, directory: Path, dtype: torch.dtype) -> Any:
        with loadable(widened=True):
            return super()._load_model(directory, dtype)


class Fp8Oracle(Oracle):
    """``generate()`` over transformers' own FP8 layers; only the kernel that these fetch from a hub is written here."""

    def _load_model(self, directory: Path, dtype: torch.dtype) -> Any:
        auto: Any = transformers.AutoModelForImageTextToText
        if self._loaded.processor is None:
            auto = transformers.AutoModelForCausalLM
        with loadable(widened=False):
            model = auto.from_pretrained(directory, dtype=dtype, local_files_only=True)
        assert any(type(each).__name__ == "FP8Linear" for each in model.modules()), "weights must stay in FP8"
        return model.eval()

    def generate(self, request: Any) -> list[int]:
        with hub_kernel():
            return super().generate(request)


@contextmanager
def hub_kernel() -> Iterator[None]:
    """Give transformers the product that it would fetch from a hub, by the definition of its documentation."""
    kernels: Any = __import__(LAYERS, fromlist=["FineGrainedFP8"])
    with patch.object(kernels, "_FINEGRAINED_FP8", kernels.FineGrainedFP8(multiply, None, None)):
        yield


def multiply(
    rows: Tensor, weight: Tensor, scales: Tensor, block: list[int], dtype: torch.dtype, activation_scale: Any = None
) -> Tensor:
    """Round each group of inputs by its largest value, and sum group by group in float32."""
    assert activation_scale is None
    flat = rows.reshape(-1, rows.shape[-1]).float()
    total = torch.zeros((len(flat), len(weight)))
    for group, first in enumerate(range(0, flat.shape[1], block[1])):
        part = flat[:, first : first + block[1]]
        scale = part.abs().max(1, keepdim=True).values / 448
        rounded = (part / scale.clamp(min=1e-12)).to(torch.float8_e4m3fn).float()
        factors = torch.repeat_interleave(scales[:, group], block[0])[: len(weight)]
        total += (rounded @ weight[:, first : first + block[1]].float().T) * scale * factors
    return total.to(dtype).view(*rows.shape[:-1], len(weight))
