"""What is loaded alters no module of transformers' own, which other models of the program hold as well."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
import transformers.activations
from torch import Tensor, nn

from support.checkpoint_files import checkpoint
from trinity.stages.kernels.encoder_layers import TableActivation, has_encoder_kernels
from trinity.stages.kernels.swaps import without_swaps
from trinity.stages.models import load_model, loader
from trinity.stages.models.float32_forward import in_float32
from trinity.stages.models.partial_models import own_modules
from trinity.stages.proof import prove

DTYPES = (torch.bfloat16, torch.float32)
# Their layers hold a global of transformers.activations.
GLOBAL = ("minicpmv4_6", "any-minicpmv4_7", pytest.param("any-minicpm_ocr", marks=pytest.mark.slow))
OTHERS = ("llava", "qwen2_5_vl", "gemma3", "any-qwen3_5", "llama")
Shared = dict[tuple[str, str], nn.Module]


def list_globals() -> Shared:
    """Each module that is an attribute of a file of transformers that was imported."""
    files = [(name, each) for name, each in list(sys.modules.items()) if name.partition(".")[0] == "transformers"]
    held = [(name, key, value) for name, each in files for key, value in list(vars(each).items())]
    return {(name, key): value for name, key, value in held if issubclass(type(value), nn.Module)}


def describe(module: nn.Module) -> tuple[Any, ...]:
    """A module's class, and all that it holds, hooks and mode among it."""
    return type(module), {name: dict(each) if isinstance(each, dict) else each for name, each in vars(module).items()}


@contextmanager
def unaltered() -> Iterator[Shared]:
    found = list_globals()
    before = {key: describe(each) for key, each in found.items()}
    yield found
    after = list_globals()
    assert {key: after.get(key) for key in found} == found, "a global is another module"
    assert {key: describe(each) for key, each in found.items()} == before


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_parts", WeakValueDictionary())


def held_by(model: Any) -> list[nn.Module]:
    return [each for part in (model.vision, model.language) if part is not None for each in part.modules()]


# ---------------------------------------------------------------- globals of transformers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*GLOBAL, *OTHERS])
def test_globals_of_transformers_stay_as_they_are(name: str, dtype: torch.dtype) -> None:
    """After one load and a second one; and no part holds one of them, or a module of the other part."""
    directory = checkpoint(name)
    for each in list_globals().values():
        each.train()  # as transformers has them: its own loading puts a model into another mode
    for _ in range(2):
        with unaltered() as found:
            model = load_model(directory, "PD" if name == "llama" else "EPD", dtype=dtype)
            held = held_by(model)
            assert len({id(each) for each in held}) == len(held)
            assert not {id(each) for each in found.values()} & {id(each) for each in held}
            with unaltered(), without_swaps(model.language), in_float32(model.language), unaltered():
                pass  # of what these hook and convert nothing is a global either
        del model, held
        gc.collect()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_nor_does_a_proof_alter_them() -> None:
    """It loads the whole model, and puts that into another mode."""
    directory = checkpoint("any-minicpmv4_7")
    for each in list_globals().values():
        each.train()  # as transformers has them
    with unaltered():
        assert prove(directory).failed is None


def test_the_walk_finds_globals_and_sees_one_altered() -> None:
    shared: Any = transformers.activations.gelu_pytorch_tanh
    assert ("transformers.activations", "gelu_pytorch_tanh") in list_globals()
    for alter in (
        lambda: setattr(shared, "table", 1),
        lambda: shared.train(not shared.training),
        lambda: shared.register_forward_hook(print),
    ):
        own = dict(vars(shared))
        hooks = dict(shared._forward_hooks)
        with pytest.raises(AssertionError), unaltered():
            alter()
        vars(shared).clear()
        vars(shared).update(own)
        shared._forward_hooks.clear()
        shared._forward_hooks.update(hooks)


@pytest.mark.skipif(not has_encoder_kernels(), reason="no kernels of encoders here")
def test_the_copy_of_a_global_is_looked_up_in_a_table() -> None:
    model: Any = load_model(checkpoint("minicpmv4_6"), "E", dtype=torch.bfloat16)
    merger = model.vision.base_model.vision_tower.vit_merger
    assert isinstance(merger.act, TableActivation)
    assert type(transformers.activations.gelu_pytorch_tanh) is transformers.activations.GELUTanh


def test_a_load_that_failed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one has every kernel, and not what the failed one had come to."""

    def fail(part: Any, **named: Any) -> None:
        kept.append(part)
        raise MemoryError("no room for a packed weight")

    kept: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(loader, "use_kernels", fail)
        with pytest.raises(MemoryError):
            load_model(checkpoint("llava"), "E", dtype=torch.bfloat16)
    model = load_model(checkpoint("llava"), "E", dtype=torch.bfloat16)
    assert model.vision is not kept[0]
    assert load_model(checkpoint("llava"), "E", dtype=torch.bfloat16).vision is model.vision


# ---------------------------------------------------------------- other ways to hold what others hold


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.full((3,), 2.0)), nn.Tanh()

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.inner(rows) * self.weight
        return result


ONE, LISTED, NAMED = Scale(), [nn.GELU()], {"tanh": nn.Tanh()}


class Layer(nn.Module):
    def __init__(self, default: nn.Module = nn.SiLU(), *, keyword: nn.Module = nn.ReLU()) -> None:  # noqa: B008
        super().__init__()
        self.default, self.keyword, self.own = default, keyword, nn.Linear(3, 3)
        self.one, self.again, self.inner, self.listed, self.named = ONE, ONE, ONE.inner, LISTED[0], NAMED["tanh"]
        self.lacking = None


def test_globals_collections_and_defaults_are_copied_with_what_they_hold() -> None:
    model: Any = nn.Sequential(Layer(), Layer())
    shared = [*ONE.modules(), LISTED[0], NAMED["tanh"], *(Layer.__init__.__defaults__ or ())]
    shared += (Layer.__init__.__kwdefaults__ or {}).values()
    own = [layer.own for layer in model]
    assert {id(each) for each in shared} <= {id(each) for each in model.modules()}
    own_modules(model)
    assert not {id(each) for each in shared} & {id(each) for each in model.modules()}
    first, second = model
    assert first.one is first.again is second.one  # one stays one
    assert first.inner is first.one.inner
    assert [first.own, second.own] == own
    torch.testing.assert_close(first.one.weight, ONE.weight)
    first.one.weight.data.zero_()
    assert ONE.weight.tolist() == [2.0, 2.0, 2.0]


def test_objects_that_only_look_like_modules_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(lazy: object) -> Any:
        raise AssertionError("asked what it is")

    class Lazy(ModuleType):
        locals()["__class__"] = property(ask)

    monkeypatch.setattr(sys.modules[__name__], "LAZY", Lazy("lazy"), raising=False)
    own_modules(nn.Sequential(Layer()))
