"""Runs of a model's own forward around its text model, for models that no convention describes.

Some project what ``get_image_features`` gives only in their forward, or scale logits there. So the forward itself runs
here, with a stand-in for the text model: one that keeps what it is given, or one that gives what it is told to.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trinity.errors import StageError
from trinity.stage_kinds import ENCODE
from trinity.stages.kernels.swaps import copy_with


class _Given(Exception):
    """Ends a forward at its text model, with the embeddings [1, tokens, hidden] that this was given."""

    def __init__(self, embeds: Tensor) -> None:
        super().__init__("the text model was reached")
        self.embeds = embeds


class _ZeroEmbedding(nn.Module):
    """Embeds every token as zeros [..., width]."""

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        self.width, self.weight = width, like.new_zeros(1, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight.expand(*ids.shape, self.width).clone()


class _StandIn(nn.Module):
    """Stands where the text model was; embeds tokens as zeros [..., width]."""

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        self.embedding = _ZeroEmbedding(width, like)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding


class _KeepsEmbeddings(_StandIn):
    """Raises ``_Given`` with what it is given: embeddings, or beside ids the features alone [1, count, width]."""

    def __init__(self, width: int, like: Tensor, count: int) -> None:
        super().__init__(width, like)
        self.shape = (1, count, width)

    def forward(self, *given: Any, inputs_embeds: Tensor | None = None, **named: Any) -> None:
        if inputs_embeds is not None:
            raise _Given(inputs_embeds)
        beside = [each for each in named.values() if isinstance(each, Tensor) and each.shape == self.shape]
        if len(beside) != 1:
            raise StageError("the model's forward gives its text model no embeddings", stage=ENCODE.letter)
        raise _Given(beside[0])


class _GivesStates(_StandIn):
    """Gives these hidden states [1, rows, hidden] whatever it is asked."""

    def __init__(self, states: Tensor) -> None:
        super().__init__(states.shape[-1], states)
        self.states = states

    def forward(self, *given: Any, **named: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast  # all fields that are asked for

        return MoeModelOutputWithPast(last_hidden_state=self.states)


class _TextPart(nn.Module):
    """Stands where a part of a base was that is the text model itself, a list of layers, too.

    Embeds ids as zeros [..., width], and raises ``_Given`` with what else it is called for.
    """

    def __init__(self, width: int, like: Tensor) -> None:
        super().__init__()
        self.embedding = _ZeroEmbedding(width, like)

    def forward(self, given: Tensor, *further: Any, **named: Any) -> Tensor:
        if given.is_floating_point():
            raise _Given(given)
        embedded: Tensor = self.embedding(given)
        return embedded

    def __iter__(self) -> Iterator[nn.Module]:
        yield self

    def __getitem__(self, at: Any) -> nn.Module:
        return self


def forward_features(
    model: Any, language: str, width: int, placeholder: int, count: int, inputs: Mapping[str, Tensor]
) -> Tensor:
    """Run the forward of ``model.base_model`` over ``count`` placeholders; return features [count, ``width``].

    - ``language``: name of its text model, which may be lacking; "": the base itself, whose parts of the text may lack.
    - ``inputs``: of the encoder, by name.

    May be called from several threads. Raises ``StageError`` if the text model is never reached, and what the forward
    raises.
    """
    pixels = next(value for value in inputs.values() if value.is_floating_point())
    if language:
        twin = _replace(model.base_model, [language], _KeepsEmbeddings(width, pixels, count))
    else:
        lacking = [name for name, module in model.base_model._modules.items() if module is None]  # else unlisted
        twin = copy_with(model.base_model, {name: _TextPart(width, pixels) for name in lacking})
    accepted = inspect.signature(twin.forward).parameters
    ids = torch.full((1, count), placeholder, device=pixels.device)
    try:
        twin(input_ids=ids, use_cache=False, **{name: value for name, value in inputs.items() if name in accepted})
    except _Given as given:
        return given.embeds[0]
    raise StageError("the model's forward does not reach its text model", stage=ENCODE.letter)


def forward_logits(model: Any, language: str, below: Any, states: Tensor) -> Tensor:
    """Run the forward of ``model`` behind its text model's hidden states [rows, hidden]: logits [rows, vocabulary].

    - ``language``: name of the text model within ``model.base_model``; "": that itself.
    - ``below``: the part of it that gives the hidden states.
    """
    stand_in: nn.Module = _GivesStates(states[None])
    if language:
        text = getattr(model.base_model, language)
        path = [language, *(name for name, child in text.named_children() if child is below)]
    else:  # the head may ask the base for what it keeps
        path, gives = [], stand_in.forward
        stand_in = copy.copy(model.base_model)
        stand_in.__dict__["forward"] = gives
    if model.base_model is not model:
        path.insert(0, model.base_model_prefix)
    twin = _replace(model, path, stand_in)
    logits: Tensor = twin(inputs_embeds=states[None], use_cache=False).logits
    return logits[0]


def _replace(module: Any, path: Sequence[str], stand_in: nn.Module) -> Any:
    """Copy the modules along ``path``, with ``stand_in`` at its end; all others are shared."""
    name, *further = path
    inner = _replace(module.get_submodule(name), further, stand_in) if further else stand_in
    return copy_with(module, {name: inner})
