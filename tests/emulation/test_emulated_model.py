"""Emulated models and stages: what travels, what is waited for, and that wrong blocks are seen."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from support.emulated_instances import HEIGHT, IMAGES, MODEL, SHAPE, SOURCE, TARGET, Site, moved, prefilled, work_of
from trinity.core.messages import IMAGE, KV, Open, Step
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import MODELS
from trinity.emulation.content import (
    PLACEHOLDER,
    expected_tokens,
    feature_words,
    identity_words,
    prefix_words,
    prompt_ids,
)
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.emulation.processor import EmulatedProcessor
from trinity.emulation.sleep import EmulatedDevice
from trinity.emulation.stages import build_emulated_stages
from trinity.errors import BadMedia, ConfigError, RequestError, RequestTooLarge, StageError
from trinity.request import Request, Sampling
from trinity.stages.base import Stage
from trinity.traces.trace import TraceImage, TraceRow

# ---------------------------------------------------------------- tokens hang on blocks


def test_tokens_are_those_of_the_content_wherever_it_is() -> None:
    work = work_of()
    site, first = prefilled(work)
    there = moved(work, site, first)
    tokens = [first, *(there.decode() for _ in range(work.max_tokens - 1))]
    assert tokens == expected_tokens(work, HEIGHT, SHAPE.vocabulary)
    assert len(set(tokens)) > 8
    assert tokens != expected_tokens(work_of(contents=("other",)), HEIGHT, SHAPE.vocabulary)
    assert tokens != expected_tokens(work_of(text=10), HEIGHT, SHAPE.vocabulary)


@pytest.mark.parametrize("byte", [0, MODEL.kv_shape(HEIGHT).block_bytes // 2, -1])
def test_one_altered_byte_of_a_migrated_block_is_an_error(byte: int) -> None:
    def spoil(raw: np.ndarray) -> None:
        raw[TARGET[1], byte] ^= 1

    work = work_of()
    with pytest.raises(StageError, match=f"kv block {TARGET[1]} does not hold position"):
        moved(work, *prefilled(work), spoil).decode()


def test_blocks_in_a_wrong_order_are_an_error() -> None:
    def swap(raw: np.ndarray) -> None:
        raw[[TARGET[0], TARGET[1]]] = raw[[TARGET[1], TARGET[0]]]

    work = work_of()
    with pytest.raises(StageError, match=f"kv block {TARGET[0]}.*layer 0"):
        moved(work, *prefilled(work), swap).decode()


def test_a_block_of_another_request_is_an_error() -> None:
    work = work_of()
    site, first = prefilled(work_of(contents=("another image",)))
    with pytest.raises(StageError):
        moved(work, site, first).decode()


def test_a_block_that_goes_wrong_later_gives_a_wrong_token() -> None:
    work = work_of()
    there = moved(work, *prefilled(work))
    right = expected_tokens(work, HEIGHT, SHAPE.vocabulary)
    assert there.decode() == right[1]
    there.raw(KV)[TARGET[2]] = 0
    assert there.decode() != right[2]


@pytest.mark.parametrize("spoil", ["zero", "swap", "missing"])
def test_wrong_image_blocks_are_an_error(spoil: str) -> None:
    work = work_of()
    site = Site("P")
    if spoil != "zero":
        site.encode(work, IMAGES)
    given = {"swap": (tuple(reversed(IMAGES)),), "missing": ((),), "zero": (IMAGES,)}[spoil]
    site.stage.open(Open(work=work, blocks=SOURCE, images=given))
    with pytest.raises(StageError, match="were not given" if spoil == "missing" else "image block . does not hold"):
        site.prefill(work, 0, 4)


def test_cached_keys_and_values_are_checked_before_they_are_built_upon() -> None:
    work = work_of()
    site, _ = prefilled(work)
    site.stage.close("r")
    site.stage.open(Open(work=work, blocks=SOURCE, images=((),), cached=8))
    assert site.prefill(work, 8, len(work.prompt)) == expected_tokens(work, HEIGHT, SHAPE.vocabulary)[:1]
    site.stage.close("r")
    site.raw(KV)[SOURCE[0], 0] ^= 1
    site.stage.open(Open(work=work, blocks=SOURCE, images=((),), cached=8))
    with pytest.raises(StageError, match="position 0"):
        site.prefill(work, 8, len(work.prompt))


def test_a_failed_step_can_be_repeated() -> None:
    work = work_of()
    there = moved(work, *prefilled(work))
    right = expected_tokens(work, HEIGHT, SHAPE.vocabulary)
    with pytest.raises(StageError, match="not opened"):
        there.stage.forward(Step(1, "joint", decodes=("r", "unknown")))
    assert [there.decode(), there.decode()] == right[1:3]
    with pytest.raises(StageError, match="opened twice"):
        there.stage.open(Open(work=work, blocks=TARGET))
    there.stage.close("r")
    there.stage.close("r")


def test_a_stage_is_a_stage_and_features_must_fit() -> None:
    site = Site("EPD")
    assert isinstance(site.stage, Stage)
    with pytest.raises(StageError, match="6 rows do not fit 1 blocks of 4"):
        site.encode(work_of(), (0,))
    lanes = build_emulated_stages(MODEL, "EPD", ("vision", "language"), site.memory)
    assert [stage.letters for stage in lanes] == ["E", "PD"]


def test_content_is_a_function_of_the_prefix() -> None:
    one, two = (identity_words(work_of(text=each)) for each in (5, 9))
    longer = prefix_words(two)[1]
    assert list(prefix_words(one)[1]) == list(longer[: len(one)])
    changed = two.copy()
    changed[3] += np.uint64(1)
    assert [bool(same) for same in prefix_words(changed)[1] == longer].index(False) == 3
    assert not (prefix_words(changed)[1][3:] == longer[3:]).any()
    assert prompt_ids("a", 4, 100) == prompt_ids("a", 9, 100)[:4] != prompt_ids("b", 4, 100)
    assert len(set(feature_words("cat", 50)) | set(feature_words("dog", 50))) == 100


# ---------------------------------------------------------------- time


def test_a_step_takes_as_long_as_the_cost_model_says_and_writes_at_its_end() -> None:
    site = Site("E", msgspec.structs.replace(MODEL, cost=LinearCost(media_s=0.02)))
    seen: list[bool] = []
    watching = threading.Timer(0.03, lambda: seen.append(bool(site.raw(IMAGE).any())))
    watching.start()
    begun = time.perf_counter()
    site.encode(work_of(), IMAGES)
    assert time.perf_counter() - begun >= 6 * 0.02
    assert site.stage.remarks["late us"] >= 0
    watching.join()
    assert seen == [False], "the features were there long before the work was done"
    assert site.raw(IMAGE).any()


def test_lanes_that_are_busy_together_slow_each_other_down() -> None:
    pace = EmulatedDevice(interference=2.0)
    took: dict[str, float] = {}

    def run(name: str, seconds: float) -> None:
        begun = time.perf_counter()
        with pace.work(seconds) as work:
            assert work.reach(seconds / 2) >= 0
            assert work.reach() >= 0
        took[name] = time.perf_counter() - begun

    lanes = [threading.Thread(target=run, args=each) for each in (("vision", 0.3), ("language", 0.1))]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join()
    assert took["language"] >= 0.1
    assert sum(took.values()) >= 0.5, "0.3 + 0.1 alone; 0.4 + 0.2 where they ran side by side"
    run("alone", 0.0)
    assert not pace._active


# ---------------------------------------------------------------- the model


def test_payload_is_divided_by_what_is_printed() -> None:
    full = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(), scale=1)
    assert full.kv_shape(16).block_bytes == 32 * 2 * 32 * 16 * 128 * 2
    assert msgspec.structs.replace(full, scale=512).kv_shape(16).block_bytes * 512 == full.kv_shape(16).block_bytes
    image, scaled = full.image_shape(576), msgspec.structs.replace(full, scale=512).image_shape(576)
    assert image is not None
    assert scaled is not None
    assert image.block_bytes == 576 * 4096 * 2 == 512 * scaled.block_bytes
    least = msgspec.structs.replace(full, scale=1e9)
    assert (least.words(KV), least.factor(KV), least.factor(IMAGE)) == (1, 2048.0, 1024.0)
    assert "emulation of llava-1.5-7b (stages wait: costs as given; payload image 1/1024, kv 1/2048)" in str(least)


def test_a_step_costs_by_what_its_rows_look_back_on() -> None:
    asked: list[dict[str, Any]] = []

    class Cost(LinearCost, frozen=True):
        def at(self, *counts: int, **back: Any) -> float:
            asked.append({"counts": counts, **back})
            return 0.0

    site = Site("PD", msgspec.structs.replace(MODEL, cost=Cost()))
    work = work_of(text=9, images=())
    site.stage.open(Open(work=work, blocks=SOURCE))
    site.prefill(work, 0, 4)
    site.prefill(work, 4, 9)
    site.decode()
    assert asked[:2] == [
        {"counts": (0, 4, 0), "context": 0, "prefilled": 0, "prefills": 1},
        {"counts": (0, 5, 0), "context": 0, "prefilled": 4, "prefills": 1},
    ]
    assert asked[2] == {"counts": (1, 0, 0), "context": 10, "prefilled": 0, "prefills": 0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearCost(step_s=-1.0),
        lambda: LinearCost(media_s=math.nan),
        lambda: EmulatedModel(shape=SHAPE, cost=LinearCost(), scale=0.5),
        lambda: EmulatedModel(shape=SHAPE, cost=LinearCost(), interference=0.9),
        lambda: EmulatedShape(name="flat", layers=0, kv_heads=1, head_dim=1),
        lambda: EmulatedShape(name="few", layers=1, kv_heads=1, head_dim=1, vocabulary=9),
    ],
)
def test_a_model_without_meaning_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_visual_tokens_follow_the_models_rule() -> None:
    assert LLAVA_15_7B.visual_tokens(4000, 30) == 576
    tiled = msgspec.structs.replace(SHAPE, image_pixels=28, image_tokens=1000)
    assert [tiled.visual_tokens(*size) for size in ((28, 28), (29, 57), (9000, 9000))] == [1, 6, 1000]


# ---------------------------------------------------------------- requests


def test_counts_become_work() -> None:
    work = work_of(text=5, images=(6, 2), tokens=7, contents=("cat", "dog"), sampling=Sampling(stop_token_ids=(9,)))
    assert (len(work.prompt), work.max_tokens, work.stop_ids) == (13, 7, frozenset({9}))
    assert [(span.offset, span.length, span.tokens, span.content) for span in work.media] == [
        (0, 6, 6, "cat:6"),
        (6, 2, 2, "dog:2"),
    ]
    processed = EmulatedProcessor(MODEL).process(EmulatedRequest(text_tokens=4000, max_tokens=500))
    assert (processed.clipped, processed.emulated, processed.work.max_tokens) == (True, True, 96)


def test_a_row_of_a_trace_becomes_a_request() -> None:
    row = TraceRow(timestamp=0, input_length=30, output_length=4, images=[TraceImage(tokens=6, content="cat")])
    request = EmulatedRequest.of(row)
    assert (request.text_tokens, request.image_tokens, request.contents, request.max_tokens) == (24, (6,), ("cat",), 4)
    assert EmulatedRequest.of(TraceRow(timestamp=0, input_length=0, output_length=0), 3).max_tokens == 1
    assert EmulatedRequest.of(row, 3, "again/").contents == ("again/cat",)
    sized = [TraceImage(width=56, height=28), TraceImage()]
    row = TraceRow(timestamp=0, input_length=30, text_length=11, output_length=4, images=sized, session="s")
    request = EmulatedRequest.of(row, 3)
    assert (request.text_tokens, request.image_tokens, request.session) == (11, ((56, 28), (1, 1)), "s")
    assert request.contents == ("3.0", "3.1")
    spans = EmulatedProcessor(MODEL).process(request).work.media
    assert [(span.width, span.height, span.tokens) for span in spans] == [(56, 28, 6), (1, 1, 6)]


def test_a_models_tiles_are_those_of_its_rule() -> None:
    found = {name: EmulatedShape.of(shape).tile_tokens for name, shape in MODELS.items()}
    assert {name: tile for name, tile in found.items() if tile} == {
        name: 64 if name.startswith("minicpm") else 256 for name in found if name.startswith(("minicpm", "internvl"))
    }
    assert len({*found.values()}) == 3, "and of others none"


def test_an_image_of_several_tiles_is_cut_into_strips() -> None:
    model = msgspec.structs.replace(MODEL, shape=msgspec.structs.replace(SHAPE, tile_tokens=4))
    asked = EmulatedRequest(image_tokens=(18, 4, 5), contents=("cat", "dog", "owl"))

    def spans(strips: int) -> list[tuple[int, int, str, int]]:
        media = EmulatedProcessor(model, strips=strips).process(asked).work.media
        return [(span.offset, span.tokens, span.content, span.strip) for span in media]

    assert spans(1) == [(0, 18, "cat:18", 0), (18, 4, "dog:4", 0), (22, 5, "owl:5", 0)]
    assert spans(3) == [
        (0, 4, "cat:18/0-1", 0),
        (4, 8, "cat:18/1-3", 1),
        (12, 6, "cat:18/3-5", 2),
        (18, 4, "dog:4", 0),
        (22, 4, "owl:5/0-1", 0),
        (26, 1, "owl:5/1-2", 1),
    ]
    assert [each[1] for each in spans(9)[:5]] == [4, 4, 4, 4, 2]
    assert EmulatedProcessor(MODEL, strips=3).process(asked).work.media[0].tokens == 18, "no tiles, no strips"
    with pytest.raises(ConfigError):
        msgspec.structs.replace(SHAPE, tile_tokens=-1).__post_init__()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request("text"), RequestError),
        (EmulatedRequest(text_tokens=0), RequestTooLarge),
        (EmulatedRequest(text_tokens=4096), RequestTooLarge),
        (EmulatedRequest(text_tokens=2, image_tokens=(0,)), BadMedia),
        (EmulatedRequest(text_tokens=2, image_tokens=(6,), contents=("a", "b")), BadMedia),
        (EmulatedRequest(text_tokens=2, images=["cat.jpg"]), BadMedia),
        (EmulatedRequest(text_tokens=2, max_tokens=0), RequestError),
        (EmulatedRequest(text_tokens=2, leading_tokens=3), RequestError),
        (EmulatedRequest(text_tokens=2, leading_tokens=-1), RequestError),
        (EmulatedRequest(text_tokens=2, leading_tokens=1, hash_ids=("a",)), RequestError),
    ],
)
def test_a_bad_request_is_refused(request_: Request, error: type[Exception]) -> None:
    with pytest.raises(error):
        EmulatedProcessor(MODEL).process(request_)


def test_leading_tokens_stand_before_the_images_and_the_rest_behind() -> None:
    request = EmulatedRequest(text_tokens=9, leading_tokens=5, image_tokens=(6, 4), text="t", contents=("a", "b"))
    work = EmulatedProcessor(MODEL).process(request).work
    text = tuple(prompt_ids("t", 9, SHAPE.vocabulary))
    assert work.prompt == (*text[:5], *(PLACEHOLDER,) * 10, *text[5:])
    assert [(span.offset, span.length) for span in work.media] == [(5, 6), (11, 4)]
    plain = EmulatedProcessor(MODEL).process(msgspec.structs.replace(request, leading_tokens=0)).work
    assert plain.prompt == (*(PLACEHOLDER,) * 10, *text)


def test_a_model_of_text_alone_takes_no_images() -> None:
    model = msgspec.structs.replace(MODEL, shape=msgspec.structs.replace(SHAPE, image_width=0))
    assert model.image_shape(4) is None
    assert "image" not in str(model)
    with pytest.raises(BadMedia, match="text alone"):
        EmulatedProcessor(model).process(EmulatedRequest(image_tokens=(6,)))


def test_hash_ids_name_pieces_of_512_tokens_at_their_places_in_the_prompt() -> None:
    one, other = (work_of(600, images=(), hash_ids=("a", name)).prompt for name in "bc")
    assert one[:512] == other[:512] == tuple(prompt_ids("a", 512, SHAPE.vocabulary))
    assert one[512:] == tuple(prompt_ids("b", 88, SHAPE.vocabulary)) != other[512:]
    pictured = work_of(600, hash_ids=("a", "b")).prompt
    assert pictured[6:] == one[6:] + tuple(prompt_ids("b", 94, SHAPE.vocabulary)[88:]), "an image keeps its place"
    assert len(work_of(9, hash_ids=("a", "b")).prompt) == 15, "as long as the counts say"
    assert work_of(600, images=(), hash_ids=("a",)).prompt == (*one[:512], *prompt_ids("r", 88, SHAPE.vocabulary))


@pytest.mark.parametrize("visual", [512, 513, 1030])
def test_pieces_that_images_cover_are_left_out(visual: int) -> None:
    shape = msgspec.structs.replace(SHAPE, image_tokens=2000)
    request = EmulatedRequest(text_tokens=40, image_tokens=(visual,), hash_ids=("a", "b", "c"), text="rest")
    prompt = EmulatedProcessor(msgspec.structs.replace(MODEL, shape=shape)).process(request).work.prompt
    pieces = [token for name in "abc" for token in prompt_ids(name, 512, SHAPE.vocabulary)]
    assert prompt[visual:] == tuple(pieces[visual : visual + 40])


def test_a_row_s_hash_ids_are_salted_as_its_images_are() -> None:
    row = TraceRow(timestamp=0, input_length=600, output_length=2, text_length=600, hash_ids=[7, 8])
    assert EmulatedRequest.of(row, salt="x/").hash_ids == ("x/7", "x/8")
    assert EmulatedRequest.of(row).hash_ids == ("7", "8")


def test_a_kv_cache_in_fp8_is_emulated_by_its_bytes_and_refused_by_its_dtype() -> None:
    whole = EmulatedShape(name="half", layers=2, kv_heads=2, head_dim=64)
    rounded = EmulatedShape(name="eighth", layers=2, kv_heads=2, head_dim=64, kv_dtype_bytes=1)
    assert rounded.row_bytes(KV) * 2 == whole.row_bytes(KV)
    assert rounded.row_bytes(IMAGE) == whole.row_bytes(IMAGE)
    with pytest.raises(ConfigError, match="kv_dtype_bytes"):
        EmulatedShape(name="none", layers=1, kv_heads=1, head_dim=1, kv_dtype_bytes=0)
    with pytest.raises(ConfigError, match=r"EmulatedShape\(kv_dtype_bytes=1\)"):
        EmulatedModel(shape=whole, cost=LinearCost()).kv_shape(16, "fp8_e4m3")
