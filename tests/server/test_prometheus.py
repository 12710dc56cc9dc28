"""The scrape, read by Prometheus' own parser: counts are true while requests run, grow only, and name what moved."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from support.http_server import ServedModel, chat_body, serve_model, settled
from trinity.metrics import Histogram

CHAT = "/v1/chat/completions"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(served: ServedModel) -> Samples:
    text = (await served.http.get("/metrics")).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: Samples, name: str, **labels: str) -> float:
    """Sum of the samples with these labels."""
    return sum(value for (each, has), value in found.items() if each == name and labels.items() <= dict(has).items())


async def test_counts_are_true_while_requests_run_and_grow_only() -> None:
    async with serve_model() as served:
        body = chat_body(max_tokens=300, ignore_eos=True)
        running = [asyncio.create_task(served.http.post(CHAT, json=body)) for _ in range(4)]
        seen: list[Samples] = []
        async with asyncio.timeout(60):
            while not all(task.done() for task in running):
                made = sum(len(each.token_times) for each in served.pipe.streams)
                seen.append(await scrape(served))
                now = total(seen[-1], "vllm:generation_tokens_total")
                assert now >= made, "tokens that are there are not counted"
        seen.append(await scrape(served))
    assert len(seen) > 5
    for earlier, later in itertools.pairwise(seen):
        for key, value in earlier.items():
            if key[0].endswith(("_total", "_count", "_bucket", "_sum")):
                assert later.get(key, 0) >= value - 1e-9, key
    middle, last = seen[len(seen) // 2], seen[-1]
    assert total(middle, "vllm:num_requests_running") + total(middle, "vllm:num_requests_waiting") == 4
    assert 0 < total(middle, "vllm:generation_tokens_total") < 1200
    assert total(last, "vllm:generation_tokens_total") == 1200
    assert total(last, "vllm:num_requests_running") == 0
    assert total(last, "vllm:request_success_total", finished_reason="length") == 4
    assert total(last, "vllm:time_to_first_token_seconds_count") == 4
    assert total(last, "vllm:inter_token_latency_seconds_count") == 1196
    assert total(last, "vllm:e2e_request_latency_seconds_count") == 4
    assert total(last, "vllm:request_generation_tokens_sum") == 1200
    assert total(last, "trinity_http_responses_total", path=CHAT, status="200") == 4


async def test_stages_transfers_and_pools_have_names() -> None:
    async with serve_model("llama", "P+D", max_waiting=1) as served:
        asked = [served.http.post(CHAT, json=chat_body(max_tokens=8)) for _ in range(4)]
        codes = [response.status_code for response in await asyncio.gather(*asked)]
        await settled(served.pipe)
        async with asyncio.timeout(120):
            while len(served.pipe.loads) < 2:  # an instance whose load nobody routes by reports once a second
                await asyncio.sleep(0.05)
        found = await scrape(served)
        pools = {name: load.free["kv"] for name, load in served.pipe.loads.items()}
    done = codes.count(200)
    assert 1 <= done < 4
    assert total(found, "trinity_requests_refused_total", error="Overloaded") == 4 - done
    moved: dict[str, Any] = {"kind": "kv", "scheme": "inproc", "source": "P0", "target": "D0", "outcome": "pulled"}
    assert total(found, "trinity_transfers_total", **moved) == done
    assert total(found, "trinity_transfer_bytes_total", **moved) > 1000
    assert total(found, "trinity_span_seconds_count", span="prefill") == done
    assert total(found, "trinity_instance_up", roles="P") == 1
    assert set(pools) == {"P0", "D0"}
    for name in pools:
        assert total(found, "trinity_blocks", instance=name, kind="kv") >= total(
            found, "trinity_blocks_free", instance=name, kind="kv"
        )


def test_a_value_at_a_bound_counts_below_it() -> None:
    made = Histogram((1, 2))
    made.add([0.5, 1, 1.5, 2, 3])
    assert (made.counts, made.total) == ([2, 2, 1], 8.0)
    copy = made.copy()
    copy.add([1])
    assert made.counts == [2, 2, 1]
    assert copy.counts == [3, 2, 1]
