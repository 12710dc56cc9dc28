"""Prompts of the proof: one image, three of odd sizes over turns, and the same with another image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL import Image

SIZES = ((80, 60), (90, 130), (150, 61))  # width, height in pixels
_QUESTION = "What is in this picture?"


@dataclass(frozen=True)
class ProofPrompt:
    """A prompt as messages, their image parts without images, and the images in order."""

    name: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[Image.Image, ...]


def make_picture(seed: int, width: int, height: int) -> Image.Image:
    """Make an image of a few coarse patches of colour."""
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


def _turn(role: str, *parts: str) -> dict[str, Any]:
    content = [{"type": "image"} if part == "<image>" else {"type": "text", "text": part} for part in parts]
    return {"role": role, "content": content}


def one_image(seed: int = 0) -> ProofPrompt:
    """Make the prompt with one image."""
    return ProofPrompt("one image", (_turn("user", "<image>", _QUESTION),), (make_picture(seed, *SIZES[0]),))


def three_images() -> ProofPrompt:
    """Make the prompt with three images of odd sizes over two turns of a user."""
    messages = (
        _turn("user", "<image>", _QUESTION),
        _turn("assistant", "A boat."),
        _turn("user", "<image>", "<image>", "Compare them."),
    )
    images = tuple(make_picture(seed, *size) for seed, size in enumerate(SIZES, 5))
    return ProofPrompt("three images", messages, images)


def text_alone() -> ProofPrompt:
    """Make the prompt without images."""
    return ProofPrompt("text", (_turn("user", "Describe a red boat in a few words."),), ())
