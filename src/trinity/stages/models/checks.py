"""Checks of a model before it serves: layers that a paged cache can hold, and logits equal to its own forward's."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.errors import UnsupportedModel
from trinity.stages.attention.interface import LAYER_KINDS, PAGED_ATTENTION
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.batch import NO_DECODES, Chunk, Decodes, build_batch
from trinity.stages.kernels.probes import FAR_POSITIONS, find_limits
from trinity.stages.kernels.swaps import drop_swaps, without_swaps
from trinity.stages.models.base import ModelAdapter
from trinity.stages.models.loaded_model import LoadedModel
from trinity.stages.models.registry import HOW_TO_ADD, known_models

logger = logging.getLogger("trinity")

_LENGTH, _CUT, _MOST_STARTS = 23, 9, 10
_TOLERANCE = 1e-3  # relative to the largest logit; float32 is exact to about 1e-6
_LENGTH_DEPENDENT_ROPE = "longrope"


def refuse_layers(adapter: ModelAdapter) -> None:
    """Raise ``UnsupportedModel`` if the config names layers or positions that a ragged paged batch cannot serve."""
    text = adapter.text_config
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    beyond = sorted({kind for kind in kinds if kind not in (*LAYER_KINDS, "attention")})
    if beyond:
        raise UnsupportedModel(
            f"{adapter.config.model_type!r} has {', '.join(beyond)} layers in its text model ({text.model_type}); "
            f"a paged KV cache serves {', '.join(LAYER_KINDS)} layers only"
        )
    if _LENGTH_DEPENDENT_ROPE in _rope_types(getattr(text, "rope_parameters", None) or {}):
        raise UnsupportedModel(
            f"{adapter.config.model_type!r} uses rope type {_LENGTH_DEPENDENT_ROPE!r}, whose frequencies depend on the "
            "longest request of a batch: requests would change each other's tokens"
        )


def _rope_types(rope: dict[str, Any]) -> set[str]:
    """Collect all rope types of a config, which may nest them by kind of layer."""
    nested = [_rope_types(value) for value in rope.values() if isinstance(value, dict)]
    return set().union({rope.get("rope_type", "default")}, *nested)


def self_check(model: LoadedModel) -> None:
    """Compare prefill in chunks and a decode through the paged cache with the model's own forward, near and far.

    The model's own forward runs without trinity's kernels, the paged cache without and with them; kernels that make a
    difference are taken off, and the log says so. Raises ``UnsupportedModel`` if logits of a prompt differ by more than
    1e-3 of the largest (more in half precision).
    """
    named = f"{model.config.model_type!r} (text model {model.adapter.text_config.model_type!r})"
    try:
        ids, starts = _prompt(model), _list_starts(model.adapter.text_config)
        with without_swaps(model.language) as swapped:
            expected = _own_logits(model, ids, starts)
            error = _compare(_paged_logits(model, ids, starts), expected)
        slower = swapped and not _is_alike(_compare(_paged_logits(model, ids, starts), expected), model.dtype)
        if slower:
            logger.warning("%s runs without kernels: through them its logits differ from its own", named)
            drop_swaps(model.language)
    except Exception as exc:
        raise UnsupportedModel(
            f"{named} has no adapter, and its self-check failed: {type(exc).__name__}: {exc}. {_advice()}"
        ) from exc
    if not _is_alike(error, model.dtype):
        raise UnsupportedModel(
            f"{named} has no adapter, and through a paged cache its logits are {error:.2g} off. {_advice()}"
        )


def _compare(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits, relative to the largest of its row."""
    off, largest = (found - expected).abs().amax(-1), expected.abs().amax(-1).clamp(min=1.0)
    return float((off / largest).nan_to_num(torch.inf).max())


def _is_alike(error: float, dtype: torch.dtype) -> bool:
    coarser = max(1.0, torch.finfo(dtype).eps / torch.finfo(torch.float32).eps)
    return error < _TOLERANCE * float(coarser**0.5)


def _list_starts(text: Any) -> list[int]:
    """List positions at which a prompt begins: 0, the last, before each limit of the config, and far ones."""
    most = (getattr(text, "max_position_embeddings", None) or 0) - _LENGTH - 1
    before = sorted(limit - _CUT - 3 for limit in find_limits(text))
    wanted = [0, most, *before, *reversed(FAR_POSITIONS)]
    return list(dict.fromkeys(start for start in wanted if 0 <= start <= max(0, most)))[:_MOST_STARTS]


def _advice() -> str:
    return f"Known: {', '.join(known_models())}. {HOW_TO_ADD}"


def _prompt(model: LoadedModel) -> np.ndarray:
    vocabulary = int(model.adapter.text_config.vocab_size)
    allowed = np.setdiff1d(np.arange(vocabulary), list(model.media_token_ids))
    return allowed[(np.arange(_LENGTH + 1) * 7919 + 13) % len(allowed)]


@torch.inference_mode()
def _own_logits(model: LoadedModel, ids: np.ndarray, starts: list[int]) -> Tensor:
    """Compute [3 * starts, vocabulary]: logits after each cut, for the prompt from each start."""
    set_attention(model.language, model.adapter, "eager")
    try:
        given = torch.from_numpy(ids).to(model.device).expand(len(starts), -1)
        places = torch.tensor(starts, device=model.device)[:, None] + torch.arange(len(ids), device=model.device)
        logits: Tensor = model.language(input_ids=given, position_ids=places, use_cache=False).logits
    finally:
        set_attention(model.language, model.adapter, PAGED_ATTENTION)
    return logits[:, [_CUT - 1, _LENGTH - 1, _LENGTH]].transpose(0, 1).flatten(0, 1).float()


def _paged_logits(model: LoadedModel, ids: np.ndarray, starts: list[int]) -> Tensor:
    shape, axes, backend = model.kv_shape(), model.adapter.axes, TorchAttention()
    height, count = shape.shape[3], len(starts)
    kv = torch.zeros((1 + 3 * count, *shape.shape), dtype=shape.dtype, device=model.device)
    tables = 1 + np.arange(3 * count).reshape(3, count).T
    at, last = np.arange(_LENGTH + 1), np.full(count, _LENGTH)
    parts = [
        [Chunk(ids[low:high], start + at[low:high], low, table) for start, table in zip(starts, tables, strict=True)]
        for low, high in _CUTS
    ]
    decodes = Decodes(ids[last], np.array(starts) + last, last + 1, tables)
    steps = [*((NO_DECODES, chunks) for chunks in parts), (decodes, list[Chunk]())]
    batches = [build_batch(rows, chunks, height, axes, model.device) for rows, chunks in steps]
    return torch.cat([model.forward(batch, kv, None, backend) for batch in batches]).float()


_CUTS = ((0, _CUT), (_CUT, _LENGTH))


def set_attention(model: Any, adapter: ModelAdapter, name: str) -> None:
    """Set the attention implementation of the text model only."""
    model.set_attn_implementation({"text_config": name} if adapter.multimodal else name)
