"""What front ends tell their buddies of requests to an emulated model."""

from __future__ import annotations

from typing import Any

import msgspec

from support.emulated_pipelines import MODEL, right
from trinity.core.frontend.journal import Journal, JournalPages, Opening
from trinity.emulation.model import EmulatedRequest
from trinity.emulation.processor import EmulatedProcessor
from trinity.pipeline.journal import RequestNote, encode_request

ASKED = EmulatedRequest(
    text_tokens=21, image_tokens=(576,), contents=("cat",), max_tokens=40, text="a prompt", request_id="r"
)


def opening(request: EmulatedRequest = ASKED, **fields: Any) -> Opening:
    """What a front end tells of a request."""
    processed = EmulatedProcessor(MODEL).process(request)
    given = encode_request(request)
    note = RequestNote(request=given, session="s", clipped=False, emulated=True, stop=processed.stop)
    fields = {"key": request.request_id, "reader": request.request_id, **fields}
    return Opening(work=processed.work, note=msgspec.msgpack.encode(note), **fields)


def told(*openings: Opening, known: int = 10, **fields: Any) -> Journal:
    """A journal of these requests, of which so many tokens are out."""
    pages = tuple(JournalPages(each.key, 0, tuple(right(ASKED)[:known])) for each in openings)
    return Journal(number=1, openings=openings, pages=pages, **fields)
