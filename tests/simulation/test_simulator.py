"""Simulator: hand-computed replays, what it counts, what it refuses."""

from __future__ import annotations

import pytest

from support.simulations import BUDGETS, COST, IMAGE_BLOCK, KV_BLOCK, MESSAGE_S, row, served, simulator
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.errors import ConfigError, PlacementError, TraceError, UnknownName
from trinity.simulation.simulator import Simulator
from trinity.traces.goodput import goodput, measure_point
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow


def test_one_request_on_one_instance() -> None:
    # Submit at 1 comes at 1.125; image until 2.125; 592 tokens until 3.203125; the token is read a message later.
    ((ttft, gaps),) = served([row(1.0, 16, 3, [""])], "EPD", 1)
    assert ttft == MESSAGE_S + 1.0 + (0.5 + 592 / 1024) + MESSAGE_S
    assert gaps == [0.5625, 0.5625]


def test_one_request_through_three_instances() -> None:
    # The features (9/16 s and 1/4) are pulled a message after the encoder's end. 592 tokens are 37 blocks of KV:
    # offered a message after prefill, 37.25 s, then a decode step and a message.
    replay = simulator(3).replay(Trace([row(1.0, 16, 3, [""])]), "1E1P1D")
    (outcome,) = replay.outcomes
    prefilled = 1.0 + MESSAGE_S + 1.0 + MESSAGE_S + 0.8125 + (0.5 + 592 / 1024)
    assert outcome.ttft_s == prefilled + MESSAGE_S - 1.0
    assert list(outcome.itl_s) == [MESSAGE_S + 37.25 + 0.5625, 0.5625]
    assert replay.moved_bytes == {"image": IMAGE_BLOCK, "kv": 37 * KV_BLOCK}
    assert replay.busy_s == {"E0": {"E": 1.0}, "P0": {"P": 0.5 + 592 / 1024}, "D0": {"D": 1.125}}
    assert replay.peak_blocks == {"E0": {"image": 1}, "P0": {"image": 1, "kv": 37}, "D0": {"kv": 38}}
    assert replay.duration_s == prefilled - 1.0 + MESSAGE_S + 37.25 + 1.125 + MESSAGE_S
    assert replay.utilisation["E0"]["E"] == 1.0 / replay.duration_s


def test_pulls_into_one_instance_are_served_one_after_the_other() -> None:
    # Two prompts at once on two P: 100 blocks are pulled first, for 100.25 s, then the other's.
    rows = [row(0.0, 1600, 2), row(0.0, 1600, 2)]
    (_, (first,)), (_, (second,)) = served(rows, "2P1D", 3)
    assert first == MESSAGE_S + 100.25 + 0.5625
    assert second == pytest.approx(first + 100.25)
    ((_, (alone,)),) = served(rows[:1], "2P1D", 3)
    assert alone == first


@pytest.mark.parametrize("backend", ["python", "auto"])
def test_instances_do_not_send_all_their_first_requests_to_the_same_peer(backend: str) -> None:
    rows = [row(0.0, 16, 1, [""]) for _ in range(4)]
    replay = simulator(9, backend=backend).replay(Trace(rows), "4E4P1D")
    assert [replay.busy_s[f"P{number}"]["P"] for number in range(4)] == [0.5 + 592 / 1024] * 4


def test_requests_share_a_step() -> None:
    # The second request comes while the first is prefilled; then one decodes while the other is prefilled.
    (first, gaps), (second, others) = served([row(0.0, 1024, 3), row(0.25, 512, 2)], "PD", 1)
    assert first == MESSAGE_S + 1.5 + MESSAGE_S
    mixed = 0.5 + 1 / 16 + 0.5
    assert gaps == [mixed, 0.5 + 2 / 16]
    assert second == first + mixed - 0.25
    assert others == [0.5 + 2 / 16]


def test_a_step_of_several_stages_is_shared_among_them() -> None:
    replay = simulator(1).replay(Trace([row(0.0, 1024, 3), row(0.25, 512, 2)]), "PD")
    alone, decode = 1.0, 0.5625  # what 512 tokens and what one row take by themselves
    mixed = 0.5 + 1 / 16 + 0.5
    assert replay.busy_s["PD0"]["P"] == pytest.approx(1.5 + mixed * alone / (alone + decode))
    assert replay.busy_s["PD0"]["D"] == pytest.approx(0.625 + mixed * decode / (alone + decode))


