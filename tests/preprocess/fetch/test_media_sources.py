"""Files and data: URIs as sources of images: what is no file, is not allowed, or is broken, holds no thread."""

from __future__ import annotations

import base64
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import unquote

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from support.picture_pages import PIXELS, PNG
from trinity.errors import ConfigError
from trinity.errors.plain_values import read_source
from trinity.preprocess.fetch import media_sources
from trinity.preprocess.media.images import read_image
from trinity.preprocess.media_limits import MediaLimits, MediaProblem

DEFAULT = MediaLimits()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("linked", [False, True])
def test_a_fifo_is_refused_and_does_not_block(tmp_path: Path, linked: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.png").symlink_to(tmp_path / "pipe")
    with pytest.raises(MediaProblem, match="not a regular file"):
        read_image(tmp_path / ("link.png" if linked else "pipe"), DEFAULT)


def test_a_file_that_becomes_a_fifo_between_two_looks_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at is what was opened, not what had the name before."""
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    real = os.open

    def swap(*given: Any, **named: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(*given, **named)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(MediaProblem, match="not a regular file"):
        read_image(path, DEFAULT)


def test_a_device_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """To open one may be enough: a watchdog begins to count, a tape rewinds."""
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    for path in ("/dev/null", "/dev/zero", "."):
        with pytest.raises(MediaProblem, match="not a regular file"):
            read_image(path, DEFAULT)


def test_a_relative_path_is_told_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the folder of the server, and of a long one the end, which tells files apart."""
    monkeypatch.chdir(tmp_path)
    for given in ("pictures/no cat.png", Path("pictures/no cat.png")):
        with pytest.raises(MediaProblem, match=r"there is no file 'pictures/no cat.png'; check the path"):
            read_image(read_source(given), DEFAULT)
    with pytest.raises(MediaProblem, match=r"there is no file '\.\.\.a{4}.*/the one.png'") as found:
        read_image(read_source("a" * 200 + "/the one.png"), DEFAULT)
    assert len(str(found.value)) < 200
    (tmp_path / "a.png").write_bytes(PNG)
    assert np.array_equal(np.asarray(read_image(read_source("a.png"), DEFAULT)), PIXELS)


@pytest.mark.parametrize("given", ["s3:bucket/a.png", "S3://bucket/a.png", "file:a.png", "file://elsewhere/a.png"])
@pytest.mark.parametrize("limits", [DEFAULT, MediaLimits(allow_paths=False)])
def test_addresses_of_other_schemes_are_refused_by_name(given: str, limits: MediaLimits) -> None:
    scheme = given.split(":")[0] + ":"
    for source in (given, read_source(given), read_source(Path(given))):
        with pytest.raises(MediaProblem, match=f"an address of the scheme '{scheme}', and only http: and https: are"):
            read_image(source, limits)


def test_a_file_that_is_called_like_an_address_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scan:1.png").write_bytes(PNG)
    assert np.array_equal(np.asarray(read_image(read_source("scan:1.png"), DEFAULT)), PIXELS)


def test_only_allowed_directories_are_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "inside-not"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.png").write_bytes(PNG)
    (inside / "link.png").symlink_to(outside / "a.png")
    (outside / "link.png").symlink_to(inside / "a.png")
    assert MediaLimits(allow_paths=(inside,)).allow_paths == (str(inside),)
    limits = MediaLimits(allow_paths=(inside,))
    path: Path | str
    for path in (inside / "a.png", outside / "link.png", inside / ".." / "in" / "a.png"):
        assert np.array_equal(np.asarray(read_image(path, limits)), PIXELS)
    for path in (
        outside / "a.png",
        inside / "link.png",
        inside / ".." / "inside-not" / "a.png",
        "/etc/hostname",
        "nix",
    ):
        with pytest.raises(MediaProblem, match="allow_paths of MediaLimits does not allow"):
            read_image(path, limits)
        with pytest.raises(MediaProblem, match="allow_paths"):
            read_image(path, MediaLimits(allow_paths=False))
    assert np.array_equal(np.asarray(read_image(PNG, MediaLimits(allow_paths=False))), PIXELS)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pixels": -1},
        {"max_images": True},
        {"max_processed_pixels": 1.5},
        {"max_processed_bytes": None},
        {"max_prompt_tokens": "9"},
        {"url_timeout_s": 0},
        {"url_timeout_s": float("nan")},
        {"preprocess_timeout_s": "1"},
        {"allow_urls": 1},
        {"allow_paths": "/tmp"},
        {"allow_paths": ("",)},
        {"allow_paths": (3,)},
        {"allow_paths": ("half \ud800",)},
        {"allow_paths": None},
    ],
)
def test_limits_of_odd_values_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        MediaLimits(**fields)


