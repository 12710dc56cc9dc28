"""Lookalikes: requests of the size of a trace's rows, for real models. Nothing is downloaded."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from functools import cached_property

from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request, Sampling
from trinity.traces.trace import TraceImage, TraceRow

_TEXT = (
    "the light falls on an old wall while two boats wait for rain or wind and a small red bird looks up at grey clouds "
    "that move from north to south over green fields where people walk home with bread tea books and lamps"
)
_WORD = "light"
_FILLERS = (" a", " I", ".", ",", " .", "\n", "!", "a", "1")  # one token each in most vocabularies
_PATCHES = 8  # squares along each side of an image: enough to tell any two apart
_MARKER = "<image>"


class Lookalikes:
    """Makes a ``Request`` of a row: equal numbers of text and output tokens, images of equal size.

    Text and pixels are drawn at random from ``salt``, the row's number and the images' content hashes: equal hashes
    give equal images. Where only an image's tokens are known, it gets a size that the model turns into about as many.
    Texts share no prefix. Tokens that the model puts around images count as text, as measured on the first row with
    as many images. ``row.text_length`` is met exactly where the tokenizer allows it. It blocks: call it on a thread.
    """

    def __init__(self, processor: RequestProcessor, salt: str = "") -> None:
        self._processor, self._salt = processor, salt
        self._around: dict[int, int] = {}  # tokens of a prompt without text, by its number of images
        self._sizes: dict[int, tuple[int, int]] = {}
        self._pictures: dict[tuple[str, int, int], bytes] = {}

    def __call__(self, row: TraceRow, number: int) -> Request:
        """Make a row's request. Raises ``BadMedia`` for images that the model does not take."""
        images = [self._picture(image, f"{number}.{at}") for at, image in enumerate(row.images)]
        text = self._write_text(row.text_tokens - self._overhead(images), f"{self._salt}{number}")
        return Request(
            _MARKER * len(images) + text,
            media=[Media("image", each) for each in images],
            max_tokens=max(1, row.output_length),
            sampling=Sampling.greedy(ignore_eos=True),
            session=row.session,
        )

    def _overhead(self, images: Sequence[bytes]) -> int:
        """Count the prompt's tokens that are neither visual nor text: a first one, and those around images."""
        if len(images) not in self._around:
            asked = Request(_MARKER * len(images) + _WORD, media=[Media("image", each) for each in images])
            work = self._processor.process(asked).work
            visual = sum(span.tokens for span in work.media)
            self._around[len(images)] = len(work.prompt) - visual - self._count(_WORD)
        return self._around[len(images)]

    # ------------------------------------------------------------ text

    def _count(self, text: str) -> int:
        return len(self._processor.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @cached_property
    def _words_per_token(self) -> float:
        return len(_TEXT.split()) / self._count(_TEXT)

    def _write_text(self, tokens: int, seed: str) -> str:
        """Write words of at most ``tokens`` tokens, at least one word, then fillers up to that number."""
        draw, known = random.Random(seed), _TEXT.split()
        words = [draw.choice(known) for _ in range(max(1, int(2 * tokens * self._words_per_token)) + 1)]
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._count(" ".join(words[:middle])) <= tokens else (low, middle - 1)
        return self._fill_text(" ".join(words[:low]), tokens)

    def _fill_text(self, text: str, tokens: int) -> str:
        lacking = tokens - self._count(text)
        while lacking > 0:
            longer = [text + each for each in _FILLERS]
            counts = [self._count(each) for each in longer]
            fitting = [(count, at) for at, count in enumerate(counts) if tokens - lacking < count <= tokens]
            if not fitting:
                return text
            count, at = min(fitting)
            text, lacking = longer[at], tokens - count
        return text

    # ------------------------------------------------------------ images

    def _picture(self, image: TraceImage, name: str) -> bytes:
        width, height = self._size(image)
        key = (self._salt + (image.content or name), width, height)
        if key not in self._pictures:
            self._pictures[key] = draw_jpeg(*key)
        return self._pictures[key]

    def _size(self, image: TraceImage) -> tuple[int, int]:
        if image.width and image.height:
            return image.width, image.height
        tokens = image.tokens or 0
        if tokens not in self._sizes:
            span, _ = self._processor.dummy_inputs(tokens or None)
            self._sizes[tokens] = (span.width, span.height)
        return self._sizes[tokens]


def draw_jpeg(seed: str, width: int, height: int) -> bytes:
    """Draw a JPEG of this size from squares in random colours; equal for equal seeds."""
    from PIL import Image

    colours = random.Random(seed).randbytes(3 * _PATCHES * _PATCHES)
    squares = Image.frombytes("RGB", (_PATCHES, _PATCHES), colours)
    written = io.BytesIO()
    squares.resize((width, height), Image.Resampling.BILINEAR).save(written, "JPEG", quality=90)
    return written.getvalue()
