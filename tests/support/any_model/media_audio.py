"""Needs of types that hear and do not see, for their tiny checkpoints, beyond the rules of sizes."""

from __future__ import annotations

from support.any_model.media_sizes import TypeSizes

AUDIO_SIZES: dict[str, TypeSizes] = {
    "granite_speech": TypeSizes(config={"has_lora_adapter": False}, embedding_std=0.1),
    "granite_speech_plus": TypeSizes(
        config={
            "has_lora_adapter": False,
            "encoder_config.cat_hidden_layers": [0],
            "projector_config.encoder_hidden_size": 128,  # of that layer's rows and of the last one's
        }
    ),
    "voxtral": TypeSizes(
        tekken=True,
        config={"audio_config.intermediate_size": 256},  # four rows of the tower, which become one
        audio={"feature_size": 128},
    ),
}
