"""The front end's host: what a reader does in the middle of an answer comes behind the rest of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.core_tables import emitted, work
from support.recovering import recovering, told
from trinity.core.frontend import Abort, Deliver, End
from trinity.core.messages import Cancel, Sampled, Submit, Value
from trinity.pipeline.frontend_host import FrontendHost, preparing_part
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.text.grammars import TRIAL_PATIENCE_S
from trinity.request import Request, Sampling, Structured

LONG = "a " * 200_000
FORM = Sampling(structured=Structured(regex="a"))
ODD: Any = 3
PICTURE = [{"role": "user", "content": [{"type": "image", "image": b"x"}]}]


@pytest.mark.parametrize(
    ("request_", "part", "allowed_s"),
    [
        (Request("a"), "preparing text", 0.0),
        (Request(LONG), "preparing media", 60.0),
        (Request(messages=[{"role": "user", "content": LONG}]), "preparing media", 60.0),
        (Request(messages=[{"role": "user", "content": ""}] * 5000), "preparing media", 60.0),
        (Request("a", images=[b"x"]), "preparing media", 60.0),
        (Request(messages=ODD), "preparing text", 0.0),  # whose form the processor refuses
        (Request(messages=[{"role": "user", "content": [{"type": np.arange(3)}]}]), "preparing media", 60.0),
        (Request(messages=PICTURE), "preparing media", 60.0),
        (Request("a", sampling=FORM), "preparing forms", TRIAL_PATIENCE_S),
        (Request("a", images=[b"x"], sampling=FORM), "preparing forms", TRIAL_PATIENCE_S + 60.0),
        (Request(LONG, sampling=FORM), "preparing forms", TRIAL_PATIENCE_S + 60.0),
    ],
)
def test_what_waits_for_pictures_may_take_as_long_as_they(request_: Request, part: str, allowed_s: float) -> None:
    """At 82dc40f9 a long text stood behind pictures as one that takes no time, and a form with a picture so, too."""
    processor: Any = SimpleNamespace(limits=MediaLimits())
    assert preparing_part(request_, processor) == (part, allowed_s)


class StoppingReader:
    """Ends its request at the first token, as a stop string does."""

    def __init__(self, host: FrontendHost) -> None:
        self._host = host

    def deliver(self, command: Deliver, now: float) -> None:
        self._host.post(Abort(command.request, "stop"))

    def end(self, command: End) -> None:
        pass


async def test_a_stop_at_the_token_behind_which_a_loss_waits_ends_the_next_life() -> None:
    """At 319c3ce the Cancel went ahead of the Submit, and the life ran to its last token."""
    held: Any = None  # of what the host does with connectors and metrics there is none here
    host, sent = FrontendHost(recovering(), held, held, held), list[tuple[str, Value]]()
    found: Any = host
    found.send_to_peer = lambda name, message: sent.append((name, message))
    found.loop = asyncio.get_running_loop()
    found.streams["r"] = StoppingReader(host)
    host.post(Submit(work("r", 4, max_tokens=4)))
    host.post(told("r", 0, route=("P0", "D0"), count=1))  # a pull failed; that is heard before the first token
    host.post(emitted(("r", 0, 0, Sampled(5))))
    assert [type(message) for name, message in sent if name == "P1"] == [Submit, Cancel]
