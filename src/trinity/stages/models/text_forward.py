"""A text model with the head of the model around it, where that one's forward does not run without its encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


@torch.inference_mode()
def runs_on_text(model: Any) -> bool:
    """Tell if a model's forward takes text where its encoders are not loaded: Gemma 3n's looks into theirs."""
    try:
        model(input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False)
    except AttributeError:
        return False
    return True


@dataclass(frozen=True)
class TextBelowHead:
    """A text model's own forward from token ids, with the head of the model that it is a part of."""

    text: Any
    head: Callable[[Tensor], Tensor]

    def get_input_embeddings(self) -> Any:
        return self.text.get_input_embeddings()

    def __call__(self, **given: Any) -> Any:
        """Compute logits [sequences, tokens, vocabulary] of ``input_ids``."""
        found = self.text(**given)
        return SimpleNamespace(logits=self.head(found[0]), past_key_values=getattr(found, "past_key_values", None))
