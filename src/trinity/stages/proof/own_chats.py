"""The own route of processors that take clips in chats alone: transformers' documents have them in base64."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint.libraries import how_to_install
from trinity.stages.proof.prompts import ProofPrompt


def load_own_chats(directory: Path) -> Any:
    """Load a processor with the tokenizer that writes its chats. Raises ``UnsupportedModel`` where that is not here."""
    from transformers import AutoProcessor

    load: Any = AutoProcessor.from_pretrained
    found = load(directory, local_files_only=True, trust_remote_code=False)
    if hasattr(found.tokenizer, "backend_tokenizer"):  # a plain one, which expands nothing
        raise UnsupportedModel(f"mistral-common writes its chats, and is not here: {how_to_install('mistral-common')}")
    return found


def make_own_inputs(processor: Any, prompt: ProofPrompt) -> dict[str, Any]:
    """Make inputs of a chat with such a processor: each clip as a file of float32 in base64."""
    rate, left = int(processor.feature_extractor.sampling_rate), iter(prompt.clips)
    chat = [
        {**message, "content": [_with_clip(part, left, rate) for part in message["content"]]}
        for message in prompt.messages
    ]
    return dict(processor.apply_chat_template(chat))


def _with_clip(part: dict[str, Any], left: Iterator[Any], rate: int) -> dict[str, Any]:
    return {**part, "base64": encode_clip(next(left), rate)} if part["type"] == "audio" else part


def encode_clip(samples: Any, rate: int) -> str:
    """Write float32 samples [samples] as a wav file in base64, to the bit."""
    sound: Any = import_module("soundfile")
    file = io.BytesIO()
    sound.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return base64.b64encode(file.getvalue()).decode()
