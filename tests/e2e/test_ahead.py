"""Two steps in flight on every lane: tokens and logits stay those of generate(), stop tokens in the middle included."""

from __future__ import annotations

import msgspec
import pytest

from support.checkpoint_files import checkpoint
from support.recordings import METHODS, Served, problems, serve
from support.request_cases import BUDGET, answers, waves
from trinity.core.messages import Step, Stepped
from trinity.core.scheduler import BatchRules
from trinity.errors import ConfigError
from trinity.instance import Instance
from trinity.placement import Placement
from trinity.request import Request, Sampling

STOPS = (0, 1, 7, 20)  # outputs at which requests end that ask for more
WANTED = 40


def stopped(at: int) -> Request:
    """Ends with the first output from ``at`` on that its output has not held before."""
    tokens = answers("llava")["one"].token_ids
    at = next(index for index in range(at, len(tokens)) if tokens[index] not in tokens[:index])
    (one,) = (each for wave in waves("llava") for each in wave if each.request_id == "one")
    sampling = Sampling(ignore_eos=True, stop_token_ids=(tokens[at],))
    return msgspec.structs.replace(one, request_id=f"stop {at}", sampling=sampling, max_tokens=WANTED)


@pytest.fixture(scope="module", params=METHODS)
def found(request: pytest.FixtureRequest) -> Served:
    answers("llava")
    placement = [Instance(roles, depth=2) for _, roles in Placement.parse(request.param).instances()]
    cases = [*waves("llava"), [stopped(at) for at in STOPS]]
    pools = {"image": 96, "kv": 256}
    return serve(
        checkpoint("llava"),
        placement,
        cases,
        rules=BatchRules(token_budget=BUDGET, image_budget=60),
        pools=pools,
        image_block_size=7,
    )


def test_tokens_and_logits_are_those_of_generate(found: Served) -> None:
    greedy = {each.request_id for wave in waves("llava") for each in wave}
    assert greedy <= set(found.outputs)
    kept = Served({name: output for name, output in found.outputs.items() if name in greedy}, rows=found.rows)
    assert problems(kept, answers("llava")) == {}


def test_a_stop_token_ends_a_request_in_the_middle(found: Served) -> None:
    whole = answers("llava")["one"].token_ids
    ended = {name: output for name, output in found.outputs.items() if name.startswith("stop")}
    assert len(ended) == len(STOPS)
    for name, output in ended.items():
        at = int(name.split()[1])
        assert output.token_ids == whole[: at + 1]
        assert output.finish_reason == "stop"
    assert any(len(output.token_ids) < WANTED for output in ended.values())


def test_steps_were_decided_ahead_and_rows_ran_for_nothing(found: Served) -> None:
    flying: dict[tuple[str, str], int] = {}
    deepest, wasted = 0, 0
    for handled in found.record.log:
        if isinstance(handled.event, Stepped):
            flying[handled.instance, handled.event.lane] -= 1
        for command in handled.commands:
            if isinstance(command, Step):
                key = (handled.instance, command.lane)
                flying[key] = flying.get(key, 0) + 1
                deepest = max(deepest, flying[key])
    for name, output in found.outputs.items():
        wasted += (name, len(output.token_ids)) in found.rows
    assert deepest == 2
    assert wasted >= 2  # of those that stopped, all but the first token's where P hands on


@pytest.mark.parametrize(
    ("device", "depth", "steps"),
    [(None, None, 1), ("cpu", None, 1), ("cuda:1", None, 2), ("cuda", 1, 1), ("cpu", 2, 2)],
)
def test_a_gpu_has_two_steps_in_flight_unless_told(device: str | None, depth: int | None, steps: int) -> None:
    assert Instance("PD", device=device, depth=depth).steps_in_flight == steps


@pytest.mark.parametrize("depth", [0, 3])
def test_other_depths_are_refused(depth: int) -> None:
    with pytest.raises(ConfigError, match=f"depth is 1 or 2 steps in flight on a lane, got {depth}"):
        Instance("PD", depth=depth)
