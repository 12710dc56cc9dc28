"""Class of InternVL whose weights are read by the names of OpenGVLab's own code, with transformers' means for that.

transformers renames and splits weights as it reads them, by a table of each class; a part reads its own alone. So the
class here is transformers' own by another name, with another table.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from trinity.errors.internvl_chat import ARCHITECTURE

_RENAMED = {
    r"^mlp1\.0\.": "model.multi_modal_projector.layer_norm.",
    r"^mlp1\.1\.": "model.multi_modal_projector.linear_1.",
    r"^mlp1\.3\.": "model.multi_modal_projector.linear_2.",
    r"^vision_model\.embeddings\.class_embedding": "model.vision_tower.embeddings.cls_token",
    r"^vision_model\.embeddings\.position_embedding": "model.vision_tower.embeddings.position_embeddings",
    r"^vision_model\.embeddings\.patch_embedding\.": "model.vision_tower.embeddings.patch_embeddings.projection.",
    r"^vision_model\.encoder\.layers\.": "model.vision_tower.encoder.layer.",
    r"\.attn\.proj\.": ".attention.projection_layer.",
    r"\.attn\.": ".attention.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"\.ls1$": ".lambda_1",
    r"\.ls2$": ".lambda_2",
    r"^language_model\.(?:output|lm_head)\.": "lm_head.",
    r"^language_model\.model\.": "model.language_model.",
    r"^model\.language_model\.tok_embeddings\.": "model.language_model.embed_tokens.",
    r"\.attention_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.feed_forward\.w1\.": ".mlp.gate_proj.",
    r"\.feed_forward\.w2\.": ".mlp.down_proj.",
    r"\.feed_forward\.w3\.": ".mlp.up_proj.",
    r"\.attention\.wo\.": ".self_attn.o_proj.",
}
_PARTS = ("q_proj", "k_proj", "v_proj")


@cache
def find_chat_class() -> Any:
    """Return the class of published InternVL checkpoints, and have transformers know the names of its weights."""
    from transformers import InternVLForConditionalGeneration
    from transformers.conversion_mapping import register_checkpoint_conversion_mapping
    from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, WeightRenaming

    class Ungroup(ConversionOps):
        """Split rows of InternLM2: by key head, of its queries, of the key, of the value."""

        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **given: Any
        ) -> dict[str, Any]:
            (found,) = input_dict.values()
            parts = ungroup(found[0] if isinstance(found, list) else found, given["config"].get_text_config())
            return dict(zip(target_patterns, parts, strict=True))

    whole: Any = InternVLForConditionalGeneration
    table: list[Any] = [WeightRenaming(source, target) for source, target in _RENAMED.items()]
    table += [
        WeightConverter("attention.qkv", [f"attention.{part}" for part in _PARTS], [Chunk(dim=0)]),
        WeightConverter("attention.wqkv", [f"self_attn.{part}" for part in _PARTS], [Ungroup()]),
    ]
    register_checkpoint_conversion_mapping(ARCHITECTURE, table, overwrite=True)
    return type(ARCHITECTURE, (whole,), {"__module__": whole.__module__})


def ungroup(weight: torch.Tensor, text: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows of queries, keys and values of a fused weight or bias of InternLM2 with this config.

    Raises ``ValueError`` where it has other rows than the config says.
    """
    keys, queries = text.num_key_value_heads, text.num_attention_heads // text.num_key_value_heads
    size = text.hidden_size // text.num_attention_heads
    grouped = weight.reshape(keys, queries + 2, size, *weight.shape[1:])
    parts = grouped[:, :queries], grouped[:, queries : queries + 1], grouped[:, queries + 1 :]
    q, k, v = (part.flatten(0, 2).contiguous() for part in parts)
    return q, k, v
