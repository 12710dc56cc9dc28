"""Predictions of the figures on a GPU, made before the first run: python -m benchmarks.gpu.predictions prints them.

Each is a range, out of limits (a copy, a product) and assumptions that are named below; of serving, out of steps that
were measured in the same run. The benchmark prints them beside what it measures: outside its range one of the
assumptions is wrong.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.model import folder
from trinity.costs.model_config import read_model_shape
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import Device, Roofline

# The limits of an NVIDIA H200 as others measured them: a copy in TB/s (read and written), a bf16 product in FLOP/s.
H200 = Device(
    name="NVIDIA H200",
    flops=790e12,
    bandwidth=4.3e12,
    memory=139 * 2.0**30,
    flops_share=1.0,
    bandwidth_share=1.0,
    pass_s=0.0,
    row_s=0.0,
)
# Assumptions, each a low and a high estimate of one part.
PRODUCT_BANDWIDTH = (0.93, 0.87)  # of a copy's: weights read by products of few rows
EXPOSED = 0.375  # of the operations of such products: not hidden behind the weights
KERNELS_A_LAYER = 5  # between products once they are fused: two norms, rope with the write, gate, split and combine
KERNEL_S = (1.5e-6, 2.2e-6)  # of a small kernel in a graph
ATTENTION_BANDWIDTH = (0.90, 0.78)  # of a copy's: keys and values read by the attention kernel
ATTENTION_FLOOR_S = (6e-6, 10e-6)  # a layer, however few the keys
HOST_S = (0.05e-3, 0.3e-3)  # of a step beside the device at depth 2
EAGER_HOST_S = (6e-3, 15e-3)  # of a step with chunks: 13 ms here (``benchmarks.steps.prefill_steps``), CUDA's calls
SPARE_S = (3e-6, 15e-6)  # a layer of a recorded one: programs of tiles that turn out to be empty
PREFILL_SHARE, ENCODE_SHARE = (0.85, 0.72), (0.80, 0.65)  # of the limit
ENCODE_FLOOR_S = (0.8e-3, 1.2e-3)  # 24 layers of an encoder, one image, replayed from a graph
MOVE_BANDWIDTH, MOVE_S = (0.95, 0.75), (30e-6, 150e-6)  # of a copy's; of a call
OVERLAP = (1.05, 1.30)  # requests a second of two lanes by those of one


class Range(NamedTuple):
    """A low and a high estimate, in seconds or as a factor."""

    low: float
    high: float

    def text(self, unit: float = 1e-3, digits: int = 1) -> str:
        return f"{self.low / unit:.{digits}f} to {self.high / unit:.{digits}f}"

    def holds(self, measured: float) -> bool:
        return self.low <= measured <= self.high


def predict_decode(model: ModelShape, device: Device, rows: int, context: int) -> Range:
    """Predict seconds of a decode step of ``rows`` sequences with ``context`` tokens each."""
    layers = model.language.layers
    read, operations = model.read_bytes, 2 * rows * (model.language.weights + model.head)
    keys = rows * context * model.kv_bytes
    return Range(
        *(
            read / (device.bandwidth * PRODUCT_BANDWIDTH[at])
            + EXPOSED * operations / device.flops
            + layers * KERNELS_A_LAYER * KERNEL_S[at]
            + max(layers * ATTENTION_FLOOR_S[at], keys / (device.bandwidth * ATTENTION_BANDWIDTH[at]))
            + HOST_S[at]
            for at in (0, 1)
        )
    )


def predict_prefill(model: ModelShape, device: Device, tokens: int) -> Range:
    """Predict seconds of a prompt's prefill in one step, so long that none is recorded."""
    limit = Roofline(model=model, device=device).seconds(0, tokens, 0)
    return Range(*(max(EAGER_HOST_S[at], limit / PREFILL_SHARE[at] + HOST_S[at]) for at in (0, 1)))


def predict_chunk(
    model: ModelShape, device: Device, tokens: int, behind: int, decodes: int, context: int, graphs: bool
) -> Range:
    """Predict seconds of a short chunk of ``tokens``, after ``behind`` others, beside ``decodes`` sequences.

    Eagerly a step takes the host's time if that is longer than the device's.
    """
    found = []
    for at in (0, 1):
        weights = model.read_bytes / (device.bandwidth * PRODUCT_BANDWIDTH[at])
        operations = 2 * (decodes + tokens) * model.language.weights / device.flops
        keys = (decodes * context + behind + tokens) * model.kv_bytes / (device.bandwidth * ATTENTION_BANDWIDTH[at])
        floor = ATTENTION_FLOOR_S[at] * (2 if decodes else 1)
        spent = max(weights + EXPOSED * operations, operations / PREFILL_SHARE[at])
        spent += max(model.language.layers * floor, keys)
        spent += model.language.layers * (KERNELS_A_LAYER * KERNEL_S[at] + SPARE_S[at] * graphs)
        found.append(spent + HOST_S[at] if graphs else max(EAGER_HOST_S[at], spent))
    return Range(*found)


