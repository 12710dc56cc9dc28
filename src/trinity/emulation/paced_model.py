"""Paced: a model that waits in place of computing. Everything that it shows is emulation, and says so.

Cores, sockets, leases and blocks are real; a stage sleeps for the time that a cost model gives, and blocks are smaller
by a printed factor. No checkpoint, no tokenizer, no torch.

::

    model = Paced(shape=LLAVA_15_7B, cost=LinearCost(step_s=0.02, prefill_s=1e-4), scale=1024)
    async with Pipeline(model, "1E1P1D") as pipe:
        output = await pipe.complete(PacedRequest(text_tokens=40, image_tokens=(576,), max_tokens=16))
    output.emulated  # True
"""

from __future__ import annotations

import hashlib
import math

import msgspec
import numpy as np

from trinity.core.messages import IMAGE, KV
from trinity.costs.emulated_cost import LinearCost, TableCost
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import CostTables, Roofline
from trinity.costs.visual_tokens import decode_rule, encode_rule
from trinity.errors import ConfigError
from trinity.memory.block_memory import BlockShape
from trinity.request import Request
from trinity.traces.trace import TraceRow

WORD = 8  # blocks hold 64-bit words


class EmulatedShape(msgspec.Struct, frozen=True, kw_only=True):
    """What of a model decides how large its blocks are.

    ``image_width``: features of a row of the image cache, 0 for a model of text alone. An image has ``image_tokens``
    rows or, with ``image_pixels``, one for each square of so many pixels, and at most ``image_tokens``.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype_bytes: int = 2
    image_width: int = 0
    image_tokens: int = 576
    image_pixels: int = 0
    vocabulary: int = 32_000
    context: int = 4096

    def __post_init__(self) -> None:
        counts = {"layers": self.layers, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        counts |= {"dtype_bytes": self.dtype_bytes, "image_tokens": self.image_tokens, "context": self.context - 1}
        wrong = [name for name, count in counts.items() if count < 1]
        if wrong or self.image_width < 0 or self.image_pixels < 0 or self.vocabulary < 16:
            raise ConfigError(f"{self!r}: sizes of a model are at least 1 (a vocabulary 16); check {', '.join(wrong)}")

    @classmethod
    def of(cls, model: ModelShape) -> EmulatedShape:
        """That of a model of ``trinity.costs.model_shape``, with as many rows for every image as a usual one has."""
        language = model.language
        return cls(
            name=model.name,
            layers=language.layers,
            kv_heads=language.kv_heads,
            head_dim=language.head_dim,
            dtype_bytes=model.dtype_bytes,
            image_width=language.width if model.vision else 0,
            image_tokens=model.image_tokens or 1,
            vocabulary=model.vocabulary,
            context=model.context,
        )

    def visual_tokens(self, width: int, height: int) -> int:
        """Rows of the image cache for an image of so many pixels."""
        if not self.image_pixels:
            return self.image_tokens
        squares = math.ceil(width / self.image_pixels) * math.ceil(height / self.image_pixels)
        return max(1, min(squares, self.image_tokens))

    def row_bytes(self, kind: str) -> int:
        """Bytes of one row of a block: an image's features, or one token's keys and values in one layer."""
        values = self.image_width if kind == IMAGE else 2 * self.kv_heads * self.head_dim
        return values * self.dtype_bytes


LLAVA_15_7B = EmulatedShape(
    name="llava-1.5-7b", layers=32, kv_heads=32, head_dim=128, image_width=4096, image_tokens=576, vocabulary=32_064
)


class Paced(msgspec.Struct, frozen=True, kw_only=True):
    """A model to hand to a Pipeline in place of a checkpoint. It travels to instance processes.

    ``scale`` divides the bytes of blocks, as far as whole words of 8 bytes a row and layer allow: ``factor`` is what
    came of it. ``interference``: on an instance with two lanes, how many times longer each takes while both are busy.
    Raises ``ConfigError``.
    """

    shape: EmulatedShape
    cost: LinearCost | TableCost | Roofline | CostTables
    scale: float = 1.0
    interference: float = 1.0

    def __post_init__(self) -> None:
        if not (1 <= self.scale < math.inf and 1 <= self.interference < math.inf):
            raise ConfigError(f"scale and interference are at least 1, got {self.scale} and {self.interference}")

    @property
    def multimodal(self) -> bool:
        return self.shape.image_width > 0

    @property
    def fingerprint(self) -> str:
        """Equal for equal models: instances that differ in it refuse each other."""
        said = msgspec.json.encode(self, enc_hook=encode_rule)
        travelled = msgspec.json.decode(said, type=Paced, dec_hook=decode_rule)  # 4 is 4.0 there
        return "paced-" + hashlib.sha256(msgspec.json.encode(travelled, enc_hook=encode_rule)).hexdigest()[:24]

    @property
    def weight_bytes(self) -> int:
        return 0

    def words(self, kind: str) -> int:
        """64-bit words of one row (in one layer) of a block."""
        return max(1, math.ceil(self.shape.row_bytes(kind) / self.scale / WORD))

    def factor(self, kind: str) -> float:
        """How many times smaller blocks of this kind are than the model's."""
        return self.shape.row_bytes(kind) / (self.words(kind) * WORD)

    def image_shape(self, rows: int) -> BlockShape | None:
        """[rows, words]; None for a model of text alone."""
        return BlockShape(IMAGE, (rows, self.words(IMAGE)), np.dtype(np.uint64)) if self.multimodal else None

    def kv_shape(self, rows: int) -> BlockShape:
        """[layers, rows, words]: a group of layers is one piece of a block, as in the model's."""
        return BlockShape(KV, (self.shape.layers, rows, self.words(KV)), np.dtype(np.uint64))

    def _source(self) -> str:
        cost = self.cost
        return f"a roofline of {cost.device.name}" if isinstance(cost, Roofline) else cost.source

    def __str__(self) -> str:
        kinds = (IMAGE, KV) if self.multimodal else (KV,)
        payload = ", ".join(f"{kind} 1/{self.factor(kind):g}" for kind in kinds)
        return f"emulation of {self.shape.name} (stages wait: {self._source() or 'costs as given'}; payload {payload})"


