"""The table of stages: what it answers for E, P and D is spelled out here, letter by letter."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.core.messages import MediaSpan, Work
from trinity.core.scheduler import BatchRules
from trinity.stage_kinds import (
    ENCODE,
    IMAGE,
    KINDS_OF_WORK,
    KV,
    STATE,
    StageKind,
    added_stage,
    all_letters,
    block_kinds,
    count_alone,
    describe_stages,
    encoder_of,
    encoder_of_media,
    encoders,
    feature_kinds,
    features_of,
    makers_for,
    order_letters,
    path_of,
    roles_of,
    stage_kinds,
    stage_of,
    stages_on,
    taker_of,
)

ROLES = ["".join(some) for count in (1, 2, 3) for some in combinations("EPD", count)]
SKETCH = StageKind("S", "sketch", "media", "vision", (), ("lines",), "image_budget", "ttft", "sketches", ("sketch",))


@pytest.mark.parametrize("roles", ROLES)
def test_what_roles_do(roles: str) -> None:
    does, letters = roles_of(roles), set(roles)
    assert (does.encodes, does.prefills, does.decodes) == ("E" in roles, "P" in roles, "D" in roles)
    assert does.kinds == ({IMAGE} if letters & {"E", "P"} else set()) | ({KV, STATE} if letters & {"P", "D"} else set())
    assert does.features == does.kinds & {IMAGE}
    assert does.encoded == ({IMAGE} if "E" in roles else set())
    assert does.parts == ({"vision"} if "E" in roles else set()) | ({"language"} if letters & {"P", "D"} else set())
    assert does.only_encodes is (roles == "E")
    assert does.has_two_parts is ("E" in roles and roles != "E")
    assert does.hands_kv_on is ("P" in roles and "D" not in roles)


def test_what_no_roles_do() -> None:
    nothing = roles_of("")
    assert not any((nothing.encodes, nothing.prefills, nothing.decodes, nothing.kinds, nothing.only_encodes))


@given(st.integers(0, 2), st.booleans(), st.integers(1, 4), st.integers(0, 3))
def test_which_stages_a_request_needs(media: int, encode_only: bool, max_tokens: int, outputs: int) -> None:
    spans = (MediaSpan("image", 4, 0, 4, "a"), MediaSpan("audio", 4, 4, 4, "b"))[:media]
    work = Work(
        request="r", prompt=(1,) * 9, media=spans, encode_only=encode_only, max_tokens=max_tokens, outputs=outputs
    )
    assert encoder_of(work) == ("E" if media else "")
    language = "" if encode_only else "PD" if max_tokens - outputs > 1 else "P"
    assert path_of(work) == encoder_of(work) + language


@pytest.mark.parametrize("roles", ROLES)
def test_stages_that_follow_on_one_instance(roles: str) -> None:
    for letter in roles:
        following = ""
        for each in "EPD"["EPD".index(letter) + 1 :]:
            if each not in roles:
                break
            following += each
        assert stages_on(letter, roles) == letter + following
        assert stages_on(letter, roles, encode_only=True) == letter


def test_who_hands_blocks_to_whom() -> None:
    assert [taker_of(kind) for kind in block_kinds()] == ["P", "D", "D"]
    assert [makers_for(letter) for letter in "EPD"] == ["", "E", "P"]
    assert block_kinds() == (IMAGE, KV, STATE)
    assert feature_kinds() == {IMAGE}
    assert {features_of(media) for media in ("image", "video", "audio", "smell")} == {IMAGE}


def test_what_a_stage_costs_and_what_bounds_it() -> None:
    assert [count_alone(letter, 7) for letter in "DPE"] == [(7, 0, 0), (0, 7, 0), (0, 0, 7)]
    assert sorted(KINDS_OF_WORK) == sorted(kind.work for kind in stage_kinds())
    for kind in stage_kinds():
        assert getattr(BatchRules(), kind.budget) > 0
    assert [kind.bound for kind in stage_kinds()] == ["ttft", "ttft", "tbt"]


def test_letters_have_an_order() -> None:
    assert (all_letters(), order_letters("DEPPX"), order_letters("")) == ("EPD", "EPD", "")
    assert describe_stages() == "E (encode), P (prefill), D (decode)"
    with pytest.raises(KeyError):
        stage_of("X")


def test_a_stage_is_added_for_a_block_and_takes_the_media_that_it_names() -> None:
    before = stage_kinds()
    assert features_of("sketch") == IMAGE
    with added_stage(SKETCH, before="P"):
        assert [kind.letter for kind in encoders()] == ["E", "S"]
        assert (encoder_of_media("sketch"), encoder_of_media("image")) == (SKETCH, ENCODE)
        assert features_of("sketch") == "lines"
        assert (taker_of("lines"), makers_for("P")) == ("P", "ES")
        assert roles_of("SD").features == {"lines"}
    assert stage_kinds() == before
    assert features_of("sketch") == IMAGE
    assert makers_for("P") == "E"


def test_the_table_is_as_before_where_the_block_fails() -> None:
    before = stage_kinds()
    with pytest.raises(KeyError), added_stage(SKETCH, before="P"):
        stage_of("X")
    assert stage_kinds() == before
    assert features_of("sketch") == IMAGE
    assert makers_for("P") == "E"
