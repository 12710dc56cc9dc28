"""Recipes of audio models: a tower over log-mel frames, a projector and a language model.

Their feature extractors are transformers' own, over windows of one or two seconds in place of thirty.
"""

from __future__ import annotations

from typing import Any

from trinity.testing.checkpoints_qwen import TOWER, make_patched_images, make_rope
from trinity.testing.checkpoints_recipes import TEXT_CONFIG, Recipe, make_recipe, text_fields
from trinity.testing.checkpoints_text import CHATML, build_tokenizer, chat_template

MELS, FRAMES_PER_SECOND = 16, 100
TOWER_CONFIG: dict[str, Any] = {"num_mel_bins": MELS, "scale_embedding": False}
_WHISPER: dict[str, Any] = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "d_model": 48}
_PLAIN: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "hidden_size": 48}
_ENDS = (("start", "bos"), ("end", "eos"))


def qwen2_audio() -> Recipe:
    names = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    tokenizer = make_audio_tokenizer(names, "<|audio_bos|><|AUDIO|><|audio_eos|>")
    tower = {"model_type": "qwen2_audio_encoder", **_WHISPER, "max_source_positions": FRAMES_PER_SECOND}
    ids = {"audio_token_index": tokenizer.convert_tokens_to_ids("<|AUDIO|>")}
    return _make_heard(
        "Qwen2Audio", {**TOWER_CONFIG, **tower}, text_fields(tokenizer, model_type="qwen2"), ids, tokenizer
    )


