"""Model types that serve: which multimodal ones are proven, with which parts, and which configs no one may load.

A multimodal checkpoint that is taken for a text model drops its images and answers all the same. So a config is held
against this list before anything else of its checkpoint is read, by the request processor and by every instance.
"""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint.verdicts import MediaFacts, has_weights, require_facts

ENTRY_POINTS = "trinity.models"
_MEDIA_WORDS = re.compile(
    r"(?:^|[_\W])(acoustic|audio|codec|images?|mimi|mm|modality|multimodal|pixel|protein|speaker|speech|videos?|vision|visual"
    r"|vlm|vq)(?:[_\W]|$)"
)


class ProvenParts(msgspec.Struct, frozen=True):
    """Parts with which the tests compare a multimodal type with ``generate()``, by their own ``model_type``.

    - ``tower``: vision tower; any other is refused, since no check at load shows an image. None: it has none.
    - ``text``: text model; any other passes the self-check at load, or is refused there.
    - ``audio`` (None): audio tower, as ``tower``.
    """

    tower: str | None
    text: str
    audio: str | None = None


PROVEN: dict[str, ProvenParts] = {
    "audioflamingo3": ProvenParts(None, "qwen2", "audioflamingo3_encoder"),
    "glmasr": ProvenParts(None, "llama", "glmasr_encoder"),
    "qwen2_5_omni_thinker": ProvenParts(
        "qwen2_5_omni_vision_encoder", "qwen2_5_omni_text", "qwen2_5_omni_audio_encoder"
    ),
    "qwen3_omni_moe_thinker": ProvenParts(
        "qwen3_omni_moe_vision_encoder", "qwen3_omni_moe_text", "qwen3_omni_moe_audio_encoder"
    ),
    "qwen2_audio": ProvenParts(None, "qwen2", "qwen2_audio_encoder"),
    "qwen3_asr": ProvenParts(None, "qwen3", "qwen3_asr_encoder"),
    "gemma3": ProvenParts("siglip_vision_model", "gemma3_text"),
    "idefics3": ProvenParts("idefics3_vision", "llama"),
    "internvl": ProvenParts("internvl_vision", "qwen2"),
    "llava": ProvenParts("clip_vision_model", "llama"),
    "llava_next": ProvenParts("clip_vision_model", "llama"),
    "llava_next_video": ProvenParts("clip_vision_model", "llama"),
    "llava_onevision": ProvenParts("siglip_vision_model", "qwen2"),
    "minicpmv4_6": ProvenParts("minicpmv4_6_vision", "qwen3"),
    "qwen2_vl": ProvenParts("qwen2_vl_vision", "qwen2_vl_text"),
    "qwen2_5_vl": ProvenParts("qwen2_5_vl_vision", "qwen2_5_vl_text"),
    "qwen3_vl": ProvenParts("qwen3_vl_vision", "qwen3_vl_text"),
    "smolvlm": ProvenParts("smolvlm_vision", "llama"),
    "video_llama_3": ProvenParts("video_llama_3_vision", "qwen2"),
}
"""Built-in multimodal types. A test holds them equal to the parts of ``trinity.testing.checkpoints``."""

STREAMS = ("kyutai_speech_to_text", "voxtral_realtime")
"""Types whose every output token takes the next piece of a stream of audio, which a request does not have."""

registered: set[str] = set()
"""Types for which this program registered an adapter of its own: their author answers for them."""


def served_types() -> list[str]:
    """List the multimodal types that serve, sorted: built in, registered, or named by an installed package."""
    return sorted({*PROVEN, *registered, *_named_by_packages()})


def explain_how_to_add() -> str:
    """Say which models serve and how to add one, for error messages."""
    return (
        f"supported are {', '.join(served_types())}, and text-only causal language models; others of transformers' "
        "image-text and audio types where trinity check proves the checkpoint (docs/models.md). To add a model: its "
        "processor needs an image_token and its config an image_token_id; compare it with generate(), then register a "
        f"model adapter under the entry point group {ENTRY_POINTS} or with "
        "trinity.stages.models.register_adapter; describe markers of several tokens in "
        "trinity.preprocess.media.media_markup.IMAGE_TEXT"
    )


