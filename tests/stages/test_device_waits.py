"""Sampling on a device for which the host never waits: every combination of what a request may ask, on a stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.bare_table import bare_table
from support.device_waits import DEVICE, DeviceWait, no_device_waits
from trinity.core.messages import Open, ResolvedSampling, Work
from trinity.stages.async_steps import DeviceTokens, HostCopies, LaunchedStep, draw_next
from trinity.stages.block_tables import upload

VOCABULARY = 500
samplings = st.builds(
    ResolvedSampling,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 5, 300]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (9999, 1.0))]),
    no_repeat_ngram_size=st.sampled_from([0, 1, 3]),
    min_tokens=st.sampled_from([0, 2]),
    suppress_tokens=st.sampled_from([(), (4, 9999)]),
    begin_suppress_tokens=st.sampled_from([(), (5,)]),
    bad_words_ids=st.sampled_from([(), ((1,), (2, 3), (7, 8, 9))]),
    forced_eos_token_id=st.sampled_from([(), (6,)]),
    seed=st.integers(0, 9),
    logprobs=st.sampled_from([None, 0, 4]),
)


def launch(asked: list[ResolvedSampling], steps: int = 2) -> LaunchedStep:
    """Steps of a table of open requests, none of which is read before the next is launched."""
    table, kept, copies = bare_table(), DeviceTokens(DEVICE), HostCopies()
    for number, sampling in enumerate(asked):
        work = Work(request=str(number), prompt=(1, 2, 3), max_tokens=steps, sampling=sampling, stop_ids=frozenset({7}))
        table.open(Open(work=work, blocks=(number,)))
    rows = list(table.rows.values())
    slots = table.slots_of(rows)
    for _ in range(steps):
        logits = torch.empty((len(rows), VOCABULARY), device=DEVICE, dtype=torch.bfloat16)
        drawn = draw_next(logits, table, rows, slots, kept)
        made = LaunchedStep(table, rows, slots, [row.request for row in rows], drawn, copies)
    return made


@settings(max_examples=25)
@given(asked=st.lists(samplings, min_size=1, max_size=3))
def test_no_launch_waits_for_the_device(asked: list[ResolvedSampling]) -> None:
    with no_device_waits() as watch:
        pending = launch(asked)
        assert not pending.ready()
        with pytest.raises(DeviceWait, match="an event is waited for"):
            pending.wait()
    assert watch.copies >= 3, "slots or settings go there, and each step's tokens come back"


@pytest.mark.parametrize(
    "read",
    [
        lambda logits: logits.sum().item(),
        lambda logits: logits.argmax(-1).tolist(),
        lambda logits: bool((logits > 1).all()),
        lambda logits: torch.tensor([1.0], device=DEVICE),
        lambda logits: torch.from_numpy(np.arange(3)).to(DEVICE),
        lambda logits: logits.cpu(),
        lambda logits: torch.nonzero(logits),
        lambda logits: logits[logits > 1],
        lambda logits: logits[[0, 1]],
        lambda logits: logits[0, torch.tensor([0])],
    ],
    ids=["item", "tolist", "bool", "tensor", "pageable", "cpu", "nonzero", "mask", "list", "indices"],
)
def test_the_stand_in_sees_what_waits(read: Any) -> None:
    with no_device_waits():
        logits = torch.empty((2, 5), device=DEVICE)
        assert upload(np.arange(3), DEVICE).is_meta
        said = r"reads a value|by a mask|indices of the host|from cpu to meta|from meta to cpu"
        with pytest.raises(RuntimeError, match=said):
            read(logits)
