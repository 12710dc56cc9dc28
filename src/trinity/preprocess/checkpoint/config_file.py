"""Reads a checkpoint's config, bounded: one that no model can be built of is refused before anything is built.

A checkpoint comes from outside. Its JSON may be of any size and depth, its counts of any type and value; built as they
are, a million layers or a vocabulary of -1 cost minutes or end in another library's assertion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError, UnsupportedModel
from trinity.errors.arguments import show
from trinity.errors.hub_ids import ADAPTER, explain_no_config
from trinity.errors.internvl_chat import is_internvl_chat
from trinity.errors.plain_values import find_scheme
from trinity.preprocess.checkpoint.model_files import MOST_CONFIG_BYTES, check_files, check_shards
from trinity.preprocess.checkpoint.model_types import explain_how_to_add

MOST_HEADER_BYTES = 100_000_000  # of a file of safetensors: the format's own bound
FEW_LAYERS = 512  # as many cost little, whatever weights there are
MOST_ELEMENTS = 1 << 31  # of any one dimension
ELEMENTS_PER_BYTE = 4  # of weights; 4 bits each are two
_COUNTS = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "patch_size",
        "image_size",
        "depth",
        "embed_dim",
    }
)
_ROTATED = "qk_rope_head_dim"  # of latent attention: its configs repeat it as head_dim, 0 where no part is rotated
_LAYERS = ("num_hidden_layers", "depth")
_KIN = {
    "minicpmv": "'minicpmv4_6' is of the same family: MiniCPM-V 4.6",
}
_MEDIA_IDS = tuple(f"{kind}_token_{what}" for kind in ("image", "video", "audio") for what in ("id", "index"))
_Form = tuple[Callable[[Any], bool], str]


def check_directory(model_dir: Path) -> None:
    """Raise ``ConfigError`` if the directory holds no checkpoint, or files in it are none or too large."""
    try:
        found = (model_dir / "config.json").is_file()
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise ConfigError(f"model directory {show(str(model_dir))} cannot be read ({error.strerror})") from error
    if not found and (scheme := find_scheme(str(model_dir))):
        raise ConfigError(
            f"model {show(str(model_dir))} is an address of the scheme {scheme!r}, and nothing is downloaded; download "
            "the checkpoint, with huggingface-cli download for example, and give its directory"
        )
    if not found:
        raise ConfigError(f"model directory {show(str(model_dir))} {explain_no_config(model_dir)}")
    check_files(model_dir)


def read_config(model_dir: Path) -> Any:
    """Read a checkpoint's config as transformers does, once its counts are possible ones.

    Of a whole Qwen-Omni this is the config of its thinker, which writes all text; no talker is loaded. A checkpoint in
    the format of OpenGVLab's own code has that of transformers' type, converted.

    Raises ``ConfigError`` where there is no checkpoint or no model can have its config, and ``UnsupportedModel`` where
    transformers does not know the architecture, or an adapter lies beside the weights.
    """
    check_directory(model_dir)
    _refuse_adapter(model_dir)
    fields = read_json(model_dir / "config.json")
    _check_counts(fields, model_dir)
    config = _convert(fields, model_dir) if is_internvl_chat(fields) else _read_own(fields, model_dir)
    check_shards(model_dir, getattr(config, "transformers_weights", None))
    return config


def _read_own(fields: dict[str, Any], model_dir: Path) -> Any:
    """Read a config of one of transformers' types, by its code."""
    from transformers import AutoConfig

    try:
        return _take_thinker(AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False))
    except Exception as exc:  # its own readers, and those of each architecture's config, raise what they like
        raise UnsupportedModel(f"{str(model_dir)!r} {_explain_unread(fields, exc)}") from exc


def _convert(fields: dict[str, Any], model_dir: Path) -> Any:
    """Make the config of one of transformers' types of the fields of OpenGVLab's own."""
    from transformers import CONFIG_MAPPING

    from trinity.preprocess.checkpoint.internvl_format import convert_fields

    fields = convert_fields(fields, model_dir)
    try:
        return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    except Exception as exc:
        raise ConfigError(
            f"{str(model_dir)!r} has a config that transformers cannot read once it is converted "
            f"({type(exc).__name__}: {exc!s:.300}); mend it"
        ) from exc


def _refuse_adapter(model_dir: Path) -> None:
    """Raise ``UnsupportedModel`` for an adapter: a host with peft would serve it, and one without the bare weights."""
    if (model_dir / ADAPTER).is_file():
        raise UnsupportedModel(
            f"{str(model_dir)!r} has an adapter (LoRA) beside the weights ({ADAPTER}), which transformers adds "
            "where the package peft is installed and elsewhere leaves out: merge it into them (merge_and_unload() of "
            "peft), or remove it to serve the weights without it"
        )


def _explain_unread(fields: dict[str, Any], problem: Exception) -> str:
    """Say why transformers does not read a config: for its type, for code that is never run, or for what is in it."""
    from transformers import CONFIG_MAPPING, __version__

    kind = fields.get("model_type")
    if isinstance(kind, str) and kind not in CONFIG_MAPPING and fields.get("auto_map"):
        kin = _KIN.get(kind, "take a checkpoint in transformers' own format")
        return (
            f"is of type {show(kind)}, whose code lies in the checkpoint itself. Such code is never run here, and "
            f"transformers {__version__} has no type of that name; {kin}. docs/models.md lists what serves"
        )
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        return f"has a config that transformers cannot read ({type(problem).__name__}: {problem!s:.300}); mend it"
    return (
        f"is of a type that transformers {__version__} does not know: {show(kind)}; a later release may. "
        f"{explain_how_to_add()}"
    )


