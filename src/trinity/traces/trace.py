"""Trace, SLO and attainment: what was asked, what was served, and how much of it was in time."""

from __future__ import annotations

import gzip
import math
import os
import random
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

import msgspec

from trinity.errors import ConfigError, TraceError, UnknownName
from trinity.traces.statistics import TraceStatistics, arrival_rate, statistics

Rule = Literal["p90", "p99", "guard", "tpot"]
RULES: tuple[Rule, ...] = get_args(Rule)
COMPLETE = ("stop", "length")  # finish reasons of a request that was served to its end

_GZIPPED = b"\x1f\x8b"
Count = Annotated[int, msgspec.Meta(ge=0)]
Number = Annotated[float, msgspec.Meta(ge=0)]


class Served(Protocol):
    """What an SLO looks at: an ``Output`` or a ``TraceRow``. Seconds; TTFT counts from the scheduled arrival."""

    @property
    def ttft_s(self) -> float | None: ...
    @property
    def itl_s(self) -> Sequence[float]: ...
    @property
    def finish_reason(self) -> str: ...


class SLO(msgspec.Struct, frozen=True):
    """Bounds on the time to first token and on the time between tokens, in seconds.

    Raises ``ConfigError`` where a bound is not a positive finite number.
    """

    ttft: float
    tbt: float

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft), ("tbt", self.tbt)):
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and value > 0):
                raise ConfigError(f"SLO {name} must be a positive number of seconds, got {value!r}")

    def met(self, served: Served, rule: Rule = "p90") -> bool:
        """Whether a request was in time; one that failed, was refused or did not end was not.

        ``p90``: TTFT and 90 % of the gaps below their bounds (TriInfer 2.2). ``p99``: 99 % of the gaps.
        ``guard``: as p90, and all of it within ttft + gaps · tbt, so that one long stall in the tolerated tenth of the
        gaps does not pass. ``tpot``: TTFT and the mean gap below their bounds. An output of one token has no gaps.
        """
        if rule not in RULES:
            raise UnknownName("SLO rule", rule, RULES)
        if served.finish_reason not in COMPLETE or served.ttft_s is None or not served.ttft_s < self.ttft:
            return False
        return self._gaps_met(served.ttft_s, served.itl_s, rule)

    def _gaps_met(self, ttft_s: float, gaps: Sequence[float], rule: Rule) -> bool:
        if rule == "tpot":
            return not gaps or math.fsum(gaps) < self.tbt * len(gaps)
        share = 99 if rule == "p99" else 90
        often = 100 * sum(gap < self.tbt for gap in gaps) >= share * len(gaps)
        if rule != "guard":
            return often
        return often and ttft_s + math.fsum(gaps) <= self.ttft + len(gaps) * self.tbt


def attainment(requests: Iterable[Served], slo: SLO, rule: Rule = "p90") -> float:
    """Share of all requests, failures included, that met the SLO. Raises ``TraceError`` where there are none."""
    met = [slo.met(request, rule) for request in requests]
    if not met:
        raise TraceError("no requests to take the attainment of: serve or load some first")
    return sum(met) / len(met)


class TraceImage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One image of a request: size in pixels, rows in the image cache, content hash; None where not known."""

    width: Count | None = None
    height: Count | None = None
    tokens: Count | None = None
    content: str | None = None


class TraceRow(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One request: a superset of Mooncake's rows, so that those load as they are.

    ``timestamp`` is the arrival in ms. ``input_length`` counts the prompt's tokens, visual ones included,
    ``text_length`` those of text alone. ``hash_ids`` are Mooncake's prefix blocks. What follows ``max_tokens`` is there
    for requests that were served; gaps and spans in seconds. ``emulated``: by paced stages. ``late_s``: how long after
    the scheduled arrival a client that replays sent it; ``ttft_s`` and ``latency_s`` have it in them.
    """

    timestamp: Number
    input_length: Count
    output_length: Count
    text_length: Count | None = None
    images: list[TraceImage] = []
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

    @property
    def visual_tokens(self) -> int:
        """Of all its images; one whose tokens are not known counts as none."""
        return sum(image.tokens or 0 for image in self.images)

    @property
    def text_tokens(self) -> int:
        """``text_length`` or, where it is not known, what images leave of ``input_length``."""
        return max(0, self.input_length - self.visual_tokens) if self.text_length is None else self.text_length

    def asked(self, timestamp: float) -> TraceRow:
        """The same request at another time (ms), without what was measured when it was served."""
        return TraceRow(
            timestamp=timestamp,
            input_length=self.input_length,
            output_length=self.output_length,
            text_length=self.text_length,
            images=self.images,
            hash_ids=self.hash_ids,
            request_id=self.request_id,
            session=self.session,
            max_tokens=self.max_tokens,
        )


class ReadReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a file was read: what its ``units`` are, which fields were ``imputed`` and how, which rows were left out.

    ``unordered`` rows came before one that is earlier, and were put in order. ``problems`` are the first few bad rows.
    """

    format: str
    units: str
    rows: int
    imputed: dict[str, str] = {}
    unordered: int = 0
    skipped: int = 0
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.rows:,} rows of format {self.format} ({self.units})"]
        lines += [f"imputed {name}: {how}" for name, how in self.imputed.items()]
        lines += [f"{self.unordered:,} rows out of order, put in order"] if self.unordered else []
        lines += [f"{self.skipped:,} bad rows skipped, such as {self.problems[0]}"] if self.problems else []
        return "\n".join(lines)


class Trace(Sequence[TraceRow]):
    """Requests in the order in which they were appended; with ``limit``, the last so many (``dropped`` counts).

    ``skipped`` is the number of bad rows that ``load`` left out, ``report`` what ``traces.read`` says of a file.
    What changes times (``scaled``, ``window``, ``jittered``, ``split``) gives a new trace of the same requests by
    arrival, without what was measured of them.
    """

    def __init__(self, rows: Iterable[TraceRow | Mapping[str, Any]] = (), *, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"a trace's limit must be at least 1 row, got {limit}")
        self._rows: deque[TraceRow] = deque(maxlen=limit)
        self.dropped = self.skipped = 0
        self.report: ReadReport | None = None
        for row in rows:
            self.append(row)

    def append(self, row: TraceRow | Mapping[str, Any]) -> None:
        """Add a row; raises ``TraceError`` where a mapping lacks a field or has one of a wrong type."""
        full = len(self._rows) == self._rows.maxlen
        self._rows.append(row if isinstance(row, TraceRow) else _row_of(row))
        self.dropped += full

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[TraceRow]:
        return iter(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return list(self._rows)[index] if isinstance(index, slice) else self._rows[index]

    def attainment(self, slo: SLO, rule: Rule = "p90") -> float:
        """Share of all rows, failures included, that met the SLO."""
        return attainment(self._rows, slo, rule)

    def statistics(self) -> TraceStatistics:
        """Counts, rate, burstiness and sizes of the requests."""
        return statistics(self._rows)

    def scaled(self, factor: float | None = None, *, rate: float | None = None) -> Trace:
        """The same requests ``factor`` times as often, or at ``rate`` requests a second (TriInfer 5.1).

        Time stamps are divided by the factor. Raises ``ConfigError`` unless one of both is given and positive,
        ``TraceError`` where a trace has no rate: all of its requests come at once.
        """
        if (factor is None) == (rate is None):
            raise ConfigError("give either a factor or rate= (requests a second), not both or neither")
        if rate is not None:
            own = arrival_rate(sorted(row.timestamp / 1000 for row in self._rows))
            if own is None:
                raise TraceError("this trace has no rate to scale: its requests (if any) all come at once")
            factor = _positive("rate", rate) / own
        shrink = _positive("factor", factor)
        return self._retimed((row.timestamp / shrink, row) for row in self._rows)

    def window(self, start_s: float, end_s: float) -> Trace:
        """Requests that arrive from ``start_s`` to before ``end_s``; times then count from ``start_s``."""
        if not 0 <= start_s < end_s:
            raise ConfigError(f"a window starts at 0 s or later and ends after that, got {start_s} to {end_s}")
        low, high = 1000 * start_s, 1000 * end_s
        return self._retimed((row.timestamp - low, row) for row in self._rows if low <= row.timestamp < high)

    def jittered(self, tick_s: float, seed: int) -> Trace:
        """Arrivals that were rounded down to ticks of ``tick_s`` spread evenly over their ticks."""
        noise, tick = random.Random(seed), 1000 * _positive("tick_s", tick_s)
        return self._retimed((row.timestamp + tick * noise.random(), row) for row in self._rows)

    def head(self, count: int) -> Trace:
        """The first ``count`` requests by arrival."""
        if count < 0:
            raise ConfigError(f"a count of requests is at least 0, got {count}")
        return self._retimed([(row.timestamp, row) for row in self.by_arrival()[:count]])

    def split(self, share: float) -> tuple[Trace, Trace]:
        """The first ``share`` of the requests by arrival, and the rest; each counts its times from its first arrival.

        So a planner sees a part of what it is then judged on the rest of (TriInfer 5.1).
        """
        if not 0 < share < 1:
            raise ConfigError(f"a share lies between 0 and 1, got {share!r}")
        rows = self.by_arrival()
        cut = round(len(rows) * share)
        first, rest = (
            self._retimed((row.timestamp - part[0].timestamp, row) for row in part) for part in (rows[:cut], rows[cut:])
        )
        return first, rest

    def by_arrival(self) -> list[TraceRow]:
        """The rows, earliest first; those that came at once keep their order."""
        return sorted(self._rows, key=lambda row: row.timestamp)

    def _retimed(self, rows: Iterable[tuple[float, TraceRow]]) -> Trace:
        trace = Trace(row.asked(at) for at, row in sorted(rows, key=lambda pair: pair[0]))
        trace.report = self.report
        return trace

    def _repr_html_(self) -> str:
        return self.statistics()._repr_html_()

    def save(self, path: str | Path) -> None:
        """Write one JSON object a line, by arrival, gzipped for a name in .gz. It is there in full or not at all."""
        target = Path(path)
        scratch = target.with_name(f"{target.name}.{os.getpid()}.part")
        content = b"".join(msgspec.json.encode(row) + b"\n" for row in self.by_arrival())
        scratch.write_bytes(gzip.compress(content, mtime=0) if target.suffix == ".gz" else content)
        scratch.replace(target)

    @classmethod
    def load(cls, path: str | Path, on_error: Literal["raise", "skip"] = "raise") -> Trace:
        """Read what ``save`` or Mooncake wrote.

        A bad row raises ``TraceError`` with its line, or with ``on_error="skip"`` is left out and counted.
        """
        if on_error not in ("raise", "skip"):
            raise UnknownName("on_error", on_error, ("raise", "skip"))
        trace = cls()
        for number, line in enumerate(lines_of(path), 1):
            try:
                if line.strip():
                    trace.append(_parse(line))
            except TraceError as error:
                if on_error == "raise":
                    raise TraceError(str(error), number) from error
                trace.skipped += 1
        return trace


def lines_of(path: str | Path) -> list[bytes]:
    """Lines of a file, gzipped or not. Raises ``TraceError`` where it cannot be read."""
    try:
        content = Path(path).read_bytes()
        return (gzip.decompress(content) if content[:2] == _GZIPPED else content).split(b"\n")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"the gzipped trace {path} is cut off or damaged: {error}") from error
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error


def _positive(name: str, value: float | None) -> float:
    if value is None or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, got {value!r}")
    return value


def _parse(line: bytes) -> TraceRow:
    try:
        row = msgspec.json.decode(line, type=TraceRow)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"not a row of a trace: {error}") from error
    if row.ttft_s is not None and len(row.itl_s) != max(0, row.output_length - 1):
        raise TraceError(f"{row.output_length} output tokens have {len(row.itl_s)} gaps (itl_s) between them")
    if row.ttft_s is None and row.itl_s:
        raise TraceError("gaps (itl_s) without a time to first token (ttft_s)")
    return row


def _row_of(fields: Mapping[str, Any]) -> TraceRow:
    try:
        return msgspec.convert(fields, TraceRow)
    except msgspec.ValidationError as error:
        raise TraceError(f"not a row of a trace: {error}") from error
