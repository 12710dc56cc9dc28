"""Encoders whose attention is causal where no mask is given: what others send changes nobody's tokens.

Phi-4-multimodal. Its mask is left out where it hides nothing, as of a square image, which fills its crops; one with
padding in the same call has all of them attended in both directions. The other side is transformers alone.
"""

from __future__ import annotations

from functools import cache

import pytest

from support.checkpoint_files import checkpoint
from support.recordings import serve
from support.stage_driver import picture
from trinity.core.scheduler import BatchRules
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.request import Request, Sampling
from trinity.stages.proof import prove
from trinity.testing.oracle import Oracle

SIZES = ((56, 56), (57, 99), (30, 30), (160, 160), (99, 57), (56, 56))
OUTPUTS = 6


def requests() -> list[Request]:
    return [
        Request(
            "<image>what is on the boat",
            images=[picture(seed, *size)],
            max_tokens=OUTPUTS,
            sampling=Sampling(ignore_eos=True),
            request_id=str(seed),
        )
        for seed, size in enumerate(SIZES, 1)
    ]


@cache
def own_tokens() -> dict[str, list[int]]:
    directory = checkpoint("any-phi4_multimodal")
    if find_verdict(directory) is None:
        assert (failed := prove(directory).failed) is None, f"{failed}"
    oracle = Oracle(directory)
    return {str(each.request_id): oracle.answer(each).token_ids for each in requests()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["EPD", pytest.param("E+P+D", marks=pytest.mark.slow)])
def test_images_of_others_in_a_step_change_no_tokens(method: str) -> None:
    own = own_tokens()
    assert len({tuple(each) for each in own.values()}) > 3, "tokens that do not depend on the image show little"
    rules = BatchRules(token_budget=512, image_budget=4096)
    found = serve(
        checkpoint("any-phi4_multimodal"), method, [requests()], rules=rules, pools={"image": 4096, "kv": 2048}
    )
    assert max(len(step.encodes) for step in found.record.steps()) > 1, "no step encodes several"
    assert {name: found.tokens(name) for name in own} == own
