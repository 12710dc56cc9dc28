"""Checks of a model before it serves: layers that a paged cache can hold, and logits equal to its own forward's."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.errors import UnsupportedModel
from trinity.stages.attention.interface import LAYER_KINDS, PAGED_ATTENTION
from trinity.stages.attention.latent import INDEXED, find_index_width
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.batch import NO_DECODES, Chunk, Decodes, RaggedBatch, build_batch
from trinity.stages.kernels.probes import FAR_POSITIONS, find_limits
from trinity.stages.kernels.swaps import drop_swaps, without_swaps
from trinity.stages.models.base import ModelAdapter
from trinity.stages.models.float32_forward import in_float32
from trinity.stages.models.generic import GenericAdapter
from trinity.stages.models.held_rows import PromptTurn, bounds_steps, without_bounds
from trinity.stages.models.indexers import choosing_few
from trinity.stages.models.loaded_model import LoadedModel
from trinity.stages.models.own_logits import explain_no_numbers, set_aside
from trinity.stages.models.registry import HOW_TO_ADD, known_models
from trinity.stages.models.state_probe import STATE_KINDS, STATELESS_KINDS, list_layer_kinds
from trinity.stages.models.states import StateLayout, StateStep

logger = logging.getLogger("trinity")

_LENGTH, _CUT, _MOST_STARTS, _LEAST_STARTS = 23, 9, 10, 3
_CHOSEN = 6  # tokens that an indexer may choose in a check: less than half of a prompt
_TOLERANCE = 1e-3  # relative to the largest logit; float32 is exact to about 1e-6
_QUANTISED_TOLERANCE = 3e-2  # of layers that round their inputs: transformers in two chunks is 2e-2 off itself in one
_SAME = 2e-4  # as above, of rows alone and of several by the same arithmetic; 11 hybrids are 6e-5 off at most
_NOISES = 4.0  # the largest honest ratio of 68 text types is 1.08
_CUTS = ((0, _CUT), (_CUT, _LENGTH))
_ROWS = (*((at, at + 1) for at in range(_CUT + 1)), (_CUT + 1, _LENGTH))  # one by one, and others behind them
_LENGTH_DEPENDENT_ROPE = "longrope"
_WINDOWS = ("sliding_window", "attention_chunk_size", "layer_types")


def refuse_layers(adapter: ModelAdapter) -> None:
    """Raise ``UnsupportedModel`` if the config names layers or positions that a ragged paged batch cannot serve."""
    text = adapter.text_config
    served = {*LAYER_KINDS, "attention", *STATE_KINDS, *STATELESS_KINDS}
    beyond = sorted(set(list_layer_kinds(text)) - served)
    if beyond:
        raise UnsupportedModel(
            f"{adapter.config.model_type!r} has {', '.join(beyond)} layers in its text model ({text.model_type}); "
            f"a paged KV cache serves {', '.join(LAYER_KINDS)} layers, and blocks of states {', '.join(STATE_KINDS)}"
        )
    if INDEXED in list_layer_kinds(text) and not (adapter.latent_row and find_index_width(text)):
        raise UnsupportedModel(
            f"{adapter.config.model_type!r} has {INDEXED} layers in its text model ({text.model_type}) whose keys are "
            "no latents, or whose indexers have no index_head_dim: an indexer's key is the end of a latent row"
        )
    if stray := _list_stray_windows(text):
        raise UnsupportedModel(
            f"{text.model_type!r} has {' and '.join(stray)} in its config, which its layers do not heed and "
            "transformers' cache does, so that its generate() forgets tokens that its forward sees; take that out of "
            "config.json"
        )
    if _LENGTH_DEPENDENT_ROPE in _rope_types(getattr(text, "rope_parameters", None) or {}):
        raise UnsupportedModel(
            f"{adapter.config.model_type!r} uses rope type {_LENGTH_DEPENDENT_ROPE!r}, whose frequencies depend on the "
            "longest request of a batch: requests would change each other's tokens"
        )


def _rope_types(rope: dict[str, Any]) -> set[str]:
    """Collect all rope types of a config, which may nest them by kind of layer."""
    nested = [_rope_types(value) for value in rope.values() if isinstance(value, dict)]
    return set().union({str(rope.get("rope_type", "default"))}, *nested)


def _list_stray_windows(text: Any) -> list[str]:
    """List fields of a config by which transformers' cache would drop tokens, and that are none of its type's own."""
    kind = type(text)
    declared = inspect.signature(kind.__init__).parameters
    strange = [name for name in _WINDOWS if not hasattr(kind, name) and name not in declared]
    found = [name for name in strange if getattr(text, name, None) is not None]
    if "layer_types" in found and set(text.layer_types) <= {"full_attention"}:
        return []  # which the cache goes by alone
    return [name for name in found if getattr(kind(), name, None) is None]


@dataclass(frozen=True, eq=False)
class _Trial:
    """A model, prompts [starts, 24] and where they begin; ``own`` is the forward that it is compared with."""

    model: LoadedModel
    ids: np.ndarray
    starts: list[int]
    own: Any


def self_check(model: LoadedModel) -> None:
    """Compare prefill in chunks and a decode through the paged cache with the model's own forward, near and far.

    Both run in float32 whatever the model's dtype, with the same weights, converted module by module: there a factor of
    1.01 shows that the noise of bfloat16 would hide. Logits may differ by 1e-3 of the largest. In half precision the
    paged cache is then compared again in the model's dtype: its middle row may be four times as far from float32 as
    any row of the model's own forward is. All this is without trinity's kernels; then they are held to the same, and
    taken off, with a line in the log, if they are further off. Raises ``UnsupportedModel`` if the paged cache differs
    without them.
    """
    named = f"{model.config.model_type!r} (text model {model.adapter.text_config.model_type!r})"
    try:
        starts = _list_starts(model.adapter.text_config)
        if model.states is not None:  # of several requests at once, however short the context
            starts += [0] * (_LEAST_STARTS - len(starts))
        with choosing_few(model.language, _CHOSEN):
            with without_swaps(model.language) as swapped:
                trial = _Trial(model, _make_prompts(model, len(starts)), starts, _find_own(model))
                error, allowed, exact = _compare_plain(trial)
            tried = swapped and error <= allowed
            off = _error_of(_paged_logits(trial), exact, model.dtype) if tried else 0.0
        if off > allowed:
            logger.warning("%s runs without kernels: through them its logits differ from its own", named)
            drop_swaps(model.language)
    except Exception as exc:
        raise UnsupportedModel(
            f"{named} is not known to be exact, and its self-check failed: {type(exc).__name__}: {exc}. {_advice()}"
        ) from exc
    if said := explain_no_numbers(exact, model.language):
        raise UnsupportedModel(f"{named} has logits of its own that nothing can be compared with: {said}")
    if error > allowed:
        raise UnsupportedModel(
            f"{named} is not known to be exact, and through a paged cache its logits are {error:.2g} off. {_advice()}"
        )


def _find_own(model: LoadedModel) -> Any:
    """Find the forward that a model is compared with, once a check: that may take a run of it."""
    with _own_attention(model):
        return model.adapter.text_alone(model.language)


def _compare_plain(trial: _Trial) -> tuple[float, float, Tensor]:
    """Compare without kernels: the error, the error that is allowed, and the model's own logits, in float32 if it can.

    Layers that stay quantised take rows in float32 where their library's code does; else they run as they are alone.
    """
    model = trial.model
    quantised = bool(getattr(model.language, "trinity_quantised", None))
    allowed = _QUANTISED_TOLERANCE if quantised else _TOLERANCE
    if quantised and not _takes_float32(trial):
        error, exact = _compare_in(trial, None, allowed)
        found_out = error <= allowed
    else:
        with in_float32(model.language):
            error, exact = _compare_in(trial, torch.float32, allowed)
        found_out = error > allowed
    if found_out or model.dtype == torch.float32:
        return error, allowed, exact
    noise = float(_row_errors(_own_logits(trial), exact).max())
    error = _error_of(_paged_logits(trial), exact, model.dtype)
    return error, min(1.0, max(allowed, _NOISES * noise)), exact  # noise is infinite beyond float16


def _takes_float32(trial: _Trial) -> bool:
    """Tell if the code of layers that stay quantised takes rows in float32, whatever their weights' dtype."""
    try:
        with in_float32(trial.model.language):
            return bool(_own_logits(trial).isfinite().all())
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of any library, in any of its words
        logger.debug("layers that stay quantised are checked in %s alone: %s", trial.model.dtype, error)
        return False


