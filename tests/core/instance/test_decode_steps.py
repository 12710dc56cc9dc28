"""Steps that only decode, which a core starts without asking the scheduler: what the scheduler would have said."""

from __future__ import annotations

import pytest

from support.core_tables import done, make_core, work
from trinity.core.messages import Cancel, Step, Submit
from trinity.core.scheduler import BatchRules, Policy, View, schedule
from trinity.costs.budgets import StepCost


def rules(policy: Policy) -> BatchRules:
    return BatchRules(policy=policy, limit_s=100.0, cost=StepCost(decodes=((1, 1.0),), prefill=((1, 1.0),)))


@pytest.mark.parametrize("lanes", [("joint",), ("vision", "language")])
@pytest.mark.parametrize("policy", ["alg1", "time", "prefill_first"])
def test_it_is_the_step_that_the_scheduler_would_choose(policy: Policy, lanes: tuple[str, ...]) -> None:
    core = make_core("EPD0", kv=64, rules=rules(policy), lanes=lanes, prefix_cache=False)
    out = core.handle(Submit(work("a", 3, max_tokens=40)), 0.0) + core.handle(Submit(work("b", 5, max_tokens=40)), 0.0)
    for _ in range(40):
        (step,) = [each for each in out if isinstance(each, Step)]
        assert step.lane == lanes[-1]
        waiting = core.state.prefill_queue or core.state.prefilling
        if not waiting and not step.prefills:
            expected = schedule(View(decoding=tuple(core.state.decoding)), rules(policy))
            assert (step.decodes, step.encodes, step.group) == (expected.decodes, (), 0)
            assert set(step.decodes) == {"a", "b"}
            return
        rows = [row.request for row in step.prefills if row.last] + list(step.decodes)
        out = core.handle(done(step.id, step.lane, **dict.fromkeys(rows, 5)), 0.0)
    pytest.fail("no step decoded both requests")


def test_nothing_left_to_decode_starts_no_step() -> None:
    core = make_core("PD0", prefix_cache=False)
    core.handle(Submit(work("a", 3, max_tokens=9)), 0.0)
    core.handle(done(1, a=5), 0.0)
    core.handle(Cancel("a"), 0.0)
    assert not [each for each in core.handle(done(2, a=6), 0.0) if isinstance(each, Step)]
    assert core.idle()
