"""RequestProcessor: tokenising and image preprocessing, off the event loop and in parallel (TriInfer 4.1)."""

from __future__ import annotations

import asyncio
import reprlib
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trinity.core.messages import MediaSpan, Work
from trinity.errors import BadMedia, ClosedError, RequestError, RequestTooLarge
from trinity.preprocess.loading import LoadedProcessor, load
from trinity.preprocess.media import MediaLimits as MediaLimits
from trinity.preprocess.media import MediaProblem, read_image
from trinity.preprocess.media_items import Item, ItemReader
from trinity.preprocess.prompt import PromptProblem, PromptText, chat_parts, from_markers, from_template
from trinity.request import Media, Request, check_request

T = TypeVar("T")
_CHARACTERS_PER_TOKEN = 1024  # far above any vocabulary's mean: longer text is refused before it is tokenised
_NO_LIMIT = 1 << 30


class Processed(msgspec.Struct, frozen=True):
    """A request made ready: ``inputs[i]`` holds the model's inputs for ``work.media[i]`` as tensors by name.

    ``clipped``: ``max_tokens`` was cut to what the context leaves. ``emulated``: nothing will compute it.
    """

    work: Work
    inputs: tuple[dict[str, Any], ...] = ()
    clipped: bool = False
    emulated: bool = False


class _Plan(msgspec.Struct, frozen=True):
    """A checked request: its text, and its media in the order of the text with their names for messages."""

    request: Request
    text: PromptText
    media: tuple[Media, ...] = ()
    names: tuple[str, ...] = ()


