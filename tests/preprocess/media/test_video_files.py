"""Video files: the frames that transformers' own reader gives, and files that lie, break off or are something else."""

from __future__ import annotations

import base64
import re
import resource
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("av", reason="PyAV is not installed: pip install av")

from support.checkpoint_files import checkpoint
from support.recordings import oracle
from support.video_clips import ask, chat, clip
from support.video_files import (
    VIDEO_CODECS,
    av1_of_hidden_frames,
    avi_of_exif,
    encode_video,
    motion_jpeg_of_exif,
    ogg_of_comments,
    video_of_tags,
    vp8_of_hidden_frames,
    write_sound,
    write_video,
)
from trinity.errors import BadMedia
from trinity.preprocess.media import video_files
from trinity.preprocess.media.video_files import read_video
from trinity.preprocess.media.video_prices import CodedFrames, find_frames, price_frames
from trinity.preprocess.media_limits import MediaLimits, MediaProblem, Price, unit_s
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request

FORMS = [("mp4", "mpeg4"), ("mp4", "h264"), ("matroska", "mpeg4"), ("avi", "mpeg4"), ("webm", "vp8")]


@cache
def film(container: str = "mp4", codec: str = "mpeg4", frames: int = 30, **settings: Any) -> bytes:
    return write_video(clip(1, frames, 56, 80).frames, container=container, codec=codec, **settings)


def every(known: dict[str, Any]) -> Sequence[int]:
    return range(known["total_num_frames"])


def refused(data: bytes, **limits: Any) -> str:
    with pytest.raises(MediaProblem) as caught:
        read_video(data, MediaLimits(**limits), every)
    return str(caught.value)


@pytest.mark.parametrize(("container", "codec"), FORMS)
def test_frames_are_those_of_transformers(container: str, codec: str, tmp_path: Path) -> None:
    """Its reader wants the number of frames from the container, which matroska does not have."""
    from transformers.video_utils import load_video

    path = tmp_path / f"a.{container}"
    path.write_bytes(film(container, codec))
    found = read_video(path, MediaLimits(), lambda known: range(1, known["total_num_frames"], 7))
    assert (found.total, found.fps, found.sampled) == (30, 10.0, True)
    assert found.indices == (1, 8, 15, 22, 29)
    if container in ("mp4", "avi"):
        load: Any = load_video
        theirs, told = load(str(path), backend="pyav", sample_indices_fn=lambda metadata, **_: np.arange(1, 30, 7))
        assert np.array_equal(found.pixels, theirs)
        assert (told.total_num_frames, told.fps, told.duration) == (30, 10.0, 3.0)
        assert told.timestamps == pytest.approx([each / 10 for each in found.indices or ()])
    drawn = clip(1, 30, 56, 80).frames[1::7].astype(int)
    assert np.abs(found.pixels.astype(int) - drawn).mean() < 25


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "smolvlm"])
def test_requests_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """A path: frames are sampled by the processor's rule, which transformers' reader is given."""
    from transformers.video_utils import load_video

    path = tmp_path / "a.mp4"
    path.write_bytes(film())
    made = processor(name).process(ask("a", "Look: <video>", [Media("video", path)]))
    own: Any = oracle(name)._processor
    load: Any = load_video
    videos: Any = own.video_processor
    settings = {each: getattr(videos, each, None) for each in ("num_frames", "fps", "temporal_patch_size")}

    def choose(metadata: Any, **_: Any) -> Any:
        return np.arange(30) if name == "qwen2_vl" else videos.sample_frames(metadata=metadata, **settings)

    pixels, told = load(str(path), backend="pyav", sample_indices_fn=choose)
    token = own.video_token
    text = f"Look: <|vision_start|>{token}<|vision_end|>" if name.startswith("qwen") else f"Look: {token}"
    given = {"video_metadata": [told], "do_sample_frames": False, "return_tensors": "pt"}
    wanted = own(text=[text], videos=[pixels], **given)
    assert list(made.work.prompt) == wanted["input_ids"][0].tolist()


@cache
def processor(name: str, **limits: Any) -> RequestProcessor:
    return RequestProcessor(checkpoint(name), limits=MediaLimits(**limits))


