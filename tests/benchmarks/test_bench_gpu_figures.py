"""Figures of the GPU benchmark beside their predictions, on findings made up here; vLLM as a stand-in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import beside_vllm, figures, predictions
from benchmarks.gpu.cases import Cases
from benchmarks.gpu.model import folder
from benchmarks.gpu.serving import Load, compare
from support.paths import ROOT
from trinity.costs.model_config import read_model_shape
from trinity.costs.model_shape import ModelShape

LIMIT = {"device": "NVIDIA H200", "flops": 790e12, "bytes_per_s": 4.3e12, "memory": 139 * 2.0**30}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return read_model_shape(folder(tmp_path_factory.mktemp("model"), tiny=False))


# ------------------------------------------------------------ predictions


@pytest.mark.parametrize(("rows", "by_hand"), [(1, (4.0, 4.3)), (8, (5.2, 5.6)), (32, (8.9, 9.6)), (128, (23.0, 25.0))])
def test_decode_is_predicted_as_it_was_by_hand(model: ModelShape, rows: int, by_hand: tuple[float, float]) -> None:
    """The sum of products, small kernels, attention and host, made beforehand out of published rates of each."""
    predicted = predictions.predict_decode(model, predictions.H200, rows, 1024)
    assert predicted.low * 1e3 <= by_hand[1]
    assert by_hand[0] <= predicted.high * 1e3


def test_no_prediction_is_better_than_the_limit(model: ModelShape) -> None:
    lines = predictions.table()[2:]
    assert len(lines) == 18
    for line in lines:
        _, what, limit, range_, _, _ = (cell.strip() for cell in line.split("|"))
        low, high = map(float, range_.split(" to "))
        assert float(limit) < low < high, what


def test_the_document_has_the_predictions_of_this_code() -> None:
    assert "\n".join(predictions.table()) in (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_a_burst_is_predicted_out_of_measured_steps() -> None:
    steps = {("decode", 8): 0.01, ("decode", 32): 0.02, ("prefill", 600): 0.1, ("encode", 1): 0.05, ("encode", 8): 0.2}
    spent = 10 * 0.02 + 16 * 0.1 + 16 * 0.025
    found = predictions.predict_burst(steps, 16, 10, images=True)
    assert found is not None
    assert found == pytest.approx((0.9 * spent, 1.5 * spent))
    text = predictions.predict_burst(steps, 64, 10, images=False)  # two passes of 32
    assert text is not None
    assert text.low == pytest.approx(0.9 * (20 * 0.02 + 64 * 0.1))
    assert predictions.predict_burst({("decode", 8): 0.01}, 16, 10, images=True) is None


def test_a_range_holds_its_ends() -> None:
    assert [predictions.Range(1.0, 2.0).holds(each) for each in (0.9, 1.0, 2.0, 2.1)] == [False, True, True, False]


# ------------------------------------------------------------ tables


def findings() -> dict[str, Any]:
    steps = [
        {"what": "decode", "n": 8, "graphs": True, "seconds": [5.0e-3], "limit_s": 4.08e-3},
        {"what": "decode", "n": 32, "graphs": True, "seconds": [12.0e-3], "limit_s": 7.1e-3},
        {"what": "decode", "n": 32, "graphs": False, "seconds": [20.0e-3], "limit_s": 7.1e-3},
        {"what": "prefill", "n": 600, "graphs": False, "seconds": [12.5e-3], "limit_s": 10e-3},
        {"what": "encode", "n": 1, "graphs": True, "seconds": [1e-3], "limit_s": 0.5e-3},
    ]
    move = {"blocks": 64, "medium": "cuda_ipc", "seconds": [0.4e-3], "p95_s": 0.5e-3, "one_piece_s": 0.25e-3}
    placed = {"requests": 8, "outputs": 16, "ttft_s": {"p50": 0.1, "p95": 0.2}, "tbt_s": {"p50": 5e-3, "p95": 9e-3}}
    placed |= {"moved_bytes": 1 << 20}
    return {
        "run": True,
        "limit": LIMIT,
        "attention": {"torch": "runs"},
        "steps": steps,
        "moves": [
            {**move, "what": "KV of 1024 tokens", "bytes": 1024 << 19},
            {**move, "what": "an image's features", "bytes": 9 << 19, "seconds": [0.3e-3]},
        ],
        "placements": [
            {**placed, "way": "EPD, threads, depth 2", "placement": "EPD", "requests_per_s": [30.0], "tokens": "a"},
            {**placed, "way": "E+PD, threads, depth 2", "placement": "E+PD", "requests_per_s": [36.0], "tokens": "b"},
        ],
        "full_load": [
            {
                "rows": 8,
                "alone_s": {"encode": 0.01, "decode": 0.02},
                "beside_s": {"encode": 0.016, "decode": 0.032},
                "work": 1.25,
            }
        ],
        "vllm": {"tokens_per_s": {"ours": 300.0, "theirs": 200.0}, "equal_tokens": 0.5, "version": "1.2"},
    }


def test_every_figure_stands_beside_its_prediction() -> None:
    found = figures.result("bfloat16", False, findings(), Cases(None, "", time.monotonic()))
    steps, moves, placed, loads, vllm = found.tables
    assert steps.rows[0][5:] == ["82%", "4.75 to 5.52"]
    assert steps.rows[2][-1] == "-", "a decode step without a graph was not predicted"
    assert moves.rows[0][5:] == ["62%", "293 to 483"]
    # 16 steps of 5 ms, 8 prefills of 12.5 ms and 8 encodes of 1 ms: 188 ms, of which 0.9 to 1.5 times
    assert placed.rows[1][1:4] == ["36.00", "28.4 to 47.3", "1.20"]
    assert placed.rows[1][-1] == "no"
    assert loads.rows == [["8", "50.0", "62.5", "200", "250", "1.25", "1.05 to 1.30"]]
    assert vllm.rows == [["tokens/s, 50% of tokens equal; vLLM 1.2", "300", "200", "1.50"]]
    outside = [note for note in found.notes if note.startswith("outside")]
    assert outside == [
        "outside its prediction: decode 32, 12.00 ms, not 8.23 to 9.51 ms",
        "outside its prediction: an image's features by cuda_ipc, 0.30 ms, not 0.03 to 0.15 ms",
    ]


def test_aims_are_of_steps_as_they_are_served_and_of_every_migration() -> None:
    found = figures.result("bfloat16", False, findings(), Cases(None, "", time.monotonic()))
    met = {aim.what: aim.met for aim in found.aims}
    assert met["GPU: decode of 8, of its limit"] is True
    assert met["GPU: decode of 32, of its limit"] is False
    assert met["GPU: migration of KV of 1024 tokens by cuda_ipc"] is True
    assert met["GPU: migration of an image's features by cuda_ipc"] is False
    assert len(met) == len(found.aims) == 6


def test_of_a_tiny_model_on_a_cpu_nothing_is_predicted() -> None:
    tiny = figures.result("float32", True, findings(), Cases(None, "", time.monotonic()))
    steps, moves, placed, loads, _ = tiny.tables
    assert {row[-1] for table in (steps, moves, loads) for row in table.rows} == {"-"}
    assert {row[2] for row in placed.rows} == {"-"}
    assert not [note for note in tiny.notes if note.startswith("outside")]


# ------------------------------------------------------------ vLLM

VLLM = """
__version__ = "9.9"

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos, detokenize):
        assert temperature == 0 and ignore_eos
        self.most = max_tokens

