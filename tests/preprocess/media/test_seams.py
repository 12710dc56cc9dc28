"""Seams of prompts: found by showing a processor short prompts, and equal to what it writes of others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from support.tried_processors import own_processor, process
from trinity.preprocess.media.image_calls import Seams, find_seams
from trinity.request import Request

Expand = Callable[[str, int], str]


def replacing(expansion: str, before: str = "", behind: str = "", share: str = "", gap: str = "") -> Expand:
    """A processor that replaces "@", has neighbours share a text, keeps letters away, and writes around a prompt."""

    def expand(text: str, images: int) -> str:
        assert text.count("@") == images
        text = text.replace("@", expansion)
        if share:
            text = text.replace(share * 2, share)
        for letter in "abcdefghijklmnopqrstuvwxyz.1é" if gap else "":
            text = text.replace(f"#{letter}", f"#{gap}{letter}")
        return f"{before}{text}{behind}"

    return expand


@pytest.mark.parametrize(
    ("expand", "wanted"),
    [
        (replacing("[**]"), Seams()),
        (replacing("[**]", "<s>", "</s>"), Seams("<s>", "</s>")),
        (replacing("#**#", share="#"), Seams(shared="#")),
        (replacing("#**#", "!", gap="_", share="#"), Seams(before="!", shared="#", gap="_")),
        (replacing("####"), Seams()),
    ],
)
def test_seams_are_found_and_write_what_the_processor_writes(expand: Expand, wanted: Seams) -> None:
    found = find_seams(expand, "@")
    assert found == wanted
    bare = found.unframe(expand("@", 1))
    for prompt in ("@", "no image", "a@b", "@@", "@@@ and @.", "one @\n@<two>@three @", "@ @a@1"):
        pieces = prompt.split("@")
        mine = found.frame(found.join(pieces, [bare] * (len(pieces) - 1)), special=True)
        assert mine == expand(prompt, len(pieces) - 1), prompt


def test_what_goes_in_front_goes_with_the_special_tokens() -> None:
    seams = Seams("<s>", "</s>")
    assert seams.frame("text", special=True) == "<s>text</s>"
    assert seams.frame("text", special=False) == "text</s>"


@pytest.mark.parametrize("spoilt", ["zqz", "qzq"])
def test_a_processor_that_drops_text_has_no_seams(spoilt: str) -> None:
    with pytest.raises(ValueError, match="around an image"):
        find_seams(lambda text, images: text.replace(spoilt, ""), "@")


def test_a_gap_that_goes_by_more_than_white_space_is_no_seam() -> None:
    def expand(text: str, images: int) -> str:
        return text.replace("@a", "@_a").replace("@z", "@_z")

    with pytest.raises(ValueError, match="behind it"):
        find_seams(expand, "@")


PROMPTS = ("See <image>this", "<image><image>", "Of <image><image>3 <image>\nwhich?", "<image><image><image>.", "None")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_of_a_processor_with_seams_are_its_own(prompt: str) -> None:
    """Idefics 2: neighbours share a separator, and words are kept away from it."""
    name, count = "any-idefics2", prompt.count("<image>")
    pixels = np.random.default_rng(3).integers(0, 255, (count, 70, 90, 3), dtype=np.uint8)
    images = [Image.fromarray(each) for each in pixels]
    mine = process(name, "<image>", Request(prompt, images=images)).work
    own = own_processor(name)(text=prompt, images=[images] if images else None, return_tensors="pt")
    assert list(mine.prompt) == own["input_ids"][0].tolist()
    assert len(mine.media) == count


def test_what_stands_behind_the_last_image_alone_is_found_and_put_there() -> None:
    def paligemma(text: str, images: int) -> str:
        end = text.rfind("<image>") + len("<image>")
        return (text[:end] + "<bos>" + text[end:] + "\n").replace("<image>", "<p><p>")

    seams = find_seams(paligemma, "<image>")
    assert seams == Seams(behind="\n", last="<bos>")
    item = seams.unframe(paligemma("<image>", 1))
    assert item == "<p><p>"
    for pieces in (("", " what?"), ("look: ", " and ", ""), ("", "", "", "a")):
        count = len(pieces) - 1
        made = seams.frame(seams.join(pieces, [item] * count), special=True)
        assert made == paligemma("<image>".join(pieces), count)
