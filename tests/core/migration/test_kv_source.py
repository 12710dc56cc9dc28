"""KV that moves while prefill runs (EPD-Serve 3.3), announced by chunks and layers. Three layers, blocks of four."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from support.core_streams import LAYER, OFFER, again, layers, source, target
from support.core_tables import Row, brief, broken, done, emptied, make_core, sent, table, work
from support.virtual.cluster import Durations, Faults, VirtualCluster, make_settings
from trinity.core.messages import (
    Cancel,
    Commit,
    Forget,
    LayersWritten,
    Moved,
    Offer,
    Ready,
    Release,
    Step,
    Stepped,
    Submit,
)
from trinity.core.migration import kv_target
from trinity.core.migration import source as kv_source
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

# ---------------------------------------------------------------- the source


def test_layers_are_announced_as_they_are_written_and_the_token_with_the_commit() -> None:
    core = source()
    rows: list[Row] = [
        (Submit(work("r", 10)), ["open r kv 0,1,2", "step 1 joint: prefill r 0+10 last", OFFER]),
        (layers(1, 0, 1), ["D0: ready P0:1 0 layers 0,1 blocks 0,3"]),
        (layers(1, 1, 3), ["D0: ready P0:1 0 layers 1,3 blocks 0,3"]),
        (done(1, r=5), ["frontend: emit r#0=5", "D0: commit P0:1 after 5", "close r"]),
        (Release("P0:1", "pulled"), []),
        (Forget("r"), []),
    ]
    table(core, rows)
    emptied(core)


def test_the_layers_that_nobody_told_of_are_ready_when_the_step_ends() -> None:
    for told, rest in ((0, ""), (2, " layers 2,3")):
        core = source()
        core.handle(Submit(work("r", 10)), 0.0)
        if told:
            core.handle(layers(1, 0, told), 0.0)
        out = brief(core.handle(done(1, r=5), 0.0))
        assert out[1:3] == [f"D0: ready P0:1 0{rest} blocks 0,3", "D0: commit P0:1 after 5"]


def test_finished_chunks_move_in_whole_blocks_and_the_rest_with_the_last() -> None:
    core = source(rules=BatchRules(token_budget=6))
    rows: list[Row] = [
        (
            Submit(work("r", 15)),
            ["open r kv 0,1,2,3", "step 1 joint: prefill r 0+6", "D0: offer P0:1 kv of r [0,1,2,3] by way of P0"],
        ),
        (done(1), ["D0: ready P0:1 0 blocks 0,1", "step 2 joint: prefill r 6+6"]),
        (layers(2, 0, 1), ["D0: ready P0:1 0 layers 0,1 blocks 1,3"]),
        (done(2), ["D0: ready P0:1 0 layers 1,3 blocks 1,3", "step 3 joint: prefill r 12+3 last"]),
        (layers(3, 0, 3), ["D0: ready P0:1 0 layers 0,3 blocks 3,4"]),
        (done(3, r=5), ["frontend: emit r#0=5", "D0: commit P0:1 after 5", "close r"]),
    ]
    table(core, rows)


def test_a_chunk_that_fills_no_block_announces_nothing() -> None:
    core = source(rules=BatchRules(token_budget=3))
    core.handle(Submit(work("r", 5)), 0.0)
    table(core, [(layers(1, 0, 3), []), (done(1), ["step 2 joint: prefill r 3+2 last"])])
    assert brief(core.handle(layers(2, 0, 3), 0.0)) == ["D0: ready P0:1 0 layers 0,3 blocks 0,2"]


def test_what_the_source_had_cached_is_ready_with_the_offer() -> None:
    core = source()
    core.handle(Submit(work("a", 10)), 0.0)
    core.handle(done(1, a=5), 0.0)
    rows: list[Row] = [
        (
            Submit(work("b", 10)),
            [
                "open b kv 0,1,3 cached 8",
                "step 2 joint: prefill b 8+2 last",
                "D0: offer P0:2 kv of b [0,1,3] by way of P0",
                "D0: ready P0:2 0 blocks 0,2",
            ],
        ),
        (layers(2, 0, 3), ["D0: ready P0:2 0 layers 0,3 blocks 2,3"]),
    ]
    table(core, rows)


def test_the_target_knows_at_the_start_of_prefill_and_tells_the_front_end_who_has_the_first_token() -> None:
    (offer,) = sent(source(epoch=2).handle(Submit(work("r", 10)), 0.0), Offer)
    offer = replace(offer, target_epoch=5)
    assert sent(target(epoch=5).handle(offer, 0.0), Moved) == [Moved("r", 0, "D0", 1, 5, "P0", 2)]


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"kv": "off"}])
def test_what_ends_with_its_first_token_or_moves_afterwards_is_not_announced(fields: dict[str, Any]) -> None:
    core = source(transfers=TransferPolicy(kv=fields.get("kv", "layer")))
    (_, step) = core.handle(Submit(work("r", 10, max_tokens=fields.get("max_tokens", 3))), 0.0)
    assert isinstance(step, Step)
    assert step.group == 0
    assert core.state.requests["r"].outgoing is None


def test_an_instance_that_decodes_itself_keeps_its_kv() -> None:
    core = make_core("PD0", peers="D0", layers=3, transfers=LAYER)
    assert brief(core.handle(Submit(work("r", 10)), 0.0))[1:] == ["step 1 joint: prefill r 0+10 last"]


def test_a_stop_token_that_comes_first_ends_the_request_at_the_target_which_reports_it() -> None:
    core = source()
    core.handle(Submit(work("r", 10, stop_ids=frozenset({5}))), 0.0)
    core.handle(layers(1, 0, 2), 0.0)
    last = ["frontend: emit r#0=5", "D0: ready P0:1 0 layers 2,3 blocks 0,3", "D0: commit P0:1 after 5 ending stop"]
    table(core, [(done(1, r=5), [*last, "close r"]), (Release("P0:1", "cancelled"), []), (Forget("r"), [])])
    emptied(core)


def test_whoever_is_forgotten_while_its_kv_moves_is_called_off_at_the_target() -> None:
    """The front end gave it up when the encoder's lease ran out, and knows nothing of the offer."""
    core = source()
    core.handle(Submit(work("r", 10)), 0.0)
    table(core, [(Forget("r"), ["D0: cancel r"]), (done(1, r=5), ["close r"]), (Release("P0:1", "cancelled"), [])])
    emptied(core)


