"""Checks of a model before it serves: layers that a paged cache can hold, and logits equal to its own forward's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.errors import UnsupportedModel
from trinity.stages.attention.interface import LAYER_KINDS, PAGED_ATTENTION
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.batch import NO_DECODES, Chunk, Decodes, build_batch
from trinity.stages.models.base import ModelAdapter
from trinity.stages.models.loaded_model import LoadedModel
from trinity.stages.models.registry import HOW_TO_ADD, known_models

_LENGTH, _CUT = 23, 9
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
    """Compare chunked prefill and a decode through the paged cache with the model's own forward on a tiny prompt.

    Raises ``UnsupportedModel`` if logits differ by more than 1e-3 of the largest (more in half precision).
    """
    named = f"{model.config.model_type!r} (text model {model.adapter.text_config.model_type!r})"
    try:
        ids = _prompt(model)
        expected = _own_logits(model, ids)
        found = _paged_logits(model, ids)
    except Exception as exc:
        raise UnsupportedModel(
            f"{named} has no adapter, and its self-check failed: {type(exc).__name__}: {exc}. {_advice()}"
        ) from exc
    error = float((found - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    coarser = max(1.0, torch.finfo(model.dtype).eps / torch.finfo(torch.float32).eps)
    if not error < _TOLERANCE * coarser**0.5:
        raise UnsupportedModel(
            f"{named} has no adapter, and through a paged cache its logits are {error:.2g} off. {_advice()}"
        )


def _advice() -> str:
    return f"Known: {', '.join(known_models())}. {HOW_TO_ADD}"


def _prompt(model: LoadedModel) -> np.ndarray:
    vocabulary = int(model.adapter.text_config.vocab_size)
    allowed = np.setdiff1d(np.arange(vocabulary), list(model.media_token_ids))
    return allowed[(np.arange(_LENGTH + 1) * 7919 + 13) % len(allowed)]


@torch.inference_mode()
def _own_logits(model: LoadedModel, ids: np.ndarray) -> Tensor:
    set_attention(model.language, model.adapter, "eager")
    try:
        given = torch.from_numpy(ids)[None].to(model.device)
        logits: Tensor = model.language(input_ids=given, use_cache=False).logits[0, [_CUT - 1, _LENGTH - 1, _LENGTH]]
    finally:
        set_attention(model.language, model.adapter, PAGED_ATTENTION)
    return logits.float()


def _paged_logits(model: LoadedModel, ids: np.ndarray) -> Tensor:
    shape, axes, backend = model.kv_shape(), model.adapter.axes, TorchAttention()
    height = shape.shape[3]
    kv = torch.zeros((4, *shape.shape), dtype=shape.dtype, device=model.device)
    table, at = np.array([2, 0, 3]), np.arange(_LENGTH + 1)
    parts = [(NO_DECODES, [Chunk(ids[low:high], at[low:high], low, table)]) for low, high in _CUTS]
    last = Decodes(ids[_LENGTH:], at[_LENGTH:], at[_LENGTH:] + 1, table[None])
    batches = [
        build_batch(decodes, chunks, height, axes, model.device) for decodes, chunks in (*parts, (last, list[Chunk]()))
    ]
    return torch.cat([model.forward(batch, kv, None, backend) for batch in batches]).float()


_CUTS = ((0, _CUT), (_CUT, _LENGTH))


def set_attention(model: Any, adapter: ModelAdapter, name: str) -> None:
    """Set the attention implementation of the text model only."""
    model.set_attn_implementation({"text_config": name} if adapter.multimodal else name)