def audioflamingo3() -> Recipe:
    tokenizer = make_audio_tokenizer({"audio_token": "<sound>"}, "<sound>")
    tower = {"model_type": "audioflamingo3_encoder", **_PLAIN, "max_source_positions": FRAMES_PER_SECOND // 2}
    ids = {"audio_token_id": tokenizer.convert_tokens_to_ids("<sound>")}
    parts = ({**TOWER_CONFIG, **tower}, text_fields(tokenizer, model_type="qwen2"), ids, tokenizer)
    return _make_heard("AudioFlamingo3", *parts, seconds=1, audio_token="<sound>")


def glmasr() -> Recipe:
    names = {"audio_token": "<|audio|>", "begin": "<|begin_of_audio|>", "end": "<|end_of_audio|>"}
    tokenizer = make_audio_tokenizer(names, "<|begin_of_audio|><|audio|><|end_of_audio|>")
    tower = {"model_type": "glmasr_encoder", "num_mel_bins": MELS, **_PLAIN, "intermediate_size": 192}
    fields = {"audio_token_id": tokenizer.convert_tokens_to_ids("<|audio|>"), "tie_word_embeddings": False}
    text = text_fields(tokenizer, model_type="llama", rms_norm_eps=1e-6)  # GlmAsr's own default is another
    return _make_heard("GlmAsr", tower, text, fields, tokenizer, audio_token="<|audio|>")


def qwen3_asr() -> Recipe:
    from transformers import Qwen3ASRFeatureExtractor

    names = {"audio_token": "<|audio_pad|>", "begin": "<|audio_start|>", "end": "<|audio_end|>"}
    names |= {"audio_bos_token": "<|audio_start|>", "audio_eos_token": "<|audio_end|>"}
    tokenizer = make_audio_tokenizer(names, "<|audio_start|><|audio_pad|><|audio_end|>")
    tower = {"model_type": "qwen3_asr_encoder", "n_window_infer": 200, "downsample_hidden_size": 16}
    fields = {
        "audio_config": {**TOWER_CONFIG, **_WHISPER, **tower, "output_dim": TEXT_CONFIG["hidden_size"]},
        "text_config": text_fields(tokenizer, model_type="qwen3", head_dim=16),
        "audio_token_id": tokenizer.convert_tokens_to_ids("<|audio_pad|>"),
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "timestamp_token_id": tokenizer.convert_tokens_to_ids("<|im_start|>"),
    }
    make: Any = Qwen3ASRFeatureExtractor
    return make_recipe("Qwen3ASR", fields, tokenizer, {}, feature_extractor=make(feature_size=MELS, chunk_length=2))


def qwen2_5_omni_thinker() -> Recipe:
    names = {f"{kind}_token": f"<|{kind.upper()}|>" for kind in ("image", "video", "audio")}
    names |= {f"{sense}_{end}_token": f"<|{sense}_{end}|>" for sense in ("vision", "audio") for end in ("bos", "eos")}
    tokenizer = make_audio_tokenizer(
        names, "<|audio_bos|><|AUDIO|><|audio_eos|>", "<|vision_bos|><|IMAGE|><|vision_eos|>"
    )
    tower = {"max_source_positions": 2 * FRAMES_PER_SECOND, "n_window": 25}
    vision = {"window_size": 56, "fullatt_block_indexes": [1], "out_hidden_size": TEXT_CONFIG["hidden_size"]}
    text = {"rope_parameters": make_rope([2, 3, 3])}
    return _make_seeing("Qwen2_5OmniThinker", tower, vision, text, names, tokenizer, 14, "index")


def qwen3_omni_moe_thinker() -> Recipe:
    names = {f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "video", "audio")}
    names |= {f"{sense}_{end}_token": f"<|{sense}_{at}|>" for sense in ("vision", "audio") for at, end in _ENDS}
    tokenizer = make_audio_tokenizer(
        names, "<|audio_start|><|audio_pad|><|audio_end|>", "<|vision_start|><|image_pad|><|vision_end|>"
    )
    vision = {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    vision |= {"out_hidden_size": TEXT_CONFIG["hidden_size"]}
    tower = {"n_window_infer": 200, "downsample_hidden_size": 16}
    text = {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "rope_parameters": {**make_rope([3, 3, 2]), "mrope_interleaved": True},
    }
    text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return _make_seeing("Qwen3OmniMoeThinker", tower, vision, text, names, tokenizer, 16, "id")


def _make_seeing(
    family: str,
    tower: dict[str, Any],
    vision: dict[str, Any],
    text: dict[str, Any],
    names: dict[str, str],
    tokenizer: Any,
    patch: int,
    ending: str,
) -> Recipe:
    """Make a thinker of Qwen-Omni, whose processor's file has the fields of its feature extractor too."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    fields = {
        "audio_config": {**TOWER_CONFIG, **_WHISPER, **tower, "output_dim": TEXT_CONFIG["hidden_size"]},
        "vision_config": {**TOWER, **vision},
        "text_config": text_fields(tokenizer, **text),
        **{f"{kind}_token_{ending}": ids[f"{kind}_token"] for kind in ("image", "video", "audio")},
        **{f"{sense}_{at}_token_id": ids[f"{sense}_{end}_token"] for sense in ("vision", "audio") for at, end in _ENDS},
    }
    processor = {
        "processor_class": f"{family.removesuffix('Thinker')}Processor",
        "feature_extractor": _make_extractor(2).to_dict(),
    }
    return make_recipe(family, fields, tokenizer, processor, image_processor=make_patched_images(patch))


def make_audio_tokenizer(names: dict[str, str], audio: str, image: str = "") -> Any:
    """Build a tokenizer in ChatML whose template writes ``audio`` for a clip, and ``image`` for an image."""
    template = chat_template(image=image, audio=audio, **CHATML)
    return build_tokenizer(
        bos=None, eos="<|im_end|>", pad="<|endoftext|>", extra=names, plain=("<|im_start|>",), template=template
    )


def _make_heard(
    family: str,
    tower: dict[str, Any],
    text: dict[str, Any],
    fields: dict[str, Any],
    tokenizer: Any,
    seconds: int = 2,
    **processor: str,
) -> Recipe:
    fields = {"audio_config": tower, "text_config": text, **fields}
    return make_recipe(family, fields, tokenizer, processor, feature_extractor=_make_extractor(seconds))


def _make_extractor(seconds: int) -> Any:
    from transformers import WhisperFeatureExtractor

    make: Any = WhisperFeatureExtractor
    return make(feature_size=MELS, chunk_length=seconds, return_attention_mask=True)