def test_a_row_that_fails_withdraws_the_offer() -> None:
    core = source()
    core.handle(Submit(work("r", 10)), 0.0)
    core.handle(layers(1, 0, 2), 0.0)
    out = brief(core.handle(broken(1, "r"), 0.0))
    assert out == ["D0: withdraw P0:1 StageError", "close r"]
    table(core, [(Release("P0:1", "failed"), []), (Forget("r"), [])])
    emptied(core)


def test_a_step_that_ran_again_has_its_blocks_pulled_again() -> None:
    core = source()
    core.handle(Submit(work("r", 10)), 0.0)
    rows: list[Row] = [
        (layers(1, 0, 2), ["D0: ready P0:1 0 layers 0,2 blocks 0,3"]),
        (again(1), []),
        (
            done(1, r=5),
            ["frontend: emit r#0=5", "D0: ready P0:1 0 blocks 0,3 again", "D0: commit P0:1 after 5", "close r"],
        ),
    ]
    table(core, rows)


def test_a_step_that_failed_before_it_told_anything_takes_nothing_back() -> None:
    core = source()
    core.handle(Submit(work("r", 10)), 0.0)
    core.handle(again(1), 0.0)
    assert "D0: ready P0:1 0 blocks 0,3" in brief(core.handle(done(1, r=5), 0.0))


@pytest.mark.parametrize("event", [Cancel("r"), Release("P0:1", "failed")])
def test_whatever_ends_the_request_during_the_step_ends_the_announcements(event: Any) -> None:
    core = source()
    core.handle(Submit(work("r", 10)), 0.0)
    expected = ["D0: cancel r"] if isinstance(event, Cancel) else []
    table(core, [(event, expected), (layers(1, 0, 2), []), (again(1), []), (done(1, r=5), ["close r"])])
    if isinstance(event, Cancel):
        core.handle(Release("P0:1", "cancelled"), 0.0)
    core.handle(Forget("r"), 0.0)
    emptied(core)


def test_progress_that_leaves_out_layers_or_names_another_step_is_a_fault() -> None:
    for event in (
        layers(1, 1, 2),
        layers(1, 0, 0),
        layers(1, 0, 4),
        layers(2, 0, 1),
        LayersWritten(1, "joint", (2, 1)),
    ):
        core = source()
        core.handle(Submit(work("r", 10)), 0.0)
        with pytest.raises(AssertionError):
            core.handle(event, 0.0)


