"""Images as a kind of media: items made one by one with the model's own processor, and their markup in texts.

Reading is bounded before it costs anything.

What a processor makes of an image may depend on how many images its prompt has: LLaVA-OneVision cuts an image into
tiles only if it is alone. ``ImageReader`` asks the processor at load whether that is so, and then shows it each image
beside as many small ones as the prompt has others.

The image's tokens stand beside special tokens that the processor writes, its text may be tokenized apart, and what the
encoder is given may depend on the text (InstructBLIP). So one call of the processor makes it all, of the image and the
text behind the marker ``<image>`` together.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import msgspec

from trinity.errors import BadMedia, ConfigError, UnsupportedModel
from trinity.preprocess.checkpoint.model_types import explain_how_to_add
from trinity.preprocess.checkpoint.own_processor import name_class
from trinity.preprocess.fetch.url_fetch import UrlFetcher
from trinity.preprocess.media.image_calls import (
    TEXT_KEYS,
    ImageCalls,
    Made,
    Seams,
    count_bytes,
    guard_resizes,
    predict_pixels,
)
from trinity.preprocess.media.images import (
    WHITE,
    Transparency,
    image_digest,
    make_plain,
    price_picture,
    read_image,
    size_of,
)
from trinity.preprocess.media.media_kinds import LoadedProcessor, MediaItem, MediaKind, ModelFiles, Placeholder
from trinity.preprocess.media.media_markup import IMAGE_TEXT, ImageText
from trinity.preprocess.media_limits import (
    Estimate,
    MediaBudget,
    MediaLimits,
    MediaProblem,
    Price,
    check_pixels,
    price_processing,
)
from trinity.request import Media

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image

    from trinity.preprocess.media.images import Picture

_POSITION_KEYS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts", "target_sizes")
_SIDES = (28, 56, 84, 112, 168, 224, 336, 448, 672, 896, 1344, 1792)  # of synthetic images, in pixels
_DEFAULT_SIDE = 336
_PROBE_SIZE = (640, 448)  # width, height of the image that tells if company matters: large and not square
_FORM_SIZE = (224, 168)  # of the image on which the form of a call is tried
_FILLER_SIDE = 56
_EVERY_NUMBER = 1 << 30
_SIZE = (224, 168)  # width, height of the image with which the processor is tried
_TEXTS = ("a", "a b c d e f", "f e d c b a")  # one longer, one as long and not the same
_READ = "_input_ids"  # end of the name of a text that the encoder reads
_WHERE = "_position_mask"  # end of the name of an output that has 1 where features are


def open_image(
    source: Any, *, transparency: Transparency = WHITE, limits: MediaLimits | None = None
) -> Image.Image | np.ndarray:
    """Open an image as a pipeline does: what it returns is what the model's own processor gets.

    source: as in ``Request.images``.
    transparency ("white"): as in ``Pipeline``.
    limits (``MediaLimits()``): what may be read, and which URLs are fetched.

    ::

        image = trinity.open_image("cat.png")
        AutoImageProcessor.from_pretrained(model, backend="pil")(images=[image], return_tensors="pt")

    Returns a PIL image of mode RGB; for an array of numbers other than bytes an array [3, height, width]. Raises
    ``BadMedia``. Blocks: run it on a thread if you have an event loop.
    """
    limits = limits or MediaLimits()
    (item,) = UrlFetcher(limits).fetch_here([Media("image", source)], False)
    try:
        return read_image(item.source, limits, transparency=transparency)
    except MediaProblem as exc:
        raise BadMedia(f"the image {exc}") from exc


class ImageReader:
    """Reads images from sources for one model, and runs its own processor on each, with only its placeholder as text.

    See ``KindReader``.

    - ``loaded``: the processor.
    - ``limits`` (``MediaLimits()``): ``max_processed_pixels`` is what the processor may make of an image.

    ``fingerprint`` hashes all but the pixels that decides features; "" for a text-only model.

    Raises ``UnsupportedModel`` if the processor fails on a plain image.
    """

    def __init__(self, loaded: LoadedProcessor, limits: MediaLimits | None = None) -> None:
        self._loaded, self._limits = loaded, limits or MediaLimits()
        self.fingerprint = _fingerprint(loaded) if loaded.processor is not None else ""
        self._fillers: dict[int, str] = {}  # expansion of the small image, by the number of images in the prompt
        self._most_told = 1 if loaded.processor is None else self._find_most_told()

    @property
    def adds_special(self) -> bool:
        """Tell if the processor has special tokens added to a prompt; so does the tokenizer of a text-only model."""
        return self._loaded.processor is None or self._calls.special

    @property
    def seams(self) -> Seams:
        """Texts that the processor writes around a prompt, and where images and text meet."""
        return self._calls.seams

    def make_plain(self, source: Any, among: int, budget: MediaBudget) -> Any:
        def check(width: int, height: int) -> None:
            budget.check(self.estimate(width, height, among))

        return make_plain(source, self._limits, check, self._loaded.transparency)

    def price_source(self, source: Any, among: int) -> Price:
        found = price_picture(source, self._limits)
        made = self.estimate(found.width, found.height, among) if found.width else Estimate(0, 0)
        check_pixels(made, self._limits)  # it names what is wrong better than the price of so many
        return found.price.plus(price_processing(found.width * found.height, made.pixels, made.bytes))

    def read_source(self, source: Any, among: int, budget: MediaBudget) -> MediaItem:
        return self.read(self.open_source(source, among, budget), among)

    def open_source(self, source: Any, among: int, budget: MediaBudget) -> Any:
        """Read an image, and charge what will become of it. Raises ``MediaProblem`` or ``TooManyTokens``."""

        def check(width: int, height: int) -> None:
            budget.check(self.estimate(width, height, among))

        image = read_image(source, self._limits, check, self._loaded.transparency)
        budget.charge(self.estimate(*size_of(image), among))  # upright now, which may change the tiles
        return image

    def estimate(self, width: int, height: int, among: int = 1) -> Estimate:
        """Compute what the processor will make of an image of this size, from its settings alone.

        Raises ``MediaProblem`` if it refuses the size. An unknown kind of processor counts as making nothing: its
        resizes are stopped where they go too far.
        """
        processor, alone = self._loaded.processor, min(among, self._most_told) == 1
        try:
            pixels = predict_pixels(processor.image_processor, width, height, alone=alone)
            tokens = _predict_tokens(processor, width, height) if alone else None
        except Exception as exc:  # arithmetic on odd sizes, or the processor's own refusal
            raise MediaProblem(explain_size(exc, width, height)) from exc
        return Estimate(pixels or 0, count_bytes(processor.image_processor, pixels or 0), tokens)

    def read(self, image: Picture, among: int = 1) -> MediaItem:
        """Preprocess one image of a prompt with ``among`` images.

        Raises ``MediaProblem`` if the model's processor refuses it.
        """
        company = min(among, self._most_told)
        self._loaded.last_call.pixels = self._limits.max_processed_pixels * company
        try:
            text, ids, inputs = self._call_in_company(image, company)
        except Exception as exc:  # processors raise anything on odd sizes
            raise MediaProblem(explain_size(exc, *size_of(image))) from exc
        finally:
            self._loaded.last_call.pixels = None
        tokens = sum(number in self._loaded.media_token_ids for number in ids)
        if tokens == 0:
            raise MediaProblem(
                "the model's processor makes no visual token of it: it is too small, give a larger image"
            )
        content = f"{image_digest(image)}-{self.fingerprint}" + (f"-{company}" if company > 1 else "")
        expansion = self._calls.strip(text)
        return MediaItem("image", expansion, tokens, inputs, content, _position_inputs(inputs), *size_of(image))

    def _call_in_company(self, image: Picture, company: int) -> Made:
        """Run the processor on an image beside ``company - 1`` small ones, and keep what is the image's own."""
        text, ids, inputs = self._calls.call([image, *[make_gradient(_FILLER_SIDE)] * (company - 1)])
        if company == 1:
            return text, ids, inputs
        own = _cut_end(text, self._filler_text(company) * (company - 1))
        token_ids = self._loaded.tokenizer(own, add_special_tokens=False, verbose=False)["input_ids"]
        return own, token_ids, {name: _first_of(value, company) for name, value in inputs.items()}

    def _filler_text(self, company: int) -> str:
        if company not in self._fillers:
            text, _, _ = self._calls.call([make_gradient(_FILLER_SIDE)] * company)
            self._fillers[company] = text[: len(text) // company]
        return self._fillers[company]

    def _find_most_told(self) -> int:
        """Find the number of images from which on more of them make no difference to each one: 1 for most models.

        The same image once, twice and thrice: without a difference, what comes of several is copies of what comes of
        one, side by side.
        """
        image = make_gradient(*_PROBE_SIZE)
        try:
            self._calls = ImageCalls(self._loaded, make_gradient(*_FORM_SIZE))
            alone, two, three = (self._calls.call([image] * count) for count in (1, 2, 3))
        except Exception as exc:
            kind = self._loaded.config.model_type
            raise UnsupportedModel(f"the processor of model type {kind!r} fails on an image ({exc!r:.200})") from exc
        if self._are_copies(two, alone, 2):
            return 1
        pair: Made = (two[0][: len(two[0]) // 2], [], {name: _first_of(value, 2) for name, value in two[2].items()})
        if self._are_copies(three, pair, 3):
            return 2
        return _EVERY_NUMBER

    def _are_copies(self, joint: Made, one: Made, count: int) -> bool:
        text = self.seams.join([""] * (count + 1), [self.number_expansion(one[0], index) for index in range(count)])
        return joint[0] == text and all(_is_repeated(value, one[2][name], count) for name, value in joint[2].items())

    def number_expansion(self, expansion: str, index: int) -> str:
        """Put the image's number into its expansion, for processors that number a prompt's images (MiniCPM-V)."""
        tokenizer = self._loaded.tokenizer
        start = getattr(tokenizer, "image_id_start_token", None)
        end = getattr(tokenizer, "image_id_end_token", None)
        alone = f"{start}0{end}"
        if start and end and expansion.startswith(alone):
            return f"{start}{index}{end}" + expansion.removeprefix(alone)
        return expansion

    def make_synthetic(self, tokens: int | None) -> MediaItem:
        """Preprocess a synthetic image of about ``tokens`` visual tokens; None: of 336 x 336 pixels.

        Raises ``ConfigError`` for a text-only model.
        """
        if self._loaded.processor is None:
            raise ConfigError("a text-only model has no images to profile")
        if tokens is None:
            return self.read(make_gradient(_DEFAULT_SIDE))
        best = self.read(make_gradient(_SIDES[0]))
        for side in _SIDES[1:]:
            if best.tokens >= tokens:
                break
            item = self.read(make_gradient(side))
            if abs(item.tokens - tokens) < abs(best.tokens - tokens):
                best = item
        return best


def _position_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Select what positions are computed from: one entry, or those of all parts of an item that is cut."""
    found = {name: inputs[name].tolist() for name in _POSITION_KEYS if name in inputs}
    return {name: each[0] if len(each) == 1 else each for name, each in found.items()}


def _fingerprint(loaded: LoadedProcessor) -> str:
    """Hash everything but the pixels that decides features: class, backend, sizes, library versions."""
    import PIL
    import transformers

    processor = loaded.processor
    images = processor.image_processor
    plain = {name: value for name, value in vars(processor).items() if isinstance(value, (str, int, float, bool))}
    parts = [
        name_class(processor),
        type(images).__name__,
        images.to_dict(),
        plain,
        transformers.__version__,
        PIL.__version__,
        loaded.transparency,
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def explain_size(exc: Exception, width: int, height: int) -> str:
    """Say that a processor refuses an image of this size, and how."""
    return f"has {width} x {height} pixels, which the model's processor refuses ({type(exc).__name__}: {exc!s:.300})"


def _predict_tokens(processor: Any, width: int, height: int) -> int | None:
    """Ask the processor for the tokens of an image alone in its prompt, separators included; None if it cannot tell."""
    count = getattr(processor, "_get_num_multimodal_tokens", None)
    if count is None:
        return None
    (tokens,) = count(image_sizes=[(height, width)]).num_image_tokens
    return int(tokens)


def _cut_end(text: str, end: str) -> str:
    if not text.endswith(end):
        raise ValueError("the expansions of several images cannot be told apart")
    return text.removesuffix(end)


def _first_of(value: Any, count: int) -> Any:
    """Take the first item's part of an input that has one entry, or several, for each of ``count`` items."""
    length = len(value)
    return value[: length // count] if length % count == 0 else value


def _is_repeated(joint: Any, one: Any, count: int) -> bool:
    """Tell if ``joint`` is ``count`` times ``one``, along any axis, or ``count`` itself: the images of the prompt."""
    import torch

    if isinstance(joint, torch.Tensor) and joint.tolist() == [count]:
        return True
    if not isinstance(joint, torch.Tensor) or not isinstance(one, torch.Tensor):
        return bool(list(joint) == list(one) * count)
    return any(torch.equal(joint, torch.cat([one] * count, axis)) for axis in range(one.ndim)) or _counts_on(
        joint, one, count
    )


def _counts_on(joint: Any, one: Any, count: int) -> bool:
    """Tell if ``joint`` is ``count`` times the whole numbers of ``one``, each time from where the last time ended.

    Such are rows of all images' patches (Molmo 2); negative ones stand for none.
    """
    if one.is_floating_point() or one.ndim == 0 or joint.shape != (count * len(one), *one.shape[1:]):
        return False
    parts = joint.split(len(one))
    steps = (parts[1] - one)[one >= 0].unique() if count > 1 else one.new_zeros(1)
    return len(steps) == 1 and all((part == one + (one >= 0) * steps * at).all() for at, part in enumerate(parts))


def make_gradient(width: int, height: int | None = None) -> Image.Image:
    """Make an image of two gradients, square where no height is given."""
    import numpy as np
    from PIL import Image

    rows, columns = np.mgrid[0 : height or width, 0:width]
    channels = (
        columns * 255 // max(1, width - 1),
        rows * 255 // max(1, (height or width) - 1),
        np.full_like(rows, 128),
    )
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8))


class FrontReader(ImageReader):
    """Reads the one image of a prompt, and the whole prompt with it; see ``ImageReader``."""

    def read_beside(self, source: Any, budget: MediaBudget, text: str) -> MediaItem:
        """Read an image, and the ids of its whole prompt, which has ``text`` behind it.

        Raises as ``KindReader.read_source`` does.
        """
        return self.read(self.open_source(source, 1, budget), text=text)

    def read(self, image: Picture, among: int = 1, text: str = _TEXTS[0]) -> MediaItem:
        """Preprocess an image and the text behind it. Raises ``MediaProblem`` if the model's processor refuses it."""
        self._loaded.last_call.pixels = self._limits.max_processed_pixels
        try:
            output = self._run(image, text)
        except Exception as exc:  # processors raise anything on odd sizes
            raise MediaProblem(explain_size(exc, *size_of(image))) from exc
        finally:
            self._loaded.last_call.pixels = None
        ids = tuple(output["input_ids"][0].tolist())
        rows = self._find_rows(ids, output)
        if not rows:
            raise MediaProblem("the model's processor makes no visual token of it: give a larger image")
        inputs = {name: value for name, value in output.items() if name not in self._texts}
        self._check_told(inputs)
        found = MediaItem("image", "", len(rows), inputs, self._name(image, inputs), {}, *size_of(image))
        return msgspec.structs.replace(found, prompt=ids, rows=rows)

    def _run(self, image: Picture, text: str) -> dict[str, Any]:
        return dict(self._loaded.processor(images=[image], text=[text], return_tensors="pt"))

    def _check_told(self, inputs: dict[str, Any]) -> None:
        """Raise ``MediaProblem`` if a text has more tokens than a part of the encoder that reads it has places for.

        By transformers' names: ``qformer_input_ids`` are read by the part that ``qformer_config`` describes.
        """
        for name in (each for each in self._told if each.endswith(_READ)):
            part = getattr(self._loaded.config, f"{name.removesuffix(_READ)}_config", None)
            tokens, most = inputs[name].shape[-1], getattr(part, "max_position_embeddings", None)
            if most is not None and tokens > most:
                raise MediaProblem(
                    f"its encoder reads the text, of {tokens} tokens, and takes {most}: shorten the text"
                )

    def _find_rows(self, ids: tuple[int, ...], output: dict[str, Any]) -> tuple[int, ...]:
        """Find where features are: where a mask of the processor says so, else where the placeholder is."""
        mask = next((value for name, value in output.items() if name.endswith(_WHERE)), None)
        if mask is not None:
            return tuple((mask[0] == 1).nonzero().flatten().tolist())
        return tuple(at for at, number in enumerate(ids) if number in self._loaded.media_token_ids)

    def _name(self, image: Picture, inputs: dict[str, Any]) -> str:
        """Name the features: by image and processor, and by what else of the text the encoder reads."""
        name = f"{image_digest(image)}-{self.fingerprint}"
        if not self._told:
            return name
        read = hashlib.blake2b(digest_size=16)
        for each in sorted(self._told):
            read.update(f"{each}{tuple(inputs[each].shape)}".encode() + inputs[each].numpy().tobytes())
        return f"{name}-{read.hexdigest()}"

    def _find_most_told(self) -> int:
        """Try the processor: which outputs are the text's alone, and which of the encoder's inputs depend on it."""
        image = make_gradient(*_SIZE)
        try:
            short, long, other = (self._run(image, text) for text in _TEXTS)
        except Exception as exc:
            kind = self._loaded.config.model_type
            raise UnsupportedModel(f"the processor of model type {kind!r} fails on an image ({exc!r:.200})") from exc
        both = (short, long)
        along = {name for name in short if all(each[name].shape == each["input_ids"].shape for each in both)}
        self._texts = TEXT_KEYS | along
        inputs = short.keys() - self._texts
        self._told = {
            name for name in inputs if not (_is_same(short[name], long[name]) and _is_same(long[name], other[name]))
        }
        return 1


def _is_same(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool((one == other).all())


class ImageKind(MediaKind):
    """Images, as ``media.read_image`` reads them."""

    name = "image"
    parts = {"input_image": ("image_url",)}  # noqa: RUF012
    accept = "image/*"

    def find_placeholder(self, files: ModelFiles) -> Placeholder | None:
        """Find the image token, and prepare the image processor. Raises ``UnsupportedModel`` if there is no token."""
        config, processor = files.config, files.processor
        images = getattr(processor, "image_processor", None)
        if images is None:
            return None
        token = files.image_token or getattr(processor, "image_token", None)
        if not isinstance(token, str) or not files.media_ids:
            raise UnsupportedModel(
                f"model type {config.model_type!r} has no placeholder token for images; {explain_how_to_add()}"
            )
        make_channels_contiguous(images)
        guard_resizes(images, files.last_call)
        marker = files.image_marker or IMAGE_TEXT.get(config.model_type, ImageText()).marker.format(token=token)
        return Placeholder(token=token, marker=marker, reserved=reserved_tokens(files))

    def open_reader(self, loaded: LoadedProcessor, limits: MediaLimits) -> ImageReader:
        return FrontReader(loaded, limits) if loaded.in_front else ImageReader(loaded, limits)


def reserved_tokens(files: ModelFiles) -> tuple[str, ...]:
    """List the tokens that stand for media and must not occur in a user's text. Raises ``ConfigError``."""
    added = files.tokenizer.added_tokens_decoder
    media_ids = {each for each in files.media_ids if each in added or not files.in_front}  # others: words of a text
    reserved = tuple(files.tokenizer.convert_ids_to_tokens(sorted(media_ids)))
    others = (files.tokenizer.convert_ids_to_tokens(number) for number in sorted(files.other_ids - files.media_ids))
    if None in reserved:
        raise ConfigError(
            f"the config names tokens {sorted(files.media_ids)} for media, and the tokenizer lacks some of them; are "
            "both of one checkpoint?"
        )
    return (*reserved, *(token for token in others if token is not None))


def make_channels_contiguous(images: Any) -> None:
    """Make an image processor copy each image to contiguous channels before it rescales it.

    Its arrays have shape [channels, height, width] but lie in memory pixel by pixel, where numpy takes three times as
    long for a channel's mean. The results stay the same, to the bit.
    """
    import numpy as np
    from transformers.image_processing_backends import PilBackend

    if not isinstance(images, PilBackend):
        return

    class ContiguousChannels(type(images)):  # type: ignore[misc]
        def rescale(self, image: Any, *args: Any, **kwargs: Any) -> Any:
            return super().rescale(np.ascontiguousarray(image), *args, **kwargs)

    ContiguousChannels.__name__ = type(images).__name__  # transformers keys settings by this name
    images.__class__ = ContiguousChannels
