"""Request processor of emulated models: turns counts into work for the cores, without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trinity.core.image_strips import cut_span
from trinity.core.messages import IMAGE, MediaSpan, Work
from trinity.core.values import VIDEO
from trinity.costs.media_tokens import AUDIO, MeasuredClip
from trinity.emulation.content import PLACEHOLDER, prompt_ids
from trinity.emulation.model import EmulatedModel, EmulatedRequest
from trinity.errors import BadMedia, ClosedError, ConfigError, RequestError, RequestTooLarge, own_errors
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.preparation_lanes import MOST_PREPARED_BYTES, SharedRoom
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.preprocess.text.generation_config import resolve_sampling
from trinity.request import Request, check_request
from trinity.simulation.workload import HASH_TOKENS
from trinity.traces.media import TraceAudio, TraceVideo


class EmulatedTokenizer:
    """Tokenizer stand-in: decodes token 17 as ``<17>``."""

    added_tokens_decoder: Mapping[int, Any] = {}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(self.convert_ids_to_tokens, token_ids))

    def convert_ids_to_tokens(self, ids: int) -> str:
        return f"<{ids}>"

    @staticmethod
    def bytes_of(token_id: int) -> bytes:
        """Return the text of a token, which is its own whatever stands beside it."""
        return b"<%d>" % token_id


class EmulatedProcessor(RequestProcessor):
    """Processor of an emulated model's ``EmulatedRequest``s; nothing here blocks."""

    def __init__(self, model: EmulatedModel, *, limits: MediaLimits | None = None, strips: int = 1) -> None:
        self.model, self.limits, self.strips = model, limits or MediaLimits(), strips
        self._closed, self.room = False, SharedRoom(MOST_PREPARED_BYTES, self.limits.preprocess_timeout_s)
        self.model_type = f"emulated {model.shape.name}"
        self.context_length = model.shape.context
        self.tokenizer = EmulatedTokenizer()
        self.eos_ids = frozenset()
        self.media_token_ids = frozenset({PLACEHOLDER})
        self.media_kinds = _list_kinds(model)
        self.multimodal = model.multimodal

    def process(self, request: Request) -> ProcessedRequest:
        """Process a request. Raises ``BadMedia``, ``RequestTooLarge`` or ``RequestError`` with the request's id."""
        return self._process(check_request(request))

    def _process(self, request: Request) -> ProcessedRequest:
        if not isinstance(request, EmulatedRequest):
            text = "an emulated pipeline takes counts, not text: give a trinity.emulation.model.EmulatedRequest"
            raise RequestError(text, request.request_id)
        images, clips = self._images(request), self._clips(request)
        visual = sum(images) + sum(clip.tokens for clip in clips)
        prompt = visual + request.text_tokens
        if not 0 < prompt < self.context_length or request.text_tokens < 1:
            text = f"a prompt of {prompt} tokens ({visual} of them visual) in a context of {self.context_length}"
            raise RequestTooLarge(
                f"{text}: a prompt needs at least one token of text and room for one of output", request.request_id
            )
        _check_leading(request)
        wanted, room = self.defaults.max_tokens(request, prompt), self.context_length - prompt
        sampling = self.defaults.complete(request.sampling, prompt)
        spans = _spans(request, images, self.model.shape.tile_tokens, self.strips)
        work = Work(
            request=request.request_id,
            prompt=self._prompt(request, visual),
            media=(*spans, *_clip_spans(request, clips, request.leading_tokens + sum(images))),
            max_tokens=min(wanted, room),
            sampling=resolve_sampling(sampling, seed=0),
            stop_ids=frozenset(request.sampling.stop_token_ids),
            deadline_s=request.deadline_s,
        )
        return ProcessedRequest(work, clipped=wanted > room, emulated=True, stop=tuple(sampling.stop or ()))

    async def aprocess(self, request: Request) -> ProcessedRequest:
        if self._closed:
            raise ClosedError("the request processor is closed")
        with own_errors(request.request_id, "reading the counts"):
            return self._process(request)

    def close(self) -> None:
        self._closed = True

    async def aclose(self) -> None:
        self.close()

    def _images(self, request: EmulatedRequest) -> list[int]:
        """Visual tokens of each image."""
        if request.image_tokens and "image" not in self.media_kinds:
            kinds = "text alone" if not self.media_kinds else f"{', '.join(sorted(self.media_kinds))} and text"
            raise BadMedia(f"{self.model.shape.name} takes {kinds}: give no image_tokens", request.request_id)
        if request.contents and len(request.contents) != len(request.image_tokens):
            text = f"{len(request.contents)} contents for {len(request.image_tokens)} images"
            raise BadMedia(text, request.request_id)
        rule = self.model.shape.visual_tokens
        images = [rule(*each) if isinstance(each, Sequence) else int(each) for each in request.image_tokens]
        if any(count < 1 for count in images) or request.all_media():
            raise BadMedia("images are given as counts of at least 1, in image_tokens=", request.request_id)
        return images

    def _clips(self, request: EmulatedRequest) -> list[MeasuredClip]:
        """Items and tokens of each video and audio clip."""
        if not all(isinstance(each, (TraceVideo, TraceAudio)) for each in request.clips):
            raise BadMedia("clips are given as TraceVideo and TraceAudio, in clips=", request.request_id)
        try:
            return [self.model.shape.media.measure(each) for each in request.clips]
        except ConfigError as error:
            raise BadMedia(f"{self.model.shape.name}: {error}: give other clips=", request.request_id) from error

    def _prompt(self, request: EmulatedRequest, visual: int) -> tuple[int, ...]:
        """Build the prompt: placeholders of the images among the tokens that the text's names stand for."""
        vocabulary, text = self.model.shape.vocabulary, list[int]()
        for at, name in enumerate(request.hash_ids):
            text += prompt_ids(name, HASH_TOKENS, vocabulary)[max(0, visual - at * HASH_TOKENS) :]
        rest = request.text_tokens - len(text)
        if rest > 0:
            text += prompt_ids(request.request_id if request.text is None else request.text, rest, vocabulary)
        lead = request.leading_tokens
        return (*text[:lead], *(PLACEHOLDER,) * visual, *text[lead : request.text_tokens])


