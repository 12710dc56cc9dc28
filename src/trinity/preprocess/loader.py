"""Loads a model's config, tokenizer and processor, always with the PIL backend.

PIL and torchvision yield different pixels: one backend is used everywhere, whatever is installed.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.arguments import show
from trinity.errors.internvl_chat import has_internvl_chat
from trinity.preprocess.checkpoint.config_file import read_config, read_json
from trinity.preprocess.checkpoint.libraries import explain_library
from trinity.preprocess.checkpoint.model_files import check_files
from trinity.preprocess.checkpoint.model_types import check_config, explain_how_to_add
from trinity.preprocess.checkpoint.own_processor import GivenProcessor, adopt_processor, check_processor
from trinity.preprocess.checkpoint.processor_parts import load_media_parts, load_part
from trinity.preprocess.checkpoint.processor_values import check_processor_values
from trinity.preprocess.checkpoint.tokenizer_files import load_tokenizer
from trinity.preprocess.checkpoint.verdicts import MediaFacts
from trinity.preprocess.media.images import WHITE, Transparency
from trinity.preprocess.media.media_kinds import (
    LoadedProcessor,
    ModelFiles,
    Placeholder,
    RunTokenizer,
    kind_names,
    list_kinds,
)
from trinity.preprocess.media.media_markup import IMAGE_TEXT, VIDEO_TEXT, ImageText, VideoText
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.text.clip_windows import take_text_too

_MOST_CACHED = 64  # texts whose tokenization is cached, each of the size of a prompt


@dataclass(frozen=True, kw_only=True)
class ProcessorOptions:
    """Settings of a pipeline that its request processor obeys.

    - ``limits`` (``MediaLimits()``): the largest images, prompts and counts that a request may have.
    - ``processor`` (None): a processor of your own in place of the checkpoint's, whose tokenizer stays; an
      ``OwnProcessor`` or its directory.
    - ``transparency`` ("white"): what models get for transparent pixels of images: "white", as viewers show them, or
      "drop", their colours without the alpha.
    - ``ignore_generation_config`` (none): fields of the checkpoint's generation config not to follow; True for all.
    """

    limits: MediaLimits = MediaLimits()
    processor: GivenProcessor | None = None
    transparency: Transparency = WHITE
    ignore_generation_config: Collection[str] | bool = ()


def load_tokenizer_and_processor(
    model_dir: Path,
    options: ProcessorOptions = ProcessorOptions(),
) -> LoadedProcessor:
    """Load what ``RequestProcessor`` needs from a model directory. Raises ``ConfigError``, ``UnsupportedModel``."""
    own, ignore = check_processor(options.processor), options.ignore_generation_config
    config = read_config(model_dir)
    known = (facts := check_config(config, model_dir)) or MediaFacts()
    tokenizer, last_call = _load_tokenizer(model_dir), threading.local()
    media_ids = _media_ids(config) if facts is None else frozenset(facts.media_tokens.values())
    with _explain_failure(f"the processor of model type {config.model_type!r} cannot be loaded", UnsupportedModel):
        run_tokenizer, recording = RunTokenizer(tokenizer, sorted(media_ids)), record_texts(tokenizer, last_call)
        if own is None or isinstance(own, (str, Path)):
            processor = load_processor(Path(own or model_dir), config, recording)
        else:
            processor = adopt_processor(own, recording)
    special_ids = {each.content: number for number, each in tokenizer.added_tokens_decoder.items() if each.special}
    if processor is None:
        _check_text_only(config)
        placeholders, text, media_ids = {}, ImageText(), frozenset[int]()
    else:
        text = IMAGE_TEXT.get(config.model_type, ImageText()) if facts is None else ImageText(atomic=facts.whole_media)
        markup = *_proven_markup(facts), _media_ids(config).union(known.together), known.in_front
        placeholders = _find_placeholders(ModelFiles(config, tokenizer, processor, last_call, media_ids, *markup))
    return LoadedProcessor(
        config=config,
        tokenizer=tokenizer,
        processor=processor,
        last_call=last_call,
        eos_ids=_eos_ids(model_dir, config, tokenizer, ignore, text_writes=known.text_writes),
        placeholders=placeholders,
        media_token_ids=media_ids,
        run_tokenizer=run_tokenizer,
        atomic=text.atomic,
        whole_prompt=known.whole_prompt,
        together=frozenset(known.together),
        refused=known.refused,
        single=known.single,
        in_front=known.in_front,
        writer=config.get_text_config(decoder=True) if known.text_writes else None,
        pools_images=bool(text.pooled_rows) and getattr(config, text.pooled_rows, None) == 1,
        special_ids=special_ids,
        tiles=text.tiles,
        beside=known.beside,
        transparency=options.transparency,
        clip_tokens=0 if facts is None else facts.clip_tokens,
        video_tail=VIDEO_TEXT.get(config.model_type, VideoText()).tail,
    )


def _load_tokenizer(model_dir: Path) -> Any:
    with _explain_failure(f"the tokenizer in {str(model_dir)!r} cannot be loaded", ConfigError):
        tokenizer = load_tokenizer(model_dir)
        tokenizer("")  # drops padding and truncation that the file may ask for, before threads share it
        return tokenizer


def _proven_markup(facts: MediaFacts | None) -> tuple[str, str, str | None]:
    """Return the markup of ``ModelFiles`` that a proof found, or what leaves it to the processor."""
    return ("", "", None) if facts is None else (facts.image_token, facts.image_marker, facts.audio_token)


def record_texts(tokenizer: Any, last_call: threading.local) -> Any:
    """Copy ``tokenizer`` so that each call leaves its text in ``last_call.text``, per thread.

    The copy never pads or truncates: that would change the shared Rust tokenizer while other threads read it. It caches
    some results, since images of one size have the same text.
    """
    known: dict[str, Any] = {}

    class RecordingTokenizer(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
            last_call.text = text if isinstance(text, str) else text[0]
            last_call.special = bool(kwargs.get("add_special_tokens", True))
            key = repr((text, args, sorted(kwargs.items())))
            answer = known.get(key)
            if answer is None:
                answer = super().__call__(text, *args, **{**kwargs, "padding": False, "truncation": False})
                if len(known) >= _MOST_CACHED:
                    known.clear()
                known[key] = answer
            return copy.copy(answer)  # processors add their own entries to it

    twin = copy.copy(tokenizer)
    twin.__class__ = RecordingTokenizer
    return twin


def load_processor(model_dir: Path, config: Any, tokenizer: Any) -> Any:
    """Load the transformers processor in ``model_dir``; None if the model has none (text only).

    A processor that requires a video processor gets ``NoVideo``. Raises what transformers raises on malformed files.
    """
    check_files(model_dir)  # which may be another than the checkpoint's
    check_processor_values(model_dir)
    if has_internvl_chat(model_dir):
        from trinity.preprocess.checkpoint.internvl_format import PROCESSOR, make_internvl_processor

        return make_internvl_processor(_accept_stand_in(find_processor_class(PROCESSOR)), model_dir, tokenizer)
    processor_class = _processor_class(model_dir, config)
    if processor_class is None:
        return None
    with_video = config.model_type in VIDEO_TEXT
    parts = {
        "tokenizer": tokenizer,
        **load_media_parts(model_dir, config, processor_class.get_attributes(), with_video),
    }
    settings, _ = processor_class.get_processor_dict(str(model_dir), local_files_only=True)
    settings["chat_template"] = settings.get("chat_template") or tokenizer.chat_template
    wanted = [parts[name] if name in parts else load_part(name, model_dir) for name in processor_class.get_attributes()]
    return take_text_too(_accept_stand_in(processor_class).from_args_and_dict(wanted, settings), model_dir)


def _processor_class(model_dir: Path, config: Any) -> Any:
    """Find the class that the checkpoint's files name, else the one that transformers has for this config."""
    from transformers.models.auto import processing_auto

    for name in ("processor_config.json", "preprocessor_config.json"):
        named = read_json(model_dir / name).get("processor_class")
        if isinstance(named, str) and (found := find_processor_class(named)) is not None:
            return found
    names: Any = processing_auto.PROCESSOR_MAPPING_NAMES
    mapped = names.get(config.model_type)
    return None if mapped is None else find_processor_class(mapped)


