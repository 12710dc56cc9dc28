"""Adapters of built-in model families; each overrides only what differs from the default."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trinity.core.messages import MediaSpan
from trinity.errors import StageError
from trinity.preprocess.media.strips import GRID_CROP
from trinity.stage_kinds import ENCODE
from trinity.stages.models.base import (
    MediaInputs,
    ModelAdapter,
    RotaryPositions,
    flatten_features,
    group_alike,
    join_inputs,
)

_POSITION_FIELDS = ("image_grid_thw", "audio_seqlens")


class Llava(ModelAdapter):
    """LLaVA: features are hidden states of the vision tower, often not the last."""

    @property
    def vision_states(self) -> int | Sequence[int] | None:
        found: int | Sequence[int] | None = getattr(self.config, "vision_feature_layer", None)
        return found


class TiledLlava(Llava):
    """LLaVA-NeXT and LLaVA-OneVision: ``pixel_values`` is [1, tiles, 3, H, W]; the model drops padding tiles itself.

    A strip of an image has ``GRID_CROP`` [1, 5]: whether its first tile is the whole image, tiles of a row, the first
    line of patches that shows the image, the number of such lines, and the columns of patches to drop on either side.
    """

    def encode(self, model: Any, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        if kind == "video":
            return self.encode_video(model, items, counts)
        strips = [number for number, item in enumerate(items) if GRID_CROP in item]
        whole = [number for number in range(len(items)) if number not in strips]
        made = super().encode(model, kind, [items[i] for i in whole], [counts[i] for i in whole]) if whole else []
        found = dict(zip(whole, made, strict=True))
        for side in {items[number]["pixel_values"].shape[-2:] for number in strips}:
            some = [number for number in strips if items[number]["pixel_values"].shape[-2:] == side]
            found.update(zip(some, self._encode_strips(model.base_model, [items[i] for i in some]), strict=True))
        return [_counted(found[number], kind, count) for number, count in enumerate(counts)]

    def encode_video(self, model: Any, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        """Compute features [counts[i], hidden] of groups of frames, each batched with those of as many frames.

        LLaVA-OneVision ends each video with a learned row, which of a group but the last is left away again.
        """
        found: dict[int, Tensor] = {}
        for chosen, joined in ModelAdapter.collate(self, items):
            made = model.base_model.get_video_features(joined["pixel_values_videos"], return_dict=True).pooler_output
            found.update({number: rows[: counts[number]] for number, rows in zip(chosen, made, strict=True)})
        return [_counted(found[number], "video", count) for number, count in enumerate(counts)]

    def _encode_strips(self, model: Any, items: Sequence[MediaInputs]) -> list[Tensor]:
        """Compute features of strips, as ``get_image_features`` and ``pack_image_features`` of the model do."""
        tiles = self._encode_tiles(model, torch.cat([item["pixel_values"][0] for item in items]))
        parts = torch.split(tiles, [item["pixel_values"].shape[1] for item in items])
        return [_crop(part, item[GRID_CROP][0], model.image_newline) for part, item in zip(parts, items, strict=True)]

    def _encode_tiles(self, model: Any, pixels: Tensor) -> Tensor:
        """Compute features [tiles, patches, hidden] of tiles [tiles, 3, H, W]."""
        layers = self.config.vision_feature_layer
        states = model.vision_tower(pixels, return_dict=True, output_hidden_states=layers if _can_select() else True)
        chosen = [states.hidden_states[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
        rows = torch.cat(chosen, dim=-1)
        if self.config.vision_feature_select_strategy == "default":
            rows = rows[:, 1:]
        features: Tensor = model.multi_modal_projector(rows)
        return features

    def collate(self, items: Sequence[MediaInputs]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        for chosen in group_alike(items, lambda name, value: value.shape[2:] if name == "pixel_values" else ()):
            most = max(items[i]["pixel_values"].shape[1] for i in chosen)
            yield chosen, join_inputs([_padded(items[i], most) for i in chosen])


@cache
def _can_select() -> bool:
    """Tell if towers of this transformers keep only the hidden states that are asked for."""
    try:
        from transformers.utils.output_capturing import select_hidden_states  # noqa: F401
    except ImportError:
        return False
    return True


def _crop(tiles: Tensor, crop: Tensor, newline: Tensor) -> Tensor:
    """Lay a strip's tiles out as rows of patches, drop what shows no image, and end each line with ``newline``."""
    overview, columns, begins, lines, left = crop.tolist()
    if len(tiles) == overview:
        return tiles[0]
    side = math.isqrt(tiles.shape[1])
    grid = tiles[overview:].reshape(-1, columns, side, side, tiles.shape[-1]).transpose(1, 2)
    grid = grid.reshape(-1, columns * side, tiles.shape[-1])[begins : begins + lines, left : columns * side - left]
    ends = newline.to(grid).expand(len(grid), 1, -1)
    rows = torch.cat((grid, ends), dim=1).flatten(0, 1)
    return torch.cat((tiles[0], rows)) if overview else rows