def _check_leading(request: EmulatedRequest) -> None:
    """Raise ``RequestError`` where not so much text can stand before the images."""
    lead, text = request.leading_tokens, request.text_tokens
    if not 0 <= lead <= text:
        raise RequestError(f"leading_tokens is 0 to text_tokens ({text}), got {lead}", request.request_id)
    if lead and request.hash_ids:
        raise RequestError("leading_tokens cannot be with hash_ids, which place all of the text", request.request_id)


def _spans(request: EmulatedRequest, images: Sequence[int], tile: int, most: int) -> tuple[MediaSpan, ...]:
    """List the strips of all images; each image is one where it has no tiles."""
    spans: list[MediaSpan] = []
    offset = request.leading_tokens
    for at, (count, asked) in enumerate(zip(images, request.image_tokens, strict=True)):
        name = request.contents[at] if request.contents else f"{request.request_id}.{at}"
        width, height = asked if isinstance(asked, Sequence) else (0, 0)
        image = MediaSpan("image", count, offset, count, f"{name}:{count}", False, {}, width, height)
        spans += cut_span(image, _tiles(count, tile), most)
        offset += count
    return tuple(spans)


def _clip_spans(request: EmulatedRequest, clips: Sequence[MeasuredClip], offset: int) -> Iterator[MediaSpan]:
    """Yield the items of all clips, the first at ``offset``."""
    for at, (clip, given) in enumerate(zip(clips, request.clips, strict=True), len(request.image_tokens)):
        name = given.content or f"{request.request_id}.{at}"
        for number, count in enumerate(clip.list_tokens()):
            content = f"{clip.name_item(name, number)}:{count}"
            yield MediaSpan(clip.kind, count, offset, count, content, strip=number)
            offset += count


def _list_kinds(model: EmulatedModel) -> frozenset[str]:
    """List the kinds of media that a model takes."""
    shape, found = model.shape, set[str]()
    if model.multimodal:
        taken = ((IMAGE, shape.takes_images), (VIDEO, shape.media.video), (AUDIO, shape.media.audio))
        found = {kind for kind, there in taken if there}
    return frozenset(found)


def _tiles(count: int, tile: int) -> list[int]:
    """List the rows of each tile, of which the last may have fewer; one where there are none."""
    return [min(tile, count - first) for first in range(0, count, tile)] if tile else [count]
