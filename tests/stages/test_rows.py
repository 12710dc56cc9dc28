"""Rows of a language stage that are picked once for many steps: what a table says that picks anew each time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.bare_table import bare_table
from trinity.core.messages import Open, ResolvedSampling, Sampled, Work
from trinity.errors import StageError
from trinity.stages.request_table import RequestTable

BLOCK, BLOCKS = 4, 8


def opened(name: str, length: int, **sampling: Any) -> Open:
    work = Work(request=name, prompt=tuple(range(length)), max_tokens=40, sampling=ResolvedSampling(**sampling))
    first = int(name) * BLOCKS
    return Open(work=work, blocks=tuple(range(first, first + BLOCKS)), tokens=(7,))


def table() -> RequestTable:
    return bare_table(BLOCK)


def told(rows: RequestTable, names: tuple[str, ...]) -> list[Any]:
    selection = rows.select(names)
    ordered, decodes = selection.rows, rows.read_decodes(selection)
    arrays = [decodes.ids, decodes.rope, decodes.lengths, *decodes.tables]
    return [{row.request: tuple(array[at].tolist() for array in arrays[:3]) for at, row in enumerate(ordered)}, *arrays]


OPS = st.lists(
    st.tuples(st.sampled_from(["open", "close", "step", "step", "step", "fail", "part"]), st.integers(0, 5)),
    max_size=40,
)


@settings(max_examples=200)
@given(OPS)
def test_a_batch_picked_before_is_as_one_picked_now(ops: list[tuple[str, int]]) -> None:
    kept, fresh, there = table(), table(), list[str]()
    for at, (op, number) in enumerate(ops):
        name = str(number)
        if op == "open" and name not in there:
            there.append(name)
            for rows in (kept, fresh):
                rows.open(opened(name, 1 + at % 5))
        elif op == "close" and name in there:
            there.remove(name)
            for rows in (kept, fresh):
                rows.close(name)
        names = tuple(there) if op != "part" else tuple(there[number:])
        if op in ("open", "close") or not names or max(fresh.length[row.slot] for row in fresh.rows.values()) > 28:
            continue
        fresh.selection = None
        one, other = told(kept, names), told(fresh, names)
        assert one[0] == other[0]
        assert all(np.array_equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))
        if op != "fail":
            for rows in (kept, fresh):
                ordered = rows.select(names).rows
                rows.commit(ordered, [Sampled(int(row.request) + at) for row in ordered])
    assert {row.request: int(kept.length[row.slot]) for row in kept.rows.values()} == {
        row.request: int(fresh.length[row.slot]) for row in fresh.rows.values()
    }


def test_a_closed_row_is_not_picked_again() -> None:
    rows = table()
    for name in "01":
        rows.open(opened(name, 3))
    told(rows, ("0", "1"))
    rows.close("0")
    with pytest.raises(StageError, match="not open on this stage"):
        rows.select(("0", "1"))
    rows.open(opened("0", 5))
    assert told(rows, ("0", "1"))[0]["0"] == (7, 5, 6)


def test_a_sampler_that_looks_back_sees_all_tokens_and_one_that_does_not_keeps_none() -> None:
    rows = table()
    rows.open(opened("0", 2, repetition_penalty=1.5))
    rows.open(opened("1", 2))
    for token in (8, 9):
        rows.commit(rows.select(("0", "1")).rows, [Sampled(token)] * 2)
    back, plain = rows.rows["0"], rows.rows["1"]
    assert rows.text(back).tolist() == [0, 1, 7, 8, 9]
    assert rows.indexes(np.array([back.slot, plain.slot])).tolist() == [3, 3]
    assert np.array_equal(plain.ids[5:], np.zeros_like(plain.ids[5:]))


def test_who_failed_is_suspect_until_closed() -> None:
    rows = table()
    for name in "01":
        rows.open(opened(name, 3))
    rows.suspects |= {"0"}
    assert [row.suspect for row in map(rows.close, "01") if row is not None] == [True, False]
    assert rows.suspects == set()
