"""A request's way through one instance: encode, chunked prefill, decode, in one lane or two; what ends it."""

from __future__ import annotations

import pytest

from support.core_tables import Row, brief, broken, done, emptied, make_core, sent, table, work
from trinity.core.messages import Emit, Failure, Finished, Forget, Sampled, Step, Stepped, Submit, Work
from trinity.core.scheduler import BatchRules
from trinity.errors import ConfigError


def test_an_image_is_encoded_then_prefilled_then_decoded_then_everything_is_given_back() -> None:
    core = make_core("EPD0", prefix_cache=False, image_cache=False)
    rows: list[Row] = [
        (Submit(work("r", 3, "cat*6", 2)), ["step 1 joint: encode r.0 into 0,1"]),
        (done(1), ["open r kv 0,1,2,3 images [0,1]", "step 2 joint: prefill r 0+11 last"]),
        (done(2, r=5), ["frontend: emit r#0=5", "step 3 joint: decode r"]),
        (done(3, r=6), ["frontend: emit r#1=6", "step 4 joint: decode r"]),
        (done(4, r=7), ["frontend: emit r#2=7", "frontend: finished r length 3 by way of EPD0", "close r"]),
    ]
    table(core, rows)
    emptied(core)
    assert core.state.pools["image"].available == 8
    assert core.state.kv.available == 16


def test_a_prompt_is_cut_into_chunks_of_the_token_budget() -> None:
    core = make_core("EPD0", rules=BatchRules(token_budget=8, image_budget=64))
    rows: list[Row] = [
        (
            Submit(work("r", 19, max_tokens=1)),
            ["open r kv 0,1,2,3,4", "step 1 joint: prefill r 0+8"],
        ),
        (done(1), ["step 2 joint: prefill r 8+8"]),
        (done(2), ["step 3 joint: prefill r 16+3 last"]),
        (done(3, r=5), ["frontend: emit r#0=5", "frontend: finished r length 1 by way of EPD0", "close r"]),
    ]
    table(core, rows)
    emptied(core)


def test_one_lane_mixes_decodes_prefills_and_encodes_in_one_step() -> None:
    core = make_core("EPD0")
    rows: list[Row] = [
        (Submit(work("a", 3)), ["open a kv 0,1", "step 1 joint: prefill a 0+3 last"]),
        (Submit(work("b", 5)), []),
        (Submit(work("c", 1, "cat", 1)), []),
        (
            done(1, a=5),
            ["frontend: emit a#0=5", "open b kv 2,3", "step 2 joint: encode c.0 into 0, prefill b 0+5 last, decode a"],
        ),
        (
            done(2, a=6, b=7),
            [
                "frontend: emit b#0=7 a#1=6",
                "open c kv 4,5 images [0]",
                "step 3 joint: prefill c 0+6 last, decode a b",
            ],
        ),
    ]
    table(core, rows)


def test_two_lanes_let_decodes_go_on_beside_a_long_encode() -> None:
    core = make_core("EPD0", lanes=("vision", "language"))
    rows: list[Row] = [
        (Submit(work("a", 3)), ["open a kv 0,1", "step 1 language: prefill a 0+3 last"]),
        (Submit(work("c", 1, "cat", 1)), ["step 2 vision: encode c.0 into 0"]),
        (done(1, "language", a=5), ["frontend: emit a#0=5", "step 3 language: decode a"]),
        (Submit(work("d", 1, "dog", 1)), []),
        (done(3, "language", a=6), ["frontend: emit a#1=6", "step 4 language: decode a"]),
        (done(2, "vision"), ["step 5 vision: encode d.0 into 1"]),
        (
            done(4, "language", a=7),
            [
                "frontend: emit a#2=7",
                "frontend: finished a length 3 by way of EPD0",
                "close a",
                "open c kv 0,1 images [0]",
                "step 6 language: prefill c 0+6 last",
            ],
        ),
    ]
    table(core, rows)


@pytest.mark.parametrize(
    ("token", "reason"), [(5, "stop"), (6, None)], ids=["a stop token ends it and is emitted", "another does not"]
)
def test_stop_ids(token: int, reason: str | None) -> None:
    core = make_core("PD0")
    core.handle(Submit(work("r", 3, stop_ids=frozenset({5}))), 0.0)
    ended = ["frontend: finished r stop 1 by way of PD0", "close r"]
    table(
        core, [(done(1, r=token), [f"frontend: emit r#0={token}", *(ended if reason else ["step 2 joint: decode r"])])]
    )


def test_a_stop_token_among_the_decoded_ends_it_there() -> None:
    core = make_core("PD0")
    rows: list[Row] = [
        (Submit(work("r", 3, stop_ids=frozenset({6}))), ["open r kv 0,1", "step 1 joint: prefill r 0+3 last"]),
        (done(1, r=5), ["frontend: emit r#0=5", "step 2 joint: decode r"]),
        (done(2, r=6), ["frontend: emit r#1=6", "frontend: finished r stop 2 by way of PD0", "close r"]),
    ]
    table(core, rows)
    emptied(core)


def test_tokens_go_out_ahead_of_what_they_bring_about() -> None:
    core = make_core("P0", peers="D0")
    core.handle(Submit(work("r", 3)), 0.0)
    out = core.handle(done(1, r=5), 0.0)
    assert brief(out)[0] == "frontend: emit r#0=5"
    assert brief(out)[1].startswith("D0: offer")


def test_log_probabilities_travel_with_the_token() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("r", 3, attempt=4)), 0.0)
    sampled = Sampled(5, -0.5, ((5, -0.5), (6, -1.0)))
    emit = sent(core.handle(Stepped(1, "joint", {"r": sampled}), 0.0), Emit)[0]
    assert list(emit.rows()) == [("r", 4, 0, sampled)]


