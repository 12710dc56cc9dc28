"""Recipes of Qwen-VL (images of any size, three-axis positions), and of MiniCPM-V and VideoLLaMA 3 over Qwen's text."""

from __future__ import annotations

from typing import Any

from trinity.testing.checkpoints_recipes import (
    VISION_CONFIG,
    Recipe,
    chatml_tokenizer,
    make_images,
    make_recipe,
    text_fields,
)

_PADS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
_TOKENS = {**_PADS, "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"}
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
TOWER: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
"""Fields of a small vision encoder of Qwen's."""


def qwen2_vl() -> Recipe:
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 64, "mlp_ratio": 2}
    return _qwen_vl("Qwen2VL", vision)


def qwen2_5_vl() -> Recipe:
    vision = {**TOWER, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]}
    return _qwen_vl("Qwen2_5_VL", vision)


def qwen3_vl() -> Recipe:
    vision = {**TOWER, "depth": 3, "out_hidden_size": 64, "num_position_embeddings": 64}
    vision |= {"deepstack_visual_indexes": [0, 1]}
    rope = {**make_rope([3, 3, 2]), "mrope_interleaved": True}
    text = {"num_hidden_layers": 3, "head_dim": 16, "rope_parameters": rope}
    return _qwen_vl("Qwen3VL", vision, 16, "Qwen3VLVideoProcessor", **text)


def _qwen_vl(
    family: str, vision: dict[str, Any], patch: int = 14, videos: str = "Qwen2VLVideoProcessor", **text: Any
) -> Recipe:
    tokenizer = chatml_tokenizer(_IMAGE, _TOKENS, video=_VIDEO)
    fields = text_fields(tokenizer, **{"rope_parameters": make_rope([2, 3, 3]), **text})
    names = ("image", "video", "vision_start", "vision_end")
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in names}
    parts = {"image_processor": make_patched_images(patch), "videos": _videos(patch, videos)}
    return make_recipe(family, {"vision_config": vision, "text_config": fields, **ids}, tokenizer, {}, **parts)


def make_rope(sections: list[int]) -> dict[str, Any]:
    """Make parameters of rotary positions on three axes, of which each has so many numbers."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}


def make_patched_images(patch: int) -> Any:
    """Make an image processor of Qwen-VL, for small images of patches of so many pixels."""
    token = (2 * patch) ** 2  # pixels of one visual token
    size = {"shortest_edge": 4 * token, "longest_edge": 40 * token}
    return make_images("Qwen2VL", size=size, patch_size=patch, merge_size=2)


def _videos(patch: int, name: str = "Qwen2VLVideoProcessor") -> dict[str, Any]:
    """A frame has about nine tokens; of the Qwen3-VL a whole clip has at most 64."""
    token = (2 * patch) ** 2
    frames = 16 if name.startswith("Qwen3") else 1
    size = {"shortest_edge": 4 * token * frames, "longest_edge": 9 * token * frames}
    return {"video_processor_type": name, "patch_size": patch, "merge_size": 2, "size": size}


def minicpmv4_6() -> Recipe:
    tokens = {
        f"{name}_{side}_token": f"<{'/' if side == 'end' else ''}{name}>"
        for name in ("image", "slice", "image_id")
        for side in ("start", "end")
    }
    tokenizer = chatml_tokenizer("<|image_pad|>\n", {**_PADS, **tokens})
    vision = {**VISION_CONFIG, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    fields = {
        "vision_config": {**vision, "image_size": 112, "patch_size": 8},
        "text_config": text_fields(tokenizer, model_type="qwen3", head_dim=16),
        "insert_layer_id": 1,
        "image_size": 64,
        "image_token_id": tokenizer.image_token_id,
        "video_token_id": tokenizer.video_token_id,
    }
    images = make_images("MiniCPMV4_6", max_slice_nums=4, scale_resolution=64, patch_size=8)
    return make_recipe("MiniCPMV4_6", fields, tokenizer, {}, image_processor=images)


def video_llama_3() -> Recipe:
    tokenizer = chatml_tokenizer("<|image_pad|>\n", _PADS, video="<|video_pad|>\n")
    fields = {
        "vision_config": {**VISION_CONFIG, "patch_size": 14},
        "text_config": text_fields(tokenizer, model_type="qwen2"),
        "image_token_id": tokenizer.image_token_id,
        "video_token_id": tokenizer.video_token_id,
    }
    token = 28**2  # pixels of a visual token of a video
    images = make_images("VideoLlama3", size={"shortest_edge": 4 * token, "longest_edge": 16 * token})
    videos = {
        "video_processor_type": "VideoLlama3VideoProcessor",
        "size": {"shortest_edge": 4 * token, "longest_edge": 12 * 9 * token},
        "patch_size": 14,
        "merge_size": 2,
        "use_token_compression": True,
    }
    return make_recipe("VideoLlama3", fields, tokenizer, {}, image_processor=images, videos=videos)
