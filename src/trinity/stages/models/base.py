"""ModelAdapter: all that trinity must know of a family of transformers models, whose own code stays as it is.

The class below is both the interface and the default: it fits every model that transformers' conventions fit (LLaVA,
InternVL, the Qwen-VL line with its three rotary axes and deepstack, Llama, Mistral, and most text models). A family
that differs overrides what differs; see ``registry`` for how to make it known.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import MediaSpan
from trinity.errors import StageError, UnsupportedModel

Inputs = Mapping[str, Tensor]
MEDIA = ("image", "video", "audio")  # in the order of transformers' token type ids, from 1


@dataclass(frozen=True, slots=True)
class Positions:
    """Rotary positions: ``prompt`` int64 [3, length] (None: 0, 1, 2, ...); after it, position + ``delta``."""

    prompt: np.ndarray | None = None
    delta: int = 0


class ModelAdapter:
    """One model family. ``config`` is the checkpoint's; one adapter serves one ``LoadedModel``.

    ``language_names``: where a multimodal model keeps its text model; all other parts are the encode stage's.
    ``whole_media``: a run of placeholders attends to itself in both directions, so that no chunk may cut it.
    """

    language_names: ClassVar[tuple[str, ...]] = ("language_model", "text_model")
    whole_media: ClassVar[bool] = False

    def __init__(self, config: Any) -> None:
        self.config = config
        self.text_config = config.get_text_config(decoder=True)

    # ------------------------------------------------------------ what the config says

    @property
    def multimodal(self) -> bool:
        return self.text_config is not self.config and bool(self.media_tokens)

    @property
    def media_tokens(self) -> dict[str, int]:
        """Placeholder token id of each kind of media."""
        found = {kind: getattr(self.config, f"{kind}_token_id", None) for kind in MEDIA}
        return {kind: token for kind, token in found.items() if token is not None}

    @property
    def deepstack(self) -> int:
        """Feature rows hold this many further parts of hidden size, one for each of the first layers (Qwen3-VL)."""
        vision = getattr(self.config, "vision_config", None)
        return len(getattr(vision, "deepstack_visual_indexes", None) or ())

    @property
    def axes(self) -> int:
        """Axes of a rotary position: 3 with M-RoPE, else 1."""
        rope = getattr(self.text_config, "rope_parameters", None) or {}
        return 3 if self.multimodal and rope.get("mrope_section") else 1

    @property
    def kv_heads(self) -> tuple[int, int]:
        """Key-value heads and their width."""
        text = self.text_config
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        return heads, getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads

    @property
    def states_taken(self) -> int | Sequence[int] | None:
        """Which hidden states of ``vision_tower`` features are made of, where nothing else of it is used; else None."""
        return None

    # ------------------------------------------------------------ parts of the model

    def language_name(self, model: Any) -> str | None:
        """Name of the text model within ``model.base_model``; None where that is the text model itself."""
        if not self.multimodal:
            return None
        for name in self.language_names:
            if hasattr(model.base_model, name):
                return name
        raise UnsupportedModel(
            f"{type(model).__name__} keeps its text model under none of {', '.join(self.language_names)}: "
            "write a ModelAdapter that sets language_names"
        )

    def language(self, model: Any) -> Any:
        """The text model: embeddings in, hidden states out."""
        name = self.language_name(model)
        return model.base_model if name is None else getattr(model.base_model, name)

    # ------------------------------------------------------------ encode

    def encode(self, model: Any, kind: str, items: Sequence[Inputs], counts: Sequence[int]) -> list[Tensor]:
        """Features [counts[i], width] of each item, batched where the items' shapes allow.

        Raises ``StageError`` where the model makes another number of rows than the prompt has placeholders.
        """
        method = getattr(model.base_model, f"get_{kind}_features", None)
        if method is None:
            raise UnsupportedModel(f"{type(model).__name__} has no get_{kind}_features: it takes no {kind}")
        accepted = inspect.signature(method).parameters
        found: dict[int, Tensor] = {}
        for chosen, joined in self.collate(items):
            output = method(**{name: value for name, value in joined.items() if name in accepted}, return_dict=True)
            rows, wanted = self.feature_rows(output), [counts[i] for i in chosen]
            if len(rows) != sum(wanted):
                raise StageError(f"{len(rows)} {kind} features for {sum(wanted)} placeholders", stage="E")
            found.update(zip(chosen, torch.split(rows, wanted), strict=True))
        return [found[i] for i in range(len(items))]

    def collate(self, items: Sequence[Inputs]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Items that go through the encoder together, by index, and their joined inputs."""
        for chosen in alike(items, lambda name, value: value.shape[1:]):
            yield chosen, join([items[i] for i in chosen])

    def feature_rows(self, output: Any) -> Tensor:
        """[rows of all items, hidden * (1 + deepstack)] from what ``get_*_features`` returned."""
        parts = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.cat([flatten(part) for part in parts], dim=-1)

    # ------------------------------------------------------------ prefill and decode

    def positions(self, model: Any, prompt: np.ndarray, spans: Sequence[MediaSpan], kinds: np.ndarray) -> Positions:
        """Rotary positions of a prompt. ``kinds`` [len(prompt)]: 0 for text, else 1 + the index in ``MEDIA``."""
        if self.axes == 1 or not spans:
            return Positions()
        grids = defaultdict(list)
        for span in spans:
            for name, value in span.meta.items():
                grids[name].append(value)
        method = model.base_model.get_rope_index
        accepted = inspect.signature(method).parameters
        given = {name: torch.tensor(values) for name, values in grids.items() if name in accepted}
        types = torch.from_numpy(kinds)[None]
        found, delta = method(torch.from_numpy(prompt)[None], mm_token_type_ids=types, **given)
        return Positions(found[:, 0].numpy(), int(delta))

    def language_inputs(self, further: Tensor, at: Tensor, total: int) -> dict[str, Any]:
        """Keywords of the text model for feature columns beyond the first hidden size, [rows, hidden * deepstack].

        ``at`` [rows]: the places of these rows among the batch's ``total``, ascending.
        """
        if not self.deepstack:
            return {}
        mask = torch.zeros((1, total), dtype=torch.bool, device=at.device)
        mask[0, at] = True
        return {"visual_pos_masks": mask, "deepstack_visual_embeds": list(further.chunk(self.deepstack, -1))}

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of hidden states [rows, hidden], as the model's own forward makes them."""
        logits: Tensor = model.get_output_embeddings()(hidden)
        factor, divisor, cap = (getattr(self.config, name, None) for name in _HEAD_FIELDS)
        if factor is not None:
            logits = logits * factor
        if divisor is not None:
            logits = logits / divisor
        return logits if cap is None else torch.tanh(logits / cap) * cap


_HEAD_FIELDS = ("logit_scale", "logits_scaling", "final_logit_softcapping")  # Cohere, Granite, Gemma 2


def alike(items: Sequence[Inputs], shape: Any) -> list[list[int]]:
    """Indices of items whose inputs have equal names and equal ``shape(name, value)``."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        groups[tuple((name, *shape(name, item[name])) for name in sorted(item))].append(index)
    return list(groups.values())


def join(items: Sequence[Inputs], axis: int = 0, axes: Mapping[str, int] | None = None) -> dict[str, Tensor]:
    """One dict of inputs, each joined along ``axes[name]`` or ``axis``."""
    return {name: torch.cat([item[name] for item in items], (axes or {}).get(name, axis)) for name in items[0]}


def flatten(features: Any) -> Tensor:
    """A tensor, or tensors in lists and tuples, as rows [rows, hidden]."""
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([flatten(part) for part in features])
