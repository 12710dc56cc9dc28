"""A model in the manner of Ultravox, built from parts: a Whisper encoder, frames stacked by four, a projector, a Llama.

Its classes are Voxtral's of transformers, whose own processor needs mistral-common. So it is served as a model is that
nobody proved: by a registered adapter and a processor of one's own::

    register_adapter("voxtral", ModelAdapter)
    Pipeline(build_ultravox(directory), processor=UltravoxProcessor.load(directory))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trinity.testing.checkpoints import write_checkpoint
from trinity.testing.checkpoints_audio import FRAMES_PER_SECOND, MELS, TOWER_CONFIG, make_audio_tokenizer
from trinity.testing.checkpoints_recipes import TEXT_CONFIG, Recipe, text_ids

TOKEN = "<|audio|>"
STACK = 4  # frames of the encoder in one feature row
_SECONDS = 2
_WIDTH = 48


class UltravoxProcessor:
    """Makes of a clip one window of log-mel frames, and of its placeholder as many as the model makes rows of it.

    - ``feature_extractor``, ``tokenizer``: of transformers.
    - ``chat_template``: the tokenizer's.
    """

    audio_token = TOKEN

    def __init__(self, feature_extractor: Any, tokenizer: Any) -> None:
        self.feature_extractor, self.tokenizer = feature_extractor, tokenizer
        self.chat_template = tokenizer.chat_template

    @staticmethod
    def load(directory: Path) -> UltravoxProcessor:
        """Load the parts from a checkpoint's directory."""
        from transformers import AutoTokenizer, WhisperFeatureExtractor

        load_tokenizer: Any = AutoTokenizer.from_pretrained
        load_extractor: Any = WhisperFeatureExtractor.from_pretrained
        extractor = load_extractor(directory, local_files_only=True, trust_remote_code=False)
        return UltravoxProcessor(extractor, load_tokenizer(directory, local_files_only=True, trust_remote_code=False))

    def __call__(
        self, *, text: Any, return_tensors: str = "pt", audio: Sequence[Any] = (), sampling_rate: int = 16000, **_: Any
    ) -> Mapping[str, Any]:
        rows = self.feature_extractor.nb_max_frames // 2 // STACK
        texts = [each.replace(TOKEN, TOKEN * rows) for each in ([text] if isinstance(text, str) else text)]
        found: dict[str, Any] = dict(self.tokenizer(texts, return_tensors=return_tensors))
        if len(audio):
            extract = {"sampling_rate": sampling_rate, "return_tensors": return_tensors}
            found["input_features"] = self.feature_extractor(list(audio), **extract)["input_features"]
        return found


def build_ultravox(directory: Path, *, seed: int = 0) -> Path:
    """Write the tiny checkpoint into ``directory``, with its tokenizer and feature extractor."""
    from transformers import LlamaConfig, VoxtralConfig, VoxtralEncoderConfig, VoxtralForConditionalGeneration
    from transformers import WhisperFeatureExtractor as untyped

    make_extractor: Any = untyped
    tokenizer = make_audio_tokenizer({"audio_token": TOKEN}, TOKEN)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": _WIDTH}
    frames = _SECONDS * FRAMES_PER_SECOND // 2
    tower = VoxtralEncoderConfig(**TOWER_CONFIG, **sizes, intermediate_size=STACK * _WIDTH, max_source_positions=frames)
    text = LlamaConfig(**text_ids(tokenizer), **TEXT_CONFIG)
    audio = tokenizer.convert_tokens_to_ids(TOKEN)
    config = VoxtralConfig(audio_config=tower, text_config=text, audio_token_id=audio)
    extractor = make_extractor(feature_size=MELS, chunk_length=_SECONDS)
    recipe = Recipe(config, VoxtralForConditionalGeneration, tokenizer, feature_extractor=extractor)
    return write_checkpoint(recipe, directory, seed)