def test_a_file_url_of_this_host_is_its_path(tmp_path: Path) -> None:
    path = tmp_path / "a cat%.png"
    path.write_bytes(PNG)
    for url in (path.as_uri(), path.as_uri().replace("file:///", "FILE://localhost/")):
        assert read_source(url) == str(path)
        assert np.array_equal(np.asarray(read_image(read_source(url), DEFAULT)), PIXELS)
    with pytest.raises(MediaProblem, match="allow_paths"):
        read_image(read_source(path.as_uri()), MediaLimits(allow_paths=False))


TEXT = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:;BASE64,{TEXT}",
        f"data:text/html;charset=x;base64,{TEXT}",
        "data:image/png;base64," + TEXT.replace("=", "%3D").replace("+", "%2B"),
        "data:image/png;base64,\n" + "\n".join(TEXT[at : at + 76] for at in range(0, len(TEXT), 76)),
    ],
)
def test_a_data_uri_is_its_bytes_whatever_type_it_says(uri: str) -> None:
    assert np.array_equal(np.asarray(read_image(read_source(uri), MediaLimits(allow_paths=False))), PIXELS)


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("data:image/png,abc", "not in base64"),
        ("data:image/png;base64", "not in base64"),
        ("data:image/png;base64,A", "base64 is broken"),
        ("data:image/png;base64,\xe4\xf6", "base64 is broken"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64,AAA%2%0AB", "base64 is broken"),
        ("data:image/png;base64,PGh0bWw+", "not an image"),
    ],
)
def test_broken_data_uris_say_why(uri: str, why: str) -> None:
    with pytest.raises(MediaProblem, match=why):
        read_image(read_source(uri), DEFAULT)


def test_a_large_data_uri_is_refused_by_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base64, "b64decode", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(MediaProblem, match="max_image_bytes is 1000"):
        read_image("data:;base64," + "A" * 2000, MediaLimits(max_image_bytes=1000))


@st.composite
def base64_texts(draw: st.DrawFn) -> str:
    """Base64 of some bytes, with spaces and %-escapes in it, of which one character may have become another."""
    text = base64.b64encode(draw(st.binary(max_size=40))).decode()
    if draw(st.booleans()) and text:
        at = draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + draw(st.sampled_from(["=", "A", "!", "", "é", "%", "%3", "=A", "==", "====", "%80", "%C2"]))
            + text[at:]
        )
    shown = [f"%{ord(each):02X}" if draw(st.integers(0, 7)) == 0 and ord(each) < 128 else each for each in text]
    return "".join(
        each + draw(st.sampled_from(["", "", "", " ", "\n", "\xa0", "%C2%A0", "%E2%80%83"])) for each in shown
    )


@hypothesis.given(base64_texts(), st.integers(1, 24))
def test_a_data_uri_in_pieces_is_decoded_as_a_whole(text: str, size: int) -> None:
    try:
        plain = unquote(text) if "%" in text else text
        whole = base64.b64decode("".join(plain.split()), validate=True)
    except ValueError:
        whole = None
    with patch.object(media_sources, "_PIECE", size), suppress(MediaProblem):
        found = None
        found = media_sources.read_data_uri(f"data:image/png;base64,{text}", MediaLimits())
    assert found == whole


@pytest.mark.parametrize("text", ["A " * (4 << 20), " " * (8 << 20), "%20A" * (2 << 20)])
def test_no_call_on_a_data_uri_is_of_more_than_a_quarter_mebi(text: str) -> None:
    """Each holds the interpreter: at 82dc40f9 ``split`` of 4 Mi characters with spaces did so for 128 ms."""
    pieces = list(media_sources._base64_pieces(text, 0))
    assert len(pieces) >= 32
    assert max(map(len, pieces)) <= 256 << 10


@pytest.mark.parametrize("behind", ["=", "A", "=A"])
def test_what_follows_the_padding_is_looked_at_once(behind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is joined to the last group, and with pieces of a quarter mebi this would cost the square of its length."""
    decoded, real = list[int](), base64.b64decode

    def count(piece: str, **named: Any) -> bytes:
        decoded.append(len(piece))
        return real(piece, **named)

    monkeypatch.setattr(base64, "b64decode", count)
    uri = "data:;base64," + "A" * 10 + "=" + behind * ((16 << 20) // len(behind))
    with pytest.raises(MediaProblem, match="base64 is broken"):
        media_sources.read_data_uri(uri, DEFAULT)
    assert sum(decoded) < 1 << 20


def test_a_data_uri_takes_no_more_than_a_piece_beside_what_it_makes() -> None:
    uri = "data:image/png;base64," + base64.b64encode(bytes(24 << 20)).decode()
    tracemalloc.start()
    try:
        data = media_sources.read_data_uri(uri, MediaLimits())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(data) == 24 << 20
    assert peak < 24 * 9 / 8 * (1 << 20) + 5 * media_sources._PIECE, peak