def _take_thinker(config: Any) -> Any:
    """Return the config of the thinker in a model that thinks and talks, with what is said of the whole; else itself.

    The thinker's weights are named "thinker." there, a prefix that transformers knows to take off.
    """
    thinker = getattr(config, "thinker_config", None)
    if thinker is None:
        return config
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as NAMES

    names: Any = NAMES
    thinker.architectures = [names[thinker.model_type]]
    for name in ("dtype", "quantization_config"):
        if getattr(thinker, name, None) is None and getattr(config, name, None) is not None:
            setattr(thinker, name, getattr(config, name))
    return thinker


def read_json(path: Path) -> dict[str, Any]:
    """Read an object of JSON; empty where there is no such file. Raises ``ConfigError`` for a broken or huge one."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MOST_CONFIG_BYTES:
            raise ConfigError(f"{str(path)!r} is larger than {MOST_CONFIG_BYTES:,} bytes: no config is")
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as exc:  # no JSON, no text, or brackets without end
        raise ConfigError(f"{str(path)!r} is not valid JSON ({exc}); is the checkpoint complete?") from exc
    except OSError as exc:
        raise ConfigError(f"{str(path)!r} cannot be read ({exc})") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} is not an object of JSON but a {type(content).__name__}")
    return content


def _check_counts(fields: dict[str, Any], model_dir: Path) -> None:
    most = None
    for place, name, value in _fields(fields):
        check_form(name, place, value, model_dir)
        if name in _COUNTS and not _is_count(value):
            raise ConfigError(f"{str(model_dir)!r}: {place} is a whole number from 1 to 2**31, got {show(value)}")
        if name in _MEDIA_IDS and value is not None and not (type(value) is int and 0 <= value < MOST_ELEMENTS):
            raise ConfigError(f"{str(model_dir)!r}: {place} is the number of a token, got {show(value)}")
        if name in _LAYERS and isinstance(value, int) and value > FEW_LAYERS:
            most = most or max(FEW_LAYERS, count_tensors(model_dir))
            if value > most:
                raise ConfigError(
                    f"{str(model_dir)!r}: {place} says {value:,} layers, and there are no weights for them"
                )


def _fields(fields: dict[str, Any], above: str = "") -> Iterator[tuple[str, str, Any]]:
    for name, value in fields.items():
        if name == "head_dim" and type(value) is int and value == 0 == fields.get(_ROTATED, 1):
            continue
        yield f"{above}{name}", name, value
        if isinstance(value, dict):
            yield from _fields(value, f"{above}{name}.")


def _is_count(value: Any) -> bool:
    """Lists are for each layer, pairs for two edges; None leaves the size to the architecture."""
    if isinstance(value, list):
        return all(map(_is_count, value))
    return value is None or (type(value) is int and 1 <= value <= MOST_ELEMENTS)


def check_elements(model_dir: Path, elements: int) -> None:
    """Raise ``ConfigError`` if the weight files cannot have so many ``elements``: memory for the rest would be made."""
    files = [path for form in ("*.safetensors", "*.bin") for path in model_dir.glob(form)]
    if elements > ELEMENTS_PER_BYTE * sum(path.stat().st_size for path in files):
        raise ConfigError(
            f"the config in {str(model_dir)!r} describes {elements:,} weights, and its files have no room for them; "
            "is the checkpoint complete, and its config its own?"
        )


def count_tensors(model_dir: Path) -> int:
    """Count the tensors in a checkpoint's files of safetensors, by their headers alone; 0 for other formats."""
    return sum(len(list_tensors(path)) for path in model_dir.glob("*.safetensors"))


def list_tensors(path: Path) -> dict[str, str]:
    """List the names of a safetensors file's tensors and their types, by its header; {} where it cannot be read."""
    return {name: kind for name, (kind, _) in list_sizes(path).items()}


def list_sizes(path: Path) -> dict[str, tuple[str, int]]:
    """List the tensors of a safetensors file with type and bytes, by its header; {} where it cannot be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if length <= MOST_HEADER_BYTES else {}
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            spans = {name: entry["data_offsets"] for name, entry in entries.items()}
            return {
                name: (str(entry["dtype"]), int(spans[name][1] - spans[name][0])) for name, entry in entries.items()
            }
    except (OSError, ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
        return {}  # what is wrong with it is said when it is loaded


def _is_list(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(each) is kind for each in value)


_TEXT: _Form = (lambda value: isinstance(value, str), "a text")
_TEXTS: _Form = (_is_list(str), "a list of texts")
_WHOLE: _Form = (_is_list(int), "a list of whole numbers")
_FIELDS: _Form = (lambda value: isinstance(value, dict), "an object of JSON")
_FORMS: dict[str, _Form] = {
    "deepstack_visual_indexes": _WHOLE,
    "layer_types": _TEXTS,
    "layers_block_type": _TEXTS,
    "mrope_section": _WHOLE,
    "rope_parameters": _FIELDS,
    "rope_scaling": _FIELDS,
    "rope_type": _TEXT,
}


def check_form(name: str, place: str, value: Any, model_dir: Path) -> None:
    """Raise ``ConfigError`` if the value of this ``name``, which stands at ``place``, is of another type of JSON.

    None is left out, and so is a name that only transformers reads: it says itself what it lacks.
    """
    name = "rope_type" if name == "type" and "rope_" in place else name  # as older releases called it
    is_one, said = _FORMS.get(name, (None, ""))
    if is_one is not None and value is not None and not is_one(value):
        raise ConfigError(f"{str(model_dir)!r}: {place} is {said}, got {show(value)}; mend config.json")
