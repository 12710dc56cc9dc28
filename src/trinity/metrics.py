"""Metrics: counts requests, latencies, SLO attainment, the spans of TriInfer's figure 11 and bytes transferred."""

from __future__ import annotations

from collections import Counter, deque
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
_GAPS_PER_OUTPUT = 16  # gaps kept for each output kept, which bounds memory if outputs are long
_LATENCIES = {"ttft_s": "TTFT", "itl_s": "ITL", "tpot_s": "TPOT"}
_RULE_NAMES = {"p90": "90 % of gaps", "p99": "99 % of gaps", "guard": "90 % + guard", "tpot": "mean gap"}


@check_arguments
class Metrics:
    """Counts and latencies of all requests of a pipeline.

    - ``slo`` (None): TTFT and TBT bounds, for attainment.
    - ``last`` (outputs, 4096): percentiles cover this many outputs, to bound memory; all else covers every request.

    Raises ``ConfigError`` for ``last`` below 1.
    """

    def __init__(self, slo: SLO | None = None, last: Whole = 4096) -> None:
        self.slo = slo
        self._finished: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._met: Counter[str] = Counter()
        self._tokens = Counter(dict.fromkeys(("prompt", "media", "cached", "output"), 0))
        self._prefix_hits = self._emulated = self._preemptions = 0
        self._moved: dict[str, Counter[str]] = {}
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
    def add(self, output: Output) -> None:
        """Count a request that has ended."""
        self._finished[output.finish_reason or "error"] += 1
        self._emulated += output.emulated
        self._preemptions += output.preemptions
        self._count_tokens(output)
        self._keep_latencies(output)
        for transfer in output.transfers:
            self._count_transfer(transfer)
        if output.finish_reason in COMPLETE:
            for name in SPANS:
                self._spans[name] += output.spans.get(name, 0.0)
        if self.slo is not None:
            self._met.update(rule for rule in SLO_RULES if self.slo.is_met(output, rule))

    @check_call
    def add_refused(self, error: BaseException) -> None:
        """Count a request that never started; for the SLO it is one that was not in time."""
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

    def _count_transfer(self, transfer: dict[str, Any]) -> None:
        moved = self._moved.setdefault(str(transfer.get("kind", "?")), Counter({"pulled": 0, "cached": 0, "bytes": 0}))
        moved[str(transfer.get("outcome", "pulled"))] += 1
        moved["bytes"] += int(transfer.get("bytes", 0))

    def summary(self) -> dict[str, Any]:
        """Summarize as plain values, ready for JSON. Times in seconds; None where nothing was measured.

        - ``requests``, ``finished``, ``refused``: number of requests, by finish reason, and by error.
        - ``emulated``: requests served by emulated stages.
        - ``tokens``: prompt, media, cached and output tokens.
        - ``prefix_hits``: requests whose prompt was partly in the prefix cache.
        - ``preemptions``: over all requests.
        - ``ttft_s``, ``itl_s``, ``tpot_s``: mean, percentiles and maximum.
        - ``slo``, ``attainment``: bounds, and share of all requests that met them, by rule (``SLO.is_met``).
        - ``spans_s``: means over requests served to their end.
        - ``migrations``: by kind, transfers pulled, transfers not needed because the target had the blocks, and bytes.
        """
        served = sum(self._finished[reason] for reason in COMPLETE)
        return {
            "requests": self.requests,
            "emulated": self._emulated,
            "finished": dict(self._finished),
            "refused": dict(self._refused),
            "tokens": dict(self._tokens),
            "prefix_hits": self._prefix_hits,
            "preemptions": self._preemptions,
            **{name: distribution(values) for name, values in self._values.items()},
            "slo": None if self.slo is None else {"ttft": self.slo.ttft, "tbt": self.slo.tbt},
            "attainment": self._attainment(),
            "spans_s": {name: total / served for name, total in self._spans.items()} if served else None,
            "migrations": {kind: dict(moved) for kind, moved in self._moved.items()},
        }

    def _attainment(self) -> dict[str, float] | None:
        if self.slo is None or not self.requests:
            return None
        return {rule: self._met[rule] / self.requests for rule in SLO_RULES}

    def __str__(self) -> str:
        return "\n\n".join(as_text(table) for table in _tables(self.summary()))

    def _repr_html_(self) -> str:
        return "".join(as_html(table) for table in _tables(self.summary()))


def _tables(summary: dict[str, Any]) -> list[Table]:
    """Turn a summary into tables, without empty ones: counts, latencies, attainment, spans, migrations."""
    emulated = {"of them emulated": summary["emulated"]} if summary["emulated"] else {}
    counts = {"requests": summary["requests"], **emulated, **summary["finished"], "prefix hits": summary["prefix_hits"]}
    counts |= {"preemptions": summary["preemptions"]} if summary["preemptions"] else {}
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
