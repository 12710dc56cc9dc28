"""Processors of a user's own, in place of a checkpoint's: a directory of transformers' files, or an object."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trinity.errors import ConfigError, describe_error
from trinity.errors.arguments import show

MEDIA_PARTS = ("image_processor", "feature_extractor", "audio_processor", "video_processor")


@runtime_checkable
class OwnProcessor(Protocol):
    """Processor as transformers has them, called with one text, and the media of one kind in it.

    - ``tokenizer``: replaced by the checkpoint's in a copy of the object, which has to tokenize with it: the text that
      it gets last is the expanded one.
    - ``image_processor`` or ``feature_extractor``: settings and sizes; beside them ``image_token`` or ``audio_token``,
      the text of one placeholder. For clips it is told their ``sampling_rate`` too.

    It returns ``input_ids`` and the inputs of the model's encoder, as tensors by name, and may be called by any thread.
    """

    tokenizer: Any

    def __call__(self, *, text: Any, return_tensors: str, **media: Any) -> Mapping[str, Any]:
        """Expand the placeholders in ``text`` and make the encoder's inputs of ``media``."""


GivenProcessor = str | Path | OwnProcessor


def check_processor(own: Any) -> Any:
    """Return it if it is a directory, None, or an object with what ``OwnProcessor`` says. Raises ``ConfigError``."""
    if own is None:
        return None
    if isinstance(own, (str, Path)):
        if not os.path.isdir(own):
            raise ConfigError(
                f"processor {show(str(own))} is no directory; give that of a processor's save_pretrained()"
            )
        return own
    try:
        complete = not isinstance(own, type) and callable(own) and hasattr(own, "tokenizer")
        reads = any(getattr(own, name, None) is not None for name in MEDIA_PARTS)
    except Exception as error:  # of anybody's object
        raise ConfigError(f"processor cannot be looked at ({describe_error(error)})") from error
    if not complete:
        raise ConfigError(f"processor is a directory, or a callable object with a tokenizer; got {show(own)}")
    if not reads:
        raise ConfigError(f"processor {type(own).__name__} has none of {', '.join(MEDIA_PARTS)}: it reads no media")
    return own


def adopt_processor(own: OwnProcessor, tokenizer: Any) -> Any:
    """Copy a user's processor, with this tokenizer, so that what is changed in it is nobody else's."""
    mine: Any = copy.copy(own)
    for name in MEDIA_PARTS:
        if getattr(mine, name, None) is not None:
            setattr(mine, name, copy.copy(getattr(mine, name)))
    mine.tokenizer = tokenizer
    return mine


def name_class(processor: Any) -> str:
    """Return the full name of a processor's class, which is part of the key of all that it makes."""
    return f"{type(processor).__module__}.{type(processor).__name__}"


def pack_processor(own: GivenProcessor | None) -> bytes:
    """Pickle it for a process that preprocesses. Raises ``ConfigError`` where that cannot be."""
    try:
        return pickle.dumps(Path(own).absolute() if isinstance(own, (str, Path)) else own)
    except Exception as error:  # of anybody's object
        raise ConfigError(
            f"processor {type(own).__name__} cannot be sent to a process that preprocesses ({describe_error(error)}): "
            "give a directory, or preprocess on threads (MediaLimits(processes=0))"
        ) from error
