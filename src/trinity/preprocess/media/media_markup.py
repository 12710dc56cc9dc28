"""Markup of media in models' raw texts, by transformers' ``model_type``."""

from __future__ import annotations

import msgspec


class ImageText(msgspec.Struct, frozen=True, kw_only=True):
    """Markup of images in a model's raw text.

    - ``marker`` ("{token}"): text of one image; ``{token}`` stands for the processor's own image token.
    - ``atomic`` (False): attention is bidirectional inside an image, so that no chunk of a prefill may cut it.
    - ``pooled_rows`` (""): field of the config that counts the rows to which the model's class pools an image.
    - ``tiles`` (""): how its processor lays out the tiles of an image, a name in ``strips.LAYOUTS``; "" where features
      of a part of an image depend on the rest of it, or nobody has said.
    """

    marker: str = "{token}"
    atomic: bool = False
    pooled_rows: str = ""
    tiles: str = ""


_QWEN = ImageText(marker="<|vision_start|>{token}<|vision_end|>")
IMAGE_TEXT: dict[str, ImageText] = {
    "gemma3": ImageText(atomic=True, pooled_rows="mm_tokens_per_image"),
    "idefics3": ImageText(tiles="second axis"),
    "internvl": ImageText(tiles="first axis"),
    "llava": ImageText(),
    "llava_next": ImageText(tiles="grid"),
    "llava_next_video": ImageText(),
    "llava_onevision": ImageText(tiles="grid"),
    "minicpmv4_6": ImageText(tiles="patches"),
    "qwen2_vl": _QWEN,
    "qwen2_5_omni_thinker": ImageText(marker="<|vision_bos|>{token}<|vision_eos|>"),
    "qwen2_5_vl": _QWEN,
    "qwen3_omni_moe_thinker": _QWEN,
    "qwen3_vl": _QWEN,
    "smolvlm": ImageText(tiles="second axis"),
    "video_llama_3": ImageText(),
}
"""Markup by transformers' ``model_type``. Add a model where ``<image>`` stands for more than the processor's token."""


class VideoText(msgspec.Struct, frozen=True, kw_only=True):
    """Markup of videos in a model's raw text, and how its features follow from frames.

    - ``marker`` ("{token}"): text of one video; ``{token}`` stands for the processor's own video token.
    - ``tail`` (0): rows of features behind those of the last frame.
    - ``sampled`` (False): its chats have frames sampled whatever the checkpoint's ``do_sample_frames`` says.
    """

    marker: str = "{token}"
    tail: int = 0
    sampled: bool = False


_QWEN_VIDEO = VideoText(marker="<|vision_start|>{token}<|vision_end|>")
VIDEO_TEXT: dict[str, VideoText] = {
    "internvl": VideoText(),
    "llava_next_video": VideoText(),
    "llava_onevision": VideoText(tail=1),
    "qwen2_vl": _QWEN_VIDEO,
    "qwen2_5_vl": _QWEN_VIDEO,
    "qwen3_vl": _QWEN_VIDEO,
    "smolvlm": VideoText(sampled=True),
    "video_llama_3": VideoText(),
}
"""Types whose videos are compared with ``generate()``, by transformers' ``model_type``: others take none here."""
