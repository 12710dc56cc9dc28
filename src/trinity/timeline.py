"""Timeline: records the work of every instance as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from trinity.errors import ConfigError, describe_error
from trinity.errors.arguments import Whole, check_arguments, check_call, check_value, show
from trinity.errors.files import write_file
from trinity.tables import Table, as_titled_html

SOURCE_LANE = "migration out"  # the lane on which the source of a migration is shown


class Slice(NamedTuple):
    """One piece of work on a lane of an instance.

    - ``instance``, ``lane``, ``name``: where it ran, and its title.
    - ``start_s``, ``duration_s`` (seconds): start by any one clock, and length.
    - ``args``: details; a ``source`` (another instance) makes it a migration.
    """

    instance: str
    lane: str
    name: str
    start_s: float
    duration_s: float
    args: Mapping[str, Any]


# Number in order of addition, then a Slice's fields: a tuple is cheaper to build than a Slice.
StoredSlice = tuple[int, str, str, str, float, float, Mapping[str, Any]]


@check_arguments
class Timeline:
    """Records the last slices of work, from any thread.

    - ``limit`` (slices, 200,000): older slices are dropped. Below 1 raises ``ConfigError``.

    No lock is needed: each operation on shared state is atomic in the interpreter.
    """

    def __init__(self, limit: Whole = 200_000) -> None:
        self._slices: deque[StoredSlice] = deque(maxlen=limit)
        self._added = count()

    def __len__(self) -> int:
        return len(self._slices)

    def add(
        self,
        instance: str,
        lane: str,
        name: str,
        start_s: float,
        duration_s: float,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a slice. ``args`` with a ``source`` (another instance) make it a migration: an arrow comes from there.

        Raises ``ConfigError`` if a time is not finite or a duration is negative.
        """
        if not type(start_s) is type(duration_s) is float:
            start_s, duration_s = (check_value("start and duration", each, float) for each in (start_s, duration_s))
        if not (-inf < start_s < inf and 0 <= duration_s < inf):
            raise ConfigError(
                f"slice {show(name)}: start {start_s} s must be finite, duration {duration_s} s finite and at least 0"
            )
        if type(args) is not dict:
            args = check_value("args", args, Mapping[str, Any] | None) or {}
        plain = type(instance) is type(lane) is type(name) is str
        if not (plain and instance.isascii() and lane.isascii() and name.isascii()):
            instance, lane, name = check_value("instance, lane, name", (instance, lane, name), tuple[str, str, str])
        self._slices.append((next(self._added), instance, lane, name, start_s, duration_s, args))

    @classmethod
    @check_call
    def of(cls, slices: Iterable[Slice]) -> Timeline:
        """Make a timeline of existing slices, such as a replay's, for ``to_json`` and ``save``."""
        found = [check_value("slices", each, Slice) for each in slices]
        timeline = cls(limit=max(1, len(found)))
        for each in found:
            timeline.add(*each)
        return timeline

    def slices(self) -> tuple[Slice, ...]:
        """Return the recorded slices, oldest first."""
        return tuple(Slice._make(fields) for _, *fields in list(self._slices))

    @property
    def dropped_slices(self) -> int:
        """Number of older slices that are no longer here."""
        kept = list(self._slices)
        return max(kept)[0] + 1 - len(kept) if kept else 0

    def rows(self) -> tuple[tuple[str, str, float, float, dict[str, Any]], ...]:
        """Return (lane, name, start, seconds, arguments) of every slice, as a process sends them to its pipeline."""
        return tuple((each.lane, each.name, each.start_s, each.duration_s, dict(each.args)) for each in self.slices())

    def _busy(self) -> Table:
        """Tabulate the lanes: slices, and the seconds that they take together."""
        lanes: dict[tuple[str, str], list[float]] = {}
        for each in self.slices():
            lanes.setdefault((each.instance, each.lane), []).append(each.duration_s)
        rows = [
            (instance, lane, f"{len(taken):,}", f"{sum(taken):.3f}")
            for (instance, lane), taken in sorted(lanes.items())
        ]
        return Table(("instance", "lane", "slices", "busy s"), rows)

    def __repr__(self) -> str:
        slices = self.slices()
        instances, began = {each.instance for each in slices}, min((each.start_s for each in slices), default=0.0)
        length = max((each.start_s + each.duration_s for each in slices), default=0.0) - began
        return f"Timeline({len(slices):,} slices of {len(instances)} instances over {length:.3f} s)"

    def _repr_html_(self) -> str:
        return as_titled_html(repr(self), self._busy())

    def to_json(self) -> str:
        """Encode in the trace-event format: a process per instance, a thread per lane, microseconds from 0.

        Slices of one lane that overlap are shown on threads of their own ("migration 2"), because the format only
        nests slices of one thread. Raises ``ConfigError`` where ``args`` hold what JSON does not.
        """
        slices, dropped = self.slices(), self.dropped_slices
        origin = min((entry.start_s for entry in slices), default=0.0)
        events = _events(slices, origin)
        other = {"dropped_slices": dropped, "origin_s": origin}
        content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
        try:
            return msgspec.json.encode(content, enc_hook=str).decode()
        except Exception as error:  # of a foreign object among the args
            raise ConfigError(f"args of a slice cannot be written as JSON: {describe_error(error)}") from error

    @check_call
    def save(self, path: str | Path) -> None:
        """Write ``to_json()`` to a file, completely or not at all. Raises ``ConfigError``."""
        write_file(path, self.to_json().encode())