def predict_encode(model: ModelShape, device: Device, images: int) -> Range:
    """Predict seconds of an encode step of ``images`` images."""
    limit = Roofline(model=model, device=device).seconds(0, 0, images * model.image_tokens)
    return Range(*(max(ENCODE_FLOOR_S[at], limit / ENCODE_SHARE[at] + HOST_S[at]) for at in (0, 1)))


def predict_move(device: Device, moved_bytes: int) -> Range:
    """Predict seconds of a migration between two pools of the device, at the median."""
    return Range(*(2 * moved_bytes / (device.bandwidth * MOVE_BANDWIDTH[at]) + MOVE_S[at] for at in (0, 1)))


def predict_burst(steps: Mapping[tuple[str, int], float], requests: int, outputs: int, images: bool) -> Range | None:
    """Predict seconds of a burst of equal requests out of measured steps; None where one was not measured.

    steps (s): by kind and number, as ("decode", 32); prefill by tokens: the smallest measured is taken for a prompt.
    The stages share one device: at best as if each were alone one after the other, at worst a half more.
    """
    decodes = {n: seconds for (what, n), seconds in steps.items() if what == "decode"}
    prefills = {n: seconds for (what, n), seconds in steps.items() if what == "prefill"}
    encodes = {n: seconds for (what, n), seconds in steps.items() if what == "encode"}
    if not decodes or not prefills or (images and not encodes):
        return None
    rows = min((n for n in decodes if n >= requests), default=max(decodes))
    passes = -(-requests // rows)
    spent = outputs * passes * decodes[rows] + requests * prefills[min(prefills)]
    spent += requests * min(seconds / n for n, seconds in encodes.items()) if images else 0.0
    return Range(0.9 * spent, 1.5 * spent)


def chunk_rows(model: ModelShape, device: Device, cost: Roofline, context: int) -> Iterator[tuple[str, float, Range]]:
    """Yield the rows of short chunks: what, limit and prediction, recorded and eager."""
    for tokens, decodes in ((64, 0), (128, 0), (256, 0), (128, 32)):
        behind = 0 if decodes else context // 2
        what = f"{tokens} tokens beside {decodes} decodes" if decodes else f"chunk of {tokens} tokens"
        limit = cost.at(decodes, tokens, 0, context=context, prefilled=behind)
        for graphs in (True, False):
            found = predict_chunk(model, device, tokens, behind, decodes, context, graphs)
            yield f"{what}{', graph' if graphs else ''}", limit, found


def table(device: Device = H200, context: int = 1024) -> list[str]:
    """Lines of Markdown: every figure that needs no measured part."""
    with tempfile.TemporaryDirectory() as scratch:
        model = read_model_shape(folder(Path(scratch), tiny=False))
    cost = Roofline(model=model, device=device)
    rows: list[tuple[str, float, Range]] = []
    for n in (1, 8, 32, 128):
        rows.append(
            (
                f"decode, {n} sequence{'s' * (n > 1)} of {context:,} tokens",
                cost.at(n, 0, 0, context=context),
                predict_decode(model, device, n, context),
            )
        )
    rows += [(f"prefill, {n:,} tokens", cost.seconds(0, n, 0), predict_prefill(model, device, n)) for n in (600, 1024)]
    rows += list(chunk_rows(model, device, cost, context))
    for n in (1, 8):
        limit = cost.seconds(0, 0, n * model.image_tokens)
        rows.append((f"encode, {n} image{'s' * (n > 1)} of 336 x 336", limit, predict_encode(model, device, n)))
    for what, size in (
        ("features of an image", 576 * model.feature_bytes),
        ("KV of 1,024 tokens", 1024 * model.kv_bytes),
    ):
        rows.append((f"migration, {what}", 2 * size / device.bandwidth, predict_move(device, size)))
    lines = ["| figure | limit ms | predicted ms | of the limit |", "|---|---:|---:|---:|"]
    for what, limit, range_ in rows:
        share = f"{limit / range_.high:.0%} to {limit / range_.low:.0%}"
        digits = 2 if range_.low >= 1e-4 else 3
        lines.append(f"| {what} | {limit * 1e3:.{digits}f} | {range_.text(digits=digits)} | {share} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
