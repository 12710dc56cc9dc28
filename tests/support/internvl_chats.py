"""Chats of ``support.internvl_answers``, as requests, and the images in them; folders that the tests share."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.checkpoint_files import CACHE
from support.internvl_folders import PUBLISHED, write_published
from trinity.request import Request, Sampling

OUTPUTS = 12


def needs_sentencepiece() -> None:
    """Skip a test that reads a model of sentencepiece where what reads it is not installed."""
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")


@cache
def published(name: str) -> Path:
    """Return the folder of one of ``PUBLISHED``, written once per process. Read it only."""
    CACHE.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="published-", dir=CACHE))
    target = CACHE / f"published-{scratch.name}-{name}"
    write_published(scratch, PUBLISHED[name])
    scratch.rename(target)
    return target


def copy_published(name: str, folder: Path) -> Path:
    """Copy such a folder, to change it."""
    return Path(shutil.copytree(published(name), folder / name))


def picture(width: int, height: int, seed: int) -> Image.Image:
    """Make an image that is the same to the bit wherever it is made."""
    y, x = np.mgrid[:height, :width]
    red, green = (x * (3 + seed) + y * 2 + seed * 40) % 256, (x * 2 + y * (5 + seed)) % 256
    blue = ((x // 5 + y // 7) * 31 + seed * 90) % 256
    return Image.fromarray(np.stack([red, green, blue], -1).astype(np.uint8))


def requests() -> list[Request]:
    """Return the chats that the original was asked: an image, three of odd sizes, text alone, and a second turn."""
    one, seen = picture(200, 90, 0), picture(150, 130, 4)
    three = [picture(61, 301, 1), picture(56, 56, 2), picture(333, 111, 3)]
    numbered = [part for at, each in enumerate(three) for part in (_text(f"Image-{at + 1}: "), _image(each))]
    chats: dict[str, Any] = {
        "one": [_user(_image(one), _text("Describe this image"))],
        "three": [_user(*numbered, _text("What is in these?"))],
        "text": [{"role": "user", "content": "What is the answer to 你好?  Two  spaces"}],
        "turns": [
            _user(_image(seen), _text("what is this")),
            {"role": "assistant", "content": "a cat in the picture"},
            {"role": "user", "content": "And in short words?"},
        ],
    }
    greedy = Sampling(ignore_eos=True)
    return [Request(messages=chats[name], max_tokens=OUTPUTS, sampling=greedy, request_id=name) for name in chats]


def _user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(image: Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": image}
