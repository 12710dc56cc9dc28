"""ImageCalls: calls a model's own processor on images alone, and predicts the sizes that it will make of them.

Processors differ in how they want images (nested by prompt, or as one list) and what must stand around a placeholder
(nothing, or the tokens that their chat template writes there). Which form a processor takes is found by trying.

An image of 10,000 x 1 pixels is 110 bytes as a PNG. CLIP's processor scales its short side to 336 and has a billion
pixels. ``predict_pixels`` tells so in a fraction of a millisecond, before a pixel is decoded. It asks the processors'
own methods for grids and sizes, and knows for each class which arrays it makes of them.

``guard_resizes`` holds for every class, whether or not it is known here: no resize begins that goes beyond the limit.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

import msgspec

from trinity.preprocess.media.media_kinds import LoadedProcessor

if TYPE_CHECKING:
    from trinity.preprocess.media.images import Picture

_BACKENDS = ("PilBackend", "TorchvisionBackend")
_BYTES = 12  # of a pixel with three channels of float32
TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"}
_FURTHER_TEXT = " a b c d e f"
Made = tuple[str, list[int], dict[str, Any]]
"""Expanded text, its ids, and the encoder's inputs by name."""
_BEFORE, _BEHIND = "qzq", "zqz"  # no tokenizer has them, and no processor looks for them
_SPARED = " \n<"  # before these no gap is left
_GAPPED = ("a", "1", ".", "é")


class ImageTooLarge(ValueError):
    """A processor was about to make more of an image than is allowed."""


def predict_pixels(images: Any, width: int, height: int, *, alone: bool = True) -> int | None:
    """Sum the pixels of all arrays that an image processor makes of one image; None for a class that is unknown here.

    - ``images``: transformers' image processor, with its PIL backend.
    - ``alone`` (True): its prompt has no other image.

    Raises ``ValueError`` if the processor refuses the size.
    """
    for each in type(images).__mro__:
        if each.__name__ in _RULES:
            return _RULES[each.__name__](images, width, height, alone)
    return _area(images, width, height) if _is_plain(images) else None


def count_bytes(images: Any, pixels: int) -> int:
    """Count the bytes of so many pixels: resized, and once more as the encoder gets them, for Qwen-VL in two frames."""
    frames = getattr(images, "temporal_patch_size", None) or 1
    return pixels * _BYTES * (1 + int(frames))


def _is_plain(images: Any) -> bool:
    from transformers.image_processing_backends import PilBackend

    # Its public ``preprocess`` is the same for all: what a class does otherwise, it does in this method.
    return isinstance(images, PilBackend) and type(images)._preprocess is PilBackend._preprocess


def resized(size: Any, width: int, height: int) -> tuple[int, int]:
    """Compute (width, height) after a resize to a processor's ``size``, as transformers' PIL backend does."""
    from transformers import image_transforms
    from transformers.image_utils import get_image_size_for_max_height_width

    if size.shortest_edge and size.longest_edge:
        rows, columns = image_transforms.get_size_with_aspect_ratio(
            (height, width), size.shortest_edge, size.longest_edge
        )
    elif size.shortest_edge:
        short = size.shortest_edge
        return (int(short * width / height), short) if height <= width else (short, int(short * height / width))
    elif size.max_height and size.max_width:
        rows, columns = get_image_size_for_max_height_width((height, width), size.max_height, size.max_width)
    else:
        rows, columns = size.height, size.width
    return columns, rows


def _area(images: Any, width: int, height: int) -> int:
    """Pixels after the resize, and after the crop where there is one."""
    columns, rows = resized(images.size, width, height) if images.do_resize else (width, height)
    cropped = images.crop_size.height * images.crop_size.width if images.do_center_crop and images.crop_size else 0
    return int(columns * rows + cropped)


