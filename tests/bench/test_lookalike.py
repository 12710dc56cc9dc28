"""Lookalikes: requests with the token counts and image sizes of a trace's rows, for real processors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from support.checkpoint_files import checkpoint
from trinity.bench.live_replay import replay
from trinity.bench.lookalike import Lookalikes, draw_jpeg
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.preprocess.processor import RequestProcessor
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow


@pytest.fixture(scope="module", params=["llava", "qwen2_vl", "llama"])
def processor(request: pytest.FixtureRequest) -> Iterator[RequestProcessor]:
    made = RequestProcessor(checkpoint(request.param))
    yield made
    made.close()


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def seeing(request: pytest.FixtureRequest) -> Iterator[RequestProcessor]:
    made = RequestProcessor(checkpoint(request.param))
    yield made
    made.close()


def row(text: int = 40, *images: TraceImage, output: int = 5) -> TraceRow:
    visual = sum(image.tokens or 0 for image in images)
    return TraceRow(
        timestamp=0,
        input_length=text + visual,
        text_length=text,
        output_length=output,
        images=list(images),
        session="talk",
    )


@pytest.mark.parametrize("text", [12, 37, 100])
def test_a_prompt_has_the_rows_tokens(processor: RequestProcessor, text: int) -> None:
    request = Lookalikes(processor)(row(text), 0)
    work = processor.process(request).work
    assert len(work.prompt) == text
    assert (work.max_tokens, request.session, request.sampling.ignore_eos) == (5, "talk", True)


def test_images_have_the_rows_pixels_and_text_its_tokens_beside_them(seeing: RequestProcessor) -> None:
    make = Lookalikes(seeing)
    for count in (1, 2):
        sizes = [(60, 40), (84, 112)][:count]
        asked = row(50, *(TraceImage(width=width, height=height) for width, height in sizes))
        work = seeing.process(make(asked, count)).work
        assert [(span.width, span.height) for span in work.media] == sizes
        assert len(work.prompt) - sum(span.tokens for span in work.media) == 50


def test_an_image_known_by_its_tokens_gets_a_size(seeing: RequestProcessor) -> None:
    span, _ = seeing.dummy_inputs(12)
    work = seeing.process(Lookalikes(seeing)(row(40, TraceImage(tokens=span.tokens)), 0)).work
    assert [each.tokens for each in work.media] == [span.tokens]


def test_contents_are_equal_where_the_trace_says_so(seeing: RequestProcessor) -> None:
    cat, nameless = TraceImage(width=56, height=56, content="cat"), TraceImage(width=56, height=56)

    def contents(make: Lookalikes, image: TraceImage) -> list[str]:
        return [seeing.process(make(row(40, image), number)).work.media[0].content for number in (0, 1)]

    one, other = Lookalikes(seeing, "one"), Lookalikes(seeing, "other")
    assert len(set(contents(one, cat))) == 1
    assert len(set(contents(one, nameless))) == 2
    assert contents(Lookalikes(seeing, "one"), cat) == contents(one, cat)
    assert not set(contents(one, cat)) & set(contents(other, cat))


def test_texts_share_no_prefix_and_the_same_seed_gives_the_same(processor: RequestProcessor) -> None:
    make = Lookalikes(processor)
    prompts = [make(row(60), number).prompt for number in range(8)]
    assert len({str(prompt)[:40] for prompt in prompts}) == 8
    assert make(row(60), 3).prompt == prompts[3]


def test_a_row_with_less_text_than_a_prompt_needs_gets_the_least(processor: RequestProcessor) -> None:
    work = processor.process(Lookalikes(processor)(row(0), 0)).work
    assert 1 <= len(work.prompt) < 10


def test_a_picture_has_its_size_and_differs_by_its_seed() -> None:
    made = draw_jpeg("a", 33, 21)
    with Image.open(io.BytesIO(made)) as image:
        assert (image.size, image.mode) == ((33, 21), "RGB")
    assert draw_jpeg("a", 33, 21) == made != draw_jpeg("b", 33, 21)


async def test_a_real_pipeline_replays_and_writes_every_field_of_its_trace(tmp_path: Path) -> None:
    image = TraceImage(width=60, height=40)
    asked = Trace(
        TraceRow(
            timestamp=20.0 * n, input_length=70, text_length=30, output_length=4, images=[image] * (n % 2), session="s"
        )
        for n in range(4)
    )
    pools = {"image": 8, "kv": 64}
    async with Pipeline(
        checkpoint("llava"),
        "1E1P1D",
        dtype="float32",
        cache=CacheConfig(pools=pools, image_block_size=64),
    ) as pipe:
        served = await replay(pipe, asked, late_s=1e9)
        pipe.trace.save(tmp_path / "trace.jsonl")
    assert [each.finish_reason for each in served] == ["length"] * 4
    assert [each.text_length for each in served] == [30] * 4
    assert [len(each.images) for each in served] == [0, 1, 0, 1]
    assert served.attainment(SLO(ttft=60.0, tbt=60.0)) == 1.0
    loaded = Trace.load(tmp_path / "trace.jsonl")
    assert [(each.session, each.max_tokens, each.text_length) for each in loaded] == [("s", 4, 30)] * 4
    written = next(each.images[0] for each in loaded if each.images)
    assert (written.width, written.height) == (60, 40)
    assert written.tokens
    assert written.content
