"""Tables and aims of the GPU benchmark, each figure beside its limit and beside what was predicted of it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import predictions
from benchmarks.gpu.cases import Cases
from benchmarks.gpu.model import folder
from benchmarks.report import Aim, Result, Table
from trinity.costs.model_config import read_model_shape
from trinity.costs.model_shape import ModelShape
from trinity.costs.step_cost import Device

NAME, TITLE = "gpu", "On a GPU"
AIM = 0.7  # of the limit
IMAGE_AIM_S, KV_AIM_S = 0.2e-3, 1e-3  # of a migration; of KV beside its bytes at the device's bandwidth
STEPS = ("step", "n", "CUDA graph", "ms", "limit ms", "of the limit", "predicted ms")
MOVES = ("what", "by", "p50 µs", "p95 µs", "one copy µs", "of the bandwidth", "predicted p50 µs")
PLACED = (
    *("placement", "requests/s", "predicted", "of EPD in threads"),
    *("TTFT p50 ms", "TBT p95 ms", "moved MiB", "tokens as EPD's"),
)
LOADS = ("decode rows", "images/s in turns", "at once", "tokens/s in turns", "at once", "work at once", "predicted")
Found = dict[str, Any]


class Forecast:
    """Predictions for this device; of the tiny model on a CPU there are none."""

    def __init__(self, limit: Found, tiny: bool) -> None:
        self.tiny = tiny
        self.device = Device(
            name=limit["device"],
            flops=limit["flops"],
            bandwidth=limit["bytes_per_s"],
            memory=limit["memory"],
            flops_share=1.0,
            bandwidth_share=1.0,
            pass_s=0.0,
            row_s=0.0,
        )
        with tempfile.TemporaryDirectory() as scratch:
            self.model: ModelShape = read_model_shape(folder(Path(scratch), tiny))

    def step(self, each: Found, context: int) -> predictions.Range | None:
        if self.tiny or (each["what"] == "decode" and not each["graphs"]):
            return None
        if each["what"] == "decode":
            return predictions.predict_decode(self.model, self.device, each["n"], context)
        if each["what"] in ("chunk", "mixed"):
            beside, behind = (32, 0) if each["what"] == "mixed" else (0, context // 2)
            return predictions.predict_chunk(
                self.model, self.device, each["n"], behind, beside, context, each["graphs"]
            )
        predict = {"prefill": predictions.predict_prefill, "encode": predictions.predict_encode}[each["what"]]
        return predict(self.model, self.device, each["n"])

    def move(self, each: Found) -> predictions.Range | None:
        return None if self.tiny else predictions.predict_move(self.device, each["bytes"])

    def rate(self, each: Found, steps: list[Found]) -> predictions.Range | None:
        """Predict requests a second of a burst out of the steps that were measured, each as it is served."""
        known = {(step["what"], step["n"]): median(step["seconds"]) for step in steps if _is_served(step, steps)}
        spent = predictions.predict_burst(known, each["requests"], each["outputs"], images=True)
        if self.tiny or spent is None:
            return None
        return predictions.Range(each["requests"] / spent.high, each["requests"] / spent.low)

    @property
    def overlap(self) -> predictions.Range | None:
        """Gain of two lanes over one."""
        return None if self.tiny else predictions.Range(*predictions.OVERLAP)


def result(dtype: str, tiny: bool, found: Found, cases: Cases, context: int = 1024) -> Result:
    """Put together what is known; cases that failed or had no time are notes."""
    forecast = Forecast(found["limit"], tiny)
    tables, aims = [], []
    steps, moves = found.get("steps") or [], found.get("moves") or []
    if steps:
        tables.append(Table("Steps of one instance", STEPS, [_step_row(each, forecast, context) for each in steps]))
        aims += [_step_aim(each) for each in steps if _is_served(each, steps)]
    if moves:
        tables.append(Table("Migrations", MOVES, [_move_row(each, forecast) for each in moves]))
        aims += [_move_aim(each) for each in moves]
    if placed := found.get("placements"):
        rows = [_placed_row(each, placed, forecast.rate(each, steps)) for each in placed]
        tables.append(Table("Bursts of requests with an image", PLACED, rows))
    if loads := found.get("full_load"):
        tables.append(
            Table("Encode beside decode (TriInfer figure 12)", LOADS, [_load_row(each, forecast) for each in loads])
        )
    pairs = (("generate_batch", _generate_row), ("dual_stream", _dual_row), ("vllm", _vllm_row))
    for name, row in (each for each in pairs if each[0] in found):
        tables.append(
            Table(name.replace("_", " "), ("what", "trinity", "beside", "ratio"), [row(found[name], forecast)])
        )
    notes = [f"{name}: {why}" for name, why in (*cases.failed.items(), *cases.skipped.items())]
    notes += [f"attention {name}: {said}" for name, said in found.get("attention", {}).items()]
    notes += _outside(steps, moves, forecast, context)
    return Result(NAME, TITLE, _method(found["limit"], dtype, tiny), tables, aims, notes, found)


def _method(limit: Found, dtype: str, tiny: bool) -> str:
    return (
        f"{limit['device']}, random weights of {'tiny-llava' if tiny else 'LLaVA-1.5-7B'}'s shape in {dtype}. Limits, "
        f"measured here: one copy {limit['bytes_per_s'] / 1e12:.2f} TB/s (read and written), "
        f"one product {limit['flops'] / 1e12:.0f} TFLOP/s. "
        "The limit of a step: the larger of its bytes and its operations at these. Medians, host time included. "
        "Predictions were written before the first run (docs/gpu.md)."
    )


def _is_served(each: Found, steps: list[Found]) -> bool:
    """Tell if instances run it so: the first of its kind."""
    return each is next(other for other in steps if (other["what"], other["n"]) == (each["what"], each["n"]))


def _shown(range_: predictions.Range | None, unit: float, digits: int) -> str:
    return "-" if range_ is None else range_.text(unit, digits)


def _step_row(each: Found, forecast: Forecast, context: int) -> list[str]:
    spent = median(each["seconds"])
    share = f"{each['limit_s'] / spent:.0%}"
    times = [f"{spent * 1e3:.2f}", f"{each['limit_s'] * 1e3:.2f}", share]
    yes = "yes" if each["graphs"] else "no"
    return [each["what"], str(each["n"]), yes, *times, _shown(forecast.step(each, context), 1e-3, 2)]


def _step_aim(each: Found) -> Aim:
    share = each["limit_s"] / median(each["seconds"])
    return Aim(f"GPU: {each['what']} of {each['n']}, of its limit", f"≥ {AIM:.0%}", f"{share:.0%}", share >= AIM)


def _move_row(each: Found, forecast: Forecast) -> list[str]:
    spent = median(each["seconds"])
    times = [f"{seconds * 1e6:.0f}" for seconds in (spent, each["p95_s"], each["one_piece_s"])]
    share = f"{each['one_piece_s'] / spent:.0%}"
    return [each["what"], each["medium"], *times, share, _shown(forecast.move(each), 1e-6, 0)]


def _move_aim(each: Found) -> Aim:
    spent = median(each["seconds"])
    most = KV_AIM_S + each["one_piece_s"] if each["what"].startswith("KV") else IMAGE_AIM_S
    what = f"GPU: migration of {each['what']} by {each['medium']}"
    return Aim(what, f"≤ {most * 1e3:.2f} ms", f"{spent * 1e3:.2f} ms", spent <= most)


def _placed_row(each: Found, placed: list[Found], predicted: predictions.Range | None) -> list[str]:
    base = next((other for other in placed if other["placement"] == "EPD"), None)
    rate = median(each["requests_per_s"])
    ratio = f"{rate / median(base['requests_per_s']):.2f}" if base is not None else "-"
    tbt = f"{each['tbt_s']['p95'] * 1e3:.1f}" if each["tbt_s"] else "-"
    same = "-" if base is None else "yes" if each["tokens"] == base["tokens"] else "no"
    ttft = f"{each['ttft_s']['p50'] * 1e3:.0f}"
    moved = f"{each['moved_bytes'] / 2**20:.0f}"
    return [each["way"], f"{rate:.2f}", _shown(predicted, 1.0, 1), ratio, ttft, tbt, moved, same]


def _load_row(each: Found, forecast: Forecast) -> list[str]:
    """In turns each stage has half of the time."""
    (encode, decode), rows = (each["alone_s"][stage] for stage in ("encode", "decode")), each["rows"]
    images = [f"{0.5 / encode:.1f}", f"{1 / each['beside_s']['encode']:.1f}"]
    tokens = [f"{0.5 * rows / decode:.0f}", f"{rows / each['beside_s']['decode']:.0f}"]
    return [str(rows), *images, *tokens, f"{each['work']:.2f}", _shown(forecast.overlap, 1.0, 2)]


def _generate_row(found: Found, _: Forecast) -> list[str]:
    ours, theirs = (found["tokens_per_s"][side] for side in ("ours", "theirs"))
    what = f"tokens/s, {found['equal_tokens']:.0%} of tokens equal"
    return [what, f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"]


def _vllm_row(found: Found, forecast: Forecast) -> list[str]:
    what, *rest = _generate_row(found, forecast)
    return [f"{what}; vLLM {found['version']}", *rest]


def _dual_row(found: Found, forecast: Forecast) -> list[str]:
    dual, one = (median(found[name]) for name in ("dual", "sequential"))
    same = f"{found['equal_requests']} of {found['requests']} equal"
    what = f"requests/s, two lanes beside one; {same}; predicted ratio {_shown(forecast.overlap, 1.0, 2)}"
    return [what, f"{dual:.2f}", f"{one:.2f}", f"{dual / one:.2f}"]


def _outside(steps: list[Found], moves: list[Found], forecast: Forecast, context: int) -> list[str]:
    """Name figures outside what was predicted: an assumption behind each is wrong."""
    found = [(f"{each['what']} {each['n']}", each, forecast.step(each, context)) for each in steps]
    found += [(f"{each['what']} by {each['medium']}", each, forecast.move(each)) for each in moves]
    return [
        f"outside its prediction: {name}, {median(each['seconds']) * 1e3:.2f} ms, not {range_.text(digits=2)} ms"
        for name, each, range_ in found
        if range_ is not None and not range_.holds(median(each["seconds"]))
    ]
