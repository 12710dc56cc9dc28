"""Stage: what runs a part of a model on one instance. Bring your own by writing an object with these members."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trinity.core.messages import Grow, Open, Sampled, Step
from trinity.stages.attention.backends import AUTO

if TYPE_CHECKING:
    from trinity.memory.block_memory import BlockMemory
    from trinity.stages.models import LoadedModel


@runtime_checkable
class Stage(Protocol):
    """A stage of a model, run by an instance on one of its lanes.

    ``letters`` are the roles it serves: "E", or "P", "D" or "PD" for a language stage (prefill chunks and decodes of
    one step are then one ragged batch). All calls come from the lane's thread, one at a time.

    A stage that writes KV layer by layer may have an attribute ``on_layers`` besides (``Reporting``), and one whose
    requests get blocks as they decode a method ``grow`` (``Growing``). One that can start a step without waiting for it
    may have ``launch`` (``Launching``).
    """

    letters: str

    def open(self, request: Open) -> None:
        """A request's rows will follow (language stages; an encode stage ignores it)."""

    def close(self, request: str) -> None:
        """Nothing of the request is in flight; drop what is kept of it."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        """Run the rows of ``step`` that are this stage's: blocks are written, sampled tokens returned by request.

        Must be repeatable: after an exception the instance runs each request's rows alone, to find whose fault it is.
        """
        ...


@runtime_checkable
class Reporting(Protocol):
    """A stage that tells of its progress. The lane sets ``on_layers``; without it whole chunks are moved.

    During ``forward`` of a step with ``group`` > 0 it is called with (first, end) whenever ``group`` more layers of the
    KV of *all* the step's prefill rows are in their blocks, in ascending order and without gaps: kernels that write
    them have ended, and what they wrote is finite, for a decode instance may read it before the step is over.
    """

    on_layers: Callable[[int, int], None] | None


@runtime_checkable
class Growing(Protocol):
    """A stage whose requests get blocks as they decode: what ``Instance(reservation="optimistic")`` asks for."""

    def grow(self, more: Grow) -> None:
        """Append blocks to the tables of open requests; those that are not open are left out."""
        ...


class Pending(Protocol):
    """A step that was launched. Calls come from the lane's thread; of several steps in the order of their launches."""

    def ready(self) -> bool:
        """Whether ``wait`` would return at once."""
        ...

    def wait(self) -> dict[str, Sampled]:
        """What ``forward`` would have returned or raised, once the device has ended the step."""
        ...

    def drop(self) -> None:
        """In place of ``wait``, or after it has raised: the step counts as never launched, and nothing of it runs any
        more. Steps that were launched after it were dropped before it."""
        ...


@runtime_checkable
class Launching(Protocol):
    """A stage whose steps run on a device of their own: with ``Instance(depth=2)`` a step is launched behind one whose
    tokens nobody has read. A row that decodes then feeds the token that its row of that step samples, on the device.

    Between a launch and its end other requests may be opened, grown and closed; never one that has a row in it.
    """

    def launch(self, step: Step) -> Pending:
        """Begin what ``forward`` does. May raise as that does; then nothing was begun."""
        ...


@dataclass(frozen=True)
class StageSetup:
    """What a stage is made from: the loaded weights, the instance's roles and its block memory by kind."""

    roles: str
    model: LoadedModel
    memory: Mapping[str, BlockMemory]
    observe: Callable[..., None] | None = None
    attention: str = AUTO


StageFactory = Callable[[StageSetup], Stage]