def test_inputs_of_each_item_go_to_the_encoder_with_its_span() -> None:
    core = make_core("E0", peers="P0")
    request = work("r", 1, "cat", 1, "dog*6")
    step = core.handle(Submit(request, ("of cat", "of dog")), 0.0)[0]
    assert isinstance(step, Step)
    assert [row.inputs for row in step.encodes] == ["of cat", "of dog"]
    assert [row.span for row in step.encodes] == list(request.media)


def test_an_item_without_inputs_is_encoded_from_its_span_alone() -> None:
    step = make_core("E0", peers="P0").handle(Submit(work("r", "cat", 1)), 0.0)[0]
    assert isinstance(step, Step)
    assert step.encodes[0].inputs is None


def test_a_step_that_does_not_run_cannot_end() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("r", 3)), 0.0)
    with pytest.raises(AssertionError, match="step 2 is not running on joint"):
        core.handle(done(2, r=5), 0.0)


def test_a_last_chunk_and_a_decode_need_their_token() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("r", 3)), 0.0)
    with pytest.raises(AssertionError, match="a row of r gave no token"):
        core.handle(done(1), 0.0)
    core = make_core("PD0")
    core.handle(Submit(work("r", 3)), 0.0)
    core.handle(done(1, r=5), 0.0)
    with pytest.raises(AssertionError, match="a row of r gave no token"):
        core.handle(done(2), 0.0)


def test_a_failed_row_ends_its_request_alone() -> None:
    core = make_core("PD0")
    rows: list[Row] = [
        (Submit(work("a", 3)), ["open a kv 0,1", "step 1 joint: prefill a 0+3 last"]),
        (done(1, a=5), ["frontend: emit a#0=5", "step 2 joint: decode a"]),
        (Submit(work("b", 3, text=200)), []),
        (done(2, a=6), ["frontend: emit a#1=6", "open b kv 2,3", "step 3 joint: prefill b 0+3 last, decode a"]),
        (
            broken(3, "b", a=7),
            [
                "frontend: emit a#2=7",
                "frontend: finished a length 3 by way of PD0",
                "close a",
                "frontend: finished b error 0 by way of PD0 StageError",
                "close b",
            ],
        ),
    ]
    table(core, rows)
    emptied(core)


def test_a_failed_decode_reports_the_tokens_before_it() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("a", 3)), 0.0)
    core.handle(done(1, a=5), 0.0)
    table(core, [(broken(2, "a"), ["frontend: finished a error 1 by way of PD0 StageError", "close a"])])
    emptied(core)


def test_the_failure_reaches_the_front_end_in_full() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("a", 3, attempt=2)), 0.0)
    why = Failure("StageError", "out of memory", {"stage": "P"})
    finished = sent(core.handle(Stepped(1, "joint", {}, {"a": why}), 0.0), Finished)[0]
    assert (finished.failure, finished.attempt) == (why, 2)


def test_an_instance_without_the_stage_refuses_by_name() -> None:
    core = make_core("D0")
    out = core.handle(Submit(work("r", 3)), 0.0)
    assert brief(out) == ["frontend: finished r error 0 by way of D0 StageError"]
    assert sent(out, Finished)[0].failure == Failure("StageError", "instance D0 (D) has no stage P", {"stage": "P"})
    out = make_core("D0").handle(Submit(work("r", "cat", 1)), 0.0)
    assert sent(out, Finished)[0].failure == Failure("StageError", "instance D0 (D) has no stage E", {"stage": "E"})
    emptied(core)


@pytest.mark.parametrize(
    ("large", "kind", "need", "size"),
    [(work("r", "cat*33", 1), "image", 9, 8), (work("r", 62, max_tokens=4), "kv", 17, 16)],
)
def test_a_request_larger_than_a_pool_is_refused_at_once(large: Work, kind: str, need: int, size: int) -> None:
    core = make_core("EPD0", kv=16)
    out = core.handle(Submit(large), 0.0)
    assert brief(out) == ["frontend: finished r error 0 by way of EPD0 RequestTooLarge"]
    text = f"the request needs {need} {kind} blocks and instance EPD0 has {size}"
    assert sent(out, Finished)[0].failure == Failure("RequestTooLarge", text)
    emptied(core)


def test_a_request_of_just_the_pool_is_served() -> None:
    core = make_core("EPD0")
    out = core.handle(Submit(work("r", 62, max_tokens=3)), 0.0)
    assert brief(out) == [f"open r kv {','.join(map(str, range(16)))}", "step 1 joint: prefill r 0+62 last"]


def test_a_text_model_needs_no_image_pool() -> None:
    core = make_core("EPD0")
    del core.state.pools["image"]
    rows: list[Row] = [
        (Submit(work("r", 3, max_tokens=1)), ["open r kv 0", "step 1 joint: prefill r 0+3 last"]),
        (done(1, r=5), ["frontend: emit r#0=5", "frontend: finished r length 1 by way of EPD0", "close r"]),
        (Forget("r"), []),
    ]
    table(core, rows)


def test_a_policy_that_predicts_needs_something_to_predict_with() -> None:
    with pytest.raises(ConfigError, match="policy 'time' needs cost= and limit_s="):
        make_core("EPD0", rules=BatchRules(policy="time"))


def test_the_same_request_twice_is_a_mistake_of_the_caller() -> None:
    core = make_core("EPD0")
    core.handle(Submit(work("r", 3)), 0.0)
    with pytest.raises(AssertionError, match="r is here already"):
        core.handle(Submit(work("r", 3)), 0.0)
