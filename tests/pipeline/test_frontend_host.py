"""The front end's host: what a reader does in the middle of an answer comes behind the rest of it."""

from __future__ import annotations

import asyncio
from typing import Any

from support.core_tables import emitted, work
from support.recovering import recovering, told
from trinity.core.frontend import Abort, Deliver, End
from trinity.core.messages import Cancel, Sampled, Submit, Value
from trinity.pipeline.frontend_host import FrontendHost


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