def find_processor_class(name: str) -> Any:
    """Find a processor's class by its name, also where transformers hides it for want of torchvision; else None."""
    import transformers

    found = getattr(transformers, name, None)
    if type(found).__name__ != "DummyObject":
        return found
    return getattr(_import_without_torchvision(found.__module__.rpartition("processing_")[2]), name)


def _import_without_torchvision(folder: str) -> Any:
    """Import a model's ``processing`` module with the PIL twin in place of its image processor, which asks for it."""
    base = f"transformers.models.{folder}"
    asked = f"{base}.image_processing_{folder}"
    with _import_lock:
        known = sys.modules.get(asked)
        sys.modules[asked] = import_module(f"{base}.image_processing_pil_{folder}")
        try:
            return import_module(f"{base}.processing_{folder}")
        finally:
            sys.modules.pop(asked)
            if known is not None:
                sys.modules[asked] = known


_import_lock = threading.Lock()


def _accept_stand_in(processor_class: Any) -> Any:
    class WithoutVideo(processor_class):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name != "tokenizer":  # ``NoVideo``, or of a class that is a twin of the one meant
                return type(argument)
            return super().check_argument_for_proper_class(argument_name, argument)

        def __repr__(self) -> str:  # transformers' own writes every part as JSON, which NoVideo does not support
            return str(processor_class.__name__)

    WithoutVideo.__name__ = processor_class.__name__  # transformers keys settings by this name
    return WithoutVideo