class PacedRequest(Request, frozen=True, kw_only=True):
    """A request of a paced pipeline, as counts: its images' visual tokens come first, then ``text_tokens``.

    An image is a count of visual tokens, or (width, height) in pixels for the model's rule. ``contents`` names the
    images' contents (equal names are equal images), ``text`` that of the text: requests of equal names share prefixes.
    Without names nothing is shared. ``hash_ids`` name the prompt's first pieces of 512 tokens instead, as Mooncake's
    traces do; images keep their places. ``max_tokens`` tokens come out.
    """

    prompt: str | None = ""
    text_tokens: int = 1
    image_tokens: tuple[int | tuple[int, int], ...] = ()
    contents: tuple[str, ...] = ()
    text: str | None = None
    hash_ids: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: TraceRow, number: int = 0, salt: str = "") -> PacedRequest:
        """A request like a trace's row: as many tokens of text, of each image, and of output.

        An image whose tokens the row does not know is given by its pixels. ``number`` names the contents that the row
        does not; ``salt`` goes before every name, so that one serving's contents are not in caches of another's. Equal
        ``hash_ids`` are equal text, as for a simulator.
        """
        images = tuple(image.tokens or (image.width or 1, image.height or 1) for image in row.images)
        named = tuple(f"{salt}{image.content or f'{number}.{at}'}" for at, image in enumerate(row.images))
        return cls(
            text_tokens=max(1, row.text_tokens),
            image_tokens=images,
            contents=named,
            hash_ids=tuple(f"{salt}{each}" for each in row.hash_ids),
            max_tokens=max(1, row.output_length),
            session=row.session,
        )
