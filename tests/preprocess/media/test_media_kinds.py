"""The registry of media kinds: a kind that a program registers is read, counted, bounded and put into the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest
import torch

from support.checkpoint_files import checkpoint
from trinity.errors import BadMedia, ConfigError
from trinity.preprocess.media import media_kinds
from trinity.preprocess.media.media_kinds import (
    LoadedProcessor,
    MediaItem,
    MediaKind,
    ModelFiles,
    Placeholder,
    find_kind,
    kind_names,
    list_kinds,
    part_keys,
    register_media_kind,
)
from trinity.preprocess.media_limits import Estimate, MediaBudget, MediaLimits, MediaProblem
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request


class _ThermalReader:
    """Makes of n numbers n rows, each by its own placeholder."""

    fingerprint = "thermal-1"

    def __init__(self, token: str) -> None:
        self._token = token

    def make_plain(self, source: Any, among: int, budget: MediaBudget) -> Any:
        return source

    def read_source(self, source: Any, among: int, budget: MediaBudget) -> MediaItem:
        if not isinstance(source, list):
            raise MediaProblem("is no list of numbers")
        budget.charge(Estimate(0, 4 * len(source), len(source)))
        values = torch.tensor([source])
        return MediaItem("thermal", self._token * len(source), len(source), {"values": values}, repr(source), {})

    def number_expansion(self, expansion: str, index: int) -> str:
        return expansion

    def make_synthetic(self, tokens: int | None) -> MediaItem:
        return self.read_source([0.0] * (tokens or 1), 1, MediaBudget(MediaLimits(), 1 << 20))


class _Thermal(MediaKind):
    name = "thermal"
    parts: ClassVar = {"heat_map": ("heat",)}
    count_limit = "max_images"

    def find_placeholder(self, files: ModelFiles) -> Placeholder | None:
        return Placeholder(token=files.processor.image_token, marker=f"[{files.processor.image_token}]")

    def open_reader(self, loaded: LoadedProcessor, limits: MediaLimits) -> _ThermalReader:
        return _ThermalReader(loaded.placeholders["thermal"].token)


@pytest.fixture
def thermal() -> Iterator[None]:
    register_media_kind(_Thermal())
    yield
    del media_kinds._registered["thermal"]
    part_keys.cache_clear()


def test_the_kinds_of_transformers_come_first_and_in_its_order(thermal: None) -> None:
    assert kind_names() == ("image", "video", "audio", "thermal")
    assert next(iter(list_kinds())).name == "image"
    assert isinstance(find_kind("thermal"), _Thermal)
    assert find_kind("smell") is None


@pytest.mark.parametrize("number", [1, 3])
def test_a_registered_kind_is_counted_and_placed(thermal: None, number: int) -> None:
    processor = RequestProcessor(checkpoint("llava"))
    maps = [[1.0, 2.0, 3.0], [4.0, 5.0], [6.0]][:number]
    asked = "".join(f"see <thermal> {at} " for at in range(number))
    done = processor.process(Request(asked, media=[Media("thermal", each) for each in maps]))
    assert [(span.kind, span.tokens) for span in done.work.media] == [("thermal", len(each)) for each in maps]
    assert [each["values"].tolist() for each in done.inputs] == [[each] for each in maps]
    rows = [at for at, token in enumerate(done.work.prompt) if token in processor.media_token_ids]
    assert rows == [at for span in done.work.media for at in range(span.offset, span.end)]
    assert processor.media_kinds == {"image", "thermal"}


def test_its_content_parts_are_read_beside_images(thermal: None) -> None:
    processor = RequestProcessor(checkpoint("llava"))
    content = [{"type": "heat_map", "heat": [7.0]}, {"type": "thermal", "thermal": [1.0]}]
    chat = [{"role": "user", "content": content}]
    with pytest.raises(BadMedia, match="numbers must be equal"):  # this template writes no marker of that kind
        processor.process(Request(messages=chat))


def test_its_limits_and_its_own_refusals_name_the_item(thermal: None) -> None:
    processor = RequestProcessor(checkpoint("llava"), limits=MediaLimits(max_images=2, max_processed_bytes=8))
    for media, problem in (
        ([[1.0]] * 3, "3 thermals given, but the limit max_images is 2"),
        (["cold"], "thermal 1 of 1 .*: is no list of numbers"),
        ([[1.0], [2.0, 3.0]], "thermal 2 of 2: needs 8 bytes .* max_processed_bytes is 8"),
    ):
        asked = Request("<thermal>" * len(media), media=[Media("thermal", each) for each in media])
        with pytest.raises(BadMedia, match=problem):
            processor.process(asked)


def test_a_kind_that_nobody_reads_is_refused_by_name() -> None:
    processor = RequestProcessor(checkpoint("llava"))
    with pytest.raises(BadMedia, match="takes no media of kind 'thermal' here; it takes image"):
        processor.process(Request("hello", media=[Media("thermal", [1.0])]))
    assert processor.process(Request("a <thermal> word")).work.media == ()


@pytest.mark.parametrize("given", [object(), _Thermal, type("Bad", (_Thermal,), {"name": "no word"})()])
def test_only_a_named_kind_is_registered(given: Any) -> None:
    with pytest.raises(ConfigError, match="a kind of media is an object of a subclass of MediaKind"):
        register_media_kind(given)


@pytest.mark.parametrize(("value", "problem"), [("_Thermal", ""), ("MediaLimits", "is no MediaKind of that name")])
def test_a_package_names_a_kind_by_an_entry_point(monkeypatch: pytest.MonkeyPatch, value: str, problem: str) -> None:
    point = EntryPoint("thermal", f"{__name__}:{value}", media_kinds.KIND_ENTRY_POINTS)

    def named(group: str, name: str = "thermal") -> list[EntryPoint]:
        return [point] if (group, name) == (media_kinds.KIND_ENTRY_POINTS, "thermal") else []

    monkeypatch.setattr(media_kinds, "entry_points", named)
    caches: tuple[Any, ...] = (media_kinds._named_by_packages, media_kinds._load_kind, part_keys)
    for cache in caches:
        cache.cache_clear()
    try:
        assert kind_names()[-1] == "thermal"
        if problem:
            with pytest.raises(ConfigError, match=problem):
                find_kind("thermal")
        else:
            found = find_kind("thermal")
            assert found is not None
            assert type(found).__name__ == "_Thermal"
            assert part_keys()["heat_map"] == ("thermal", ("heat",))
    finally:
        for cache in caches:
            cache.cache_clear()