def test_a_client_sends_a_file_as_a_data_uri() -> None:
    uri = "data:video/mp4;base64," + base64.b64encode(film(frames=8)).decode()
    part = {"type": "video_url", "video_url": {"url": uri}}
    request = chat("a", [part, {"type": "text", "text": "what?"}], [])
    sent = Request(messages=request.messages, untrusted=True, max_tokens=4)
    beside = chat("b", [{"type": "video"}, {"type": "text", "text": "what?"}], [Media("video", film(frames=8))])
    made, wanted = (processor("qwen2_vl").process(each).work for each in (sent, beside))
    assert (made.prompt, made.media) == (wanted.prompt, wanted.media)
    part = {"type": "video_url", "video_url": {"url": "/etc/passwd"}}
    path = Request(messages=[{"role": "user", "content": [part]}], untrusted=True)
    with pytest.raises(BadMedia, match="no data: URI, http: or https: URL"):
        processor("qwen2_vl").process(path)


def test_frames_at_odd_times_are_counted_one_by_one() -> None:
    """Of a variable rate: the mean is the rate, as transformers has it."""
    times = [0, 1, 2, 10, 11, 30, 31, 32, 33, 40]
    found = read_video(film(frames=10, times=tuple(times)), MediaLimits(), every)
    assert len(found.pixels) == found.total == 10
    assert found.fps == pytest.approx(10 / (41 / 10), rel=0.15)


# ---------------------------------------------------------------- what lies


def test_frames_of_av1_that_are_not_shown_are_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packet has one frame that is shown, and any number before it that is decoded."""
    priced: list[CodedFrames] = []

    def price(found: CodedFrames, kept: int) -> Price:
        priced.append(found)
        return price_frames(found, kept)

    monkeypatch.setattr(video_files, "price_frames", price)
    for times in (1, 300):
        found = read_video(av1_of_hidden_frames(20, 320, 240, times), MediaLimits(), lambda _: [0, 19])
        assert found.total == 20
    plain, repeated = priced[2], priced[-1]
    assert repeated.number == plain.number == 20
    assert repeated.hidden == plain.hidden + 299
    assert price_frames(repeated, 0).units > 20 * price_frames(plain, 0).units


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:188] + b"\0" + data[189:],
        lambda data: data[:100] + data[188:],
        lambda data: b"\x47" + b"\x11" * 99 + data,
        lambda data: b"\0\1\2\3" + data,
        lambda data: b"".join(b"\0\0\0\0" + data[at : at + 188] for at in range(0, len(data), 188)),
        lambda data: b"".join(data[at : at + 188] + bytes(16) for at in range(0, len(data), 188)),
    ],
    ids=["a bad byte", "cut", "behind others", "behind four", "192 bytes", "204 bytes"],
)
def test_a_transport_stream_is_one_though_it_is_damaged(damage: Callable[[bytes], bytes]) -> None:
    """At 937573d4 what has no two packets in their places was no video; each of these has all of its frames."""
    whole = write_video(clip(1, 12, 56, 80).frames, container="mpegts", codec="mpeg2video")
    assert len(read_video(damage(whole), MediaLimits(), every).pixels) == 12


@pytest.mark.parametrize("container", ["flv", "mpegts"])
def test_a_stream_without_a_rate_in_its_structure_is_sampled(container: str) -> None:
    """At 24e21f4e a processor that samples by frames a second refused it, as no rate was known before it was read."""
    data = encode_video("libx264", container, 40, 64, 64)
    made = RequestProcessor(checkpoint("smolvlm")).process(Request("<video>", media=[Media("video", data)]))
    assert made.work.media


def test_larger_frames_that_are_not_shown_are_refused() -> None:
    """At 24e21f4e a file of 90 KB took 5.4 s, of which 36 ms were predicted: its frames of 4096 x 4096 show nothing."""
    data = vp8_of_hidden_frames(6, 256)
    with pytest.raises(MediaProblem, match="cannot be decoded"):
        read_video(data, MediaLimits(), lambda _: (0, 1))
    found = read_video(vp8_of_hidden_frames(6, 16), MediaLimits(), lambda _: (0, 1))
    assert found.pixels.shape == (2, 16, 16, 3)


@pytest.mark.parametrize(("codec", "container"), VIDEO_CODECS)
def test_frames_of_any_size_are_decoded(codec: str, container: str) -> None:
    """Coded frames are larger than what is shown of them, by up to a macroblock or a large block each way."""
    import av

    for width, height in ((322, 178), (340, 66), (66, 340), (335, 181)):
        try:
            data = encode_video(codec, container, 3, width, height)
        except av.error.FFmpegError:
            continue  # no encoder, or one that takes even sizes only
        found = read_video(data, MediaLimits(), every).pixels
        assert found.shape == (3, height, width, 3)


@pytest.mark.parametrize(
    ("kind", "count"),
    [("Matroska", 4000), ("MP4", 4000), ("AVI", 6000), ("FLV", 4000), ("chapters", 25_000), ("cues", 50_000)],
)
def test_tags_that_ffmpeg_would_look_through_for_each_other_are_refused(kind: str, count: int) -> None:
    """They may lie anywhere: behind a container's beginning, or in another container."""
    few, many = video_of_tags(kind, 500), video_of_tags(kind, count)
    assert read_video(few, MediaLimits(), every).total == 4
    for data in (many, film(container="mp4") + many, film(container="avi") + many):
        began = time.thread_time()
        assert re.search("has more than [0-9]+ (tags and chapters; save|packets in)", refused(data))
        assert time.thread_time() - began <= 0.15 * max(1.0, unit_s() / 6e-4)


