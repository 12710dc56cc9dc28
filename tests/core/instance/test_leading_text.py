"""Leading text as tables: what is prefilled while features are to come, for whom it makes way, what is left of it."""

from __future__ import annotations

from typing import Any

import pytest

from support.core_tables import (
    Row,
    brief,
    broken,
    done,
    emptied,
    image_offer,
    kv_offer,
    make_core,
    peer_up,
    sent,
    table,
    work,
)
from trinity.core import InstanceCore
from trinity.core.instance.request_state import RequestState
from trinity.core.messages import (
    KV,
    Cancel,
    Commit,
    Fetched,
    Finished,
    Forget,
    Offer,
    Part,
    PeerDown,
    Pulled,
    Ready,
    Release,
    Submit,
    Withdraw,
    Work,
)
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

PULL = "pull o.0 image of r from E0 7 into 0"
LED = ["open r kv 0,1", "step 1 joint: prefill r 0+8"]


def prefiller(name: str = "P0", budget: int = 64, **settings: Any) -> InstanceCore:
    settings.setdefault("rules", BatchRules(token_budget=budget, image_budget=64))
    return make_core(name, peers="E0 D0", **settings)


def asked(count: int = 10, request: str = "r", **fields: Any) -> Work:
    """Text of this many tokens, of which whole blocks of four lead, an image of four rows, and two tokens."""
    return work(request, count, "cat", 2, **fields)


def offered(of: Work, id: str = "o") -> Offer:
    return image_offer(id, of, (7,))


def ready(core: InstanceCore, id: str = "o") -> list[str]:
    """Have the features come and the source commit. Returns what followed."""
    return brief(
        [each for event in (Ready(id, (0,)), Pulled(id, 0), Commit(id, ())) for each in core.handle(event, 0.0)]
    )


def test_text_before_an_image_is_prefilled_while_its_features_are_to_come() -> None:
    core = prefiller()
    rest = ["E0: release o pulled", "open r kv 0,1,2,3 images [0] cached 8", "step 2 joint: prefill r 8+8 last"]
    rows: list[Row] = [
        (offered(asked()), LED),
        (done(1), ["close r"]),
        (Ready("o", (0,)), [PULL]),
        (Pulled("o", 0), []),
        (Commit("o", ()), rest),
        (done(2, r=5), ["frontend: emit r#0=5", "D0: offer P0:1 kv of r [0,1,2,3] by way of E0 P0"]),
    ]
    table(core, rows[:-1])
    told = core.handle(done(2, r=5), 0.0)
    assert sent(told, Commit)[0].cached_tokens == 0, "it has prefilled all of it itself"
    for event in (Release("P0:1", "pulled"), Forget("r")):
        core.handle(event, 0.0)
    emptied(core)


def test_whole_blocks_are_prefilled_in_chunks_that_the_budget_allows() -> None:
    core = prefiller(budget=9)
    rows: list[Row] = [
        (offered(asked(23)), ["open r kv 0,1", "step 1 joint: prefill r 0+8"]),
        (done(1), ["close r", "open r kv 0,1,2,3 cached 8", "step 2 joint: prefill r 8+8"]),
        (done(2), ["close r", "open r kv 0,1,2,3,4 cached 16", "step 3 joint: prefill r 16+4"]),
        (done(3), ["close r"]),
    ]
    table(core, rows)
    assert "open r kv 0,1,2,3,4,5,6,7 images [0] cached 20" in ready(core)


@pytest.mark.parametrize(
    ("of", "settings"),
    [
        (asked(3), {}),
        (work("r", "cat", 9), {}),
        (asked(), {"prefix_cache": False}),
        (asked(), {"rules": BatchRules(leading_text=False)}),
        (asked(), {"rules": BatchRules(chunked=False)}),
        (asked(), {"rules": BatchRules(token_budget=3)}),
    ],
    ids=["less than a block", "image first", "no cache", "off", "whole prompts alone", "no room for a block"],
)
def test_nothing_is_prefilled_ahead(of: Work, settings: dict[str, Any]) -> None:
    core = prefiller(**settings)
    table(core, [(offered(of), [])])
    core.handle(Withdraw("o"), 0.0)
    core.handle(Forget("r"), 0.0)
    emptied(core)


