"""Checks the files of a checkpoint's folder before a library opens them: their kind, their sizes, what an index names.

Libraries open what they find: a pipe that nobody writes to blocks them for good, a device fills memory, and so does a
tokenizer's file of three gigabytes. An index of weights may name any file of the host.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError
from trinity.errors.arguments import show
from trinity.errors.files import read_regular_file

MOST_CONFIG_BYTES = 16 << 20  # the largest published configs have some 100 KB
MOST_INDEX_BYTES = 64 << 20  # of an index of weights: those of a trillion of them have some 15 MB
MOST_TEXT_BYTES = 256 << 20  # of a tokenizer's files: the largest published ones have some 40 MB
_INDEX = ".index.json"
_TOKENIZER = "tokenizer_config.json"  # lists added tokens: a hundred thousand codes of images or sounds in some
_CONFIGS = ("config.json", "chat_template.json", ".jinja", ".py")
_TEXTS = (".json", ".txt", ".model", ".tiktoken", ".vocab", ".bpe", ".spm", ".codes", ".tokenizer")
"""Ends of names that libraries read whole. All else is weights, or nothing that is read: logs, videos, archives."""
_TEMPLATES = "additional_chat_templates"  # the one folder within that transformers reads
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in transformers' order


def check_files(directory: Path) -> None:
    """Raise ``ConfigError`` for a file that is none, such as a pipe, and for one too large to be what its name says.

    Links to files are files: those of Hugging Face's cache are links. Links to nothing are left to who needs them.
    """
    for path, found in _list_files(directory):
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(
                f"{str(path)!r} is {_name_kind(found.st_mode)} and no file, and would be opened as one; take it out "
                "of the checkpoint's directory, or put the checkpoint's own file there"
            )
        most = _find_bound(path.name)
        if most is not None and found.st_size > most:
            raise ConfigError(
                f"{str(path)!r} is larger than {most:,} bytes: no {_describe(path.name)} is; is the checkpoint its "
                "own? Take the file out of its directory if it is none of the model's"
            )


def _list_files(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise ConfigError(f"the model directory {str(directory)!r} cannot be read ({error.strerror})") from error
    for name in names:
        try:
            found = os.stat(directory / name)
        except OSError:  # a link to nothing or to itself, a file that is just taken away
            continue
        if not stat.S_ISDIR(found.st_mode):
            yield directory / name, found
        elif name == _TEMPLATES:
            yield from _list_files(directory / name)


def _name_kind(mode: int) -> str:
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def _find_bound(name: str) -> int | None:
    if name.endswith(_INDEX):
        return MOST_INDEX_BYTES
    if name.endswith(_CONFIGS) and name != _TOKENIZER:
        return MOST_CONFIG_BYTES
    return MOST_TEXT_BYTES if name.endswith(_TEXTS) else None


def _describe(name: str) -> str:
    most = _find_bound(name)
    if most == MOST_INDEX_BYTES:
        return "index of weights"
    return "config" if most == MOST_CONFIG_BYTES else "tokenizer"


def check_shards(directory: Path, named: Any = None) -> None:
    """Raise ``ConfigError`` if the index of weights that transformers would follow names anything but files beside it.

    ``named`` (None): what the config says of ``transformers_weights``, a file of weights or an index.
    """
    index = _find_index(directory, named)
    if index is None:
        return
    try:
        found = index.stat()
    except OSError:  # taken away just now
        return
    _check_index(index, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


def _find_index(directory: Path, named: Any) -> Path | None:
    if named is not None:
        if not _is_plain(named):
            raise ConfigError(
                f"the config in {str(directory)!r} has transformers_weights={show(named)}, which is not the name of a "
                "file in that directory; name one, or take the entry out"
            )
        return directory / named if named.endswith(_INDEX) and (directory / named).is_file() else None
    for name in _WEIGHTS:
        if (directory / name).is_file():
            return None
        if (directory / f"{name}{_INDEX}").is_file():
            return directory / f"{name}{_INDEX}"
    return None


@lru_cache(maxsize=64)
def _check_index(index: Path, state: tuple[int, ...]) -> None:
    """Check one index, which ``state`` tells from what was there before: a load asks several times."""
    ending = Path(index.name.removesuffix(_INDEX)).suffix
    try:
        content = json.loads(read_regular_file(index, most=MOST_INDEX_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(index)!r} is not valid JSON ({error}); is the checkpoint complete?") from error
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict):
        raise ConfigError(f"{str(index)!r} has no weight_map of names of weights to files; is the checkpoint complete?")
    for weight, shard in shards.items():
        if not _is_plain(shard) or not shard.endswith(ending):
            raise ConfigError(
                f"{str(index)!r} has {show(weight)} in {show(shard)}, which is not the name of a {ending} file in the "
                "same directory; put the file there and name it so"
            )


def _is_plain(name: Any) -> bool:
    """Tell if this is the name of a file in a folder, and no path to anywhere else."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}
