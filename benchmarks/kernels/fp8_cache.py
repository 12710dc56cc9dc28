"""Error of an FP8 KV cache, with transformers' own model: python benchmarks/kernels/fp8_cache.py MODEL TEXT [TEXT ...]

Each text is read once with the model's own cache and once with one that rounds keys and values to E4M3, as
``CacheConfig(kv_dtype="fp8_e4m3")`` does, every position after the text's own tokens. Nothing of trinity computes here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

MOST_TOKENS = 1024
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class RoundingCache(DynamicCache):
    """transformers' cache, of values that have been through E4M3."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (round_to_fp8(each) for each in (key_states, value_states))
        return super().update(key, value, layer_idx, *args, **kwargs)


def round_to_fp8(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(values.dtype)


@dataclass(frozen=True)
class CacheError:
    """Perplexities without and with rounding, the share of positions with the same best token, and the mean KL."""

    exact: float
    rounded: float
    same: float
    kl: float

    def __str__(self) -> str:
        more = self.rounded / self.exact - 1
        return (
            f"perplexity {self.exact:.2f}, in FP8 {self.rounded:.2f} ({more:+.2%}); "
            f"best token the same in {self.same:.1%}; KL {self.kl:.4f} nats"
        )


@torch.inference_mode()
def measure(model: Any, ids: torch.Tensor) -> CacheError:
    """Read ``ids`` [1, tokens] twice and compare the logits."""
    exact, rounded = (model(ids, past_key_values=cache()).logits[0].float() for cache in (DynamicCache, RoundingCache))
    losses = [torch.nn.functional.cross_entropy(each[:-1], ids[0, 1:]).exp().item() for each in (exact, rounded)]
    kl = torch.nn.functional.kl_div(rounded.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True)
    same = (exact.argmax(-1) == rounded.argmax(-1)).float().mean().item()
    return CacheError(losses[0], losses[1], same, kl.sum(-1).mean().item())


def main(argv: Sequence[str]) -> int:
    if len(argv) < 2:
        print(__doc__)
        return 2
    model = AutoModelForCausalLM.from_pretrained(argv[0], dtype=torch.float32, local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(argv[0], local_files_only=True)
    for name in argv[1:]:
        ids = tokenizer(Path(name).read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :MOST_TOKENS]
        print(f"{Path(name).name}, {ids.shape[1]} tokens: {measure(model, ids)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
