"""Linear layers through oneDNN: the same function, chosen only where it is faster."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from support.checkpoint_files import checkpoint
from trinity import Instance
from trinity.connector import Connector
from trinity.emulation.model import EmulatedModel
from trinity.memory.cache_config import CacheConfig
from trinity.remote.channel.wire import Setup, decode, encode
from trinity.remote.instance_setup import load_instance, read_instance
from trinity.remote.supervision.process_config import make_setup
from trinity.runtime.loader import ServingConfig, load_instances
from trinity.stages.kernels import linear, native_linear
from trinity.stages.kernels.linear import OneDnnLinear, PackedLinear, count_packed_bytes, pack_weights, use_onednn
from trinity.stages.models import LoadedModel, load_model, loader


class Named(nn.Linear):
    """A model's own kind of linear layer, which may do anything."""


class Router(nn.Module):
    """Multiplies by the weight of one of its layers, as some routers do, and calls the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(16, 16), nn.Linear(16, 16)
        self.requires_grad_(False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = nn.functional.linear(rows, self.read.weight) + self.called(rows)
        return found


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_is_onednn_faster", lambda dtype: True)
    monkeypatch.setattr(linear, "is_packing_faster", lambda dtype: True)
    monkeypatch.setattr(native_linear, "is_native_faster", lambda dtype: False)
    monkeypatch.setattr(loader, "_parts", weakref.WeakValueDictionary())  # what was loaded with what was measured


def _has_onednn(dtype: torch.dtype) -> bool:
    """Tell if oneDNN multiplies this type here: bfloat16 needs AVX-512 or AVX-NE-CONVERT, which not every CPU has."""
    weight = torch.ones(8, 8, dtype=dtype)
    try:
        linear.run_onednn(weight, linear.pack_weight(weight), None)
    except RuntimeError:
        return False
    return True


BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(not _has_onednn(torch.bfloat16), reason="oneDNN has no bfloat16 on this processor"),
)


def test_where_onednn_lacks_a_type_nothing_is_packed() -> None:
    layer = nn.Linear(24, 40, dtype=torch.bfloat16).requires_grad_(False)
    if _has_onednn(torch.bfloat16):
        pytest.skip("oneDNN has bfloat16 on this processor")
    pack_weights(nn.Sequential(layer))
    use_onednn(nn.Sequential(layer))
    assert type(layer) is nn.Linear


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
@pytest.mark.parametrize("shape", [(5, 24), (1, 7, 24), (2, 3, 4, 24), (1, 24)])
@pytest.mark.parametrize(("change", "kind"), [(use_onednn, OneDnnLinear), (pack_weights, PackedLinear)])
def test_equals_the_plain_layer(
    bias: bool, dtype: torch.dtype, shape: tuple[int, ...], change: Callable[[nn.Module], None], kind: type
) -> None:
    layer = nn.Linear(24, 40, bias=bias, dtype=dtype).requires_grad_(False)
    rows = torch.randn(shape).to(dtype)
    strided = rows.expand(2, *shape).transpose(0, -2)
    expected = [layer(rows), layer(strided)]
    change(nn.Sequential(layer))
    assert isinstance(layer, kind)
    for found, wanted in zip((layer(rows), layer(strided)), expected, strict=True):
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("always")
def test_only_plain_layers_on_a_cpu_are_changed() -> None:
    own, plain, elsewhere = Named(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, device="meta")
    kept = plain.weight
    use_onednn(nn.ModuleList([own, plain, elsewhere]))
    assert (type(own), type(plain), type(elsewhere)) == (Named, OneDnnLinear, nn.Linear)
    assert plain.weight is kept, "no second copy"


def _slower(rows: object, weight: object, bias: object) -> None:
    for _ in range(200):
        nn.functional.linear(rows, weight)  # type: ignore[arg-type]


def _lacking(rows: object, weight: object, bias: object) -> None:
    raise AttributeError("no such operator")


def _free(rows: object, weight: object, bias: object) -> None:
    pass


@pytest.mark.parametrize(("operator", "wanted"), [(_slower, False), (_lacking, False), (_free, True)])
def test_the_faster_way_is_taken(
    operator: Callable[[object, object, object], None], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "run_onednn", operator)
    linear._is_onednn_faster.cache_clear()
    assert linear._is_onednn_faster(torch.float32) is wanted
    linear._is_onednn_faster.cache_clear()


class Clock:
    """Thread time that passes only as it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def thread_time(self) -> float:
        return self.now

    def taking(self, *seconds: float) -> Callable[[], object]:
        """Something that takes so long each time: the first is the run that warms up."""
        left = iter(seconds)

        def run() -> None:
            self.now += next(left)

        return run


