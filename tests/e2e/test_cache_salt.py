"""Requests of different salts share no block of the prefix and image caches; those of one salt do, everywhere."""

from __future__ import annotations

import asyncio

import pytest

from support.checkpoint_files import checkpoint
from support.recordings import PATIENCE_S, Recording
from support.stage_driver import picture
from trinity.pipeline import Pipeline
from trinity.request import Output, Request

LONG = "A brown dog runs over the wet grass behind two children. " * 6


@pytest.mark.parametrize("placement", ["EPD", "1E1P1D"])
def test_tenants_find_nothing_of_each_other(placement: str) -> None:
    async def serve() -> tuple[list[tuple[str, int, int]], list[Output]]:
        found, outputs, record = [], [], Recording()
        async with (
            asyncio.timeout(PATIENCE_S),
            Pipeline(checkpoint("llava"), placement, dtype="float32") as pipe,
        ):
            record.attach(pipe)
            for at, salt in enumerate(("one", "one", "two", "", "", "two", "one")):
                before = len(record.encodes())
                asked = Request(f"{LONG}<image> What?", images=[picture(1)], max_tokens=2, cache_salt=salt)
                outputs.append(await pipe.complete(asked))
                await pipe.wait_idle()
                found.append((salt, outputs[at].cached_tokens, len(record.encodes()) - before))
        return found, outputs

    found, outputs = asyncio.run(serve())
    assert len({tuple(each.token_ids) for each in outputs}) == 1
    first = {salt: next(row for row in found if row[0] == salt) for salt in ("one", "two", "")}
    assert {(cached, encoded) for _, cached, encoded in first.values()} == {(0, 1)}, "nobody has it for this salt"
    again = [row for at, row in enumerate(found) if row not in first.values() or found.index(row) != at]
    assert len(again) == 4
    assert all(cached > 0 and encoded == 0 for _, cached, encoded in again), found
