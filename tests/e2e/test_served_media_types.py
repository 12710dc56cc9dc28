"""Every multimodal type that serves with images gives, in whole pipelines, the tokens and logits of ``generate()``.

Videos and clips of sound have matrices of their own: ``test_video_serving`` and ``test_audio``. Three families run in
``make test``, in one placement each; the rest is slow.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.any_model.trials import NOT_SERVED
from support.media_matrix import (
    LEAST_LOGIT,
    WITHIN,
    cut_media,
    differences,
    keeps_states,
    known,
    requests,
    serve_type,
    tight_options,
    waves,
)
from support.recordings import METHODS, Served, copy_of
from support.served_media_types import OUTSIDE_OF_THE_MATRIX, SERVED_MEDIA_TYPES
from support.wrapped_transports import zero_after_read
from tools.model_table import PAGE, read_rows

# transformers' own, of arrays that it makes of tensors: numpy 2 asks for another signature
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SOON = {"mistral3": "E+P+D", "glm4v": "EPD", "gemma3": "EP+D"}  # sizes beside pixels, three rotary axes, whole images
COPIES = 2
CUT_FROM = 3  # tokens of an image: what is smaller is cut by chance alone


def _mark(name: str, *rest: Any, soon: bool = False) -> Any:
    marks = [pytest.mark.xdist_group(f"media-{name}"), *([] if soon else [pytest.mark.slow])]
    return pytest.param(name, *rest, marks=marks, id="-".join([name, *map(str, rest)]))


CELLS = [_mark(name, method, soon=SOON.get(name) == method) for name in SERVED_MEDIA_TYPES for method in METHODS]
TYPES = [_mark(name) for name in SERVED_MEDIA_TYPES]


@pytest.mark.parametrize(("model_type", "method"), CELLS)
def test_tokens_and_logits_of_generate(model_type: str, method: str) -> None:
    known(model_type)  # outside of the pipeline's loop
    found = serve_type(model_type, method, waves(model_type))
    assert set(found.outputs) == {request.request_id for request in requests(model_type)}
    assert differences(model_type, found) == {}
    check_situations(found, keeps_states(model_type))


def check_situations(found: Served, states: bool) -> None:
    """Chunks end inside media unless that may not be, and what was there before comes out of the caches."""
    spans = [span for work in found.works.values() for span in work.media]
    whole, cut = any(span.atomic for span in spans), cut_media(found)
    sizes = sorted({span.tokens for span in spans})
    assert not cut if whole else cut or sizes[-1] < CUT_FROM, f"images of {sizes} tokens"
    assert (found.outputs["again"].cached_tokens > 0) is not states
    contents = [row.span.content for row in found.record.encodes()]
    assert sorted(contents) == sorted({span.content for span in spans}), "each image is encoded once"


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("method", ["EPD", "E+P+D"])
def test_preempted_and_computed_again(model_type: str, method: str) -> None:
    alike = [request for request in requests(model_type) if request.request_id in ("one", "other")]
    copies = [[copy_of(request, number) for number in range(COPIES) for request in alike]]
    found = serve_type(model_type, method, copies, **tight_options(model_type))
    assert differences(model_type, found) == {}
    assert sum(output.preemptions for output in found.outputs.values()), "the pools held two, or one at a time"


@pytest.mark.parametrize("model_type", TYPES)
def test_another_image_changes_what_generate_gives(model_type: str) -> None:
    answers, lengths = known(model_type).answers, known(model_type).lengths
    assert lengths["one"] == lengths["other"]
    one, other = (answers[name].logits.clamp(min=LEAST_LOGIT) for name in ("one", "other"))
    allowed = one > LEAST_LOGIT
    one, other = one[allowed], other[allowed]
    assert float((one - other).abs().max()) > 100 * WITHIN * float(one.abs().max())
    assert answers["one"].token_ids == answers["again"].token_ids
    assert len({tuple(each.token_ids) for each in answers.values()}) >= len(answers) - 2


@pytest.mark.parametrize("model_type", TYPES)
def test_zeroed_image_blocks_are_seen(model_type: str) -> None:
    known(model_type)
    connector = zero_after_read("image")
    asked = [[request for request in requests(model_type) if request.request_id in ("one", "text")]]
    found = serve_type(model_type, "E+P+D", asked, connector=connector)
    assert connector.reads["image"] > 0
    assert set(differences(model_type, found)) == {"one"}


def test_the_lists_are_what_the_table_of_models_has() -> None:
    serving = [row for row in read_rows(PAGE.read_text(encoding="utf-8")) if row.outcome != NOT_SERVED]
    assert {row.model_type for row in serving if "image" in row.said} == {*SERVED_MEDIA_TYPES, *OUTSIDE_OF_THE_MATRIX}
