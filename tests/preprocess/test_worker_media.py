"""Sources of every kind through preprocessing processes: the pixels, the digest and the errors of threads."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import GifImagePlugin, Image, ImageCms, ImageFile, ImagePalette

from support.checkpoint_files import checkpoint
from trinity.errors import RequestError
from trinity.preprocess.media.images import Transparency, decode_rgb, image_digest, make_plain, read_image
from trinity.preprocess.media_limits import MediaLimits, MediaProblem, TooManyTokens
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.worker_processes import KillableProcessor
from trinity.request import Media, Request, Sampling, check_request

LIVENESS_S = 120.0
ORIENTATION = 274  # EXIF tag


pytestmark = pytest.mark.usefixtures("forked_workers")


def noise(height: int = 56, width: int = 84, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, width, channels), dtype=np.uint8)


def plain() -> Image.Image:
    return Image.fromarray(noise())


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def turned(kind: str) -> Image.Image:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return opened(saved(plain(), kind, exif=exif))


def turned_in_memory() -> Image.Image:
    image = plain()
    image.getexif()[ORIENTATION] = 6
    return image


def with_info(image: Image.Image, transparency: Any) -> Image.Image:
    image.info["transparency"] = transparency
    return image


class Tensor(torch.Tensor):
    pass


class Array(np.ndarray):
    pass


class Text(str):
    __slots__ = ()


class Named:
    """A path of somebody's own class."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


def sources(folder: Path) -> dict[str, Callable[[], Any]]:
    png = saved(plain(), "PNG")
    path = folder / "a.png"
    path.write_bytes(png)
    return {
        "bytes": lambda: png,
        "bytearray": lambda: bytearray(png),
        "memoryview": lambda: memoryview(png),
        "path": lambda: path,
        "text": lambda: Text(path),
        "relative path": lambda: Path("a.png"),
        "relative text": lambda: "a.png",
        "relative text of a class": lambda: Text("../" + folder.name + "/a.png"),
        "own relative path": lambda: Named(Path("a.png")),
        "own path": lambda: Named(path),
        "lazy": lambda: opened(png),
        "RGB with a transparent colour": lambda: with_info(plain(), (1, 2, 3)),
        "RGBA": lambda: Image.fromarray(noise(channels=4)),
        "LA": lambda: plain().convert("LA"),
        "L": lambda: plain().convert("L"),
        "P": lambda: plain().convert("P"),
        "P, one transparent": lambda: with_info(plain().convert("P"), 3),
        "P, all transparent": lambda: with_info(plain().convert("P"), bytes(range(256))),
        "P of RGBA": lambda: Image.fromarray(noise(channels=4)).quantize(16),
        "PA": lambda: plain().convert("P").convert("PA"),
        "I;16": lambda: Image.fromarray(noise()[:, :, 0].astype(np.uint16) * 200),
        "1": lambda: plain().convert("1"),
        "CMYK": lambda: plain().convert("CMYK"),
        "YCbCr": lambda: plain().convert("YCbCr"),
        "JPEG, turned": lambda: turned("JPEG"),
        "TIFF, turned": lambda: turned("TIFF"),
        "PNG, turned": lambda: turned("PNG"),
        "turned in memory": turned_in_memory,
        "GIF": lambda: opened(saved(plain(), "GIF", save_all=True, append_images=[Image.fromarray(noise(seed=1))])),
        "array": noise,
        "array of floats": lambda: noise().astype(np.float64) / 255,
        "array of 16 bits": lambda: noise()[:, :, 0].astype(np.uint16),
        "grey array": lambda: noise()[:, :, 0],
        "read-only array": lambda: np.frombuffer(noise().tobytes(), np.uint8).reshape(56, 84, 3),
        "array of a class": lambda: noise().view(Array),
        "mapped array": lambda: np.memmap(folder / "m", dtype=np.uint8, mode="w+", shape=(56, 84, 3)),
        "tensor": lambda: torch.from_numpy(noise()).permute(2, 0, 1),
        "tensor with a gradient": lambda: torch.from_numpy(noise()).float().requires_grad_() * 1.0,
        "tensor of a class": lambda: torch.from_numpy(noise()).as_subclass(Tensor),
        "tensor of bfloat16": lambda: torch.from_numpy(noise()).bfloat16(),
    }


