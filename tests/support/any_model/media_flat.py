"""Needs of types whose base is the text model itself, for their tiny checkpoints, beyond the rules of sizes."""

from __future__ import annotations

from support.any_model.media_sizes import TypeSizes


def _in_letters(number: int) -> str:
    """Write a number as Chameleon's vocabulary names the codes of an image: A for 0, B for 1, and so on."""
    return "".join(chr(ord("A") + int(digit)) for digit in str(number))


FLAT_SIZES: dict[str, TypeSizes] = {
    "chameleon": TypeSizes(
        plain=("<racm3:break>", "<eoss>", *(f"IMGIMG{_in_letters(number)}Z" for number in range(32))),
        config={
            "vq_config.num_embeddings": 32,
            "vq_config.base_channels": 32,
            "vq_config.channel_multiplier": [1, 1, 1, 1, 1],
            "vq_config.embed_dim": 4,
            "vq_config.latent_channels": 4,
        },
        images={"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
        processor={"image_seq_length": 16},
        chats=False,
    ),
    "phi4_multimodal": TypeSizes(
        config={
            "vision_config.image_size": 160,
            "vision_config.crop_size": 160,
            "vision_config.patch_size": 5,
            "audio_config.num_blocks": 2,  # more of random weights make other features of a rounding error
            "audio_config.nemo_conv_channels": 64,
            "audio_config.ext_pw_out_channel": 64,
            "audio_config.depthwise_separable_out_channel": 64,
        },
        images={"size": {"height": 160, "width": 160}, "patch_size": 5},  # 32 a side make its processor's 256 tokens
        chats=False,
    ),
}
