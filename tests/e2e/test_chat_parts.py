"""Chats with media in their content parts, in every form: answered as transformers answers them with PIL images.

The oracle is given the pictures as PIL images in Hugging Face's parts; what is served has files, bytes, data: URIs and
http URLs of the same pictures in OpenAI's and Hugging Face's parts, and requests from outside.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.picture_pages import PicturePages, as_png, serving
from support.recordings import oracle, problems, serve
from support.stage_driver import picture
from trinity.preprocess.media_limits import MediaLimits
from trinity.request import Request, Sampling
from trinity.testing.oracle import OracleAnswer

OUTPUTS = 6
FIRST, SECOND, THIRD = picture(2, 60, 80), picture(5, 40, 40), picture(3, 33, 120)
SAMPLING = Sampling(ignore_eos=True)


def data(image: Any) -> str:
    return f"data:image/png;base64,{base64.b64encode(as_png(image)).decode()}"


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def turns(*contents: Any, system: Any = None) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *({"role": roles[at % 2], "content": content} for at, content in enumerate(contents))]


@pytest.fixture(scope="module")
def pages() -> Iterator[PicturePages]:
    with serving(PicturePages("127.0.0.1")) as found:
        found.pictures = {"/1": as_png(FIRST), "/2": as_png(SECOND), "/3": as_png(THIRD)}
        yield found


def cases(url: str, folder: Path) -> dict[str, tuple[list[Any], dict[str, Any], list[Any], list[Any]]]:
    """By name: the messages served, the request's other fields, the oracle's messages, and its images."""
    path = folder / "third.png"
    path.write_bytes(as_png(THIRD))
    bare, untrusted = {"type": "image"}, {"untrusted": True}

    def link(where: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": where, "detail": "low"}}

    def inside(**source: Any) -> dict[str, Any]:
        return {"type": "image", **source}

    two = [text("Compare"), bare, text("with"), bare]
    return {
        "openai": (
            turns([text("Compare"), link(f"{url}/1"), text("with"), link(data(SECOND))], system="Be brief."),
            untrusted,
            turns(two, system="Be brief."),
            [FIRST, SECOND],
        ),
        "responses": (
            turns([{"type": "input_image", "image_url": data(THIRD)}, {"type": "input_text", "text": "What?"}]),
            untrusted,
            turns([bare, text("What?")]),
            [THIRD],
        ),
        "hugging face": (
            turns([inside(image=FIRST), inside(path=str(path)), text("which?")], "It.", [inside(url=f"{url}/2")]),
            {},
            turns([bare, bare, text("which?")], "It.", [bare]),
            [FIRST, THIRD, SECOND],
        ),
        "mixed": (
            turns([bare, link(path.as_uri()), bare, text("?")]),
            {"images": [as_png(SECOND), data(FIRST)]},
            turns([bare, bare, bare, text("?")]),
            [SECOND, THIRD, FIRST],
        ),
        "words": (
            turns("Hello", [text("Good"), text(" day")], "And?"),
            untrusted,
            turns("Hello", "Good day", "And?"),
            [],
        ),
    }


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_chats_of_every_form_are_answered_as_transformers_answers_them(
    name: str, pages: PicturePages, tmp_path: Path
) -> None:
    asked, answers = [], dict[str, OracleAnswer]()
    for case, (messages, fields, plain, images) in cases(pages.url, tmp_path).items():
        common: dict[str, Any] = {"max_tokens": OUTPUTS, "sampling": SAMPLING, "request_id": case}
        asked.append(Request(messages=messages, **fields, **common))
        answers[case] = oracle(name).answer(Request(messages=plain, images=images, **common))
    limits = MediaLimits(allow_urls=True, allowed_hosts=("127.0.0.1:*",), allowed_networks=("127.0.0.1/32",))
    found = serve(checkpoint(name), "E+PD", (asked,), limits=limits)
    assert problems(found, answers) == {}
    assert len(found.outputs) == len(asked)
    assert sorted(path for path, _ in pages.asked[-2:]) == ["/1", "/2"]
