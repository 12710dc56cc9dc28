"""Decodes that move to another instance after each token, with a real tiny LLaVA: the tokens of generate()."""

from __future__ import annotations

import asyncio
import time

import pytest

import trinity
from support import paths
from support.checkpoint_files import checkpoint
from support.moved_streams import read_moving, reason_of
from trinity.core.transfers import TransferPolicy
from trinity.errors import MoveError
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling
from trinity.testing.oracle import Oracle

STOP = TransferPolicy(precopy="off")
PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))


def request(max_tokens: int = 40, **sampling: float) -> Request:
    chosen = Sampling(ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=max_tokens, sampling=chosen)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_decode_that_moves_at_each_step_is_exact(depth: int) -> None:
    greedy, sampled = request(), request(temperature=0.9, top_p=0.9, seed=3, repetition_penalty=1.1)
    wanted = list(Oracle(checkpoint("llava")).generate(greedy))

    async def main() -> None:
        async with Pipeline(
            checkpoint("llava"), placement="1E1P2D", dtype="float32", depth=depth, transfers=STOP
        ) as pipe:
            alone = list((await pipe.complete(sampled)).token_ids)
            streams = [pipe.stream(greedy), pipe.stream(sampled)]
            found = await asyncio.gather(*(read_moving(each, ("D0", "D1")) for each in streams))
            assert [list(output.token_ids) for output, _ in found] == [wanted, alone]
            assert all(moved >= 5 for _, moved in found), found
            assert all(output.lives == 1 for output, _ in found), "no move costs a recovery"

    asyncio.run(main())


def test_each_reason_why_a_decode_does_not_move_is_told() -> None:
    async def main() -> None:
        async with Pipeline(checkpoint("llava"), placement="1E1P2D", dtype="float32") as pipe:
            for to, reason in [("P0", "no decode"), ("nobody", "unknown")]:
                assert await reason_of(pipe, request(8), to) == reason
            stream = pipe.stream(request(400))
            with pytest.raises(MoveError, match="ended, or was never here") as caught:
                await stream.move("D1")
            assert (caught.value.reason, caught.value.request_id) == ("ended", stream.request.request_id)
            async with stream as tokens:
                async for _ in tokens:
                    if tokens.place.startswith("D"):  # which is told behind the first tokens
                        with pytest.raises(MoveError, match="already"):
                            await tokens.move(tokens.place)
                        break
                else:
                    pytest.fail("its place was never told")
            with pytest.raises(MoveError, match="ended, or was never here"):
                await tokens.move("D1")

    asyncio.run(main())


def test_a_stream_without_await_moves_as_well() -> None:
    with trinity.SyncPipeline(checkpoint("llava"), placement="1E1P2D", dtype="float32") as pipe:
        alone = pipe.complete(request(240))
        places = []
        with pipe.stream(request(240)) as tokens:
            for token in tokens:
                if token.index == 2:
                    until = time.monotonic() + 60
                    while not tokens.place and time.monotonic() < until:  # a busy machine says it later
                        time.sleep(0.001)
                    places.append(tokens.place)
                    tokens.move("D1" if tokens.place == "D0" else "D0")
                    with pytest.raises(MoveError, match="no instance 'D7'"):
                        tokens.move("D7")
                places.append(tokens.place)
        assert tokens.output.token_ids == alone.token_ids
        assert len({*places} & {"D0", "D1"}) == 2
