"""Adapters of built-in model families; each overrides only what differs from the default."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from trinity.stages.models.base import MediaInputs, ModelAdapter, group_alike, join_inputs


class Llava(ModelAdapter):
    """LLaVA: features are hidden states of the vision tower, often not the last."""

    @property
    def vision_states(self) -> int | Sequence[int] | None:
        found: int | Sequence[int] | None = getattr(self.config, "vision_feature_layer", None)
        return found


class TiledLlava(Llava):
    """LLaVA-NeXT and LLaVA-OneVision: ``pixel_values`` is [1, tiles, 3, H, W]; the model drops padding tiles itself."""

    def collate(self, items: Sequence[MediaInputs]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        for chosen in group_alike(items, lambda name, value: value.shape[2:] if name == "pixel_values" else ()):
            most = max(items[i]["pixel_values"].shape[1] for i in chosen)
            yield chosen, join_inputs([_padded(items[i], most) for i in chosen])


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