def test_the_source_groups_layers_by_what_prefill_and_pulls_took() -> None:
    core = source(transfers=TransferPolicy(kv="grouped"), kv=99)
    for number, seconds in enumerate((3.0, 3.0), start=1):
        core.handle(Submit(work(f"r{number}", 10, text=100 * number)), 0.0)
        core.handle(Stepped(number, "joint", done(number, **{f"r{number}": 5}).sampled, {}, seconds), 0.0)
        core.handle(Release(f"P0:{number}", "pulled", (0.9, 0.01)), 0.0)
    (_, step, *_) = core.handle(Submit(work("r", 10, text=500)), 0.0)
    assert isinstance(step, Step)
    assert step.group == 2, "a second for each layer, less to pull it: the last of two groups has one layer"
    core.handle(done(3, r=5), 0.0)
    core.handle(Release("P0:3", "pulled", (30.0, 0.01)), 0.0)
    (_, step, *_) = core.handle(Submit(work("s", 10, text=600)), 0.0)
    assert isinstance(step, Step)
    assert step.group == 3, "a pull costs more than all of prefill"


def test_groups_before_any_pull_was_measured() -> None:
    core = make_core("P0", peers="D0", layers=8, transfers=TransferPolicy(kv="grouped"), kv=99)
    core.handle(Submit(work("r", 10)), 0.0)
    core.handle(Stepped(1, "joint", done(1, r=5).sampled, {}, 3.0), 0.0)
    core.handle(Release("P0:1", "pulled"), 0.0)
    (_, step, *_) = core.handle(Submit(work("s", 10, text=500)), 0.0)
    assert isinstance(step, Step)
    assert step.group == 2, "four groups"


def test_the_source_learns_what_of_a_step_is_left_when_its_kv_is_written() -> None:
    core = source(transfers=TransferPolicy(kv="grouped"), kv=99)
    core.handle(Submit(work("r", 10)), 0.0)
    for first, end, now in ((0, 1, 1.0), (1, 3, 3.0)):
        core.handle(layers(1, first, end), now)
    core.handle(Stepped(1, "joint", done(1, r=5).sampled, {}, 5.0), 5.0)
    assert core.state.step_tail.seconds(10) == 2.0
    core.handle(Release("P0:1", "pulled", (0.5, 0.01)), 5.0)
    (_, step, *_) = core.handle(Submit(work("s", 10, text=500)), 5.0)
    assert isinstance(step, Step)
    assert step.group == 3, "one pull of all layers ends in the two seconds that sampling takes"


def test_a_step_that_ran_again_teaches_nothing() -> None:
    core = source(transfers=TransferPolicy(kv="grouped"), kv=99)
    core.handle(Submit(work("r", 10)), 0.0)
    core.handle(layers(1, 0, 3), 3.0)
    core.handle(again(1), 4.0)
    core.handle(Stepped(1, "joint", done(1, r=5).sampled, {}, 5.0), 5.0)
    assert core.state.step_tail.seconds(10) == 0.0


# ---------------------------------------------------------------- together


@pytest.mark.parametrize("placement", ["EP+D", "E+P+D", "2ED1P", "1E2P2D", "1EP1PD"])
def test_pools_of_one_request_stream_eight_at_once(placement: str) -> None:
    settings = make_settings(
        placement,
        {"image": 3, "kv": 4},
        image_block_size=4,
        kv_block_size=4,
        layers=3,
        transfers=TransferPolicy(kv="layer"),
        rules=BatchRules(token_budget=5),
    )
    cluster = VirtualCluster(settings, seed=8)
    for number in range(8):
        cluster.submit(work(f"r{number}", f"{number}a*12", 1, text=100 * number, max_tokens=4))
    cluster.run()
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}


