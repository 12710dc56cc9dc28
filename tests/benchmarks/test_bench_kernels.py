"""The benchmarks of kernels and steps run, and judge what they measured by the right limit."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.kernels import attention_kernels, limits
from benchmarks.setting import Setting
from benchmarks.steps import steps
from support.checkpoint_files import checkpoint
from trinity.memory import native

QUICK = Setting(quick=True, checkpoint=checkpoint)


def test_runs_alternate_and_the_first_of_each_does_not_count() -> None:
    order: list[str] = []
    found = limits.alternate({name: partial(order.append, name) for name in "ab"}, 2)
    assert "".join(order) == "ababab"
    assert list(found) == ["a", "b"]
    assert all(seconds >= 0 for seconds in found.values())


@pytest.mark.skipif(not hasattr(native.extension, "PagedAttention"), reason="no attention in the extension")
def test_attention_is_measured_beside_a_pass_that_loads_and_beside_torch() -> None:
    result = attention_kernels.run(QUICK)
    assert {(dtype, batch) for dtype, batch, *_ in result.values["seconds"]} == {
        (dtype, batch) for dtype in ("bfloat16", "float32") for batch in (1, 16)
    }
    for *_, spent in result.values["seconds"]:
        assert set(spent) >= {"native", "torch"}
        assert all(seconds > 0 for seconds in spent.values())
    assert result.aims[-1].met, "equal to torch's but for rounding"


def _spent(ratio: float) -> dict[str, float]:
    return {"loads": 1.0, "native": ratio, "torch": 4.0}


def test_the_aim_of_attention_is_that_of_large_batches() -> None:
    cases = {("bfloat16", 1, 1024): 9.0, ("float32", 16, 1024): 1.5, ("float32", 16, 64): 1.7}
    seconds = {case: _spent(ratio) for case, ratio in cases.items()}
    found = attention_kernels.result(seconds, dict.fromkeys(seconds, 1e-7), 12, [])
    assert [aim.met for aim in found.aims] == [True, False, True]
    assert found.aims[1].measured == "1.70 (float32, 16 x 64)"
    without = {case: {"native": 1.0, "torch": 2.0} for case in cases}
    far = attention_kernels.result(without, dict.fromkeys(without, 1e-3), 12, ["x"])
    assert [aim.met for aim in far.aims] == [False], "no AVX-512: nothing to compare with"


@pytest.mark.slow
def test_every_stage_is_measured_in_both_dtypes() -> None:
    result = steps.run(QUICK)
    found = {(dtype, stage, batch): spent for dtype, stage, batch, spent in result.values["figures"]}
    assert set(found) == {
        (dtype, stage, batch) for dtype in ("bfloat16", "float32") for stage in steps.AIMS for batch in (1, 2)
    }
    assert all(spent["ours"] > 0 and spent["limit"] > 0 for spent in found.values())
    assert result.values["exact"] is True
    work = {stage: found["float32", stage, 2]["limit"] / found["float32", stage, 1]["limit"] for stage in steps.AIMS}
    assert work["prefill"] == work["encode"] == pytest.approx(2.0), "twice the batch is twice the operations"


def test_the_least_share_of_the_roofline_is_judged() -> None:
    figures: dict[steps.Figure, dict[str, float]] = {}
    for stage, aim in steps.AIMS.items():
        for batch in (1, 8, 32):
            share = 0.1 if (stage, batch) in {("decode", 32), ("encode", 8)} else aim
            figures["bfloat16", stage, batch] = {"ours": 1.0, "limit": share}
    found = steps.result(figures, {"bfloat16": 100.0}, False, [])
    assert [aim.met for aim in found.aims] == [True, True, False, False]
    assert found.aims[2].measured == "10% (bfloat16, batch 8)"
