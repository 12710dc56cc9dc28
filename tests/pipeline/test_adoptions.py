"""What readers of a front end that died find with its buddy: their requests, or typed refusals that say why not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from support.emulated_pipelines import LIVENESS_S, MODEL, POOLS, right
from support.journals import ASKED, opening, told
from trinity.core.frontend.journal import MOST_ADOPTIONS, Closing, Journal, JournalKeeper, JournalStart, JournalWriter
from trinity.core.messages import Failure
from trinity.emulation.processor import EmulatedProcessor
from trinity.errors import BadMedia, ClosedError, ConfigError, DeadlineExceeded, PoisonRequest, ResumeError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.pipeline.adoptions import Adoptions, Resumption
from trinity.pipeline.journal import RequestJournal, RequestNote, decode_request, encode_request
from trinity.pipeline.stream import Stream
from trinity.pipeline.sync_pipeline import SyncPipeline
from trinity.remote.buddy import Buddy
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.request import Media, Request, Sampling, check_request

START = JournalStart("life", "a model", ("D0", "EP0"))


@asynccontextmanager
async def adopting(*, resume_s: float = 60.0) -> AsyncIterator[Adoptions]:
    """The adoptions of a pipeline that serves in this process; who brings journals is played."""
    async with Pipeline(MODEL, "EPD", cache=CacheConfig(pools=POOLS)) as pipe:
        made = pipe._adoptions = Adoptions(pipe._frontend)
        made._resume_s, made._keeper = resume_s, JournalKeeper(keep_s=resume_s)
        made._expiring = asyncio.create_task(made._expire())
        async with asyncio.timeout(LIVENESS_S):
            yield made


async def read(made: Adoptions, request_id: str = "r", after: int = -1, within_s: float = 5.0) -> list[int]:
    resumed = Resumption(made, request_id, after, within_s)
    async with resumed as tokens:
        return [token.id async for token in tokens]


async def reason(made: Adoptions, request_id: str = "r", after: int = -1, within_s: float = 0.05) -> str:
    with pytest.raises(ResumeError) as caught:
        await read(made, request_id, after, within_s)
    assert caught.value.request_id == request_id
    return caught.value.reason


@pytest.mark.parametrize("after", [-1, 4, 9, 10, 17, 38])
async def test_a_reader_goes_on_behind_the_token_that_it_has(after: int) -> None:
    """Also behind one that the buddy has not heard of: it is computed again, and not given."""
    async with adopting() as made:
        made.take("life", told(opening()))
        made.lose("life", "it was killed")
        async with Resumption(made, "r", after, 5.0) as tokens:
            found = [(token.index, token.id) async for token in tokens]
        assert found == list(enumerate(right(ASKED)))[after + 1 :]
        output = tokens.output
        assert (output.token_ids, output.request_id, output.finish_reason) == (right(ASKED), "r", "length")
        assert output.text == "".join(f"<{token}>" for token in right(ASKED))
        assert [each["why"] for each in output.former_lives] == ["its front end was lost"]
        assert await reason(made) == "unknown", "it is over"


async def test_a_reader_that_comes_first_waits_for_the_death() -> None:
    async with adopting() as made:
        made.take("life", told(opening()))
        reading = asyncio.ensure_future(read(made, after=3))
        await asyncio.sleep(0.05)
        assert not reading.done()
        made.lose("life", "it was killed")
        assert await reading == right(ASKED)[4:]


async def test_refusals_say_why() -> None:
    async with adopting() as made:
        assert await reason(made) == "unknown"
        made.take("life", told(opening(), opening(replace(ASKED, request_id="q"))))
        assert await reason(made) == "alive"
        assert await reason(made, "nobody's") == "unknown"
        made.lose("life", "it was killed")
        for after in (40, 41, -2):
            assert await reason(made, after=after) == "beyond"
        assert await read(made, after=38) == right(ASKED)[39:], "what was refused is still there"
        async with Resumption(made, "q", 0, 1.0):
            assert await reason(made, "q") == "taken"
        made.take("other", told(opening(), known=0))
        made.take("third", told(opening(), known=0))
        for life in ("other", "third"):
            made.lose(life, "it was killed")
        assert await reason(made) == "ambiguous"


async def test_a_request_of_this_pipeline_is_read_from_its_own_stream() -> None:
    async with adopting() as made:
        served = Stream(made._host, replace(ASKED, max_tokens=2000))
        async with served:
            await served.wait_first()
            assert await reason(made) == "served here"
            made.take("life", told(opening()))
            reading = asyncio.ensure_future(read(made, after=3))
            await asyncio.sleep(0.02)
            made.lose("life", "it was killed")
            assert await reading == right(ASKED)[4:], "another request of this id is this reader's"


async def test_an_end_that_its_reader_did_not_see_is_told_again() -> None:
    late = Closing("q", "deadline", Failure("DeadlineExceeded", "it took too long"))
    async with adopting() as made:
        whole = told(
            opening(), opening(replace(ASKED, request_id="q")), known=40, closings=(Closing("r", "length"), late)
        )
        made.take("life", whole)
        counted = made._host._metrics.requests
        made.lose("life", "it was killed")
        assert await reason(made, after=40) == "beyond"
        assert await read(made, after=30) == right(ASKED)[31:]
        with pytest.raises(DeadlineExceeded, match="took too long"):
            await read(made, "q")
        assert [await reason(made, each) for each in "rq"] == ["unknown"] * 2, "nothing is left of them"
        assert not made._adopted
        assert made._host._metrics.requests == counted, "another program has counted it"


@asynccontextmanager
async def adopting_in_turn(tmp_path: Path) -> AsyncIterator[tuple[Adoptions, Adoptions]]:
    """Two adopters, of which the second one is the buddy of the first, over a channel."""
    address, secret, config = f"unix:{tmp_path}/journals", b"the secret of two that adopt in turn", ProcessConfig()
    async with adopting() as first, adopting() as second:
        second._expiring.cancel()  # type: ignore[union-attr]
        await second.start(Buddy(listen=address), START, secret, config)
        journal = first._host.journal
        journal.start(Buddy(address), "frontend:a", replace(START, life="first"), secret, None)
        while not journal.reached:
            await asyncio.sleep(0.01)
        yield first, second
        await second.aclose()


async def test_what_had_ended_is_told_to_the_next_buddy_too(tmp_path: Path) -> None:
    """Each way to end: as its reader was told, of two front ends, of pixels that are gone, at a stop string."""
    failed = Closing("failed", "deadline", Failure("DeadlineExceeded", "it took too long"))
    note = RequestNote(request=b"", session="", clipped=False, emulated=False, stop=())
    given = [opening(replace(ASKED, request_id=key)) for key in ("whole", "failed", "open")]
    given += [opening(replace(ASKED, request_id="poison"), adoptions=MOST_ADOPTIONS)]
    given += [replace(opening(replace(ASKED, request_id="gone"), unread=True), note=msgspec.msgpack.encode(note))]
    given += [opening(replace(ASKED, request_id="stopped", sampling=Sampling(stop=(f"<{right(ASKED)[5]}>",))))]
    async with adopting_in_turn(tmp_path) as (first, second):
        first.take("life", told(*given, known=40, closings=(Closing("whole", "length"), failed)))
        first.lose("life", "it was killed")
        keeper = second._keeper
        while sum(each.closing is not None for each in keeper.lives.get("first", {}).values()) < len(given) - 1:
            await asyncio.sleep(0.01)
        assert {each.opening.reader for each in keeper.lives["first"].values()} == {each.reader for each in given}
        first._host.journal._sender._channel.abort()  # type: ignore[union-attr]
        while keeper.lives:
            await asyncio.sleep(0.01)
        assert await read(second, "whole", after=30) == right(ASKED)[31:]
        assert await read(second, "open", after=2) == right(ASKED)[3:]
        assert await read(second, "stopped", after=2) == right(ASKED)[3:6]
        for key, kind, why in (
            ("failed", DeadlineExceeded, "it took too long"),
            ("poison", PoisonRequest, "two programs died"),
            ("gone", BadMedia, "given as objects"),
        ):
            with pytest.raises(kind, match=why):
                await read(second, key)


async def test_requests_whose_readers_stay_away_end() -> None:
    async with adopting(resume_s=0.1) as made:
        made.take("life", told(opening(replace(ASKED, max_tokens=3000))))
        made.take("other", told(opening(), closings=(Closing("r", "length"),)))
        for life in ("life", "other"):
            made.lose(life, "it was killed")
        assert made._host.streams
        while made._adopted or made._host.streams or made._host.core.entries:
            await asyncio.sleep(0.02)
        assert await reason(made) == "unknown"
        assert made._keeper.bytes == 0


async def test_one_that_lives_after_all_has_its_requests_back() -> None:
    """Its channel broke. What a reader has come back for stays; the rest ends here."""
    async with adopting() as made:
        both = told(opening(replace(ASKED, max_tokens=3000)), opening(replace(ASKED, request_id="q", max_tokens=40)))
        made.take("life", both)
        made.lose("life", "its channel broke")
        async with Resumption(made, "q", 9, 1.0) as tokens:
            made.take("life", replace(both, whole=True))
            assert await reason(made) == "alive"
            made.lose("life", "and it died")
            rest = [token.id async for token in tokens]
        assert len(rest) == 30
        assert len(made._adopted) == 1


async def test_one_that_closes_leaves_nothing() -> None:
    async with adopting() as made:
        made.take("life", told(opening()))
        made.take("life", Journal(number=2, closed=True))
        made.lose("life", "it has closed")
        assert await reason(made) == "unknown"
        assert not made._adopted


async def test_a_request_that_front_ends_die_of_is_not_gone_on_with() -> None:
    async with adopting() as made:
        made.take("life", told(opening(adoptions=MOST_ADOPTIONS)))
        made.lose("life", "it was killed")
        with pytest.raises(PoisonRequest, match="two programs died"):
            await read(made)


async def test_its_error_is_told_also_to_a_reader_that_has_more_of_it_than_the_journal() -> None:
    async with adopting() as made:
        made.take("life", told(opening(adoptions=MOST_ADOPTIONS)))
        made.lose("life", "it was killed")
        while not all(stream.done for stream in made._adopted.values()):
            await asyncio.sleep(0.01)
        with pytest.raises(PoisonRequest, match="two programs died"):
            await read(made, after=24)


async def test_pixels_that_nobody_can_read_again_end_it() -> None:
    note = RequestNote(request=b"", session="", clipped=False, emulated=False, stop=())
    sent = replace(opening(unread=True), note=msgspec.msgpack.encode(note))
    async with adopting() as made:
        made.take("life", told(sent))
        made.lose("life", "it was killed")
        with pytest.raises(BadMedia, match="given as objects"):
            await read(made)


async def test_scores_are_there_whatever_was_told_of_the_request() -> None:
    """One with an image as an object is told of by its work alone, which says that scores were asked for."""
    note = RequestNote(request=b"", session="", clipped=False, emulated=True, stop=())
    sent = replace(opening(), note=msgspec.msgpack.encode(note))
    sent = replace(sent, work=replace(sent.work, sampling=replace(sent.work.sampling, logprobs=2)))
    async with adopting() as made:
        made.take("life", told(sent))
        made.lose("life", "it was killed")
        async with Resumption(made, "r", 9, 1.0) as tokens:
            assert [token.id async for token in tokens] == right(ASKED)[10:]
        assert len(tokens.output.logprobs) == len(tokens.output.top_logprobs) == len(right(ASKED))


async def test_a_stop_string_among_the_known_tokens_ends_it() -> None:
    stop = f"<{right(ASKED)[5]}>"
    asked = replace(ASKED, sampling=Sampling(stop=(stop,)))
    async with adopting() as made:
        made.take("life", told(opening(asked)))
        made.lose("life", "it was killed")
        async with Resumption(made, "r", 2, 1.0) as tokens:
            assert [token.id async for token in tokens][:2] == right(ASKED)[3:5]
        assert (tokens.output.finish_reason, stop in tokens.output.text) == ("stop", False)


async def test_what_cannot_be_read_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with adopting() as made:
        broken = replace(opening(replace(ASKED, request_id="q")), note=b"no note")
        made.take("life", told(broken, opening()))
        made.lose("life", "it was killed")
        assert "request q of a lost front end cannot go on" in caplog.text
        assert await read(made, after=9) == right(ASKED)[10:]


async def test_a_pipeline_that_closes_ends_readers_that_wait() -> None:
    async with adopting() as made:
        made.take("life", told(opening()))
        waiting = asyncio.ensure_future(read(made))
        await asyncio.sleep(0.02)
        made._host.opened = "closed"
        await made.aclose()
        with pytest.raises(ClosedError):
            await waiting
        made._host.opened = "running"


def test_who_serves_something_else_is_no_buddy() -> None:
    made = Adoptions.__new__(Adoptions)
    made._own = replace(START, life="own")
    assert made.refuse(START) == ""
    assert made.refuse(replace(START, instances=("D0", "X0"))) == ""
    assert "other weights" in made.refuse(replace(START, model="another"))
    assert "its own buddy" in made.refuse(made._own), "whatever the address by which it reached itself"
    assert "not on X0" in made.refuse(replace(START, instances=("X0",)))


def test_a_request_is_read_again_as_it_was_given() -> None:
    asked = Request("a <image>", images=["/a/cat.jpg"], sampling=Sampling(seed=3, stop=("x",)), session="s")
    note = RequestNote(request=encode_request(asked), session="s", clipped=False, emulated=False, stop=())
    again = check_request(decode_request(note, "key", opening().work))
    assert again == check_request(replace(asked, request_id="key"))
    assert encode_request(replace(asked, media=[Media("image", object())])) == b""
    bare = decode_request(replace(note, request=b""), "key", opening().work)
    assert (bare.request_id, bare.session, bare.prompt) == ("key", "s", "")


def test_without_await() -> None:
    with SyncPipeline(MODEL, "EPD", cache=CacheConfig(pools=POOLS)) as pipe:

        async def adopt() -> None:
            made = pipe.pipeline._adoptions = Adoptions(pipe.pipeline._frontend)
            made._resume_s, made._keeper = 60.0, JournalKeeper()
            made.take("life", told(opening()))
            made.lose("life", "it was killed")

        pipe.thread.run(adopt)
        assert (pipe.has_buddy, pipe.journal_address) == (False, "")
        with pipe.resume("r", after=9) as tokens:
            assert [token.id for token in tokens] == right(ASKED)[10:]
        with pytest.raises(ResumeError), pipe.resume("r"):
            pass


class Sender:
    """Notes what a buddy would be told."""

    async def wait_kept(self) -> None:
        pass


async def test_what_is_told_of_media_by_how_they_were_given() -> None:
    """By reference where that can be, else as pixels, and so once more by the front end that adopts it."""
    pixels: Any = ({"pixel_values": b""},)
    processed = replace(EmulatedProcessor(MODEL).process(ASKED), emulated=False, inputs=pixels)
    known, foreign = ASKED, replace(ASKED, media=[Media("image", object())])
    for request, given, told_of in ((known, None, ()), (foreign, None, pixels), (known, b"", pixels)):
        journal = RequestJournal()
        journal._writer, journal._sender = JournalWriter(), Sender()  # type: ignore[assignment]
        host: Any = None
        await journal.note(Stream(host, request), processed, reader="r", given=given, adoptions=1)
        whole = journal._writer.take(0.0)
        assert whole is not None
        (opened,) = whole.openings
        assert (opened.inputs, opened.unread, opened.adoptions) == (told_of, not told_of, 1)


@pytest.mark.parametrize("wrong", [{"after": "7"}, {"after": 1.5}, {"within_s": -1.0}, {"request_id": 7}])
def test_what_is_no_index_is_refused(wrong: dict[str, Any]) -> None:
    pipe = Pipeline(MODEL, "EPD")
    named = {"request_id": "r", **wrong}
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        pipe.resume(named.pop("request_id"), **named)