def refused(folder: Path) -> dict[str, Callable[[], Any]]:
    png = saved(plain(), "PNG")
    return {
        "broken": lambda: opened(png[: len(png) // 2]),
        "no picture": lambda: np.array([object()]),
        "objects": lambda: np.full((9, 9, 3), None),
        "complex": lambda: np.zeros((9, 9, 3), complex),
        "wrong shape": lambda: torch.zeros(3, 3, 3, 3),
        "too many bytes": lambda: bytes(2_000_001),
        "too many pixels": lambda: Image.new("L", (3000, 3000)),
        "no such file": lambda: folder / "none.png",
        "an error": lambda: MediaProblem("is made up"),
    }


async def answer(processor: RequestProcessor, *given: Any) -> tuple[Any, ...]:
    request = Request("<image> x" * len(given), images=given, sampling=Sampling(seed=1), request_id="one")
    try:
        made = await processor.aprocess(check_request(request))
    except RequestError as error:
        return type(error), str(error)
    inputs = [(name, torch.as_tensor(value).tolist()) for each in made.inputs for name, value in each.items()]
    return made.work, inputs


async def test_each_source_is_what_it_is_on_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small: dict[str, Any] = {"max_pixels": 2_500_000, "max_image_bytes": 2_000_000, "max_images": 2}
    limits = MediaLimits(**small)
    model = await asyncio.to_thread(checkpoint, "llava")
    threads = await asyncio.to_thread(RequestProcessor, model, limits=limits)
    monkeypatch.chdir(model.parent)
    processes = await asyncio.to_thread(KillableProcessor, model.name, limits=MediaLimits(processes=1, **small))
    monkeypatch.chdir(tmp_path)  # the process stays where it was
    different: list[Any] = []
    errors: list[str] = []
    try:
        async with asyncio.timeout(LIVENESS_S):
            (media,) = processes._workers[processes._media_lane]
            pid = media.process
            for name, make in {**sources(tmp_path), **refused(tmp_path)}.items():
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of read-only arrays, by torch
                    one, other = await answer(threads, make()), await answer(processes, make())
                errors += [name] if isinstance(one[0], type) else []
                if repr(one) != repr(other):
                    different.append((name, one[:1], other[:1]))
            assert not different
            assert errors == list(refused(tmp_path))
            one, other = [await answer(each, *[noise()] * 3) for each in (threads, processes)]
            assert one == other
            await never_decoded(processes)
            await shared(processes)
            assert media.process == pid
            os.kill(pid, signal.SIGKILL)
            again = await answer(processes, noise())
            assert again == await answer(threads, noise()), "nor does the next one look for the model elsewhere"
    finally:
        await processes.aclose()
        await threads.aclose()


async def never_decoded(processes: KillableProcessor) -> None:
    """What is refused for its size has cost nothing, here or there."""
    large = opened(saved(Image.new("L", (3000, 3000)), "PNG"))
    with pytest.raises(RequestError, match="max_pixels"):
        await processes.aprocess(Request("<image>", images=[large]))
    assert getattr(large, "_im", None) is None
    with pytest.raises(RequestError, match="max_images"):
        await processes.aprocess(Request("<image>" * 3, images=[large] * 3))
    with pytest.raises(RequestError, match="takes no media of kind 'video'"):
        await processes.aprocess(Request("x", media=[Media("video", large)]))


async def shared(processes: KillableProcessor) -> None:
    """One image, opened and not yet read, in two requests at a time: each gets its pixels."""
    data = saved(Image.fromarray(noise(700, 700)), "PNG")
    expected = (await processes.aprocess(Request("<image>", images=[data]))).work.media
    for _ in range(3):
        image = opened(data)
        made = await asyncio.gather(*(processes.aprocess(Request("<image>", images=[image])) for _ in range(3)))
        assert [each.work.media for each in made] == [expected] * 3


def test_what_is_sent_is_plain_and_the_same_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    limits = MediaLimits(max_pixels=10_000)
    for name, make in sources(tmp_path).items():
        sent = make_plain(make(), limits, lambda *_: None)
        assert type(sent) in (bytes, str, type(tmp_path), np.ndarray, Image.Image), name
        assert image_digest(read_image(sent, limits)) == image_digest(read_image(make(), limits)), name


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "WEBP", "AVIF", "BMP", "TIFF", "PPM", "MPO"])
def test_an_object_that_is_not_decoded_is_sent_as_its_file(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 726a4303 it was decoded by the process that sent it."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    more: dict[str, Any] = {} if form in ("BMP", "PPM", "GIF") else {"exif": exif}
    if form in ("GIF", "WEBP", "TIFF", "MPO"):
        more |= {"save_all": True, "append_images": [Image.fromarray(noise(seed=1))]}
    data = saved(plain(), form, **more)
    (tmp_path / "a").write_bytes(data)

    def load(image: Any) -> Any:
        raise AssertionError("it was decoded")

    sent = []
    with monkeypatch.context() as patched:
        patched.setattr(ImageFile.ImageFile, "load", load)
        for source in (io.BytesIO(data), tmp_path / "a"):
            with Image.open(source) as image:
                place = image.fp and image.fp.tell()
                sent.append(make_plain(image, MediaLimits(), lambda *_: None))
                assert (image.fp and image.fp.tell()) == place
                if form != "PNG":  # which decodes to look for its EXIF
                    image.getexif()
                    sent.append(make_plain(image, MediaLimits(), lambda *_: None))
    assert all(each == data for each in sent)
    assert image_digest(read_image(opened(data), MediaLimits())) == image_digest(read_image(data, MediaLimits()))


def drafted() -> Image.Image:
    image = opened(saved(plain().resize((800, 600)), "JPEG"))
    image.draft("RGB", (200, 150))
    return image


def at_second_frame(kind: str) -> Image.Image:
    image = opened(saved(plain(), kind, save_all=True, append_images=[Image.fromarray(noise(seed=1))]))
    image.seek(1)
    return image


def turned_otherwise(kind: str) -> Image.Image:
    image = turned(kind)
    image.getexif()[ORIENTATION] = 3
    return image


def without_profile() -> Image.Image:
    swapped = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    swapped[:] = swapped.replace(b"rXYZ", b"TEMP").replace(b"bXYZ", b"rXYZ").replace(b"TEMP", b"bXYZ")
    image = opened(saved(plain(), "PNG", icc_profile=bytes(swapped)))
    assert make_plain(image, MediaLimits(), lambda *_: None) == saved(plain(), "PNG", icc_profile=bytes(swapped))
    del image.info["icc_profile"]
    return image


def with_other_colours() -> Image.Image:
    image = opened(saved(plain().convert("P"), "PNG"))
    image.palette = ImagePalette.ImagePalette("RGB", bytes(range(256)) * 3)
    return image


def inverted() -> Image.Image:
    image: Any = opened(saved(Image.fromarray(noise()[:, :, 0].astype(np.uint16) * 200), "TIFF"))
    image.tag_v2[262] = 0
    return cast("Image.Image", image)


CHANGED: dict[str, Callable[[], Image.Image]] = {
    "a draft": drafted,
    "another frame of a GIF": lambda: at_second_frame("GIF"),
    "another frame of a TIFF": lambda: at_second_frame("TIFF"),
    "another frame of a WebP": lambda: at_second_frame("WEBP"),
    "another frame of an MPO": lambda: at_second_frame("MPO"),
    "turned otherwise": lambda: turned_otherwise("JPEG"),
    "a TIFF turned otherwise": lambda: turned_otherwise("TIFF"),
    "without its profile": without_profile,
    "a transparent colour": lambda: with_info(opened(saved(plain(), "PNG")), tuple(noise()[0, 0].tolist())),
    "other colours": with_other_colours,
    "white is 0": inverted,
}


@pytest.mark.parametrize("name", CHANGED)
def test_an_object_that_its_program_has_changed_is_sent_as_it_is(name: str) -> None:
    image: Any = CHANGED[name]()
    file = image.fp
    file.seek(0)
    wanted = image_digest(decode_rgb(CHANGED[name](), "white"))
    assert wanted != image_digest(read_image(file.read(), MediaLimits())), "the control"
    sent = make_plain(CHANGED[name](), MediaLimits(), lambda *_: None)
    assert isinstance(sent, Image.Image)
    assert image_digest(sent) == wanted


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        (ImageFile, "LOAD_TRUNCATED_IMAGES", True),
        (Image, "MAX_IMAGE_PIXELS", 6000),
        (GifImagePlugin, "LOADING_STRATEGY", GifImagePlugin.LoadingStrategy.RGB_ALWAYS),
    ],
)
def test_an_object_is_decoded_as_its_program_has_set_pillow(
    module: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 44286955 the process that read its file had Pillow's own settings."""
    data = saved(plain(), "JPEG")[:-200]
    assert make_plain(opened(data), MediaLimits(), lambda *_: None) == data, "the control"
    monkeypatch.setattr(module, name, value)
    if name == "LOAD_TRUNCATED_IMAGES":
        assert isinstance(make_plain(opened(data), MediaLimits(), lambda *_: None), Image.Image)
    else:
        with pytest.raises(MediaProblem, match="truncated"):
            make_plain(opened(data), MediaLimits(), lambda *_: None)


def test_a_relative_path_counts_from_where_its_request_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    given = ["a.png", Path("a.png"), Named(Path("a.png")), "..", "https://there/a", "/a.png", Path("/a.png"), b"a.png"]
    request = check_request(Request("x", images=given, media=[Media("image", "m.png")]))
    limits = MediaLimits(allow_paths=(".", "more"))
    here = tmp_path / "in"
    assert request.images[:4] == (*(f"{here}/./a.png",) * 3, f"{here}/./..")
    assert list(request.images[4:]) == given[4:]
    assert request.media[0].source == f"{here}/./m.png"
    assert limits.allow_paths == (f"{here}/.", f"{here}/more")
    assert check_request(request) == request
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").rmdir()
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert check_request(Request("x", images=["a.png", Path("a.png")])).images == ("a.png", Path("a.png"))


@pytest.mark.parametrize("problem", [MediaProblem("too large"), TooManyTokens("too many")])
def test_a_problem_in_place_of_an_image_is_raised_where_it_is_read(problem: Exception) -> None:
    with pytest.raises(type(problem), match=str(problem)):
        read_image(problem, MediaLimits())


def test_a_size_is_checked_before_an_array_is_copied() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("it was copied")

    class Large:
        shape, ndim, dtype, __array__ = (9000, 9000, 3), 3, np.uint8, never
        __array_interface__: Any = ()

    with pytest.raises(MediaProblem, match="max_pixels"):
        make_plain(Large(), MediaLimits(), never)
    assert os.fspath(Named(Path("x"))) == "x"


@pytest.mark.parametrize("transparency", ["white", "drop"])
def test_processes_put_behind_transparent_pixels_what_the_pipeline_says(transparency: Transparency) -> None:
    rgba = noise(channels=4)
    limits = MediaLimits(processes=1)
    processes = KillableProcessor(checkpoint("llava"), limits=limits, transparency=transparency)
    threads = RequestProcessor(checkpoint("llava"), transparency=transparency)
    try:
        for source in (saved(Image.fromarray(rgba), "PNG"), Image.fromarray(rgba), rgba):
            request = Request("<image>", images=[source])
            made, wanted = asyncio.run(processes.aprocess(request)), threads.process(request)
            assert torch.equal(made.inputs[0]["pixel_values"], wanted.inputs[0]["pixel_values"])
            assert made.work.media == wanted.work.media
    finally:
        processes.close()
        threads.close()