def test_an_encoder_prefills_nothing() -> None:
    core = make_core("E0", peers="P0", rules=BatchRules(image_budget=64))
    assert brief(core.handle(Submit(asked()), 0.0)) == ["step 1 joint: encode r.0 into 0"]


def test_features_alone_need_no_text() -> None:
    core = make_core("EPD0", lanes=("vision", "language"))
    assert brief(core.handle(Submit(asked(encode_only=True)), 0.0)) == ["step 1 vision: encode r.0 into 0"]


# ---------------------------------------------------------------- for whom it makes way


def test_what_is_cached_already_is_not_prefilled() -> None:
    core = prefiller()
    core.handle(Submit(work("first", 9, max_tokens=1)), 0.0)
    core.handle(done(1, first=5), 0.0)
    table(core, [(offered(asked()), [])])
    assert any("cached 8" in line for line in ready(core))
    assert sent(core.handle(done(2, r=5), 0.0), Commit)[0].cached_tokens == 8, "another has prefilled it"


def test_two_requests_with_the_same_text_prefill_it_once() -> None:
    core = prefiller()
    other = image_offer("p", work("s", 10, "dog", 2), (3,))
    table(core, [(offered(asked()), LED), (other, []), (done(1), ["close r"])])
    counted = {}
    for id, request, step in (("o", "r", 2), ("p", "s", 3)):
        assert any("cached 8" in line for line in ready(core, id)), request
        counted[request] = sent(core.handle(done(step, **{request: 5}), 0.0), Commit)[0].cached_tokens
    assert counted == {"r": 0, "s": 8}


def test_it_waits_for_whatever_else_is_to_be_prefilled() -> None:
    core = prefiller(budget=8)
    core.handle(Submit(work("text", 12, text=500, max_tokens=1)), 0.0)
    more = ["close text", "open r kv 3,4", "step 3 joint: prefill r 0+8"]
    table(
        core,
        [
            (offered(asked()), []),
            (done(1), ["step 2 joint: prefill text 8+4 last"]),
            (done(2, text=5), ["frontend: emit text#0=5", "frontend: finished text length 1 by way of P0", *more]),
        ],
    )


def test_who_comes_during_its_step_is_next() -> None:
    core = prefiller(budget=8)
    long = offered(asked(23))
    text = Submit(work("text", 4, text=500, max_tokens=1))
    opened = ["open text kv 2", "step 2 joint: prefill text 0+4 last"]
    table(core, [(long, LED), (text, []), (done(1), ["close r", *opened])])


def test_with_two_steps_in_flight_others_go_past_it_and_it_waits_for_its_own_text() -> None:
    core = prefiller(depth=2)
    table(core, [(offered(asked()), LED)])
    assert ready(core) == [PULL, "E0: release o pulled"], "its features are here, and its text is in a step"
    text = Submit(work("text", 4, text=500, max_tokens=1))
    table(
        core,
        [
            (text, ["open text kv 2", "step 2 joint: prefill text 0+4 last"]),
            (done(1), ["close r", "open r kv 0,1,3,4 images [0] cached 8", "step 3 joint: prefill r 8+8 last"]),
        ],
    )


def test_one_text_after_the_other_in_the_order_in_which_they_came() -> None:
    core = prefiller(budget=8)
    other = image_offer("p", work("s", 8, "dog", 2, text=500), (3,))
    rows: list[Row] = [
        (offered(asked(16)), LED),
        (other, []),
        (done(1), ["close r", "open r kv 0,1,2,3 cached 8", "step 2 joint: prefill r 8+8"]),
        (done(2), ["close r", "open s kv 4,5", "step 3 joint: prefill s 0+8"]),
        (done(3), ["close s"]),
    ]
    table(core, rows)


def test_it_runs_beside_decodes_within_the_budget() -> None:
    core = prefiller("PD0", budget=9)
    core.handle(Submit(work("text", 4, text=500, max_tokens=9)), 0.0)
    core.handle(done(1, text=5), 0.0)
    table(core, [(offered(asked(23)), [])])
    after = brief(core.handle(done(2, text=5), 0.0))
    assert after[-2:] == ["open r kv 3,4", "step 3 joint: prefill r 0+8, decode text"]
    after = brief(core.handle(done(3, text=5), 0.0))
    assert after[-1] == "step 4 joint: prefill r 8+8, decode text"


