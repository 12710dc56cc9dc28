"""Digests of a checkpoint's files: of sampled pages, which takes milliseconds, and of every byte.

The sample tells two checkpoints apart in each tensor of which a page differs; only the whole tells a flipped bit. The
digest of a whole file is SHA-256, as ``sha256sum`` and model hubs have it, and is remembered by the file's inode, size
and times: within the process, and for large files in the user's cache, where processes of one host share it. The time
of the last change of the inode is among them, for a copy may keep the other one. What is no change of the content, a
file system that numbers its inodes anew or a changed owner, costs one more reading and no more.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trinity.errors import ConfigError

PATTERNS = ("config.json", "*.safetensors", "*.bin", "*.index.json")
PAGE = 4096
PAGES_OF_TENSOR = 4  # the first and the last, and two between
PAGES_OF_FILE = 256  # of a file whose tensors are not known
WHOLE_BYTES = 1 << 20  # files up to this size are read whole
MAX_HEADER = 100_000_000  # bytes of a safetensors header, as the format bounds it
CHUNK = 8 << 20
SHARED_BYTES = 64 << 20  # files from this size on are remembered beyond the process
LOCK_POLL_S = 0.2
FileKey = tuple[int, int, int, int, int]  # device, inode, size, times of the content's and the inode's change in ns
FileState = tuple[int, int, int]  # size and both times: what no file system numbers anew
LoadedFiles = tuple[tuple[str, FileState], ...]  # a checkpoint's files by name, as they were at some time
MOST_REMEMBERED = 1 << 12  # files; more come where inodes are numbered anew
_lock = threading.Lock()
_samples: dict[FileKey, str] = {}
_wholes: dict[FileKey, str] = {}


def list_weight_files(directory: Path) -> list[Path]:
    """List config and weights of a checkpoint, by name: the files that transformers would load.

    States of an optimizer and a second copy in another format do not count. Where it cannot be told which files are
    loaded (names of their own in the config, an adapter, none of the usual names), all weights do. Raises
    ``ConfigError`` if there is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"the model directory {directory} does not exist; give a directory in transformers' layout")
    found = _list_loaded(directory) or [path for pattern in PATTERNS for path in directory.glob(pattern)]
    return sorted({path for path in found if path.is_file()})


def _list_loaded(directory: Path) -> list[Path]:
    """List the config and one file, or an index with its shards; safetensors come before pickles. [] if unsure."""
    config = directory / "config.json"
    if (directory / "adapter_config.json").exists() or "transformers_weights" in _read_object(config):
        return []
    for name in ("model.safetensors", "pytorch_model.bin"):
        index = directory / f"{name}.index.json"
        if (directory / name).is_file():
            return [config, directory / name]
        if index.is_file():
            shards = _read_object(index).get("weight_map")
            named = {str(each) for each in shards.values()} if isinstance(shards, dict) else set()
            plain = named and all(Path(each).name == each for each in named)
            return [config, index, *(directory / each for each in named)] if plain else []
    return []


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most ``MAX_HEADER`` bytes; {} if it is none."""
    with suppress(OSError, ValueError, RecursionError):
        if path.is_file() and path.stat().st_size <= MAX_HEADER:
            found = json.loads(path.read_bytes())
            return found if isinstance(found, dict) else {}
    return {}


def identify_files(directory: Path) -> LoadedFiles:
    """Return what tells the files of a checkpoint from others that take their place, or are written over, later.

    Whoever loads them asks before: a digest is that of the weights that serve only while this stays the same. Raises
    ``ConfigError`` if there is no such directory, or a file is replaced just now.
    """
    try:
        return tuple((path.name, _stat_key(path.stat())[2:]) for path in list_weight_files(directory))
    except OSError as error:
        raise ConfigError(f"the files in {directory} change: {error}") from error


def are_only_touched(loaded: LoadedFiles, now: LoadedFiles) -> bool:
    """Tell if nothing but inodes have changed, as by a new owner or link, or by one who writes and sets the time back.

    A look at the content tells these apart.
    """
    return [(name, state[:2]) for name, state in loaded] == [(name, state[:2]) for name, state in now]


def sample_digest(directory: Path) -> str:
    """Digest names, sizes and sampled pages of every file: of each tensor, where the format tells them."""
    found = hashlib.sha256()
    for path in list_weight_files(directory):
        with path.open("rb") as file:
            key = _file_key(file.fileno())
            digest = _samples.get(key, "")
            if not digest:
                digest = _sample(file.fileno(), key[2], path.suffix == ".safetensors")
                _remember(_samples, key, digest)
        found.update(f"{path.name}:{key[2]}:{digest};".encode())
    return found.hexdigest()


def whole_digest(directory: Path, stop: Callable[[], bool] = lambda: False, loaded: LoadedFiles | None = None) -> str:
    """Digest every byte of every file; files that did not change since are not read again.

    ``stop`` is asked now and then; once it is true, ``concurrent.futures.CancelledError`` is raised. Returns "" where
    the files are not those that were ``loaded`` any more: nobody can tell what these held.
    """
    if _are_replaced(directory, loaded):
        return ""
    found = combine(
        {path.name: _whole(path, stop) for path in list_weight_files(directory) if not path.name.endswith(".json")}
    )
    return "" if _are_replaced(directory, loaded) else found


def _are_replaced(directory: Path, loaded: LoadedFiles | None) -> bool:
    if loaded is None:
        return False
    try:
        return identify_files(directory) != loaded
    except ConfigError:  # they are gone
        return True


def known_whole_digest(directory: Path, loaded: LoadedFiles | None = None) -> str:
    """Return ``whole_digest`` where it can be told without reading a file, else ""."""
    if _are_replaced(directory, loaded):
        return ""
    found = {}
    for path in list_weight_files(directory):
        if path.name.endswith(".json"):
            continue
        with path.open("rb") as file:
            key = _file_key(file.fileno())
        found[path.name] = _wholes.get(key) or _read_shared(key)
        if not found[path.name]:
            return ""
    return combine(found)


def combine(digests: dict[str, str]) -> str:
    """Digest of the digests of files, by name."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def hash_file(path: Path, stop: Callable[[], bool] = lambda: False) -> str:
    """Return the SHA-256 of a file, which is read. Raises ``CancelledError`` once ``stop`` returns True."""
    found = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK):
            if stop():
                raise CancelledError
            found.update(chunk)
    return found.hexdigest()