@contextmanager
def _explain_failure(what: str, error: type[ConfigError]) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as exc:  # transformers passes on whatever its readers raise
        usual = explain_how_to_add() if error is UnsupportedModel else "is the checkpoint complete?"
        hint = explain_library(exc) or usual
        raise error(f"{what} ({type(exc).__name__}: {exc}); {hint}") from exc


def _check_text_only(config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModel(
            f"model type {config.model_type!r} is not a causal language model; {explain_how_to_add()}"
        )


def _find_placeholders(files: ModelFiles) -> dict[str, Placeholder]:
    """Find the markup of each kind of media that the model takes."""
    found = {kind.name: kind.find_placeholder(files) for kind in list_kinds()}
    placeholders = {name: each for name, each in found.items() if each is not None}
    if not placeholders:
        raise UnsupportedModel(
            f"model type {files.config.model_type!r} has no placeholder token for any media; {explain_how_to_add()}"
        )
    return placeholders


def _media_ids(config: Any) -> frozenset[int]:
    ids = (getattr(config, f"{kind}_token_id", None) for kind in kind_names())
    return frozenset(number for number in ids if isinstance(number, int))


def _eos_ids(
    model_dir: Path, config: Any, tokenizer: Any, ignore: Collection[str] | bool, *, text_writes: bool
) -> frozenset[int]:
    """Find the end-of-sequence ids as generate() does: generation config, else model config, else tokenizer."""
    text = config.get_text_config()
    config = config.get_text_config(decoder=True) if text_writes else config
    followed = (
        not text_writes
        and not has_internvl_chat(model_dir)
        and ignore is not True
        and "eos_token_id" not in (ignore or ())
    )
    named = read_json(model_dir / "generation_config.json").get("eos_token_id") if followed else None
    for ids in (named, getattr(config, "eos_token_id", None), getattr(text, "eos_token_id", None)):
        if ids is not None:
            found = ids if isinstance(ids, list | tuple | set | frozenset) else [ids]
            if not all(type(each) is int for each in found):
                raise ConfigError(f"eos_token_id of {str(model_dir)!r} is a token, or a list of them; got {show(ids)}")
            return frozenset(found)
    return frozenset([tokenizer.eos_token_id]) if tokenizer.eos_token_id is not None else frozenset()
