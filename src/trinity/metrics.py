"""Metrics: counts requests, latencies, SLO attainment, the spans of TriInfer's figure 11 and bytes transferred."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from trinity.errors.arguments import Whole, check_arguments, check_call
from trinity.request import Output
from trinity.tables import PERCENTILES as PERCENTILES
from trinity.tables import Table, as_html, as_text, distribution
from trinity.tables import percentile as percentile
from trinity.traces.trace import COMPLETE, SLO, SLO_RULES

SPANS = (
    "encode_queue",
    "encode",
    "ep_migration",
    "prefill_queue",
    "prefill",
    "pd_migration",
    "decode_queue",
    "decode",
)
TRANSFER_LABELS = ("kind", "scheme", "source", "target", "outcome")
_GAPS_PER_OUTPUT = 16  # gaps kept for each output kept, which bounds memory if outputs are long
_LATENCIES = {"ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "TPOT"}
_STEP_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_FIRST_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_WHOLE_BOUNDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKEN_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
HISTOGRAM_BOUNDS: dict[str, tuple[float, ...]] = {
    "ttft_s": (*_FIRST_BOUNDS, 640, 2560),
    "itl_s": _STEP_BOUNDS,
    "tpot_s": _STEP_BOUNDS,
    "latency_s": _WHOLE_BOUNDS,
    "queue_s": _WHOLE_BOUNDS,
    "prefill_s": _WHOLE_BOUNDS,
    "decode_s": _WHOLE_BOUNDS,
    "prompt_tokens": _TOKEN_BOUNDS,
    "output_tokens": _TOKEN_BOUNDS,
    "max_tokens": _TOKEN_BOUNDS,
    **{f"{span}_span_s": _FIRST_BOUNDS for span in SPANS},
}
"""Upper bounds of histograms, vLLM's where it has one of the same meaning."""
_RULE_NAMES = {"p90": "90 % of gaps", "p99": "99 % of gaps", "guard": "90 % + guard", "tpot": "mean gap"}


