"""Oracle: reference outputs of transformers' own ``generate()``, the whole model in one piece, in float32.

Its inputs take the route of transformers' documents: ``apply_chat_template(messages, tokenize=True, return_dict=True)``
for a chat, and for raw text one call of the processor, with all images of the prompt as the images of one text.
"""

from __future__ import annotations

import base64
import copy
import inspect
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from trinity.preprocess.loader import load_processor, load_tokenizer_and_processor
from trinity.preprocess.media.audio_kind import find_extractor
from trinity.preprocess.media.clips import Clip
from trinity.preprocess.text.prompt import split_at_markers
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
    """Greedy answers of the unmodified model: its own class, processor, chat template, attention and cache.

    Shares nothing with what serves but the meaning of ``<image>`` in raw text.
    """

    def __init__(self, model_dir: str | Path, dtype: torch.dtype = torch.float32) -> None:
        self._loaded = load_tokenizer_and_processor(Path(model_dir))
        self._processor = own_processor(Path(model_dir))
        self._model = self._load_model(Path(model_dir), dtype)

    def _load_model(self, directory: Path, dtype: torch.dtype) -> Any:
        import transformers

        multimodal = self._loaded.processor is not None
        auto: Any = transformers.AutoModelForImageTextToText if multimodal else transformers.AutoModelForCausalLM
        listed = not multimodal or type(self._loaded.config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if "audio" in self._loaded.placeholders or not listed:  # others of transformers' lists have it, some several
            (named,) = self._loaded.config.architectures
            auto = getattr(transformers, named)
        model: Any = auto.from_pretrained(directory, dtype=dtype, local_files_only=True, trust_remote_code=False)
        return model.eval()

    def answer(self, request: Request) -> OracleAnswer:
        """Return greedy tokens and raw logits for a request.

        ``ignore_eos``, ``max_tokens`` and what its sampling sets of the checkpoint's generation config are honoured.
        """
        return self._answer(request, [])

    def logits_along(self, request: Request, token_ids: Sequence[int]) -> torch.Tensor:
        """Compute the raw logits [outputs, vocabulary] before each of ``token_ids`` as the request's forced output."""
        longer = msgspec.structs.replace(request, max_tokens=len(token_ids), sampling=Sampling(ignore_eos=True))
        logits: torch.Tensor = self._answer(longer, [_ForcedTokens(token_ids)]).logits
        return logits

    def _answer(self, request: Request, processors: list[Any]) -> OracleAnswer:
        inputs, settings = self._typed_inputs(request), self._settings(request)
        length = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            found = self._model.generate(**inputs, generation_config=settings, logits_processor=processors)
        return OracleAnswer(found.sequences[0, length:].tolist(), torch.cat(list(found.logits)))

    def _settings(self, request: Request) -> Any:
        settings = copy.deepcopy(self._model.generation_config)
        settings.do_sample = False
        if request.max_tokens is not None:
            settings.max_new_tokens = request.max_tokens
        settings.return_dict_in_generate = settings.output_logits = True
        settings.pad_token_id = 0
        for name in ("repetition_penalty", "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens"):
            if (value := getattr(request.sampling, name)) is not None:
                setattr(settings, name, value)
        if request.sampling.ignore_eos:
            settings.eos_token_id = None
        return settings

    def generate(self, request: Request) -> list[int]:
        """Return the greedy token ids alone."""
        return self.answer(request).token_ids

    def generate_all(self, requests: Sequence[Request]) -> list[list[int]]:
        return [self.generate(request) for request in requests]

    def features(self, request: Request) -> torch.Tensor:
        """Compute the rows of all images of a request, by the ``get_image_features`` of the model's own class.

        Returns [visual tokens, hidden * (1 + deepstack)]: of deepstack's layers, each has columns of its own.
        """
        method = self._model.base_model.get_image_features  # the outer class may pass on whatever it is given
        inputs, named = self._typed_inputs(request), inspect.signature(method).parameters
        with torch.inference_mode():
            found = method(**{name: value for name, value in inputs.items() if name in named}, return_dict=True)
        layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
        return torch.cat([torch.cat([each.flatten(0, -2) for each in _as_list(one)]) for one in layers], dim=-1)

    def _typed_inputs(self, request: Request) -> dict[str, Any]:
        """Make inputs whose pixels have the model's dtype: some processors give bfloat16 (Llama 4)."""
        made, dtype = self.inputs(request), self._model.dtype
        return {name: value.to(dtype) if _is_floating(value) else value for name, value in made.items()}

    def inputs(self, request: Request) -> dict[str, Any]:
        """Make the inputs of ``generate()``, as transformers documents it."""
        media = request.all_media()
        images = [load_as_transformers(item.source) for item in media if item.kind == "image"]
        clips = [item.source for item in media if item.kind == "video"]
        sounds = [load_audio_as_transformers(item.source, self._processor) for item in media if item.kind == "audio"]
        if request.messages is not None:
            sources = {"image": images, "video": [clip.frames for clip in clips], "audio": sounds}
            return self._chat_inputs(request.messages, sources, clips)
        assert isinstance(request.prompt, str), "the oracle takes prompt= or messages="
        text = split_at_markers(request.prompt, self._loaded.placeholders, Counter(item.kind for item in media))
        if self._loaded.in_front and images:
            return dict(self._processor(text=[text.pieces[-1]], images=images, return_tensors="pt"))
        whole = text.pieces[0]
        for kind, piece in zip(text.kinds, text.pieces[1:], strict=True):
            whole += self._loaded.placeholders[kind].token + piece
        if self._loaded.processor is None:
            return dict(self._processor(whole, return_tensors="pt"))
        videos = {"videos": [clip.frames for clip in clips], **describe_clips(clips)} if clips else {}
        if clips and self._loaded.config.model_type == "smolvlm":  # as its chats do
            videos["do_sample_frames"] = True
        given = {**videos, **({"images": [images]} if images else {}), **({"audio": sounds} if sounds else {})}
        if given:
            given |= self._kinds_of_tokens()
        if not given and "audio" in self._loaded.placeholders:  # some of their processors take no text alone
            return dict(self._processor.tokenizer([whole], return_tensors="pt"))
        return dict(self._processor(text=[whole], return_tensors="pt", **given))

    def _chat_inputs(
        self, messages: Sequence[Mapping[str, Any]], media: Mapping[str, Sequence[Any]], clips: Sequence[Clip]
    ) -> dict[str, Any]:
        """Give the chat to transformers as its documents do: each medium inside its own part."""
        chat, left = [], {kind: iter(given) for kind, given in media.items()}
        for message in messages:
            content = message["content"]
            if not isinstance(content, str):
                content = [
                    {**part, part["type"]: next(left[part["type"]])} if part["type"] in left else part
                    for part in content
                ]
            chat.append({**message, "content": content})
        settings: dict[str, Any] = {
            "tokenize": True,
            "return_dict": True,
            "return_tensors": "pt",
            "add_generation_prompt": True,
        }
        further = (describe_clips(clips) if clips else {}) | self._kinds_of_tokens()
        if further:
            settings["processor_kwargs"] = further
        return dict(self._processor.apply_chat_template(chat, **settings))

    def _kinds_of_tokens(self) -> dict[str, bool]:
        """Return the keyword by which a processor gives the kind of each token, where its model takes that."""
        takes = "mm_token_type_ids" in inspect.signature(self._model.forward).parameters
        return {"return_mm_token_type_ids": True} if takes else {}


def describe_clips(clips: Sequence[Clip]) -> dict[str, Any]:
    """Describe clips to a processor by transformers' ``video_metadata``, one each, in the words of its documents."""
    described = []
    for clip in clips:
        count = len(clip.frames)
        told: dict[str, Any] = {"total_num_frames": count, "fps": clip.fps, "frames_indices": list(range(count))}
        described.append({**told, "duration": None if clip.fps is None else count / clip.fps})
    return {"video_metadata": described}


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _as_list(features: Any) -> list[torch.Tensor]:
    return [features] if isinstance(features, torch.Tensor) else list(features)


def load_as_transformers(source: Any) -> Any:
    """Load an image by transformers' ``convert_to_rgb``, upright; arrays and tensors processors get as they are."""
    from PIL import Image, ImageOps
    from transformers.image_transforms import convert_to_rgb

    if isinstance(source, (bytes, bytearray, memoryview)):
        source = Image.open(io.BytesIO(source))
    elif isinstance(source, (str, os.PathLike)):
        source = Image.open(os.fspath(source))
    if not isinstance(source, Image.Image):
        return source
    shown: Any = convert_to_rgb(ImageOps.exif_transpose(source), return_numpy=True)
    return Image.fromarray(shown)


def load_audio_as_transformers(source: Any, processor: Any) -> Any:
    """Load a clip with transformers' own ``load_audio``; arrays are given to processors as they are."""
    from transformers.audio_utils import load_audio

    if isinstance(source, bytes):
        source = base64.b64encode(source).decode()
    if isinstance(source, (str, os.PathLike)):
        return load_audio(os.fspath(source), sampling_rate=find_extractor(processor).sampling_rate)
    return source


def own_processor(directory: Path) -> Any:
    """Load the checkpoint's processor, or the tokenizer of a text model, as transformers' AutoProcessor does.

    Where that refuses, because torchvision is not there to decode videos, its parts are put together without it.
    """
    from transformers import AutoConfig, AutoProcessor, AutoTokenizer

    whole: Any = AutoProcessor.from_pretrained
    words: Any = AutoTokenizer.from_pretrained
    try:
        return whole(directory, backend="pil", local_files_only=True, trust_remote_code=False)
    except (ImportError, ValueError):
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        return load_processor(directory, config, words(directory, local_files_only=True, trust_remote_code=False))