def check_config(config: Any, directory: Path | None = None) -> MediaFacts | None:
    """Raise ``UnsupportedModel`` for a config with media that nobody proved: its type, or its vision tower.

    - ``config``: as transformers loads it.
    - ``directory`` (None): its checkpoint. With weights, a multimodal type of transformers that is not listed here is
      taken where its proof agrees, which this call may run.

    Returns what the proof found, or None for what is listed, registered or text only.
    """
    kind = str(config.model_type)
    if kind in registered or kind in _named_by_packages():
        return None
    if kind in PROVEN:
        for sense, wanted in (("vision", PROVEN[kind].tower), ("audio", PROVEN[kind].audio)):
            tower = getattr(getattr(config, f"{sense}_config", None), "model_type", None)
            if tower != wanted:
                return _prove_tower(kind, sense, wanted, tower, directory)
        return None
    refuse_stream(kind)
    found = media_fields(config)
    if kind in _multimodal_types() and directory is not None and has_weights(directory):
        return require_facts(directory, kind)
    if found or kind in _multimodal_types():
        shown = f" (its config has {', '.join(found[:4])})" if found else ""
        shown += ", and no weights by which it could prove itself" * (kind in _multimodal_types())
        raise UnsupportedModel(f"no adapter for the multimodal {kind!r}{shown}; {explain_how_to_add()}")
    if _has_inner_text(config):
        raise UnsupportedModel(f"{kind!r} is more than one decoder, which is all that serves; {explain_how_to_add()}")
    return None


def refuse_stream(kind: str) -> None:
    """Raise ``UnsupportedModel`` for a type that listens as it writes."""
    if kind in STREAMS:
        raise UnsupportedModel(
            f"{kind!r} reads a stream of audio in real time, a piece for each token that it writes: realtime audio is "
            "not served. Take a model that reads whole clips"
        )


def _prove_tower(kind: str, sense: str, wanted: str | None, tower: str | None, directory: Path | None) -> MediaFacts:
    problem = "which no check at load can prove"
    if sense == "vision" and directory is not None and has_weights(directory):
        try:
            return require_facts(directory, kind)
        except UnsupportedModel as error:
            problem = f"with which it is not exact: {error}"
    raise UnsupportedModel(
        f"{kind!r} is proven with {_a_tower(sense, wanted)}, and this checkpoint has {tower!r}, {problem}. Compare it "
        f"with generate(), then call trinity.stages.models.register_adapter({kind!r}, ...)"
    )


def is_multimodal(config: Any) -> bool:
    """Tell if transformers lists a config's type as multimodal."""
    return str(config.model_type) in _multimodal_types()


def _a_tower(sense: str, wanted: str | None) -> str:
    return f"no {sense} tower" if wanted is None else f"a{'n' * (sense == 'audio')} {sense} tower of type {wanted!r}"


def media_fields(config: Any) -> list[str]:
    """List the fields of a config that speak of images, video, audio or the like, and are set."""
    fields = {**config.to_dict(), **dict.fromkeys(config.sub_configs, True)}
    return sorted(name for name, value in fields.items() if value not in (None, False) and _speaks_of_media(name))


def _speaks_of_media(name: str) -> bool:
    words = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()  # visionTower, as other tools write
    return _MEDIA_WORDS.search(words) is not None


def _has_inner_text(config: Any) -> bool:
    try:
        return config.get_text_config(decoder=True) is not config
    except ValueError:  # several text models, or none
        return True


def _named_by_packages() -> set[str]:
    return {point.name for point in entry_points(group=ENTRY_POINTS)}


def _multimodal_types() -> set[str]:
    from transformers.models.auto import modeling_auto

    names = ("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
    return set().union(*(getattr(modeling_auto, name, ()) for name in names))
