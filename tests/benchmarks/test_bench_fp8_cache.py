"""The benchmark of an FP8 KV cache's error: it measures a difference, and none where nothing is rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.kernels import fp8_cache
from support.checkpoint_files import checkpoint


def test_it_prints_a_line_for_each_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "some.txt"
    text.write_text("a river says that nobody knows why " * 4)
    assert fp8_cache.main([str(checkpoint("llama")), str(text)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("some.txt, ")
    assert "perplexity" in said


def test_without_its_arguments_it_says_how_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert fp8_cache.main([]) == 2
    assert "MODEL TEXT" in capsys.readouterr().out


def test_the_error_is_that_of_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.float32).eval()
    ids = torch.arange(4, 36)[None]
    assert fp8_cache.measure(model, ids).kl > 0
    monkeypatch.setattr(fp8_cache, "RoundingCache", fp8_cache.DynamicCache)
    exact = fp8_cache.measure(model, ids)
    assert (exact.kl, exact.same) == (0, 1)
    assert exact.rounded == exact.exact
