"""Every text type that serves gives what ``generate()`` gives, beyond each threshold of its config."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from support.known_classes import packs
from support.text_models import (
    OUTPUTS,
    ROPES,
    SERVED,
    build,
    forward_at,
    generate,
    make_config,
    make_prompt,
    paged_at,
    serve,
)
from trinity.stages.kernels import linear

ROPED = ("gemma", "mistral", "olmo2", "qwen3")
SHORT = ("ctrl", "gpt2")  # contexts of some hundred tokens
SOON = ("gemma3_text", "gpt_oss", "llama", "qwen3")


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers as decode instances have them, whether or not packing is faster here."""
    monkeypatch.setattr(linear, "is_packing_faster", packs)


def build_varied(folder: Path, model_type: str) -> Path:
    """Build a checkpoint whose tokens vary: those of which seed do hangs on the processor, too."""
    first = build(folder / "first", model_type)
    others = (build(folder / str(seed), model_type, seed=seed) for seed in range(1, 6))
    return next(each for each in chain([first], others) if len(set(generate(each, make_prompt()).tokens)) > 1)


def check_exact(directory: Path, prompt: list[int], **how: Any) -> None:
    wanted, found = generate(directory, prompt), serve(directory, prompt, **how)
    assert len(set(wanted.tokens)) > 1, "tokens that do not vary show little"
    assert found.tokens == wanted.tokens
    largest = float(wanted.logits.abs().max())
    assert float((found.logits - wanted.logits).abs().max()) < 1e-4 * max(1.0, largest)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in SERVED]
)
def test_tokens_and_logits_beyond_tiny_thresholds(model_type: str, tmp_path: Path) -> None:
    check_exact(build_varied(tmp_path, model_type), make_prompt())


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("model_type", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ROPED)])
def test_rope_types_beyond_tiny_original_lengths(model_type: str, rope: str, tmp_path: Path) -> None:
    check_exact(build(tmp_path, model_type, rope_parameters={"rope_theta": 1e4, **ROPES[rope]}), make_prompt())


def test_a_factor_of_the_position_shows(tmp_path: Path) -> None:
    """The control: what Ministral 3 does beyond its original length changes tokens."""
    with_factor = generate(build(tmp_path / "with", "ministral3"), make_prompt())
    rope = make_config("ministral3").rope_parameters
    without = build(tmp_path / "without", "ministral3", rope_parameters={**rope, "llama_4_scaling_beta": 0.0})
    assert generate(without, make_prompt()).tokens != with_factor.tokens


def test_dynamic_frequencies_are_the_first_ones_within_the_context(tmp_path: Path) -> None:
    """They change beyond ``max_position_embeddings``, where the request processor takes no request."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    directory = build(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=64)
    check_exact(directory, make_prompt(64 - OUTPUTS))


# ---------------------------------------------------------------- thresholds as they are published


def starts_of(config: Any) -> list[int]:
    """Positions from which a prompt of 24 tokens crosses each length of the config, and far ones."""
    most = (getattr(config, "max_position_embeddings", None) or 0) - 24
    rope = getattr(config, "rope_parameters", None) or {}
    lengths = [rope.get("original_max_position_embeddings"), getattr(config, "sliding_window", None), most + 12]
    crossed = {length - 12 for length in (*lengths, 1_000, 8_192, 16_384, 32_768, 65_536, 131_072, 1 << 20) if length}
    return [0, *sorted(start for start in crossed if 0 < start <= most)]


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in SERVED]
)
def test_logits_across_published_thresholds(model_type: str, tmp_path: Path) -> None:
    """Rotary and learned positions begin before each threshold; the cache begins at 0."""
    directory, prompt = build(tmp_path, model_type, tiny=False), make_prompt(24)
    starts = starts_of(AutoConfig.from_pretrained(directory))
    wanted = forward_at(directory, prompt, starts)[:, [8, 22, 23]]
    found = paged_at(directory, prompt, starts)
    assert float((found - wanted).abs().max()) < 1e-4 * max(1.0, float(wanted.abs().max()))
    assert len(starts) > 2 or model_type in SHORT


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model_type", "length"),
    [("ministral3", 16_700), ("mistral", 4_300), ("gemma2", 4_300), ("cohere2", 4_300), ("gpt_oss", 4_300)],
)
def test_a_whole_prompt_beyond_a_published_threshold(model_type: str, length: int, tmp_path: Path) -> None:
    directory = build(tmp_path, model_type, tiny=False)
    check_exact(directory, make_prompt(length), chunk=2_048)
