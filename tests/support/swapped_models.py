"""Small random models of transformers, and all the swaps that a loaded part gets, on any processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, CLIPVisionConfig, CLIPVisionModel, LlamaConfig

from trinity.stages.attention.interface import PAGED_ATTENTION, register_attention
from trinity.stages.kernels.decoder_layers import fuse_decoder_layers
from trinity.stages.kernels.encoder_layers import fuse_encoder_elementwise, fuse_encoder_layers
from trinity.stages.kernels.fused_elementwise import fuse_elementwise
from trinity.stages.kernels.linear import pack_weights

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 1 << 20,
    "pad_token_id": 0,
}


def text_model(config: Callable[..., Any] = LlamaConfig) -> Any:
    register_attention()
    torch.manual_seed(0)
    model = AutoModel.from_config(config(**SIZES)).eval().requires_grad_(False)
    model.set_attn_implementation(PAGED_ATTENTION)
    return model


def vision_model(kind: Any = CLIPVisionModel, config: Any = CLIPVisionConfig) -> Any:
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    made = config(**sizes, num_attention_heads=4, image_size=32, patch_size=8)
    made._attn_implementation = "sdpa"
    return kind(made).eval().requires_grad_(False)


def swap(model: Any) -> Any:
    """All that a loaded part gets, in the loader's order."""
    pack_weights(model)
    fuse_encoder_elementwise(model)
    fuse_elementwise(model)
    fuse_decoder_layers(model)
    fuse_encoder_layers(model)
    return model


def layers_of(model: Any) -> list[Any]:
    return list(next(each for each in model.modules() if isinstance(each, nn.ModuleList)))


def count(model: Any, base: Any) -> int:
    return sum(isinstance(each, base) for each in model.modules())
