"""Digests of checkpoints: the sample tells models apart, the whole tells a flipped bit, and neither reads in vain."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
from concurrent.futures import CancelledError
from itertools import count
from pathlib import Path

import pytest

from trinity.errors import ConfigError
from trinity.memory import weight_digests as digests
from trinity.memory.weight_digests import (
    are_only_touched,
    identify_files,
    known_whole_digest,
    list_weight_files,
    sample_digest,
    whole_digest,
)


def write_checkpoint(directory: Path, tensors: dict[str, bytes], name: str = "model.safetensors") -> Path:
    """A checkpoint as the safetensors format is published: the header's length, its JSON, then the tensors' bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    header, at = {}, 0
    for tensor, data in tensors.items():
        header[tensor] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    packed = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (directory / name).write_bytes(struct.pack("<Q", len(packed)) + packed + b"".join(tensors.values()))
    return directory


def flip(path: Path, at: int) -> None:
    """One bit, in place; the file's time changes as the system does it."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


SIZE = 3 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    made = random.Random(5)
    tensors = {"large": made.randbytes(SIZE), "small": made.randbytes(3000), "empty": b"", "last": made.randbytes(9000)}
    return write_checkpoint(tmp_path / "model", tensors)


def test_the_whole_is_what_sha256sum_says(checkpoint: Path) -> None:
    for path in list_weight_files(checkpoint):
        said = subprocess.run(["sha256sum", path], capture_output=True, text=True, check=True).stdout
        assert said.split()[0] == digests.hash_file(path)


def test_any_flipped_bit_changes_the_whole(checkpoint: Path) -> None:
    weights, found = checkpoint / "model.safetensors", {whole_digest(checkpoint)}
    for at in (0, 9, 5000, SIZE // 2, weights.stat().st_size - 1):
        flip(weights, at)
        found.add(whole_digest(checkpoint))
    assert len(found) == 6


def test_other_weights_of_the_same_size_have_another_sample(tmp_path: Path) -> None:
    one, two, again = (
        write_checkpoint(tmp_path / name, {"a": random.Random(seed).randbytes(SIZE), "b": bytes(100)})
        for name, seed in (("one", 1), ("two", 2), ("again", 1))
    )
    assert sample_digest(one) != sample_digest(two)
    assert sample_digest(one) == sample_digest(again)


@pytest.mark.parametrize("at", [4, 20, 90, -1, -5000, -9001, -11_999])
def test_every_small_tensor_and_the_header_are_in_the_sample(checkpoint: Path, at: int) -> None:
    before = sample_digest(checkpoint)
    weights = checkpoint / "model.safetensors"
    flip(weights, at % weights.stat().st_size)
    assert sample_digest(checkpoint) != before


def test_the_ends_of_a_large_tensor_are_in_the_sample_and_not_all_between(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    start = 8 + struct.unpack("<Q", weights.read_bytes()[:8])[0]
    found = {sample_digest(checkpoint)}
    for at in (start, start + SIZE - 1, start + (SIZE - digests.PAGE) // 3):
        flip(weights, at)
        found.add(sample_digest(checkpoint))
    assert len(found) == 4
    flip(weights, start + SIZE // 2 + 7)
    assert sample_digest(checkpoint) in found


def test_names_sizes_and_the_config_are_in_the_sample(checkpoint: Path) -> None:
    found = {sample_digest(checkpoint)}
    (checkpoint / "config.json").write_text('{"model_type": "qwen2"}')
    found.add(sample_digest(checkpoint))
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    found.add(sample_digest(checkpoint))
    write_checkpoint(checkpoint, {}, "more.safetensors")
    found.add(sample_digest(checkpoint))
    assert len(found) == 4


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b"[1, 2]",
        b'{"a": {"data_offsets": [0, 99999999999]}}',
        b'{"a": {"data_offsets": [-5000, 10]}}',
        b'{"a": {"data_offsets": [7]}}',
        b'{"a": 3}',
        b"[" * 100_000,
    ],
)
def test_a_broken_header_is_sampled_as_any_other_file(tmp_path: Path, header: bytes) -> None:
    """What is wrong with it is told by who loads it."""
    write_checkpoint(tmp_path, {})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", len(header)) + header + bytes(2 << 20))
    before = sample_digest(tmp_path)
    flip(weights, 8)
    assert sample_digest(tmp_path) != before
    weights.write_bytes(struct.pack("<Q", 2**64 - 1) + bytes(2 << 20))
    assert sample_digest(tmp_path)


def test_pickled_weights_are_sampled_throughout(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(random.Random(1).randbytes(SIZE))
    before = sample_digest(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(random.Random(2).randbytes(SIZE))
    assert sample_digest(tmp_path) != before


def listed(directory: Path) -> list[str]:
    return [path.name for path in list_weight_files(directory)]


def add_files(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).write_bytes(b"{}")


def test_only_what_transformers_would_load_counts(checkpoint: Path) -> None:
    """Optimizers, arguments of a training and copies in other formats change nothing, as the loader says itself."""
    sample, whole = sample_digest(checkpoint), whole_digest(checkpoint)
    add_files(checkpoint, "training_args.bin", "optimizer.bin", "pytorch_model.bin", "consolidated.safetensors")
    add_files(checkpoint, "consolidated.safetensors.index.json", "pytorch_model.bin.index.json")
    assert listed(checkpoint) == ["config.json", "model.safetensors"]
    assert (sample_digest(checkpoint), whole_digest(checkpoint)) == (sample, whole)


@pytest.mark.parametrize(("stem", "ending"), [("model", "safetensors"), ("pytorch_model", "bin")])
def test_the_shards_of_an_index_count_and_no_others(stem: str, ending: str, tmp_path: Path) -> None:
    shards = [f"{stem}-0000{number}-of-00002.{ending}" for number in (1, 2)]
    add_files(tmp_path, "config.json", *shards, f"{stem}-00001-of-00009.{ending}", "scheduler.bin", "old.safetensors")
    index = f"{stem}.{ending}.index.json"
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}))
    assert listed(tmp_path) == sorted(["config.json", *shards, index])


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../a.bin"}}', "[" * 100_000]
)
def test_where_it_cannot_be_told_what_is_loaded_all_counts(index: str, tmp_path: Path) -> None:
    add_files(tmp_path, "config.json", "model-00001-of-00001.safetensors", "other.bin")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert len(listed(tmp_path)) == 4
    (tmp_path / "model.safetensors.index.json").unlink()
    assert len(listed(tmp_path)) == 3
    add_files(tmp_path, "model.safetensors")
    assert listed(tmp_path) == ["config.json", "model.safetensors"]
    (tmp_path / "config.json").write_text('{"transformers_weights": "other.bin"}')
    assert len(listed(tmp_path)) == 4
    (tmp_path / "config.json").write_text("{}")
    add_files(tmp_path, "adapter_config.json")
    assert len(listed(tmp_path)) == 4


def test_a_missing_directory_is_a_config_error(tmp_path: Path) -> None:
    for ask in (sample_digest, whole_digest, known_whole_digest):
        with pytest.raises(ConfigError, match="does not exist"):
            ask(tmp_path / "none")


# ---------------------------------------------------------------- what is remembered


def test_a_file_is_read_once_until_it_changes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    plain = digests.hash_file

    def counted(path: Path, *rest: object) -> str:
        read.append(path.name)
        return plain(path)

    monkeypatch.setattr(digests, "hash_file", counted)
    assert known_whole_digest(checkpoint) == ""
    first = whole_digest(checkpoint)
    assert whole_digest(checkpoint) == known_whole_digest(checkpoint) == first
    assert read == ["model.safetensors"]
    flip(checkpoint / "model.safetensors", 5000)
    assert known_whole_digest(checkpoint) == ""
    assert whole_digest(checkpoint) != first
    assert len(read) == 2


@pytest.mark.parametrize("shared", [False, True], ids=["in the process", "beyond it"])
def test_what_is_written_over_with_its_time_set_back_is_read_again(
    shared: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``rsync --times --inplace`` does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SHARED_BYTES", 1000 if shared else 1 << 40)
    weights = checkpoint / "model.safetensors"
    loaded, sample, whole = identify_files(checkpoint), sample_digest(checkpoint), whole_digest(checkpoint)
    before = weights.stat()
    flip(weights, weights.stat().st_size - 1)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights.stat().st_ino == before.st_ino
    if shared:
        monkeypatch.setattr(digests, "_wholes", {})
    assert sample_digest(checkpoint) != sample
    assert known_whole_digest(checkpoint) == ""
    assert whole_digest(checkpoint) != whole
    assert identify_files(checkpoint) != loaded
    assert are_only_touched(loaded, identify_files(checkpoint)), "the content has to tell it"


def test_a_file_system_that_numbers_its_inodes_anew_costs_readings_alone(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SHARED_BYTES", 1000)
    monkeypatch.setattr(digests, "MOST_REMEMBERED", 5)
    for name in ("_samples", "_wholes"):
        monkeypatch.setattr(digests, name, {})
    stat_key, numbers = digests._stat_key, count(1)
    monkeypatch.setattr(digests, "_stat_key", lambda stat: (stat_key(stat)[0], next(numbers), *stat_key(stat)[2:]))
    loaded, sample, whole = identify_files(checkpoint), sample_digest(checkpoint), whole_digest(checkpoint)
    for _ in range(5):
        assert (identify_files(checkpoint), sample_digest(checkpoint)) == (loaded, sample)
        assert whole_digest(checkpoint, loaded=loaded) == whole
    assert max(len(digests._samples), len(digests._wholes)) <= 5


def test_large_files_are_remembered_for_other_processes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SHARED_BYTES", 1000)
    monkeypatch.setattr(digests, "_wholes", {})
    first = whole_digest(checkpoint)
    monkeypatch.setattr(digests, "_wholes", {})  # as another process begins
    monkeypatch.setattr(digests, "hash_file", None)
    assert known_whole_digest(checkpoint) == whole_digest(checkpoint) == first
    monkeypatch.setattr(digests, "_wholes", {})
    (entry,) = (tmp_path / "cache").rglob("weights/*")
    for nonsense in ("", "1 2 3", "x" * 5000):
        entry.write_text(nonsense)
        assert known_whole_digest(checkpoint) == ""


@pytest.mark.parametrize("home", ["read-only", "a file", "none"])
def test_without_a_cache_folder_it_is_hashed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setattr(digests, "SHARED_BYTES", 1000)
    monkeypatch.setattr(digests, "_wholes", {})
    wanted = digests.combine({"model.safetensors": digests.hash_file(checkpoint / "model.safetensors")})
    (tmp_path / "file").write_text("")
    where = {"read-only": "/proc/nothing", "a file": str(tmp_path / "file"), "none": "/dev/null/x"}[home]
    monkeypatch.setenv("XDG_CACHE_HOME", where)
    assert whole_digest(checkpoint) == wanted


def test_hashing_ends_when_it_is_stopped(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CancelledError):
        whole_digest(checkpoint, lambda: True)
    import fcntl

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(digests, "SHARED_BYTES", 1000)
    with (checkpoint / "model.safetensors").open("rb") as file:
        key = digests._file_key(file.fileno())
    path = digests._shared_path(key)
    path.parent.mkdir(parents=True)
    with path.open("a") as held:  # another process hashes it
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CancelledError):
            whole_digest(checkpoint, lambda: True)
    assert os.path.getsize(path) == 0
