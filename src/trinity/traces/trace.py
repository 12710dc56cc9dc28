"""Traces of requests, service-level objectives (SLOs), and the share of requests that met them."""

from __future__ import annotations

import gzip
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from sys import getsizeof
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, get_args

import msgspec

from trinity.errors import ConfigError, TraceError, UnknownName, describe_error, warn_caller
from trinity.errors.arguments import (
    Count,
    KeywordsByName,
    Number,
    Positive,
    Whole,
    check_arguments,
    check_call,
    check_struct,
    check_value,
    show,
)
from trinity.errors.files import read_regular_file, unzip, write_file
from trinity.traces.checks import check_row
from trinity.traces.media import MEDIA_OF, TraceMedia
from trinity.traces.media import TraceAudio as TraceAudio
from trinity.traces.media import TraceImage as TraceImage
from trinity.traces.media import TraceVideo as TraceVideo
from trinity.traces.read_report import ReadReport
from trinity.traces.statistics import TraceStatistics, arrival_rate, trace_statistics

SLORule = Literal["p90", "p99", "guard", "tpot"]
SLO_RULES: tuple[SLORule, ...] = get_args(SLORule)
COMPLETE = ("stop", "length")  # finish reasons of a completed request


class ServedRequest(Protocol):
    """A request after serving, as an SLO sees it: an ``Output`` or a ``TraceRow``.

    Times in seconds. TTFT counts from the scheduled arrival; ``itl_s`` are the gaps between output tokens.
    """

    @property
    def ttft_s(self) -> float | None: ...
    @property
    def itl_s(self) -> Sequence[float]: ...
    @property
    def finish_reason(self) -> str: ...


_USUAL_MS = (100, 100_000)  # bounds that are usual in milliseconds, and not in seconds


class _MadeByUsers(KeywordsByName):
    """Looks at the bounds that a user gives, not at those that msgspec decodes, copies or unpickles later."""

    if not TYPE_CHECKING:  # as in KeywordsByName

        def __call__(cls, *args: Any, **keywords: Any) -> Any:
            made = super().__call__(*args, **keywords)
            _warn_of_milliseconds(made)
            return made