@pytest.mark.parametrize("depth", [1, 2])
def test_decodes_that_repeat_do_not_hold_it_up(depth: int) -> None:
    """The answer of a repeated step looks at nothing: it must not be given while text waits."""
    core = prefiller("PD0", depth=depth, kv=99)
    core.handle(Submit(work("text", 4, text=500, max_tokens=60)), 0.0)
    for step in range(1, 6):
        core.handle(done(step, text=5), 0.0)
    core.handle(offered(asked()), 0.0)
    later = [line for step in range(6, 9) for line in brief(core.handle(done(step, text=5), 0.0))]
    assert any("prefill r 0+8, decode text" in line for line in later), later


@pytest.mark.parametrize("lanes", [("joint",), ("vision", "language")])
def test_where_encode_has_a_lane_of_its_own_text_is_prefilled_meanwhile(lanes: tuple[str, ...]) -> None:
    core = prefiller("EP0", lanes=lanes)
    told = brief(core.handle(Submit(asked()), 0.0))
    encoded = ["step 1 joint: encode r.0 into 0"]
    dual = ["step 1 vision: encode r.0 into 0", "open r kv 0,1", "step 2 language: prefill r 0+8"]
    assert told == (encoded if lanes == ("joint",) else dual)
    if lanes != ("joint",):
        assert brief(core.handle(done(1, "vision"), 0.0)) == [], "its features are ready: its text is in a step"
        rest = ["close r", "open r kv 0,1,2,3 images [0] cached 8", "step 3 language: prefill r 8+8 last"]
        assert brief(core.handle(done(2, "language"), 0.0)) == rest


def test_a_migration_that_waits_for_blocks_comes_first() -> None:
    core = prefiller("PD0", kv=6)
    core.handle(kv_offer("k", work("big", 8, max_tokens=9), (1, 2)), 0.0)
    core.handle(kv_offer("l", work("more", 8, max_tokens=9), (3, 4)), 0.0)
    assert core.state.kv_offers
    table(core, [(offered(asked(8, text=500)), [])])
    core.handle(Withdraw("l"), 0.0)
    assert not core.state.kv_offers
    assert core.state.leading.running == "r"


def test_blocks_that_decodes_need_next_are_left_to_them() -> None:
    """Under optimistic reservation each decode may want a block before the step has ended."""
    for kv, leads in ((4, False), (5, True)):
        core = prefiller("PD0", kv=kv, reservation="optimistic")
        core.handle(Submit(work("text", 4, text=500, max_tokens=5)), 0.0)
        core.handle(done(1, text=5), 0.0)
        core.handle(offered(asked(8)), 0.0)
        core.handle(done(2, text=5), 0.0)
        assert bool(core.state.leading.running) is leads, kv


def test_no_decode_instance_is_asked_before_the_prompt_itself_is_prefilled() -> None:
    core = prefiller(transfers=TransferPolicy(kv="layer"), layers=2)
    table(core, [(offered(asked()), LED), (done(1), ["close r"])])
    assert [line for line in ready(core) if line.startswith("D0: offer")]


# ---------------------------------------------------------------- what becomes of it


def test_a_request_that_ends_during_the_step_holds_its_blocks_until_it_has_ended() -> None:
    for event in (Cancel("r"), Withdraw("o"), PeerDown("E0"), Forget("r")):
        core = prefiller()
        table(core, [(offered(asked(23)), ["open r kv 0,1,2,3,4", "step 1 joint: prefill r 0+20"])])
        assert not [line for line in brief(core.handle(event, 0.0)) if "release" in line or "finished" in line]
        assert core.state.kv.held == 5
        out = core.handle(done(1), 0.0)
        assert [line for line in brief(out) if line.startswith("step")] == [], event
        core.handle(Forget("r"), 0.0)
        emptied(core)
        assert core.state.kv.match(core.state.prefix_keys(RequestState(asked(23), 0.0)))[:1], (
            "it is cached all the same"
        )


def test_a_row_that_fails_ends_its_request_and_leaves_nothing_in_the_cache() -> None:
    core = prefiller()
    table(core, [(offered(asked()), LED)])
    out = core.handle(broken(1, "r"), 0.0)
    assert brief(out) == ["close r", "E0: release o failed", "frontend: finished r error 0 by way of E0 P0 StageError"]
    assert core.state.kv.available == core.state.kv._free.count, "nothing is matchable"
    core.handle(Forget("r"), 0.0)
    emptied(core)


