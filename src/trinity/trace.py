"""Trace, SLO and attainment: what was asked, what was served, and how much of it was in time."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, get_args

import msgspec

from trinity.errors import ConfigError, TraceError, UnknownName

Rule = Literal["p90", "p99", "guard", "tpot"]
RULES: tuple[Rule, ...] = get_args(Rule)
COMPLETE = ("stop", "length")  # finish reasons of a request that was served to its end

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

        ``p90``: TTFT and 90 % of the gaps below their bounds (TriInfer, section 5.1). ``p99``: 99 % of the gaps.
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


class TraceImage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One image of a request: size in pixels, rows in the image cache, content hash; None where not known."""

    width: Count | None = None
    height: Count | None = None
    tokens: Count | None = None
    content: str | None = None


class TraceRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request: a superset of Mooncake's rows, so that those load as they are.

    ``timestamp`` is the arrival in ms. ``input_length`` counts the prompt's tokens, visual ones included,
    ``text_length`` those of text alone. ``hash_ids`` are Mooncake's prefix blocks. What follows ``max_tokens`` is there
    for requests that were served; gaps and spans in seconds.
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


class Trace(Sequence[TraceRow]):
    """Requests in the order in which they were appended; with ``limit``, the last so many (``dropped`` counts).

    ``skipped`` is the number of bad rows that ``load`` left out.
    """

    def __init__(self, rows: Iterable[TraceRow | Mapping[str, Any]] = (), *, limit: int | None = None) -> None:
        if limit is not None and limit < 1:
            raise ConfigError(f"a trace's limit must be at least 1 row, got {limit}")
        self._rows: deque[TraceRow] = deque(maxlen=limit)
        self.dropped = self.skipped = 0
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

    def save(self, path: str | Path) -> None:
        """Write one JSON object a line, by arrival. The file is there in full or not at all."""
        target = Path(path)
        scratch = target.with_name(f"{target.name}.{os.getpid()}.part")
        rows = sorted(self._rows, key=lambda row: row.timestamp)
        scratch.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        scratch.replace(target)

    @classmethod
    def load(cls, path: str | Path, on_error: Literal["raise", "skip"] = "raise") -> Trace:
        """Read what ``save`` or Mooncake wrote.

        A bad row raises ``TraceError`` with its line, or with ``on_error="skip"`` is left out and counted.
        """
        if on_error not in ("raise", "skip"):
            raise UnknownName("on_error", on_error, ("raise", "skip"))
        trace = cls()
        for number, line in enumerate(_lines(Path(path)), 1):
            try:
                if line.strip():
                    trace.append(_parse(line))
            except TraceError as error:
                if on_error == "raise":
                    raise TraceError(str(error), number) from error
                trace.skipped += 1
        return trace


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error


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