@pytest.mark.parametrize(
    ("ours", "plain", "wanted"),
    [
        ([9.0, *[0.5] * 9], [9.0, *[1.0] * 9], True),
        ([9.0, *[0.95] * 9], [9.0, *[1.0] * 9], False),
        ([9.0, *[0.5] * 9], [9.0, *[1.0] * 6, 0.3, 0.3, 0.3], True),  # plain was lucky
        ([9.0, 0.1, 0.1, *[1.0] * 7], [9.0, *[1.0] * 9], False),  # ours was
        ([9.0, *[0.5] * 5, *[5.0] * 4], [9.0, *[1.0] * 5, *[10.0] * 4], True),  # another program came
        ([0.0] * 10, [0.0] * 10, False),  # too short for the clock
    ],
)
def test_one_run_of_luck_decides_nothing(
    ours: list[float], plain: list[float], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(linear, "time", clock)
    assert linear.is_faster(clock.taking(*ours), clock.taking(*plain)) is wanted


@pytest.mark.usefixtures("always")
def test_loaded_parts_are_quickened() -> None:
    model = load_model(checkpoint("llava"), "EPD", dtype=torch.float64)
    for part in (model.vision, model.language):
        assert any(isinstance(module, OneDnnLinear) for module in part.modules())
        assert not any(type(module) is nn.Linear for module in part.modules())


def test_code_for_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    linear._is_onednn_faster.cache_clear()
    linear._is_onednn_faster(torch.float32)
    assert os.environ["LRU_CACHE_CAPACITY"] == str(linear.KERNELS_KEPT)
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"


def _packing(rows: object, weight: torch.Tensor, bias: object) -> None:
    assert weight.is_mkldnn, "packed weights, not plain ones"


@pytest.mark.parametrize(("operator", "wanted"), [(_slower, False), (_lacking, False), (_packing, True)])
def test_weights_are_packed_where_that_is_faster(
    operator: Callable[[object, object, object], None], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "run_onednn", operator)
    linear.is_packing_faster.cache_clear()
    assert linear.is_packing_faster(torch.float32) is wanted
    monkeypatch.setattr(linear, "pack_weight", lambda weight: _lacking(0, 0, 0))
    linear.is_packing_faster.cache_clear()
    assert linear.is_packing_faster(torch.float32) is False
    linear.is_packing_faster.cache_clear()


@pytest.mark.usefixtures("always")
def test_a_layer_whose_weight_is_read_elsewhere_stays_plain() -> None:
    router, rows = Router(), torch.randn(3, 16)
    wanted = router(rows)
    pack_weights(router)
    assert type(router.read) is nn.Linear
    assert isinstance(router.called, PackedLinear)
    assert torch.allclose(router(rows), wanted, atol=1e-5)


@pytest.mark.usefixtures("always")
def test_packing_lets_the_plain_weights_go_and_leaves_what_is_tied_alone() -> None:
    embedding = nn.Embedding(40, 24)
    head, own, plain = nn.Linear(24, 40, bias=False), Named(4, 4), nn.Linear(24, 16)
    head.weight = embedding.weight
    values = embedding.weight.clone()
    gone = weakref.ref(plain.weight)
    model = nn.ModuleList([embedding, head, own, plain])
    pack_weights(model)
    assert (type(head), type(own), type(plain)) == (PackedLinear, Named, PackedLinear)
    assert gone() is None
    assert torch.equal(embedding.weight, values)
    assert (head.weight.shape, head.weight.dtype, head.weight.is_meta) == ((40, 24), torch.float32, True)
    assert count_packed_bytes(model) == (40 * 24 + 16 * 24) * 4
    use_onednn(model)
    assert type(plain) is PackedLinear, "once"


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", ["llava", "llama"])
def test_every_part_is_packed_and_its_bytes_count(name: str) -> None:
    plain, packed = (
        load_model(checkpoint(name), "EPD" if name == "llava" else "PD", packed=each) for each in (False, True)
    )
    assert packed.language is not plain.language
    for part in (packed.language, packed.vision) if name == "llava" else (packed.language,):
        assert {type(module) for module in part.modules() if isinstance(module, nn.Linear)} == {PackedLinear}
    head = packed.language.get_output_embeddings()
    tied = head.weight.nbytes if plain.language.get_output_embeddings().weight is _embeddings(plain) else 0
    assert packed.weight_bytes == plain.weight_bytes + tied


def _embeddings(model: LoadedModel) -> torch.Tensor:
    weight: torch.Tensor = model.adapter.language(model.language).get_input_embeddings().weight
    return weight


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("roles", "asked", "wanted"),
    [
        ("EP D", None, "packed packed"),
        ("E P", None, "plain plain"),
        ("P D", False, "plain plain"),
        ("P", True, "packed"),
    ],
)
def test_weights_are_packed_where_somebody_of_the_process_decodes(roles: str, asked: bool | None, wanted: str) -> None:
    specs = [Instance(each, pack=asked) for each in roles.split()]
    loaded = load_instances(
        ServingConfig(checkpoint("llava"), dtype="float32", cache=CacheConfig(pools={"image": 1, "kv": 4})), specs, None
    )
    languages = [each.model.language for each in loaded if not isinstance(each.model, EmulatedModel)]
    kinds = [{type(layer) for layer in part.modules() if isinstance(layer, nn.Linear)} for part in languages if part]
    expected = {"packed": {PackedLinear}, "plain": {OneDnnLinear}}
    assert kinds == [expected[name] for name in wanted.split()][: len(kinds)]
    assert len({id(part) for part in languages if part}) == 1, "one copy for all"


def test_whether_to_pack_travels_to_an_instance_in_a_process() -> None:
    deployment = ServingConfig(checkpoint("llava"), dtype="float32", cache=CacheConfig(pools={"kv": 4}))
    for asked in (None, True, False):
        there = decode(encode(make_setup(Instance("D", "D0", pack=asked), deployment, Connector("shm"), "round_robin")))
        assert isinstance(there, Setup)
        assert read_instance(there).pack is asked
        assert load_instance(there).spec.pack is (asked is not False)
