"""Stage: the interface of an object that runs one part of a model on an instance."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from trinity.core.messages import Grow, Open, Sampled, Step
from trinity.errors import StageError
from trinity.stages.attention.backends import AUTO

if TYPE_CHECKING:
    from trinity.memory.block_memory import BlockMemory
    from trinity.stages.models import LoadedModel


class NoTokenDrawn(StageError):
    """A row of logits has no largest value. Of a launched step it may be the request's own bans: that tells a rerun."""


class FailedSample(Sampled, frozen=True):
    """Stands in place of a row's token where that request alone has failed: ``why``, for its error.

    ``refused`` (False): nothing failed, but what the request asks for cannot be: its error is a ``RequestError``.
    """

    why: str = ""
    refused: bool = False


@runtime_checkable
class Stage(Protocol):
    """Part of a model that an instance runs on one of its lanes. Any object with these members is a stage.

    ``letters`` are the roles it serves: "E", or "P", "D" or "PD" for a language stage, which then runs prefill chunks
    and decodes of one step as one ragged batch. All calls come from the lane's thread, one at a time.

    Optional members: ``on_layers`` to report KV layer by layer (``LayerReporter``), ``grow`` for requests that get
    blocks as they decode (``GrowableStage``), ``clean`` for what a failed step has left in blocks (``CleanableStage``),
    and ``launch`` to begin a step without waiting for its end (``LaunchableStage``).
    """

    letters: str

    def open(self, request: Open) -> None:
        """Take in a request whose rows will follow (language stages; an encode stage ignores it)."""

    def close(self, request: str) -> None:
        """Drop the state of a request. None of its rows is in flight."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        """Run this stage's rows of ``step``: write their blocks and return sampled tokens by request id.

        Must be repeatable: after an exception the instance runs each request's rows alone, to find the one at fault.
        Where the stage knows it, it goes on and returns a ``FailedSample`` for that one.
        """
        ...


@runtime_checkable
class LayerReporter(Protocol):
    """Stage that reports its progress by layers. The lane sets ``on_layers``; without it only whole chunks move.

    During ``forward`` of a step with ``group`` > 0, the stage calls it with (first, end) whenever ``group`` more layers
    of the KV of *all* the step's prefill rows are in their blocks, in ascending order without gaps. The kernels that
    write them must have ended and the values must be finite: a decode instance may read them before the step ends.
    """

    on_layers: Callable[[int, int], None] | None


@runtime_checkable
class GrowableStage(Protocol):
    """Stage whose requests get KV blocks as they decode; ``Instance(reservation="optimistic")`` needs it."""

    def grow(self, more: Grow) -> None:
        """Append blocks to the block tables of open requests; ignore requests that are not open."""
        ...


@runtime_checkable
class CleanableStage(Protocol):
    """Stage whose failed steps may leave blocks with values that harm their next owner, such as NaN."""

    def clean(self, failed: Collection[str]) -> None:
        """Clear what a step has left in the blocks of its requests that ``failed`` alone; others were written again.

        Called before the core hears of the step. After that the blocks may be somebody else's, and nothing but the step
        of their next owner, or a transfer, may write to them. No step is in flight.
        """
        ...


class PendingStep(Protocol):
    """Step that was launched. Calls come from the lane's thread, in the order of the launches."""

    def ready(self) -> bool:
        """Tell if ``wait`` would return at once."""
        ...

    def wait(self) -> dict[str, Sampled]:
        """Wait until the device has ended the step; return or raise what ``forward`` would have."""
        ...

    def drop(self) -> None:
        """Undo the launch, in place of ``wait`` or after it raised, and what is recorded of a step that ran at once.

        Nothing of it runs any more on return, and it can run again. Steps launched later have been dropped before. If
        it cannot be undone, raise: the requests of all steps in flight fail then, and none runs again.
        """
        ...


@runtime_checkable
class LaunchableStage(Protocol):
    """Stage whose steps run on a device of their own, for async scheduling (``Instance(depth=2)``).

    A step is then launched before the tokens of the previous one have been read. Its decode rows take their input token
    from the previous step on the device. Between a launch and its end other requests may be opened, grown and closed,
    but none that has a row in the step.
    """

    def launch(self, step: Step) -> PendingStep:
        """Begin what ``forward`` does. May raise the same errors; then nothing was begun."""
        ...


@dataclass(frozen=True)
class StageSetup:
    """Arguments of a stage factory.

    - ``roles``: the letters that the instance serves.
    - ``model``: the loaded weights.
    - ``memory``: the instance's block memory by kind ("image", "kv", "state").
    - ``observe`` (None): called with (request, output index, logits [vocabulary]) of every sampled token.
    - ``attention`` ("auto"): name of the attention backend.
    """

    roles: str
    model: LoadedModel
    memory: Mapping[str, BlockMemory]
    observe: Callable[..., None] | None = None
    attention: str = AUTO


StageFactory = Callable[[StageSetup], Stage]
