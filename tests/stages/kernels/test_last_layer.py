"""What no result comes of is left out, and nothing else changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.checkpoint_files import checkpoint
from support.known_classes import declare_known
from support.language_stage import Solo, work
from support.layer_progress import prefilled_and_told
from support.stage_driver import OUTPUTS, Driver, generated, processed
from trinity.core.messages import Prefill
from trinity.stages import batch
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.kernels import decoder_layers
from trinity.stages.kernels.decoder_layers import drop_unused_layers, skip_unsampled_rows
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.models import load_model, loader
from trinity.testing.checkpoints import ARCHITECTURES

TEXT_ONLY = ("llama", "mistral")
SOON = ("llava", "qwen3_vl", "gemma3", "mistral")  # further features, groups that see ahead, windows
CUT = [name for name in ARCHITECTURES if "llava" in name and name != "llava_onevision"]  # states before the last layer


class Counting(TorchAttention):
    """How many rows went through each half of the last layer, and how many through both at once."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.rows = last, {"write": 0, "read": 0, "both": 0}

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        before = self.rows["write"]
        seen = super().attend(rows, cache, qkv, params)
        self.rows["write"] = before  # its own
        self.rows["both"] += len(qkv[0]) if params.layer == self.last else 0
        return seen

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        self.rows["write"] += len(key)
        super().write(rows, cache, key, value, layer)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        self.rows["read"] += len(query)
        return super().read(rows, cache, query, params)


def counting(solo: Solo) -> Counting:
    found = Counting(solo.pool.memory.shape.shape[0] - 1)
    solo.stage._backend = found
    return found


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows are not sampled: tiny prompts come in chunks of seven."""
    monkeypatch.setattr(batch, "LEAST_UNSAMPLED_ROWS", 1)


# ---------------------------------------------------------------- the language part


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("name", "split"),
    [
        pytest.param(name, split, marks=() if name in SOON and not split else pytest.mark.slow)
        for name in ARCHITECTURES
        for split in (True, False)
    ],
)
def test_equals_generate(name: str, split: bool) -> None:
    """Chunks that end no prompt, chunks that do, and decodes of others in the same batch."""
    counts = (0,) if name in TEXT_ONLY else (0, 1)
    driver = Driver(name, split=split)
    driver.add(*(processed(name, count) for count in counts))
    served = driver.run()
    for count in counts:
        expected, found = generated(name, count), served[f"{count} images"]
        assert found.tokens == expected.ids
        logits = torch.stack([found.logits[index] for index in range(OUTPUTS)])
        assert (logits - expected.logits).abs().max() < 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_known_text_model_has_it(name: str) -> None:
    model = load_model(checkpoint(name), "P", dtype="float32")
    layers = model.adapter.language(model.language).layers
    assert [isinstance(each, decoder_layers.TwoPassLayer) for each in layers] == [False] * (len(layers) - 1) + [True]


def test_rows_of_the_last_layer_that_nobody_samples_are_only_written() -> None:
    solo = Solo()
    counted = counting(solo)
    solo.open(work())
    solo.step(Prefill("a", 0, 36, False))
    assert counted.rows == {"write": 36, "read": 0, "both": 0}
    solo.step(Prefill("a", 36, 1, True))
    assert counted.rows == {"write": 36, "read": 0, "both": 1}, "too few rows to be worth it"
    solo.open(work("b"))
    solo.step(Prefill("b", 0, 37, True), decodes=("a",))
    assert counted.rows == {"write": 74, "read": 2, "both": 1}, "what is sampled of b, and the row of a"
    solo.step(decodes=("a", "b"))
    assert counted.rows == {"write": 74, "read": 2, "both": 3}


def test_logits_are_those_of_the_whole_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for unseen in (1, 1 << 30):
        monkeypatch.setattr(batch, "LEAST_UNSAMPLED_ROWS", unseen)
        solo = Solo()
        counted = counting(solo)
        solo.serve(work(), 4)
        found[unseen] = solo.seen
        assert bool(counted.rows["read"]) == (unseen == 1)
    for place, wanted in found[1 << 30].items():
        torch.testing.assert_close(found[1][place], wanted, atol=1e-5, rtol=1e-5)


def test_blocks_are_told_of_once_and_not_written_again() -> None:
    solo = Solo(letters="P")
    counted = counting(solo)
    prefilled_and_told(solo)
    assert counted.rows["read"] == 1


class Whole:
    """A backend of somebody's own, which can only do both halves at once."""

    def __init__(self) -> None:
        self.inner_one = TorchAttention()

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        return self.inner_one.attend(rows, cache, qkv, params)


