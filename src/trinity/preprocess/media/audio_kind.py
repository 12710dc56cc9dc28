"""Audio as a kind of media: clips through the feature extractor of the model's own processor, one by one."""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import msgspec
import numpy as np

from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.arguments import show
from trinity.preprocess.checkpoint.libraries import library_version
from trinity.preprocess.checkpoint.model_types import explain_how_to_add
from trinity.preprocess.checkpoint.own_processor import name_class
from trinity.preprocess.media.audio import BYTES_LIMIT, audio_digest, make_plain_audio, price_sound, read_audio
from trinity.preprocess.media.image_calls import TEXT_KEYS
from trinity.preprocess.media.image_kind import reserved_tokens
from trinity.preprocess.media.media_kinds import LoadedProcessor, MediaItem, MediaKind, ModelFiles, Placeholder
from trinity.preprocess.media_limits import Estimate, MediaBudget, MediaLimits, MediaProblem, Price

_MASKS = ("feature_attention_mask", "input_features_mask")  # of mel frames, by which positions are computed
_PROBE_S = 0.5  # seconds of the clips that tell if company matters
_CUT_OFF_S = 60.0  # beyond this a clip whose tokens do not grow is cut off: windows are of 30 s at most
_FEATURE_NS = 60.0  # of a sample, in an extractor that computes spectra with numpy
_DEFAULT_S = 5.0  # of a clip to profile
_MERGE = "_merge_input_ids_with_audio_features"  # transformers' method for prompts of old processors
_MARKERS = {
    "qwen2_5_omni_thinker": "<|audio_bos|>{token}<|audio_eos|>",
    "qwen2_audio": "<|audio_bos|>{token}<|audio_eos|>",
    "qwen3_omni_moe_thinker": "<|audio_start|>{token}<|audio_end|>",
    "qwen3_asr": "<|audio_start|>{token}<|audio_end|>",
    "glmasr": "<|begin_of_audio|>{token}<|end_of_audio|>",
}
"""What ``<audio>`` stands for in raw text, by ``model_type``, where that is more than the processor's own token."""


