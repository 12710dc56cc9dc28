"""Content parts as OpenAI and Hugging Face write them: which media they hold, in which order, and which are refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trinity.preprocess.text.prompt import take_media
from trinity.preprocess.text.prompt_problem import PromptProblem
from trinity.request import Media, Request, check_request

PICTURE = Image.new("RGB", (4, 3))
DATA = f"data:image/png;base64,{base64.b64encode(b'bytes').decode()}"
URL = "https://example.org/a.png"

FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "openai": ({"type": "image_url", "image_url": {"url": URL}}, URL),
    "openai data": ({"type": "image_url", "image_url": {"url": DATA, "detail": "high"}}, DATA),
    "openai plain": ({"type": "image_url", "image_url": URL}, URL),
    "responses": ({"type": "input_image", "image_url": URL, "detail": "auto"}, URL),
    "hf object": ({"type": "image", "image": PICTURE}, PICTURE),
    "hf bytes": ({"type": "image", "image": b"bytes"}, b"bytes"),
    "hf image url": ({"type": "image", "image": URL}, URL),
    "hf url": ({"type": "image", "url": URL}, URL),
    "hf path": ({"type": "image", "path": "/pictures/cat.png"}, "/pictures/cat.png"),
    "hf Path": ({"type": "image", "image": Path("/pictures/cat.png")}, Path("/pictures/cat.png")),
    "hf base64": ({"type": "image", "base64": "Ynl0ZXM="}, "data:;base64,Ynl0ZXM="),
    "file": ({"type": "image_url", "image_url": {"url": "file:///pictures/a%20cat.png"}}, "/pictures/a cat.png"),
    "a dataset's row": ({"type": "image", "image": None, "url": URL, "path": None}, URL),
}


def _ask(*contents: Any, **fields: Any) -> Request:
    messages = [{"role": "user", "content": content} for content in contents]
    return take_media(check_request(Request(messages=messages, request_id="r", **fields)))


def _contents(request: Request) -> list[Any]:
    assert request.messages is not None
    return [message["content"] for message in request.messages]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_becomes_a_medium_in_its_place(form: str) -> None:
    part, source = FORMS[form]
    found = _ask([{"type": "text", "text": "What is"}, part])
    assert _contents(found) == [[{"type": "text", "text": "What is"}, {"type": "image"}]]
    (medium,) = found.all_media()
    assert medium.kind == "image"
    assert str(medium.source) == str(source) if isinstance(source, (str, Path)) else medium.source is source


def test_an_array_in_a_part_stays_what_it_is() -> None:
    array = np.zeros((4, 5, 3), dtype=np.uint8)
    (medium,) = _ask([{"type": "image", "image": array}]).all_media()
    assert medium.source is array


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_text_parts_of_all_interfaces_are_one(kind: str) -> None:
    assert _contents(_ask([{"type": kind, "text": "Hello", "annotations": []}])) == [
        [{"type": "text", "text": "Hello"}]
    ]


def test_a_refusal_of_the_assistant_is_text_of_its_turn() -> None:
    assert _contents(_ask([{"type": "refusal", "refusal": "No."}])) == [[{"type": "text", "text": "No."}]]


@pytest.mark.parametrize(
    ("part", "kind", "source"),
    [
        ({"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}}, "audio", "data:;base64,UklG"),
        ({"type": "audio", "audio": b"wav"}, "audio", b"wav"),
        ({"type": "audio_url", "audio_url": {"url": URL}}, "audio", URL),
        ({"type": "video_url", "video_url": {"url": URL}}, "video", URL),
        ({"type": "video", "video": "/a.mp4"}, "video", "/a.mp4"),
    ],
)
def test_sounds_and_videos_are_media_of_their_kind(part: dict[str, Any], kind: str, source: Any) -> None:
    assert _ask([part]).all_media() == [Media(kind, source)]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url"}, "needs 'image_url'"),
        ({"type": "image_url", "image_url": {"uri": URL}}, r'\{"url": "\.\.\."\}'),
        ({"type": "image_url", "image_url": {"url": 3}}, r'\{"url": "\.\.\."\}'),
        ({"type": "image_url", "url": URL}, "has its medium as 'image_url'"),
        ({"type": "image", "image": PICTURE, "url": URL}, "nothing beside it"),
        ({"type": "image", "image": PICTURE, "resized_width": 280}, "nothing beside it"),
        ({"type": "input_image", "file_id": "file-1"}, "has its medium as 'image_url'"),
    ],
)
def test_parts_of_no_known_form_say_what_one_is(part: dict[str, Any], said: str) -> None:
    with pytest.raises(PromptProblem, match=said):
        _ask([part])


def test_bare_parts_take_the_images_beside_the_chat_in_order() -> None:
    inside, bare = FORMS["openai"][0], {"type": "image"}
    found = _ask([bare, inside], "and", [inside, bare], images=[b"1", b"2"])
    assert [each.source for each in found.all_media()] == [b"1", URL, URL, b"2"]
    assert found.images == ()


@pytest.mark.parametrize(("bare", "given"), [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_images_beside_a_chat_that_has_its_own_must_have_their_parts(bare: int, given: int) -> None:
    parts = [FORMS["openai"][0], *[{"type": "image"}] * bare]
    with pytest.raises(PromptProblem, match=rf"1 part\(s\) with media in them and {bare} without.*the {given} of"):
        _ask(parts, images=[b"x"] * given)


def test_chats_without_media_of_their_own_keep_what_is_beside_them() -> None:
    found = _ask([{"type": "image"}], images=[b"1", b"2"])  # their numbers are compared later, as ever
    assert (found.images, found.media) == ((b"1", b"2"), ())


@st.composite
def chats(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[bytes], list[str], list[str]]:
    """Messages, images beside them, the sources that must come out in order, and the texts in order."""
    messages: list[dict[str, Any]] = []
    beside: list[bytes] = []
    order, texts = list[str](), list[str]()
    for turn in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            texts.append(f"turn {turn}")
            messages.append({"role": "user", "content": texts[-1]})
            continue
        parts: list[dict[str, Any]] = []
        for at in range(draw(st.integers(0, 4))):
            name = f"{turn}.{at}"
            form = draw(st.sampled_from(["text", "input_text", "bare", "image_url", "input_image", "image", "url"]))
            url = f"http://example.org/{name}"
            if form.endswith("text"):
                texts.append(name)
                parts.append({"type": form, "text": name})
            elif form == "bare":
                beside.append(name.encode())
                order.append(str(beside[-1]))
                parts.append({"type": "image"})
            else:
                order.append(url)
                value: Any = {"url": url} if form == "image_url" else url
                key = {"input_image": "image_url"}.get(form, form)
                parts.append({"type": "image" if form in ("image", "url") else form, key: value})
        messages.append({"role": "user", "content": parts})
    return messages, beside, order, texts


@settings(max_examples=60, deadline=None)
@given(chats())
def test_media_come_in_the_order_of_the_chat_whatever_their_form(
    case: tuple[list[dict[str, Any]], list[bytes], list[str], list[str]],
) -> None:
    messages, beside, order, texts = case
    asked = check_request(Request(messages=messages, images=beside, request_id="r"))
    found = take_media(asked)
    assert [str(each.source) for each in found.all_media()] == order
    parts = [part for content in _contents(found) if not isinstance(content, str) for part in content]
    assert all(part in ({"type": "image"}, {"type": "text", "text": part.get("text")}) for part in parts)
    said = []
    for content in _contents(found):
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        said += [part["text"] for part in parts if part["type"] == "text"]
    assert said == texts
    assert take_media(check_request(found)) == found, "a request that was read once stays as it is"
