"""Media of a trace's rows: images, videos and audio clips, read, written, counted and made of what was served."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from trinity.core.values import MediaSpan
from trinity.errors import ConfigError, TraceError
from trinity.traces import Dataset, read_trace, synthesise
from trinity.traces.media import MOST_FRAMES, TraceAudio, TraceImage, TraceVideo, describe_media, make_media
from trinity.traces.trace import Trace, TraceRow

VIDEO = TraceVideo(frames=8, width=640, height=360, seconds=4.0, tokens=512, content="v")
AUDIO = TraceAudio(seconds=12.5, tokens=79, content="a")
ROW = TraceRow(
    timestamp=5.0,
    input_length=20 + 64 + 512 + 79,
    output_length=3,
    images=[TraceImage(tokens=64)],
    videos=[VIDEO],
    audio=[AUDIO],
)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_media_of_all_kinds_come_back_from_a_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    Trace([ROW]).save(path)
    assert list(Trace.load(path)) == [ROW]
    assert list(read_trace(path)) == [ROW]


def test_a_file_of_an_older_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text('{"timestamp":5.0,"input_length":84,"output_length":3,"images":[{"tokens":64}]}\n')
    (row,) = Trace.load(path)
    assert (row.images, row.videos, row.audio, row.text_tokens) == ([TraceImage(tokens=64)], [], [], 20)


def test_a_row_of_images_is_written_as_it_was_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    Trace([TraceRow(timestamp=5.0, input_length=84, output_length=3, images=[TraceImage(tokens=64)])]).save(path)
    assert json.loads(path.read_text()) == {
        "timestamp": 5.0,
        "input_length": 84,
        "output_length": 3,
        "images": [{"tokens": 64}],
    }


def test_tokens_of_all_media_are_visual_and_the_rest_is_text() -> None:
    assert ROW.visual_tokens == 64 + 512 + 79
    assert ROW.text_tokens == 20
    assert list(ROW.media) == [TraceImage(tokens=64), VIDEO, AUDIO]


def test_media_stay_where_a_trace_changes_its_times() -> None:
    again = ROW.request_at(7.0)
    assert (again.images, again.videos, again.audio) == (ROW.images, ROW.videos, ROW.audio)
    assert Trace([ROW, again]).scale(2.0)[1].videos == [VIDEO]


@pytest.mark.parametrize(
    ("kind", "field", "value", "said"),
    [
        (TraceVideo, "frames", -1, "a video's frames"),
        (TraceVideo, "frames", MOST_FRAMES + 1, "2\\*\\*20"),
        (TraceVideo, "items", MOST_FRAMES + 1, "2\\*\\*20"),
        (TraceVideo, "width", 0.5, "a video's width"),
        (TraceVideo, "tokens", 2**41, "2\\*\\*40"),
        (TraceVideo, "seconds", math.inf, "seconds"),
        (TraceVideo, "seconds", -1, "seconds"),
        (TraceAudio, "seconds", math.nan, "seconds"),
        (TraceAudio, "tokens", True, "a clip's tokens"),
        (TraceAudio, "content", 7, "content"),
    ],
)
def test_odd_sizes_are_refused(kind: type, field: str, value: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        kind(**{field: value})


@pytest.mark.parametrize("field", ["images", "videos", "audio"])
def test_a_row_takes_each_kind_in_its_own_field(field: str) -> None:
    wrong: dict[str, Any] = {field: [VIDEO if field == "audio" else AUDIO]}
    with pytest.raises(TraceError, match=f"{field} are a list of Trace"):
        TraceRow(timestamp=0, input_length=1, output_length=1, **wrong)


def test_statistics_say_videos_and_audio() -> None:
    text = TraceRow(timestamp=0.0, input_length=9, output_length=2)
    found = Trace([text, ROW]).statistics()
    assert (found.image_share, found.video_share, found.audio_share) == (0.5, 0.5, 0.5)
    assert found.frames is not None
    assert found.audio_s is not None
    assert found.visual_tokens is not None
    assert (found.frames["mean"], found.audio_s["mean"], found.visual_tokens["mean"]) == (8, 12.5, 655)
    assert "frames of a video" in str(found)
    assert "seconds of a clip" in found._repr_html_()
    without = Trace([text]).statistics()
    assert (without.frames, without.audio_share) == (None, 0.0)
    assert "audio" not in str(without)


# ---------------------------------------------------------------- what was served


def span(kind: str, content: str, tokens: int = 64, **fields: Any) -> MediaSpan:
    return MediaSpan(kind, tokens, 0, tokens, content, **fields)


def test_what_was_served_becomes_a_row() -> None:
    items = [span("video", f"v#{at}", strip=at) for at in range(3)]
    tiles = [span("image", f"i/{at}", width=7, height=8, strip=at) for at in range(2)]
    made = make_media([*tiles, *items, span("audio", "a", 79)])
    assert made == {
        "images": [TraceImage(width=7, height=8, tokens=128, content="i/0")],
        "videos": [TraceVideo(tokens=192, items=3, content="v#0")],
        "audio": [TraceAudio(tokens=79, content="a")],
    }


def test_items_of_one_video_after_another_stay_apart() -> None:
    twice = [span("video", f"v#{at}", strip=at) for at in (0, 1, 0, 1)]
    found = describe_media([*twice, span("video", "whole")])["videos"]
    assert [(each["content"], each["items"]) for each in found] == [("v#0", 2), ("v#0", 2), ("whole", 1)]


def test_a_row_without_clips_names_none() -> None:
    assert describe_media([]) == {"images": []}


# ---------------------------------------------------------------- drawn


def test_videos_and_clips_are_drawn() -> None:
    dataset = Dataset(
        name="mixed", videos=((8, 640, 360, 1.0),), clips=3, audio=(10.0, 4.0), prompt=(20, 2), output=(5, 1)
    )
    trace = synthesise(
        dataset,
        200,
        visual_tokens=lambda *_: 1,
        clip_tokens=lambda clip: 7 if isinstance(clip, TraceAudio) else 512,
        rate=1,
    )
    assert all((len(row.images), len(row.videos), len(row.audio), row.visual_tokens) == (0, 1, 3, 533) for row in trace)
    seconds = trace.statistics().audio_s
    assert seconds is not None
    assert seconds["mean"] == pytest.approx(10, rel=0.1)
    assert seconds["max"] > 15
    assert trace[0].input_length == trace[0].text_tokens + 533


def test_clips_without_a_rule_have_no_tokens() -> None:
    (row,) = synthesise("NextQA", 1, visual_tokens=lambda *_: 1, rate=1)
    assert (row.videos[0].frames, row.videos[0].tokens, row.images) == (8, None, [])


@pytest.mark.parametrize(
    "fields",
    [{}, {"clips": 1, "audio": (0.0, 0.0)}, {"videos": ((0, 1, 1, 1.0),)}, {"clips": -1, "sizes": ((1, 1, 1.0),)}],
)
def test_an_odd_dataset_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="images, videos or clips"):
        Dataset(name="odd", prompt=(2, 0), output=(2, 0), **fields)
