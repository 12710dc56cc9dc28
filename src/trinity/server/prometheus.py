"""Prometheus: a collector over a pipeline's metrics, loads and running requests.

Names and buckets are vLLM's (``vllm:...``) where the meaning is the same, so that its dashboards show them, else ours
(``trinity_...``). Requests that are running count with the tokens that they have, so that every counter is true now.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from trinity.metrics import SPANS, TRANSFER_LABELS, Histogram, Metrics
from trinity.pipeline import Pipeline

VLLM_LABELS = ("model_name", "engine")
ENGINE = "0"  # one pipeline is one engine; instances have labels of their own
HISTOGRAM_NAMES = {
    "ttft_s": ("vllm:time_to_first_token_seconds", "Time to first token."),
    "itl_s": ("vllm:inter_token_latency_seconds", "Time between two tokens of a request."),
    "tpot_s": ("vllm:request_time_per_output_token_seconds", "Mean time per output token after the first."),
    "latency_s": ("vllm:e2e_request_latency_seconds", "Time from submission to the end."),
    "queue_s": ("vllm:request_queue_time_seconds", "Time in the queues in front of encode and prefill."),
    "prefill_s": ("vllm:request_prefill_time_seconds", "Time of encode, migration to prefill, and prefill."),
    "decode_s": ("vllm:request_decode_time_seconds", "Time from the first to the last token."),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Tokens of the prompt, visual ones included."),
    "output_tokens": ("vllm:request_generation_tokens", "Tokens of the output."),
    "max_tokens": ("vllm:request_params_max_tokens", "Longest output that was allowed."),
}
END_REASONS = {
    "stop": ("stop", "encoded"),
    "length": ("length",),
    "abort": ("cancelled", "deadline"),
    "error": ("error",),
}
"""vLLM's reasons, and those of ``Output.finish_reason`` that each stands for."""