def _anyres(images: Any, width: int, height: int, alone: bool) -> int:
    """LLaVA-NeXT: the image over the best of a list of canvases, tiles of that, and the image as one more tile."""
    from transformers.image_processing_utils import select_best_resolution

    rows, columns = select_best_resolution((height, width), images.image_grid_pinpoints)
    crop, size = images.crop_size, images.size
    tile = (crop and crop.height) or size.height or size.shortest_edge
    tiles = 1 + math.ceil(rows / tile) * math.ceil(columns / tile)
    return int(2 * rows * columns + tile * tile + tiles * _area(images, tile, tile))


def _onevision(images: Any, width: int, height: int, alone: bool) -> int:
    """LLaVA-OneVision: tiles of an image that is alone, else the image padded to a square of a quarter of the bytes."""
    if alone:
        return _anyres(images, width, height, alone)
    side = max(width, height)
    return side * side // 4 + _area(images, side, side)


def _patches(images: Any, width: int, height: int, alone: bool) -> int:
    """Qwen-VL: whole patches, as many as its limits allow."""
    return int(images.get_number_of_image_patches(height, width) * images.patch_size**2)


def _canvas(images: Any, width: int, height: int, alone: bool) -> int:
    """InternVL: tiles of one size, and a thumbnail where there are several."""
    tiles = images.get_number_of_image_patches(height, width)
    return int(2 * tiles * images.size.height * images.size.width)


def _split(images: Any, width: int, height: int, alone: bool) -> int:
    """Idefics3, SmolVLM: the longer side to one length, both sides to multiples of a tile, tiles and a thumbnail."""
    longest, tile = images.size["longest_edge"], images.max_image_size["longest_edge"]
    first = longest * math.ceil(longest * min(width, height) / max(width, height) + 1)
    tiles, _rows, _columns = images.get_number_of_image_patches(height, width)
    return int(first + 2 * max(1, tiles) * tile * tile)


def _crops(images: Any, width: int, height: int, alone: bool) -> int:
    """Gemma 3: the image, and crops of it where it is long and that is asked for."""
    names = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
    crops = 0
    if images.do_pan_and_scan:
        settings = [getattr(images, f"pan_and_scan_{name}") for name in names]
        crops = len(images.pan_and_scan(_no_pixels(width, height), *settings))
    return (1 + crops) * _area(images, width, height)


def _slices(images: Any, width: int, height: int, alone: bool) -> int:
    """MiniCPM-V: the image at about one size, and slices of it in a grid where it is large."""
    settings = {"scale_resolution": images.scale_resolution, "patch_size": images.patch_size}
    if "downsample_mode" in signature(images.find_best_resize).parameters:  # not in transformers 5.17
        settings["downsample_mode"] = images.downsample_mode
    grid = None
    if images.slice_mode:
        grid = images.get_sliced_grid((height, width), images.max_slice_nums, images.scale_resolution)
    rows, columns = images.find_best_resize((height, width), **settings, allow_upscale=grid is None)
    pixels = 2 * rows * columns
    if grid is not None:
        rows, columns = images.get_refine_size((height, width), grid, **settings, allow_upscale=True)
        pixels += 2 * rows * columns
    return int(pixels)


def _no_pixels(width: int, height: int) -> Any:
    """Make an array [3, height, width] that takes no memory, for methods that read its shape or cut it."""
    import numpy as np

    return np.broadcast_to(np.uint8(0), (3, height, width))


_RULES: dict[str, Callable[[Any, int, int, bool], int]] = {
    "Gemma3ImageProcessorPil": _crops,
    "GotOcr2ImageProcessorPil": _canvas,
    "Idefics3ImageProcessorPil": _split,
    "LlavaNextImageProcessorPil": _anyres,
    "LlavaOnevisionImageProcessorPil": _onevision,
    "MiniCPMV4_6ImageProcessorPil": _slices,
    "Qwen2VLImageProcessorPil": _patches,
    "SmolVLMImageProcessorPil": _split,
}