def _counted(rows: Tensor, kind: str, count: int) -> Tensor:
    if len(rows) != count:
        raise StageError(f"the model gives {len(rows)} {kind} features for {count} placeholders", stage=ENCODE.letter)
    return rows


def _padded(item: MediaInputs, tiles: int) -> dict[str, Tensor]:
    pixels = item["pixel_values"]
    return {**item, "pixel_values": pad(pixels, (0, 0) * (pixels.ndim - 2) + (0, tiles - pixels.shape[1]))}


class LlavaOneVision(TiledLlava):
    """LLaVA-OneVision: images are not cut into tiles if ``batch_num_images`` says that their prompt has several."""

    def collate(self, items: Sequence[MediaInputs]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        among = [int(item.get("batch_num_images", torch.ones(1)).max()) for item in items]
        for single in (True, False):
            mine = [i for i, number in enumerate(among) if (number == 1) == single]
            bare = [{name: value for name, value in items[i].items() if name != "batch_num_images"} for i in mine]
            for chosen, joined in super().collate(bare):
                # Only "1" and "more than 1" count; the model stops at the end of image_sizes.
                numbers = [1] * len(chosen) if single else [max(2, len(chosen))]
                yield [mine[i] for i in chosen], {**joined, "batch_num_images": torch.tensor(numbers)}


class Idefics(ModelAdapter):
    """Idefics 3 and SmolVLM: tiles [1, tiles, 3, H, W] and their pixel masks are joined along axis 1."""

    def collate(self, items: Sequence[MediaInputs]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        for chosen in group_alike(items, lambda name, value: value.shape[2:]):
            yield chosen, join_inputs([items[i] for i in chosen], axis=1)


class MiniCPM(ModelAdapter):
    """MiniCPM-V: the patches of all slices lie along the last axis of ``pixel_values`` [1, 3, patch, patches].

    Only slices of one size are batched: older transformers (5.17) use the first slice's size for the whole batch, so an
    image's features would depend on its neighbours.
    """

    def collate(self, items: Sequence[MediaInputs]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        sizes = [{tuple(size) for size in item["target_sizes"].tolist()} for item in items]
        same: dict[Any, list[int]] = defaultdict(list)
        for index, found in enumerate(sizes):
            same[next(iter(found)) if len(found) == 1 else index].append(index)
        for chosen in same.values():
            yield chosen, join_inputs([items[i] for i in chosen], axes={"pixel_values": -1})


class Gemma3(ModelAdapter):
    """Gemma 3: the tokens of an image see each other in both directions."""

    whole_media = True


class VideoLlama3(ModelAdapter):
    """VideoLLaMA 3: of a video's features those stay that ``video_compression_mask`` keeps, as its forward has it."""

    def encode(self, model: Any, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        if kind != "video":
            return super().encode(model, kind, items, counts)
        masks = [item["video_compression_mask"] for item in items]
        bare = [{name: value for name, value in item.items() if name != "video_compression_mask"} for item in items]
        rows = super().encode(model, kind, bare, [len(mask) for mask in masks])
        kept = [each[mask] for each, mask in zip(rows, masks, strict=True)]
        return [_counted(each, kind, count) for each, count in zip(kept, counts, strict=True)]


class Qwen2Audio(ModelAdapter):
    """Qwen2-Audio: its model computes features within ``forward`` alone, of windows [1, mels, frames] of one length."""

    def encode(self, model: Any, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        given, core = join_inputs(items), model.base_model
        # transformers' own forward calls this; there is no public way to the lengths of an encoder's output.
        lengths, rows = core.audio_tower._get_feat_extract_output_lengths(given["feature_attention_mask"].sum(-1))
        if rows.tolist() != list(counts):
            raise StageError(
                f"the model gives {rows.tolist()} {kind} features for {list(counts)} placeholders", stage=ENCODE.letter
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


ADAPTERS: dict[str, type[ModelAdapter]] = {
    "llava": Llava,
    "llava_next": TiledLlava,
    "llava_next_video": TiledLlava,
    "llava_onevision": LlavaOneVision,
    "qwen2_vl": ModelAdapter,
    "qwen2_5_vl": ModelAdapter,
    "qwen3_vl": ModelAdapter,
    "internvl": ModelAdapter,
    "smolvlm": Idefics,
    "idefics3": Idefics,
    "gemma3": Gemma3,
    "minicpmv4_6": MiniCPM,
    "video_llama_3": VideoLlama3,
    "qwen2_audio": Qwen2Audio,
    "audioflamingo3": ModelAdapter,
    "glmasr": ModelAdapter,
    "qwen3_asr": ModelAdapter,
    "qwen2_5_omni_thinker": QwenOmniThinker,
    "qwen3_omni_moe_thinker": QwenOmniThinker,
    "llama": ModelAdapter,
    "mistral": ModelAdapter,
}
"""Adapters by ``config.model_type``."""