def test_the_cost_is_asked_for_the_mean_context() -> None:
    asked: list[tuple[int, int, int, float, float, int]] = []

    class Asking:
        def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
            return 1.0

        def at(
            self,
            decodes: int,
            prefill: int,
            media: int,
            *,
            context: float,
            prefilled: float,
            prefills: int,
            image_tokens: float,
        ) -> float:
            asked.append((decodes, prefill, media, context, prefilled, prefills))
            return 1.0

    rows = [row(0.0, 100, 6), row(0.25, 203, 2)]
    served(rows, "PD", 1, cost=Asking())
    assert asked == [
        (0, 100, 0, 0.0, 0.0, 1),
        (1, 203, 0, 101.0, 0.0, 1),
        (2, 0, 0, (102 + 204) / 2, 0.0, 0),
        (1, 0, 0, 103.0, 0.0, 0),
        (1, 0, 0, 104.0, 0.0, 0),
        (1, 0, 0, 105.0, 0.0, 0),
    ]


def test_shared_images_are_encoded_once_and_others_are_not() -> None:
    def encoded(*contents: str) -> float:
        rows = [row(20.0 * at, 16, 1, [content]) for at, content in enumerate(contents)]
        return simulator(3).replay(Trace(rows), "1E1P1D").busy_s["E0"]["E"]

    assert encoded("cat", "cat", "dog") == 2.0
    assert encoded("cat", "cow", "dog") == 3.0
    assert encoded("", "", "") == 3.0, "images without a name are like no other"


def test_prefixes_are_shared_by_their_hashes_alone() -> None:
    def prefilled(*hashes: list[int]) -> list[float | None]:
        rows = [row(20.0 * at, 1024, 1, hash_ids=each) for at, each in enumerate(hashes)]
        return [ttft for ttft, _ in served(rows, "PD", 1)]

    full, half, last = 1.75, 1.25, 0.75 + 16 / 1024  # a prompt whose every block is cached still runs its last one
    assert prefilled([7, 8], [7, 9]) == [full, half]
    assert prefilled([7, 8], [7, 8]) == [full, last]
    assert prefilled([7, 8], [9, 8]) == [full, full], "a prefix, not a part"
    assert prefilled([], []) == [full, full]


def test_what_the_model_cannot_take_is_refused_and_counts() -> None:
    rows = [row(0.0, 4096, 2), row(0.0, 16, 2), row(0.0, 4095, 9)]
    odd = TraceRow(timestamp=0, input_length=9, output_length=2, images=[TraceImage(width=100_000, height=10)])
    replay = simulator(1).replay(Trace(rows), "PD")
    assert [each.finish_reason for each in replay.outcomes] == ["error", "length", "length"]
    assert [len(each.itl_s) for each in replay.outcomes] == [0, 1, 0], "the context leaves one token"
    ((bare, _),) = served([row(0.0, 0, 0, [""])], "EPD", 1)
    assert bare == 2 * MESSAGE_S + 1.0 + 0.5 + 577 / 1024, "at least a token of text, and one comes out"
    narrow = Simulator("qwen2-vl-7b", SLO(9.0, 9.0), cluster=Cluster.of("H100"))
    assert [each.finish_reason for each in narrow.replay(Trace([odd]), "EPD").outcomes] == ["error"]
    assert [each.finish_reason for each in simulator(2).replay(Trace([row(0.0, 9, 2, [""])]), "PD+PD").outcomes] == [
        "error"
    ], "no encoder"
    crowd = simulator(1, max_waiting=2).replay(Trace([row(0.0, 16, 2)] * 3), "PD")
    assert [each.finish_reason for each in crowd.outcomes] == ["length", "length", "error"]


def test_unknown_image_tokens_follow_the_models_rule() -> None:
    def media(image: TraceImage, model: str) -> int:
        trace = Trace([TraceRow(timestamp=0, input_length=4000, output_length=1, images=[image])])
        made = Simulator(model, SLO(9.0, 9.0), cluster=Cluster.of("H100"), cost=LinearCost(media_s=1.0))
        return round(made.replay(trace, "EPD").busy_s["EPD0"]["E"])

    assert media(TraceImage(width=1024, height=768), "qwen2-vl-7b") == 999
    assert media(TraceImage(width=640, height=480), "qwen2-vl-7b") == 23 * 17
    assert media(TraceImage(), "qwen2-vl-7b") == 999
    assert media(TraceImage(tokens=5), "qwen2-vl-7b") == 5
    assert media(TraceImage(), "llava-1.5-7b") == 576