# ---------------------------------------------------------------- samples


def _file_key(descriptor: int) -> FileKey:
    return _stat_key(os.fstat(descriptor))


def _stat_key(stat: os.stat_result) -> FileKey:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _remember(cache: dict[FileKey, str], key: FileKey, digest: str) -> None:
    with _lock:
        for old in [each for each in cache if each[:2] == key[:2] or len(cache) >= MOST_REMEMBERED]:
            del cache[old]
        cache[key] = digest


def _sample(descriptor: int, size: int, safetensors: bool) -> str:
    spans = _tensor_spans(descriptor, size) if safetensors else None
    if size <= WHOLE_BYTES:
        places = [(0, size)]
    elif spans is None:
        places = [(at, PAGE) for at in range(0, size, max(PAGE, size // PAGES_OF_FILE))]
    else:
        header, *tensors = spans
        places = [header, *(place for span in tensors for place in _pages(*span))]
    found = hashlib.sha256()
    for start, length in places:
        found.update(os.pread(descriptor, length, start))
    return found.hexdigest()


def _pages(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of a tensor's first and last page and of those at equal distances between."""
    length = end - start
    if length <= PAGES_OF_TENSOR * PAGE:
        yield start, length
        return
    for index in range(PAGES_OF_TENSOR):
        yield start + index * (length - PAGE) // (PAGES_OF_TENSOR - 1), PAGE


def _tensor_spans(descriptor: int, size: int) -> list[tuple[int, int]] | None:
    """Return (start, end) of a safetensors file's header and tensors; None if it is no such file."""
    begin = 8 + int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if begin > min(size, MAX_HEADER):
        return None
    try:
        header = json.loads(os.pread(descriptor, begin - 8, 8))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        spans = sorted((begin + int(first), begin + int(last)) for first, last in offsets)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    within = all(begin <= first <= last <= size for first, last in spans)
    return [(0, begin), *spans] if within else None


# ---------------------------------------------------------------- whole files


def _whole(path: Path, stop: Callable[[], bool]) -> str:
    with path.open("rb") as file:
        key = _file_key(file.fileno())
    digest = _wholes.get(key, "")
    if not digest:
        with _one_at_a_time(key, stop):
            digest = _read_shared(key)
            if not digest:
                digest = hash_file(path, stop)
                _write_shared(key, digest)
        _remember(_wholes, key, digest)
    return digest


def _shared_path(key: FileKey) -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "trinity" / "weights" / f"{key[0]}-{key[1]}"


def _read_shared(key: FileKey) -> str:
    """Return the digest that another process has left in the user's cache for this file as it is now, or ""."""
    if key[2] >= SHARED_BYTES:
        with suppress(OSError, RuntimeError, ValueError):
            *found, digest = _shared_path(key).read_text()[:256].split()
            if (tuple(map(int, found)), len(digest)) == (key[2:], 64):
                return digest
    return ""


def _write_shared(key: FileKey, digest: str) -> None:
    if key[2] >= SHARED_BYTES:
        with suppress(OSError, RuntimeError):
            _shared_path(key).write_text(f"{' '.join(map(str, key[2:]))} {digest}\n")


@contextmanager
def _one_at_a_time(key: FileKey, stop: Callable[[], bool]) -> Iterator[None]:
    """Keep other processes of this user from reading the same large file meanwhile, where there is a cache."""
    if key[2] < SHARED_BYTES:
        yield
        return
    try:
        path = _shared_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except (OSError, RuntimeError):  # no home, or a read-only one
        yield
        return
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if stop():
                    raise CancelledError from None
                time.sleep(LOCK_POLL_S)
        yield
