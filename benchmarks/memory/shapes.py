"""Models too large for this machine, by their published shapes: what their parts and caches take, in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trinity.costs.pool_sizes import ModelMemory

BYTES = 2  # bfloat16


@dataclass(frozen=True)
class Transformer:
    """A stack of layers: ``gated`` feed-forward parts have three matrices, others two."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    gated: bool

    @property
    def parameters(self) -> int:
        keys = self.hidden * self.kv_heads // self.heads
        attention = 2 * self.hidden * (self.hidden + keys)
        return self.layers * (attention + (3 if self.gated else 2) * self.hidden * self.intermediate)

    @property
    def working_bytes(self) -> int:
        """Of one token, in its widest layer: six rows of hidden size and the feed-forward part's; no score matrix."""
        return BYTES * (6 * self.hidden + (3 if self.gated else 2) * self.intermediate)

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values."""
        return BYTES * 2 * self.layers * self.hidden * self.kv_heads // self.heads


@dataclass(frozen=True)
class Shape:
    """A vision-language model. An image becomes ``tiles`` of ``patches`` in the encoder, then ``tokens`` in all.

    ``images``: of the requests that it is asked about, so many as its context holds, ten at most. ``scores``: the
    engine that it is counted for keeps the scores of a tile's attention, in 16 bits twice and once in 32.
    """

    name: str
    vision: Transformer
    language: Transformer
    vocabulary: int
    projector: int
    tiles: int
    patches: int
    tokens: int
    context: int
    images: int = 10
    scores: bool = False

    def of_tiles(self, tiles: int) -> Shape:
        """The same model for images that it cuts into so many tiles."""
        return replace(self, tiles=tiles, tokens=self.tokens // self.tiles * tiles)

    def memory(self, text_tokens: int) -> ModelMemory:
        """Bytes that serving takes."""
        words = 2 * self.vocabulary * self.language.hidden
        scores = 4 * BYTES * self.vision.heads * self.patches**2 if self.scores else 0
        return ModelMemory(
            vision_bytes=BYTES * (self.vision.parameters + self.projector),
            language_bytes=BYTES * (self.language.parameters + words),
            image_tokens=self.tokens,
            feature_bytes=BYTES * self.language.hidden,
            kv_bytes=self.language.kv_bytes,
            encode_bytes=self.tiles * (self.patches * self.vision.working_bytes + scores),
            prefill_bytes=self.language.working_bytes,
            text_tokens=text_tokens,
            context=self.context,
        )


CLIP_L = Transformer(layers=24, hidden=1024, intermediate=4096, heads=16, kv_heads=16, gated=False)
SIGLIP_400M = Transformer(layers=27, hidden=1152, intermediate=4304, heads=16, kv_heads=16, gated=False)
INTERNVIT_300M = Transformer(layers=24, hidden=1024, intermediate=4096, heads=16, kv_heads=16, gated=False)
INTERNVIT_6B = Transformer(layers=45, hidden=3200, intermediate=12800, heads=25, kv_heads=25, gated=False)
VICUNA_7B = Transformer(layers=32, hidden=4096, intermediate=11008, heads=32, kv_heads=32, gated=True)
QWEN2_7B = Transformer(layers=28, hidden=3584, intermediate=18944, heads=28, kv_heads=4, gated=True)
INTERNLM2_7B = Transformer(layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, gated=True)
INTERNLM2_20B = Transformer(layers=48, hidden=6144, intermediate=16384, heads=48, kv_heads=8, gated=True)

LLAVA_7B = Shape(
    name="LLaVA-1.5-7B",
    vision=CLIP_L,
    language=VICUNA_7B,
    vocabulary=32_064,
    projector=1024 * 4096 + 4096 * 4096,
    tiles=1,
    patches=577,
    tokens=576,
    context=4096,
    images=5,
)
MINICPM_26 = Shape(  # an image of 4032 × 3024: nine slices and the whole, 64 queries each
    name="MiniCPM-V 2.6",
    vision=SIGLIP_400M,
    language=QWEN2_7B,
    vocabulary=151_666,
    projector=4 * 3584 * 3584 + 1152 * 3584,
    tiles=10,
    patches=1024,
    tokens=640,
    context=32_768,
    scores=True,  # as EPDServe's engine: see epdserve_tables.notes
)
INTERNVL2_8B = Shape(  # as below, with the smaller encoder
    name="InternVL2-8B",
    vision=INTERNVIT_300M,
    language=INTERNLM2_7B,
    vocabulary=92_553,
    projector=4096 * 4096 + 4096 * 4096,
    tiles=13,
    patches=1025,
    tokens=3328,
    context=65_536,
)
INTERNVL2_26B = Shape(  # an image of 4032 × 3024: twelve tiles and the whole, 256 tokens each
    name="InternVL2-26B",
    vision=INTERNVIT_6B,
    language=INTERNLM2_20B,
    vocabulary=92_553,
    projector=12_800 * 6144 + 6144 * 6144,
    tiles=13,
    patches=1025,
    tokens=3328,
    context=131_072,  # EPDServe's table 8 has a KV share for 20 images, 66,560 tokens, and none for 40
)
SHAPES = (LLAVA_7B, MINICPM_26, INTERNVL2_8B, INTERNVL2_26B)