def test_features_that_nobody_has_any_more_send_it_back_when_the_step_has_ended() -> None:
    core = prefiller()
    core.handle(peer_up("E1"), 0.0)
    named = Offer(id="o", kind="image", source="E0", work=asked(), parts=(Part((), "E1"),), route=("E0",))
    core.handle(named, 0.0)
    core.handle(Ready("o", (0,)), 0.0)
    assert brief(core.handle(Fetched("o/0", "E1", (), 0), 0.0)) == []
    assert brief(core.handle(done(1), 0.0)) == ["close r", "E0: release o missing"]
    core.handle(Forget("r"), 0.0)
    emptied(core)


def test_what_was_evicted_meanwhile_is_not_prefilled_ahead_again() -> None:
    """Else two that evict each other's text would prefill for as long as their images take."""
    core = prefiller(kv=6, budget=8)
    core.handle(offered(asked(16)), 0.0)
    core.handle(done(1), 0.0)
    assert core.state.leading.running == "r"
    core.handle(Submit(work("text", 20, text=500, max_tokens=1)), 0.0)
    core.handle(done(2), 0.0)  # r is led to 16; text takes 5 of the 6 blocks
    for step in (3, 4):
        core.handle(done(step), 0.0)
    core.handle(done(5, text=5), 0.0)
    core.handle(offered(asked(16, "again"), "p"), 0.0)
    rows = [line for line in brief(core.handle(Cancel("again"), 0.0)) if line.startswith("step")]
    assert not rows
    assert core.state.leading.requests() == (), "r has had its turn"


def test_evicted_text_is_computed_in_its_own_prefill_and_counted_right() -> None:
    core = prefiller(kv=6)
    table(core, [(offered(asked(9)), LED), (done(1), ["close r"])])
    core.handle(Submit(work("text", 24, text=500, max_tokens=1)), 0.0)
    core.handle(done(2, text=5), 0.0)
    assert "open r kv 0,1,2,3 images [0]" in [line.replace("5,4,3,2", "0,1,2,3") for line in _opened(ready(core))]
    assert sent(core.handle(done(3, r=5), 0.0), Commit)[0].cached_tokens == 0


def _opened(lines: list[str]) -> list[str]:
    """The same, with block numbers from 0 on."""
    found = []
    for line in lines:
        head, kv, rest = line.partition(" kv ")
        numbers, space, tail = rest.partition(" ")
        found.append(f"{head}{kv}{','.join(map(str, range(len(numbers.split(',')))))}{space}{tail}" if kv else line)
    return found


def test_the_end_of_what_was_led_is_evicted_first() -> None:
    core = prefiller(kv=6)
    table(core, [(offered(asked(16)), ["open r kv 0,1,2,3", "step 1 joint: prefill r 0+16"]), (done(1), ["close r"])])
    core.handle(Submit(work("text", 12, text=500, max_tokens=1)), 0.0)  # two free blocks, and one that is evicted
    core.handle(done(2, text=5), 0.0)
    assert any("cached 12" in line for line in ready(core))
    assert sent(core.handle(done(3, r=5), 0.0), Commit)[0].cached_tokens == 0


def test_a_finished_request_tells_what_others_had_cached_for_it() -> None:
    core = prefiller("PD0")
    core.handle(Submit(work("first", 5, max_tokens=1)), 0.0)
    core.handle(done(1, first=5), 0.0)
    table(core, [(offered(asked(max_tokens=1)), ["open r kv 0,1 cached 4", "step 2 joint: prefill r 4+4"])])
    core.handle(done(2), 0.0)
    ready(core)
    (told,) = sent(core.handle(done(3, r=5), 0.0), Finished)
    assert told.cached_tokens == 4


def test_the_pools_have_a_reference_for_the_step_and_none_behind_it() -> None:
    core = prefiller()
    core.handle(offered(asked()), 0.0)
    assert [core.state.pools[KV].references(block) for block in (0, 1, 2)] == [1, 1, 0]
    core.handle(done(1), 0.0)
    assert core.state.pools[KV].held == 0
