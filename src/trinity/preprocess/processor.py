"""RequestProcessor: tokenizes prompts and preprocesses images on threads beside the event loop (TriInfer 4.1)."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from trinity.config_classes import documented_by, takes
from trinity.core.messages import MediaSpan, Work
from trinity.errors import BadMedia, ClosedError, ConfigError, RequestError, RequestTooLarge, describe_error, own_errors
from trinity.preprocess.fetch.url_fetch import UrlFetcher, is_url
from trinity.preprocess.loader import ProcessorOptions, load_tokenizer_and_processor
from trinity.preprocess.media.audio_kind import mark_beside
from trinity.preprocess.media.frame_groups import cut_videos
from trinity.preprocess.media.image_kind import FrontReader
from trinity.preprocess.media.media_kinds import (
    MediaItem,
    PricedReader,
    add_salt,
    admit_media,
    find_fetch_rules,
    list_kinds,
)
from trinity.preprocess.media.strips import cut_items
from trinity.preprocess.media_limits import (
    MediaBudget,
    MediaCost,
    MediaProblem,
    Price,
    TooManyTokens,
    check_price,
    explain_length,
    sum_prices,
)
from trinity.preprocess.preparation_lanes import (
    MOST_PREPARED_BYTES,
    LaneVisit,
    PreparationLane,
    SharedRoom,
    run_beside_loop,
    takes_long,
)
from trinity.preprocess.text.generation_config import (
    GenerationDefaults,
    SamplingDoor,
    check_token_ids,
    load_generation_defaults,
    resolve_sampling,
)
from trinity.preprocess.text.prompt import (
    PromptReader,
    PromptText,
    PromptTokenizer,
    name_media,
    order_media,
    take_media,
)
from trinity.preprocess.text.prompt_problem import PromptProblem
from trinity.request import Media, Request, Sampling, check_request

T = TypeVar("T")
_CHARACTERS_PER_TOKEN = 1024  # far above any vocabulary's mean: longer text is refused before it is tokenized
_NO_LIMIT = 1 << 30


class ProcessedRequest(msgspec.Struct, frozen=True):
    """A request ready for the cores.

    - ``work``: its tokens, media spans and sampling.
    - ``inputs`` (none): ``inputs[i]`` has the encoder's inputs for ``work.media[i]``, as tensors by name.
    - ``clipped`` (False): ``max_tokens`` was reduced to what the context leaves.
    - ``emulated`` (False): no stage will compute it.
    - ``stop`` (none): its output ends before the first of these strings.
    """

    work: Work
    inputs: tuple[dict[str, Any], ...] = ()
    clipped: bool = False
    emulated: bool = False
    stop: tuple[str, ...] = ()

    @property
    def input_bytes(self) -> int:
        """Bytes of the encoder's inputs, which travel to an instance."""
        return sum(getattr(value, "nbytes", 0) for each in self.inputs for value in each.values())


