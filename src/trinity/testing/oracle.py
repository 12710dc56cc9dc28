"""Oracle: reference outputs of transformers' own ``generate()``, the whole model in one piece, in float32."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from trinity.preprocess.loader import load_tokenizer_and_processor
from trinity.preprocess.media import MediaLimits, read_image
from trinity.preprocess.prompt import split_at_markers
from trinity.request import Request, Sampling


class OracleAnswer(msgspec.Struct, frozen=True):
    """``token_ids`` of the output and, one row each, the ``logits`` [outputs, vocabulary] they were chosen from."""

    token_ids: list[int]
    logits: Any


class _ForcedTokens:
    """A logits processor that leaves only the next of the given tokens."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._left = iter(token_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, next(self._left)] = 0.0
        return forced


class Oracle:
    """Greedy answers of the unmodified model: its own class, processor, attention and cache.

    Shares nothing with the stages but the reading of images and of ``<image>`` markers.
    """

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self._loaded = load_tokenizer_and_processor(Path(model_dir))
        self._model = self._load_model(Path(model_dir), dtype)

    def _load_model(self, directory: Path, dtype: torch.dtype) -> Any:
        import transformers

        multimodal = self._loaded.processor is not None
        auto = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
        model: Any = auto.from_pretrained(directory, dtype=dtype, local_files_only=True)
        return model.eval()

    def answer(self, request: Request) -> OracleAnswer:
        """Return greedy tokens and raw logits for a request with ``prompt=``.

        ``ignore_eos``, ``max_tokens`` and ``repetition_penalty`` are honoured.
        """
        return self._answer(request, [])

    def logits_along(self, request: Request, token_ids: Sequence[int]) -> torch.Tensor:
        """Compute the raw logits [outputs, vocabulary] before each of ``token_ids`` as the request's forced output."""
        longer = msgspec.structs.replace(request, max_tokens=len(token_ids), sampling=Sampling(ignore_eos=True))
        logits: torch.Tensor = self._answer(longer, [_ForcedTokens(token_ids)]).logits
        return logits

    def _answer(self, request: Request, processors: list[Any]) -> OracleAnswer:
        inputs, settings = self._inputs(request), self._settings(request)
        length = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            found = self._model.generate(**inputs, generation_config=settings, logits_processor=processors)
        return OracleAnswer(found.sequences[0, length:].tolist(), torch.cat(list(found.logits)))

    def _settings(self, request: Request) -> Any:
        settings = copy.deepcopy(self._model.generation_config)
        settings.do_sample = False
        settings.max_new_tokens = request.max_tokens
        settings.return_dict_in_generate = settings.output_logits = True
        settings.pad_token_id = 0
        settings.repetition_penalty = request.sampling.repetition_penalty
        if request.sampling.ignore_eos:
            settings.eos_token_id = None
        return settings

    def generate(self, request: Request) -> list[int]:
        """Return the greedy token ids alone."""
        return self.answer(request).token_ids

    def generate_all(self, requests: Sequence[Request]) -> list[list[int]]:
        return [self.generate(request) for request in requests]

    def _inputs(self, request: Request) -> dict[str, Any]:
        assert isinstance(request.prompt, str), "the oracle takes prompt="
        media = request.all_media()
        text = split_at_markers(request.prompt, self._loaded.placeholders, Counter(item.kind for item in media))
        if self._loaded.processor is None:
            return dict(self._loaded.tokenizer(text.pieces[0], return_tensors="pt"))
        images = [read_image(item.source, MediaLimits()) for item in media]
        whole = text.pieces[0]
        for kind, piece in zip(text.kinds, text.pieces[1:], strict=True):
            whole += self._loaded.placeholders[kind].token + piece
        return dict(self._loaded.processor(text=[whole], images=images or None, return_tensors="pt"))