def test_comments_of_an_ogg_are_counted_wherever_its_pages_end() -> None:
    """A page whose checksum is wrong FFmpeg skips, and looks for others inside of it."""
    assert find_frames(ogg_of_comments(900)).codec == "theora"
    for vendor in (0, 100_000):
        with pytest.raises(MediaProblem, match="has more than 1000 tags"):
            find_frames(ogg_of_comments(1_100, vendor))
    whole = ogg_of_comments(9)
    for broken in (
        whole[:90] + b"\1" + whole[91:],
        whole + b"?" + whole,
        whole[:-150] + ogg_of_comments(1)[-150:-9] + whole,
    ):
        with pytest.raises(MediaProblem, match="pages that are damaged"):
            find_frames(broken)


EXIF = {"frames of JPEG": lambda: motion_jpeg_of_exif(200), "a header of AVI": lambda: avi_of_exif(3000)}


@pytest.mark.parametrize("place", EXIF)
def test_exif_costs_nothing_in(place: str) -> None:
    """FFmpeg would look through all entries for each other, of directories in directories too."""
    data, spent = EXIF[place](), []
    for _ in range(2):
        began = time.process_time()
        assert read_video(data, MediaLimits(), every).total == 4
        spent.append(time.process_time() - began)
    assert min(spent) <= 0.04 * max(1.0, unit_s() / 6e-4), spent


