"""Block tables on the device: those of the host at any time, and no block of them is sent twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trinity.stages import block_tables as device_tables
from trinity.stages.attention.gpu.flash_infer import make_page_lists
from trinity.stages.attention.gpu.varlen import make_varlen_rows
from trinity.stages.batch import Chunk, Decodes, build_batch
from trinity.stages.block_tables import BlockTables, DeviceTables, upload

OPS = st.lists(
    st.tuples(st.sampled_from(["grow", "grow", "select", "close", "others"]), st.integers(0, 5), st.integers(1, 40)),
    max_size=40,
)


def count_sent(patch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all that is sent from now on, in numbers of 32 bits."""
    sent: list[int] = []

    def noted(values: np.ndarray, *rest: Any) -> torch.Tensor:
        assert values.dtype == np.int32
        sent.append(values.size)
        return upload(values, *rest)

    patch.setattr(device_tables, "upload", noted)
    return sent


@given(ops=OPS)
def test_tables_are_those_of_the_host(ops: list[tuple[str, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_tables, "_FIRST_ROOM", 32)
        sent, kept, used = count_sent(patch), DeviceTables(torch.device("cpu")), 1
        tables, known = dict[int, np.ndarray](), dict[int, int]()
        for op, slot, count in ops:
            if op == "grow":
                new = np.arange(used, used := used + count)
                tables[slot] = np.concatenate((tables.get(slot, new[:0]), new))
            elif op == "close" and slot in tables:
                kept.release([slot])
                del tables[slot]
                known.pop(slot, None)
            elif op == "others":
                held = BlockTables.join(np.arange(used, used + 3 * count).reshape(3, count))
                assert kept.select(None, held).tolist() == np.stack(list(held)).tolist()
                known = {slot: length for slot, length in known.items() if slot > 2}
            asked = [slot for slot in tables if (slot + count) % 3]
            if op in ("select", "grow"):
                sent.clear()
                found = kept.select(np.array(asked, dtype=np.int64), BlockTables.join([tables[each] for each in asked]))
                assert found.dtype == torch.int32
                assert [row[: len(tables[each])].tolist() for row, each in zip(found, asked, strict=True)] == [
                    tables[each].tolist() for each in asked
                ]
                lacking = sum(len(tables[each]) - known.get(each, 0) for each in asked)
                assert sent == [len(asked) + 2 * lacking]
                known |= {each: len(tables[each]) for each in asked}


def test_a_batch_has_the_tables_that_are_kept() -> None:
    """Decodes and chunks, of which one is sampled; as with tables of the host, also as page lists and as last rows."""
    cpu, order = torch.device("cpu"), np.random.default_rng(0).permutation(60)
    lengths, kept = np.array([3, 17, 70]), DeviceTables(cpu)
    decodes = Decodes(lengths, lengths, lengths, [order[:1], order[1:4], order[4:9]], np.array([5, 0, 9]))
    starts, slots, held = (0, 20), (2, 7), (order[10:14], order[14:20])
    chunks = [
        Chunk(np.arange(40), np.arange(40), start, table, needs_logits=start > 0, slot=slot)
        for start, slot, table in zip(starts, slots, held, strict=True)
    ]
    for _ in range(2):
        one, other = (build_batch(decodes, chunks, 16, 1, cpu, each) for each in (None, kept))
        assert [each.table.tolist() for each in other.rows.chunks] == [each.tolist() for each in held]
        for rows, known in ((other.rows, one.rows), (other.sampled, one.sampled)):
            assert rows is not None
            assert known is not None
            assert rows.there is not None
            lists, wanted = (make_page_lists(each, 16, cpu) for each in (rows, known))
            assert all(torch.equal(a, b) for a, b in zip(lists, wanted, strict=True))
            found, laid = (make_varlen_rows(each, cpu) for each in (rows, known))
            assert found.tables is rows.there
            for length, row, right in zip(laid.lengths.tolist(), found.tables, laid.tables, strict=True):
                assert torch.equal(row[: -(-length // 16)], right[: -(-length // 16)])
