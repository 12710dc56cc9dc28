"""Trials of transformers' types: a tiny checkpoint of each is built and loaded as a pipeline does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from support.any_model.media_checkpoint import (
    OMNI_TYPES,
    build_any_media,
    build_omni,
    make_processor_of_media,
    multimodal_types,
)
from support.any_model.text_checkpoint import build_any_text, list_causal_types
from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.preprocess.checkpoint.model_types import PROVEN, refuse_stream
from trinity.preprocess.media.media_kinds import kind_names
from trinity.testing.checkpoints import build_checkpoint

LISTED, CHECKED, NOT_SERVED = "serves, listed", "serves by self-check", "refused"


class Row(msgspec.Struct, frozen=True):
    """A row of the table: a type, what comes of it, and in which part a refused one differs."""

    model_type: str
    outcome: str
    said: str = ""


def try_media(model_type: str, folder: Path) -> Row:
    """Build a multimodal type and run its proof."""
    from trinity.stages.proof import prove

    if model_type in (*PROVEN, *OMNI_TYPES):
        return try_listed(model_type, folder)
    try:
        refuse_stream(model_type)
    except UnsupportedModel as error:
        return Row(model_type, NOT_SERVED, shorten(error))
    try:
        build_any_media(model_type, folder)
    except UnsupportedModel as error:
        return Row(model_type, NOT_SERVED, shorten(error))
    except ImportError as error:
        return Row(model_type, NOT_SERVED, f"a library that is not here: {shorten(error)}")
    except Exception as error:
        return Row(model_type, NOT_SERVED, f"tiny checkpoint: {shorten(error)}")
    verdict = prove(folder)
    if verdict.failed is None:
        return _load_proven(Row(model_type, CHECKED, ", ".join(verdict.serves)), folder)
    return Row(model_type, NOT_SERVED, f"{verdict.failed.name}: {shorten(verdict.failed.said)}")


def _load_proven(row: Row, folder: Path) -> Row:
    """Return the row of a type that is proven, or what its load refuses: the text model passes a check of its own."""
    from trinity.stages.models import load_model

    try:
        load_model(folder, "EPD", dtype="float32")
    except UnsupportedModel as error:
        return Row(row.model_type, NOT_SERVED, f"proven, and refused as it is loaded: {shorten(error)}")
    return row


def try_listed(model_type: str, folder: Path) -> Row:
    """Build a type that the tests compare with ``generate()``, load its weights, and name what its processor takes."""
    from trinity.preprocess.processor import RequestProcessor
    from trinity.stages.models import load_model

    build = build_omni if model_type in OMNI_TYPES else build_checkpoint
    build(model_type, folder)
    load_model(folder, "EPD", dtype="float32")
    processor = RequestProcessor(folder)
    try:
        kinds = [name for name in kind_names() if name in processor.media_kinds]
    finally:
        processor.close()
    return Row(model_type, LISTED, ", ".join([*kinds, "text"]))


def try_text(model_type: str, folder: Path) -> Row:
    """Build a causal type and load it, self-check and all."""
    from trinity.stages.models import find_adapter, load_model

    try:
        build_any_text(model_type, folder)
    except Exception as error:
        return Row(model_type, NOT_SERVED, f"tiny checkpoint: {shorten(error)}")
    try:
        load_model(folder, "PD", dtype="float32")
    except UnsupportedModel as error:
        return Row(model_type, NOT_SERVED, shorten(error))
    return Row(model_type, LISTED if find_adapter(read_config(folder))[1] else CHECKED, "text")


def shorten(said: object, most: int = 200) -> str:
    """Write an error as one line without a pipe or a path of this machine."""
    text = " ".join(str(said).replace("|", "\\|").replace("<", "&lt;").split())
    text = " ".join(word for word in text.split(" ") if "/tmp/" not in word)
    return text if len(text) <= most else text[: most - 1] + "…"


def list_work() -> list[tuple[str, Callable[[str, Path], Row]]]:
    """List all types, multimodal ones first, each with what tries it."""

    media = multimodal_types()
    return [
        *((name, try_media) for name in media),
        *((name, try_text) for name in list_causal_types() if name not in media),
    ]


def count_processors() -> tuple[int, int]:
    """Count the multimodal types whose processor of images or audio loads here, and all of them."""
    loaded = 0
    for name in multimodal_types():
        try:
            make_processor_of_media(name)
            loaded += 1
        except Exception:  # what has none, or asks for more than is here
            continue
    return loaded, len(multimodal_types())