class RequestProcessor:
    """Turns requests into work for the cores, by the model's own tokenizer, chat template and processor.

    ``context_length`` in tokens; ``eos_ids`` end an output; ``multimodal`` with ``media_kinds`` says what it takes;
    rows of ``media_token_ids`` in a prompt are replaced by features. All methods may be called from any thread.

    Raises ``ConfigError`` for a missing or broken model directory, ``UnsupportedModel`` for an unknown architecture.
    """

    def __init__(self, model_dir: str | Path, *, limits: MediaLimits | None = None, threads: int = 2) -> None:
        self.limits = limits or MediaLimits()
        self._loaded: LoadedProcessor = load(Path(model_dir))
        self._reader = ItemReader(self._loaded)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="trinity-processor")
        self._closed = False
        config = self._loaded.config
        self.model_type: str = config.model_type
        self.context_length: int = _context_length(config, self._loaded.tokenizer)
        self.tokenizer: Any = self._loaded.tokenizer
        self.eos_ids: frozenset[int] = self._loaded.eos_ids
        self.media_token_ids: frozenset[int] = self._loaded.media_token_ids
        self.media_kinds: frozenset[str] = frozenset(self._loaded.placeholders)
        self.multimodal = bool(self.media_kinds)

    def process(self, request: Request) -> Processed:
        """Check, read, preprocess and tokenise one request, on the calling thread.

        Raises ``BadMedia`` (an image is unreadable, or images and markers differ in number), ``RequestTooLarge``
        (prompt beyond the context or ``MediaLimits.max_prompt_tokens``), ``RequestError``, each with the request's id.
        """
        return self._whole(self._plan(request))

    def _whole(self, plan: _Plan) -> Processed:
        return self._finish(plan, [self._item(plan, index) for index in range(len(plan.media))])

    async def aprocess(self, request: Request) -> Processed:
        """Like ``process``, on threads of the processor: images of one request and several requests in parallel.

        Raises ``ClosedError`` after ``close()``, else as ``process``.
        """
        begun = await self._run(self._begin, request)
        if isinstance(begun, Processed):
            return begun
        return await self._run(self._finish, begun, await self._items(begun))

    def _begin(self, request: Request) -> Processed | _Plan:
        """All of it where no images are to be read side by side: at every change of threads a request queues again."""
        plan = self._plan(request)
        return plan if len(plan.media) > 1 else self._whole(plan)

    async def _items(self, plan: _Plan) -> list[Item]:
        """All media of a request in parallel; where one fails, nobody waits for the others, and none goes on unseen."""
        reading = [asyncio.ensure_future(self._run(self._item, plan, index)) for index in range(len(plan.media))]
        try:
            return await asyncio.gather(*reading)
        finally:
            for each in reading:
                each.cancel()
            await asyncio.gather(*reading, return_exceptions=True)

    def dummy_inputs(self, visual_tokens_hint: int | None = None) -> tuple[MediaSpan, dict[str, Any]]:
        """One synthetic image for profiling, of about ``visual_tokens_hint`` visual tokens where its size decides.

        Raises ``ConfigError`` for a text-only model.
        """
        item = self._reader.synthetic(visual_tokens_hint)
        return self._span(item, 0, item.tokens), item.inputs

    def close(self) -> None:
        """Let running work end, drop what waits, and wait for the threads' end. May be called twice.

        It blocks: beside an event loop use ``aclose()``.
        """
        self._closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def aclose(self) -> None:
        """Like ``close``, without blocking the event loop."""
        self._closed = True
        await asyncio.to_thread(self.close)

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        if self._closed:
            raise ClosedError("the request processor is closed")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():  # dropped by close(), not by the caller
                raise ClosedError("the request processor was closed before it came to this request") from None
            raise

    # ------------------------------------------------------------ one request, in three steps

    def _plan(self, request: Request) -> _Plan:
        check_request(request)
        media = request.all_media()
        self._check_media(request, media)
        counts = Counter(item.kind for item in media)
        try:
            text = self._text(request, counts)
        except PromptProblem as exc:
            error = BadMedia if exc.media else RequestError
            raise error(str(exc), request.request_id) from exc
        limit = self._prompt_limit()
        if sum(map(len, text.pieces)) > limit * _CHARACTERS_PER_TOKEN:
            raise RequestTooLarge(f"the prompt's text is far beyond {limit} tokens; shorten it", request.request_id)
        return _Plan(request, text, *_in_text_order(text, media))

    def _check_media(self, request: Request, media: Sequence[Media]) -> None:
        for item in media:
            if item.kind not in self.media_kinds:
                takes = ", ".join(sorted(self.media_kinds)) or "text only"
                message = f"model type {self.model_type!r} takes no media of kind {item.kind!r} here; it takes: {takes}"
                raise BadMedia(message, request.request_id)
        if len(media) > self.limits.max_images:
            message = f"{len(media)} images given; the limit max_images is {self.limits.max_images}"
            raise BadMedia(message, request.request_id)

    def _text(self, request: Request, counts: Counter[str]) -> PromptText:
        placeholders = self._loaded.placeholders
        if request.messages is None:
            if not isinstance(request.prompt, str):
                raise PromptProblem(f"prompt must be text, got {type(request.prompt).__name__}", media=False)
            return from_markers(request.prompt, placeholders, counts)
        if isinstance(request.messages, str) or not request.messages:
            raise PromptProblem("messages must be a list that is not empty", media=False)
        return from_template(self._render(chat_parts(request.messages, placeholders, counts)), placeholders, counts)

    def _render(self, chat: list[dict[str, Any]]) -> str:
        template = getattr(self._loaded.processor, "chat_template", None) or self.tokenizer.chat_template
        if not template:
            raise PromptProblem("this model has no chat template; give prompt= instead of messages=", media=False)
        try:
            rendered = self.tokenizer.apply_chat_template(
                chat, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except Exception as exc:  # templates raise jinja errors, or any other from the values they are given
            raise PromptProblem(f"the chat template refuses these messages ({exc})", media=False) from exc
        return str(rendered)

    def _item(self, plan: _Plan, index: int) -> Item:
        try:
            image = read_image(plan.media[index].source, self.limits)
            return self._reader.read(image)
        except MediaProblem as exc:
            raise BadMedia(f"{plan.names[index]}: {exc}", plan.request.request_id) from exc

    def _finish(self, plan: _Plan, items: Sequence[Item]) -> Processed:
        request = plan.request
        ids = self._ids(plan, items)
        limit = self._prompt_limit()
        if len(ids) > limit:
            visual = sum(item.tokens for item in items)
            raise RequestTooLarge(
                f"the prompt has {len(ids)} tokens ({visual} of them visual) and must leave room for an output in a "
                f"context of {self.context_length} (prompt limit {limit}); shorten it or give fewer or smaller images",
                request.request_id,
            )
        room = self.context_length - len(ids)
        work = Work(
            request=request.request_id,
            prompt=ids,
            media=self._spans(request, ids, items),
            max_tokens=min(request.max_tokens, room),
            sampling=_seeded(request),
            stop_ids=self._stop_ids(request),
            deadline_s=request.deadline_s,
        )
        return Processed(work, tuple(item.inputs for item in items), request.max_tokens > room)

    def _ids(self, plan: _Plan, items: Sequence[Item]) -> tuple[int, ...]:
        parts = [plan.text.pieces[0]]
        for index, (item, after) in enumerate(zip(items, plan.text.pieces[1:], strict=True)):
            parts += [self._reader.numbered(item.expansion, index), after]
        text = "".join(parts)
        try:
            # As one text: splitting it at the images would tokenise the borders otherwise than the model's processor.
            special = self._adds_special(text, plan.text.rendered)
            return tuple(self._loaded.runs.ids(text, lambda short: self._tokenise(short, special)))
        except Exception as exc:
            raise RequestError(f"the prompt cannot be tokenised ({exc})", plan.request.request_id) from exc

    def _tokenise(self, text: str, special: bool) -> Sequence[int]:
        found: Sequence[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return found

    def _adds_special(self, text: str, rendered: bool) -> bool:
        """As transformers does: a chat template may have written the first special token itself."""
        if not rendered:
            return True
        first = self.tokenizer.bos_token
        return self.multimodal and not (first is not None and text.startswith(first))

    def _spans(self, request: Request, ids: Sequence[int], items: Sequence[Item]) -> tuple[MediaSpan, ...]:
        where = [position for position, token in enumerate(ids) if token in self.media_token_ids]
        expected = sum(item.tokens for item in items)
        if len(where) != expected:
            message = (
                f"the prompt has {len(where)} placeholder tokens for {expected} visual tokens; remove special tokens"
            )
            raise BadMedia(message, request.request_id)
        spans, used = [], 0
        for item in items:
            first, last = where[used], where[used + item.tokens - 1]
            spans.append(self._span(item, first, last + 1 - first))
            used += item.tokens
        return tuple(spans)

    def _span(self, item: Item, offset: int, length: int) -> MediaSpan:
        return MediaSpan(
            kind=item.kind,
            tokens=item.tokens,
            offset=offset,
            length=length,
            content=item.content,
            atomic=self._loaded.atomic,
            meta=item.meta,
            width=item.width,
            height=item.height,
        )

    def _stop_ids(self, request: Request) -> frozenset[int]:
        own = frozenset() if request.sampling.ignore_eos else self.eos_ids
        return own | frozenset(request.sampling.stop_token_ids)

    def _prompt_limit(self) -> int:
        limit = self.limits.max_prompt_tokens
        return self.context_length - 1 if limit is None else min(limit, self.context_length - 1)


def _in_text_order(text: PromptText, media: Sequence[Media]) -> tuple[tuple[Media, ...], tuple[str, ...]]:
    """Each kind's items in turn, as the text asks for them, with a name that tells a user which one is meant."""
    waiting = {kind: iter([item for item in media if item.kind == kind]) for kind in text.kinds}
    totals, seen = Counter(text.kinds), Counter[str]()
    ordered, names = [], []
    for kind in text.kinds:
        item = next(waiting[kind])
        seen[kind] += 1
        shown = f" ({reprlib.repr(str(item.source))})" if isinstance(item.source, (str, Path)) else ""
        ordered.append(item)
        names.append(f"{kind} {seen[kind]} of {totals[kind]}{shown}")
    return tuple(ordered), tuple(names)


def _seeded(request: Request) -> Any:
    if request.sampling.seed is not None:
        return request.sampling
    return msgspec.structs.replace(request.sampling, seed=secrets.randbits(63))


def _context_length(config: Any, tokenizer: Any) -> int:
    length = getattr(config.get_text_config(), "max_position_embeddings", None) or tokenizer.model_max_length
    return int(min(length, _NO_LIMIT))
