"""A text model's whole forward, head included, over one ragged row; and a survey of what its layers cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from trinity.errors import ConfigError, describe_error
from trinity.stages.attention.interface import PagedBatch, attending
from trinity.stages.attention.kv_rows import KvRow, LayerSurvey, find_kv_row
from trinity.stages.kernels.swaps import without_swaps
from trinity.stages.models.base import ModelAdapter


def run_model(model: Any, ids: Tensor, position_ids: Tensor, batch: PagedBatch | None, **further: Any) -> Any:
    """Run ``model`` over ids and positions [1, T]; keywords that its forward does not take are left out."""
    given = {"position_ids": position_ids, "use_cache": False, "trinity_batch": batch, **further}
    kind: Any = type(model)
    names = _list_keywords(kind)
    return model(input_ids=ids, **{name: each for name, each in given.items() if names is None or name in names})


@cache
def _list_keywords(kind: Any) -> frozenset[str] | None:
    """List the keywords that a model's forward takes; None: any."""
    accepted = inspect.signature(kind.forward).parameters.values()
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted):
        return None
    return frozenset(each.name for each in accepted)


@torch.inference_mode()
def survey_rows(model: Any, adapter: ModelAdapter, device: torch.device) -> KvRow:
    """Find what the KV cache must hold of a token, by running one token through the text model ``model``.

    Raises ``UnsupportedModel`` if its attention cannot be paged (``find_kv_row``).
    """
    survey, place = LayerSurvey(), torch.zeros((1, 1), dtype=torch.int64, device=device)
    with without_swaps(model), attending(survey):
        run_model(model, place, place, None)
    return find_kv_row(survey, adapter.text_config.num_hidden_layers, adapter.latent_row)


@torch.inference_mode()
def survey_text(model: Any, adapter: ModelAdapter, device: torch.device) -> KvRow:
    """Find what the KV cache must hold of a token of a multimodal model, by running one through its text model.

    Raises ``UnsupportedModel`` as ``survey_rows`` does.
    """
    return find_kv_row(_run_token(model, adapter, device), adapter.text_config.num_hidden_layers, adapter.latent_row)


def _run_token(model: Any, adapter: ModelAdapter, device: torch.device) -> LayerSurvey:
    survey, text = LayerSurvey(), adapter.language(model)
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    place = ids[None] if adapter.axes == 1 else ids.expand(adapter.axes, 1, 1)
    further = adapter.token_inputs(text, ids, ids.bool())
    with without_swaps(model), attending(survey):
        text(inputs_embeds=text.get_input_embeddings()(ids)[None], position_ids=place, use_cache=False, **further)
    return survey


@torch.inference_mode()
def check_first_token(
    model: Any, adapter: ModelAdapter, device: torch.device, make_empty: Callable[[], Any] | None = None
) -> None:
    """Raise ``ConfigError`` if the text model of ``model`` does not run with its config, by one token.

    - ``make_empty`` (None): makes its modules without weights, which are run first. Reading all weights for one token
      would cost a fifth of a load; modules that run without theirs run with them.
    """
    if make_empty is not None:
        try:
            _run_token(make_empty(), adapter, torch.device("meta"))
            return
        except Exception:  # of the config, or an operator that torch has not for the meta device
            pass
    try:
        _run_token(model, adapter, device)
    except Exception as error:  # whatever transformers and torch raise
        named, kind = adapter.config.model_type, adapter.text_config.model_type
        raise ConfigError(
            f"the text model {kind!r} of {named!r} does not run with the checkpoint's config.json "
            f"({describe_error(error)}); compare it with the one that was published with these weights"
        ) from error
