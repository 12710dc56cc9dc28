"""Tiny checkpoints of any multimodal type of transformers, from its config class and its processor class alone.

The config is the type's own default with every size made small; the tokenizer knows each special token that the type's
processor names; the image processor is the type's own with a PIL backend. Nothing here is written for one type but what
``media_types`` has, and the whole Qwen-Omni models: a thinker that writes, and a talker and a vocoder that speak.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
from pathlib import Path
from typing import Any

from support.any_model.media_sizes import TypeSizes, shrink_config, small_images
from support.any_model.media_types import OWN_SIZES
from support.any_model.tekken import make_tekken_tokenizer, write_extractor
from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint.video_processors import find_images
from trinity.preprocess.loader import find_processor_class, load_processor
from trinity.testing.checkpoints import _recipe, _scale_weights, _silence, no_progress_bar, write_checkpoint
from trinity.testing.checkpoints_recipes import Recipe
from trinity.testing.checkpoints_text import CHATML, build_tokenizer, chat_template

_SPECIAL = re.compile(r"[\"'](<[^\"'<>\s{}]{1,40}>|\[[A-Z_]+\])[\"']")
_NAMED = re.compile(r"tokenizer\.(\w+?_token)\b(?!_id)|tokenizer, [\"'](\w+?_token)[\"']")
_STANDARD = {"bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"}
OMNI_TYPES = ("qwen2_5_omni", "qwen3_omni_moe")
_OMNI_CLASSES = {
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
}
_OMNI_SIZES = {
    "qwen2_5_omni": TypeSizes(
        config={
            "token2wav_config.bigvgan_config.upsample_initial_channel": 64,
            "token2wav_config.dit_config.enc_channels": [16, 16, 16, 16, 48],
        }
    ),
    "qwen3_omni_moe": TypeSizes(
        config={
            "talker_config.text_config.shared_expert_intermediate_size": 64,
            "talker_config.spatial_merge_size": 2,
            "code2wav_config.decoder_dim": 64,
        }
    ),
}
_SPEAKERS = "spk_dict.pt"  # of the vocoder, which transformers asks for as it loads the whole of Qwen2.5-Omni


def multimodal_types() -> list[str]:
    """List the image-text and multimodal types of the transformers that is installed."""
    from transformers.models.auto import modeling_auto as auto

    names = {*auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    return sorted(names)


def build_any_media(model_type: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a tiny checkpoint of a multimodal type, its processor included, into ``directory``.

    Raises ``UnsupportedModel`` where the type has no processor that works without torchvision, and whatever
    transformers raises where its parts do not fit each other at small sizes.
    """
    from transformers import CONFIG_MAPPING

    _refuse_generation(_model_class(model_type))
    sizes = OWN_SIZES.get(model_type, TypeSizes())
    config_class = CONFIG_MAPPING[model_type]
    processor_class = _find_processor_class(model_type)
    tokenizer = make_tekken_tokenizer(directory) if sizes.tekken else make_tokenizer(processor_class, sizes)
    parts = processor_class.get_attributes()
    hears_alone = "image_processor" not in parts and {"feature_extractor", "audio_processor"} & set(parts)
    images = None if hears_alone else make_image_processor(model_type, sizes)
    config = make_config(config_class, len(tokenizer) + sizes.further_ids, sizes, tokenizer.get_added_vocab())
    fields = {"processor_class": processor_class.__name__, **_further_parts(model_type, processor_class, sizes)}
    fields |= {**_processor_fields(processor_class, config, sizes)}
    # As large behind the text model's own factor as elsewhere: beside larger ones features would not show.
    factor = getattr(config.get_text_config(), "embedding_multiplier", None) or 1.0
    recipe = Recipe(
        *(config, _model_class(model_type), tokenizer, images, None if sizes.tekken else fields),
        embedding_std=sizes.embedding_std / factor,
        tokenizer_format="mistral" if sizes.tekken else None,
    )
    directory.mkdir(parents=True, exist_ok=True)
    if sizes.tekken:
        write_extractor(directory, fields)
    recipe.save_processor(directory)
    for part in parts:
        if part.endswith("_tokenizer"):
            tokenizer.save_pretrained(directory / part)
    processor = load_processor(directory, config, tokenizer)
    _set_token_ids(config, tokenizer, processor)
    for name, token in sizes.ids.items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    built = write_checkpoint(recipe, directory, seed)
    with no_progress_bar():
        config.save_pretrained(built)
    return built