def test_frames_whose_exif_is_not_found_in_the_file_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a Matroska that compresses its frames."""
    monkeypatch.setattr(video_files, "_hide_exif", lambda data: data)
    assert "has EXIF in its frames" in refused(motion_jpeg_of_exif(1))


def claims(**fields: int) -> bytes:
    """An AVI file whose headers claim other numbers: frames, width, height."""
    data = bytearray(film("avi", "mpeg4"))
    header, stream, form = (data.index(name) + 8 for name in (b"avih", b"strh", b"strf"))
    places = {"frames": (header + 16, stream + 32), "width": (header + 32, form + 4), "height": (header + 36, form + 8)}
    for name, value in fields.items():
        for place in places[name]:
            data[place : place + 4] = struct.pack("<I", value)
    return bytes(data)


def test_a_claim_of_a_billion_frames_is_not_believed() -> None:
    found = read_video(claims(frames=10**9), MediaLimits(), every)
    assert found.total == len(found.pixels) == 30


@pytest.mark.parametrize("side", [65_535, 2**31 - 1])
def test_a_claim_of_huge_frames_is_not_believed(side: int) -> None:
    """It is refused as what it claims, before anything is decoded."""
    assert f"frames of {side} x {side} pixels; the limit max_pixels" in refused(claims(width=side, height=side))


def test_huge_frames_are_refused_before_one_is_decoded() -> None:
    large = write_video(np.zeros((1, 4000, 4000, 3), np.uint8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "frames of 4000 x 4000 pixels; the limit max_pixels" in refused(large, max_pixels=15_999_999)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4000 * 4000 // 1024


def test_limits_hold_before_frames_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    film(), film("matroska", streams=2)
    monkeypatch.setattr("trinity.preprocess.media.video_files._decode", lambda *_: pytest.fail("a frame was decoded"))
    assert "has 30 frames; the limit max_video_frames allows 1 to 29" in refused(film(), max_video_frames=29)
    assert "is 3.0 s long; the limit max_video_seconds is 2.9" in refused(film(), max_video_seconds=2.9)
    assert "frames of 80 x 56 pixels; the limit max_pixels" in refused(film(), max_pixels=4000)
    assert "has 30 frames of 80 x 56 pixels; the limit max_video_pixels" in refused(film(), max_video_pixels=100_000)
    assert "the limit max_video_bytes is 999" in refused(film(), max_video_bytes=999)
    assert "streams" in refused(film("matroska", streams=2), max_video_streams=1)


def test_the_first_of_several_streams_is_read() -> None:
    assert read_video(film("matroska", streams=2), MediaLimits(), every).total == 30


def test_decoding_ends_in_time() -> None:
    assert "takes longer to decode than preprocess_timeout_s" in refused(film(), preprocess_timeout_s=1e-9)


@pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
def test_a_file_that_breaks_off_says_so(part: float) -> None:
    whole = film("mp4", "mpeg4")
    said = refused(whole[: int(len(whole) * part)])
    assert "truncated" in said or "cannot be decoded" in said or "no frames" in said


@pytest.mark.parametrize("container", ["mpegts", "matroska"])
def test_a_stream_that_breaks_off_has_the_frames_that_came(container: str) -> None:
    whole = write_video(clip(1, 30, 56, 80).frames, container=container, codec="mpeg2video")
    found = read_video(whole[: len(whole) // 2], MediaLimits(), every)
    assert 5 < len(found.pixels) == found.total < 30


@pytest.mark.parametrize(
    "data",
    [
        b"no video at all" * 50,
        b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        b"ffconcat version 1.0\nfile /etc/hostname\n",
        b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"></MPD>',
        b"\0" * 4096,
        b"GIF89a" + bytes(500),  # begins with the byte of a transport stream
        b"\0\0\1\xb3" + bytes(500),  # MPEG without a container
    ],
)
def test_what_is_no_video_and_what_names_other_files_is_refused(data: bytes) -> None:
    assert "is no video in a supported container" in refused(data)


def test_a_list_of_files_opens_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg would read what stands beside the program: its own lists of files are videos to it."""
    (tmp_path / "secret.mp4").write_bytes(film())
    monkeypatch.chdir(tmp_path)
    assert "is no video in a supported container" in refused(b"ffconcat version 1.0\nfile secret.mp4\n")


def test_sound_alone_and_nothing_are_no_video() -> None:
    assert "no stream of video" in refused(write_sound())
    assert "is empty (0 bytes)" in refused(b"")


def test_noise_in_a_file_harms_its_own_request_alone() -> None:
    """Of 60 files with a part overwritten each is read, or refused as a request's own error."""
    whole, noise = film("mp4", "h264"), np.random.default_rng(7)
    for _ in range(60):
        broken = bytearray(whole)
        at = int(noise.integers(0, len(whole) - 64))
        broken[at : at + 64] = noise.bytes(64)
        try:
            found = read_video(bytes(broken), MediaLimits(max_video_pixels=10_000_000), every)
            assert found.pixels.shape[1:] == (56, 80, 3)
        except MediaProblem:
            continue


def test_without_pyav_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data = film()
    monkeypatch.setitem(sys.modules, "av", None)
    assert "pip install 'trinity-epd[video]'" in refused(data)
