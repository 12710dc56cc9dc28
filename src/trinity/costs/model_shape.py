"""Model dimensions that determine step time and memory.

Known models by name; any other from the ``config.json`` of a transformers checkpoint (``model_config``). Nothing is
loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from trinity.costs import visual_tokens
from trinity.costs.layer_parts import StateShape
from trinity.costs.layer_shape import LayerShape as LayerShape
from trinity.costs.layer_shape import VisionShape as VisionShape
from trinity.costs.layer_shape import audio_worth, whisper_shape
from trinity.costs.media_tokens import WINDOW_FRAMES, AudioRule, MediaRules, VideoRule
from trinity.costs.pool_sizes import ModelMemory, size_pools
from trinity.errors import UnknownName
from trinity.errors.arguments import KeywordsByName
from trinity.stage_kinds import roles_of
from trinity.traces.media import TraceAudio, TraceVideo
from trinity.traces.synthetic import VisualTokenRule


class ModelShape(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """Shape of a model.

    name: name of the model.
    language: layers of the language model.
    vocabulary (tokens): size of the vocabulary.
    vision (None): shape of the encoder of images and frames; None for a model without.
    audio (None): shape of the encoder of audio; its tokens are the media of costs where there is no other encoder.
    media: rules for videos and audio clips.
    visual_tokens: rule for the visual tokens of an image, (width, height) in pixels to tokens.
    image_tokens (visual tokens, 576): those of a typical image.
    tied (False): input and output embedding share one matrix.
    dtype_bytes (bytes, 2): size of an element.
    kv_dtype_bytes (bytes, None): size of an element of the KV cache, 1 in FP8; as ``dtype_bytes``.
    states (None): states of each request, of layers that do not attend; None where all layers do.
    layer_dtype_bytes (bytes, None): size of a weight of the language model's layers, 1 in FP8, 0.5 in 4 bits; as
        ``dtype_bytes``.
    context (tokens, 4096): longest sequence.
    source (""): assumptions behind these numbers, for reports.
    """

    name: str
    language: LayerShape
    vocabulary: int
    vision: VisionShape | None = None
    audio: VisionShape | None = None
    media: MediaRules = MediaRules()
    visual_tokens: VisualTokenRule = visual_tokens.fixed_tokens
    image_tokens: int = 576
    tied: bool = False
    dtype_bytes: int = 2
    kv_dtype_bytes: int | None = None
    layer_dtype_bytes: float | None = None
    states: StateShape | None = None
    context: int = 4096
    source: str = ""

    @property
    def outline(self) -> str:
        """Layers and widths in words, by which measured tables and plans find that they are of the same model."""
        parts = {"language": self.language, **({"encoder": self.encoder.layers} if self.encoder else {})}
        return ", ".join(f"{name} {each.layers} layers of {each.width}" for name, each in parts.items())

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token in the KV cache: keys and values, or latent rows, of all layers that attend."""
        return self.kv_layers * self.language.kv_row * (self.kv_dtype_bytes or self.dtype_bytes)

    @property
    def kv_layers(self) -> int:
        """Number of layers that attend, and so have keys and values."""
        return self.language.layers - (self.states.layers if self.states else 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of one request's states; 0 where all layers attend."""
        return self.states.nbytes if self.states else 0

    def tiles(self, tokens: int, width: int = 0, height: int = 0) -> tuple[int, ...]:
        """List the visual tokens of each tile of an image, as ``visual_tokens.list_tiles`` of its rule does."""
        return visual_tokens.list_tiles(self.visual_tokens, tokens, width, height)

    def clip_tokens(self, clip: TraceVideo | TraceAudio) -> int:
        """Count the tokens of a video or audio clip. Raises ``ConfigError`` where the model takes none of its kind."""
        return self.media.measure(clip).tokens

    @property
    def feature_bytes(self) -> int:
        """Bytes of one visual token in the image cache."""
        deep = self.vision.deep_layers if self.vision else 0
        return self.language.width * self.dtype_bytes * (1 + deep) if self.encoder else 0

    @property
    def encoder(self) -> VisionShape | None:
        """The encoder whose tokens are the media of a cost model: of images, or of audio where that is all there is."""
        return self.vision or self.audio

    @property
    def head(self) -> int:
        """Number of weights that turn a hidden state into logits."""
        return self.vocabulary * self.language.width

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a step of the language model reads: layers and head, no embedding table.

        Of experts all are counted: ``step_bytes`` tells what a small step reads.
        """
        return int(self.language.weights * self.layer_weight_bytes) + self.head * self.dtype_bytes

    @property
    def layer_weight_bytes(self) -> float:
        """Bytes of a weight of the language model's layers."""
        return self.layer_dtype_bytes or self.dtype_bytes

    def step_bytes(self, rows: float) -> float:
        """Bytes of weights that a step of so many rows reads, on average: of experts only those that are chosen."""
        return self.language.touched_weights(rows) * self.layer_weight_bytes + self.head * self.dtype_bytes

    @property
    def vision_bytes(self) -> int:
        """Bytes of all weights of the encoders and their projectors."""
        towers = [each for each in (self.vision, self.audio) if each]
        return sum(each.patch_weights + each.projector for each in towers) * self.dtype_bytes

    @property
    def language_bytes(self) -> int:
        """Bytes of all weights of the language model, embedding table included."""
        return self.read_bytes + (0 if self.tied else self.head * self.dtype_bytes)

    def weight_bytes(self, roles: str) -> int:
        """Bytes of the weights that an instance of ``roles`` ("E", "PD", ...) holds."""
        parts = roles_of(roles).parts
        return self.vision_bytes * ("vision" in parts) + self.language_bytes * ("language" in parts)

    def pools(
        self, roles: str, memory_bytes: float, *, image_block: int = 576, kv_block_size: int = 16
    ) -> dict[str, int]:
        """Compute the blocks of each pool of an instance of ``roles`` in ``memory_bytes``, weights included.

        Blocks have ``image_block`` visual tokens and ``kv_block_size`` tokens (TriInfer 5.1). Raises ``ConfigError``,
        with the bytes missing, where the model does not fit.
        """
        image = self.feature_bytes * image_block or None
        sizes = image, self.kv_bytes * kv_block_size, self.state_bytes or None
        return size_pools(roles, int(memory_bytes), self.weight_bytes(roles), *sizes)

    def memory(self, *, text_tokens: int = 0) -> ModelMemory:
        """Memory that serving this model takes, for ``trinity.costs.pool_sizes.capacity``."""
        return ModelMemory(
            vision_bytes=self.vision_bytes,
            language_bytes=self.language_bytes,
            image_tokens=self.image_tokens,
            feature_bytes=self.feature_bytes,
            kv_bytes=self.kv_bytes,
            text_tokens=text_tokens,
            context=self.context,
        )


_LLAMA_7B = LayerShape(layers=32, width=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008, gated=True)
_QWEN2_7B = LayerShape(layers=28, width=3584, heads=28, kv_heads=4, head_dim=128, ffn=18944, gated=True)
_INTERNLM2_7B = LayerShape(layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, gated=True)
_PANGU_7B = LayerShape(layers=38, width=3584, heads=28, kv_heads=28, head_dim=128, ffn=11008, gated=True)
_CLIP_L = LayerShape(layers=24, width=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096)
_QWEN2_VIT = LayerShape(layers=32, width=1280, heads=16, kv_heads=16, head_dim=80, ffn=5120)
_SIGLIP_400M = LayerShape(layers=27, width=1152, heads=16, kv_heads=16, head_dim=72, ffn=4304)
_MLP = 1024 * 4096 + 4096 * 4096  # LLaVA's projector
_MERGER = 5120 * 5120 + 5120 * 3584  # Qwen2-VL's
_QWEN2_RULE = partial(visual_tokens.smart_resize_tokens, most=16384 * 28 * 28)  # as its checkpoints set it
_QWEN3_RULE = partial(visual_tokens.smart_resize_tokens, factor=32, least=256 * 256, most=4096 * 4096)  # likewise
_QWEN2_VIDEO = VideoRule(group=2, least=56 * 56, most=16384 * 28 * 28)  # likewise
_QWEN3_VIDEO = VideoRule(group=2, factor=32, least=4096, most=24576 * 32 * 32, together=True)  # likewise
_QWEN2_AUDIO = AudioRule(stack=2)


def _qwen2_5_vl(size: str, language: LayerShape, vocabulary: int, ffn: int, *, tied: bool = False) -> ModelShape:
    """Qwen2.5-VL, by its checkpoints' config.json; ``ffn``: of the encoder, which has windows of 8 x 8 patches."""
    layers = LayerShape(layers=32, width=1280, heads=16, kv_heads=16, head_dim=80, ffn=ffn, gated=True)
    projector = 5120 * (5120 + language.width)
    return ModelShape(
        name=f"qwen2.5-vl-{size}",
        language=language,
        vocabulary=vocabulary,
        vision=VisionShape(layers=layers, patches=4, span=64, projector=projector, full_layers=4),
        visual_tokens=_QWEN2_RULE,
        media=MediaRules(video=_QWEN2_VIDEO),
        image_tokens=999,
        tied=tied,
        context=128_000,
        source="config.json of Qwen/Qwen2.5-VL",
    )


def _qwen3_vl(size: str, language: LayerShape, encoder: LayerShape, *, tied: bool = False) -> ModelShape:
    """Qwen3-VL, by its checkpoints' config.json: features of three layers of the encoder go beside the last's."""
    merged = 4 * encoder.width
    projector = 4 * merged * (merged + language.width)
    vision = VisionShape(
        layers=encoder, patches=4, span=4 * 768, projector=projector, full_layers=encoder.layers, deep_layers=3
    )
    return ModelShape(
        name=f"qwen3-vl-{size}",
        language=language,
        vocabulary=151_936,
        vision=vision,
        visual_tokens=_QWEN3_RULE,
        media=MediaRules(video=_QWEN3_VIDEO),
        image_tokens=768,
        tied=tied,
        context=262_144,
        source="config.json of Qwen/Qwen3-VL",
    )


def _qwen(layers: int, width: int, heads: int, kv_heads: int, ffn: int) -> LayerShape:
    return LayerShape(layers=layers, width=width, heads=heads, kv_heads=kv_heads, head_dim=128, ffn=ffn, gated=True)


def _qwen2_5_omni() -> ModelShape:
    """The thinker of Qwen2.5-Omni: Qwen2.5-VL's parts, and an encoder of audio beside them."""
    seeing = _qwen2_5_vl("7b", _QWEN2_7B, 152_064, 3420)
    hearing = whisper_shape(_WHISPER_LARGE, mel=128, stack=2, projector=1280 * 3584, span=100)
    rule = msgspec.structs.replace(_QWEN2_AUDIO, work=audio_worth(hearing, seeing.vision, seeing.image_tokens))
    media = MediaRules(video=_QWEN2_VIDEO, audio=rule)
    named = {"name": "qwen2.5-omni-7b", "context": 32_768, "source": "config.json of Qwen/Qwen2.5-Omni"}
    return msgspec.structs.replace(seeing, audio=hearing, media=media, **named)


_WHISPER_SMALL = LayerShape(layers=12, width=768, heads=12, kv_heads=12, head_dim=64, ffn=3072)
_WHISPER_LARGE = LayerShape(layers=32, width=1280, heads=20, kv_heads=20, head_dim=64, ffn=5120)
_QWEN3_VIT = LayerShape(layers=27, width=1152, heads=16, kv_heads=16, head_dim=72, ffn=4304)
_QWEN3_SMALL_VIT = LayerShape(layers=24, width=1024, heads=16, kv_heads=16, head_dim=64, ffn=4096)

MODELS: Mapping[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="llava-1.5-7b",
            language=_LLAMA_7B,
            vocabulary=32_064,
            vision=VisionShape(layers=_CLIP_L, patches=1, span=577, projector=_MLP),
        ),
        ModelShape(
            name="llava-next-7b",
            language=_LLAMA_7B,
            vocabulary=32_064,
            vision=VisionShape(layers=_CLIP_L, patches=1.23, span=577, projector=_MLP),
            visual_tokens=visual_tokens.anyres_tokens,
            image_tokens=2340,
            source="patches: 5 tiles of 576 for the 2,340 tokens that padding leaves of them",
        ),
        ModelShape(
            name="qwen2-vl-7b",
            language=_QWEN2_7B,
            vocabulary=152_064,
            vision=VisionShape(layers=_QWEN2_VIT, patches=4, span=4 * 999, projector=_MERGER, full_layers=32),
            visual_tokens=_QWEN2_RULE,
            media=MediaRules(video=_QWEN2_VIDEO),
            image_tokens=999,
            context=32_768,
        ),
        _qwen2_5_vl("3b", _qwen(36, 2048, 16, 2, 11008), 151_936, 3420, tied=True),
        _qwen2_5_vl("7b", _QWEN2_7B, 152_064, 3420),
        _qwen2_5_vl("32b", _qwen(64, 5120, 40, 8, 27648), 152_064, 3456),
        _qwen2_5_vl("72b", _qwen(80, 8192, 64, 8, 29568), 152_064, 3456),
        _qwen3_vl("2b", _qwen(28, 2048, 16, 8, 6144), _QWEN3_SMALL_VIT, tied=True),
        _qwen3_vl("4b", _qwen(36, 2560, 32, 8, 9728), _QWEN3_SMALL_VIT, tied=True),
        _qwen3_vl("8b", _qwen(36, 4096, 32, 8, 12288), _QWEN3_VIT),
        _qwen3_vl("32b", _qwen(64, 5120, 64, 8, 25600), _QWEN3_VIT),
        ModelShape(
            name="internvl2-8b",
            language=_INTERNLM2_7B,
            vocabulary=92_553,
            vision=VisionShape(layers=_CLIP_L, patches=4, span=1025, projector=4096 * 4096 * 2),
            visual_tokens=visual_tokens.tile_tokens,
            media=MediaRules(video=VideoRule(tokens=256)),
            image_tokens=7 * 256,
            context=32_768,
        ),
        ModelShape(
            name="minicpm-v-2.6",
            language=_QWEN2_7B,
            vocabulary=151_666,
            vision=VisionShape(layers=_SIGLIP_400M, patches=16, span=1024, projector=1152 * 3584 + 5 * 3584 * 3584),
            visual_tokens=visual_tokens.slice_tokens,
            media=MediaRules(video=VideoRule(tokens=64)),
            image_tokens=5 * 64,
            context=32_768,
        ),
        _qwen2_5_omni(),
        ModelShape(
            name="qwen2-audio-7b",
            language=_LLAMA_7B,
            vocabulary=156_032,
            audio=whisper_shape(_WHISPER_LARGE, mel=128, stack=2, projector=1280 * 4096),
            media=MediaRules(audio=msgspec.structs.replace(_QWEN2_AUDIO, window=WINDOW_FRAMES, most=WINDOW_FRAMES)),
            image_tokens=750,
            context=8_192,
            source="config.json of Qwen/Qwen2-Audio",
        ),
        ModelShape(
            name="ultravox-v0.3",
            language=_INTERNLM2_7B,
            vocabulary=128_256,
            audio=whisper_shape(_WHISPER_SMALL, mel=80, stack=8, projector=6144 * 4096 + 2048 * 4096),
            media=MediaRules(audio=AudioRule(stack=8, rounds_up=True)),
            image_tokens=188,
            context=131_072,
            source="Llama-3.1-8B, of InternLM2's shape but for its vocabulary, and the encoder of Whisper-small",
        ),
        ModelShape(
            name="openpangu-7b-vl",
            language=_PANGU_7B,
            vocabulary=153_376,
            vision=VisionShape(layers=_QWEN2_VIT, patches=4, span=4 * 1196, projector=_MERGER, full_layers=32),
            visual_tokens=_QWEN2_RULE,
            image_tokens=1196,
            context=32_768,
            source="EPD-Serve: parameters of table 1, features of table 3, KV bytes of table 4; the rest fits those",
        ),
    )
}


def get_model_shape(name: str) -> ModelShape:
    """Get the shape of a model by its name in ``MODELS``. Raises ``UnknownName``."""
    if name not in MODELS:
        raise UnknownName("model", name, MODELS, "For another one give the folder of its checkpoint, or a ModelShape.")
    return MODELS[name]
