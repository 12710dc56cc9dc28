"""Rows of a step: selected for a stage, split by request, named, and checked against what a stage returned for them."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection

from trinity.core.instance.rates import units
from trinity.core.messages import Encode, Sampled, Step
from trinity.errors import RequestError, StageError, TrinityError, describe_error
from trinity.errors.arguments import show
from trinity.stage_kinds import order_letters, roles_of, stage_of
from trinity.stages.base import FailedSample

SAMPLED_ONLY = {Sampled}
LARGEST_VOCABULARY = 1 << 31


_OF_VALUES = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
# torch raises a bare RuntimeError for shapes that do not fit, and for all else as well.
_SHAPES = re.compile(r"shape|size|dimension|\bdim\b|view|broadcast|out of (range|bounds)|index|numel|elements")
_DEVICES = re.compile(r"cuda|cublas|cudnn|nccl|\bhip|xpu|memory|alloc|device|driver|illegal|dnn|mmap", re.IGNORECASE)


def is_of_values(error: BaseException) -> bool:
    """True for an error of shapes or values, which the inputs of a step may have brought about.

    Not of memory, devices and files, and no fault of this library's own code: those say nothing of the inputs.
    """
    if isinstance(error, (TrinityError, OSError, MemoryError)):
        return False
    if isinstance(error, (AssertionError, LookupError, TypeError)) and _raised_here(error):
        return False
    said = describe_error(error)
    plain = type(error) is RuntimeError and _SHAPES.search(said) is not None
    return (plain or isinstance(error, _OF_VALUES)) and _DEVICES.search(said) is None


def _raised_here(error: BaseException) -> bool:
    """True where the innermost frame of Python code is one of this library."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__", "")).partition(".")[0] == "trinity"


def describe_unfit(encode: Encode, error: BaseException) -> str:
    """Describe a media item that an encoder cannot take, with what that raised."""
    span = encode.span
    size = f" of {span.width} x {span.height} pixels" if span.width and span.height else ""
    return (
        f"the model's encoder cannot take the {span.kind}{size} ({describe_error(error, 200)}); give it in another size"
    )


class NoTokenLeft(RequestError):
    """A request's own rules left it no token (``FailedSample.refused``): no stage is at fault."""


def check_sampled(sampled: dict[str, Sampled]) -> dict[str, Sampled]:
    """Check what a stage returned. Raises ``TypeError`` if it is not a dict of ``Sampled`` by request.

    Raises ``StageError`` for a ``FailedSample``, which says why, or ``NoTokenLeft`` for one that is refused.
    """
    kinds = set(map(type, sampled.values())) if isinstance(sampled, dict) else {type(sampled)}
    if not all(issubclass(kind, Sampled) for kind in kinds):
        raise TypeError(f"Stage.forward() must return a dict of Sampled by request, got {show(sampled)}")
    if FailedSample in kinds:
        failed = next(one for one in sampled.values() if isinstance(one, FailedSample))
        raise (NoTokenLeft if failed.refused else StageError)(failed.why)
    return sampled


def check_tokens(sampled: dict[str, Sampled], vocabulary: int = LARGEST_VOCABULARY) -> dict[str, Sampled]:
    """Check that tokens are plain ids of the vocabulary. Raises ``TypeError`` if not."""
    tokens = [one.token for one in sampled.values()]
    if tokens and (set(map(type, tokens)) != {int} or not 0 <= min(tokens) <= max(tokens) < vocabulary):
        wrong = next(each for each in tokens if type(each) is not int or not 0 <= each < vocabulary)
        raise TypeError(
            f"Sampled.token must be an int from 0 to {vocabulary - 1}, got {show(wrong)}; give an id of the vocabulary"
        )
    return sampled


def check_complete(step: Step, sampled: dict[str, Sampled], vocabulary: int = LARGEST_VOCABULARY) -> dict[str, Sampled]:
    """Check that each row that needs a token has one. Raises ``RuntimeError`` if not, ``TypeError`` as above."""
    if not step.prefills and type(sampled) is dict and set(map(type, map(sampled.get, step.decodes))) == SAMPLED_ONLY:
        return check_tokens(sampled, vocabulary)  # most steps
    check_tokens(check_sampled(sampled), vocabulary)
    missing = {row.request for row in step.prefills if row.last}.union(step.decodes) - sampled.keys()
    if missing:
        raise RuntimeError(f"Stage.forward() returned no token for {', '.join(sorted(missing))}")
    return sampled


def select_rows(step: Step, letters: str) -> Step | None:
    """Select the rows of a step that a stage with these letters runs; None if there are none."""
    does = roles_of(letters)
    if step.decodes and not (step.encodes or step.prefills) and does.decodes:
        return step  # most steps
    encodes = step.encodes if does.encodes else ()
    prefills = step.prefills if does.prefills else ()
    decodes = step.decodes if does.decodes else ()
    return Step(step.id, step.lane, encodes, prefills, decodes, step.group) if encodes or prefills or decodes else None


def leave_out(step: Step, failed: Collection[str]) -> Step | None:
    """Leave out the rows of requests that have ``failed``; None if no others are there."""
    encodes = tuple(row for row in step.encodes if row.request not in failed)
    prefills = tuple(row for row in step.prefills if row.request not in failed)
    decodes = tuple(each for each in step.decodes if each not in failed)
    return Step(step.id, step.lane, encodes, prefills, decodes, step.group) if encodes or prefills or decodes else None


def list_requests(step: Step) -> list[str]:
    """List the requests that have rows in a step, each once."""
    rows = [row.request for row in step.encodes] + [row.request for row in step.prefills]
    return list(dict.fromkeys(rows + list(step.decodes)))


def split_by_request(step: Step) -> list[Step]:
    """Split a step into one per request."""
    return [
        Step(
            step.id,
            step.lane,
            tuple(row for row in step.encodes if row.request == request),
            tuple(row for row in step.prefills if row.request == request),
            tuple(each for each in step.decodes if each == request),
            step.group,
        )
        for request in list_requests(step)
    ]


def split_by_item(step: Step) -> list[Step]:
    """Split a request's step into one for each media item that is encoded, and one of its other rows."""
    parts = [Step(step.id, step.lane, (row,), (), (), step.group) for row in step.encodes]
    if step.prefills or step.decodes:
        parts.append(Step(step.id, step.lane, (), step.prefills, step.decodes, step.group))
    return parts


def name_letters(step: Step) -> str:
    """Name the letters of the stages that a step's rows need."""
    return order_letters(units(step))


def name_stages(step: Step) -> str:
    """Name the stages that a step's rows need, as in "prefill+decode"."""
    return "+".join(stage_of(letter).name for letter in name_letters(step))


def describe_rows(step: Step) -> tuple[str, dict[str, float]]:
    """Name a step and count its rows, for the timeline."""
    return name_stages(step), {
        "media tokens": sum(row.span.tokens for row in step.encodes),
        "prefill tokens": sum(row.length for row in step.prefills),
        "decodes": len(step.decodes),
    }
