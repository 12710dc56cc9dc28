"""Prompts of the proof: one image, three of odd sizes over turns, the same with another image, and clips of sound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

SIZES = ((80, 60), (90, 130), (150, 61))  # width, height in pixels
_QUESTION = "What is in this picture?"
_HEARD = "What is said?"


@dataclass(frozen=True)
class ProofPrompt:
    """A prompt as messages, their parts of media without the media, and the images and clips in order."""

    name: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[Image.Image, ...]
    clips: tuple[np.ndarray, ...] = ()

    def fill(self, media: Mapping[str, Iterator[Any]], key: str = "") -> list[dict[str, Any]]:
        """Write the messages with ``media``, in order by kind, each in its part under its kind, or under ``key``."""

        def fill_part(part: dict[str, Any]) -> dict[str, Any]:
            kind = part["type"]
            return {**part, key or kind: next(media[kind])} if kind in media else part

        return [{**each, "content": [fill_part(part) for part in each["content"]]} for each in self.messages]


def make_picture(seed: int, width: int, height: int) -> Image.Image:
    """Make an image of a few coarse patches of colour."""
    import numpy as np
    from PIL import Image

    coarse = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


def _turn(role: str, *parts: str) -> dict[str, Any]:
    media = ("<image>", "<audio>")
    content = [{"type": each.strip("<>")} if each in media else {"type": "text", "text": each} for each in parts]
    return {"role": role, "content": content}


def one_image(seed: int = 0) -> ProofPrompt:
    """Make the prompt with one image."""
    return ask_about(make_picture(seed, *SIZES[0]))


def ask_about(image: Image.Image) -> ProofPrompt:
    """Make the prompt with this image alone."""
    return ProofPrompt("one image", (_turn("user", "<image>", _QUESTION),), (image,))


def image_beside(text: str) -> ProofPrompt:
    """Make a prompt with one image and a text behind it."""
    return ProofPrompt("an image beside a text", (_turn("user", "<image>", text),), one_image().images)


def three_images() -> ProofPrompt:
    """Make the prompt with three images of odd sizes over two turns of a user."""
    messages = (
        _turn("user", "<image>", _QUESTION),
        _turn("assistant", "A boat."),
        _turn("user", "<image>", "<image>", "Compare them."),
    )
    images = tuple(make_picture(seed, *size) for seed, size in enumerate(SIZES, 5))
    return ProofPrompt("three images", messages, images)


def square_beside() -> ProofPrompt:
    """Make a prompt with a square image, which fills whatever it is cut or padded to, beside one that does not."""
    images = (make_picture(8, 56, 56), make_picture(9, *SIZES[1]))
    return ProofPrompt("a square beside another", (_turn("user", "<image>", "<image>", "Compare them."),), images)


def long_question() -> ProofPrompt:
    """Make a prompt with one image, of another size, in front of a longer text."""
    turn = _turn("user", "<image>", "Question: who has left the boat there in the morning, and why? Answer:")
    return ProofPrompt("an image and a longer text", (turn,), (make_picture(7, *SIZES[2]),))


def text_alone() -> ProofPrompt:
    """Make the prompt without images."""
    return ProofPrompt("text", (_turn("user", "Describe a red boat in a few words."),), ())


def make_clip(seed: int, seconds: float, rate: int) -> np.ndarray:
    """Make a clip of three gliding tones and noise, float32 [samples], ``rate`` of them each second."""
    import numpy as np

    draw, at = np.random.default_rng(seed), np.arange(int(seconds * rate)) / rate
    tones = [np.sin(2 * np.pi * pitch * at * (1 + 0.3 * at)) for pitch in draw.uniform(120, 1100, 3)]
    sound: np.ndarray = (0.1 * np.sum(tones, axis=0) + 0.02 * draw.standard_normal(len(at))).astype(np.float32)
    return sound


def one_clip(rate: int, seed: int = 0, seconds: float = 0.73) -> ProofPrompt:
    """Make the prompt with one clip."""
    name = "one clip" if seconds < 1 else "a long clip"
    return ProofPrompt(name, (_turn("user", "<audio>", _HEARD),), (), (make_clip(seed, seconds, rate),))


def two_clips(rate: int) -> ProofPrompt:
    """Make the prompt with two clips of odd lengths over two turns of a user."""
    turns = (_turn("user", "<audio>", _HEARD), _turn("assistant", "A bell."), _turn("user", "<audio>", "And this?"))
    return ProofPrompt("two clips", turns, (), (make_clip(5, 1.117, rate), make_clip(6, 0.531, rate)))


def image_and_clip(rate: int) -> ProofPrompt:
    """Make the prompt with an image and a clip."""
    turns = (_turn("user", "<image>", "<audio>", "Do they agree?"),)
    return ProofPrompt("an image and a clip", turns, (make_picture(9, *SIZES[1]),), (make_clip(7, 0.877, rate),))
