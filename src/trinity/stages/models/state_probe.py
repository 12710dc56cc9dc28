"""Finds out which modules of a text model keep states, and of which shapes, by one run of the model's own code."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch

from trinity.errors import UnsupportedModel
from trinity.stages.attention.interface import find_attention_name
from trinity.stages.models.base import ModelAdapter
from trinity.stages.models.states import StateLayout, StatePiece, make_stateful_class, place_pieces

logger = logging.getLogger("trinity")

# Kinds of layers in configs whose states go through transformers' cache, and of layers that only feed forward.
STATE_KINDS = ("linear_attention", "conv", "mamba", "mamba2", "hybrid", "hybrid_sliding")
STATELESS_KINDS = ("moe", "mlp")
_TOKENS = 2  # of the probe: a chunk, from no state


def list_layer_kinds(text: Any) -> list[str]:
    """List the kind of each layer that a text config names."""
    return list(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())


def keeps_states(text: Any) -> bool:
    """Tell if a text config names layers that keep states."""
    return not set(STATE_KINDS).isdisjoint(list_layer_kinds(text))


def prepare_states(model: Any, adapter: ModelAdapter) -> None:
    """Have the modules of a text model that keep states, if any, use blocks, and number the layers that attend.

    The model gets ``trinity_states``, its layout; one that has it is left as it is. Raises ``UnsupportedModel`` if its
    states do not go through transformers' cache, or one module both keeps states and attends.
    """
    if not keeps_states(adapter.text_config) or getattr(model, "trinity_states", None) is not None:
        return
    found = _probe(adapter.language(model))
    named = f"{adapter.config.model_type!r} (text model {adapter.text_config.model_type!r})"
    if not found.pieces or not found.attending:
        lacking = "its states do not go through transformers' cache" if not found.pieces else "no layer of it attends"
        kinds = ", ".join(sorted(set(list_layer_kinds(adapter.text_config))))
        raise UnsupportedModel(f"{named} has {kinds} layers: {lacking}")
    both = found.stateful.keys() & found.attending.keys()
    layers = sorted({layer for held in found.attending.values() for layer in held})
    if both or any(len(held) > 1 for held in (*found.stateful.values(), *found.attending.values())):
        raise UnsupportedModel(f"{named} has a module of several layers, or one that keeps states and attends")
    for module, held in found.attending.items():
        module.trinity_kv_layer = layers.index(min(held))
    for module, held in found.stateful.items():
        kind: Any = type(module)
        module.__class__ = make_stateful_class(kind)
        module.trinity_state_layer = min(held)
    model.trinity_states = StateLayout(place_pieces(found.pieces), tuple(layers))
    logger.info("%s keeps states: no prefix cache, no CUDA graphs, and no blocks ahead of a move", named)


class _Found:
    """Findings of a probe: modules by the layers whose states, or keys and values, they hand to the cache."""

    def __init__(self) -> None:
        self.stateful: dict[Any, set[int]] = {}
        self.attending: dict[Any, set[int]] = {}
        self.pieces: list[StatePiece] = []
        self.running: list[Any] = []

    def note(self, held: dict[Any, set[int]], layer: int) -> None:
        if self.running:
            held.setdefault(self.running[-1], set()).add(layer)


@torch.inference_mode()
def _probe(text: Any) -> _Found:
    """Run a text model on two tokens with a cache that takes note of who uses it."""
    found = _Found()
    cache = _watch_cache(text.config, found)
    device = next(text.parameters()).device
    ids = torch.arange(_TOKENS, device=device)[None]
    attention = find_attention_name(text.config)
    text.set_attn_implementation("eager")
    try:
        with _watch_modules(text, found.running):
            text(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True)
        found.pieces = [piece for number, layer in enumerate(cache.layers) for piece in _list_pieces(number, layer)]
    except Exception as exc:
        raise UnsupportedModel(f"{type(text).__name__} does not run with transformers' cache: {exc}") from exc
    finally:
        text.set_attn_implementation(attention)
    return found


def _list_pieces(number: int, layer: Any) -> Iterator[StatePiece]:
    names: tuple[Literal["conv", "recurrent"], ...] = ("conv", "recurrent")
    for name in names:
        for index, value in (getattr(layer, f"{name}_states", None) or {}).items():
            if value is not None:
                yield StatePiece(number, index, name, tuple(value.shape[1:]), value.dtype)


def _watch_cache(config: Any, found: _Found) -> Any:
    """Make a cache of transformers' that notes which module hands over what."""
    from transformers import DynamicCache as untyped

    DynamicCache: Any = untyped

    class Watched(DynamicCache):  # type: ignore[misc]
        def update(self, keys: Any, values: Any, layer_idx: int, *given: Any, **named: Any) -> Any:
            found.note(found.attending, layer_idx)
            return super().update(keys, values, layer_idx, *given, **named)

        def update_conv_state(self, states: Any, layer_idx: int, *given: Any, **named: Any) -> Any:
            found.note(found.stateful, layer_idx)
            return super().update_conv_state(states, layer_idx, *given, **named)

        def update_recurrent_state(self, states: Any, layer_idx: int, *given: Any, **named: Any) -> Any:
            found.note(found.stateful, layer_idx)
            return super().update_recurrent_state(states, layer_idx, *given, **named)

    return Watched(config=config)


@contextmanager
def _watch_modules(text: Any, running: list[Any]) -> Iterator[None]:
    """Keep a stack of the modules whose forward runs."""
    with ExitStack() as undone:
        for module in text.modules():
            undone.callback(module.register_forward_pre_hook(lambda one, given: running.append(one)).remove)
            undone.callback(module.register_forward_hook(lambda one, given, output: running.pop() and None).remove)
        yield
