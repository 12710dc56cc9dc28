"""The cost of media is known before one is decoded, and a request beyond its bound is rejected for next to nothing."""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from support.checkpoint_files import checkpoint
from support.costly_media import (
    avif_of_tracks,
    avif_of_units,
    bmp_of_runs,
    chunk,
    encode,
    jpeg_of_directories,
    jpeg_of_frames,
    jpeg_of_names,
    jpeg_of_scans,
    movie_of_boxes,
    photograph,
    plain_ppm,
    png,
    png_of_headers,
    scaled_ppm,
    sequence_header,
    tiff_of_skipped_tags,
    tiff_of_strips,
    wav,
)
from support.video_files import ogg_of_pages
from trinity.errors import BadMedia, RequestTooLarge
from trinity.preprocess.media import images as media
from trinity.preprocess.media.image_prices import ImagePrice, price_image
from trinity.preprocess.media.images import price_picture, read_image
from trinity.preprocess.media.sound_headers import read_sound
from trinity.preprocess.media.video_files import read_video
from trinity.preprocess.media.video_prices import find_frames
from trinity.preprocess.media_limits import MediaCost, MediaLimits, MediaProblem, Price, unit_s
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request

LIMITS = MediaLimits()
EXPENSIVE = {
    "a JPEG of many scans": (jpeg_of_scans(3000, 2999, 6000), "6006 scans"),
    "a PPM whose samples are scaled": (scaled_ppm(5000, 4400), "scaled one by one"),
    "a BMP of runs": (bmp_of_runs(8000, 4000), "run-length"),
    "a TIFF whose strips repeat": (tiff_of_strips(4000, 4000, 20_000), "40000 strips"),
}
REFUSED = {
    "P1": (b"P1 2 2 0 1 1 0", "a plain PPM, whose pixels are text"),
    "P2": (b"P2\n# a comment\n2 2\n255\n0 1 2 3", "a plain PPM, whose pixels are text"),
    "P3": (plain_ppm(9, 9), "a plain PPM, whose pixels are text"),
    "PFM": (b"Pf\n2 2\n1.0\n" + bytes(16), "a PPM of an uncommon kind"),
    "ICO": (encode(Image.new("RGB", (16, 16)), "ICO"), "an ICO or CUR, which holds other images"),
    "JPEG 2000": (encode(Image.new("RGB", (16, 16)), "JPEG2000"), "a JPEG 2000"),
    "PDF": (b"%PDF-1.7 and so on", "a PDF"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "a HEIC"),
}


@pytest.fixture(scope="module")
def processor() -> Iterator[RequestProcessor]:
    made = RequestProcessor(checkpoint("llava"))
    yield made
    made.close()


