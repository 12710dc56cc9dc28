"""Tiny checkpoints of whole Qwen-Omni models: a thinker that writes, and a talker and a vocoder that speak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.any_model.media_sizes import TypeSizes
from trinity.testing.checkpoints import _no_progress_bar, _recipe, _scale_weights, _silence

OMNI_TYPES = ("qwen2_5_omni", "qwen3_omni_moe")
_CLASSES = {
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}
_SIZES = {
    "qwen2_5_omni": TypeSizes(
        config={
            "token2wav_config.bigvgan_config.upsample_initial_channel": 64,
            "token2wav_config.dit_config.enc_channels": [16, 16, 16, 16, 48],
        }
    ),
    "qwen3_omni_moe": TypeSizes(
        config={
            "talker_config.text_config.shared_expert_intermediate_size": 64,
            "talker_config.spatial_merge_size": 2,
            "code2wav_config.decoder_dim": 64,
        }
    ),
}
_SPEAKERS = "spk_dict.pt"  # of the vocoder, which transformers asks for as it loads the whole of Qwen2.5-Omni


def build_omni(model_type: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a tiny whole model, one of ``OMNI_TYPES``, into ``directory``: the thinker of its recipe, and a talker."""
    import torch
    import transformers

    recipe = _recipe(f"{model_type}_thinker")
    config = _make_config(model_type, recipe.config)
    whole: Any = getattr(transformers, _CLASSES[model_type])
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = whole(config).float().eval()
        _scale_weights(model.thinker, recipe, torch.Generator().manual_seed(seed))
    _silence(model.thinker, recipe.tokenizer)
    with _no_progress_bar():
        model.save_pretrained(directory)
    recipe.save_processor(directory)
    if model_type == "qwen2_5_omni":
        torch.save({"Chelsie": {"bos_token": 1}}, directory / _SPEAKERS)
    return directory


def _make_config(model_type: str, thinker: Any) -> Any:
    """Make the whole's config: that of the thinker's recipe, and all else small."""
    from transformers import CONFIG_MAPPING

    from support.any_model.media_checkpoint import make_config

    kind = CONFIG_MAPPING[model_type]
    fields = make_config(kind, int(thinker.get_text_config().vocab_size), _SIZES[model_type]).to_dict()
    fields["thinker_config"] = thinker.to_dict()
    for name in ("architectures", "transformers_version", "model_type"):
        fields.pop(name, None)
    return kind(**fields)
