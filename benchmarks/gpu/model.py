"""A model of LLaVA-1.5-7B's shape with random weights made where it runs, and what its device can do at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

from trinity.costs.step_cost import Device
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.stages.attention.interface import PAGED_ATTENTION
from trinity.stages.models import loader
from trinity.stages.models.checks import set_attention
from trinity.stages.models.partial_models import find_model_class, make_partial_class
from trinity.stages.models.registry import find_adapter
from trinity.testing import checkpoints_llava

MIB = 1 << 20


def folder(directory: Path, tiny: bool) -> Path:
    """A checkpoint without weights: config, tokenizer, processor."""
    recipe = checkpoints_llava.llava() if tiny else checkpoints_llava.llava_7b()
    recipe.config.architectures = [recipe.model_class.__name__]
    recipe.config.save_pretrained(directory)
    recipe.save_processor(directory)
    return directory


@contextmanager
def random_weights(device: str) -> Iterator[None]:
    """Checkpoints that are loaded meanwhile get weights by transformers' own initialisation, made on ``device``."""

    def make(directory: Path, name: str, dtype: torch.dtype, *given: Any) -> Any:
        config = read_config(directory)
        adapter, _ = find_adapter(config)
        torch.manual_seed(0)
        with torch.device(device):
            model = make_partial_class(find_model_class(config), adapter, name)._from_config(config, dtype=dtype)
        if name == "language":
            set_attention(model, adapter, PAGED_ATTENTION)
        return model

    with patch.object(loader, "_load_part", make):
        yield


def write_weights(directory: Path, device: str, dtype: str) -> Path:
    """Write weights by transformers' own initialisation, made on ``device``, into the checkpoint, once."""
    if any(directory.glob("*.safetensors")):
        return directory
    config = read_config(directory)
    torch.manual_seed(0)
    with torch.device(device):
        model = find_model_class(config)._from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(directory)
    return directory


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def least_seconds(run: Callable[[], object], device: str, repeats: int = 5, inner: int = 4) -> float:
    """Of one call, the median of ``repeats`` times ``inner`` calls in a row, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(inner):
            run()
        synchronize(device)
        found.append((time.perf_counter() - started) / inner)
    return median(found[1:])


def limits(device: str, tiny: bool) -> Device:
    """What is reached by one copy of a large piece (bytes read and written) and by one large product in bfloat16."""
    size, width = (8 * MIB, 256) if tiny else (4096 * MIB, 8192)
    moved, flops = _copied(device, size), _multiplied(device, width)
    if device.startswith("cuda"):
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
    else:
        name, memory = "cpu", 1 << 30
    shares: dict[str, Any] = {"flops_share": 1.0, "bandwidth_share": 1.0, "pass_s": 0.0, "row_s": 0.0}
    return Device(name=name, flops=flops, bandwidth=moved, memory=float(memory), **shares)


def _copied(device: str, size: int) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / least_seconds(lambda: target.copy_(source), device)


def _multiplied(device: str, width: int) -> float:
    one, other = (torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * width**3 / least_seconds(lambda: one @ other, device)