class LLM:
    def __init__(self, model, dtype, max_model_len, max_num_seqs, **options):
        assert options["enable_prefix_caching"] is False
        assert max_model_len >= 5 and max_num_seqs == 2, (max_model_len, max_num_seqs)

    def generate(self, prompts, sampling, use_tqdm):
        class Made: pass
        found = []
        for prompt in prompts:
            one, output = Made(), Made()
            output.token_ids = [len(prompt["prompt_token_ids"])] * sampling.most
            one.outputs = [output]
            found.append(one)
        return found
"""


def test_vllm_serves_the_same_prompts_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = beside_vllm.generate_with_vllm(tmp_path, "bfloat16", [[1, 2, 3], [4, 5]], 2, 3)
    assert found["tokens"] == [[3, 3], [2, 2]]
    assert len(found["seconds"]) == 3
    both = compare(Load(2, 3, 2), {"tokens": [[3, 3], [2, 9]], "seconds": [0.5]}, {**found, "seconds": [1.0]})
    assert both == {"tokens_per_s": {"ours": 8.0, "theirs": 4.0}, "equal_tokens": 0.75, "version": "9.9"}


def test_without_vllm_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_vllm, "is_installed", lambda: False)
    with pytest.raises(RuntimeError, match="vLLM is not installed here"):
        beside_vllm.generate_with_vllm(Path(), "bfloat16", [[1]], 1, 1)
