"""Rename a checkpoint's vision tower keys to those of transformers before 5.17 and of vLLM's LLaVA.

A loader that does not find ``vision_tower.vision_model.*`` leaves the tower's weights random, some without an error.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

HEADER = struct.Struct("<Q")


def rename_vision_keys(source: Path, target: Path) -> Path:
    """Copy the checkpoint with the vision tower's keys under their older names, once; returns ``target``."""
    if not (target / "config.json").exists():
        target.mkdir(parents=True, exist_ok=True)
        # config.json comes last: where it exists, the copy is complete.
        for file in sorted(source.iterdir(), key=lambda each: each.name == "config.json"):
            _rewrite(file, target / file.name) if file.suffix == ".safetensors" else shutil.copy(file, target)
    return target


def _rewrite(source: Path, target: Path) -> None:
    with source.open("rb") as file, target.open("wb") as copy:
        (size,) = HEADER.unpack(file.read(HEADER.size))
        header = json.dumps({_key(key): value for key, value in json.loads(file.read(size)).items()}).encode()
        header += b" " * (-len(header) % 8)
        copy.write(HEADER.pack(len(header)) + header)
        shutil.copyfileobj(file, copy)


def _key(name: str) -> str:
    prefix = "vision_tower."
    if not name.startswith(prefix) or name.startswith(prefix + "vision_model."):
        return name
    return f"{prefix}vision_model.{name[len(prefix) :]}"
