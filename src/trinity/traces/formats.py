"""Readers of other systems' trace files.

Every format states its units, and the fields that it does not record and that are imputed; ``trace.report`` has both.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from trinity.errors import ConfigError, TraceError, UnknownName
from trinity.errors.arguments import Count, Number
from trinity.traces.read_report import ReadReport
from trinity.traces.trace import Trace, TraceImage, TraceRow, read_lines

IMAGE_TOKENS = 576  # imputed to an image whose size a trace does not record; LLaVA-1.5's
_EPOCH = datetime(2020, 1, 1, tzinfo=UTC)  # near the traces: a float of ms from here keeps their 100 ns
_MAX_PROBLEMS = 10  # bad rows that a report quotes
_NO_IMAGES = "none: the trace is of text, or does not record images"
_ALL_TEXT = "all of input_length"

RowFields = Mapping[str, Any]
T = TypeVar("T", bound=msgspec.Struct)


class TraceFormat(NamedTuple):
    """A kind of trace file: its units, what it imputes, and how a row becomes a request.

    ``row``: converts a row's fields, given the visual tokens imputed to an image. ``table``: a CSV file with a header.
    ``absolute``: times are dates, so that the first arrival becomes 0.
    """

    units: str
    imputed: dict[str, str]
    row: Callable[[RowFields, int], TraceRow]
    table: bool = False
    absolute: bool = False


class _ServeGenRow(msgspec.Struct):
    timestamp: Number
    text_tokens: Count
    image_tokens: list[Count]
    output_length: Annotated[int, msgspec.Meta(ge=1)]
    client: int | str | None = None


class _LengthsRow(msgspec.Struct):
    """Fields that Mooncake's and GuideLLM's rows share; the unit of ``timestamp`` differs."""

    timestamp: Number
    input_length: Count
    output_length: Count
    hash_ids: list[int] = []


class _AzureRow(msgspec.Struct):
    TIMESTAMP: str
    ContextTokens: Count
    GeneratedTokens: Count
    NumImages: Count = 0


class _BurstGPTRow(msgspec.Struct, rename={"requested": "Request tokens", "answered": "Response tokens"}):
    Timestamp: Number
    requested: Count
    answered: Count


def _convert(fields: RowFields, to: type[T]) -> T:
    try:
        row = msgspec.convert(fields, to, strict=False)
    except msgspec.ValidationError as error:
        raise TraceError(f"not a row of this format: {error}") from error
    if not all(math.isfinite(value) for value in msgspec.structs.astuple(row) if isinstance(value, float)):
        raise TraceError("not a row of this format: a number is not finite")
    return row


def _trinity(fields: RowFields, _: int) -> TraceRow:
    return _convert(fields, TraceRow)


def _servegen(fields: RowFields, _: int) -> TraceRow:
    row = _convert(fields, _ServeGenRow)
    return TraceRow(
        timestamp=row.timestamp,
        input_length=row.text_tokens + sum(row.image_tokens),
        output_length=row.output_length,
        text_length=row.text_tokens,
        images=[TraceImage(tokens=tokens) for tokens in row.image_tokens],
        session="" if row.client is None else f"client-{row.client}",
    )


def _mooncake(fields: RowFields, _: int) -> TraceRow:
    named = {**fields, "timestamp": fields.get("timestamp_ms", fields.get("timestamp"))}
    return _text_row(_convert(named, _LengthsRow), ms=1.0)


def _guidellm(fields: RowFields, _: int) -> TraceRow:
    return _text_row(_convert(fields, _LengthsRow), ms=1000.0)


def _text_row(row: _LengthsRow, ms: float) -> TraceRow:
    return TraceRow(
        timestamp=row.timestamp * ms,
        input_length=row.input_length,
        output_length=row.output_length,
        text_length=row.input_length,
        hash_ids=row.hash_ids,
    )


def _azure(fields: RowFields, image_tokens: int) -> TraceRow:
    row = _convert(fields, _AzureRow)
    each = min(image_tokens, row.ContextTokens // row.NumImages) if row.NumImages else 0
    return TraceRow(
        timestamp=_azure_ms(row.TIMESTAMP),
        input_length=row.ContextTokens,
        output_length=row.GeneratedTokens,
        text_length=row.ContextTokens - each * row.NumImages,
        images=[TraceImage(tokens=each)] * row.NumImages,
    )


def _azure_ms(text: str) -> float:
    """Parse a date such as "2023-11-16 18:15:46.6805900", which has more digits than datetime takes, to ms."""
    whole, _, rest = text.partition(".")
    digits = rest.partition("+")[0]
    try:
        seconds = datetime.fromisoformat(whole.partition("+")[0]).replace(tzinfo=UTC) - _EPOCH
        return 1000 * seconds.total_seconds() + (1000 * int(digits) / 10 ** len(digits) if digits else 0.0)
    except ValueError as error:
        raise TraceError(f"{text!r} is no time such as 2023-11-16 18:15:46.6805900") from error


def _burstgpt(fields: RowFields, _: int) -> TraceRow:
    row = _convert(fields, _BurstGPTRow)
    if not row.answered:
        raise TraceError('no response tokens: this request failed where it was recorded; read with on_error="skip"')
    lengths = _LengthsRow(timestamp=row.Timestamp, input_length=row.requested, output_length=row.answered)
    return _text_row(lengths, ms=1000.0)


_NO_CONTENT = {"images.width, images.height, images.content": "unknown: every image counts as new"}
_TEXT = {"text_length": _ALL_TEXT, "images": _NO_IMAGES}
FORMATS = {
    "trinity": TraceFormat("timestamp in ms", {}, _trinity),
    "servegen": TraceFormat("timestamp in ms", _NO_CONTENT, _servegen),
    "mooncake": TraceFormat("timestamp in ms", _TEXT, _mooncake),
    "mooncake-csv": TraceFormat("timestamp_ms in ms", _TEXT, _mooncake, table=True),
    "azure-llm": TraceFormat("TIMESTAMP as date and time", _TEXT, _azure, table=True, absolute=True),
    "azure-lmm": TraceFormat(
        "TIMESTAMP as date and time",
        {
            **_NO_CONTENT,
            "images.tokens": "{image_tokens}, or less where the context is shorter",
            "text_length": "the rest",
        },
        _azure,
        table=True,
        absolute=True,
    ),
    "burstgpt": TraceFormat("Timestamp in s", _TEXT, _burstgpt, table=True),
    "guidellm": TraceFormat("timestamp in s", _TEXT, _guidellm, absolute=True),
}


def read_trace(
    path: str | Path,
    format: str | None = None,
    *,
    on_error: Literal["raise", "skip"] = "raise",
    image_tokens: int = IMAGE_TOKENS,
) -> Trace:
    """Read a trace file, gzipped or not, sorted by arrival; ``trace.report`` says what was imputed.

    path: the file.
    format (name, None): one of ``FORMATS``; None recognises it by the first row. GuideLLM's rows look like Mooncake's
        but are in seconds, so that format must be named.
    on_error ("raise"): "raise" raises ``TraceError`` with the line of a bad row, "skip" leaves it out and counts it.
    image_tokens (visual tokens, 576): imputed to images of unknown size.

    Dates become ms from the first arrival. Raises ``TraceError`` for an empty file and where no row is good,
    ``UnknownName`` for an unknown format, ``ConfigError`` for ``image_tokens`` below 1.
    """
    if on_error not in ("raise", "skip"):
        raise UnknownName("on_error", on_error, ("raise", "skip"))
    if image_tokens < 1:
        raise ConfigError(f"image_tokens must be at least 1, got {image_tokens}")
    lines = [(number, line) for number, line in enumerate(read_lines(path), 1) if line.strip()]
    if not lines:
        raise TraceError(f"the trace {path} is empty")
    name = _recognise_format(lines[0][1], path) if format is None else format
    if name not in FORMATS:
        raise UnknownName("trace format", name, FORMATS)
    return _FileReader(name, image_tokens, on_error == "skip").read(lines)


def _recognise_format(line: bytes, path: str | Path) -> str:
    if line.lstrip().startswith(b"{"):
        keys = set(_parse_object(line))
        if {"text_tokens", "image_tokens"} <= keys:
            return "servegen"
        if {"timestamp", "input_length", "output_length"} <= keys:
            lengths = keys <= {"timestamp", "input_length", "output_length", "hash_ids"}
            return "mooncake" if lengths else "trinity"
    columns = set(_split_cells(line))
    for name, wanted in _COLUMNS.items():
        if wanted <= columns:
            return name
    raise TraceError(f"the first row of {path} has no known format; give format=, one of {', '.join(FORMATS)}", 1)


_COLUMNS = {
    "mooncake-csv": {"timestamp_ms", "input_length", "output_length"},
    "azure-lmm": {"TIMESTAMP", "NumImages", "ContextTokens", "GeneratedTokens"},
    "azure-llm": {"TIMESTAMP", "ContextTokens", "GeneratedTokens"},
    "burstgpt": {"Timestamp", "Request tokens", "Response tokens"},
}


def _parse_object(line: bytes) -> RowFields:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"not a row of a trace: {error}") from error


def _split_cells(line: bytes) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line.decode("utf-8-sig").rstrip("\r")]), [])]
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceError(f"not a row of a table: {error}") from error


class _FileReader:
    def __init__(self, name: str, image_tokens: int, skip: bool) -> None:
        self.name, self.format, self.image_tokens, self.skip = name, FORMATS[name], image_tokens, skip
        self.columns: list[str] = []
        self.skipped = 0
        self.problems: list[str] = []

    def read(self, lines: list[tuple[int, bytes]]) -> Trace:
        if self.format.table:
            self.columns = _split_cells(lines[0][1])
            missing = _COLUMNS[self.name] - set(self.columns)
            if missing:
                raise TraceError(f"columns missing for format {self.name}: {', '.join(sorted(missing))}", lines[0][0])
            lines = lines[1:]
        rows = [row for number, line in lines if (row := self._row(number, line)) is not None]
        if not rows:
            raise TraceError(f"no good row in a trace of format {self.name}: {'; '.join(self.problems) or 'no row'}")
        return self._sort(rows)

    def _row(self, number: int, line: bytes) -> TraceRow | None:
        try:
            return self.format.row(self._fields(line), self.image_tokens)
        except TraceError as error:
            if not self.skip:
                raise TraceError(str(error), number) from error
            self.skipped += 1
            if len(self.problems) < _MAX_PROBLEMS:
                self.problems.append(f"line {number}: {error}")
            return None

    def _fields(self, line: bytes) -> RowFields:
        if not self.format.table:
            return _parse_object(line)
        cells = _split_cells(line)
        if len(cells) != len(self.columns):
            raise TraceError(f"{len(cells)} cells for {len(self.columns)} columns")
        return dict(zip(self.columns, cells, strict=True))

    def _sort(self, rows: list[TraceRow]) -> Trace:
        start = min(row.timestamp for row in rows) if self.format.absolute else 0.0
        unordered = sum(later.timestamp < row.timestamp for row, later in pairwise(rows))
        rows = [msgspec.structs.replace(row, timestamp=row.timestamp - start) for row in rows] if start else rows
        ordered: list[TraceRow] = sorted(rows, key=lambda row: row.timestamp)
        trace = Trace(ordered)
        trace.skipped = self.skipped
        trace.report = ReadReport(
            format=self.name,
            units=self.format.units,
            rows=len(rows),
            imputed={name: how.format(image_tokens=self.image_tokens) for name, how in self.format.imputed.items()},
            unordered=unordered,
            skipped=self.skipped,
            problems=tuple(self.problems),
        )
        return trace
