"""Emulated models, whose stages wait instead of computing; all that they show is emulation, and says so.

Cores, sockets, leases and blocks are real. A stage sleeps for the time that a cost model predicts, and blocks are
smaller by a printed factor. Needs no checkpoint, no tokenizer and no torch.

::

    model = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(step_s=0.02, prefill_s=1e-4), scale=1024)
    async with Pipeline(model, "1E1P1D") as pipe:
        output = await pipe.complete(EmulatedRequest(text_tokens=40, image_tokens=(576,), max_tokens=16))
    output.emulated  # True
"""

from __future__ import annotations

import hashlib
import math

import msgspec
import numpy as np
from msgspec.structs import replace

from trinity.core.messages import IMAGE, KV
from trinity.costs.emulated_cost import LinearCost, TableCost
from trinity.costs.media_tokens import MediaRules
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import CostTables, Roofline
from trinity.costs.visual_tokens import decode_rule, encode_rule, equal_tile_tokens
from trinity.errors import ConfigError
from trinity.errors.arguments import KeywordsByName, check_struct
from trinity.memory.block_memory import BlockShape
from trinity.memory.cache_config import KvDtype
from trinity.request import Request
from trinity.traces.media import TraceAudio, TraceVideo
from trinity.traces.trace import TraceRow

WORD = 8  # blocks hold 64-bit words


class EmulatedShape(msgspec.Struct, frozen=True, kw_only=True):
    """Dimensions of an emulated model that determine the size of its blocks. Raises ``ConfigError``.

    name: name of the model.
    layers, kv_heads: layers of the language model, and its key-value heads.
    head_dim (elements): width of a head.
    dtype_bytes (bytes, 2): size of an element.
    kv_dtype_bytes (bytes, None): size of an element of the KV cache; as ``dtype_bytes``.
    latent_width (elements, 0): width of a latent row, which is cached in place of keys and values; 0: they are.
    image_width (elements, 0): width of a row of the image cache; 0 for a model of text alone.
    image_tokens (visual tokens, 576): rows of an image; with ``image_pixels``, their maximum.
    image_pixels (pixels, 0): edge of the square that becomes one row; 0 gives every image ``image_tokens`` rows.
    tile_tokens (visual tokens, 0): rows of a tile; several encoders may share the tiles of an image. 0: it is in one.
    takes_images (True): False for a model of audio alone, though its rows have an ``image_width``.
    media: rules for videos and audio clips; without them it takes none.
    vocabulary (tokens, 32000): size of the vocabulary, at least 16.
    context (tokens, 4096): longest sequence.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int = 2
    kv_dtype_bytes: int | None = None
    latent_width: int = 0
    image_width: int = 0
    image_tokens: int = 576
    image_pixels: int = 0
    tile_tokens: int = 0
    takes_images: bool = True
    media: MediaRules = MediaRules()
    vocabulary: int = 32_000
    context: int = 4096

    def __post_init__(self) -> None:
        check_struct(self)
        counts = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        counts |= {"dtype_bytes": self.dtype_bytes, "image_tokens": self.image_tokens, "context": self.context - 1}
        counts["kv_dtype_bytes"] = self.dtype_bytes if self.kv_dtype_bytes is None else self.kv_dtype_bytes
        wrong = [name for name, count in counts.items() if count < 1]
        if (
            wrong
            or min(self.image_width, self.image_pixels, self.tile_tokens, self.latent_width) < 0
            or self.vocabulary < 16
        ):
            raise ConfigError(
                f"{self!r}: sizes of a model must be at least 1 (a vocabulary 16); check {', '.join(wrong)}"
            )

    @classmethod
    def of(cls, model: ModelShape) -> EmulatedShape:
        """Take the dimensions of a ``trinity.costs.model_shape.ModelShape``; every image has a typical one's rows.

        Tiles are those of a model that cuts images into tiles of equal tokens.
        """
        language = model.language
        return cls(
            name=model.name,
            layers=language.layers,
            kv_heads=language.kv_heads,
            head_dim=language.head_dim,
            dtype_bytes=model.dtype_bytes,
            kv_dtype_bytes=model.kv_dtype_bytes,
            latent_width=language.latent.row if language.latent else 0,
            image_width=language.width if model.encoder else 0,
            image_tokens=model.image_tokens or 1,
            tile_tokens=equal_tile_tokens(model.visual_tokens) if model.vision else 0,
            takes_images=model.encoder is None or model.vision is not None,
            media=model.media,
            vocabulary=model.vocabulary,
            context=model.context,
        )

    def visual_tokens(self, width: int, height: int) -> int:
        """Rows of the image cache for an image of ``width`` x ``height`` pixels."""
        if not self.image_pixels:
            return self.image_tokens
        squares = math.ceil(width / self.image_pixels) * math.ceil(height / self.image_pixels)
        return max(1, min(squares, self.image_tokens))

    def row_bytes(self, kind: str) -> int:
        """Bytes of one row of a block: a visual token's features, or a token's keys and values in one layer."""
        if kind == IMAGE:
            return self.image_width * self.dtype_bytes
        held = self.latent_width or 2 * self.kv_heads * self.head_dim
        return held * (self.kv_dtype_bytes or self.dtype_bytes)


LLAVA_15_7B = EmulatedShape(
    name="llava-1.5-7b", layers=32, kv_heads=32, head_dim=128, image_width=4096, image_tokens=576, vocabulary=32_064
)


class EmulatedModel(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """Emulated model, given to a ``Pipeline`` in place of a checkpoint; instance processes get it too.

    shape: dimensions of the model.
    cost: cost model that says how long steps take.
    scale (factor, 1): divides the bytes of blocks, down to one word of 8 bytes for each row and layer; ``factor`` tells
        the division reached.
    interference (factor, 1): slow-down of each lane of an instance while both lanes are busy.

    Raises ``ConfigError`` for values out of range.
    """

    shape: EmulatedShape
    cost: LinearCost | TableCost | Roofline | CostTables
    scale: float = 1.0
    interference: float = 1.0

    def __post_init__(self) -> None:
        check_struct(self)
        if not (1 <= self.scale < math.inf and 1 <= self.interference < math.inf):
            raise ConfigError(f"scale and interference must be at least 1, got {self.scale} and {self.interference}")

    @property
    def multimodal(self) -> bool:
        """True for a model with an encoder."""
        return self.shape.image_width > 0

    @property
    def fingerprint(self) -> str:
        """Digest of the model, equal for equal models; instances with different digests refuse each other."""
        sent = msgspec.json.encode(self, enc_hook=encode_rule)
        received = msgspec.json.decode(sent, type=EmulatedModel, dec_hook=decode_rule)  # where 4 became 4.0
        return "emulated-" + hashlib.sha256(msgspec.json.encode(received, enc_hook=encode_rule)).hexdigest()[:24]

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights: none."""
        return 0

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.shape.vocabulary

    def words(self, kind: str) -> int:
        """Number of 64-bit words in one row (and layer) of a block."""
        return max(1, math.ceil(self.shape.row_bytes(kind) / self.scale / WORD))

    def factor(self, kind: str) -> float:
        """Factor by which blocks of this kind are smaller than the model's."""
        return self.shape.row_bytes(kind) / (self.words(kind) * WORD)

    def image_shape(self, rows: int) -> BlockShape | None:
        """Shape of an image block: [rows, words] of uint64; None for a model of text alone."""
        return BlockShape(IMAGE, (rows, self.words(IMAGE)), np.dtype(np.uint64)) if self.multimodal else None

    def state_shape(self) -> None:
        """None: an emulated model's layers keep no states."""

    def kv_shape(self, rows: int, kv_dtype: KvDtype = "auto") -> BlockShape:
        """Shape of a KV block: [layers, rows, words] of uint64; a group of layers is contiguous, as in a real model.

        Raises ``ConfigError`` for a ``kv_dtype``: an emulated model has no values to round.
        """
        if kv_dtype != "auto":
            raise ConfigError(
                f"an emulated model has no keys and values to keep as {kv_dtype}: leave kv_dtype out of CacheConfig "
                "and give the bytes of an element, EmulatedShape(kv_dtype_bytes=1)"
            )
        return BlockShape(KV, (self.shape.layers, rows, self.words(KV)), np.dtype(np.uint64))

    def _source(self) -> str:
        cost = self.cost
        return f"a roofline of {cost.device.name}" if isinstance(cost, Roofline) else cost.source

    def __str__(self) -> str:
        kinds = (IMAGE, KV) if self.multimodal else (KV,)
        payload = ", ".join(f"{kind} 1/{self.factor(kind):g}" for kind in kinds)
        return f"emulation of {self.shape.name} (stages wait: {self._source() or 'costs as given'}; payload {payload})"