class PipelineCollector(Collector):
    """A collector of ``prometheus_client``, to register or to scrape at /metrics.

    - ``pipe``: a pipeline; ``collect()`` is called on its loop's thread.
    - ``model``: value of the label ``model_name``.
    """

    def __init__(self, pipe: Pipeline, model: str) -> None:
        self._pipe, self._labels = pipe, (model, ENGINE)

    def describe(self) -> Iterable[Metric]:
        """Describe nothing, so that registering does not collect: the pipeline may not have started yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        metrics, running = self._pipe.metrics, self._running_times()
        summary = metrics.summary()
        yield from self._gauges(running)
        yield from self._counters(summary, running)
        yield from self._histograms(metrics, running)
        yield from self._instances()
        yield from self._transfers(metrics)

    def _running_times(self) -> list[tuple[int, list[float]]]:
        """Prompt length and times of the tokens of each running request, in seconds since it came."""
        streams = self._pipe.streams
        return [(len(each.processed.work.prompt) if each.processed else 0, each.token_times) for each in streams]

    def _gauges(self, running: list[tuple[int, list[float]]]) -> Iterator[Metric]:
        started = sum(1 for _, times in running if times)
        yield self._gauge("vllm:num_requests_running", "Requests that have a token and not their last.", started)
        yield self._gauge("vllm:num_requests_waiting", "Requests without a token so far.", len(running) - started)
        info = GaugeMetricFamily("trinity_info", "The pipeline.", labels=("placement", "hosting"))
        info.add_metric((str(self._pipe.placement), self._pipe.hosting), 1)
        yield info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=VLLM_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counters(self, summary: Mapping[str, Any], running: list[tuple[int, list[float]]]) -> Iterator[Metric]:
        tokens = summary["tokens"]
        prompts = tokens["prompt"] + sum(prompt for prompt, times in running if times)
        outputs = tokens["output"] + sum(len(times) for _, times in running)
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts, visual ones included.", prompts)
        yield self._counter("vllm:generation_tokens", "Tokens of outputs.", outputs)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens of ended requests.", tokens["prompt"])
        yield self._counter("vllm:prefix_cache_hits", "Of them found in the prefix cache.", tokens["cached"])
        yield self._counter("vllm:num_preemptions", "Requests that gave up their KV blocks.", summary["preemptions"])
        yield self._counter("trinity_recoveries", "Losses after which a request went on.", summary["recoveries"])
        yield self._counter("trinity_visual_tokens", "Visual tokens of prompts of ended requests.", tokens["media"])
        ends = CounterMetricFamily(
            "vllm:request_success", "Requests that have ended.", labels=(*VLLM_LABELS, "finished_reason")
        )
        for reason, own in END_REASONS.items():
            ends.add_metric((*self._labels, reason), sum(summary["finished"].get(each, 0) for each in own))
        yield ends
        refused = CounterMetricFamily("trinity_requests_refused", "Requests that never started.", labels=("error",))
        for error, count in summary["refused"].items():
            refused.add_metric((error,), count)
        yield refused
        failed = CounterMetricFamily("trinity_requests_failed", "Requests that ended with an error.", labels=("error",))
        for error, count in summary["failed"].items():
            failed.add_metric((error,), count)
        yield failed

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=VLLM_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _histograms(self, metrics: Metrics, running: list[tuple[int, list[float]]]) -> Iterator[Metric]:
        found = dict(metrics.histograms)
        first, gaps = found["ttft_s"].copy(), found["itl_s"].copy()
        for _, times in running:
            first.add(times[:1])
            gaps.add(later - earlier for earlier, later in pairwise(times))
        found |= {"ttft_s": first, "itl_s": gaps}
        for name, (shown, text) in HISTOGRAM_NAMES.items():
            family = HistogramMetricFamily(shown, text, labels=VLLM_LABELS)
            family.add_metric(self._labels, _buckets(found[name]), found[name].total)
            yield family
        spans = HistogramMetricFamily("trinity_span_seconds", "Spans of TriInfer's figure 11.", labels=("span",))
        for span in SPANS:
            counted = found[f"{span}_span_s"]
            spans.add_metric((span,), _buckets(counted), counted.total)
        yield spans

    def _instances(self) -> Iterator[Metric]:
        pipe = self._pipe
        free = GaugeMetricFamily("trinity_blocks_free", "Blocks available.", labels=("instance", "kind"))
        pools = GaugeMetricFamily("trinity_blocks", "Blocks of the pool.", labels=("instance", "kind"))
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of KV blocks in use.", labels=VLLM_LABELS)
        backlog = GaugeMetricFamily(
            "trinity_backlog_seconds", "Predicted time of the work at a stage.", labels=("instance", "stage")
        )
        for name, load in pipe.loads.items():
            sizes = pipe.pools.get(name, {})
            for kind, blocks in load.free.items():
                free.add_metric((name, kind), blocks)
            for kind, blocks in sizes.items():
                pools.add_metric((name, kind), blocks)
            if sizes.get("kv"):
                usage.add_metric((self._labels[0], name), 1 - load.free.get("kv", 0) / sizes["kv"])
            for stage, seconds in load.predicted_s.items():
                backlog.add_metric((name, stage), seconds)
        up = GaugeMetricFamily("trinity_instance_up", "1 for an instance that serves.", labels=("instance", "roles"))
        for each in pipe.instances:
            up.add_metric((each.name or "", each.roles), float(is_up(pipe, each.name or "")))
        yield from (free, pools, usage, backlog, up)

    def _transfers(self, metrics: Metrics) -> Iterator[Metric]:
        """Transfers of ended requests by kind, scheme and pair, and by outcome: pulled, cached, store or failed."""
        names = {"trinity_transfers": "Transfers of blocks.", "trinity_transfer_bytes": "Bytes that they moved."}
        names["trinity_transfer_seconds"] = "Seconds that they took."
        families = [CounterMetricFamily(name, text, labels=TRANSFER_LABELS) for name, text in names.items()]
        for pair, counted in list(metrics.transfers.items()):
            for family, value in zip(families, counted, strict=True):
                family.add_metric(pair, value)
        yield from families


def is_up(pipe: Pipeline, name: str) -> bool:
    """True for an instance that serves: one in a process of its own may be away."""
    health = pipe.health.get(name)
    return pipe.state == "running" and (health is None or health.state == "up")


def _buckets(counted: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus has them."""
    bounds = [*(f"{float(bound):g}" for bound in counted.bounds), "+Inf"]
    return list(zip(bounds, accumulate(counted.counts), strict=True))
