"""Stage: what runs a part of a model on one instance. Bring your own by writing an object with these members."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from trinity.messages import Open, Sampled, Step


@runtime_checkable
class Stage(Protocol):
    """A stage of a model, run by an instance on one of its lanes.

    ``letters`` are the roles it serves: "E", or "P", "D" or "PD" for a language stage (prefill chunks and decodes of
    one step are then one ragged batch). ``consumes`` and ``produces`` are kinds of block ("image", "kv").
    All calls come from the lane's thread, one at a time.
    """

    letters: str
    consumes: tuple[str, ...]
    produces: tuple[str, ...]

    def open(self, request: Open) -> None:
        """A request's rows will follow (language stages; an encode stage ignores it)."""

    def close(self, request: str) -> None:
        """Nothing of the request is in flight; drop what is kept of it."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        """Run the rows of ``step`` that are this stage's: blocks are written, sampled tokens returned by request.

        Must be repeatable: after an exception the instance runs each request's rows alone, to find whose fault it is.
        """
        ...
