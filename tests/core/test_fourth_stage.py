"""A fourth entry of the table of stages, with blocks of its own kind: the cores serve it and never name it."""

from __future__ import annotations

from collections import Counter

import pytest

from support.audio_stage import PLACEMENTS, SOUND, as_sound, audio_stage, give_sound
from support.together import play, together
from support.virtual.cluster import VirtualCluster, make_settings
from trinity.core.failure_policy import FailurePolicy
from trinity.core.messages import IMAGE, KV, Encode, Failure, Finished, MediaSpan, Pull, Send, Step, Work
from trinity.placement import Placement
from trinity.stage_kinds import all_letters, order_letters, path_of, roles_of, stage_kinds, stages_on, taker_of

POOLS = {IMAGE: 8, SOUND: 8, KV: 40}
PICTURE = MediaSpan("image", 5, 1, 5, "a picture")
RUNS = 60


def make_work(name: str, *media: MediaSpan) -> Work:
    return Work(request=name, prompt=tuple(range(10)), media=media, max_tokens=4)


def make_cluster(placement: str, failures: FailurePolicy | None = None) -> VirtualCluster:
    settings = make_settings(placement, POOLS, image_block_size=4, kv_block_size=4)
    return VirtualCluster(settings, seed=3, failures=failures or FailurePolicy(recoveries=0, wait_s=0.0))


def find_failure(cluster: VirtualCluster, name: str) -> Failure | None:
    """Find why a request failed, which must have ended; None for one that has all it wants."""
    end = cluster.outcomes[name].end
    assert end is not None, f"{name} has no end"
    return end.failure


def list_encodes(cluster: VirtualCluster) -> set[tuple[str, str]]:
    """Pairs of an instance's name and the kind of media that it has encoded."""
    steps = [(name, each) for _, name, each in cluster.commands if isinstance(each, Step)]
    return {(name, row.span.kind) for name, step in steps for row in step.encodes if isinstance(row, Encode)}


def list_pulls(cluster: VirtualCluster) -> Counter[tuple[str, str]]:
    """Pulls by instance and kind of block."""
    return Counter((name, each.kind) for _, name, each in cluster.commands if isinstance(each, Pull))


def test_the_table_answers_for_it_and_is_as_it_was_afterwards() -> None:
    before = stage_kinds()
    with audio_stage():
        assert all_letters() == "EAPD"
        assert str(Placement.parse("dpae")) == "1EAPD"
        assert roles_of("P").kinds == {IMAGE, SOUND, KV, "state"}
        assert roles_of("EA").encoded == {IMAGE, SOUND}
        assert roles_of("A").encoded == {SOUND}
        assert taker_of(SOUND) == "P"
        assert stages_on("E", "EAPD") == stages_on("E", "EPD") == "EPD"
        assert stages_on("A", "EAPD") == "APD"
        assert path_of(make_work("a", as_sound(PICTURE))) == "APD"
        assert path_of(make_work("a", PICTURE)) == "EPD"
        assert path_of(make_work("a")) == "PD"
    assert stage_kinds() == before
    assert order_letters("DAPE") == "EPD"
    assert roles_of("P").kinds == {IMAGE, KV, "state"}


def test_each_request_goes_by_the_stages_that_it_needs() -> None:
    with audio_stage():
        cluster = make_cluster("E+A+P+D")
        cluster.submit(make_work("text"))
        cluster.submit(make_work("image", PICTURE))
        cluster.submit(make_work("sound", as_sound(PICTURE)))
        cluster.run()
    sent = [each.message for _, _, each in cluster.commands if isinstance(each, Send)]
    routes = {each.request: each.route for each in sent if isinstance(each, Finished)}
    assert routes == {"text": ("P0", "D0"), "image": ("E0", "P0", "D0"), "sound": ("A0", "P0", "D0")}
    assert all(each.tokens == [1, 2, 3, 4] for each in cluster.outcomes.values())
    assert list_encodes(cluster) == {("E0", "image"), ("A0", SOUND)}
    assert list_pulls(cluster) == {("P0", IMAGE): 1, ("P0", SOUND): 1, ("D0", KV): 3}


def test_an_instance_may_have_both_encoders_and_only_needs_room_in_the_pool_that_a_request_fills() -> None:
    with audio_stage():
        cluster = VirtualCluster(
            make_settings("EA+PD", {**POOLS, SOUND: 1}, image_block_size=4, kv_block_size=4),
            failures=FailurePolicy(recoveries=0, wait_s=0.0),
        )
        cluster.submit(make_work("image", PICTURE))
        cluster.submit(make_work("sound", as_sound(PICTURE)))
        cluster.run()
    assert find_failure(cluster, "image") is None
    failed = find_failure(cluster, "sound")
    assert failed is not None
    assert failed.error == "RequestTooLarge"
    assert "2 audio of 1 in EA0" in failed.message


def test_media_of_two_encoders_in_one_request_are_refused() -> None:
    with audio_stage():
        cluster = make_cluster("EAPD")
        cluster.submit(make_work("both", PICTURE, as_sound(MediaSpan("image", 1, 7, 1, "another"))))
        cluster.run()
    text = "its media need the stages E and A, and a request has one that encodes: send them apart"
    assert find_failure(cluster, "both") == Failure("RequestError", text)


@pytest.mark.parametrize("victim", ["E0", "A0", "P0", "D0"])
@pytest.mark.parametrize("at", [0.01, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4])
def test_requests_outlive_the_death_of_any_of_the_four(victim: str, at: float) -> None:
    with audio_stage():
        cluster = make_cluster("E+A+P+D", FailurePolicy(recoveries=5, wait_s=None))
        for number in range(3):
            cluster.submit(make_work(f"image {number}", PICTURE), at=0.05 * number)
            cluster.submit(make_work(f"sound {number}", as_sound(PICTURE)), at=0.05 * number)
        cluster.kill(victim, at)
        cluster.run()
    for name, each in cluster.outcomes.items():
        assert find_failure(cluster, name) is None
        assert each.tokens == [1, 2, 3, 4], name


@pytest.mark.timeout(900)
def test_all_at_once_on_four_stages_with_all_invariants(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs of ``test_all_together``: kills amid any message, faults, switches to any roles, helpers, moves."""
    give_sound(monkeypatch)
    seen, encoded, pulled = Counter[str](), Counter[tuple[str, str]](), Counter[str]()
    with audio_stage():
        assert all("A" in Placement.parse(each).stages for each in PLACEMENTS)
        for seed in range(RUNS):
            run = together(seed)
            seen += play(run)
            roles = {name: core.settings.roles for name, core in run.cluster.cores.items()}
            encoded.update((kind, roles[name]) for name, kind in list_encodes(run.cluster))
            pulled.update(kind for (_, kind), count in list_pulls(run.cluster).items() for _ in range(count))
    assert min(pulled[SOUND], pulled[IMAGE], pulled[KV]) > RUNS, pulled
    assert {kind for kind, _ in encoded} == {SOUND, "image"}
    missing = [what for what in ("deaths", "survived", "switched", "length", "encoded") if not seen[what]]
    assert not missing, seen
