"""Whatever the lanes, rules, caches, pools and placement: the same tokens and logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.recordings import METHODS, Served, copy_of, problems, serve
from support.request_cases import BUDGET, Waves, answers, waves
from support.thinned import thinned
from trinity.core.messages import Step, Stepped
from trinity.core.scheduler import BatchRules
from trinity.instance import Instance

pytestmark = pytest.mark.xdist_group("llava")

SMALL = BatchRules(token_budget=BUDGET)
TIGHT = {"image": 9, "kv": 14}  # of 7 and 16 rows: three images, and the longest request with a few rows beside it
Look = Callable[[Served], None]


class Linear:
    """A cost model without measurement: a second per thousand rows, and one per hundred visual tokens."""

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        return (decodes + prefill_tokens) / 1000 + media_tokens / 100


@dataclass(frozen=True)
class Variant:
    """A pipeline's options over those of the matrix, and what must have happened under them."""

    placement: Any
    look: Look
    options: dict[str, Any] = field(default_factory=dict)
    copies: int = 1

    def serve(self) -> Served:
        answers("llava")
        options = {"rules": SMALL, "pools": {"image": 96, "kv": 256}, "image_block_size": 7, **self.options}
        return serve(checkpoint("llava"), self.placement, copies(self.copies), **options)


def copies(count: int) -> Waves:
    """The cases of the matrix, each asked ``count`` times at once, the later the more urgent."""
    return tuple(
        tuple(copy_of(one, n, deadline_s=100.0 - n - at) for n in range(count) for at, one in enumerate(wave))
        for wave in waves("llava")
    )


def _anything(found: Served) -> None:
    """Equal tokens are all that is asked."""


# ---------------------------------------------------------------- lanes


def lanes_overlap(found: Served) -> None:
    running: set[str] = set()
    both = 0
    for handled in found.record.log:
        if isinstance(handled.event, Stepped) and handled.instance.startswith("E"):
            running.discard(handled.event.lane)
        running |= {each.lane for each in handled.commands if isinstance(each, Step) and each.lane != "joint"}
        both += running == {"vision", "language"}
    assert both, "the vision lane never ran beside the language lane"


# ---------------------------------------------------------------- rules


def never_mixes_decodes(found: Served) -> None:
    assert not any(step.decodes and (step.prefills or step.encodes) for step in found.record.steps())


def prefills_whole(found: Served) -> None:
    for row in found.record.prefills():
        assert row.last
        assert row.start == found.outputs[row.request].cached_tokens


def exceeds_the_media_budget(found: Served) -> None:
    assert max(len(step.encodes) for step in found.record.steps()) >= 3


def one_image_a_step(found: Served) -> None:
    assert max(len(step.encodes) for step in found.record.steps()) == 1


def keeps_the_limit(found: Served) -> None:
    rules = TIMED
    for step in found.record.steps():
        rows = sum(row.length for row in step.prefills)
        seconds = Linear().seconds(len(step.decodes), rows, 0)
        assert seconds <= rules.limit_s or not step.prefills or not step.decodes  # type: ignore[operator]
    assert max(row.length for row in found.record.prefills()) == 9


TIMED = BatchRules(policy="time", cost=Linear(), limit_s=0.009)


# ---------------------------------------------------------------- caches and pools


def nothing_is_shared(found: Served) -> None:
    assert {output.cached_tokens for output in found.outputs.values()} == {0}
    assert {"again#0", "inside#0", "longer#0"} <= {row.request for row in found.record.encodes()}
    assert all(each["outcome"] == "pulled" for output in found.outputs.values() for each in output.transfers)


def evicts(found: Served) -> None:
    assert found.evictions > 0


OFF = {"prefix_cache": False, "image_cache": False}
DUAL = {"lanes": ("vision", "language")}
RULES: dict[str, tuple[BatchRules, Look]] = {
    "prefill_first": (replace(SMALL, policy="prefill_first"), never_mixes_decodes),
    "unchunked": (replace(SMALL, chunked=False), prefills_whole),
    "no_media_budget": (replace(SMALL, limit_encodes=False), exceeds_the_media_budget),
    "one_image": (SMALL, one_image_a_step),
    "sjf": (replace(SMALL, order="sjf"), _anything),
    "deadline": (replace(SMALL, order="deadline"), _anything),
    "time": (TIMED, keeps_the_limit),
    "one_token": (BatchRules(token_budget=1), _anything),
}
INSTANCES = [
    Instance("E", pools={"image": 9}),
    Instance("E", "spare", pools={"image": 96}),
    Instance("P", pools={"image": 12, "kv": 9}, rules=BatchRules(token_budget=31)),
    Instance("PD", pools={"image": 96, "kv": 64}, prefix_cache=False),
    Instance("D", pools={"kv": 20}, rules=BatchRules(token_budget=3)),
    Instance("EPD", pools={"image": 30, "kv": 30}, lanes=("vision", "language"), image_cache=False),
]
VARIANTS: dict[str, Variant] = {
    **{f"lanes-{each}": Variant(each, lanes_overlap, DUAL) for each in ("EPD", "EP+D", "ED+P")},
    **{
        f"{name}-{method}": Variant(method, look, {"rules": rules})
        for name, (rules, look) in RULES.items()
        for method in (METHODS if name in ("unchunked", "prefill_first") else ("EPD", "ED+P", "E+P+D"))
    },
    **{f"uncached-{method}": Variant(method, nothing_is_shared, OFF) for method in METHODS},
    **{f"tight-{method}": Variant(method, evicts, {"pools": TIGHT}, copies=2) for method in METHODS},
    "tight-lanes": Variant("EPD", evicts, {"pools": TIGHT, **DUAL}, copies=2),
    "small-blocks": Variant(
        "E+P+D", _anything, {"image_block_size": 3, "kv_block_size": 5, "pools": {"image": 99, "kv": 256}}
    ),
    "default-blocks": Variant("E+P+D", _anything, {"image_block_size": 576, "rules": None}),
    "default-pools": Variant("E+P+D", _anything, {"pools": None}),
    "random-routing": Variant("2E2P2D", _anything, {"routing": "random"}, copies=2),
    **{
        each: Variant(each, _anything, copies=3)
        for each in ("2E2P2D", "1E3P4D", "2ED1P", "1E1EPD", "3EPD", "2EP2D", "1EP1PD1D")
    },
    "by-hand": Variant(INSTANCES, _anything, copies=3),
}


RARE = ("lanes-EP+D", "lanes-ED+P", "random-routing", "2E2P2D", "1E3P4D", "1E1EPD", "3EPD", "2EP2D")  # by-hand has many


def often(name: str) -> bool:
    """Of the kinds that have a case for each method, those where all moves, and where all is together."""
    kind, _, method = name.partition("-")
    return (
        (name not in RARE and kind not in {*RULES, "uncached", "tight"})
        or method in ("E+P+D", "lanes")
        or name == "tight-EPD"
    )


@pytest.mark.parametrize("name", thinned(VARIANTS, often))
def test_tokens_and_logits_stay_the_same(name: str) -> None:
    variant = VARIANTS[name]
    found = variant.serve()
    assert len(found.outputs) == sum(map(len, waves("llava"))) * variant.copies
    assert problems(found, answers("llava")) == {}
    variant.look(found)