@pytest.mark.usefixtures("always")
def test_a_backend_that_knows_no_halves_runs_the_whole_layer() -> None:
    assert Solo(backend=Whole()).serve(work(), 6) == Solo().serve(work(), 6)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("odd", [{"cache_position": torch.ones(37)}, {"position_ids": torch.ones(1, 5)}])
def test_a_layer_that_is_given_more_than_is_known_runs_whole(odd: dict[str, Tensor]) -> None:
    solo = Solo()
    layer = solo.model.adapter.language(solo.model.language).layers[-1]
    counted, own = counting(solo), type(layer)
    solo.open(work())

    class More(own):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Tensor, **named: Any) -> Any:
            return super().forward(hidden_states, **named | odd)

    layer.__class__ = More
    try:
        solo.fill(work())
    finally:
        layer.__class__ = own
    assert counted.rows == {"write": 0, "read": 0, "both": 37}


def test_what_is_not_a_known_text_model_is_left_alone() -> None:
    model = load_model(checkpoint("llama"), "P", dtype="float32").adapter.language(
        load_model(checkpoint("llama"), "P", dtype="float32").language
    )
    kind = type(model.layers[-1]).__mro__[2]
    plain = copy.deepcopy(model)
    plain.layers[-1].__class__ = kind
    assert not skip_unsampled_rows(nn.Module(), 0), "no layers"
    assert not skip_unsampled_rows(plain, len(plain.layers)), "something is added behind the last layer"
    for spoil in (lambda: delattr(plain.layers[-1], "self_attn"), lambda: plain.layers.append(nn.Identity())):
        spoil()
        assert not skip_unsampled_rows(plain, 0)
    assert type(plain.layers[1]) is kind


# ---------------------------------------------------------------- the encoder


def features(directory: Path) -> Tensor:
    model = load_model(directory, "E", dtype="float32")
    made = processed(directory.name, 1)
    return torch.cat(model.encode("image", made.inputs, [span.tokens for span in made.work.media]))


@pytest.mark.parametrize("name", CUT)
def test_features_are_those_of_the_whole_encoder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(name)
    monkeypatch.setattr(loader, "_parts", {})  # what a test before has loaded may run by other kernels
    found = features(directory)
    monkeypatch.setattr(loader, "_parts", {})
    monkeypatch.setattr(loader, "drop_unused_layers", lambda tower, taken: 0)
    assert torch.equal(found, features(directory))


@pytest.mark.parametrize("name", CUT)
def test_layers_left_out_hold_no_weights(name: str) -> None:
    model = load_model(checkpoint(name), "E", dtype="float32")
    tower = model.vision.base_model.vision_tower
    passing = [each for each in tower.modules() if isinstance(each, decoder_layers._Identity)]
    assert len(passing) == 1
    assert not list(passing[0].parameters())


class Tower(nn.Module):
    def __init__(self, lists: int = 1) -> None:
        super().__init__()
        self.config = type("Config", (), {"num_hidden_layers": 4})()
        for number in range(lists):
            setattr(self, f"layers{number}", nn.ModuleList(nn.Linear(3, 3) for _ in range(4)))

    def forward(self, rows: Tensor) -> list[Tensor]:
        states = [rows]
        for layer in self.layers0:  # type: ignore[union-attr]
            states.append(layer(states[-1]))
        return states


@pytest.mark.parametrize(
    ("taken", "out"), [(-1, 0), (-2, 1), (3, 1), (4, 0), ([1, -3], 2), ([0, -4], 3), (0, 0), ([-2, -1], 0)]
)
def test_layers_behind_the_states_that_are_taken(
    taken: int | list[int], out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_known(monkeypatch, LayerPart.TOWER, Tower)
    tower: Any = Tower()
    rows = torch.randn(2, 3)
    assert drop_unused_layers(tower, taken) == out
    alike = [torch.equal(layer(rows), rows) for layer in tower.layers0]
    assert alike == [False] * (4 - out) + [True] * out


def test_a_tower_of_an_unknown_form_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drop_unused_layers(Tower(), -2) == 0, "never read"
    declare_known(monkeypatch, LayerPart.TOWER, Tower)
    assert drop_unused_layers(Tower(), -2) == 1
    assert drop_unused_layers(Tower(lists=2), -2) == 0
    assert drop_unused_layers(Tower(lists=0), -2) == 0
