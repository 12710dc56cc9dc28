"""Recipes of audio models: a tower over log-mel frames, a projector and a language model.

Their feature extractors are transformers' own, over windows of one or two seconds in place of thirty.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trinity.testing.checkpoints_qwen import make_patched_images
from trinity.testing.checkpoints_recipes import TEXT_CONFIG, Recipe, text_ids
from trinity.testing.checkpoints_text import CHATML, build_tokenizer, chat_template

MELS, FRAMES_PER_SECOND = 16, 100
TOWER_CONFIG: dict[str, Any] = {"num_mel_bins": MELS, "scale_embedding": False}
_WHISPER: dict[str, Any] = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "d_model": 48}
_PLAIN: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "hidden_size": 48}


def qwen2_audio() -> Recipe:
    from transformers import (
        Qwen2AudioConfig,
        Qwen2AudioEncoderConfig,
        Qwen2AudioForConditionalGeneration,
        Qwen2Config,
    )

    names = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    tokenizer = make_audio_tokenizer(names, "<|audio_bos|><|AUDIO|><|audio_eos|>")
    tower = Qwen2AudioEncoderConfig(**TOWER_CONFIG, **_WHISPER, max_source_positions=FRAMES_PER_SECOND)
    text = Qwen2Config(**text_ids(tokenizer), **TEXT_CONFIG)
    ids = {"audio_token_index": tokenizer.convert_tokens_to_ids("<|AUDIO|>")}
    config = Qwen2AudioConfig(audio_config=tower, text_config=text, **ids)
    return _recipe(config, Qwen2AudioForConditionalGeneration, tokenizer, "Qwen2AudioProcessor", 2)


def audioflamingo3() -> Recipe:
    from transformers import (
        AudioFlamingo3Config,
        AudioFlamingo3EncoderConfig,
        AudioFlamingo3ForConditionalGeneration,
        Qwen2Config,
    )

    tokenizer = make_audio_tokenizer({"audio_token": "<sound>"}, "<sound>")
    tower = AudioFlamingo3EncoderConfig(**TOWER_CONFIG, **_PLAIN, max_source_positions=FRAMES_PER_SECOND // 2)
    text = Qwen2Config(**text_ids(tokenizer), **TEXT_CONFIG)
    config = AudioFlamingo3Config(
        audio_config=tower, text_config=text, audio_token_id=tokenizer.convert_tokens_to_ids("<sound>")
    )
    fields = {"audio_token": "<sound>"}
    return _recipe(config, AudioFlamingo3ForConditionalGeneration, tokenizer, "AudioFlamingo3Processor", 1, fields)


def glmasr() -> Recipe:
    from transformers import GlmAsrConfig, GlmAsrEncoderConfig, GlmAsrForConditionalGeneration, LlamaConfig

    names = {"audio_token": "<|audio|>", "begin": "<|begin_of_audio|>", "end": "<|end_of_audio|>"}
    tokenizer = make_audio_tokenizer(names, "<|begin_of_audio|><|audio|><|end_of_audio|>")
    tower = GlmAsrEncoderConfig(num_mel_bins=MELS, **{**_PLAIN, "intermediate_size": 192})
    text = LlamaConfig(**text_ids(tokenizer), **TEXT_CONFIG)
    config = GlmAsrConfig(
        audio_config=tower,
        text_config=text,
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
        tie_word_embeddings=False,
    )
    fields = {"audio_token": "<|audio|>"}
    return _recipe(config, GlmAsrForConditionalGeneration, tokenizer, "GlmAsrProcessor", 2, fields)


def qwen3_asr() -> Recipe:
    from transformers import Qwen3ASRConfig, Qwen3ASRFeatureExtractor, Qwen3ASRForConditionalGeneration, Qwen3Config
    from transformers.models.qwen3_asr.configuration_qwen3_asr import Qwen3ASREncoderConfig

    names = {"audio_token": "<|audio_pad|>", "begin": "<|audio_start|>", "end": "<|audio_end|>"}
    names |= {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    tokenizer = make_audio_tokenizer(names, "<|audio_start|><|audio_pad|><|audio_end|>")
    windows: dict[str, Any] = {
        "n_window_infer": 200,
        "downsample_hidden_size": 16,
        "output_dim": TEXT_CONFIG["hidden_size"],
    }
    tower = Qwen3ASREncoderConfig(**TOWER_CONFIG, **_WHISPER, **windows)
    text = Qwen3Config(**text_ids(tokenizer), **TEXT_CONFIG, head_dim=16)
    config = Qwen3ASRConfig(
        audio_config=tower,
        text_config=text,
        audio_token_id=tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        timestamp_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
    )
    make: Any = Qwen3ASRFeatureExtractor
    extractor = make(feature_size=MELS, chunk_length=2)
    fields = {"processor_class": "Qwen3ASRProcessor"}
    return Recipe(config, Qwen3ASRForConditionalGeneration, tokenizer, processor=fields, feature_extractor=extractor)


def qwen2_5_omni_thinker() -> Recipe:
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration
    from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as parts

    names = {f"{kind}_token": f"<|{kind.upper()}|>" for kind in ("image", "video", "audio")}
    names |= {f"{sense}_{end}_token": f"<|{sense}_{end}|>" for sense in ("vision", "audio") for end in ("bos", "eos")}
    tokenizer = make_audio_tokenizer(
        names, "<|audio_bos|><|AUDIO|><|audio_eos|>", "<|vision_bos|><|IMAGE|><|vision_eos|>"
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    windows: dict[str, Any] = {"window_size": 56, "fullatt_block_indexes": [1]}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    tower: dict[str, Any] = {**TOWER_CONFIG, **_WHISPER, "max_source_positions": 2 * FRAMES_PER_SECOND}
    config = Qwen2_5OmniThinkerConfig(
        audio_config=parts.Qwen2_5OmniAudioEncoderConfig(**tower, n_window=25, output_dim=TEXT_CONFIG["hidden_size"]),
        vision_config=parts.Qwen2_5OmniVisionEncoderConfig(
            **vision, **windows, out_hidden_size=TEXT_CONFIG["hidden_size"]
        ),
        text_config=parts.Qwen2_5OmniTextConfig(**TEXT_CONFIG, **text_ids(tokenizer), rope_parameters=rope),
        **{f"{kind}_token_index": ids[f"{kind}_token"] for kind in ("image", "video", "audio")},
        **{f"{sense}_{at}_token_id": ids[f"{sense}_{end}_token"] for sense in ("vision", "audio") for at, end in _ENDS},
    )
    return _see_too(
        _recipe(config, Qwen2_5OmniThinkerForConditionalGeneration, tokenizer, "Qwen2_5OmniProcessor", 2), 14
    )


def qwen3_omni_moe_thinker() -> Recipe:
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as parts
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

    names = {f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "video", "audio")}
    names |= {f"{sense}_{end}_token": f"<|{sense}_{at}|>" for sense in ("vision", "audio") for at, end in _ENDS}
    tokenizer = make_audio_tokenizer(
        names, "<|audio_start|><|audio_pad|><|audio_end|>", "<|vision_start|><|image_pad|><|vision_end|>"
    )
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
    vision: dict[str, Any] = {"depth": 3, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
    vision |= {"out_hidden_size": TEXT_CONFIG["hidden_size"], "num_position_embeddings": 64}
    tower: dict[str, Any] = {**TOWER_CONFIG, **_WHISPER, "n_window_infer": 200, "downsample_hidden_size": 16}
    text: dict[str, Any] = {**TEXT_CONFIG, **text_ids(tokenizer), "num_hidden_layers": 3, "head_dim": 16}
    text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = parts.Qwen3OmniMoeThinkerConfig(
        audio_config=parts.Qwen3OmniMoeAudioEncoderConfig(**tower, output_dim=TEXT_CONFIG["hidden_size"]),
        vision_config=parts.Qwen3OmniMoeVisionEncoderConfig(**vision, deepstack_visual_indexes=[0, 1]),
        text_config=parts.Qwen3OmniMoeTextConfig(**text, rope_parameters={**rope, "mrope_interleaved": True}),
        **{f"{kind}_token_id": ids[f"{kind}_token"] for kind in ("image", "video", "audio")},
        **{f"{sense}_{at}_token_id": ids[f"{sense}_{end}_token"] for sense in ("vision", "audio") for at, end in _ENDS},
    )
    return _see_too(
        _recipe(config, Qwen3OmniMoeThinkerForConditionalGeneration, tokenizer, "Qwen3OmniMoeProcessor", 2), 16
    )


def _see_too(recipe: Recipe, patch: int) -> Recipe:
    """Add an image processor of Qwen-VL, whose file takes the place of the feature extractor's own."""
    assert recipe.processor is not None
    fields = {**recipe.processor, "feature_extractor": recipe.feature_extractor.to_dict()}
    images = make_patched_images(patch)
    return replace(recipe, image_processor=images, feature_extractor=None, processor=fields)


_ENDS = (("start", "bos"), ("end", "eos"))


def make_audio_tokenizer(names: dict[str, str], audio: str, image: str = "") -> Any:
    """Build a tokenizer in ChatML whose template writes ``audio`` for a clip, and ``image`` for an image."""
    template = chat_template(image=image, audio=audio, **CHATML)
    return build_tokenizer(
        bos=None, eos="<|im_end|>", pad="<|endoftext|>", extra=names, plain=("<|im_start|>",), template=template
    )


def _recipe(
    config: Any, model: Any, tokenizer: Any, processor: str, seconds: int, fields: dict[str, Any] | None = None
) -> Recipe:
    from transformers import WhisperFeatureExtractor

    make: Any = WhisperFeatureExtractor
    extractor = make(feature_size=MELS, chunk_length=seconds, return_attention_mask=True)
    return Recipe(
        config,
        model,
        tokenizer,
        processor={"processor_class": processor, **(fields or {})},
        feature_extractor=extractor,
    )
