"""The adapter of multimodal types that nobody listed: ModelAdapter with the facts that the proof found."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import MediaSpan
from trinity.preprocess.checkpoint.verdicts import MEDIA, MediaFacts
from trinity.stages.attention.interface import CAUSAL_LAYER
from trinity.stages.models.base import (
    MediaInputs,
    ModelAdapter,
    RotaryPositions,
    find_head,
    flatten_features,
    scale_logits,
)
from trinity.stages.models.own_forward import forward_features, forward_logits

FORWARD = "forward"  # of ``MediaFacts``: by the model's own
FEATURE_WAYS = ("getter", FORWARD)  # the usual one first


class GenericAdapter(ModelAdapter):
    """Adapter of one proven checkpoint; ``facts`` are those of its verdict."""

    def __init__(self, config: Any, facts: MediaFacts) -> None:
        super().__init__(config)
        self.facts = facts
        self.whole_media = facts.whole_media  # type: ignore[misc]
        self.together = facts.together  # type: ignore[misc]
        self.whole_prompt = facts.whole_prompt  # type: ignore[misc]
        self.added_to = facts.image_token_id if facts.added else None  # type: ignore[misc]
        self.embeds_codes = facts.embeds_codes  # type: ignore[misc]

    @property
    def media_tokens(self) -> dict[str, int]:
        return self.facts.media_tokens

    @property
    def multimodal(self) -> bool:
        return True

    @property
    def axes(self) -> int:
        return max(self.facts.axes, super().axes)

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Ids of all placeholders, and of tokens with a type, or without a place: no text alone has them."""
        typed = {number for kinds in self.facts.token_types.values() for number in kinds}
        return super().placeholder_ids | {number for number in (*typed, self.facts.skipped) if number >= 0}

    @property
    def reads_types(self) -> bool:
        return bool(self.facts.token_types)

    def language_name(self, model: Any) -> str | None:
        return self.facts.language or None

    @property
    def flat(self) -> bool:
        return not self.facts.language

    def text_children(self, model: Any) -> list[str]:
        if self.facts.language:
            return [self.facts.language]
        return [name for name, _ in model.base_model.named_children() if name not in self.facts.towers]

    def language(self, model: Any) -> Any:
        """Return the text model; of a whole causal model the part below its head."""
        return below_head(find_text(model, self.facts.language))

    def text_alone(self, model: Any) -> Any:
        text = find_text(model, self.facts.language)
        if not self.facts.text_alone and text.get_output_embeddings() is not None:
            return text
        alone = self.flat or runs_on_text(model)  # a flat one is given embeddings
        return model if alone else TextBelowHead(text, partial(self.head, model))

    def encode(self, model: Any, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        if kind == "audio":  # one by one: lengths differ, and what pads a batch would be part of a clip's features
            return [self._encode_clip(model, item, count) for item, count in zip(items, counts, strict=True)]
        if self.facts.features == "getter":
            return super().encode(model, kind, items, counts)
        return self._encode_by_forward(model, items, counts)

    def _encode_clip(self, model: Any, item: MediaInputs, count: int) -> Tensor:
        if hasattr(model.base_model, "get_audio_features"):
            return super().encode(model, "audio", [item], [count])[0]
        width, token = self.text_config.hidden_size, self.facts.audio_token_id
        return forward_features(model, self.facts.language, width, token, count, item)

    def _encode_by_forward(self, model: Any, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for chosen, joined in self.collate(items):
            wanted = [counts[i] for i in chosen]
            rows = forward_features(
                *(model, self.facts.language, self.text_config.hidden_size, self.facts.image_token_id),
                sum(wanted),
                joined,
            )
            found.update(zip(chosen, torch.split(rows, wanted), strict=True))
        return [found[i] for i in range(len(items))]

    def mark_layers(self, model: Any) -> None:
        """Mark the layers of the text model in which an image's tokens do not see each other in both directions."""
        kinds = getattr(self.text_config, "layer_types", None) or ()
        for layer in self.language(model).modules():
            at = getattr(layer, "layer_idx", None)
            if isinstance(at, int) and at < len(kinds):
                setattr(layer, CAUSAL_LAYER, self.facts.whole_windows and kinds[at] == "full_attention")

    def collate(self, items: Sequence[MediaInputs]) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        if self.facts.joined:
            yield from super().collate(items)
        else:
            for index, item in enumerate(items):
                yield [index], dict(item)

    @property
    def deepstack(self) -> int:
        return len(self.facts.layers) or super().deepstack

    def feature_rows(self, output: Any) -> Tensor:
        if not self.facts.layers:
            kept, rows = getattr(output, "attention_mask", None), output.pooler_output
            if isinstance(kept, Tensor) and isinstance(rows, Tensor) and rows.shape[:2] == kept.shape:
                return flatten_features(rows[kept.bool()])  # the encoder itself says which are padding
            return super().feature_rows(output)
        given = dict(output.deepstack_features)  # of several parts for one layer the last stays, as in the models
        parts = [flatten_features(given[layer]) for layer in self.facts.layers]
        pooled = output.pooler_output
        return torch.cat([torch.zeros_like(parts[0]) if pooled is None else flatten_features(pooled), *parts], dim=-1)

    def language_inputs(self, further: Tensor, at: Tensor, total: int) -> dict[str, Any]:
        if not self.facts.layers:
            return super().language_inputs(further, at, total)
        mask = torch.zeros((1, total, 1), dtype=torch.bool, device=at.device)
        mask[0, at] = True
        where, parts = self.facts.layer_names
        return {where: mask, parts: dict(zip(self.facts.layers, further.chunk(self.deepstack, -1), strict=True))}

    def positions(
        self, model: Any, prompt: np.ndarray, spans: Sequence[MediaSpan], kinds: np.ndarray
    ) -> RotaryPositions:
        if self.axes == 1:
            kept = prompt != self.facts.skipped
            counted = None if kept.all() else (np.cumsum(kept) * kept + self.facts.skipped)[None]
            return RotaryPositions(counted, self.facts.first)
        return super().positions(model, prompt, spans, kinds)

    def place(self, ids: Tensor, media: Tensor, places: Tensor) -> Tensor:
        if self.facts.skipped < 0:
            return places
        return places.masked_fill((ids == self.facts.skipped) & ~media, self.facts.skipped)

    def token_inputs(self, text: Any, ids: Tensor, media: Tensor, written: Tensor | None = None) -> dict[str, Any]:
        typed = ids if written is None else ids.masked_fill(written, -1)  # generate() gives no types as it decodes
        found = {name: self._find_types(kinds, typed, media) for name, kinds in self.facts.token_types.items()}
        if not getattr(self.text_config, "hidden_size_per_layer_input", 0):
            return found
        return {"per_layer_inputs": self._per_layer_inputs(text, ids, media), **found}

    def _per_layer_inputs(self, text: Any, ids: Tensor, media: Tensor) -> Tensor:
        """Look up embeddings of layers as the model's own forward does.

        Gemma 3n's takes ids of media as they are, which its table does not have, nor the 0 that stands for them here.
        """
        look_up: Callable[..., Tensor] = text.get_per_layer_inputs
        if len(inspect.signature(look_up).parameters) == 1:
            return look_up(ids[None])
        return look_up(torch.where(media, self.text_config.pad_token_id or 0, ids)[None], None)

    def _find_types(self, kinds: dict[int, int], ids: Tensor, media: Tensor) -> Tensor:
        """Find the types [1, rows] of tokens."""
        found = torch.zeros_like(ids)
        for number in kinds.keys() - {MEDIA}:
            found = torch.where(ids == number, kinds[number], found)
        return torch.where(media, kinds.get(MEDIA, 0), found)[None]

    def head(self, model: Any, hidden: Tensor) -> Tensor:
        if self.facts.head == FORWARD:
            return forward_logits(model, self.facts.language, self.language(model), hidden)
        logits: Tensor = find_head(model)(hidden)
        if self.facts.head == "none":
            return logits
        return scale_logits(logits, self.config if self.facts.head == "config" else self.text_config)


def find_text(model: Any, language: str) -> Any:
    """Find the text model of this name, or with "" the base itself."""
    return getattr(model.base_model, language) if language else model.base_model


def below_head(text: Any) -> Any:
    """Return the part of a text model that gives hidden states: of a causal model that below its head, else all."""
    if text.get_output_embeddings() is None:
        return text
    if text.base_model is not text:
        return text.base_model
    return next(child for child in text.children() if hasattr(child, "get_input_embeddings"))  # Llama 4 names no base


@torch.inference_mode()
def runs_on_text(model: Any) -> bool:
    """Tell if a model's forward takes text where its encoders are not loaded: Gemma 3n's looks into theirs."""
    try:
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False)
    except AttributeError:
        return False
    return True


@dataclass(frozen=True)
class TextBelowHead:
    """A text model's own forward from token ids, with the head of the model that it is a part of."""

    text: Any
    head: Callable[[Tensor], Tensor]

    def get_input_embeddings(self) -> Any:
        return self.text.get_input_embeddings()

    def __call__(self, **given: Any) -> Any:
        """Compute logits [sequences, tokens, vocabulary] of ``input_ids``."""
        found = self.text(**given)
        return SimpleNamespace(logits=self.head(found[0]), past_key_values=getattr(found, "past_key_values", None))
