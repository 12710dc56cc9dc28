"""Adapters of built-in audio families; each overrides only what differs from the default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trinity.core.messages import MediaSpan
from trinity.errors import StageError
from trinity.stages.models.base import MediaInputs, ModelAdapter, RotaryPositions, flatten_features, join_inputs


class Qwen2Audio(ModelAdapter):
    """Qwen2-Audio: its model computes features within ``forward`` alone, of windows [1, mels, frames] of one length."""

    def encode(self, model: Any, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        given, core = join_inputs(items), model.base_model
        lengths, rows = core.audio_tower._get_feat_extract_output_lengths(given["feature_attention_mask"].sum(-1))
        if rows.tolist() != list(counts):
            raise StageError(
                f"the model gives {rows.tolist()} {kind} features for {list(counts)} placeholders", stage="E"
            )
        features = core.audio_tower(given["input_features"], attention_mask=self._mask(core, given, lengths))
        found = core.multi_modal_projector(features.last_hidden_state)
        return [each[:count] for each, count in zip(found, counts, strict=True)]

    def _mask(self, core: Any, given: MediaInputs, lengths: Tensor) -> Tensor | None:
        """Make the tower's attention mask as the model's ``forward`` does; ``lengths``: rows that are no padding."""
        from transformers.masking_utils import create_bidirectional_mask

        mels = given["input_features"]
        rows = (mels.shape[-1] - 2) // 2 + 1
        kept = (torch.arange(rows, device=mels.device)[None] < lengths[:, None]).long()
        sizes = torch.zeros((len(mels), rows, 1), dtype=mels.dtype, device=mels.device)
        make: Any = create_bidirectional_mask
        mask: Tensor | None = make(config=core.audio_tower.config, inputs_embeds=sizes, attention_mask=kept)
        return mask


class QwenOmniThinker(ModelAdapter):
    """Thinkers of Qwen-Omni: audio features are the tower's last states; a clip's positions are those of text."""

    def feature_rows(self, output: Any) -> Tensor:
        if not isinstance(getattr(output, "pooler_output", None), tuple):  # that of images is split by image
            rows = flatten_features(output.last_hidden_state)
            return pad(rows, (0, self.deepstack * rows.shape[-1]))  # the first layers add nothing to a clip's rows
        return super().feature_rows(output)

    def positions(
        self, model: Any, prompt: np.ndarray, spans: Sequence[MediaSpan], kinds: np.ndarray
    ) -> RotaryPositions:
        seen = {name: [span.meta[name] for span in spans if name in span.meta] for name in _POSITION_FIELDS}
        if not seen["image_grid_thw"]:
            return RotaryPositions()  # as ``get_rope_index`` has it for prompts without an image
        image, audio = (torch.tensor(seen[name]) for name in _POSITION_FIELDS)
        ids = torch.from_numpy(prompt)[None]
        found, delta = model.base_model.get_rope_index(ids, image, None, torch.ones_like(ids), False, audio, None)
        return RotaryPositions(found[:, 0].long().numpy(), int(delta))


_POSITION_FIELDS = ("image_grid_thw", "audio_seqlens")
