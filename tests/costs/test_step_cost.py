"""The roofline by hand, its directions, transfers, and measured tables that survive their file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.core.scheduler import StepTime
from trinity.costs.budgets import StepCost
from trinity.costs.interconnects import INTERCONNECTS, Interconnect
from trinity.costs.model_shape import MODELS, LayerShape, ModelShape, VisionShape, get_model_shape
from trinity.costs.step_cost import DEVICES, CostTables, Device, Roofline, get_device
from trinity.errors import ConfigError, UnknownName

SLOW = Device(
    name="slow", flops=1e6, bandwidth=1e5, memory=1e9, flops_share=0.5, bandwidth_share=0.5, pass_s=0.1, row_s=0
)
ENCODER = VisionShape(
    layers=LayerShape(layers=1, width=4, heads=1, kv_heads=1, head_dim=4, ffn=8), patches=2, span=3, projector=10
)
TINY = ModelShape(
    name="tiny",
    language=LayerShape(layers=2, width=4, heads=2, kv_heads=1, head_dim=2, ffn=8, gated=True),
    vocabulary=10,
    vision=ENCODER,
)


def tiny(**figures: float) -> Roofline:
    return Roofline(model=TINY, device=msgspec.structs.replace(SLOW, **figures), context=100)


def test_weights_by_hand() -> None:
    # A layer: query and output 4 x 4, key and value 4 x 2 each, three of 4 x 8; two layers; the head has 4 x 10.
    assert TINY.language.weights == 2 * (16 + 16 + 8 + 8 + 96)
    assert TINY.read_bytes == 2 * (288 + 40)
    assert TINY.language_bytes == 2 * (288 + 80)
    assert TINY.vision_bytes == 2 * (64 + 64 + 10)
    assert TINY.kv_bytes == 2 * 2 * 1 * 2 * 2


def test_a_decode_is_bound_by_what_it_reads() -> None:
    moved = 656 + 3 * 101 * 16 + 18 * 3 * 2 * 4 * 2
    assert tiny(flops=1e12).seconds(3, 0, 0) == pytest.approx(0.1 + moved / 0.5e5)


def test_a_prefill_is_bound_by_what_it_computes() -> None:
    flops = 2 * 50 * 288 + 2 * 40 + 4 * 50 * 25 * 2 * 4  # each of 50 tokens looks back on 25 at the mean
    assert tiny(bandwidth=1e12).seconds(0, 50, 0) == pytest.approx(0.1 + flops / 0.5e6)


def test_what_is_prefilled_already_is_looked_back_on_and_read() -> None:
    cost = tiny(bandwidth=1e12)
    more = cost.at(0, 50, 0, context=0, prefilled=200) - cost.at(0, 50, 0, context=0)
    assert more == pytest.approx(4 * 50 * 200 * 2 * 4 / 0.5e6)
    reading = tiny(flops=1e12)
    more = reading.at(0, 50, 0, context=0, prefilled=200) - reading.at(0, 50, 0, context=0)
    assert more == pytest.approx(200 * 16 / 0.5e5)


def test_many_short_prefills_look_back_less_than_a_long_one() -> None:
    cost = tiny(bandwidth=1e12)
    assert cost.at(0, 50, 0, context=0, prefills=5) < cost.at(0, 50, 0, context=0)


def test_an_encode_by_hand() -> None:
    flops = 2 * 20 * 128 + 2 * 10 * 10 + 4 * 20 * 3 * 4
    assert tiny(bandwidth=1e12).seconds(0, 0, 10) == pytest.approx(0.1 + flops / 0.5e6)
    text = Roofline(model=msgspec.structs.replace(TINY, vision=None), device=SLOW)
    assert text.seconds(0, 0, 10) == 0


def test_each_pass_has_its_overhead_and_each_sequence() -> None:
    free = tiny(flops=1e15, bandwidth=1e15, row_s=0.01)
    assert free.seconds(0, 0, 0) == 0
    assert free.seconds(3, 0, 0) == pytest.approx(0.13)
    assert free.seconds(3, 5, 0) == pytest.approx(0.14)
    assert free.seconds(3, 5, 7) == pytest.approx(0.24)
    assert free.at(0, 5, 0, context=0, prefills=4) == pytest.approx(0.14)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", DEVICES)
def test_a_decode_step_reads_the_weights(name: str, where: str) -> None:
    here, shape = get_device(where), get_model_shape(name)
    read = shape.read_bytes / (here.bandwidth * here.bandwidth_share)
    took = Roofline(model=shape, device=here).seconds(1, 0, 0) - here.pass_s
    assert read < took < 1.2 * read + 1e-3


rows = st.integers(0, 4096)


@given(
    st.sampled_from(sorted(MODELS)), st.sampled_from(sorted(DEVICES)), rows, rows, rows, st.integers(0, 2), st.data()
)
def test_a_larger_step_never_takes_less(
    name: str, where: str, decodes: int, prefill: int, media: int, which: int, data: st.DataObject
) -> None:
    cost: StepTime = Roofline(model=get_model_shape(name), device=get_device(where))
    counts = [decodes, prefill, media]
    before = cost.seconds(*counts)
    counts[which] += data.draw(st.integers(1, 1000))
    assert cost.seconds(*counts) >= before


@given(rows, rows, rows)
def test_a_faster_device_never_takes_longer(decodes: int, prefill: int, media: int) -> None:
    shape = get_model_shape("qwen2-vl-7b")
    took = [
        Roofline(model=shape, device=get_device(name)).seconds(decodes, prefill, media) for name in ("H200", "H100")
    ]
    assert took[0] <= took[1]


@pytest.mark.parametrize(
    "wrong",
    [{"flops": 0}, {"bandwidth": math.inf}, {"memory": -1}, {"flops_share": 1.1}, {"pass_s": -1}, {"price": -1}],
)
def test_devices_without_meaning_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"(figures of a device|is a number)"):
        Device(**{"name": "x", "flops": 1.0, "bandwidth": 1.0, "memory": 1.0, **wrong})  # type: ignore[arg-type]


def test_an_unknown_device_is_named_with_those_known() -> None:
    with pytest.raises(UnknownName, match=r"A10, A100, .*H100, H20.*trinity\.costs\.step_cost\.Device"):
        get_device("TPU")


def test_transfers() -> None:
    link = Interconnect(name="x", bandwidth=1e9, fixed_s=0.001)
    assert link.seconds(0) == 0
    assert link.seconds(1e9) == pytest.approx(1.001)
    # TriInfer table 4: a LLaVA image cache in 1.2 to 1.8 ms at the 95th percentile; KV of 640 tokens in 6.4 to 7.6 ms.
    assert INTERCONNECTS["nvlink"].seconds(576 * 8192) < 1.2e-3
    assert INTERCONNECTS["nvlink"].seconds(640 * 524_288) < 6.4e-3
    for wrong in ({"bandwidth": 0}, {"fixed_s": -1}, {"bandwidth": math.nan}):
        with pytest.raises(ConfigError, match="positive"):
            Interconnect(**{"name": "x", "bandwidth": 1.0, **wrong})  # type: ignore[arg-type]


# ---------------------------------------------------------------- measured tables


def tables(**names: str) -> CostTables:
    return CostTables.from_samples(
        {
            0: {"decodes": {1: 0.02, 8: 0.024}, "prefill": {1: 0.02, 1000: 0.2}, "media": {576: 0.03}},
            1000: {"decodes": {1: 0.03, 8: 0.054}, "prefill": {1: 0.02, 1000: 0.3}},
        },
        **{"model": "llava-1.5-7b", "device": "H100", "dtype": "float16", **names},
    )


def test_tables_are_joined_by_lines_between_contexts() -> None:
    measured = tables()
    assert measured.at(8, 0, 0, context=0) == pytest.approx(0.024)
    assert measured.at(8, 0, 0, context=500) == pytest.approx(0.039)
    assert measured.at(8, 0, 0, context=1000) == pytest.approx(0.054)
    assert measured.at(8, 0, 0, context=2000) == pytest.approx(0.084)
    assert measured.at(0, 1000, 0, context=0, prefilled=500) == pytest.approx(0.25)
    assert measured.at(0, 0, 1152, context=700) == pytest.approx(0.06)
    assert measured.at(8, 1000, 576, context=1000) == pytest.approx(0.054 + 0.2 - 0.02 + 0.03)
    assert measured.seconds(8, 0, 0) == pytest.approx(0.024 + 0.03 * 0.512)


def test_a_context_that_measured_faster_by_noise_costs_as_much_as_the_shorter_one() -> None:
    noisy = CostTables.from_samples(
        {0: {"decodes": {1: 0.02}}, 100: {"decodes": {1: 0.01}}}, model="m", device="d", dtype="float16"
    )
    assert [noisy.at(1, 0, 0, context=each) for each in (0, 50, 100, 900)] == [0.02] * 4


def test_one_table_alone_is_a_step_cost() -> None:
    alone = CostTables(
        model="m", device="d", dtype="t", source="s", costs=((512, StepCost.from_samples({1: 0.1, 2: 0.3})),)
    )
    assert [alone.at(2, 0, 0, context=each) for each in (0, 512, 9999)] == [0.3] * 3


def test_a_step_with_both_kinds_takes_no_less_than_either_whatever_the_noise() -> None:
    contexts = {1: {"decodes": {1: 9.0}, "prefill": {1: 9.0}}, 8: {"decodes": {1: 1.0}}, 16: {"decodes": {1: 2.0}}}
    noisy = CostTables.from_samples(contexts, model="any", device="any", dtype="any")
    assert noisy.at(1, 0, 0, context=16) == 2.0, "less than at context 1"
    assert noisy.at(1, 1, 0, context=16) == 9.0
    assert noisy.at(1, 1, 0, context=1) == 9.0, "both share what a pass costs at least"


def test_tables_survive_their_file_and_know_whose_they_are(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    tables().save(path)
    assert CostTables.load(path, model="llava-1.5-7b", device="H100") == tables()
    assert b"float16" in path.read_bytes()
    with pytest.raises(ConfigError, match="measured on device 'H100', not on 'A100'"):
        CostTables.load(path, device="A100")
    with pytest.raises(ConfigError, match="measured on model"):
        CostTables.load(path, model="other")


@pytest.mark.parametrize("content", [None, "", "{}", '{"model":"m","device":"d","dtype":"t","source":"s","costs":[]}'])
def test_a_file_without_tables(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError):
        CostTables.load(path)


class FakeProbe:
    """Answers by a roofline, and remembers what it was asked."""

    def __init__(self, letters: str, longest: int = 1500) -> None:
        self.letters, self.longest, self.image_tokens = letters, longest, 576
        self.cost = Roofline(model=get_model_shape("llava-1.5-7b"), device=get_device("H100"))
        self.asked: list[tuple[str, int, int]] = []

    def most_images(self) -> int:
        return 2

    def encode(self, images: int) -> float:
        self.asked.append(("encode", images, 0))
        return self.cost.seconds(0, 0, 576 * images)

    def prefill(self, tokens: int, prefilled: int = 0) -> float:
        self.asked.append(("prefill", tokens, prefilled))
        return self.cost.at(0, tokens, 0, context=0, prefilled=prefilled)

    def decode(self, rows: int, context: int | None = None) -> float:
        assert context is not None
        self.asked.append(("decode", rows, context))
        return self.cost.at(rows, 0, 0, context=context)


def taken(probe: FakeProbe, **options: Any) -> CostTables:
    return CostTables.profile(probe, model="llava-1.5-7b", device="H100", dtype="float16", **options)


def test_tables_taken_of_an_instance_say_what_it_took() -> None:
    probe = FakeProbe("EPD")
    found = taken(probe)
    assert [context for context, _ in found.costs] == [1, 512, 1500]
    assert found.at(64, 0, 0, context=512) == pytest.approx(probe.cost.at(64, 0, 0, context=512))
    assert found.at(16, 0, 0, context=1000) == pytest.approx(probe.cost.at(16, 0, 0, context=1000), rel=0.01)
    assert found.at(0, 256, 0, context=0, prefilled=512) == pytest.approx(
        probe.cost.at(0, 256, 0, context=0, prefilled=512)
    )
    assert found.at(0, 256, 0, context=0, prefilled=1500) == found.at(0, 256, 0, context=0, prefilled=512)
    assert found.seconds(0, 0, 1152) == pytest.approx(probe.cost.seconds(0, 0, 1152))
    assert found.source == "profiled on a live instance"


def test_what_an_instance_has_no_room_for_is_not_measured() -> None:
    probe = FakeProbe("EPD")
    taken(probe, repeats=1)
    assert max(images for kind, images, _ in probe.asked if kind == "encode") == 2
    assert max(tokens + before for kind, tokens, before in probe.asked if kind == "prefill") <= 1500
    assert len(probe.asked) == 2 * len(set(probe.asked))  # each once unused and once timed


def test_an_instance_is_measured_at_its_own_stages() -> None:
    for letters, kinds in (("E", {"encode"}), ("P", {"prefill"}), ("D", {"decode"}), ("PD", {"prefill", "decode"})):
        probe = FakeProbe(letters)
        taken(probe, repeats=1)
        assert {kind for kind, _, _ in probe.asked} == kinds


def test_measuring_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing could be measured"):
        taken(FakeProbe("P", longest=1))
    for options in ({"contexts": (0,)}, {"repeats": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            taken(FakeProbe("D"), **options)


@pytest.mark.parametrize("contexts", [(), (5, 5), (9, 1)])
def test_contexts_ascend(contexts: tuple[int, ...]) -> None:
    costs: Any = tuple((context, StepCost()) for context in contexts)
    with pytest.raises(ConfigError, match="ascending"):
        CostTables(model="m", device="d", dtype="t", source="s", costs=costs)
