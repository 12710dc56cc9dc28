"""Shapes of stacks of layers: of a language model, and of encoders of images and of audio."""

from __future__ import annotations

import msgspec

from trinity.costs.layer_parts import ExpertShape, LatentShape
from trinity.costs.media_tokens import WINDOW_FRAMES
from trinity.errors import ConfigError
from trinity.errors.arguments import KeywordsByName


class LayerShape(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """Shape of a stack of equal transformer layers.

    layers: layers.
    width (elements): hidden size.
    heads, kv_heads: query heads, and key-value heads, which must divide them.
    head_dim (elements): width of a head.
    ffn (elements): width of the feed-forward part.
    gated (False): the feed-forward part has three matrices, not two.
    experts (None): what stands in some layers for the feed-forward part.
    latent (None): latent attention; keys and values of ``kv_heads`` are not cached then.

    Raises ``ConfigError`` for values out of range.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool = False
    experts: ExpertShape | None = None
    latent: LatentShape | None = None

    def __post_init__(self) -> None:
        if min(msgspec.structs.astuple(self)[:6]) < 1 or self.heads % self.kv_heads:
            raise ConfigError(f"{self!r}: sizes must be at least 1, and kv_heads must divide heads")

    @property
    def weights(self) -> int:
        """Number of weights in all matrices, experts that a token does not go through included."""
        return int(self._weights(self.experts.experts if self.experts else 0))

    @property
    def active_weights(self) -> int:
        """Number of weights that a token is multiplied with."""
        return int(self._weights(self.experts.active if self.experts else 0))

    def touched_weights(self, rows: float) -> float:
        """Weights that a step of so many rows reads: of experts those that some row goes through, on average."""
        return self._weights(self.experts.touched(rows)) if self.experts else self.weights

    def _weights(self, experts: float) -> float:
        """Weights of all layers, where those with experts have so many."""
        matrices, mixed = 3 if self.gated else 2, self.experts
        attention = 2 * self.width * self.head_dim * (self.heads + self.kv_heads)
        if self.latent is not None:
            attention = self.latent.weights(self.width, self.heads)
        dense = self.layers - (mixed.layers if mixed else 0)
        held = self.layers * attention + dense * matrices * self.width * self.ffn
        return held + (mixed.weights(self.width, experts, matrices) if mixed else 0)

    @property
    def kv_row(self) -> int:
        """Elements that the KV cache holds of a token in one layer: keys and values, or a latent row."""
        return self.latent.row if self.latent else 2 * self.kv_heads * self.head_dim

    @property
    def attended(self) -> int:
        """Multiply-adds of one query and one key in all layers and heads: the score and the weighted value."""
        return self.layers * self.attended_each

    @property
    def attended_each(self) -> int:
        """Multiply-adds of one query and one key in one layer."""
        return self.latent.attended(self.heads) if self.latent else 2 * self.heads * self.head_dim


class VisionShape(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """Shape of an encoder, of images and frames or of audio, whose positions are patches here.

    layers: its transformer layers.
    patches: patches that pass through the layers for each visual token.
    span (patches): patches of a tile or window that each patch attends to.
    projector: number of weights that turn patch features into visual tokens.
    full_layers (0): layers whose patches attend to all of their image, in place of the ``span``.
    deep_layers (0): layers whose features enter the language model beside the last's (Qwen3-VL's DeepStack); a visual
        token has a row of each.
    front (0): weights before the layers that each patch meets, as of an audio encoder's convolutions.
    """

    layers: LayerShape
    patches: float
    span: int
    projector: int
    full_layers: int = 0
    deep_layers: int = 0
    front: int = 0

    @property
    def windowed_layers(self) -> int:
        return self.layers.layers - self.full_layers

    @property
    def patch_weights(self) -> int:
        """Number of weights that each patch meets."""
        return self.layers.weights + self.front

    def token_products(self, image_tokens: float) -> float:
        """Multiply-adds of one visual token of an image of ``image_tokens``: matrices and attention."""
        attended = self.full_layers * image_tokens * self.patches + self.windowed_layers * self.span
        return self.patches * (self.patch_weights + attended * self.layers.attended_each) + self.projector


def whisper_shape(
    layers: LayerShape, *, mel: int, stack: int, projector: int, span: int = WINDOW_FRAMES // 2
) -> VisionShape:
    """Shape of an encoder as Whisper's: two convolutions of 3 over ``mel`` bands, of which one halves, and layers.

    ``stack``: positions that become one token. ``span``: positions that attend to one another.
    """
    front = 3 * layers.width * (2 * mel + layers.width)
    return VisionShape(layers=layers, patches=stack, span=span, projector=projector, front=front)


def audio_worth(audio: VisionShape, vision: VisionShape | None, image_tokens: int) -> float:
    """Cost of encoding an audio token in visual tokens of a typical image, by their products; 1 without images."""
    return audio.token_products(0) / vision.token_products(image_tokens) if vision else 1.0
