"""Parts of a processor of transformers that read media, each loaded without torchvision (decision 0101)."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from trinity.preprocess.checkpoint.config_file import read_json
from trinity.preprocess.checkpoint.model_files import check_files
from trinity.preprocess.checkpoint.video_processors import NoVideo, find_images, load_video_processor


def load_media_parts(model_dir: Path, config: Any, names: Collection[str], with_video: bool) -> dict[str, Any]:
    """Load the parts of ``names`` that read images, videos and audio. Raises what transformers raises.

    ``with_video``: videos of this type serve; else ``NoVideo`` is there where a processor asks for one.
    """
    from transformers import AutoFeatureExtractor

    load_audio: Any = AutoFeatureExtractor.from_pretrained
    parts = {}
    if "image_processor" in names:
        parts["image_processor"] = _load_images(model_dir, str(config.model_type))
        videos = load_video_processor(model_dir, config) if with_video else None
        parts["video_processor"] = videos or NoVideo(parts["image_processor"])
    for name in {"feature_extractor", "audio_processor"}.intersection(names):
        parts[name] = load_audio(model_dir, local_files_only=True, trust_remote_code=False)
    return parts


def _load_images(model_dir: Path, model_type: str) -> Any:
    """Load the image processor with its PIL backend; one that has none, over torch alone."""
    import transformers

    # Not from the package root: some releases hide the class there unless torchvision is installed.
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES, AutoImageProcessor

    names: Any = IMAGE_PROCESSOR_MAPPING_NAMES
    nested = read_json(model_dir / "processor_config.json").get("image_processor")
    settings = nested if isinstance(nested, dict) else read_json(model_dir / "preprocessor_config.json")
    backends = {kind: each for kind, each in names.items() if isinstance(each, dict)}  # older transformers has tuples
    named = settings.get("image_processor_type") or backends.get(model_type, {}).get("torchvision")
    named = str(named).removesuffix("Fast")  # as transformers named those over torchvision before its version 5
    known = next((each for each in backends.values() if each.get("torchvision") == named), {})
    if known and "pil" not in known:
        return find_images(str(named), "torchvision").from_dict(settings)
    if known and type(getattr(transformers, known["pil"], None)).__name__ == "DummyObject":  # in transformers 5.17
        return find_images(known["pil"], "pil").from_dict(settings)
    load_images: Any = AutoImageProcessor.from_pretrained
    return load_images(model_dir, backend="pil", local_files_only=True, trust_remote_code=False)


def load_part(name: str, model_dir: Path) -> Any:
    """Load a further part of a processor: of audio, or a second tokenizer, which has a folder of its own."""
    from transformers import AutoTokenizer
    from transformers.models.auto.feature_extraction_auto import AutoFeatureExtractor

    kind: Any = AutoTokenizer if name.endswith("tokenizer") else AutoFeatureExtractor
    place = model_dir / name if kind is AutoTokenizer else model_dir
    if place.is_dir():
        check_files(place)
    return kind.from_pretrained(place, local_files_only=True, trust_remote_code=False)
