"""ClipWindows: makes inputs of a text and clips for a model whose own processor makes them of whole chats alone.

Such a processor has a package write its chats, which puts tokens of clips in place by what a tekken.json says of audio.
The same is done here of that file, so that a prompt of any form, and each clip by itself, can be preprocessed. What
comes of it is compared with the processor's own chats in the proof of each checkpoint (decision 0107).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint.libraries import how_to_install, library_version
from trinity.preprocess.checkpoint.tokenizer_files import TEKKEN, WRITER

_BEGIN = "[BEGIN_AUDIO]"  # that the package puts in front of each clip


class _Spectrum(msgspec.Struct, frozen=True):
    hop_length: int


class _Audio(msgspec.Struct, frozen=True):
    """Facts of audio in a tekken.json: ``frame_rate`` tokens a second, in windows of ``chunk_length_s``."""

    sampling_rate: int
    frame_rate: float
    audio_encoding_config: _Spectrum
    chunk_length_s: float

    def __post_init__(self) -> None:
        numbers = (self.sampling_rate, self.frame_rate, self.chunk_length_s, self.audio_encoding_config.hop_length)
        if min(numbers) <= 0 or self.samples_of_token < 1:
            raise ValueError("numbers of audio must be above 0, with a frame of samples in each token")

    @property
    def samples_of_token(self) -> int:
        """Samples of a clip for which one token stands: whole hops."""
        hop = self.audio_encoding_config.hop_length
        return int(self.sampling_rate // self.frame_rate) // hop * hop


class _Tekken(msgspec.Struct, frozen=True):
    audio: _Audio


class ClipWindows:
    """Takes the place of a processor ``own`` that takes clips in chats alone.

    - ``feature_extractor``, ``tokenizer``, ``audio_token``: its own.
    - ``chat_template``: the tokenizer's.
    - ``window_samples``, ``token_samples``: samples of a window, and of a token. A clip is filled up with silence to
      whole windows.
    """

    def __init__(self, own: Any, audio: _Audio) -> None:
        self.feature_extractor, self.tokenizer = own.feature_extractor, own.tokenizer
        self.audio_token: str = own.audio_token
        self.chat_template = own.tokenizer.chat_template
        self.window_samples = int(audio.chunk_length_s * audio.sampling_rate)
        self.token_samples = audio.samples_of_token

    def __call__(
        self,
        *,
        text: str | Sequence[str],
        return_tensors: str = "pt",
        audio: Sequence[Any] = (),
        sampling_rate: int | None = None,
    ) -> Mapping[str, Any]:
        """Expand the placeholders of ``text``, and make features [windows, mels, frames] of all clips."""
        left = [self._expand(clip) for clip in reversed(audio)]
        pieces = (text if isinstance(text, str) else text[0]).split(self.audio_token)
        if len(pieces) != 1 + len(left):
            raise ValueError(f"the text has {len(pieces) - 1} placeholders for {len(left)} clips")
        whole = pieces[0] + "".join(left.pop() + piece for piece in pieces[1:])
        made: dict[str, Any] = dict(self.tokenizer([whole], return_tensors=return_tensors))
        if len(audio):
            import torch

            made["input_features"] = torch.cat([self._extract(clip, sampling_rate) for clip in audio])
        return made

    def _count(self, clip: Any) -> int:
        return max(1, math.ceil(len(clip) / self.window_samples))

    def _expand(self, clip: Any) -> str:
        tokens = math.ceil(self._count(clip) * self.window_samples / self.token_samples)
        return _BEGIN + self.audio_token * tokens

    def _extract(self, clip: Any, rate: int | None) -> Any:
        found: Any = self.feature_extractor(
            clip,
            sampling_rate=rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=self.window_samples,
            return_tensors="pt",
        )["input_features"]
        mels = found.shape[1]
        return found.reshape(mels, self._count(clip), -1).transpose(0, 1)


def hears_in_chats_alone(processor: Any) -> bool:
    """Tell if a processor's class writes chats by code of its own, and takes no clips beside a text."""
    from transformers import ProcessorMixin

    kind = type(processor)
    if kind.apply_chat_template is ProcessorMixin.apply_chat_template or hasattr(processor, "image_processor"):
        return False
    return hasattr(processor, "feature_extractor") and "audio" not in inspect.signature(kind.__call__).parameters


def take_text_too(processor: Any, model_dir: Path) -> Any:
    """Return a processor that takes a text with clips: this one, or ``ClipWindows`` over one that does not.

    Raises ``UnsupportedModel`` where nothing says how its clips become tokens, or which chats it writes.
    """
    if not hears_in_chats_alone(processor):
        return processor
    named = f"the processor {type(processor).__name__} takes clips in chats alone, and"
    if not (model_dir / TEKKEN).is_file():
        raise UnsupportedModel(f"{named} {str(model_dir)!r} has no {TEKKEN} that says how they become tokens")
    try:
        audio = msgspec.json.decode((model_dir / TEKKEN).read_bytes(), type=_Tekken).audio
    except msgspec.MsgspecError as error:
        raise UnsupportedModel(f"{named} {TEKKEN} does not say how they become tokens ({error})") from error
    longest = int(processor.feature_extractor.n_samples)
    if not audio.chunk_length_s * audio.sampling_rate <= longest:  # all clips are filled up to whole ones
        windows = f"windows of {audio.chunk_length_s} s at {audio.sampling_rate} Hz"
        raise UnsupportedModel(f"{named} {TEKKEN} has {windows}, where its feature extractor takes {longest} samples")
    if not processor.tokenizer.chat_template:
        if library_version(WRITER):
            raise UnsupportedModel(f"{named} {WRITER} writes no template of {TEKKEN}; give a chat_template.jinja")
        raise UnsupportedModel(f"{named} {WRITER}, which writes them, is not installed: {how_to_install(WRITER)}")
    return ClipWindows(processor, audio)