class SLO(msgspec.Struct, metaclass=_MadeByUsers, frozen=True):
    """Latency bounds of a service-level objective, in seconds.

    - ``ttft`` (s): bound on the time to first token.
    - ``tbt`` (s): bound on the time between tokens.

    Raises ``ConfigError`` for a bound that is not a positive finite number. Its constructor warns (``TrinityWarning``)
    of one that looks like milliseconds, from 100 to 100,000.
    """

    ttft: Positive
    tbt: Positive

    def __post_init__(self) -> None:
        check_struct(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return msgspec.convert, (msgspec.structs.asdict(self), type(self))

    def is_met(self, served: ServedRequest, rule: SLORule = "p90") -> bool:
        """Check whether a request met the SLO. A request that failed, was refused or did not finish did not.

        ``p90``: TTFT and 90 % of the gaps between tokens are below their bounds (TriInfer 2.2).
        ``p99``: as p90, with 99 % of the gaps.
        ``guard``: as p90, and the last token comes within ttft + gaps · tbt, so that one long stall among the tolerated
        tenth of the gaps does not pass.
        ``tpot``: TTFT and the mean gap are below their bounds.
        An output of one token has no gaps. Raises ``UnknownName`` for another rule.
        """
        if type(rule) is not str or rule not in SLO_RULES:
            rule = _read_rule(rule)
        try:
            reason, first, gaps = served.finish_reason, served.ttft_s, served.itl_s
        except Exception:
            check_value("served", served, ServedRequest)
            raise
        if reason not in COMPLETE or first is None or not first < self.ttft:
            return False
        return self._are_gaps_met(first, gaps, rule)

    def _are_gaps_met(self, ttft_s: float, gaps: Sequence[float], rule: SLORule) -> bool:
        if rule == "tpot":
            return not gaps or math.fsum(gaps) < self.tbt * len(gaps)
        share = 99 if rule == "p99" else 90
        enough = 100 * sum(gap < self.tbt for gap in gaps) >= share * len(gaps)
        if rule != "guard":
            return enough
        return enough and ttft_s + math.fsum(gaps) <= self.ttft + len(gaps) * self.tbt


def _warn_of_milliseconds(slo: SLO) -> None:
    for name, bound in (("ttft", slo.ttft), ("tbt", slo.tbt)):
        if _USUAL_MS[0] <= bound < _USUAL_MS[1]:
            warn_caller(
                f"SLO({name}={bound:g}) reads seconds; if these are milliseconds, give {name}={bound / 1000:g}. "
                f"For no bound give at least {_USUAL_MS[1]:,}"
            )


def attainment(requests: Iterable[ServedRequest], slo: SLO, rule: SLORule = "p90") -> float:
    """Share of all requests, failed ones included, that met the SLO. Raises ``TraceError`` where there are none."""
    met = [slo.is_met(request, rule) for request in requests]
    if not met:
        raise TraceError("no requests to compute the attainment of: serve or load some first")
    return sum(met) / len(met)


class TraceRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request of a trace; a superset of Mooncake's rows, which load unchanged.

    A row that exists is a valid one: it is frozen, and its constructor checks what every reader and replay relies on.

    - ``timestamp`` (ms): arrival.
    - ``input_length`` (tokens): the prompt, visual tokens included.
    - ``text_length`` (tokens): its text alone.
    - ``images``, ``videos``, ``audio``: its media.
    - ``hash_ids``: Mooncake's prefix blocks.

    The fields after ``max_tokens`` are set once the request was served:

    - ``ttft_s``, ``latency_s`` and ``spans`` (s), and ``itl_s`` (s), the gaps between tokens.
    - ``emulated``: served by emulated stages.
    - ``late_s`` (s): delay between the scheduled arrival and the time at which a replaying client sent the request;
      ``ttft_s`` and ``latency_s`` include it.

    Raises ``TraceError`` for times that are not finite numbers of at least 0, and for lengths that are not whole
    numbers of at least 0.
    """

    timestamp: Number
    input_length: Count
    output_length: Count
    text_length: Count | None = None
    images: list[TraceImage] = []
    videos: list[TraceVideo] = []
    audio: list[TraceAudio] = []
    hash_ids: list[int] = []
    request_id: str = ""
    session: str = ""
    max_tokens: Count | None = None
    ttft_s: Number | None = None
    itl_s: list[Number] = []
    latency_s: Number | None = None
    finish_reason: str = ""
    spans: dict[str, float] = {}
    emulated: bool = False
    late_s: Number | None = None

    def __post_init__(self) -> None:
        check_row(self, MEDIA_OF)

    @property
    def is_cut_short(self) -> bool:
        """True if it was cancelled, refused or failed: its output would have been longer than ``output_length``."""
        return bool(self.finish_reason) and self.finish_reason not in COMPLETE

    @property
    def media(self) -> Sequence[TraceMedia]:
        """All media: images, then videos, then audio clips."""
        return (*self.images, *self.videos, *self.audio) if self.videos or self.audio else self.images

    @property
    def clips(self) -> Sequence[TraceVideo | TraceAudio]:
        """Videos, then audio clips."""
        return [*self.videos, *self.audio]

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of all media, which are rows of the image cache; a medium of unknown size counts as none."""
        return sum(each.tokens or 0 for each in self.media)

    @property
    def text_tokens(self) -> int:
        """``text_length`` or, where unknown, ``input_length`` less the visual tokens."""
        return max(0, self.input_length - self.visual_tokens) if self.text_length is None else self.text_length

    def request_at(self, timestamp: float) -> TraceRow:
        """Copy the request with another arrival time (ms), without the measurements of its serving.

        The ``finish_reason`` stays where its output was cut short: its length is then not the one that was wanted.
        """
        return TraceRow(
            timestamp=timestamp,
            input_length=self.input_length,
            output_length=self.output_length,
            text_length=self.text_length,
            images=self.images,
            videos=self.videos,
            audio=self.audio,
            hash_ids=self.hash_ids,
            request_id=self.request_id,
            session=self.session,
            max_tokens=self.max_tokens,
            finish_reason=self.finish_reason if self.is_cut_short else "",
        )


@check_arguments
class Trace(Sequence[TraceRow]):
    """Requests in the order in which they were appended.

    rows: rows, or mappings with the fields of ``TraceRow``.
    limit (rows, None): keeps only the last ``limit`` rows; ``dropped`` counts the others.
    limit_bytes (bytes, None): keeps only the last rows that take no more, packed; each read unpacks them anew.

    ``skipped`` counts bad rows that ``load`` left out; ``report`` is the ``ReadReport`` of ``traces.read_trace``.
    ``scale``, ``window``, ``jitter``, ``head`` and ``split`` return new traces of the same requests, sorted by arrival,
    without the measurements of their serving. Raises ``ConfigError`` for a limit below 1.
    """

    def __init__(
        self,
        rows: Iterable[TraceRow | Mapping[str, Any]] = (),
        *,
        limit: Whole | None = None,
        limit_bytes: Whole | None = None,
    ) -> None:
        packed = PackedRows(TraceRow, limit_bytes, limit) if limit_bytes is not None else None
        self._rows: deque[TraceRow] | PackedRows[TraceRow] = deque(maxlen=limit) if packed is None else packed
        self.dropped = self.skipped = 0
        self.report: ReadReport | None = None
        for row in rows:
            self.append(row)

    def append(self, row: TraceRow | Mapping[str, Any]) -> None:
        """Add a row. Raises ``TraceError`` where a mapping lacks a field or has one of a wrong type or value."""
        before = len(self._rows)
        self._rows.append(row if isinstance(row, TraceRow) else _convert_row(row))
        self.dropped += before + 1 - len(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[TraceRow]:
        return iter(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return list(self._rows)[index] if isinstance(index, slice) else self._rows[index]

    @check_call
    def attainment(self, slo: SLO, rule: SLORule = "p90") -> float:
        """Share of all rows, failed requests included, that met the SLO. Raises ``TraceError`` for an empty trace."""
        return attainment(self._rows, slo, rule)

    def statistics(self) -> TraceStatistics:
        """Counts, rate, burstiness and sizes of the requests."""
        return trace_statistics(self._rows)

    @check_call
    def scale(self, factor: float | None = None, *, rate: float | None = None) -> Trace:
        """Scale the request rate by ``factor`` or to ``rate`` requests/s, dividing all arrival times (TriInfer 5.1).

        Raises ``ConfigError`` unless exactly one of the two is given and positive, ``TraceError`` where all requests
        come at once, since such a trace has no rate.
        """
        if (factor is None) == (rate is None):
            raise ConfigError("give either a factor or rate= (requests a second), not both or neither")
        if rate is not None:
            present = arrival_rate(sorted(row.timestamp / 1000 for row in self._rows))
            if present is None:
                raise TraceError("this trace has no rate to scale: its requests (if any) all come at once")
            factor = _check_positive("rate", rate) / present
        shrink = _check_positive("factor", factor)
        return self._retime((row.timestamp / shrink, row) for row in self._rows)

    @check_call
    def window(self, start_s: float, end_s: float) -> Trace:
        """Cut out the requests that arrive in [``start_s``, ``end_s``); their times then count from ``start_s``."""
        if not 0 <= start_s < end_s:
            raise ConfigError(f"a window starts at 0 s or later and ends after that, got {start_s} to {end_s}")
        low, high = 1000 * start_s, 1000 * end_s
        return self._retime((row.timestamp - low, row) for row in self._rows if low <= row.timestamp < high)

    @check_call
    def jitter(self, tick_s: float, seed: int) -> Trace:
        """Spread arrivals that were rounded down to ticks of ``tick_s`` seconds evenly over their ticks."""
        noise, tick = random.Random(seed), 1000 * _check_positive("tick_s", tick_s)
        return self._retime((row.timestamp + tick * noise.random(), row) for row in self._rows)

    @check_call
    def head(self, count: int) -> Trace:
        """Take the first ``count`` requests by arrival."""
        if count < 0:
            raise ConfigError(f"a count of requests is at least 0, got {count}")
        return self._retime([(row.timestamp, row) for row in self.by_arrival()[:count]])

    @check_call
    def split(self, share: float) -> tuple[Trace, Trace]:
        """Split off the first ``share`` of the requests by arrival; times of both parts count from their first arrival.

        Lets a planner see one part and be judged on the rest (TriInfer 5.1).
        """
        if not 0 < share < 1:
            raise ConfigError(f"a share lies between 0 and 1, got {share!r}")
        rows = self.by_arrival()
        cut = round(len(rows) * share)
        parts = rows[:cut], rows[cut:]
        first, rest = (self._retime((row.timestamp - part[0].timestamp, row) for row in part) for part in parts)
        return first, rest

    def by_arrival(self) -> list[TraceRow]:
        """Rows sorted by arrival; rows of equal arrival keep their order."""
        return sorted(self._rows, key=lambda row: row.timestamp)

    def _retime(self, rows: Iterable[tuple[float, TraceRow]]) -> Trace:
        trace = Trace(row.request_at(at) for at, row in sorted(rows, key=lambda pair: pair[0]))
        trace.report = self.report
        return trace

    def __repr__(self) -> str:
        return f"Trace({len(self._rows):,} requests)"

    def _repr_html_(self) -> str:
        return self.statistics()._repr_html_()

    @check_call
    def save(self, path: str | Path) -> None:
        """Write one JSON object a line, sorted by arrival, gzipped for names in .gz.

        The file appears whole or not at all.
        """
        content = b"".join(msgspec.json.encode(row) + b"\n" for row in self.by_arrival())
        write_file(path, gzip.compress(content, mtime=0) if Path(path).suffix == ".gz" else content)

    @classmethod
    @check_call
    def load(cls, path: str | Path, on_error: Literal["raise", "skip"] = "raise") -> Trace:
        """Read a file that ``save`` or Mooncake wrote.

        A bad row raises ``TraceError`` with its line number; with ``on_error="skip"`` it is left out and counted.
        """
        trace = cls()
        for number, line in enumerate(read_lines(path), 1):
            try:
                if line.strip():
                    trace.append(_parse_row(line))
            except TraceError as error:
                if on_error == "raise":
                    raise TraceError(str(error), number) from error
                trace.skipped += 1
        return trace


def read_lines(path: str | Path) -> list[bytes]:
    """Read the lines of a file, gzipped or not. Raises ``TraceError`` where it cannot be read."""
    return unzip(read_regular_file(path, TraceError), path, TraceError).split(b"\n")


def _read_rule(rule: object) -> SLORule:
    """Return a rule of another class of text, numpy's for example. Raises ``UnknownName``."""
    for known in SLO_RULES if isinstance(rule, str) else ():
        if str.__eq__(known, rule):
            return known
    raise UnknownName("SLO rule", show(rule).strip("'"), SLO_RULES)


def _check_positive(name: str, value: float | None) -> float:
    if value is None or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, got {value!r}")
    return value


def _parse_row(line: bytes) -> TraceRow:
    try:
        row = msgspec.json.decode(line, type=TraceRow)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"not a row of a trace: {error}") from error
    if row.ttft_s is not None and len(row.itl_s) != max(0, row.output_length - 1):
        raise TraceError(f"{row.output_length} output tokens have {len(row.itl_s)} gaps (itl_s) between them")
    if row.ttft_s is None and row.itl_s:
        raise TraceError("gaps (itl_s) without a time to first token (ttft_s)")
    return row


def _convert_row(fields: Mapping[str, Any]) -> TraceRow:
    try:
        return msgspec.convert(fields, TraceRow)
    except msgspec.ValidationError as error:
        raise TraceError(f"not a row of a trace: {error}") from error
    except Exception as error:  # an object of somebody's own
        raise TraceError(f"not a row of a trace: {describe_error(error)}") from error


Row = TypeVar("Row", bound=msgspec.Struct)


class PackedRows(Sequence[Row], Generic[Row]):
    """Holds the newest rows of one kind as msgpack, a quarter of what they are as objects. Each read unpacks them anew.

    - ``kind``: class of the rows.
    - ``most_bytes``: that they take, packed; the newest row is kept, however large.
    - ``maxlen`` (rows, None): the most of them, too.

    An iteration is over the rows that were there as it began, also where another thread appends. Raises
    ``ConfigError`` for a bound below 1.
    """

    def __init__(self, kind: type[Row], most_bytes: int, maxlen: int | None = None) -> None:
        if most_bytes < 1 or (maxlen is not None and maxlen < 1):
            raise ConfigError(f"rows are kept within at least 1 byte and 1 row, got {most_bytes!r} and {maxlen!r}")
        self._kind = kind
        self._packed: deque[bytes] = deque()
        self.most_bytes, self.maxlen, self.bytes = most_bytes, maxlen, 0

    def append(self, row: Row) -> None:
        """Add a row, and drop the oldest until all fit again. Raises ``TraceError`` for a number beyond 64 bits."""
        try:
            encoded = msgspec.msgpack.encode(row)
        except OverflowError:
            raise TraceError("a row of a bounded trace has whole numbers below 2**64; give times as floats") from None
        packed = bytes(memoryview(encoded))  # a copy: msgspec's own has up to a third in reserve
        self._packed.append(packed)
        self.bytes += getsizeof(packed)
        while len(self._packed) > 1 and self._is_full():
            self.bytes -= getsizeof(self._packed.popleft())

    def _is_full(self) -> bool:
        return self.bytes > self.most_bytes or (self.maxlen is not None and len(self._packed) > self.maxlen)

    def __len__(self) -> int:
        return len(self._packed)

    def __iter__(self) -> Iterator[Row]:
        return map(self._unpack, self._packed.copy())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return list(map(self._unpack, list(self._packed)[index]))
        return self._unpack(self._packed[index])

    def _unpack(self, packed: bytes) -> Row:
        return msgspec.msgpack.decode(packed, type=self._kind)
