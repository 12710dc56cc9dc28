"""Tiny checkpoints with quantised weights for tests, and transformers' own answers over the same files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.checkpoint_files import checkpoint
from trinity.testing.oracle import Oracle, OracleAnswer

PACKAGES = {
    "awq": ("accelerate", "gptqmodel"),
    "bnb": ("accelerate", "bitsandbytes"),
    "compressed": ("compressed_tensors",),
    "gptq": ("optimum", "gptqmodel"),
    "mxfp4": (),
    "torchao": ("torchao",),
}
_NOISY = (  # optimum asks what transformers 5.23 deprecates, and gptqmodel leaves a directory to the collector
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
)
ROUNDS_ACTIVATIONS = ("bnb-int8", "compressed-int8", "compressed-fp8", "torchao-int8-rows")
"""Their layers round inputs as they run: a number at the border falls on either side by the order of sums."""
MAY_DIFFER = ("compressed-int8", "compressed-fp8", "torchao-int8-rows", "bnb-nf4", "bnb-nf4-text")  # in one request
IN_16_BIT = ("bnb-nf4", "bnb-nf4-text")  # bitsandbytes multiplies in bfloat16 on a CPU that has it
_TOLERANCE, _ROUNDED = 1e-4, 3e-2  # of the largest logit; transformers in two chunks is 2e-2 off transformers in one


def slow(*names: str) -> list[Any]:
    """Mark parameters, names of quantised checkpoints, as slow; the libraries of some warn."""
    return [pytest.param(each, marks=(pytest.mark.slow, *(_NOISY if each == "gptq" else ()))) for each in names]


def quantised(name: str) -> Path:
    """The directory of a quantised checkpoint; skips where its libraries are not installed."""
    missing = [each for each in PACKAGES[name.partition("-")[0]] if find_spec(each) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    return checkpoint(f"quantised-{name}")


class WidenedMxfp4(Oracle):
    """``generate()`` over MXFP4 as transformers has it on a CPU: widened; said beforehand, it asks for no package."""

    def _load_model(self, directory: Path, dtype: torch.dtype) -> Any:
        library: Any = transformers
        widened = library.Mxfp4Config(dequantize=True)
        model: Any = library.AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, quantization_config=widened
        )
        return model.eval()


def make_oracle(name: str) -> Oracle:
    """Load the whole quantised model as transformers does; skips as ``quantised`` does."""
    return (WidenedMxfp4 if name == "mxfp4" else Oracle)(quantised(name))


def count_equal(answers: list[OracleAnswer], found: list[tuple[int, ...]]) -> int:
    """Count the requests whose tokens are those of ``generate()`` to the last."""
    return sum(tuple(answer.token_ids) == tokens for answer, tokens in zip(answers, found, strict=True))


def count_needed(name: str, requests: int) -> int:
    """Count the requests that must be equal to the last token."""
    return requests - (name in MAY_DIFFER)


def find_disagreement(name: str, tokens: tuple[int, ...], answer: OracleAnswer) -> str | None:
    """Say where tokens leave those of ``generate()``, if not between two logits that are as near as rounding is."""
    allowed = _ROUNDED if name in (*ROUNDS_ACTIVATIONS, *IN_16_BIT) else _TOLERANCE
    wanted: Any = answer.token_ids
    if len(tokens) != len(wanted):
        return f"{len(tokens)} tokens, not {len(wanted)}"
    for place, (found, own) in enumerate(zip(tokens, wanted, strict=True)):
        if found != own:
            logits = answer.logits[place]
            gap = float((logits[own] - logits[found]) / logits.abs().max())
            return None if gap <= allowed else f"token {place} is {found}, not {own}, {gap:.2g} below it"
    return None