class EmulatedRequest(Request, frozen=True, kw_only=True):
    """Request of an emulated pipeline, given as counts; its images come first, then its clips, then its text.

    text_tokens (tokens, 1): text of the prompt.
    leading_tokens (tokens, 0): how much of the text stands before the media; not with ``hash_ids``.
    image_tokens (()): for each image its visual tokens, or (width, height) in pixels for the model's rule.
    clips (()): videos and audio clips, as a trace has them; what of their sizes is unknown, the model's rules say.
    contents (names, ()): contents of the images; equal names are equal images. Without names nothing is shared.
    text (name, None): content of the text; requests with equal names share prefixes.
    hash_ids (names, ()): contents of the prompt's first pieces of 512 tokens instead, as in Mooncake's traces; images
        keep their places.

    The output has ``max_tokens`` tokens.
    """

    prompt: str | None = ""
    text_tokens: int = 1
    leading_tokens: int = 0
    image_tokens: tuple[int | tuple[int, int], ...] = ()
    clips: tuple[TraceVideo | TraceAudio, ...] = ()
    contents: tuple[str, ...] = ()
    text: str | None = None
    hash_ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: TraceRow, number: int = 0, salt: str = "") -> EmulatedRequest:
        """Build a request with the text, media and output tokens of a trace's row.

        An image whose tokens the row does not record is given by its pixels. ``number`` names contents that the row
        does not name. ``salt`` precedes every name, so that a later replay finds nothing in the caches of an earlier
        one. Equal ``hash_ids`` are equal text, as in the simulator.
        """
        images = tuple(image.tokens or (image.width or 1, image.height or 1) for image in row.images)
        named = tuple(f"{salt}{image.content or f'{number}.{at}'}" for at, image in enumerate(row.images))
        others = enumerate(row.clips, len(images))
        clips = tuple(replace(each, content=f"{salt}{each.content or f'{number}.{at}'}") for at, each in others)
        return cls(
            text_tokens=max(1, row.text_tokens),
            image_tokens=images,
            clips=clips,
            contents=named,
            hash_ids=tuple(f"{salt}{each}" for each in row.hash_ids),
            max_tokens=max(1, row.output_length),
            session=row.session,
        )