def test_traces_empty_unsorted_and_wrong() -> None:
    empty = simulator(1).replay(Trace(), "PD")
    assert (empty.outcomes, empty.duration_s, empty.events) == ([], 0.0, 0)
    assert empty.utilisation == {"PD0": {"P": 0.0, "D": 0.0}}
    rows = [row(9.0, 16, 2), row(1.0, 32, 2)]
    late, early = simulator(1).replay(Trace(rows), "PD").outcomes
    assert (late.ttft_s, early.ttft_s) == (0.75 + 16 / 1024, 0.75 + 32 / 1024)
    for wrong in (float("nan"), -1.0, float("inf")):
        with pytest.raises(TraceError, match="timestamp"):
            simulator(1).replay(Trace([row(0.0, 1, 1), row(wrong, 1, 1)]), "PD")


def test_what_cannot_run_is_said_before_it_runs() -> None:
    with pytest.raises(PlacementError, match="2 instance"):
        simulator(3).check("EP+D")
    with pytest.raises(PlacementError, match="unknown stage X"):
        simulator(3).check("XPD")
    with pytest.raises(ConfigError, match="are missing"):
        simulator(1, cluster=Cluster.of("cpu")).check("EPD")
    with pytest.raises(UnknownName, match="backend"):
        simulator(1, backend="steam")
    with pytest.raises(UnknownName, match="routing policy"):
        simulator(1, routing="by_smell")
    for wrong in ({"lanes": ("language",)}, {"interference": 0.5}, {"memory_share": 1.5}, {"max_waiting": 0}):
        with pytest.raises(ConfigError):
            simulator(1, **wrong)
    with pytest.raises(ConfigError, match="roles PD"):
        simulator(1, budgets={"D": BUDGETS}).check("PD")
    simulator(1, budgets={"PD": BUDGETS}).check("PD")


def test_policies_that_read_loads_are_told_of_them() -> None:
    # The long prompt takes 2.5 s on P0. Round robin sends every other one there; least loaded has heard of it.
    rows = [row(0.0, 2048, 1), row(0.5, 16, 1), row(0.75, 16, 1), row(1.25, 16, 1), row(1.5, 16, 1)]

    def late(routing: str) -> int:
        found = served(rows, "2PD", 2, routing=routing)[1:]
        return sum(ttft is not None and ttft > 1.5 for ttft, _ in found)

    assert late("round_robin") == 2
    assert late("least_loaded") == 0
    assert {each.report_s for each in simulator(1).settings("PD")} == {float("inf")}
    assert {each.report_s for each in simulator(1, routing="least_loaded").settings("PD")} == {0.1}
    assert {each.lease_s for each in simulator(1, routing="least_loaded").settings("PD")} == {float("inf")}


def test_it_serves_for_goodput() -> None:
    trace = Trace([row(at, 16, 2, [""]) for at in range(200)])
    fast = simulator(1, cost=LinearCost(step_s=1 / 16, encode_s=1 / 16))
    point = measure_point(fast.serve("EPD"), trace, fast.slo, 0.5)
    assert point.attainment == dict.fromkeys(("p90", "p99", "guard", "tpot"), 1.0)
    found = goodput(fast.serve("EPD"), trace, fast.slo, least_requests=200, least_ttfts=1)
    assert 1 / (3 / 16) / 1.1 < found.rate < 16, "one image, prompt and token after the other take 3/16 s"
    with pytest.raises(PlacementError):
        fast.serve("2EPD")


def test_the_last_event_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from trinity.core.instance import lifecycle

    monkeypatch.setattr(lifecycle, "drop_all", lambda s, state: None)
    with pytest.raises(AssertionError, match="blocks leaked"):
        simulator(1, backend="python").replay(Trace([row(0.0, 16, 2)]), "PD")
    assert COST.seconds(0, 0, 0) == 0.0