def _compare_in(trial: _Trial, dtype: torch.dtype | None, allowed: float) -> tuple[float, Tensor]:
    """Compare in a dtype (None: as it runs): the error, and the model's own logits. Chooses how states are written.

    Rows alone are tried where chunks agree, too: a chunk may be of one row, and decodes are recomputed. Where they
    differ, or where the code bounds steps of several rows alone, prompt rows never run alone
    (``StateLayout.rows_held``), and decodes are held to the model's own steps. Raises ``UnsupportedModel`` for code
    that wants both.
    """
    model, layout = trial.model, trial.model.states
    if layout is not None:
        layout.reset()  # a model that was refused is held, and tried again
    whole = _own_logits(trial)
    errors = _row_errors(_paged_logits(trial, dtype), whole)
    if layout is None:
        return float(errors.max()), whole
    layout.one_by_one = True
    alone = float(_row_errors(_paged_logits(trial, dtype), whole).max())
    layout.one_by_one = float(errors[:-1].max()) > allowed
    error, bounded = alone if layout.one_by_one else max(alone, float(errors.max())), bounds_steps(model.language)
    if layout.one_by_one and bounded:
        raise UnsupportedModel("it does not go on with several rows at once, and bounds time steps of several alone")
    if layout.one_by_one or (error <= _SAME and not bounded):
        return error, whole
    layout.hold_rows(model.language, model.adapter.text_config.hidden_size)
    exact = _own_logits(trial)
    if float(errors[-1].max()) > allowed and _forgets(trial, dtype, whole, exact):
        return error, whole
    tried = [_paged_logits(trial, dtype, cuts=cuts) for cuts in (_CUTS, _ROWS)]
    return max(float(_row_errors(each, exact).max()) for each in tried), exact


