"""Classes of partial models: the checkpoint's own class without the modules of the other part."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trinity.errors import UnsupportedModel
from trinity.errors.internvl_chat import ARCHITECTURE
from trinity.preprocess.checkpoint.config_file import check_elements
from trinity.stages.models.base import ModelAdapter, find_head
from trinity.stages.models.registry import HOW_TO_ADD


def find_model_class(config: Any) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    for named in getattr(config, "architectures", None) or ():
        if named == ARCHITECTURE:
            from trinity.stages.models.internvl_weights import find_chat_class

            return find_chat_class()
        if hasattr(transformers, named):
            return getattr(transformers, named)
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            return mapping[type(config)]
    raise UnsupportedModel(f"transformers has no generating class for {config.model_type!r}. {HOW_TO_ADD}")


def make_partial_class(
    whole: Any, adapter: ModelAdapter, part: str, directory: Path | None = None, late: bool = False
) -> Any:
    """Derive ``whole`` without the other part's modules, so that from_pretrained reads only the rest.

    ``directory`` (None): of the checkpoint, whose files must have room for the weights. ``late`` (False): the others
    are dropped only after a quantizer has seen them, which goes by the names and the order of all of them.
    """

    class Part(whole):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            own_modules(self)
            if find_head(self) is None:
                raise UnsupportedModel(f"{whole.__name__} has no language head: it does not generate")
            self.whole_names = {name for name, _ in self.named_modules()}
            if adapter.multimodal and not late:
                _drop(self, adapter, part)
            if directory is not None:
                check_elements(directory, sum(each.numel() for each in self.parameters()))

        @staticmethod
        def _load_pretrained_model(model: Any, *given: Any, **named: Any) -> Any:
            if adapter.multimodal and late:
                _drop(model, adapter, part)
            return whole._load_pretrained_model(model, *given, **named)  # no public method runs behind a quantizer

    _name_alike(Part, whole)
    return Part


def load_whole(whole: Any, directory: Path, **settings: Any) -> tuple[Any, Any]:
    """Load a checkpoint's whole model as ``whole.from_pretrained`` does; returns it and what was missing.

    Raises ``ConfigError`` before any weight is made where the files have no room for those of the config.
    """

    class Checked(whole):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            own_modules(self)  # a proof hooks and alters them
            check_elements(directory, sum(each.numel() for each in self.parameters()))

    _name_alike(Checked, whole)
    model, report = Checked.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False, output_loading_info=True, **settings
    )
    model.__class__ = whole
    return model, report


def _name_alike(kind: Any, whole: Any) -> None:
    """Name a class as another: transformers renames weights by the class that it sees."""
    kind.__name__, kind.__qualname__, kind.__module__ = whole.__name__, whole.__qualname__, whole.__module__


def _drop(model: Any, adapter: ModelAdapter, part: str) -> None:
    core = model.base_model
    if part == "language":
        kept, head = adapter.text_children(model), find_head(model)  # a head beside the towers, where there is no base
        unwanted = [(core, name) for name, module in core.named_children() if name not in kept and module is not head]
    else:
        heads = [child for child, module in model.named_children() if module is not core and core is not model]
        unwanted = [*list_text_modules(model, adapter), *((model, child) for child in heads)]
    for owner, child in unwanted:
        setattr(owner, child, None)
    left = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    tied = {target: source for target, source in model.all_tied_weights_keys.items() if {target, source} <= left}
    model.all_tied_weights_keys = tied
    model._tied_weights_keys = tied or None  # from_pretrained reads these two, which each model's class has
    model._keys_to_ignore_on_load_unexpected = {".*"}


def list_text_modules(model: Any, adapter: ModelAdapter) -> list[tuple[Any, str]]:
    """List what an encoder does without, as pairs of an owner and the name of its child: what holds a text's weights.

    The text model's embedding is left where codes are embedded by it.
    """
    core = model.base_model
    kept = core.get_input_embeddings() if adapter.embeds_codes else None
    return [pair for name in adapter.text_children(model) for pair in _list_beside(core, name, kept)]


def _list_beside(owner: Any, name: str, kept: Any) -> list[tuple[Any, str]]:
    module = getattr(owner, name)
    if next(module.parameters(), None) is None:
        return []
    if kept is None or all(each is not kept for each in module.modules()):
        return [(owner, name)]
    return [pair for child, _ in module.named_children() for pair in _list_beside(module, child, kept)]


@torch.inference_mode()
def list_towers(base: Any) -> tuple[str, ...]:
    """List the children of a base that its forward over embeddings does not call, but for that which embeds.

    Raises what the forward raises that takes no embeddings.
    """
    called, embedding = set[int](), base.get_input_embeddings()
    hooks = [each.register_forward_pre_hook(lambda one, _: called.add(id(one))) for each in base.modules()]
    try:
        base(inputs_embeds=embedding.weight[None, :1], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    needed = {*called, id(embedding)}
    parts = {name: {id(each) for each in child.modules()} for name, child in base.named_children()}
    return tuple(name for name, inner in parts.items() if not inner & needed)


def own_modules(model: nn.Module) -> None:
    """Replace the modules of ``model`` that its code holds elsewhere by copies; one that is held twice stays one.

    transformers keeps some modules as globals, such as ``transformers.activations.gelu_pytorch_tanh``, and models hold
    these themselves: a hook, another class or another mode of one would be that of every model that holds it.
    """
    shared = {id(each) for found in _list_shared(model) for each in found.modules()}
    copies: dict[int, Any] = {}
    for module in list(model.modules()):
        while found := {name: child for name, child in module.named_children() if id(child) in shared}:
            for name, child in found.items():  # one that has several names comes by one at a time
                setattr(module, name, copy.deepcopy(child, copies))


def _list_shared(model: nn.Module) -> Iterator[nn.Module]:
    """List modules that are globals of the packages ``model`` comes from, or defaults of its classes' arguments."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    packages = {kind.__module__.partition(".")[0] for kind in kinds}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages:
            yield from _pick_modules(vars(module).values())
    for kind in kinds:
        make = vars(kind).get("__init__")
        yield from _pick_modules(getattr(make, "__defaults__", None) or ())
        yield from _pick_modules((getattr(make, "__kwdefaults__", None) or {}).values())


def _pick_modules(values: Iterable[Any]) -> Iterator[nn.Module]:
    """Pick the modules among ``values`` and in the plain collections among them."""
    for value in list(values):
        kind = type(value)  # ``isinstance`` would ask a lazy object, which imports or warns
        if issubclass(kind, nn.Module):
            yield value
        elif kind in (dict, list, tuple):
            held = value.values() if kind is dict else value
            yield from (each for each in list(held) if issubclass(type(each), nn.Module))
