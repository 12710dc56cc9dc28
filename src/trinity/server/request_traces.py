"""Traces of requests by OpenTelemetry: a span of the HTTP request, one of each answer, its eight stages, its transfers.

Nothing is made, and nothing costs, without OpenTelemetry's API (extra ``otel``) and a provider: an SDK's that the
program sets up, or ``opentelemetry-instrument trinity serve`` does. A trace that the client began (W3C's
``traceparent``) is continued.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trinity.metrics import SPANS
from trinity.pipeline.stream import Stream
from trinity.request import Output

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

MIGRATIONS = {"image": "ep_migration", "kv": "pd_migration"}  # the span in which blocks of a kind move
_TRANSFER_FIELDS = ("kind", "scheme", "source", "target", "outcome", "bytes", "blocks", "pulls")


class RequestTrace:
    """A trace of one HTTP request; this one records nothing."""

    def add(self, stream: Stream) -> None:
        """Add the spans of an answer that has ended."""

    def fail(self, error: BaseException, begun: bool) -> None:
        """Note the error that ended the request; ``begun``: the response had begun."""

    def end(self, status: int, left: bool) -> None:
        """End the request's span; ``left``: the client had gone."""


class _RecordedTrace(RequestTrace):
    def __init__(self, tracer: Any, span: Span, model: str) -> None:
        self._tracer, self._span, self._model = tracer, span, model
        self._broken = False

    def add(self, stream: Stream) -> None:
        if not stream.done:  # cut off, by its client or by an error: the request's span says so
            return
        output, start = stream.output, _nanoseconds(stream.arrived_at)
        answer = self._open("answer", self._span, start, describe_answer(output, self._model))
        end_s = stream.arrived_at + (stream.token_times[-1] if stream.token_times else output.latency_s)
        starts = place_spans(output, end_s)
        for name, start_s in starts.items():
            self._close(self._open(name, answer, _nanoseconds(start_s)), start_s + output.spans[name])
        for record in output.transfers:
            start_s = starts.get(MIGRATIONS.get(str(record.get("kind")), ""), stream.arrived_at)
            fields = {f"epd.{name}": record[name] for name in _TRANSFER_FIELDS if record.get(name) is not None}
            moved = self._open("transfer", answer, _nanoseconds(start_s), fields)
            self._close(moved, start_s + float(record.get("seconds", 0.0)))
        self._close(answer, stream.arrived_at + output.latency_s)

    def _open(self, name: str, parent: Span, start: int, attributes: dict[str, Any] | None = None) -> Span:
        from opentelemetry.trace import set_span_in_context

        span: Span = self._tracer.start_span(name, set_span_in_context(parent), start_time=start, attributes=attributes)
        return span

    def _close(self, span: Span, end_s: float) -> None:
        span.end(_nanoseconds(end_s))

    def fail(self, error: BaseException, begun: bool) -> None:
        self._span.set_attribute("error.type", type(error).__name__)
        self._broken = begun

    def end(self, status: int, left: bool) -> None:
        from opentelemetry.trace import StatusCode

        if status:
            self._span.set_attribute("http.response.status_code", status)
        if left:
            self._span.set_attribute("error.type", "client_left")
        if self._broken or left or status >= 500:  # other statuses are the client's own fault, and no error of a server
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class RequestTracer:
    """Makes the traces of a server's requests.

    - ``model``: value of ``gen_ai.request.model``.
    - ``provider`` (None): an OpenTelemetry ``TracerProvider``; by default the program's own, once it has one.
    """

    def __init__(self, model: str, provider: TracerProvider | None = None) -> None:
        self._model, self._provider = model, provider
        self._installed = find_spec("opentelemetry") is not None
        if self._installed:  # here, and not as the first request comes: it reads what all packages offer
            import_module("opentelemetry.propagate")

    def begin(self, path: str, headers: dict[bytes, bytes]) -> RequestTrace:
        """Begin the trace of a request, or continue its client's."""
        if not self._installed:
            return NO_TRACE
        from opentelemetry import propagate, trace

        provider = self._provider or trace.get_tracer_provider()
        if isinstance(provider, trace.ProxyTracerProvider):  # nobody has set one
            return NO_TRACE
        tracer = provider.get_tracer("trinity.server")
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        fields = {"http.request.method": "POST", "http.route": path, "gen_ai.request.model": self._model}
        span = tracer.start_span(f"POST {path}", propagate.extract(carrier), trace.SpanKind.SERVER, fields)
        return _RecordedTrace(tracer, span, self._model) if span.is_recording() else NO_TRACE


NO_TRACE = RequestTrace()


def describe_answer(output: Output, model: str) -> dict[str, Any]:
    """Describe an answer by OpenTelemetry's names for generative models, and ours where it has none."""
    first = {} if output.ttft_s is None else {"gen_ai.response.time_to_first_chunk": output.ttft_s}
    return first | {
        "gen_ai.request.model": model,
        "gen_ai.response.id": output.request_id,
        "gen_ai.response.finish_reasons": (output.finish_reason,),
        "gen_ai.usage.input_tokens": output.prompt_tokens,
        "gen_ai.usage.output_tokens": len(output.token_ids),
        "epd.media_tokens": output.media_tokens,
        "epd.cached_tokens": output.cached_tokens,
        "epd.preemptions": output.preemptions,
        "epd.route": tuple(output.route),
    }


def place_spans(output: Output, end_s: float) -> dict[str, float]:
    """Find where each span of an output begins, in seconds: they follow each other, the last one ends at ``end_s``.

    Those that the request did not have (0 s) are left out.
    """
    starts, at = dict[str, float](), end_s
    for name in reversed(SPANS):
        at -= output.spans.get(name, 0.0)
        if output.spans.get(name):
            starts[name] = at
    return dict(reversed(starts.items()))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