def _forgets(trial: _Trial, dtype: torch.dtype | None, whole: Tensor, own: Tensor) -> bool:
    """Tell if a model's ``own`` last step is as far from its ``whole`` forward as one without some of its states is.

    Where it bounds time steps, bounds may move a step as far, or further: it is then compared without them.
    """
    model = trial.model
    assert model.states is not None
    if bounds_steps(model.language):
        with without_bounds(model.language):
            whole, own = (_own_logits(trial, steps=steps) for steps in (False, True))
            return not float(_row_errors(own, whole)[-1].max()) <= _TOLERANCE
    off = float(_row_errors(own, whole)[-1].max())
    for name in {piece.name for piece in model.states.pieces} - {"held"}:
        without = _paged_logits(trial, dtype, zeroed=name)
        if float(_row_errors(without, whole)[-1].max()) < _NOISES * off:
            return True
    return False


def _row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return the largest difference of each row's logits, relative to the largest of the row: [3, starts]."""
    found, expected = set_aside(found, expected)
    off, largest = (found - expected).abs().amax(-1), expected.abs().amax(-1).clamp(min=1.0)
    return (off / largest).nan_to_num(torch.inf).view(3, -1)


def _error_of(found: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Return the error that counts: of any row in float32, else of the middle row.

    In half precision rounding may choose other experts for a few rows, which are then far off and not wrong.
    """
    errors = _row_errors(found, exact)
    return float(errors.max() if dtype == torch.float32 else errors.median())


def _list_starts(text: Any) -> list[int]:
    """List positions at which a prompt begins: 0, the last, before each limit of the config, and far ones."""
    most = (getattr(text, "max_position_embeddings", None) or 0) - _LENGTH - 1
    before = sorted(limit - _CUT - 3 for limit in find_limits(text))
    wanted = [0, most, *before, *reversed(FAR_POSITIONS)]
    return list(dict.fromkeys(start for start in wanted if 0 <= start <= max(0, most)))[:_MOST_STARTS]


def _advice() -> str:
    return f"Known: {', '.join(known_models())}. {HOW_TO_ADD}"


def _make_prompts(model: LoadedModel, count: int) -> np.ndarray:
    """Make prompts [count, 24]: each differs, lest rounding choose other experts in all of them at once."""
    vocabulary = int(model.adapter.text_config.vocab_size)
    allowed = np.setdiff1d(np.arange(vocabulary), list(model.adapter.placeholder_ids))
    places = np.arange(count)[:, None] * 104_729 + np.arange(_LENGTH + 1) * 7919 + 13
    found: np.ndarray = allowed[places % len(allowed)]
    return found


@torch.inference_mode()
def _own_logits(trial: _Trial, *, steps: bool | None = None) -> Tensor:
    """Compute [3 * starts, vocabulary]: logits after each cut, for the prompt from each start.

    - ``steps`` (where the model's own steps differ from its whole forward): the last are of a step behind the others.
    """
    model, own = trial.model, trial.own
    if steps is None:
        steps = model.states is not None and model.states.rows_held
    with _own_attention(model):
        given = torch.from_numpy(trial.ids).to(model.device)
        begins = torch.tensor(trial.starts, device=model.device)
        places = begins[:, None] + torch.arange(_LENGTH + 1, device=model.device)
        name = "inputs_embeds" if model.adapter.flat else "input_ids"
        fed = own.get_input_embeddings()(given) if model.adapter.flat else given
        logits: Tensor = own(**{name: fed}, position_ids=places, use_cache=False).logits
        if steps:
            first = own(**{name: fed[:, :-1]}, position_ids=places[:, :-1], use_cache=True)
            last = own(
                **{name: fed[:, -1:]},
                position_ids=places[:, -1:],
                past_key_values=first.past_key_values,
                use_cache=True,
            )
            logits = torch.cat((first.logits, last.logits), 1)
    return logits[:, [_CUT - 1, _LENGTH - 1, _LENGTH]].transpose(0, 1).flatten(0, 1).float()


@contextmanager
def _own_attention(model: LoadedModel) -> Iterator[None]:
    """Have the text model attend as transformers does, while the context lasts."""
    set_attention(model.language, model.adapter, "eager")
    try:
        yield
    finally:
        set_attention(model.language, model.adapter, PAGED_ATTENTION)


def _paged_logits(
    trial: _Trial,
    dtype: torch.dtype | None = None,
    *,
    cuts: Sequence[tuple[int, int]] = _CUTS,
    zeroed: str = "",
) -> Tensor:
    """Compute the same through blocks, in chunks of these ``cuts``; with states of this name ``zeroed`` at the end."""
    model, ids, starts = trial.model, trial.ids, trial.starts
    shape, axes, backend = model.kv_shape(), model.adapter.axes, TorchAttention()
    height, count = shape.shape[3], len(starts)
    kv = torch.zeros((1 + 3 * count, *shape.shape), dtype=dtype or shape.dtype, device=model.device)
    tables = 1 + np.arange(3 * count).reshape(3, count).T
    at, last = np.arange(_LENGTH + 1), np.full(count, _LENGTH)
    parts = [
        [
            Chunk(prompt[low:high], start + at[low:high], low, table, needs_logits=high in (_CUT, _LENGTH))
            for prompt, start, table in zip(ids, starts, tables, strict=True)
        ]
        for low, high in cuts
    ]
    decodes = Decodes(ids[:, _LENGTH], np.array(starts) + last, last + 1, tables)
    steps = [*((NO_DECODES, chunks) for chunks in parts), (decodes, list[Chunk]())]
    batches = [build_batch(rows, chunks, height, axes, model.device) for rows, chunks in steps]
    if model.states is None:
        return torch.cat([model.forward(batch, kv, None, backend) for batch in batches]).float()
    layout = model.states if dtype is None else model.states.in_float32()
    found = _run_with_states(model, batches, kv, layout, zeroed)
    return torch.cat([logits for logits in found if len(logits)]).float()


def _run_with_states(
    model: LoadedModel, batches: Sequence[RaggedBatch], kv: Tensor, layout: StateLayout, zeroed: str
) -> Iterator[Tensor]:
    """Run batches of the same requests one behind the other, in blocks of states that begin with what is not theirs."""
    count, held = batches[0].rows.decodes + len(batches[0].rows.chunks), 0
    memory = torch.full((count, layout.size), 7, dtype=torch.uint8, device=model.device)
    for batch in batches:
        if batch is batches[-1]:
            for piece in (each for each in layout.pieces if each.name == zeroed):
                memory[:, piece.offset : piece.offset + piece.nbytes] = 0
        turns = [PromptTurn(_LENGTH, held) for _ in batch.rows.chunks]
        states = StateStep(layout, memory, np.arange(count)[::-1].copy(), batch.rows, turns)
        yield model.forward(batch, kv, None, TorchAttention(), states)
        states.commit()
        held = next((turns[0].hold(chunk.start, chunk.length) for chunk in batch.rows.chunks), 0)


def set_attention(model: Any, adapter: ModelAdapter, name: str) -> None:
    """Set the attention implementation of the text model only."""
    if isinstance(adapter, GenericAdapter):
        adapter.language(model).set_attn_implementation({"": name} if adapter.flat else name)
        return
    model.set_attn_implementation({"text_config": name} if adapter.multimodal else name)