@pytest.fixture
def undecoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a test in which an image is decoded."""
    unit_s()  # whose own decode comes first

    def load(image: Any) -> Any:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)


@pytest.mark.parametrize("name", EXPENSIVE)
@pytest.mark.usefixtures("undecoded")
def test_a_medium_beyond_the_bound_is_rejected_before_it_is_decoded(name: str) -> None:
    data, cause = EXPENSIVE[name]
    limits = MediaLimits(max_media_cpu_s=20_000 * unit_s())  # of a fast machine and of a slow one
    began = time.thread_time()
    with pytest.raises(MediaProblem, match=cause) as caught:
        read_image(data, limits)
    spent = time.thread_time() - began
    assert "the limit max_media_cpu_s is " in str(caught.value)
    most = 0.05 + 0.02 * len(data) / (1 << 20)
    assert spent <= most * max(1.0, unit_s() / 6e-4), (spent, most)  # of a machine that decodes the reference in 0.6 ms


SIZE = 4 << 20  # bytes of each
LONG = {
    "segments of a JPEG": b"\xff\xd8" + b"\xff\xe0\0\2" * (SIZE // 4),
    "scans of a small JPEG": jpeg_of_scans(64, 64, SIZE // 24),
    "fill bytes of a JPEG": jpeg_of_scans(64, 64, 1)[:-2] + b"\xff" * SIZE,
    "chunks of a PNG": png(64, 64, extra=chunk(b"teSt", b"") * (SIZE // 12)),
    "blocks of a GIF": b"GIF89a" + bytes((9, 0, 9, 0, 0, 0, 0)) + b"!\xfe" + b"\1a" * (SIZE // 2),
    "strips of a TIFF": tiff_of_strips(1000, 1000, SIZE // 16),
    "boxes of an AVIF": b"\0\0\0\x18ftypavif\0\0\0\0mif1avif" + b"\0\0\0\x08free" * (SIZE // 8),
    "chunks of a WebP": b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(10) + b"ABCD\0\0\0\0" * (SIZE // 8),
    "comments of a PPM": b"P6\n#" + b"c" * SIZE,
    "blocks of a Matroska": b"\x1a\x45\xdf\xa3\x80" + b"\xa3\x84\x81\0\0\0" * (SIZE // 6),
    "chunks of an AVI": b"RIFF\0\0\0\0AVI " + b"00dc\0\0\0\0" * (SIZE // 8),
    "tags of an FLV": b"FLV" + bytes(10) + (b"\x09\0\0\1" + bytes(11)) * (SIZE // 15),
    "elements of a Matroska": b"\x1a\x45\xdf\xa3\x80" + b"\xec\x80" * (SIZE // 2),
    "boxes of the fragments of an MP4": movie_of_boxes(SIZE),
    "pages of an Ogg": ogg_of_pages(SIZE // 27),
    "units of each item of an AVIF": avif_of_units(SIZE),
    "headers of sequences of an AVIF": avif_of_units(SIZE, sequence_header(), 1000),
    "samples of the tracks of an AVIF": avif_of_tracks(SIZE, 200),
    "directories of EXIF of a JPEG": jpeg_of_directories(SIZE >> 16),
}


@pytest.mark.parametrize("name", LONG)
def test_a_walk_costs_little_whatever_it_meets(name: str) -> None:
    data, spent = LONG[name], []
    price = find_frames if name.endswith(("Matroska", "AVI", "FLV", "MP4", "Ogg")) else price_image
    for _ in range(2):
        began = time.thread_time()
        with suppress(MediaProblem):
            price(data)
        spent.append(time.thread_time() - began)
    assert min(spent) <= (0.05 + 0.02 * len(data) / (1 << 20)) * max(1.0, unit_s() / 6e-4), spent


@pytest.mark.parametrize("name", REFUSED)
def test_a_format_that_is_not_in_the_table_is_rejected_by_name(name: str) -> None:
    data, names = REFUSED[name]
    with pytest.raises(MediaProblem) as caught:
        read_image(data, LIMITS)
    assert f"is {names}, which is not accepted; give one of" in str(caught.value)


HEADERS = {
    "a comment inside of a number": b"P6\n1#\n20 1#\n20 254\n",
    "a comment behind the last number": b"P6\n20 20 25#\n4\n",
    "a long comment": b"P6\n20 20\n#" + b"c" * 5000 + b"\n254\n",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_ppm_is_rejected_where_pillow_would_read_other_numbers(name: str) -> None:
    data = HEADERS[name] + bytes(120 * 120 * 3)
    assert Image.open(io.BytesIO(data)).size in ((120, 120), (20, 20))
    with pytest.raises(MediaProblem, match="a PPM whose header cannot be read"):
        read_image(data, LIMITS)


PLAIN = encode(Image.new("RGB", (900, 900)), "JPEG")
LARGER = {
    "a PNG of two headers": png_of_headers(1, 900),
    "a PNG of two headers of one size": png_of_headers(900, 900),
    "a JPEG with a frame of another kind": jpeg_of_frames(PLAIN, 0xDE, 1000, at_the_end=False),
    "a TIFF whose first sides are skipped": tiff_of_skipped_tags(900),
}


@pytest.mark.usefixtures("undecoded")
@pytest.mark.filterwarnings("ignore:Tag data larger")
@pytest.mark.parametrize("name", LARGER)
def test_an_image_that_opens_as_another_than_was_priced_is_rejected_before_it_is_decoded(name: str) -> None:
    with pytest.raises(MediaProblem, match="header"):
        read_image(LARGER[name], LIMITS)


@pytest.mark.usefixtures("undecoded")
def test_no_image_is_decoded_that_opens_larger_than_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the walk of its format reads otherwise than Pillow."""
    monkeypatch.setattr(media, "price_image", lambda _: ImagePrice("JPEG", 899, 900, Price(0.0)))
    with pytest.raises(MediaProblem, match="opens as an image of 900 x 900 pixels, and its header has 899 x 900"):
        read_image(PLAIN, LIMITS)