class Histogram:
    """Counts of values by upper bound: what comes between two looks can be told, as percentiles of a ring cannot.

    - ``bounds``: ascending upper bounds; a value that equals one counts below it.
    - ``counts``: one more than there are bounds, each of its own values alone; ``total``: sum of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts, self.total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, values: Iterable[float]) -> None:
        """Count values."""
        for value in values:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def copy(self) -> Histogram:
        """Copy, to which values can be added that do not count yet."""
        made = Histogram(self.bounds)
        made.counts, made.total = list(self.counts), self.total
        return made


@check_arguments
class Metrics:
    """Counts and latencies of all requests of a pipeline.

    - ``slo`` (None): TTFT and TBT bounds, for attainment.
    - ``last`` (outputs, 4096): percentiles cover this many outputs, to bound memory; all else covers every request.

    Attributes:

    - ``histograms``: by the names of ``HISTOGRAM_BOUNDS``, of all requests that have ended.
    - ``transfers``: [transfers, bytes, seconds] by kind, scheme, source, target and outcome.

    Raises ``ConfigError`` for ``last`` below 1.
    """

    def __init__(self, slo: SLO | None = None, last: Whole = 4096) -> None:
        self.slo = slo
        self._finished: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._met: Counter[str] = Counter()
        self._tokens = Counter(dict.fromkeys(("prompt", "media", "cached", "output"), 0))
        self._prefix_hits = self._emulated = self._preemptions = self._encode_only = self._recoveries = 0
        self._moved: dict[str, Counter[str]] = {}
        self.histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAM_BOUNDS.items()}
        self.transfers: dict[tuple[str, ...], list[float]] = {}
        self._spans = dict.fromkeys(SPANS, 0.0)
        self._values: dict[str, deque[float]] = {
            "ttft_s": deque(maxlen=last),
            "itl_s": deque(maxlen=last * _GAPS_PER_OUTPUT),
            "tpot_s": deque(maxlen=last),
        }

    @property
    def requests(self) -> int:
        """Number of requests that have ended, refused ones included."""
        return self._finished.total()

    @check_call
    def add(self, output: Output, encode_only: bool = False, error: str = "") -> None:
        """Count a request that has ended; ``encode_only``: it was to have no token, so no latency of one and no SLO.

        error: name of the error that it ended with.
        """
        self._finished[output.finish_reason or "error"] += 1
        self._failed.update([error] if error else ())
        self._emulated += output.emulated
        self._recoveries += output.lives - 1
        if encode_only:
            self._encode_only += 1
            self._tokens["media"] += output.media_tokens
            self._fill_spans(output, ("encode_queue", "encode"))
            return
        self._preemptions += output.preemptions
        self._count_tokens(output)
        self._keep_latencies(output)
        self._fill_histograms(output)
        for transfer in output.transfers:
            self._count_transfer(transfer)
        if output.finish_reason in COMPLETE:
            for name in SPANS:
                self._spans[name] += output.spans.get(name, 0.0)
        if self.slo is not None:
            self._met.update(rule for rule in SLO_RULES if self.slo.is_met(output, rule))

    @check_call
    def add_refused(self, error: BaseException, encode_only: bool = False) -> None:
        """Count a request that never started; for the SLO it is one that was not in time, unless ``encode_only``."""
        self._encode_only += encode_only
        self._finished["refused"] += 1
        self._refused[type(error).__name__] += 1

    def _count_tokens(self, output: Output) -> None:
        self._tokens["prompt"] += output.prompt_tokens
        self._tokens["media"] += output.media_tokens
        self._tokens["cached"] += output.cached_tokens
        self._prefix_hits += output.cached_tokens > 0
        self._tokens["output"] += len(output.token_ids)

    def _keep_latencies(self, output: Output) -> None:
        if output.ttft_s is not None:
            self._values["ttft_s"].append(output.ttft_s)
        if output.tpot_s is not None:
            self._values["tpot_s"].append(output.tpot_s)
        self._values["itl_s"].extend(output.itl_s)

    def _fill_histograms(self, output: Output) -> None:
        spans, first = output.spans, output.ttft_s
        found: dict[str, Iterable[float | None]] = {
            "ttft_s": [first],
            "itl_s": output.itl_s,
            "tpot_s": [output.tpot_s],
            "latency_s": [output.latency_s],
            "queue_s": [spans.get("encode_queue", 0.0) + spans.get("prefill_queue", 0.0)],
            "prefill_s": [spans.get("encode", 0.0) + spans.get("ep_migration", 0.0) + spans.get("prefill", 0.0)],
            "decode_s": [None if first is None else sum(output.itl_s)],
            "prompt_tokens": [output.prompt_tokens],
            "output_tokens": [len(output.token_ids)],
            "max_tokens": [output.max_tokens],
        }
        for name, values in found.items():
            self.histograms[name].add(value for value in values if value is not None)
        self._fill_spans(output, SPANS)

    def _fill_spans(self, output: Output, names: Iterable[str]) -> None:
        for name in names:
            if seconds := output.spans.get(name):  # what a request did not have is no 0
                self.histograms[f"{name}_span_s"].add([seconds])

    def _count_transfer(self, transfer: dict[str, Any]) -> None:
        moved = self._moved.setdefault(str(transfer.get("kind", "?")), Counter({"pulled": 0, "cached": 0, "bytes": 0}))
        moved[str(transfer.get("outcome", "pulled"))] += 1
        moved["bytes"] += int(transfer.get("bytes", 0))
        pair = tuple(str(transfer.get(name, "")) for name in TRANSFER_LABELS)
        counted = self.transfers.setdefault(pair, [0, 0, 0.0])
        for place, value in enumerate((1, transfer.get("bytes", 0), transfer.get("seconds", 0.0))):
            counted[place] += value

    def counts(self) -> dict[str, Any]:
        """Count all requests that have ended, without the sorting that percentiles of ``summary`` need.

        ``judged``: those that an SLO is for, all but encode-only ones; ``met``: of them those that met it, by rule; the
        others as in ``summary``.
        """
        return {
            "requests": self.requests,
            "judged": self.requests - self._encode_only,
            "finished": dict(self._finished),
            "refused": dict(self._refused),
            "failed": dict(self._failed),
            "met": {rule: self._met[rule] for rule in SLO_RULES} if self.slo is not None else None,
            "tokens": dict(self._tokens),
            "preemptions": self._preemptions,
            "recoveries": self._recoveries,
        }

    def summary(self) -> dict[str, Any]:
        """Summarize as plain values, ready for JSON. Times in seconds; None where nothing was measured.

        - ``requests``, ``finished``, ``refused``: number of requests, by finish reason, and by error.
        - ``failed``: requests that had started, by error.
        - ``emulated``: requests served by emulated stages.
        - ``tokens``: prompt, media, cached and output tokens.
        - ``prefix_hits``: requests whose prompt was partly in the prefix cache.
        - ``preemptions``: over all requests; ``recoveries``: losses after which they went on.
        - ``ttft_s``, ``itl_s``, ``tpot_s``: mean, percentiles and maximum.
        - ``slo``, ``attainment``: bounds, and share of the requests for tokens that met them, by rule (``SLO.is_met``).
        - ``spans_s``: means over requests served to their end.
        - ``migrations``: by kind, transfers pulled, transfers not needed because the target had the blocks, and bytes.
        """
        served = sum(self._finished[reason] for reason in COMPLETE)
        return {
            "requests": self.requests,
            "emulated": self._emulated,
            "finished": dict(self._finished),
            "refused": dict(self._refused),
            "failed": dict(self._failed),
            "tokens": dict(self._tokens),
            "prefix_hits": self._prefix_hits,
            "preemptions": self._preemptions,
            "recoveries": self._recoveries,
            **{name: distribution(values) for name, values in self._values.items()},
            "slo": None if self.slo is None else {"ttft": self.slo.ttft, "tbt": self.slo.tbt},
            "attainment": self._attainment(),
            "spans_s": {name: total / served for name, total in self._spans.items()} if served else None,
            "migrations": {kind: dict(moved) for kind, moved in self._moved.items()},
        }

    def _attainment(self) -> dict[str, float] | None:
        judged = self.requests - self._encode_only
        if self.slo is None or not judged:
            return None
        return {rule: self._met[rule] / judged for rule in SLO_RULES}

    def __str__(self) -> str:
        return "\n\n".join(as_text(table) for table in _tables(self.summary()))

    def _repr_html_(self) -> str:
        return "".join(as_html(table) for table in _tables(self.summary()))


def _tables(summary: dict[str, Any]) -> list[Table]:
    """Turn a summary into tables, without empty ones: counts, latencies, attainment, spans, migrations."""
    emulated = {"of them emulated": summary["emulated"]} if summary["emulated"] else {}
    counts = {"requests": summary["requests"], **emulated, **summary["finished"], "prefix hits": summary["prefix_hits"]}
    counts |= {name: summary[name] for name in ("preemptions", "recoveries") if summary[name]}
    counts.update({f"{name} tokens": number for name, number in summary["tokens"].items()})
    tables = [Table(("count", ""), [(name, f"{number:,}") for name, number in counts.items()])]
    measured = {title: summary[name] for name, title in _LATENCIES.items() if summary[name]}
    if measured:
        columns = next(iter(measured.values()))
        rows = [(title, *(f"{1e3 * value:.1f}" for value in values.values())) for title, values in measured.items()]
        tables.append(Table(("ms", *columns), rows))
    if summary["attainment"]:
        title = f"SLO {summary['slo']['ttft']:g} s, {summary['slo']['tbt']:g} s"
        rows = [(_RULE_NAMES[rule], f"{share:.1%}") for rule, share in summary["attainment"].items()]
        tables.append(Table((title, "attained"), rows))
    if summary["spans_s"]:
        rows = [(name, f"{1e3 * seconds:.2f}") for name, seconds in summary["spans_s"].items()]
        tables.append(Table(("span", "mean ms"), rows))
    return tables + _migration_tables(summary["migrations"])


def _migration_tables(migrations: dict[str, dict[str, int]]) -> list[Table]:
    rows = [
        (kind, str(moved["pulled"]), str(moved["cached"]), f"{moved['bytes'] / 2**20:.2f}")
        for kind, moved in migrations.items()
    ]
    return [Table(("migration", "pulled", "cached", "MiB"), rows)] if rows else []
