"""The compiled part, csrc/module.cpp. Use it through trinity.memory.native and, the simulator's twin, through
trinity.simulation.compiled_engine.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

API: int
SIMULATOR: int

def instructions() -> str: ...
def copy_blocks(
    target: int,
    target_blocks: int,
    source: int,
    source_blocks: int,
    to: npt.NDArray[np.int64],
    from_: npt.NDArray[np.int64],
    block_bytes: int,
    offset: int,
    length: int,
    threads: int,
) -> None: ...
def digests(
    source: int,
    source_blocks: int,
    from_: npt.NDArray[np.int64],
    block_bytes: int,
    offset: int,
    length: int,
    out: npt.NDArray[np.int64],
) -> None: ...
def attention_instructions(bf16: bool, width: int) -> str: ...
def attention_many(bf16: bool, width: int) -> bool: ...
def attend_all(
    query: tuple[int, int, int],
    keys: tuple[int, int, int],
    values: int,
    out: tuple[int, int, int],
    sizes: tuple[int, int, int],
    heads: tuple[int, int],
    width: int,
    bf16: bool,
    scale: float,
    threads: int,
) -> None: ...

class PagedAttention:
    def __init__(
        self,
        shape: npt.NDArray[np.int64],
        bf16: bool,
        blocks: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        tables: npt.NDArray[np.int64],
        requests: npt.NDArray[np.int64],
    ) -> None: ...
    def write(self, cache: int, layer: int, keys: tuple[int, int, int], values: tuple[int, int, int]) -> None: ...
    def attend(
        self,
        cache: int,
        layer: int,
        query: tuple[int, int, int],
        out: tuple[int, int, int],
        heads: int,
        first: npt.NDArray[np.int64],
        end: npt.NDArray[np.int64],
        scale: float,
        softcap: float,
        sinks: int,
        threads: int,
        kernel: str,
    ) -> None: ...

def rms_norm(
    rows_in: tuple[int, int],
    weight: int,
    out: tuple[int, int],
    rows: int,
    width: int,
    eps: float,
    bf16: bool,
    threads: int,
    kernel: str,
) -> None: ...
def layer_norm(
    rows_in: tuple[int, int],
    added: tuple[int, int],
    sums: tuple[int, int],
    weight: int,
    bias: int,
    out: tuple[int, int],
    rows: int,
    width: int,
    eps: float,
    bf16: bool,
    threads: int,
    kernel: str,
) -> None: ...
def mapped(
    rows_in: tuple[int, int],
    table: int,
    out: tuple[int, int],
    rows: int,
    width: int,
    threads: int,
    kernel: str,
) -> None: ...
def add_rms_norm(
    rows_in: tuple[int, int],
    added: tuple[int, int],
    sums: tuple[int, int],
    weight: int,
    out: tuple[int, int],
    rows: int,
    width: int,
    eps: float,
    bf16: bool,
    threads: int,
    kernel: str,
) -> None: ...
def gated(
    gate: tuple[int, int],
    up: tuple[int, int],
    out: tuple[int, int],
    rows: int,
    width: int,
    slope: float,
    bf16: bool,
    threads: int,
    kernel: str,
) -> None: ...
def rotary(
    rows_in: tuple[int, int],
    in_head: int,
    cosine: tuple[int, int],
    sine: tuple[int, int],
    out: tuple[int, int],
    out_head: int,
    rows: int,
    heads: int,
    width: int,
    bf16: bool,
    threads: int,
    kernel: str,
) -> None: ...

class SimCost: ...
class SimWorkload: ...

def sim_roofline(whole: npt.NDArray[np.int64], real: npt.NDArray[np.float64]) -> SimCost: ...
def sim_step_cost(
    decodes: npt.NDArray[np.float64], prefill: npt.NDArray[np.float64], media: npt.NDArray[np.float64]
) -> SimCost: ...
def sim_tables(context: float, contexts: list[float], costs: list[SimCost]) -> SimCost: ...
def sim_linear(step_s: float, decode_s: float, prefill_s: float, encode_s: float, media_s: float) -> SimCost: ...
def sim_workload(
    requests: npt.NDArray[np.int32],
    deadlines: npt.NDArray[np.float64],
    items: npt.NDArray[np.int32],
    keys: npt.NDArray[np.int32],
    media_block: int,
    kv_block: int,
) -> SimWorkload: ...
def simulate(
    work: SimWorkload,
    times: npt.NDArray[np.float64],
    asked: npt.NDArray[np.int32],
    aborts: npt.NDArray[np.uint8],
    instances: npt.NDArray[np.int32],
    limits: npt.NDArray[np.float64],
    costs: list[SimCost],
    rule_costs: list[SimCost | None],
    whole: npt.NDArray[np.int64],
    real: npt.NDArray[np.float64],
    logged: bool,
) -> tuple[Any, ...]: ...
def sim_tried(
    work: SimWorkload,
    times: npt.NDArray[np.float64],
    asked: npt.NDArray[np.int32],
    instances: npt.NDArray[np.int32],
    limits: npt.NDArray[np.float64],
    costs: list[SimCost],
    rule_costs: list[SimCost | None],
    whole: npt.NDArray[np.int64],
    real: npt.NDArray[np.float64],
    arrivals: npt.NDArray[np.float64],
    ttft: float,
    tbt: float,
) -> tuple[Any, ...]: ...
def sim_judged(
    times: npt.NDArray[np.float64],
    first: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int32],
    reasons: npt.NDArray[np.uint8],
    arrivals: npt.NDArray[np.float64],
    ttft: float,
    tbt: float,
) -> tuple[int, int, int, int, int, npt.NDArray[np.float64]]: ...
def few_rows(
    rows_in: tuple[int, int],
    out: tuple[int, int],
    weight: int,
    bias: int,
    rows: int,
    inputs: int,
    outputs: int,
    bf16: bool,
    threads: int,
) -> None: ...
def few_rows_of(bf16: bool) -> tuple[int, int]: ...
def product(
    rows_in: tuple[int, int],
    out: tuple[int, int],
    weight: int,
    bias: int,
    rows: int,
    inputs: int,
    outputs: int,
    bf16: bool,
    threads: int,
) -> None: ...
def has_product(bf16: bool) -> bool: ...