def guard_resizes(images: Any, allowed: threading.local) -> None:
    """Have an image processor raise ``ImageTooLarge`` before a resize that goes beyond ``allowed.pixels``.

    ``allowed.pixels`` is counted down by each resize of this thread; without it nothing is counted. Results stay the
    same. Does nothing to a processor that is of none of transformers' backends.
    """
    backend: Any = next((each for each in type(images).__mro__ if each.__name__ in _BACKENDS), None)
    if backend is None:
        return

    class Guard(backend):  # type: ignore[misc]
        """Stands between a family's class and the backend, where every resize comes by with its size."""

        def resize(self, image: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
            left = getattr(allowed, "pixels", None)
            if left is not None:
                columns, rows = resized(size, image.shape[-1], image.shape[-2])
                allowed.pixels = left - columns * rows
                if allowed.pixels < 0:
                    raise ImageTooLarge(f"a resize to {columns} x {rows} pixels is beyond max_processed_pixels")
            return super().resize(image, size, *args, **kwargs)

    kind = type(images)
    images.__class__ = type(kind.__name__, (kind, Guard), {})  # transformers keys settings by this name


class ImageCalls:
    """Runs a model's processor on images, with nothing but their placeholders as text.

    - ``loaded``: the processor.
    - ``probe``: a plain image, on which forms are tried. Raises what the first form raises if none works.

    ``special`` tells if the processor has its tokenizer add special tokens to a prompt; ``seams`` is what it writes
    around a prompt and where images and text meet, plain ones if that cannot be told.
    """

    def __init__(self, loaded: LoadedProcessor, probe: Picture) -> None:
        self._loaded = loaded
        self._token, marker = loaded.placeholders["image"].token, loaded.placeholders["image"].marker
        self._nested, self._marker = self._find_form(probe, list(dict.fromkeys((self._token, marker))))
        self.special: bool = loaded.last_call.special
        self.seams = self._find_seams(probe)
        self._texts = TEXT_KEYS | self._find_texts(probe)

    def call(self, images: Sequence[Picture]) -> Made:
        """Run the processor on the images of one prompt, as a chat gives them. Raises what the processor raises."""
        output = self._run(images, self._marker * len(images))
        inputs = {name: value for name, value in output.items() if name not in self._texts}
        return self.seams.unframe(self._loaded.last_call.text), output["input_ids"][0].tolist(), inputs

    def strip(self, text: str) -> str:
        """Take what stands around a placeholder off the expansion of one image."""
        before, after = self._marker.split(self._token)
        return text.removeprefix(before).removesuffix(after)

    def _run(self, images: Sequence[Picture], text: str) -> dict[str, Any]:
        given = [list(images)] if self._nested else list(images)
        return dict(self._loaded.processor(images=given, text=text, return_tensors="pt"))

    def _find_form(self, probe: Picture, markers: Sequence[str]) -> tuple[bool, str]:
        refusals: list[Exception] = []
        for self._nested in (True, False):
            for self._marker in markers:
                try:
                    self._run([probe], self._marker)
                    return self._nested, self._marker
                except Exception as error:  # processors raise what they like
                    refusals.append(error)
        raise refusals[0]

    def _find_seams(self, probe: Picture) -> Seams:
        def expand(text: str, images: int) -> str:
            self._run([probe] * images, text)
            return str(self._loaded.last_call.text)

        try:
            return find_seams(expand, self._marker)
        except ValueError:
            return Seams()

    def _find_texts(self, probe: Picture) -> set[str]:
        """Find the outputs that have an entry for each token of the text: those of the prompt, not of an image."""
        outputs = [self._run([probe], self._marker + further) for further in ("", _FURTHER_TEXT)]
        shapes = [{name: getattr(value, "shape", None) for name, value in output.items()} for output in outputs]
        return {name for name in shapes[0] if all(each.get(name) == each["input_ids"] for each in shapes)}


class Seams(msgspec.Struct, frozen=True):
    """Texts that stand beside a prompt's own and its expansions.

    - ``before``, ``behind`` (""): around the whole prompt.
    - ``last`` (""): behind the last expansion alone (PaliGemma).
    - ``shared`` (""): end of an expansion and begin of the next, which is written once where they touch.
    - ``gap`` (""): between an expansion and text right behind it that begins with neither white space nor "<".
    """

    before: str = ""
    behind: str = ""
    last: str = ""
    shared: str = ""
    gap: str = ""

    def join(self, pieces: Sequence[str], expansions: Sequence[str]) -> str:
        """Put a prompt together: ``pieces`` of text, one more than there are expansions between them."""
        parts = [pieces[0]]
        end = pieces[0]
        for number, (expansion, piece) in enumerate(zip(expansions, pieces[1:], strict=True), 1):
            touches = self.shared and end.endswith(self.shared)
            whole = expansion + self.last * (number == len(expansions))
            parts += [whole.removeprefix(self.shared) if touches else whole, self._after(piece)]
            end = parts[-1] or expansion
        return "".join(parts)

    def frame(self, text: str, special: bool) -> str:
        """Write a prompt with what stands around it; ``special`` (bool): special tokens are added to it."""
        return f"{self.before if special else ''}{text}{self.behind}"

    def unframe(self, text: str) -> str:
        """Take off what stands around a prompt that ends with an image."""
        return text.removeprefix(self.before).removesuffix(self.behind).removesuffix(self.last)

    def _after(self, piece: str) -> str:
        return self.gap + piece if self.gap and piece and not (piece[0].isspace() or piece[0] == "<") else piece


def find_seams(expand: Callable[[str, int], str], marker: str) -> Seams:
    """Find the seams of a processor: ``expand(text, images)`` gives what it passes to its tokenizer.

    Raises ``ValueError`` if it changes texts in another way, or what the processor raises.
    """
    framed = expand(f"{_BEFORE}{marker}{_BEHIND}", 1)
    found = _find_frame(framed)
    bare = found.unframe(expand(marker, 1))
    two = found.unframe(expand(marker * 2, 2))
    shared = _find_shared(two, bare)
    if found.unframe(framed) == f"{_BEFORE}{bare}{_BEHIND}":
        return Seams(found.before, found.behind, "" if shared else _find_last(two, bare), shared)
    gaps = {first: _find_gap(found.unframe(expand(marker + first, 1)), bare, first) for first in (*_SPARED, *_GAPPED)}
    seen = {gaps[first] for first in _GAPPED}
    if len(seen) > 1 or None in seen or any(gaps[first] != "" for first in _SPARED):
        raise ValueError("what the processor writes between an image and the text behind it cannot be told")
    return Seams(found.before, found.behind, "", shared, gaps[_GAPPED[0]] or "")


def _find_frame(text: str) -> Seams:
    before, found, _ = text.partition(_BEFORE)
    _, also, behind = text.rpartition(_BEHIND)
    if not (found and also):
        raise ValueError("the processor does not keep the text around an image")
    return Seams(before, behind)


def _find_gap(text: str, bare: str, first: str) -> str | None:
    if not (text.startswith(bare) and text.endswith(first)):
        return None
    return text[len(bare) : -len(first)]


def _find_shared(two: str, bare: str) -> str:
    """Find the end of an expansion that is the next one's begin, too; "" if two are just twice one, or another two."""
    length = 2 * len(bare) - len(two)
    shared = bare[:length] if 0 < length < len(bare) else ""
    return shared if shared and bare.endswith(shared) and two == bare + bare.removeprefix(shared) else ""


def _find_last(two: str, bare: str) -> str:
    """Find the end of an expansion that only the last one has; "" if two are just twice one, or another two."""
    length = 2 * len(bare) - len(two)
    last = bare[-length:] if 0 < length < len(bare) else ""
    return last if last and two == bare.removesuffix(last) + bare else ""