class AudioReader:
    """Runs the model's own processor on one clip, with only its placeholder as text; see ``KindReader``.

    What most processors make of a clip depends on it alone: they pad it to a length of their own. Others pad the clips
    of a prompt to the longest, or take one for each text; both are found at load, and then a prompt may have one clip.
    """

    def __init__(self, loaded: LoadedProcessor, limits: MediaLimits) -> None:
        self._loaded, self._limits = loaded, limits
        self._extractor: Any = find_extractor(loaded.processor)
        _check_bins(self._extractor, loaded.config)
        self.rate = int(self._extractor.sampling_rate)
        self.window_samples: int = getattr(loaded.processor, "window_samples", 0)  # to whose multiples clips are padded
        self.fingerprint = _fingerprint(loaded.processor, self._extractor)
        self._counts: dict[int, int] = {}  # tokens of clips of so many samples
        self._counting = threading.Lock()
        self.alone_because = self._find_company()

    def make_plain(self, source: Any, among: int, budget: MediaBudget) -> Any:
        return make_plain_audio(source, self._limits)

    def price_source(self, source: Any, among: int) -> Price:
        found = price_sound(source, self.rate, self._limits)
        made = self._count_bytes(found.samples)
        return found.price.plus(Price.of(_FEATURE_NS * found.samples, made, made))

    def read_source(self, source: Any, among: int, budget: MediaBudget) -> MediaItem:
        if among > 1 and self.alone_because:
            raise MediaProblem(f"is not alone in its prompt: {self.alone_because}; give one clip")
        samples = read_audio(
            source, self.rate, self._limits, lambda count: budget.check(self.estimate(count, budget.tokens_left))
        )
        charged = self.estimate(len(samples), budget.tokens_left)
        budget.charge(charged)
        item = self.read(samples)
        budget.charge(Estimate(0, 0, item.tokens - (charged.tokens or 0)))
        return item

    def estimate(self, samples: int, most: int) -> Estimate:
        """Compute what the extractor makes of so many samples: a spectrum of each frame, and features of it.

        Of its tokens a number that it has at least, which tells if they are more than ``most``.
        """
        return Estimate(0, self._count_bytes(samples), self._bound_tokens(samples, most))

    def _count_bytes(self, samples: int) -> int:
        hop = getattr(self._extractor, "hop_length", None) or 160
        window = getattr(self._extractor, "n_fft", None) or 400
        padded = -(-samples // (self.window_samples or 1)) * (self.window_samples or 1)
        frames = max(padded, getattr(self._extractor, "n_samples", None) or 0) // hop + 1
        each = 4 * (getattr(self._extractor, "feature_size", None) or 128) + 16 * (window // 2 + 1)
        return int(4 * padded + frames * each)

    def _bound_tokens(self, samples: int, most: int) -> int:
        """Return a number of tokens that so many samples have at least, which tells if they have more than ``most``.

        Only the processor knows, and it computes features to tell. So it is asked for shorter clips, of doubled
        lengths, once each, until one has too many, or so few that the clip has no more than ``most``. Some processors
        cut a clip off: its tokens grow no more.
        """
        least, length = 0, int(_PROBE_S * self.rate)
        while length <= samples:
            found = self._count_long(length)
            if found < least or (found == least and length > _CUT_OFF_S * self.rate):
                return least
            if found > most or found * -(-samples // length) <= most:
                return found
            least, length = found, 2 * length
        return least

    def _count_long(self, samples: int) -> int:
        with self._counting:
            if samples not in self._counts:
                self._counts[samples] = self._count_of(samples)
            return self._counts[samples]

    def read(self, samples: np.ndarray) -> MediaItem:
        """Preprocess one clip, float32 [samples]. Raises ``MediaProblem`` if the model's processor refuses it."""
        try:
            text, ids, inputs = self._call([samples])
        except Exception as exc:  # processors raise anything on odd lengths
            self._refuse_short(samples)
            problem = f"has {len(samples)} samples, which the model's processor refuses"
            raise MediaProblem(f"{problem} ({type(exc).__name__}: {exc!s:.300})") from exc
        tokens = self._count(ids)
        if tokens <= max(1, self._loaded.clip_tokens):
            self._refuse_short(samples)
        content = f"{audio_digest(samples)}-{self.fingerprint}"
        return MediaItem("audio", text, tokens, inputs, content, _count_frames(inputs))

    def _refuse_short(self, samples: np.ndarray) -> None:
        if len(samples) < self.least_samples:
            raise MediaProblem(
                f"is too short for this model: it has {len(samples)} samples, {len(samples) / self.rate:.3f} s at "
                f"{self.rate} samples per second, and the least is {self.least_samples}; give a clip of at least "
                f"{math.ceil(self.least_samples * 1000 / self.rate) / 1000:.3f} s"
            )

    @cached_property
    def least_samples(self) -> int:
        """Number of samples of the shortest clip of which the model takes what its own processor makes."""
        return find_least(self._count_of, self._least_tokens, self.rate)

    @cached_property
    def _least_tokens(self) -> int:
        """Number of tokens that a clip must have: a model that can merge unexpanded prompts takes one for such."""
        return self._loaded.clip_tokens or (2 if merges_unexpanded(self._loaded.config) else 1)

    def _count_of(self, samples: int) -> int:
        """Count the tokens of a clip so long; 0 if the processor refuses it."""
        try:
            return self._count(self._call([_tone(samples / self.rate, self.rate)])[1])
        except Exception:  # processors raise anything on odd lengths
            return 0

    def _count(self, ids: Sequence[int]) -> int:
        return sum(number in self._loaded.media_token_ids for number in ids)

    def number_expansion(self, expansion: str, index: int) -> str:
        return expansion

    def make_synthetic(self, tokens: int | None) -> MediaItem:
        """Preprocess a tone; the tokens of a clip are as many as its length says."""
        each = self.read(_tone(1.0, self.rate)).tokens
        seconds = _DEFAULT_S if tokens is None else tokens / each
        return self.read(_tone(max(_PROBE_S, min(self._limits.max_audio_s, seconds)), self.rate))

    def _call(self, clips: Sequence[np.ndarray]) -> tuple[str, list[int], dict[str, Any]]:
        token = self._loaded.placeholders["audio"].token
        output = dict(
            self._loaded.processor(
                text=token * len(clips), audio=list(clips), sampling_rate=self.rate, return_tensors="pt"
            )
        )
        inputs = {name: value for name, value in output.items() if name not in TEXT_KEYS}
        return self._loaded.last_call.text, output["input_ids"][0].tolist(), inputs

    def _find_company(self) -> str:
        """Say why a clip may not stand beside others; "" if what comes of several is what comes of each."""
        short, long = _tone(_PROBE_S, self.rate), _tone(2 * _PROBE_S, self.rate)
        try:
            alone = [self._call([each]) for each in (short, long)]
        except Exception as exc:
            kind = self._loaded.config.model_type
            raise UnsupportedModel(f"the processor of model type {kind!r} fails on a clip ({exc!r:.200})") from exc
        try:
            text, _, inputs = self._call([short, long])
        except Exception as exc:
            return f"the model's processor takes one clip for each text ({type(exc).__name__}: {exc!s:.100})"
        same = text == alone[0][0] + alone[1][0] and all(each[2].keys() == inputs.keys() for each in alone)
        same = same and all(_is_joined(inputs[name], [each[2][name] for each in alone]) for name in inputs)
        return (
            "" if same else "the model's processor pads it to the longest, so that its features would depend on others"
        )


class AudioKind(MediaKind):
    """Clips of sound, as ``audio.read_audio`` reads them."""

    name = "audio"
    parts: ClassVar = {"input_audio": ("input_audio", "audio_url")}
    count_limit = "max_audios"
    bytes_limit = BYTES_LIMIT
    accept = "audio/*"

    def find_placeholder(self, files: ModelFiles) -> Placeholder | None:
        """Find the audio token of a processor that extracts features. Raises ``UnsupportedModel``, ``ConfigError``."""
        named = files.audio_token is None and getattr(files.config, "audio_token_id", None) is not None
        if find_extractor(files.processor) is None or not (named or files.audio_token):
            return None
        kind = str(files.config.model_type)
        token = files.audio_token or getattr(files.processor, "audio_token", None)
        if not isinstance(token, str):
            raise UnsupportedModel(f"model type {kind!r} has no placeholder token for audio; {explain_how_to_add()}")
        if files.tokenizer.convert_tokens_to_ids(token) not in files.media_ids:
            if files.image_token:  # of a type whose proof was of images alone
                return None
            raise ConfigError(f"the processor's audio token {token!r} is not the config's audio_token_id")
        marker = _MARKERS.get(kind, "{token}").format(token=token)
        return Placeholder(token=token, marker=marker, reserved=reserved_tokens(files))

    def open_reader(self, loaded: LoadedProcessor, limits: MediaLimits) -> AudioReader:
        return AudioReader(loaded, limits)


def mark_beside(items: Sequence[MediaItem], name: str) -> Sequence[MediaItem]:
    """Give clips of a prompt with an image an input of this ``name``, which the model looks for; "" for none.

    They are other items than without, since other features come of them.
    """
    import torch

    if not name or all(item.kind != "image" for item in items):
        return items
    return [
        msgspec.structs.replace(item, inputs={**item.inputs, name: torch.zeros(1)}, content=f"{item.content}-beside")
        if item.kind == "audio"
        else item
        for item in items
    ]


def find_extractor(processor: Any) -> Any:
    """Return a processor's feature extractor of audio; None if it has none."""
    return getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)


def _check_bins(extractor: Any, config: Any) -> None:
    """Raise ``ConfigError`` if Whisper's extractor makes other spectra than the model's tower takes."""
    bins = getattr(getattr(config, "audio_config", None), "num_mel_bins", None)
    whispers = any(each.__name__ == "WhisperFeatureExtractor" for each in type(extractor).__mro__)
    if whispers and type(bins) is int and extractor.feature_size != bins:
        raise ConfigError(
            f"the processor's feature_size is {show(extractor.feature_size)}, and audio_config.num_mel_bins of "
            f"config.json {bins}: its clips have no features that the model takes; give the model its own files"
        )


def find_least(count: Callable[[int], int], tokens: int, most: int) -> int:
    """Find the fewest samples, up to ``most``, of which ``count(samples)`` tokens are ``tokens`` or more."""
    return 1 + bisect.bisect_left(range(1, most), tokens, key=count)


def merges_unexpanded(config: Any) -> bool:
    """Tell if the model's class still merges prompts with one placeholder for a whole clip, as old processors made.

    Where no two placeholders lie side by side it takes a prompt for such a one, and then fails on expanded ones.
    """
    import transformers

    named = [getattr(transformers, str(name), None) for name in getattr(config, "architectures", None) or ()]
    modules = [sys.modules[each.__module__] for each in named if each is not None]
    return any(hasattr(each, _MERGE) for module in modules for each in vars(module).values())


def _is_joined(joint: Any, parts: Sequence[Any]) -> bool:
    """Tell if a tensor is the others, one after another."""
    import torch

    return len({each.shape[1:] for each in (joint, *parts)}) == 1 and torch.equal(joint, torch.cat(list(parts)))


def _count_frames(inputs: dict[str, Any]) -> dict[str, Any]:
    """Count the mel frames that are no padding, from which some models compute positions."""
    masks = [inputs[name] for name in _MASKS if name in inputs]
    return {"audio_seqlens": int(masks[0].sum())} if masks else {}


def _fingerprint(processor: Any, extractor: Any) -> str:
    """Hash everything but the samples that decides features: class, sizes, library versions."""
    import transformers

    plain = {name: value for name, value in vars(processor).items() if isinstance(value, (str, int, float, bool))}
    versions = [transformers.__version__, library_version("torchaudio")]
    parts = [name_class(processor), type(extractor).__name__, extractor.to_dict(), plain, versions]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def _tone(seconds: float, rate: int) -> np.ndarray:
    """Make a tone that rises, float32 [samples]."""
    at = np.arange(int(seconds * rate)) / rate
    tone: np.ndarray = (0.5 * np.sin(2 * np.pi * (200 + 400 * at) * at)).astype(np.float32)
    return tone