class _Tracks:
    """Numbers processes and threads. A lane has as many threads as it has slices at one time."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._busy_until: dict[tuple[str, str], list[float]] = {}
        self._tids: dict[tuple[str, str], int] = {}

    def place(self, instance: str, lane: str, start_s: float, duration_s: float) -> dict[str, int]:
        """Choose pid and tid of a slice; slices must come in order of their start."""
        ends = self._busy_until.setdefault((instance, lane), [])
        free = next((i for i, end in enumerate(ends) if end <= start_s), len(ends))
        ends[free : free + 1] = [start_s + duration_s]
        title = lane if free == 0 else f"{lane} {free + 1}"
        pid = self._pids.setdefault(instance, len(self._pids) + 1)
        return {"pid": pid, "tid": self._tids.setdefault((instance, title), len(self._tids) + 1)}

    def names(self) -> Iterator[dict[str, Any]]:
        for instance, pid in self._pids.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": instance}}
        for (instance, title), tid in self._tids.items():
            yield {"ph": "M", "name": "thread_name", "pid": self._pids[instance], "tid": tid, "args": {"name": title}}


def _events(slices: Iterable[Slice], origin: float) -> list[dict[str, Any]]:
    tracks = _Tracks()
    events: list[dict[str, Any]] = []
    for number, entry in enumerate(sorted(slices, key=lambda entry: entry.start_s)):
        start, duration = _micros(entry.start_s - origin), _micros(entry.duration_s)
        here = tracks.place(entry.instance, entry.lane, entry.start_s, entry.duration_s)
        shown = {"ph": "X", "name": entry.name, "cat": entry.lane, "ts": start, "dur": duration, "args": entry.args}
        events.append({**shown, **here})
        source = entry.args.get("source")
        if source and source != entry.instance:
            there = tracks.place(str(source), SOURCE_LANE, entry.start_s, entry.duration_s)
            events.append({**shown, "name": f"{entry.name} to {entry.instance}", "cat": SOURCE_LANE, **there})
            arrow = {"name": "migration", "cat": "migration", "id": number}
            events.append({"ph": "s", **arrow, "ts": start, **there})
            events.append(
                {"ph": "f", "bp": "e", **arrow, "ts": _micros(entry.start_s - origin + entry.duration_s / 2), **here}
            )
    return [*tracks.names(), *events]


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)