def test_layers_move_while_prefill_runs() -> None:
    """Nine layers of a second each, a pull of each a tenth of a second: one of them is exposed, not nine."""
    times = {}
    for chosen in (TransferPolicy(kv="off"), TransferPolicy(kv="layer"), TransferPolicy(kv="grouped")):
        still = Durations(
            lambda *_: 0.0,
            lambda draw, name, step: 11.0 if step.prefills else 0.0,
            lambda draw, pull: 0.1 * (pull.layers[1] - pull.layers[0] if pull.layers else 9),
        )
        settings = make_settings("P+D", {"kv": 9}, kv_block_size=4, layers=9, transfers=chosen)
        cluster = VirtualCluster(settings, durations=still, seed=5)
        cluster.submit(work("r", 8, max_tokens=2))
        cluster.run()
        times[chosen.kv] = cluster.outcomes["r"].times[1] - 11.0
        finished = cluster.outcomes["r"].end
        assert finished is not None
        assert finished.finished is not None
        (record,) = finished.finished.transfers
        assert record["mode"] == chosen.kv
        assert record["pulls"] == {"off": 1, "layer": 9, "grouped": 3}[chosen.kv]
        assert record["overlap"] == pytest.approx({"off": 0.0, "layer": 1.0, "grouped": 1.0}[chosen.kv])
    assert times == pytest.approx({"off": 0.9, "layer": 0.0, "grouped": 0.0})


def test_faults_and_cancels_in_the_middle_of_streams_leave_nothing() -> None:
    seen = {"again": 0, "ending": 0, "layers": 0}
    for seed in range(40):
        settings = make_settings(
            "1E1P2D", {"image": 6, "kv": 9}, image_block_size=4, kv_block_size=4, layers=3, transfers=LAYER
        )
        cluster = VirtualCluster(settings, faults=Faults.at_random(0.1, 0.05), seed=seed)
        for number in range(12):
            stop = frozenset({1}) if number % 3 == 0 else frozenset()
            cluster.submit(work(f"r{number}", "a*4", 9, text=100 * (number % 5), stop_ids=stop), at=0.05 * number)
            if number % 4 == 0:
                cluster.abort(f"r{number}", at=0.05 * number + 0.2)
        cluster.run()
        commands = [command for _, _, command in cluster.commands]
        seen["again"] += sum(message.again for message in sent(commands, Ready))
        seen["ending"] += sum(bool(message.ending) for message in sent(commands, Commit))
        seen["layers"] += sum(message.layers is not None for message in sent(commands, Ready))
    assert min(seen.values()) > 5, seen


# ---------------------------------------------------------------- cores broken on purpose


def noticed(placement: str = "E+P+D") -> bool:
    for seed in range(60):
        settings = make_settings(
            placement, {"image": 9, "kv": 12}, image_block_size=4, kv_block_size=4, layers=3, transfers=LAYER
        )
        slow = Durations(pull=lambda draw, pull: draw.uniform(0.0, 0.3))
        cluster = VirtualCluster(settings, durations=slow, seed=seed)
        for number in range(6):
            cluster.submit(work(f"r{number}", 9, text=100 * (number % 2), max_tokens=4), at=0.02 * number)
        try:
            cluster.run()
        except (AssertionError, KeyError, ValueError):
            return True
    return False


def test_the_sound_core_passes() -> None:
    assert not noticed()


def test_layers_announced_before_they_are_written_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    old = kv_source._whole
    monkeypatch.setattr(kv_source, "_whole", lambda s, state, row: (old(s, state, row)[0], s.prefill_blocks(state)))
    settings = make_settings(
        "P+D", {"kv": 12}, kv_block_size=4, layers=3, transfers=LAYER, rules=BatchRules(token_budget=5)
    )
    cluster = VirtualCluster(settings)
    cluster.submit(work("r", 11))
    with pytest.raises(AssertionError):
        cluster.run()


def test_a_target_that_keeps_what_is_void_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    old = kv_target.queue_pieces
    monkeypatch.setattr(
        "trinity.core.migration.target.queue_pieces",
        lambda all, event, now: None if event.again else old(all, event, now),
    )
    assert noticed()


def test_a_target_that_pulls_again_during_the_first_pull_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    old = kv_target.pull_pieces

    def hasty(s: Any, state: Any, now: float) -> None:
        pulls, state.pulls_in_flight = state.pulls_in_flight, 0
        old(s, state, now)
        state.pulls_in_flight += pulls

    monkeypatch.setattr("trinity.core.migration.target.pull_pieces", hasty)
    assert noticed()


def test_a_target_that_does_not_wait_for_every_cell_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.core.migration.target.is_kv_here", lambda s, state: True)
    assert noticed()