def test_a_jpeg_costs_what_its_largest_frame_does() -> None:
    for side, end in ((1, True), (1000, True), (1000, False)):
        found = price_image(jpeg_of_frames(PLAIN, 0xC0, side, at_the_end=end))
        assert found.width == found.height == max(900, side)
        assert found.price.units >= price_image(PLAIN).price.units


def test_components_of_one_name_cost_what_others_do() -> None:
    one, four = (price_image(jpeg_of_names(900, 900, names)).price for names in (b"\1\1\1\1", b"\1\2\3\4"))
    assert one.units >= four.units
    assert one.passing >= four.passing


@pytest.mark.usefixtures("undecoded")
@pytest.mark.parametrize("form", ["bytes", "object"])
def test_one_expensive_picture_is_bad_media(processor: RequestProcessor, form: str) -> None:
    data = EXPENSIVE["a JPEG of many scans"][0]
    source = data if form == "bytes" else Image.open(io.BytesIO(data))
    for ask in (processor.media_cost, processor.process):
        with pytest.raises(BadMedia, match=r"image 1 of 1.*: is a JPEG of 3000 x 2999 pixels with 6006 scans"):
            ask(Request("<image> what", media=[Media("image", source)]))


@pytest.mark.usefixtures("undecoded")
def test_pictures_that_are_too_expensive_together_are_too_large_a_request(processor: RequestProcessor) -> None:
    limits = MediaLimits(max_media_cpu_s=40 * unit_s())
    tight = RequestProcessor(checkpoint("llava"), limits=limits)
    one = encode(photograph(512, 512), "JPEG")
    tight.media_cost(Request("<image> what", images=[one]))
    for ask in (tight.media_cost, tight.process):
        with pytest.raises(RequestTooLarge, match=r"the request's 8 media would take .* the limit max_media_cpu_s"):
            ask(Request("<image>" * 8, images=[one] * 8))
    tight.close()
    with pytest.raises(RequestTooLarge, match=r"need \d+ bytes .* limit max_media_bytes is 1073741824: give"):
        processor.media_cost(Request("<image>" * 9, images=[png(8000, 7999, 1, 0)] * 9))


@pytest.mark.asyncio
async def test_a_request_beyond_its_bound_is_rejected_on_every_way_in() -> None:
    processor = RequestProcessor(checkpoint("llava"))
    small, bad = encode(photograph(64, 64), "PNG"), EXPENSIVE["a JPEG of many scans"][0]
    with pytest.raises(BadMedia, match="image 2 of 2"):
        await processor.aprocess(Request("<image><image>", images=[small, bad]))
    with pytest.raises(BadMedia, match="image 1 of 1"):
        await processor.aprocess(Request("<image>", images=[bad]))
    await processor.aclose()


