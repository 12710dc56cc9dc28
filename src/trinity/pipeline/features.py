"""Features of media, without a token of text: the rows that an encode stage makes, by the way of every request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from trinity.core.frontend import End
from trinity.core.messages import ENCODED, Failure, MediaSpan, ResolvedSampling
from trinity.errors import ClosedError, RequestError
from trinity.pipeline.chat import check_field_names
from trinity.pipeline.stream import Stream, StreamHost
from trinity.preprocess.processor import ProcessedRequest
from trinity.preprocess.text.detokenizer import TextStream
from trinity.request import Media, Request

if TYPE_CHECKING:
    import torch


FeatureSource = Request | Media | Any  # or what Media.source takes, several of these, or a chat's messages


class Features(msgspec.Struct, kw_only=True):
    """Features of the media of one request, in the order of its prompt.

    - ``request_id``: the request's.
    - ``rows``: for each medium a tensor [visual tokens, width] on the CPU, in the pipeline's dtype: what the model puts
      in place of its placeholders. Width is the text model's hidden size; where layers beyond the first get features of
      their own (deepstack), those of each follow as further columns.
    - ``media_tokens`` (tokens): rows of all media.
    - ``latency_s`` (seconds): from submission to the end; ``spans`` (seconds): of it in the encoder's queue and there.
    - ``route``: names of the instances that served it.
    - ``emulated``: stages waited in place of computing, and the rows are numbers that mean nothing.
    """

    request_id: str
    rows: list[Any]  # tensors, in words that inspect and msgspec can read without torch
    media_tokens: int = 0
    latency_s: float = 0.0
    spans: dict[str, float] = msgspec.field(default_factory=dict)
    route: list[str] = msgspec.field(default_factory=list)
    emulated: bool = False

    def __repr__(self) -> str:
        shapes = ", ".join("x".join(map(str, each.shape)) for each in self.rows)
        return f"Features({self.request_id!r}: {shapes}, {1e3 * self.latency_s:.1f} ms, {' → '.join(self.route)})"


class FeatureStream(Stream):
    """One encode-only request in flight: a stream that has no token, and features at its end."""

    encode_only = True

    def __init__(self, host: StreamHost, request: Request) -> None:
        super().__init__(host, request)
        self._rows: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, stream: Stream) -> FeatureStream:
        """Ask for the features of the request of a stream that has not begun."""
        return cls(stream.host, stream.request)

    def begin(
        self, processed: ProcessedRequest, make_text: Callable[[tuple[str, ...]], TextStream]
    ) -> ProcessedRequest:
        """Take the processed request, and submit its media alone. Raises ``RequestError`` if it has none."""
        if not processed.work.media:
            text = "features are those of images, and this request has none; give at least one"
            raise RequestError(text, self.request.request_id)
        own = {"encode_only": True, "prompt": (), "max_tokens": 1, "sampling": ResolvedSampling()}
        work = msgspec.structs.replace(processed.work, **own, stop_ids=frozenset(), named_stop_ids=frozenset())
        processed = msgspec.structs.replace(processed, work=work, clipped=False, stop=())
        self.processed = msgspec.structs.replace(processed, inputs=())
        return processed

    def end(self, event: End) -> None:
        """End the request; its features are there if it was encoded."""
        if event.reason == ENCODED and not self.done:
            assert self.processed is not None
            rows = event.finished.rows if event.finished is not None else ()
            media = self.processed.work.media
            wrong = _find_wrong_rows(media, rows)
            if wrong:
                event = msgspec.structs.replace(event, reason="error", failure=Failure("StageError", wrong))
            else:
                self._rows = _join_rows(media, rows)
        super().end(event)

    async def collect_features(self) -> Features:
        """Wait for the features. Raises the request's own error, ``ClosedError`` if it was ended before."""
        output = await self.collect()
        if output.finish_reason != ENCODED:
            raise ClosedError(f"request {output.request_id!r} was ended before its features were there")
        return Features(
            request_id=output.request_id,
            rows=list(self._rows),
            media_tokens=output.media_tokens,
            latency_s=output.latency_s,
            spans={name: seconds for name, seconds in output.spans.items() if seconds},
            route=output.route,
            emulated=output.emulated,
        )


def _find_wrong_rows(media: Sequence[MediaSpan], rows: tuple[Any, ...]) -> str:
    """Say what is wrong with what an instance sent; "" for nothing. It came over a wire, or from anyone's stage."""
    counts, wanted = [_count_rows(each) for each in rows], [span.tokens for span in media]
    return "" if counts == wanted else f"the encode stage gave features of {counts} rows for media of {wanted}"


def _join_rows(media: Sequence[MediaSpan], rows: tuple[Any, ...]) -> tuple[Any, ...]:
    """Put the strips of an image together again."""
    if not any(span.strip for span in media):
        return rows
    import torch

    firsts = [item for item, span in enumerate(media) if not span.strip]
    return tuple(torch.cat(rows[first:end]) for first, end in pairwise([*firsts, len(media)]))


def _count_rows(rows: Any) -> int:
    shape: Sequence[int] = getattr(rows, "shape", ())
    return int(shape[0]) if len(shape) == 2 else -1


def make_feature_request(given: Any, fields: Mapping[str, Any]) -> Request:
    """Make the request of media, of a chat's messages, or take a ``Request`` as it is.

    given: one medium or several, each as in ``Request.images`` or a ``Media``; or messages, as in ``Request``.
    fields: further fields of ``Request``.

    Raises ``RequestError`` for a field that there is none of, or that says again what is ``given``.
    """
    if isinstance(given, Request):
        check_field_names(fields, given.__struct_fields__, "its own")
        return msgspec.structs.replace(given, **fields) if fields else given
    check_field_names(fields, Request.__struct_fields__, "those of trinity.Request")
    several = isinstance(given, Sequence) and not isinstance(given, str | bytes | bytearray | memoryview)
    chat = several and given and all(isinstance(each, Mapping) for each in given)
    if fields.keys() & ({"prompt", "messages"} if chat else {"prompt", "messages", "images", "media"}):
        raise RequestError("give all media, or the messages, as the first argument and not in a field")
    if chat:
        return Request(messages=given, **fields)
    media = [each if isinstance(each, Media) else Media("image", each) for each in (given if several else (given,))]
    return Request("".join(f"<{each.kind}>" for each in media), media=media, **fields)


async def read_features(host: StreamHost, given: Any, fields: Mapping[str, Any]) -> Features:
    """Serve an encode-only request to its end; see ``Pipeline.features``."""
    async with FeatureStream(host, make_feature_request(given, fields)) as stream:
        return await stream.collect_features()
