"""Controls: what must change the tokens does. A test of exactness that they pass with could not fail."""

from __future__ import annotations

import pytest

from support.checkpoint_files import checkpoint
from support.recordings import MULTIMODAL, case_of, copy_of, methods_of, served
from support.request_cases import answers, ask, blue, red, waves
from support.thinned import FEW, rarely
from support.wrapped_transports import zero_after_read
from trinity.request import Request
from trinity.testing.checkpoints import ARCHITECTURES
from trinity.testing.oracle import OracleAnswer

MOVES_IMAGES = ("ED+P", "E+P+D", "PD+E")
OUTPUTS = 16
POOLS = {"image": 8, "kv": 64}
MOVES_KV = ("EP+D", "ED+P", "E+P+D", "P+D")


def _cells(methods: tuple[str, ...]) -> list[object]:
    rare = [pytest.mark.slow]
    return [
        pytest.param(
            name,
            method,
            marks=[pytest.mark.xdist_group(name), *(rare if name not in FEW else [])],
            id=f"{name}-{method}",
        )
        for name in ARCHITECTURES
        for method in methods_of(name)
        if method in methods
    ]


@pytest.fixture
def expected(architecture: str) -> dict[str, OracleAnswer]:
    return answers(architecture)  # here, and not on a test's event loop


def _both(architecture: str) -> list[Request]:
    """The first case, and one without an image; a few tokens of each must tell."""
    return [copy_of(waves(architecture)[at][0], 1, max_tokens=OUTPUTS) for at in (0, 1)]


@pytest.mark.parametrize(("architecture", "method"), _cells(MOVES_IMAGES))
async def test_zeroed_image_blocks_change_the_tokens(
    architecture: str, method: str, expected: dict[str, OracleAnswer]
) -> None:
    connector = zero_after_read("image")
    found = await served(checkpoint(architecture), method, [_both(architecture)], connector=connector, pools=POOLS)
    assert connector.reads["image"] == 1
    assert found.tokens("one#1") != expected["one"].token_ids[:OUTPUTS]
    assert found.tokens("text#1") == expected["text"].token_ids[:OUTPUTS]


@pytest.mark.parametrize(("architecture", "method"), _cells(MOVES_KV))
async def test_zeroed_kv_blocks_change_the_tokens(
    architecture: str, method: str, expected: dict[str, OracleAnswer]
) -> None:
    connector = zero_after_read("kv")
    found = await served(checkpoint(architecture), method, [_both(architecture)], connector=connector, pools=POOLS)
    assert connector.reads["kv"] in (2, 3, 4), "two pulls, each of whole blocks and of the last one's rows"
    for request in found.outputs:
        tokens, right = found.tokens(request), expected[case_of(request)].token_ids[:OUTPUTS]
        assert tokens[0] == right[0], "the first token comes from the prefill instance"
        assert tokens != right, request


@pytest.mark.parametrize(
    "architecture", [pytest.param(n, marks=[pytest.mark.xdist_group(n), *rarely(n in FEW)]) for n in MULTIMODAL]
)
def test_the_oracle_tells_another_image_and_no_image_apart(
    architecture: str, expected: dict[str, OracleAnswer]
) -> None:
    assert expected["one"].token_ids != expected["other"].token_ids
    assert waves(architecture)[0][0].prompt == waves(architecture)[2][1].prompt
    assert red().size == blue().size


@pytest.mark.parametrize("architecture", ["llava"])
async def test_images_in_another_order_change_the_tokens(architecture: str, expected: dict[str, OracleAnswer]) -> None:
    """The caches are keyed by content, not by place: the same three images, turned round."""
    three = waves(architecture)[1][1]
    assert three.request_id == "three"
    turned = ask("turned", str(three.prompt), list(reversed(three.images)), 40)
    found = await served(checkpoint(architecture), "E+P+D", [[three], [turned]])
    assert found.tokens("three") == expected["three"].token_ids
    assert found.tokens("turned") != found.tokens("three")
    assert len(found.record.encodes()) == 3


def test_every_method_that_moves_blocks_has_its_control() -> None:
    methods = {method for name in ARCHITECTURES for method in methods_of(name)}
    assert methods - {*MOVES_IMAGES, *MOVES_KV} == {"EPD", "PD"}
