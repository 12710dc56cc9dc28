"""Tiny tekken.json: the tokenizer's file of Mistral's own checkpoints, version 7 with audio, as Voxtral's is."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

TOKENS = 40  # special ones, of which the last are without a use
_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BORDERS = (" [", "][", "]\n", "]\n\n", " <")  # with which a control token's text is tokenized otherwise than alone
_WORDS = ("th", "the", " t", " the", "in", "ing", " i", " is", "is", "at", "Wh", "What", " s", " sa", "id", " said")
_NAMED = {
    **dict(enumerate(("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"))),
    **dict(enumerate(("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>"), 7)),
    **dict(
        enumerate(("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"), 14)
    ),
    **dict(enumerate(("[AUDIO]", "[BEGIN_AUDIO]"), 24)),
    34: "[TRANSCRIBE]",
}
TEKKEN_AUDIO: dict[str, Any] = {
    "sampling_rate": 16000,
    "frame_rate": 12.5,
    "audio_encoding_config": {"num_mel_bins": 128, "hop_length": 160, "window_size": 400},
    "chunk_length_s": 30.0,
}


def write_tekken(directory: Path, audio: dict[str, Any] | None = None) -> Path:
    """Write the file into ``directory``: all bytes, and some words.

    ``audio`` (``TEKKEN_AUDIO``): what it says of clips.
    """
    words = [bytes([byte]) for byte in range(256)] + [word.encode() for word in (*_WORDS, *_BORDERS)]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode("utf-8", "replace")}
        for rank, word in enumerate(words)
    ]
    named = [_NAMED.get(rank, f"<SPECIAL_{rank}>") for rank in range(TOKENS)]
    sizes = {"num_vocab_tokens": len(words), "default_vocab_size": len(words) + TOKENS}
    content = {
        "config": {"pattern": _PATTERN, **sizes, "default_num_special_tokens": TOKENS, "version": "v7"},
        "vocab": vocabulary,
        "special_tokens": [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(named)],
        "audio": TEKKEN_AUDIO if audio is None else audio,
    }
    path = directory / "tekken.json"
    path.write_text(json.dumps(content))
    return path


def make_tekken_tokenizer(directory: Path) -> Any:
    """Write the file into ``directory``, which is made, and convert it as transformers does."""
    from transformers.integrations.mistral import convert_tekken_tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    convert: Any = convert_tekken_tokenizer
    return convert(str(write_tekken(directory)))


def write_extractor(directory: Path, fields: dict[str, Any]) -> None:
    """Write the settings of a feature extractor, out of those of its processor, as they lie beside a tekken.json."""
    content = {**fields["feature_extractor"], "processor_class": fields["processor_class"]}
    (directory / "preprocessor_config.json").write_text(json.dumps(content, indent=2))
