"""Models by name: a directory of this machine first, then Hugging Face's cache, and the hub only where allowed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError, describe_error
from trinity.errors.arguments import show
from trinity.errors.files import read_regular_file

_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII)
_FILES = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt", "conversation.py"]
# Of a repository no pickle, and no code but the chat templates of InternVL's, which are read as text and never run.
ADAPTER = "adapter_config.json"
_INDEX = "model.safetensors.index.json"


def locate_model(model: str | Path, download: bool = False) -> Path:
    """Return the directory of a model: ``model`` itself, or the snapshot that "org/name" or "org/name@revision" names.

    ``download`` (False): fetch what the cache lacks, which may take long and blocks. Where a directory of this name
    exists it is meant. Raises ``ConfigError`` for an id that is not to be had.
    """
    found = _ID.fullmatch(model) if isinstance(model, str) and ".." not in model else None
    if found is None or os.path.lexists(model):
        return Path(model)
    name, revision = found["id"], found["revision"]
    folder = _find_cached(name, revision)
    if folder is not None and (not download or _is_whole(folder)):
        return folder
    if download:
        return _download(name, revision)
    command = f"hf download {name}{f' --revision {revision}' if revision else ''}"
    raise ConfigError(
        f"model directory {model!r} does not exist, and no model of that id is in Hugging Face's cache ({_cache()}); "
        f"give the directory of a transformers checkpoint, run '{command}', or allow it with Pipeline(download=True)"
    )


def _find_cached(name: str, revision: str | None) -> Path | None:
    """Return the snapshot in the cache, None if there is none."""
    try:
        return Path(_snapshot(name, revision, local_files_only=True))
    except (OSError, ValueError):  # LocalEntryNotFoundError; a name that the hub cannot have
        return None


def _download(name: str, revision: str | None) -> Path:
    try:
        return Path(_snapshot(name, revision, allow_patterns=_FILES))
    except Exception as error:  # of the hub's client, of HTTP, of the disk
        raise ConfigError(
            f"model {name!r} cannot be downloaded ({describe_error(error, 300)}); check id, revision, HF_TOKEN and "
            "HF_HUB_OFFLINE, or give a directory"
        ) from error


def _snapshot(name: str, revision: str | None, **options: Any) -> str:
    from huggingface_hub import snapshot_download  # a quarter of a second, which directories do not pay

    return str(snapshot_download(name, revision=revision, **options))


def _cache() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def _is_whole(folder: Path) -> bool:
    """Tell if the weights are there as well: others may have fetched a config alone."""
    try:
        index = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        return all((folder / each).exists() for each in set(index.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return (folder / "config.json").exists() and any(folder.glob("*.safetensors"))


def explain_no_config(path: Path) -> str:
    """Explain what a folder or file without a ``config.json`` is, as far as its files show it, and what to do."""
    if not os.path.exists(path):  # False as well for a name that no file can have
        return "does not exist; give the directory of a transformers checkpoint"
    try:
        names = [path.name] if path.is_file() else sorted(os.listdir(path))
    except OSError:  # it may not be listed
        names = []
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf:
        return (
            f"holds weights of another program ({show(gguf[0])} is GGUF), which transformers does not serve at full "
            "speed and trinity does not read; give the folder of safetensors that it was converted from"
        )
    if path.is_file():
        return "is a file; give the directory of a transformers checkpoint"
    if ADAPTER in names:
        base = _base_of(path / ADAPTER)
        return (
            f"has an adapter (LoRA) and no model ({ADAPTER} without config.json): merge it into its base model"
            f"{base and f', {base},'} with merge_and_unload() of peft, save that, and give its folder"
        )
    if "params.json" in names:
        return (
            "is in the original format of Llama or Mistral (params.json without config.json), which transformers does "
            "not read: take the same model's folder in transformers' format, its hub id ends in -hf or has a "
            "config.json, or convert it with transformers' convert_*_weights_to_hf.py"
        )
    return "has no config.json; give the directory of a transformers checkpoint"


def _base_of(adapter: Path) -> str:
    """Return the base model that an adapter names, to be shown; "" where it names none."""
    try:
        found = json.loads(read_regular_file(adapter, most=1 << 20))["base_model_name_or_path"]
    except (ConfigError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return show(found) if isinstance(found, str) and found else ""
