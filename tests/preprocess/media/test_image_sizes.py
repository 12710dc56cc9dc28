"""What a processor makes of an image is known before a pixel is decoded, and nothing beyond the limits is begun."""

from __future__ import annotations

import random
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.checkpoint_files import checkpoint
from support.image_reader import image_reader
from support.recordings import MULTIMODAL
from trinity.errors import BadMedia, RequestTooLarge
from trinity.preprocess.media import image_calls
from trinity.preprocess.media.image_calls import ImageTooLarge, count_bytes, guard_resizes, predict_pixels, resized
from trinity.preprocess.media.image_kind import ImageReader
from trinity.preprocess.media_limits import Estimate, MediaBudget, MediaLimits, MediaProblem, TooManyTokens, unit_s
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request

ONEVISION = "LlavaOnevisionImageProcessorPil"
STOCK: dict[
    str, dict[str, Any]
] = {  # the image processors that published checkpoints name, with transformers' own defaults
    "CLIPImageProcessorPil": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    "LlavaNextImageProcessorPil": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ONEVISION: {},
    "Qwen2VLImageProcessorPil": {},
    "GotOcr2ImageProcessorPil": {"crop_to_patches": True, "size": {"height": 448, "width": 448}},
    "Idefics3ImageProcessorPil": {},
    "SmolVLMImageProcessorPil": {"size": {"longest_edge": 1536}, "max_image_size": {"longest_edge": 384}},
    "Gemma3ImageProcessorPil": {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
    "MiniCPMV4_6ImageProcessorPil": {},
    "SiglipImageProcessorPil": {},
}


def make(name: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**{**STOCK[name], **settings})


def png(width: int, height: int) -> bytes:
    """A grey PNG of any size in some hundred bytes, written without Pillow."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes(width)) * height, 9)
    chunks = [(b"IHDR", head), (b"IDAT", rows), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


class Meter:
    """Counts the pixels that an image processor's resizes really make."""

    def __init__(self, images: Any) -> None:
        from transformers.image_processing_backends import PilBackend

        self.pixels = 0
        meter = self

        class Counted(PilBackend):
            def resize(self, *args: Any, **kwargs: Any) -> Any:
                made = super().resize(*args, **kwargs)
                meter.pixels += made.shape[-1] * made.shape[-2]
                return made

        images.__class__ = type(type(images).__name__, (type(images), Counted), {})


def sizes(seed: int, count: int) -> Iterator[tuple[int, int]]:
    """Usual and odd sizes: from square to a ratio of 45, and up to a thousand pixels."""
    draw = random.Random(seed)
    yield from [(1, 1), (336, 336), (640, 480), (900, 20)]
    for _ in range(count):
        side, ratio = draw.randint(20, 700), draw.choice([1, 1.5, 2, 5, 20])
        width, height = max(1, int(side * ratio**0.5)), max(1, int(side / ratio**0.5))
        yield draw.choice([(width, height), (height, width)])


@pytest.mark.parametrize(("name", "alone"), [*((name, True) for name in STOCK), (ONEVISION, False)])
def test_the_prediction_bounds_what_the_processor_really_makes(name: str, alone: bool) -> None:
    images = make(name)
    meter = Meter(images)
    for width, height in sizes(len(name), 6):
        try:
            predicted = predict_pixels(images, width, height, alone=alone)
        except ValueError:
            with pytest.raises(ValueError, match="ratio"):  # Qwen-VL says so itself
                images(Image.new("RGB", (width, height)))
            continue
        meter.pixels = 0
        picture = Image.new("RGB", (width, height))
        made = images([[picture]] if alone else [[picture, Image.new("RGB", (1, 1))]], return_tensors="np")
        assert predicted is not None
        known = [each for each in made.values() if np.asarray(each).dtype == np.float32]
        assert meter.pixels <= predicted + 2 * 384 * 384 * (not alone), (width, height)
        assert sum(each.nbytes for each in known) <= count_bytes(images, predicted) + 12 * 384 * 384 * (not alone)
        assert predicted <= 5 * max(meter.pixels, width * height) + max(width, height) ** 2 // 4, (width, height)


@pytest.mark.parametrize(("width", "height"), [(10_000, 1), (1, 10_000), (60_000, 1), (3_000, 1), (1_000, 1)])
def test_a_tiny_file_that_would_cost_gigabytes_is_refused_before_it_is_decoded(width: int, height: int) -> None:
    """31 s and 11 GB before: CLIP's processor scales the short side to 336, as LLaVA-1.5 has it."""
    processor = RequestProcessor(checkpoint("llava"), limits=MediaLimits(max_processed_pixels=1_000_000))
    data, began = png(width, height), time.perf_counter()
    with pytest.raises(BadMedia, match=r"image 1 of 1: becomes \d+ pixels .*max_processed_pixels is 1000000") as caught:
        processor.process(Request("<image>", images=[data], request_id="mine"))
    assert time.perf_counter() - began < 15, "a liveness bound: it takes a millisecond"
    assert caught.value.request_id == "mine"
    processor.close()


def test_the_defaults_refuse_it_for_llava_15_and_let_photographs_through() -> None:
    clip, limits = make("CLIPImageProcessorPil"), MediaLimits()
    assert predict_pixels(clip, 10_000, 1) == 336 * 3_360_000 + 336 * 336
    assert predict_pixels(clip, 1_000, 1) > limits.max_processed_pixels  # type: ignore[operator]
    for name in STOCK:
        images = make(name)
        for width, height in ((8000, 6000), (4000, 3000), (3500, 3600), (3000, 300), (1, 1), (64, 6400)):
            for alone in (True, False):
                made = predict_pixels(images, width, height, alone=alone)
                assert made is not None
                assert made <= limits.max_processed_pixels, (name, width, height, alone)
                assert 4 * count_bytes(images, made) <= limits.max_processed_bytes


def test_no_pixel_is_decoded_of_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = RequestProcessor(checkpoint("llava"))
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(BadMedia, match="max_processed_pixels"):
        processor.process(Request("<image>", images=[png(60_000, 1)]))
    processor.close()


def test_the_size_counts_that_the_image_has_when_it_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = Image.new("RGB", (90, 60))
    lying.info["exif"] = exif.tobytes()
    processor = RequestProcessor(checkpoint("internvl"))
    span = processor.process(Request("<image>", images=[lying])).work.media[0]
    assert (span.width, span.height) == (60, 90)
    processor.close()


# ---------------------------------------------------------------- tokens


@cache
def reader_of(name: str) -> ImageReader:
    return image_reader(RequestProcessor(checkpoint(name)))


@pytest.mark.parametrize("name", MULTIMODAL)
def test_predicted_tokens_are_those_that_come(name: str) -> None:
    """Of the image, and of what its expansion writes around it."""
    for width, height in ((336, 336), (640, 480), (900, 20), (33, 120), (1, 1)):
        estimate = reader_of(name).estimate(width, height)
        item = reader_of(name).read(Image.new("RGB", (width, height)))
        tokenizer = reader_of(name)._loaded.tokenizer
        written = len(tokenizer(item.expansion, add_special_tokens=False)["input_ids"])
        if estimate.tokens is None:
            assert name in ("minicpmv4_6", "smolvlm")
        else:
            assert item.tokens <= estimate.tokens <= written


def test_too_many_tokens_are_refused_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = RequestProcessor(checkpoint("llava"), limits=MediaLimits(max_prompt_tokens=15))
    Image.init()  # one of its plugins loads an image when it is imported
    unit_s()  # decodes the reference of prices, once in a process
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(RequestTooLarge, match=r"at least 16 tokens, and a prompt may have 15"):
        processor.process(Request("<image>", images=[png(60, 60)]))
    processor.close()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
def test_a_size_that_the_model_refuses_is_refused_without_a_pixel(name: str) -> None:
    with pytest.raises(MediaProblem, match=r"has 900 x 4 pixels, which the model's processor refuses .*ratio"):
        reader_of(name).estimate(900, 4)


# ---------------------------------------------------------------- one request together


def test_the_images_of_a_request_share_its_bytes() -> None:
    processor = RequestProcessor(checkpoint("llava"))
    one = image_reader(processor).estimate(80, 60).bytes
    processor.limits = MediaLimits(max_processed_bytes=3 * one)
    image = np.zeros((60, 80, 3), np.uint8)
    processor.process(Request("<image>" * 3, images=[image] * 3))
    with pytest.raises(BadMedia, match=rf"image 4 of 4: needs {one} bytes .* other media {3 * one}; .*is {3 * one}"):
        processor.process(Request("<image>" * 4, images=[image] * 4))
    processor.close()


def test_the_images_of_a_request_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MediaBudget(MediaLimits(preprocess_timeout_s=10), 100)
    now = iter([0.0, 7.0, 7.0, 11.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    for _ in range(2):
        with budget.timed():
            pass
    with pytest.raises(MediaProblem, match=r"took 11\.0 s, and preprocess_timeout_s is 10"), budget.timed():
        pytest.fail("it had no time left")


def test_a_budget_counts_from_many_threads() -> None:
    budget = MediaBudget(MediaLimits(max_processed_bytes=1000), 10**6)
    refused: list[MediaProblem] = []

    def spend() -> None:
        for _ in range(50):
            try:
                budget.charge(Estimate(1, 7))
            except MediaProblem as problem:
                refused.append(problem)

    threads = [threading.Thread(target=spend) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 300 - 1000 // 7
    with pytest.raises(TooManyTokens):
        MediaBudget(MediaLimits(), 5).check(Estimate(1, 1, 6))


# ---------------------------------------------------------------- processors that nobody described


@pytest.mark.parametrize("name", STOCK)
def test_every_resize_passes_the_guard_whatever_the_processor(name: str) -> None:
    plain, guarded, allowed = make(name), make(name), threading.local()
    guard_resizes(guarded, allowed)
    assert type(guarded).__name__ == name
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (90, 200, 3), dtype=np.uint8))
    want, found = plain([[picture]], return_tensors="np"), guarded([[picture]], return_tensors="np")
    assert all(np.array_equal(want[key], found[key]) for key in want)
    allowed.pixels = 1000
    with pytest.raises(ImageTooLarge, match="beyond max_processed_pixels"):
        guarded([[picture]])


def test_an_unknown_processor_is_stopped_where_it_goes_too_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_calls, "_is_plain", lambda _: False)
    processor = RequestProcessor(checkpoint("llava"), limits=MediaLimits(max_processed_pixels=1_000_000))
    assert image_reader(processor).estimate(10_000, 1).pixels == 0
    with pytest.raises(BadMedia, match=r"has 10000 x 1 pixels.*ImageTooLarge"):
        processor.process(Request("<image>", images=[png(10_000, 1)]))
    assert processor.process(Request("<image>", images=[png(100, 60)])).work.media
    assert processor.process(Request("<image>", media=[Media("image", png(100, 60))])).work.media
    processor.close()


@pytest.mark.parametrize(
    "size",
    [
        {"shortest_edge": 336},
        {"height": 30, "width": 50},
        {"shortest_edge": 100, "longest_edge": 300},
        {"max_height": 70, "max_width": 90},
    ],
)
@pytest.mark.parametrize(("width", "height"), [(90, 60), (61, 333), (2, 90), (50, 50)])
def test_the_size_after_a_resize_is_the_backends_own(size: dict[str, int], width: int, height: int) -> None:
    images = make("CLIPImageProcessorPil", size=size, do_center_crop=False)
    expected = resized(images.size, width, height)
    if not all(expected):
        with pytest.raises(ValueError, match="must be > 0"):
            images(Image.new("RGB", (width, height)))
        return
    made = images(Image.new("RGB", (width, height)), return_tensors="np")["pixel_values"]
    assert expected == (made.shape[-1], made.shape[-2])