class _ParsedRequest(msgspec.Struct, frozen=True):
    """A checked request: its text, its media in the order of the text, and their names for error messages.

    ``budget`` counts what its media cost.
    """

    request: Request
    text: PromptText
    budget: MediaBudget
    media: tuple[Media, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessorConfig(ProcessorOptions):
    """Arguments of a ``RequestProcessor``.

    - ``model_dir``: directory of a transformers checkpoint.
    - ``threads`` (threads, 2): requests or images that are processed at a time.
    - ``strips`` (1): items that an image becomes at most, where its tiles are encoded each by itself.
    """

    model_dir: str | Path
    threads: int = field(default=2, kw_only=True)
    strips: int = field(default=1, kw_only=True)


@documented_by(ProcessorConfig)
class RequestProcessor:
    """Turns requests into work for the cores, with the model's own tokenizer, chat template and processor.

    {settings}

    Attributes:

    - ``model_type``: transformers' name of the architecture.
    - ``context_length``: tokens of prompt and output together.
    - ``loaded``: its tokenizer, processor and config, as ``load_tokenizer_and_processor`` reads them.
    - ``at_once``: images that it reads at a time for one request.
    - ``tokenizer``: the model's.
    - ``eos_ids``: token ids that end an output.
    - ``defaults``: what the checkpoint says of requests that leave something open.
    - ``media_token_ids``: ids of the prompt's rows that features replace.
    - ``lanes``: what prepares, by name, and the seconds that it may take beyond what a step may.
    - ``pools_images``: the model's class pools an image to one row, its embedding.
    - ``media_kinds``, ``multimodal``: kinds of media that the model takes (by ``readers``); False for none.

    Methods may be called from any thread. Raises ``ConfigError`` for a missing or broken model directory,
    ``UnsupportedModel`` for an unknown architecture.
    """

    defaults = GenerationDefaults()
    lanes: Mapping[str, tuple[PreparationLane, float]] = MappingProxyType({})
    _reads_first = True  # a template may run on threads of this process
    pools_images = False

    @takes(ProcessorConfig)
    def __init__(self, config: ProcessorConfig, _: Set[str]) -> None:
        model_dir, threads = Path(config.model_dir), config.threads
        self.config, self.limits, self.strips = config, config.limits, config.strips
        self.loaded = load_tokenizer_and_processor(model_dir, config)
        self._kinds = [kind for kind in list_kinds() if kind.name in self.loaded.placeholders]
        self.readers = self._readers = {kind.name: kind.open_reader(self.loaded, self.limits) for kind in self._kinds}
        self._fetcher = UrlFetcher(self.limits, find_fetch_rules)
        self.sampling_door = SamplingDoor(model_dir, self.loaded.config)
        self.at_once = threads  # items that are read at a time
        self._text_lane = PreparationLane("trinity-processor-text", threads)
        self._media_lane = PreparationLane("trinity-processor-media", threads)
        self.lanes = {
            "preparing text": (self._text_lane, 0.0),
            "preparing media": (self._media_lane, self.limits.preprocess_timeout_s),
        }
        self.room, self._closed = SharedRoom(MOST_PREPARED_BYTES, self.limits.preprocess_timeout_s), False
        model, writer = self.loaded.config, self.loaded.writer
        self.model_type: str = model.model_type
        self.context_length: int = _context_length(model, self.loaded.tokenizer)
        self.vocabulary: int | None = getattr(model.get_text_config(), "vocab_size", None)
        self.defaults = load_generation_defaults(model_dir, self.vocabulary, config.ignore_generation_config, writer)
        self._prompt_tokenizer = PromptTokenizer(self.loaded, self.vocabulary, self._readers.get("image"))
        self._prompt_reader = PromptReader(self.loaded)
        self.tokenizer: Any = self.loaded.tokenizer
        self.eos_ids: frozenset[int] = self.loaded.eos_ids
        self.media_token_ids: frozenset[int] = self.loaded.media_token_ids
        self.pools_images = self.loaded.pools_images
        self.media_kinds: frozenset[str] = frozenset(self.loaded.placeholders)
        self.multimodal = bool(self.media_kinds)

    def process(self, request: Request) -> ProcessedRequest:
        """Check, read, preprocess and tokenize one request, on the calling thread.

        Raises ``BadMedia`` (an image is unreadable, or images and markers differ in number), ``RequestTooLarge``
        (prompt beyond the context or ``MediaLimits.max_prompt_tokens``), ``RequestError``, each with the request's id.
        """
        return self.process_priced(request, lambda _: None)

    def process_priced(self, request: Request, begin: Callable[[MediaCost], None]) -> ProcessedRequest:
        """Process a request like ``process``; ``begin`` is called with what its media cost, before one is read."""
        checked = check_request(request)
        with _own_errors(checked.request_id):
            parsed = self._parse(self._admit(checked))
            media = self._fetcher.fetch_here(parsed.media, checked.untrusted)
            begin(self._sum_cost(checked.request_id, media, at_once=1))
            return self._read_all(msgspec.structs.replace(parsed, media=media))

    def _read_all(self, parsed: _ParsedRequest) -> ProcessedRequest:
        return self._finish(parsed, [self._read_item(parsed, index) for index in range(len(parsed.media))])

    def media_cost(self, request: Request) -> MediaCost:
        """Predict what a request's media cost, from their headers and structure; nothing is decoded.

        Reads its files, so not for the event loop's thread. URLs cost nothing before they are fetched.

        Raises ``BadMedia`` for an item, and ``RequestTooLarge`` for a sum, beyond ``MediaLimits.max_media_cpu_s`` or
        ``max_media_bytes``.
        """
        return self._sum_cost(request.request_id, request.all_media(), self.at_once)

    def _sum_cost(self, request: str, media: Sequence[Media], at_once: int) -> MediaCost:
        counts, prices = Counter(item.kind for item in media), []
        for item, name in zip(media, name_media(media), strict=True):
            try:
                price = self._price(item, counts[item.kind])
                check_price(price, self.limits)
            except MediaProblem as exc:
                raise BadMedia(f"{name}: {exc}", request) from exc
            prices.append(price)
        return sum_prices(prices, self.limits, at_once, counts, request)

    def _price(self, item: Media, among: int) -> Price:
        reader = self._readers[item.kind]
        return reader.price_source(item.source, among) if isinstance(reader, PricedReader) else Price(0.0)

    async def aprocess(self, request: Request) -> ProcessedRequest:
        """Process a request that ``check_request`` has passed, with images and requests in parallel, on threads.

        Requests of media, and very long texts, wait for each other on a lane of their own: none of them is waited for
        by others. Clients have fair turns. Media wait for bytes that others take, for ``preprocess_timeout_s`` at most,
        and so do URLs before they are fetched.
        Raises ``ClosedError`` after ``close()``, ``Overloaded``, and the errors of ``process``.
        """
        checked = await self.sampling_door.admit(request, self._stop_ids, self.defaults)
        checked = await run_beside_loop(self._admit, checked)
        if self._reads_first and any(is_url(item.source) for item in checked.all_media()):
            async with self._text_lane.visit(request.client) as visit:  # what its text makes wrong, before a fetch
                await self._run(visit, checked.request_id, self._parse, checked)
        media = checked.all_media()
        urls = sum(is_url(item.source) for item in media)
        if not urls:
            return await self._prepare_on_lane(checked, media)
        name = checked.request_id
        async with self.room.fetching(urls, name, request.client) as bytes_:
            with _own_errors(name):  # on the event loop: a slow host holds no thread
                fetched = await self._fetcher.fetch_all(media, checked.untrusted, bytes_.add)
            bytes_.end()
            return await self._prepare_on_lane(checked, fetched)

    async def _prepare_on_lane(self, request: Request, media: Sequence[Media]) -> ProcessedRequest:
        request = msgspec.structs.replace(request, images=(), media=tuple(media))
        if self._closed:
            raise ClosedError("the request processor is closed")
        async with (self._media_lane if takes_long(request) else self._text_lane).visit(request.client) as visit:
            return await self._prepare(request, visit)

    async def _prepare(self, request: Request, visit: LaneVisit) -> ProcessedRequest:
        """Process an admitted request, whose media are fetched, on a visit to its lane."""
        name = request.request_id
        begun = await self._run(visit, name, self._begin, request)
        if isinstance(begun, ProcessedRequest):
            return begun
        parsed, size = begun
        async with self.room.share(size, name, visit):
            if len(parsed.media) == 1:
                return await self._run(visit, name, self._read_all, parsed)
            return await self._run(visit, name, self._finish, parsed, await self._read_items(parsed, visit))

    def _begin(self, request: Request) -> ProcessedRequest | tuple[_ParsedRequest, int]:
        """Process all of a request without media; of others the text, and what the media take."""
        parsed = self._parse(request)
        if not parsed.media:
            return self._read_all(parsed)
        return parsed, self._sum_cost(request.request_id, parsed.media, self.at_once).bytes

    async def _read_items(self, parsed: _ParsedRequest, visit: LaneVisit) -> list[MediaItem]:
        """Read all media of a request in parallel. If one fails, cancel the others and leave none running."""
        indices = range(len(parsed.media))
        reading = [
            asyncio.ensure_future(self._run(visit, parsed.request.request_id, self._read_item, parsed, index))
            for index in indices
        ]
        try:
            return await asyncio.gather(*reading)
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    def dummy_inputs(self, visual_tokens_hint: int | None = None) -> tuple[MediaSpan, dict[str, Any]]:
        """Make one synthetic item of the model's first kind of media for profiling, with its span and encoder inputs.

        It has about ``visual_tokens_hint`` tokens, for models where an item's size decides their number.

        Raises ``ConfigError`` for a text-only model.
        """
        if not self._kinds:
            raise ConfigError("a text-only model has no media to profile")
        item = self._readers[self._kinds[0].name].make_synthetic(visual_tokens_hint)
        return self._make_span(item, 0, item.tokens), item.inputs

    def close(self) -> None:
        """Let running work finish, drop waiting work, and join the threads. May be called twice.

        Blocks: beside an event loop use ``aclose()``.
        """
        self._closed = True
        self.sampling_door.close()
        self.room.close()
        for lane in (self._text_lane, self._media_lane):
            lane.stop()
        for lane in (self._text_lane, self._media_lane):
            lane.join()

    async def aclose(self) -> None:
        """Close like ``close``, without blocking the event loop."""
        self._closed = True
        await asyncio.to_thread(self.close)

    async def _run(self, visit: LaneVisit, request: str, function: Callable[..., T], *arguments: Any) -> T:
        """Run a part of a request's processing on its lane's threads; see ``_own_errors``."""

        def work() -> T:
            with _own_errors(request):
                return function(*arguments)

        return await visit.run(work)

    # ------------------------------------------------------------ one request, in three steps

    def _admit(self, request: Request) -> Request:
        """Take the media out of a checked request's chat. Raises what is wrong with any before one is read."""
        with _own_errors(request.request_id), _prompt_errors(request.request_id):
            request = take_media(request)
        admit_media(request, request.all_media(), self.loaded, self._kinds, self.limits)
        return request

    def _parse(self, request: Request) -> _ParsedRequest:
        media = request.all_media()
        with _prompt_errors(request.request_id):
            text = self._prompt_reader.split(request, Counter(item.kind for item in media))
        limit = self._prompt_limit()
        hidden = 0 if text.hidden is None else sum(map(text.hidden.count_hidden, text.pieces))
        if hidden > limit or sum(map(len, text.pieces)) > limit * _CHARACTERS_PER_TOKEN:
            raise RequestTooLarge(
                f"the prompt's text has far more than the limit of {limit} tokens; shorten it", request.request_id
            )
        return _ParsedRequest(request, text, MediaBudget(self.limits, limit, text.kinds), *order_media(text, media))

    def _read_item(self, parsed: _ParsedRequest, index: int) -> MediaItem:
        budget, item = parsed.budget, parsed.media[index]
        among, reader = parsed.text.kinds.count(item.kind), self._readers[item.kind]
        try:
            with budget.timed():
                if isinstance(reader, FrontReader):
                    return reader.read_beside(item.source, budget, parsed.text.pieces[-1])
                return reader.read_source(item.source, among, budget)
        except MediaProblem as exc:
            raise BadMedia(f"{parsed.names[index]}: {exc}", parsed.request.request_id) from exc
        except TooManyTokens as exc:
            raise RequestTooLarge(str(exc), parsed.request.request_id) from exc

    def _finish(self, parsed: _ParsedRequest, items: Sequence[MediaItem]) -> ProcessedRequest:
        request = parsed.request
        ids = self._tokenize_prompt(parsed, items)
        if not ids:  # nothing to prefill: no token would ever come of it
            raise RequestError("the prompt has no tokens; give it text", request.request_id)
        if len(ids) > (limit := self._prompt_limit()):
            counts = len(ids), sum(item.tokens for item in items)
            said = explain_length(*counts, self.context_length, limit, parsed.text.kinds)
            raise RequestTooLarge(said, request.request_id)
        where, loaded = self._find_placeholders(request, ids, items), self.loaded
        if loaded.tiles and self.strips > 1:
            items = cut_items(items, where, self.strips, loaded.tiles, loaded.config)
        items = cut_videos(mark_beside(items, loaded.beside), loaded.video_tail)
        wanted, room = self.defaults.max_tokens(request, len(ids)), self.context_length - len(ids)
        sampling = self._complete_sampling(request, len(ids))
        ends, named = self._stop_ids(sampling)
        work = Work(
            request=request.request_id,
            prompt=ids,
            media=self._find_spans(where, items, request.cache_salt, self._count_whole(ids)),
            max_tokens=min(wanted, room),
            sampling=resolve_sampling(sampling, secrets.randbits(63)),
            stop_ids=ends | named,
            named_stop_ids=named,
            deadline_s=request.deadline_s,
            salt=request.cache_salt,
        )
        return ProcessedRequest(
            work, tuple(item.inputs for item in items), clipped=wanted > room, stop=tuple(sampling.stop or ())
        )

    def _complete_sampling(self, request: Request, prompt_tokens: int) -> Sampling:
        try:
            check_token_ids(request.sampling, self.vocabulary)
        except ValueError as exc:
            raise RequestError(str(exc), request.request_id) from exc
        return self.defaults.complete(request.sampling, prompt_tokens)

    def _tokenize_prompt(self, parsed: _ParsedRequest, items: Sequence[MediaItem]) -> tuple[int, ...]:
        if whole := [item.prompt for item in items if item.prompt]:
            self._prompt_tokenizer.check_ids(whole[0])
            return whole[0]
        seen = Counter[str]()
        expansions = []
        for item in items:
            expansions.append(self._readers[item.kind].number_expansion(item.expansion, seen[item.kind]))
            seen[item.kind] += 1
        try:
            return self._prompt_tokenizer.tokenize(parsed.text, expansions)
        except Exception as exc:
            text = f"the prompt cannot be tokenized ({describe_error(exc)})"
            raise RequestError(text, parsed.request.request_id) from exc

    def _find_placeholders(self, request: Request, ids: Sequence[int], items: Sequence[MediaItem]) -> list[int]:
        if self.loaded.in_front:  # whatever ids stand there, and wherever else these are
            return [row for item in items for row in item.rows]
        where = [position for position, token in enumerate(ids) if token in self.media_token_ids]
        expected = sum(item.tokens for item in items)
        if len(where) != expected:
            message = (
                f"the prompt has {len(where)} placeholder tokens for {expected} visual tokens; "
                "remove special tokens from its text, or have them read as text by special_tokens=False"
            )
            raise BadMedia(message, request.request_id)
        return where

    def _find_spans(
        self, where: Sequence[int], items: Sequence[MediaItem], salt: str, whole: int
    ) -> tuple[MediaSpan, ...]:
        spans, used = [], 0
        for item in items:
            first, last = where[used], where[used + item.tokens - 1]
            spans.append(self._make_span(item, first, last + 1 - first, salt, whole))
            used += item.tokens
        return tuple(spans)

    def _make_span(self, item: MediaItem, offset: int, length: int, salt: str = "", whole: int = 0) -> MediaSpan:
        return MediaSpan(
            kind=item.kind,
            tokens=item.tokens,
            offset=offset,
            length=length,
            content=add_salt(item.content, salt),
            atomic=self.loaded.atomic and item.kind == "image",
            meta=item.meta,
            width=item.width,
            height=item.height,
            strip=item.strip,
            whole=whole,
        )

    def _count_whole(self, ids: Sequence[int]) -> int:
        """Count the first tokens of a prompt among which some see later ones, beyond one image: ``MediaSpan.whole``."""
        if self.loaded.whole_prompt:
            return len(ids)
        return max((at + 1 for at, number in enumerate(ids) if number in self.loaded.together), default=0)

    def _stop_ids(self, sampling: Sampling) -> tuple[frozenset[int], frozenset[int]]:
        """List the tokens that end the output, and others that do so because a stop string is one."""
        own, special = frozenset() if sampling.ignore_eos else self.eos_ids, self.loaded.special_ids
        ends = own.union(sampling.stop_token_ids)
        return ends, frozenset(special[text] for text in sampling.stop or () if text in special) - ends

    def _prompt_limit(self) -> int:
        limit = self.limits.max_prompt_tokens
        return self.context_length - 1 if limit is None else min(limit, self.context_length - 1)


@contextmanager
def _prompt_errors(request: str) -> Iterator[None]:
    """Raise what is wrong with a prompt as the request's own error."""
    try:
        yield
    except PromptProblem as exc:
        error = BadMedia if exc.media else RequestError
        raise error(str(exc), request) from exc


def _own_errors(request: str) -> AbstractContextManager[None]:
    """Have any error of the tokenizer and of the model's processor end its own request, as ``RequestError``."""
    return own_errors(request, "preprocessing", (asyncio.CancelledError,))


def _context_length(config: Any, tokenizer: Any) -> int:
    length = getattr(config.get_text_config(), "max_position_embeddings", None) or tokenizer.model_max_length
    return int(min(length, _NO_LIMIT))
