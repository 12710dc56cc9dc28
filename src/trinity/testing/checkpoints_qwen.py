"""Recipes of Qwen-VL (images of any size, three-axis positions), and of MiniCPM-V and VideoLLaMA 3 over Qwen's text."""

from __future__ import annotations

from typing import Any

from trinity.testing.checkpoints_recipes import TEXT_CONFIG, VISION_CONFIG, Recipe, chatml_tokenizer, text_ids

_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def qwen2_vl() -> Recipe:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig, Qwen2VLVisionConfig

    tokenizer = chatml_tokenizer(_IMAGE, _TOKENS, video=_VIDEO)
    config = Qwen2VLConfig(
        vision_config=Qwen2VLVisionConfig(depth=2, embed_dim=32, num_heads=4, hidden_size=64, mlp_ratio=2),
        text_config=Qwen2VLTextConfig(**TEXT_CONFIG, **text_ids(tokenizer), rope_parameters=_rope([2, 3, 3])),
        **_ids(tokenizer),
    )
    fields, videos = _fields("Qwen2VLProcessor"), _videos(14)
    return Recipe(config, Qwen2VLForConditionalGeneration, tokenizer, make_patched_images(14), fields, videos=videos)


def qwen2_5_vl() -> Recipe:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig, Qwen2_5_VLVisionConfig

    tokenizer = chatml_tokenizer(_IMAGE, _TOKENS, video=_VIDEO)
    config = Qwen2_5_VLConfig(
        vision_config=Qwen2_5_VLVisionConfig(
            depth=2,
            hidden_size=32,
            intermediate_size=64,
            num_heads=4,
            out_hidden_size=64,
            window_size=56,
            fullatt_block_indexes=[1],
        ),
        text_config=Qwen2_5_VLTextConfig(**TEXT_CONFIG, **text_ids(tokenizer), rope_parameters=_rope([2, 3, 3])),
        **_ids(tokenizer),
    )
    fields = _fields("Qwen2_5_VLProcessor")
    return Recipe(
        config, Qwen2_5_VLForConditionalGeneration, tokenizer, make_patched_images(14), fields, videos=_videos(14)
    )


def qwen3_vl() -> Recipe:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig, Qwen3VLVisionConfig

    tokenizer = chatml_tokenizer(_IMAGE, _TOKENS, video=_VIDEO)
    text = {**TEXT_CONFIG, "num_hidden_layers": 3, "head_dim": 16}
    config = Qwen3VLConfig(
        vision_config=Qwen3VLVisionConfig(
            depth=3,
            hidden_size=32,
            intermediate_size=64,
            num_heads=4,
            out_hidden_size=64,
            num_position_embeddings=64,
            deepstack_visual_indexes=[0, 1],
        ),
        text_config=Qwen3VLTextConfig(
            **text, **text_ids(tokenizer), rope_parameters={**_rope([3, 3, 2]), "mrope_interleaved": True}
        ),
        **_ids(tokenizer),
    )
    fields, videos = _fields("Qwen3VLProcessor"), _videos(16, name="Qwen3VLVideoProcessor")
    return Recipe(config, Qwen3VLForConditionalGeneration, tokenizer, make_patched_images(16), fields, videos=videos)


def _rope(sections: list[int]) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}


def _ids(tokenizer: Any) -> dict[str, Any]:
    names = ("image", "video", "vision_start", "vision_end")
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in names}


def _fields(name: str) -> dict[str, Any]:
    return {"processor_class": name}


def make_patched_images(patch: int) -> Any:
    """Make an image processor of Qwen-VL, for small images of patches of so many pixels."""
    from transformers import Qwen2VLImageProcessorPil

    token = (2 * patch) ** 2  # pixels of one visual token
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": 4 * token, "longest_edge": 40 * token}, patch_size=patch, merge_size=2
    )


def _videos(patch: int, name: str = "Qwen2VLVideoProcessor") -> dict[str, Any]:
    """A frame has about nine tokens; of the Qwen3-VL a whole clip has at most 64."""
    token = (2 * patch) ** 2
    frames = 16 if name.startswith("Qwen3") else 1
    size = {"shortest_edge": 4 * token * frames, "longest_edge": 9 * token * frames}
    return {"video_processor_type": name, "patch_size": patch, "merge_size": 2, "size": size}


def minicpmv4_6() -> Recipe:
    from transformers import (
        MiniCPMV4_6Config,
        MiniCPMV4_6ForConditionalGeneration,
        MiniCPMV4_6ImageProcessorPil,
        Qwen3Config,
    )
    from transformers.models.minicpmv4_6.configuration_minicpmv4_6 import MiniCPMV4_6VisionConfig

    tokenizer = chatml_tokenizer("<|image_pad|>\n", _minicpm_tokens())
    vision = MiniCPMV4_6VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=112,
        patch_size=8,
    )
    config = MiniCPMV4_6Config(
        vision_config=vision,
        text_config=Qwen3Config(**TEXT_CONFIG, **text_ids(tokenizer), head_dim=16),
        insert_layer_id=1,
        image_size=64,
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
    )
    images = MiniCPMV4_6ImageProcessorPil(max_slice_nums=4, scale_resolution=64, patch_size=8)
    return Recipe(config, MiniCPMV4_6ForConditionalGeneration, tokenizer, images, _fields("MiniCPMV4_6Processor"))


def _minicpm_tokens() -> dict[str, str]:
    pairs = {
        f"{name}_{side}_token": f"<{'/' if side == 'end' else ''}{name}>"
        for name in ("image", "slice", "image_id")
        for side in ("start", "end")
    }
    return {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", **pairs}


def video_llama_3() -> Recipe:
    from transformers import (
        Qwen2Config,
        VideoLlama3Config,
        VideoLlama3ForConditionalGeneration,
        VideoLlama3ImageProcessorPil,
    )
    from transformers.models.video_llama_3.configuration_video_llama_3 import VideoLlama3VisionConfig

    tokens = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
    tokenizer = chatml_tokenizer("<|image_pad|>\n", tokens, video="<|video_pad|>\n")
    vision: dict[str, Any] = {**VISION_CONFIG, "patch_size": 14}
    config = VideoLlama3Config(
        vision_config=VideoLlama3VisionConfig(**vision),
        text_config=Qwen2Config(**TEXT_CONFIG, **text_ids(tokenizer)),
        image_token_id=tokenizer.image_token_id,
        video_token_id=tokenizer.video_token_id,
    )
    token = 28**2  # pixels of a visual token of a video
    images = VideoLlama3ImageProcessorPil(size={"shortest_edge": 4 * token, "longest_edge": 16 * token})
    videos = {
        "video_processor_type": "VideoLlama3VideoProcessor",
        "size": {"shortest_edge": 4 * token, "longest_edge": 12 * 9 * token},
        "patch_size": 14,
        "merge_size": 2,
        "use_token_compression": True,
    }
    fields = {"processor_class": "VideoLlama3Processor"}
    return Recipe(config, VideoLlama3ForConditionalGeneration, tokenizer, images, fields, videos=videos)
