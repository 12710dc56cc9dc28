"""Requests from outside, through a model's processor: no file is read or told of, and URLs go by the rules."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.picture_pages import PNG, PicturePages, serving
from trinity.errors import BadMedia
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.preprocess.worker_processes import KillableProcessor
from trinity.request import Media, Request

LIMITS = MediaLimits(allow_urls=True, allowed_hosts=("127.0.0.1:*",), allowed_networks=("127.0.0.1/32",), max_images=3)
DATA = "data:image/png;base64," + base64.b64encode(PNG).decode()


@pytest.fixture(scope="module")
def processor() -> Iterator[RequestProcessor]:
    made = RequestProcessor(checkpoint("llava"), limits=LIMITS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def pages() -> Iterator[PicturePages]:
    with serving(PicturePages("127.0.0.1")) as found:
        yield found


def process(processor: RequestProcessor, request: Request) -> ProcessedRequest:
    return asyncio.run(processor.aprocess(request))


def ways(source: Any) -> Iterator[Request]:
    """Every door that a medium comes through."""
    common: dict[str, Any] = {"untrusted": True, "request_id": "r", "max_tokens": 1}
    yield Request("<image>", images=[source], **common)
    yield Request("<image>", media=[Media("image", source)], **common)
    parts: list[dict[str, Any]] = [{"type": "image", "image": source}, {"type": "image", "path": source}]
    if isinstance(source, str):
        parts += [{"type": "image_url", "image_url": {"url": source}}, {"type": "input_image", "image_url": source}]
        parts += [{"type": "image", "url": source}]
    for part in parts:
        yield Request(messages=[{"role": "user", "content": [part]}], **common)


def test_no_path_is_read_and_no_error_tells_of_one(
    processor: RequestProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures, other files, folders, devices, what is not there or may not be read: one answer, and no look."""
    (tmp_path / "cat.png").write_bytes(PNG)
    (tmp_path / "secret.txt").write_text("secret")
    monkeypatch.chdir(tmp_path)
    sources: list[Any] = [
        str(tmp_path / "cat.png"),
        tmp_path / "cat.png",
        "cat.png",
        "./cat.png",
        (tmp_path / "cat.png").as_uri(),
        "file://localhost/etc/passwd",
        "FILE:///etc/passwd",
        "/etc/shadow",
        "secret.txt",
        "missing.png",
        "/dev/zero",
        "/proc/self/environ",
        str(tmp_path),
        "",
        "~/.ssh/id_rsa",
        "\\\\host\\share\\a.png",
        "ftp://127.0.0.1/a.png",
        " http://127.0.0.1/a.png",
        "http:/127.0.0.1/a.png",
    ]
    asked = [request for source in sources for request in ways(source)]
    looks: list[Any] = []
    for name in ("stat", "lstat", "open", "readlink"):
        monkeypatch.setattr(os, name, lambda path, *_, __name=name, **__: looks.append((__name, path)))
    told = set()
    for request in asked:
        with pytest.raises(BadMedia) as found:
            processor._admit(request_at_the_door(request))
        told.add(str(found.value))
    monkeypatch.undo()
    assert told == {"this image is no data: URI, http: or https: URL, and nothing else is read for this request"}
    assert looks == []
    with pytest.raises(BadMedia, match="no data: URI"):
        process(processor, asked[0])


def request_at_the_door(request: Request) -> Request:
    from trinity.request import check_request

    return check_request(request)


def test_data_uris_and_allowed_hosts_are_read(processor: RequestProcessor, pages: PicturePages) -> None:
    contents = set()
    for source in (DATA, f"{pages.url}/image"):
        chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": source}}]}]
        for request in (next(ways(source)), Request(messages=chat, untrusted=True)):
            contents.add(process(processor, request).work.media[0].content)
    assert len(contents) == 1
    assert processor.process(next(ways(f"{pages.url}/image"))).work.media[0].content in contents, "on a thread as well"


def test_images_are_counted_before_one_is_fetched(processor: RequestProcessor, pages: PicturePages) -> None:
    before = len(pages.asked)
    with pytest.raises(BadMedia, match="max_images is 3"):
        process(processor, Request("<image>" * 4, images=[f"{pages.url}/image"] * 4, untrusted=True))
    with pytest.raises(BadMedia, match=r"2 <image> marker\(s\)"):
        process(processor, Request("<image> <image>", images=[f"{pages.url}/image"], untrusted=True))
    assert len(pages.asked) == before


def test_the_image_that_cannot_be_fetched_is_named(processor: RequestProcessor, pages: PicturePages) -> None:
    urls = [f"{pages.url}/image", f"{pages.url}/missing"]
    with pytest.raises(BadMedia, match=r"image 2 of 2.*cannot be fetched"):
        process(processor, Request("<image> <image>", images=urls, untrusted=True))


def test_sounds_and_videos_are_refused_by_name(processor: RequestProcessor) -> None:
    parts = {
        "audio": {"type": "input_audio", "input_audio": {"data": "UklG", "format": "wav"}},
        "video": {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}},
    }
    for kind, part in parts.items():
        with pytest.raises(BadMedia, match=f"takes no media of kind '{kind}' here; it takes image"):
            process(processor, Request(messages=[{"role": "user", "content": [part]}], untrusted=True))


@pytest.mark.slow  # it starts a process, which loads the model's processor
def test_processes_of_their_own_are_given_what_was_fetched(pages: PicturePages) -> None:
    import msgspec

    made = KillableProcessor(checkpoint("llava"), limits=msgspec.structs.replace(LIMITS, processes=1))
    try:
        found = process(made, next(ways(f"{pages.url}/image")))
        assert found.work.media[0].content == process(made, next(ways(DATA))).work.media[0].content
        with pytest.raises(BadMedia, match="no data: URI"):
            process(made, next(ways("/etc/passwd")))
        with pytest.raises(BadMedia, match="cannot be fetched"):
            process(made, next(ways(f"{pages.url}/missing")))
    finally:
        made.close()