def test_costs_of_a_request_are_sums(processor: RequestProcessor) -> None:
    photo = encode(photograph(640, 480), "JPEG")
    one = processor.media_cost(Request("<image>", images=[photo]))
    two = processor.media_cost(Request("<image><image>", images=[photo, photo]))
    assert processor.media_cost(Request("none")) == MediaCost()
    assert two.cpu_s == pytest.approx(2 * one.cpu_s)
    assert one.bytes < two.bytes <= 2 * one.bytes


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "AVIF", "BMP", "TIFF", "PPM"])
def test_an_undecoded_object_costs_what_its_bytes_do(form: str) -> None:
    data = encode(photograph(320, 200), form)
    of_bytes, of_object = price_picture(data, LIMITS), price_picture(Image.open(io.BytesIO(data)), LIMITS)
    assert of_bytes == of_object
    assert (of_bytes.width, of_bytes.height) == (320, 200)
    decoded = Image.open(io.BytesIO(data))
    decoded.load()
    assert price_picture(decoded, LIMITS).price.units < of_bytes.price.units
    assert np.array_equal(np.asarray(read_image(data, LIMITS)), np.asarray(read_image(decoded, LIMITS)))


@pytest.mark.parametrize(("bits", "subtype"), [(8, 1), (16, 1), (24, 1), (32, 3), (8, 6), (8, 7)])
def test_a_wav_has_the_samples_that_its_decoder_finds_whatever_its_blocks_say(bits: int, subtype: int) -> None:
    soundfile: Any = pytest.importorskip("soundfile")
    plain = bytearray(wav(1200, 2, 16_000, bits))
    plain[20:22] = subtype.to_bytes(2, "little")
    for block in (2 * bits // 8, 64, 60_000):
        plain[32:34] = block.to_bytes(2, "little")
        assert soundfile.SoundFile(io.BytesIO(plain)).frames == 1200, "the control"
        assert read_sound(bytes(plain)).samples == 1200


def test_strips_whose_lengths_are_of_16_bits_are_counted() -> None:
    """At a711874b such a TIFF of more than 64 KiB was refused, for a sum that has no room in 16 bits."""
    noise, file = np.random.default_rng(0).integers(0, 256, (500, 500), dtype=np.uint8), io.BytesIO()
    Image.fromarray(noise).save(file, "TIFF", compression="tiff_lzw", strip_size=4096)
    opened: Any = Image.open(file)
    assert opened.tag_v2.tagtype[279] == 3, "SHORT"
    assert sum(opened.tag_v2[279]) > 1 << 16
    found, plain = price_image(file.getvalue()), io.BytesIO()
    assert found[:3] == ("TIFF", 500, 500)
    Image.fromarray(noise).save(plain, "TIFF", compression="tiff_lzw")
    assert found.price.units == pytest.approx(price_image(plain.getvalue()).price.units, rel=0.5)


@pytest.mark.parametrize("offset", [2**40, 2**63, 2**64 - 1])
def test_broken_exif_costs_its_picture_nothing(offset: int) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 48)).save(file, "JPEG", exif=b"Exif\0\0II+\0\x08\0\0\0" + struct.pack("<Q", offset))
    assert price_image(file.getvalue())[:3] == ("JPEG", 64, 48)


@pytest.mark.parametrize("width", [float("inf"), float("nan"), 1e300, -5.0])
def test_a_width_that_is_none_is_a_problem_of_its_file(width: float) -> None:
    def field(name: bytes, value: float) -> bytes:
        return struct.pack(">H", len(name)) + name + b"\0" + struct.pack(">d", value)

    def tag(kind: int, body: bytes) -> bytes:
        return bytes([kind]) + len(body).to_bytes(3, "big") + bytes(7) + body + struct.pack(">L", len(body) + 11)

    told = b"\2\0\x0aonMetaData\x08\0\0\0\2" + field(b"width", width) + field(b"height", 100.0) + b"\0\0\x09"
    file = b"FLV\1\1\0\0\0\x09\0\0\0\0" + tag(18, told) + tag(9, b"\x12" + bytes(50))
    with pytest.raises(MediaProblem):
        read_video(file, MediaLimits(), lambda _: [0])
