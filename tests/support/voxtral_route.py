"""Voxtral as it is published, proven once a process, and transformers' own route over it, with clips in base64."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import soundfile  # type: ignore[import-untyped, import-not-found, unused-ignore]
import torch

from support.checkpoint_files import checkpoint
from support.sounds import RATE
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request
from trinity.stages.proof import prove
from trinity.testing.oracle import OracleAnswer

OUTPUTS = 10


@cache
def voxtral() -> Path:
    directory = checkpoint("any-voxtral")
    if find_verdict(directory) is None:
        failed = prove(directory).failed
        assert failed is None, failed
    return directory


class OwnRoute:
    """transformers' documented route: the processor's chats with clips in base64, and the model's ``generate()``."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoProcessor, VoxtralForConditionalGeneration

        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        load_processor: Any = AutoProcessor.from_pretrained
        load_model: Any = VoxtralForConditionalGeneration.from_pretrained
        self.processor = load_processor(directory, **local)
        self.model = load_model(directory, dtype=torch.float32, **local).eval()
        assert type(self.processor).__name__ == "VoxtralProcessor"
        assert type(self.processor.tokenizer).__name__ == "MistralCommonBackend"

    def inputs(self, request: Request) -> dict[str, Any]:
        left = iter(request.media)
        assert request.messages is not None
        chat = [
            {**message, "content": [self._part(part, left) for part in message["content"]]}
            for message in request.messages
        ]
        return dict(self.processor.apply_chat_template(chat))

    def _part(self, part: Mapping[str, Any], left: Any) -> dict[str, Any]:
        if part["type"] != "audio":
            return dict(part)
        source = next(left).source
        if not isinstance(source, bytes):
            file = io.BytesIO()
            soundfile.write(file, source, RATE, format="WAV", subtype="FLOAT")
            source = file.getvalue()
        return {"type": "audio", "base64": base64.b64encode(source).decode()}

    def answer(self, request: Request) -> OracleAnswer:
        inputs = self.inputs(request)
        settings = {"do_sample": False, "max_new_tokens": OUTPUTS, "eos_token_id": None, "pad_token_id": 0}
        noted = {"return_dict_in_generate": True, "output_logits": True}
        with torch.inference_mode():
            found = self.model.generate(**inputs, **settings, **noted)
        tokens = found.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return OracleAnswer(tokens, torch.cat(list(found.logits)))


@cache
def own() -> OwnRoute:
    return OwnRoute(voxtral())


@cache
def front() -> RequestProcessor:
    return RequestProcessor(voxtral())
