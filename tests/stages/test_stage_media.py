"""Media in the stages: features land in their rows, are read from there, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from support.stage_driver import Driver, generated, processed
from trinity.core.messages import Encode, Open, Prefill, Step
from trinity.errors import StageError, UnsupportedModel
from trinity.stages.encode import EncodeStage


def encode(driver: Driver, item: Encode) -> None:
    assert driver.encode is not None
    assert driver.encode.forward(Step(0, "joint", encodes=(item,))) == {}


def opened_with(driver: Driver, **changes: Any) -> Open:
    made = processed("llava", 1)
    asked = msgspec.structs.replace(made.work, **changes)
    images = ((0,) * 4,)
    return Open(work=asked, blocks=driver.kv[0].take(8), images=images)


def test_media_that_do_not_fit_their_placeholders() -> None:
    driver, made = Driver("llava"), processed("llava", 1)
    span = msgspec.structs.replace(made.work.media[0], tokens=made.work.media[0].tokens + 1)
    with pytest.raises(StageError, match=r"media item 0 has 17 feature rows for 16 placeholders"):
        driver.prefill.open(opened_with(driver, media=(span,)))


def test_memory_is_given_back_behind_an_encode_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("trinity.stages.encode.release_at_times", lambda: asked.append(1))
    driver, made = Driver("llava"), processed("llava", 1)
    assert driver.encode is not None
    driver.encode.forward(Step(0, "joint"))
    assert not asked
    encode(driver, Encode(made.work.request, 0, made.work.media[0], (0, 1, 2, 3), made.inputs[0]))
    assert asked == [1]


def test_features_may_be_missing_only_where_cached_kv_covers_them() -> None:
    driver, made = Driver("llava"), processed("llava", 1)
    span = made.work.media[0]
    driver.prefill.open(Open(work=made.work, blocks=driver.kv[0].take(8), images=((),)))
    with pytest.raises(StageError, match="needs features that were not given"):
        driver.prefill.forward(Step(0, "joint", prefills=(Prefill(made.work.request, 0, span.offset + 1, False),)))
    for start, end in ((0, span.offset), (span.end, len(made.work.prompt))):
        asked = Prefill(made.work.request, start, end - start, False)
        assert driver.prefill.forward(Step(0, "joint", prefills=(asked,))) == {}


def test_gemma3_images_are_never_cut() -> None:
    driver, made = Driver("gemma3"), processed("gemma3", 1)
    span = made.work.media[0]
    driver.add(made)
    for start, end in ((0, span.end - 2), (span.offset + 3, span.end)):
        asked = Prefill(made.work.request, start, end - start, False)
        with pytest.raises(StageError, match="cuts the media item around position"):
            driver.prefill.forward(Step(0, "joint", prefills=(asked,)))
    assert driver.run()[made.work.request].tokens == generated("gemma3", 1).ids


def test_images_of_one_chunk_see_only_themselves_in_both_directions() -> None:
    driver = Driver("gemma3", chunk=1000)
    driver.add(processed("gemma3", 3))
    found = driver.run()["3 images"]
    assert len(driver.served) == 1
    assert found.tokens == generated("gemma3", 3).ids
    assert (found.logits[0] - generated("gemma3", 3).logits[0]).abs().max() < 1e-4


def test_placeholders_are_never_looked_up() -> None:
    """Their ids may lie beyond the embedding's rows (Gemma 3's first release)."""
    driver, made = Driver("llava"), processed("llava", 1)
    driver.add(made)
    row = driver.prefill._requests.find(made.work.request)
    chunk = row.chunk(Prefill(made.work.request, 0, len(made.work.prompt), True))
    assert set(np.flatnonzero(chunk.ids != np.array(made.work.prompt))) == set(chunk.feature_at)
    assert not chunk.ids[chunk.feature_at].any()


@pytest.mark.parametrize("rows", [1, 4, 9, 576])
def test_image_blocks_of_any_size(rows: int) -> None:
    driver = Driver("llava", image_rows=rows)
    driver.add(processed("llava", 3))
    assert driver.run()["3 images"].tokens == generated("llava", 3).ids


def test_encoding_writes_its_own_rows_and_no_others() -> None:
    driver, made = Driver("llava", image_rows=6), processed("llava", 1)
    memory, blocks = driver.image[0].memory, (7, 3, 11)
    encode(driver, Encode("a", 0, made.work.media[0], blocks, made.inputs[0]))
    touched = (memory.tensor != 7.0).any(-1)
    assert touched[[7, 3]].all()
    assert touched[11].tolist() == [True] * 4 + [False] * 2, "16 rows: the last block is partly filled"
    assert touched.sum() == 16


def test_encoding_refuses_what_does_not_fit() -> None:
    driver, made = Driver("llava", image_rows=4), processed("llava", 1)
    span = made.work.media[0]
    with pytest.raises(StageError, match="16 feature rows do not fit 2 blocks of 4"):
        encode(driver, Encode("a", 0, span, (1, 2), made.inputs[0]))
    short = msgspec.structs.replace(span, tokens=15)
    with pytest.raises(StageError, match="16 image features for 15 placeholders"):
        encode(driver, Encode("a", 0, short, (1, 2, 3), made.inputs[0]))


def test_a_kind_that_the_model_does_not_take() -> None:
    driver, made = Driver("llava"), processed("llava", 1)
    audio = msgspec.structs.replace(made.work.media[0], kind="audio")
    with pytest.raises(UnsupportedModel, match="has no get_audio_features"):
        encode(driver, Encode("a", 0, audio, (1, 2), made.inputs[0]))


def test_an_encode_stage_keeps_nothing() -> None:
    driver, made = Driver("llava"), processed("llava", 1)
    stage = EncodeStage(driver.e, driver.image[0].memory)
    stage.open(Open(work=made.work, blocks=()))
    stage.close(made.work.request)
    assert stage.forward(Step(0, "joint")) == {}
