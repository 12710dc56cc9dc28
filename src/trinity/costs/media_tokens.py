"""Rules of model families for videos and audio clips: into how many items, of how many tokens, and what they cost.

A video becomes items of one frame, or of the frames that one temporal patch holds; each is encoded by itself, cached
under its own content, and may go to another encoder. A clip is one item. Rules are data, so that they can be sent.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from trinity.core.values import VIDEO
from trinity.costs.visual_tokens import smart_resize_tokens
from trinity.errors import ConfigError
from trinity.errors.arguments import Count, Positive, Whole, check_struct
from trinity.traces.media import TraceAudio, TraceVideo

AUDIO = "audio"  # a kind of media; a clip is one item
MEL_FRAMES_S = 100  # log-mel frames a second: one in 160 samples at 16 kHz
WINDOW_FRAMES = 3000  # log-mel frames of Whisper's window of 30 s
USUAL_FRAMES, USUAL_SIZE, USUAL_S = 8, (640, 360), 30.0  # of media whose sizes a trace does not record
_MOST_S = 1e9  # of a clip that is counted


class VideoRule(msgspec.Struct, frozen=True, kw_only=True):
    """Rule for the frames of a video. Raises ``ConfigError`` for values out of range.

    group (frames, 1): that become one item, the last ones repeated where some lack.
    tokens (0): of an item, whatever its size; 0: by its pixels.
    factor (pixels, 28): edge of the square that becomes a token.
    least, most (pixels): a frame is scaled to between these.
    together (False): the bounds hold for all frames together (Qwen3-VL).
    tail (tokens, 0): behind those of the last item.
    work (1.0): cost of encoding a token, in visual tokens of an image.
    """

    group: Whole = 1
    tokens: Count = 0
    factor: Whole = 28
    least: Count = 128 * 28 * 28
    most: Whole = 768 * 28 * 28
    together: bool = False
    tail: Count = 0
    work: Positive = 1.0

    def __post_init__(self) -> None:
        check_struct(self)

    def count_items(self, frames: int) -> int:
        """Count the items of so many frames."""
        return max(1, math.ceil(frames / self.group))

    def list_tokens(self, frames: int, width: int, height: int) -> tuple[int, ...]:
        """List the tokens of each item of a video, as ``item_tokens`` counts them, the tail with the last."""
        items, tokens = self.count_items(frames), self.item_tokens(frames, width, height)
        return (tokens,) * (items - 1) + (tokens + self.tail,)

    def item_tokens(self, frames: int, width: int, height: int) -> int:
        """Count the tokens of an item of a video of so many frames of this size in pixels.

        Raises ``ConfigError`` for frames that have no pixels, or are over 200 times as long as wide.
        """
        if self.tokens:
            return self.tokens
        if not self.together:
            return smart_resize_tokens(width, height, factor=self.factor, least=self.least, most=self.most)
        return self._resize_together(frames, width, height)

    def _resize_together(self, frames: int, width: int, height: int) -> int:
        """Scale so that all frames together have between ``least`` and ``most`` pixels, as Qwen3-VL does."""
        if min(width, height) < 1 or max(width, height) > 200 * min(width, height):
            raise ConfigError(f"frames of {width} x {height} pixels are too narrow for this model: at most 200 to 1")
        frames = max(frames, self.group)  # the last one is repeated
        small = max(1.0, self.factor / height, self.factor / width)
        width, height = int(width * small), int(height * small)
        rows, columns = round(height / self.factor), round(width / self.factor)
        pixels = round(frames / self.group) * self.group * rows * columns * self.factor**2
        if pixels > self.most:
            shrink = math.sqrt(frames * height * width / self.most) * self.factor
            return max(1, math.floor(height / shrink)) * max(1, math.floor(width / shrink))
        if pixels < self.least:
            grow = math.sqrt(self.least / (frames * height * width)) / self.factor
            return math.ceil(height * grow) * math.ceil(width * grow)
        return rows * columns


class AudioRule(msgspec.Struct, frozen=True, kw_only=True):
    """Rule for audio clips: log-mel frames, convolutions, layers, tokens. Raises ``ConfigError``.

    halvings (1): convolutions of stride 2; each leaves half of what comes in, rounded up.
    stack (1): what is left that becomes one token.
    rounds_up (False): what is left over at the end becomes a token too.
    chunk (log-mel frames, 0): pieces of a clip that are reduced by themselves; 0: the clip is one.
    window (log-mel frames, 0): the encoder runs whole windows, the rest is silence; 0: it runs what the clip has.
    silence_counts (False): silence of the last window becomes tokens too.
    most (log-mel frames, 0): longer clips are cut; 0: none.
    work (1.0): cost of encoding a token, in visual tokens of an image.
    """

    halvings: Count = 1
    stack: Whole = 1
    rounds_up: bool = False
    chunk: Count = 0
    window: Count = 0
    silence_counts: bool = False
    most: Count = 0
    work: Positive = 1.0

    def __post_init__(self) -> None:
        check_struct(self)

    def count_tokens(self, seconds: float) -> int:
        """Count the tokens of a clip of so many seconds, at least 1. Raises ``ConfigError`` for odd seconds."""
        if not 0 <= seconds <= _MOST_S:
            raise ConfigError(f"a clip has between 0 and {_MOST_S:g} seconds, got {seconds}")
        frames = math.ceil(round(seconds * MEL_FRAMES_S, 6))
        if self.most:
            frames = min(frames, self.most)
        if self.window and self.silence_counts:
            return math.ceil(max(1, frames) / self.window) * self._reduce(self.window)
        if not self.chunk:
            return max(1, self._reduce(frames))
        return max(1, frames // self.chunk * self._reduce(self.chunk) + self._reduce(frames % self.chunk))

    def encoded_tokens(self, tokens: int) -> int:
        """Count the tokens whose time encoding takes: with those of silence in the last window."""
        whole = self._reduce(self.window) if self.window else 1
        return math.ceil(tokens / whole) * whole

    def _reduce(self, frames: int) -> int:
        left = frames
        for _ in range(self.halvings):
            left = -(-left // 2)
        return -(-left // self.stack) if self.rounds_up else left // self.stack


class MediaRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of a model for media beside images; None where it takes none of the kind."""

    video: VideoRule | None = None
    audio: AudioRule | None = None

    def encode_work(self, kind: str, tokens: int) -> int:
        """Cost of encoding an item, in visual tokens of an image; its own tokens where a rule says no more."""
        if kind == VIDEO and self.video is not None:
            return max(1, round(tokens * self.video.work))
        if kind == AUDIO and self.audio is not None:
            return max(1, round(self.audio.encoded_tokens(tokens) * self.audio.work))
        return tokens

    def measure(self, clip: TraceVideo | TraceAudio) -> MeasuredClip:
        """Count the items and tokens of a video or clip; of what a trace does not record, those of a usual one.

        Raises ``ConfigError`` where the model takes none of its kind, or has no rule for its size.
        """
        if isinstance(clip, TraceVideo):
            if self.video is None:
                raise ConfigError("this model takes no videos")
            return _measure_video(self.video, clip)
        if self.audio is None:
            raise ConfigError("this model takes no audio")
        return MeasuredClip(
            AUDIO, 1, clip.tokens or self.audio.count_tokens(USUAL_S if clip.seconds is None else clip.seconds)
        )


def _measure_video(rule: VideoRule, clip: TraceVideo) -> MeasuredClip:
    if clip.tokens:
        items = clip.items or rule.count_items(clip.frames or 1)
        return MeasuredClip(VIDEO, items if items <= clip.tokens else 1, clip.tokens)
    frames = clip.frames or USUAL_FRAMES
    size = (clip.width, clip.height) if clip.width and clip.height else USUAL_SIZE
    tokens = rule.list_tokens(frames, *size)
    return MeasuredClip(VIDEO, len(tokens), sum(tokens))


class MeasuredClip(NamedTuple):
    """A video or a clip as a model sees it: how many ``items`` it becomes, and the ``tokens`` of all."""

    kind: str
    items: int
    tokens: int

    def list_tokens(self) -> list[int]:
        """List the tokens of each item; as many as can be alike."""
        return [self.tokens * (at + 1) // self.items - self.tokens * at // self.items for at in range(self.items)]

    def name_item(self, content: str, at: int) -> str:
        """Name the content of an item: the same in every video with this content."""
        return f"{content}#{at}" if self.items > 1 else content
