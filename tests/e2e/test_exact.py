"""Every architecture under every method: one pipeline serves all cases at once, exactly as generate() answers.

Each test looks at one promise of what was served; the situations are not left to chance but asserted.
"""

from __future__ import annotations

import pytest

from support.checkpoint_files import checkpoint
from support.recordings import TEXT_ONLY, WHOLE_MEDIA, Served, methods_of, problems, serve
from support.request_cases import BLOCK, BUDGET, answers, names, shared, waves
from support.thinned import rarely
from trinity.core.messages import MediaSpan
from trinity.core.scheduler import BatchRules
from trinity.testing.checkpoints import ARCHITECTURES

RULES = BatchRules(token_budget=BUDGET, image_budget=60)  # two or three images a step
Cell = tuple[str, str, Served]


def _cells(architectures: tuple[str, ...]) -> list[object]:
    return [
        pytest.param(
            *((name, method),),
            marks=[pytest.mark.xdist_group(name), *rarely((row + column) % 4 == 0)],
            id=f"{name}-{method}",
        )
        for row, name in enumerate(architectures)
        for column, method in enumerate(methods_of(name))
    ]


@pytest.fixture(scope="module", params=_cells(ARCHITECTURES))
def cell(request: pytest.FixtureRequest) -> Cell:
    """(architecture, method, what was served)."""
    name, method = request.param
    answers(name)  # outside of the pipeline's event loop
    pools = {"image": 96, "kv": 256}
    found = serve(checkpoint(name), method, waves(name), rules=RULES, pools=pools, image_block_size=7)
    return name, method, found


def _span(found: Served, request: str) -> MediaSpan:
    return found.works[request].media[0]


def _borders(found: Served, request: str) -> list[int]:
    """Where the prefill chunks of a request ended. Those of "one" are known, for it was alone."""
    return [row.start + row.length for row in found.record.prefills() if row.request == request]


def test_tokens_and_logits_are_those_of_generate(cell: Cell) -> None:
    name, _, found = cell
    assert set(found.outputs) == set(names(name))
    assert problems(found, answers(name)) == {}


def test_outputs_are_long_and_diverse_enough_to_tell(cell: Cell) -> None:
    for request, output in cell[2].outputs.items():
        assert len(output.token_ids) >= 32, request
        assert len(set(output.token_ids)) >= 8, request
        assert output.finish_reason == "length"


def test_chunks_cut_prompts_and_images(cell: Cell) -> None:
    name, _, found = cell
    assert len(_borders(found, "one")) > 1
    if name in TEXT_ONLY:
        return
    spans = [(request, span) for request, work in found.works.items() for span in work.media]
    cut = {request for request, span in spans for at in _borders(found, request) if span.offset < at < span.end}
    if name in WHOLE_MEDIA:
        span = _span(found, "one")
        assert not cut
        assert {span.offset, span.end} & set(_borders(found, "one")), "no chunk was aligned to the image"
    else:
        assert "one" in cut


def test_prefill_and_decode_share_steps(cell: Cell) -> None:
    _, method, found = cell
    kinds = {tuple(bool(rows) for rows in (s.encodes, s.prefills, s.decodes)) for s in found.record.steps()}
    together = any(prefills and decodes for _, prefills, decodes in kinds)
    assert together == ("PD" in method)
    assert any(encodes and decodes for encodes, _, decodes in kinds) == (method in ("EPD", "ED+P"))


def test_an_image_is_encoded_once_whoever_asks(cell: Cell) -> None:
    encodes = cell[2].record.encodes()
    contents = [row.span.content for row in encodes]
    asked = {span.content for work in cell[2].works.values() for span in work.media}
    assert sorted(contents) == sorted(asked)
    assert not {"again", "inside", "longer"} & {row.request for row in encodes}
    assert cell[0] in TEXT_ONLY or max(len(step.encodes) for step in cell[2].record.steps()) > 1


def test_a_repeated_image_does_not_move_again(cell: Cell) -> None:
    name, method, found = cell
    if name in TEXT_ONLY or method in ("EPD", "EP+D"):
        assert not any(found.transfers(request, "image") for request in found.outputs)
        return
    assert [each["outcome"] for each in found.transfers("one", "image")] == ["pulled"]
    for request in ("again", "inside"):
        assert [each["outcome"] for each in found.transfers(request, "image")] == ["cached"], request
    moved = [each for one in ("pair", "twin") for each in found.transfers(one, "image") if each["bytes"]]
    assert moved


def test_a_shared_prefix_is_prefilled_once(cell: Cell) -> None:
    name, _, found = cell
    cached = {request: output.cached_tokens for request, output in found.outputs.items()}
    for request, earlier in {"words": "text", "longer": "three", "inside": "one"}.items():
        if request in cached:
            common = shared(found.works[earlier], found.works[request]) // BLOCK * BLOCK
            assert cached[request] == (_stop(found, request, common) if name in WHOLE_MEDIA else common) > 0, request
            assert all(row.start >= cached[request] for row in found.record.prefills() if row.request == request)
    if name not in TEXT_ONLY:
        span = _span(found, "inside")
        assert cached["longer"] >= found.works["longer"].media[-1].end
        assert span.offset < cached["inside"] < span.end or name in WHOLE_MEDIA


def _stop(found: Served, request: str, position: int) -> int:
    """Where a prefix hit up to ``position`` ends if it must not cut an image."""
    for span in found.works[request].media:
        if span.offset < position < span.end:
            return span.offset // BLOCK * BLOCK
    return position


def test_the_same_text_with_another_image_matches_up_to_the_image_alone(cell: Cell) -> None:
    name, _, found = cell
    if name in TEXT_ONLY:
        return
    one, other = found.works["one"], found.works["other"]
    assert one.prompt == other.prompt
    assert found.outputs["other"].cached_tokens == one.media[0].offset // BLOCK * BLOCK
    assert found.tokens("one") != found.tokens("other")


def test_decode_instances_pull_only_what_they_lack(cell: Cell) -> None:
    _, method, found = cell
    for request, work in found.works.items():
        kv = found.transfers(request, "kv")
        if "PD" in method:
            assert kv == []
            continue
        assert len(kv) == 1
        whole = -(-len(work.prompt) // BLOCK)
        assert kv[0]["blocks"] < whole if request in ("longer", "words", "inside") else kv[0]["blocks"] <= whole


def test_text_never_touches_an_encode_instance(cell: Cell) -> None:
    _, method, found = cell
    assert found.outputs["text"].route[0].rstrip("0") == next(roles for roles in method.split("+") if "P" in roles)
