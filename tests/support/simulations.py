"""What the simulator's tests share: rows, costs and clusters whose times are exact in binary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trinity.core.transfers import TransferPolicy
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.interconnects import Interconnect
from trinity.simulation.simulator import Simulator
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

KV_BLOCK = 2**23  # bytes of 16 tokens of LLaVA-1.5-7B
IMAGE_BLOCK = 576 * 8192
LINK = Interconnect(name="slow", bandwidth=2.0**23, fixed_s=0.25)  # a second for each KV block, 9/16 for an image block
MESSAGE_S = 0.125
COST = LinearCost(step_s=0.5, decode_s=1 / 16, prefill_s=1 / 1024, encode_s=1.0)
BUDGETS = StepBudgets(token_budget=2048, image_budget=576)


def row(at: float, text: int, out: int, images: Sequence[str] = (), **fields: Any) -> TraceRow:
    """A request at ``at`` seconds: images of 576 visual tokens by their contents, tokens of text and of output."""
    return TraceRow(
        timestamp=1000 * at,
        input_length=text + 576 * len(images),
        output_length=out,
        text_length=text,
        images=[TraceImage(tokens=576, content=content or None) for content in images],
        **fields,
    )


def simulator(devices: int, **options: Any) -> Simulator:
    cluster = options.pop("cluster", None) or Cluster.of("H100", devices, link=LINK, message_s=MESSAGE_S)
    options = {"cost": COST, "budgets": BUDGETS, "transfers": TransferPolicy(kv="off"), **options}
    return Simulator("llava-1.5-7b", SLO(8.0, 1.0), cluster=cluster, **options)


def served(
    rows: Sequence[TraceRow], placement: str, devices: int, **options: Any
) -> list[tuple[float | None, list[float]]]:
    """(TTFT, gaps) of each request."""
    replay = simulator(devices, **options).replay(Trace(rows), placement)
    return [(each.ttft_s, list(each.itl_s)) for each in replay.outcomes]