def make_processor_of_media(model_type: str) -> Any:
    """Make the type's image processor; of one that takes audio alone, the settings of its feature extractor.

    Raises what either raises that does not load here.
    """
    sizes = OWN_SIZES.get(model_type, TypeSizes())
    try:
        return make_image_processor(model_type, sizes)
    except UnsupportedModel:  # transformers names none
        if not (found := _further_parts(model_type, _find_processor_class(model_type), sizes)):
            raise
        return found


def _further_parts(model_type: str, processor_class: Any, sizes: TypeSizes) -> dict[str, Any]:
    """Fields of a processor's feature extractor for audio, where it has one."""
    from transformers.models.auto import feature_extraction_auto as auto

    part = next(
        (each for each in ("feature_extractor", "audio_processor") if each in processor_class.get_attributes()), ""
    )
    if not part:
        return {}
    names: Any = auto.FEATURE_EXTRACTOR_MAPPING_NAMES
    kind: Any = auto.feature_extractor_class_from_name(names.get(model_type, "WhisperFeatureExtractor"))
    return {part: json.loads(kind(**sizes.audio).to_json_string())}


def _model_class(model_type: str) -> Any:
    import transformers
    from transformers.models.auto import modeling_auto as auto

    mapping = {**auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return getattr(transformers, OWN_SIZES.get(model_type, TypeSizes()).model_class or mapping[model_type])


def _refuse_generation(kind: Any) -> None:
    from transformers import GenerationMixin

    if not issubclass(kind, GenerationMixin):
        raise UnsupportedModel(f"text model: {kind.__name__} does not generate token by token")


def _find_processor_class(model_type: str) -> Any:
    from transformers.models.auto import processing_auto

    names: Any = processing_auto.PROCESSOR_MAPPING_NAMES
    name = OWN_SIZES.get(model_type, TypeSizes()).processor_class or names.get(model_type)
    if name is None:
        raise UnsupportedModel(f"processor: transformers names none for {model_type!r}")
    return find_processor_class(name)


def make_tokenizer(processor_class: Any, sizes: TypeSizes) -> Any:
    """Make a tokenizer that has every special token which the source of the type's processor names."""
    source = inspect.getsource(inspect.getmodule(processor_class) or processor_class)
    plain = [found for found in _SPECIAL.findall(source) if found not in ("<s>", "</s>")]
    named = sorted({one or other for one, other in _NAMED.findall(source)} - _STANDARD - set(sizes.unnamed))
    named = [name for name in named if not name.startswith("add_")]
    extra = {name: f"<{name.removesuffix('_token')}>" for name in named} | sizes.tokens
    image = sizes.image_token or extra.get("image_token") or _image_token(processor_class, plain)
    return build_tokenizer(
        bos=sizes.bos,
        eos="<|im_end|>",
        pad=sizes.pad,
        extra=extra,
        plain=("<|im_start|>", image, *dict.fromkeys(plain), *sizes.plain),
        template=None
        if not sizes.chats
        else chat_template(
            image=sizes.image_text or f"{image}\n",
            audio=sizes.audio_text or extra.get("audio_token", _audio_token(processor_class)),
            **CHATML,
        ),
    )


def _image_token(processor_class: Any, plain: list[str]) -> str:
    """Find the default of the processor's image token: a keyword of its init, or the first special token of images."""
    default = inspect.signature(processor_class.__init__).parameters.get("image_token")
    if default is not None and isinstance(default.default, str):
        return default.default
    source = inspect.getsource(processor_class)
    given = re.search(
        r"self\.image_token = [^\n]*?[\"']([^\"']+)[\"'] if not|self\.image_token = [\"']([^\"']+)", source
    )
    if given is not None:
        return given[1] or given[2]
    return next((each for each in plain if "image" in each.lower() or "IMG" in each), "<image>")


def _audio_token(processor_class: Any) -> str:
    """Find the default of the processor's audio token."""
    default = inspect.signature(processor_class.__init__).parameters.get("audio_token")
    return default.default if default is not None and isinstance(default.default, str) else ""


def make_image_processor(model_type: str, sizes: TypeSizes) -> Any:
    """Make the type's image processor with its PIL backend, for images of some 56 pixels.

    Raises ``UnsupportedModel`` if it has none, with what its processor reads instead.
    """
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    names: Any = IMAGE_PROCESSOR_MAPPING_NAMES
    found = names.get(model_type) or {}
    name = sizes.image_processor or found.get("pil")
    if name is None and "torchvision" not in found:
        processor = _find_processor_class(model_type)
        read = ", ".join(sorted(processor.get_attributes()))
        raise UnsupportedModel(f"processor: {processor.__name__} has {read}, and none of them reads images")
    kind = find_images(found["torchvision"], "torchvision") if name is None else _find_class(name)
    fields = small_images(kind) | sizes.images
    return kind(**fields)


def _find_class(name: str) -> Any:
    """Find a class of image processors, which transformers' root may hide where torchvision is not installed."""
    from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

    found = get_image_processor_class_from_name(name)
    if found is None:
        raise UnsupportedModel(f"transformers has no {name}")
    return found


def make_config(config_class: Any, vocabulary: int, sizes: TypeSizes, added: dict[str, int] | None = None) -> Any:
    """Make the type's own config with every size made small.

    ``added`` (None): ids of special tokens, for a config that names them.
    """
    fields = config_class(**sizes.start).to_dict()
    small = shrink_config(fields, vocabulary)
    if "vocabulary_map" in fields:
        small["vocabulary_map"] = dict(added or {})
    for path, value in sizes.config.items():
        _put(small, path, value)
    for name in ("architectures", "transformers_version", "model_type"):
        small.pop(name, None)
    return config_class(**small)


def _put(fields: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for name in parents:
        fields = fields.setdefault(name, {})
    if value is None:
        fields.pop(leaf, None)
    else:
        fields[leaf] = copy.deepcopy(value)


def _processor_fields(processor_class: Any, config: Any, sizes: TypeSizes) -> dict[str, Any]:
    """Fill in what a processor's init asks for and the config tells."""
    vision = getattr(config, "vision_config", None)
    found: dict[str, Any] = {}
    for name in inspect.signature(processor_class.__init__).parameters:
        value = getattr(config, name, None)
        value = getattr(vision, name, None) if value is None else value
        if isinstance(value, (int, str)) and not name.endswith(("_token", "_id")) and name != "chat_template":
            found[name] = value
    return found | sizes.processor


def _set_token_ids(config: Any, tokenizer: Any, processor: Any) -> None:
    """Set every token id of a config, nested ones too, to what the processor and the tokenizer say."""
    parts = [config, *(getattr(config, name) for name in config.sub_configs if getattr(config, name, None) is not None)]
    for part in parts:
        for name in list(part.to_dict()):
            named = name.endswith(("_token_id", "_token_index"))
            found = _token_id(name, tokenizer, processor) if named else _marker_id(name, tokenizer)
            if found is not None:
                setattr(part, name, found)


def _marker_id(name: str, tokenizer: Any) -> int | None:
    """Find the id of a marker that a config names without the word token, such as image_start_id or newline_id."""
    stem = name.removesuffix("_id")
    text = "\n" if stem == "newline" else getattr(tokenizer, f"{stem}_token", None)
    if stem == name or not isinstance(text, str):
        return None
    ids = tokenizer.encode(text, add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 else None


def _token_id(name: str, tokenizer: Any, processor: Any) -> int | None:
    stem = name.removesuffix("_id").removesuffix("_index")
    for holder in (tokenizer, processor):
        for attribute in (f"{stem}_id", f"{stem}_ids"):
            found = getattr(holder, attribute, None)
            if isinstance(found, int):
                return found
        token = getattr(holder, stem, None)
        if isinstance(token, str) and (number := tokenizer.convert_tokens_to_ids(token)) is not None:
            return int(number)
    kind = stem.removesuffix("_token")
    for token in (f"<|{kind}|>", f"<{kind}>", f"<|{kind}_pad|>"):
        if (number := tokenizer.get_vocab().get(token)) is not None:
            return int(number)
    return tokenizer.pad_token_id if kind in ("image", "bos") else len(tokenizer) - 1


def build_omni(model_type: str, directory: Path, *, seed: int = 0) -> Path:
    """Write a tiny whole model, one of ``OMNI_TYPES``, into ``directory``: the thinker of its recipe, and a talker."""
    import torch
    import transformers

    recipe = _recipe(f"{model_type}_thinker")
    config = _make_omni_config(model_type, recipe.config)
    whole: Any = getattr(transformers, _OMNI_CLASSES[model_type])
    directory.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = whole(config).float().eval()
        _scale_weights(model.thinker, recipe, torch.Generator().manual_seed(seed))
    _silence(model.thinker, recipe.tokenizer)
    with no_progress_bar():
        model.save_pretrained(directory)
    recipe.save_processor(directory)
    if model_type == "qwen2_5_omni":
        torch.save({"Chelsie": {"bos_token": 1}}, directory / _SPEAKERS)
    return directory


def _make_omni_config(model_type: str, thinker: Any) -> Any:
    """Make the whole's config: that of the thinker's recipe, and all else small."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    fields = make_config(kind, int(thinker.get_text_config().vocab_size), _OMNI_SIZES[model_type]).to_dict()
    fields["thinker_config"] = thinker.to_dict()
    for name in ("architectures", "transformers_version", "model_type"):
        fields.pop(name, None)
    return kind(**fields)
