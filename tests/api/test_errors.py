"""Errors come back from another process as they were."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from trinity import errors
from trinity.errors import (
    OfferRefused,
    StageError,
    TraceError,
    TraceTooShort,
    TransportError,
    TrinityError,
    UnknownName,
)


def kinds(kind: type[TrinityError] = TrinityError) -> Iterator[type[TrinityError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from kinds(each)


GIVEN = {"UnknownName": ("policy", "lifo", ["fifo"]), "TraceTooShort": ("too short", 7.5), "TraceError": ("bad", 3)}


@pytest.mark.parametrize("kind", sorted(set(kinds()), key=str), ids=str)
def test_every_error_can_be_pickled(kind: type[TrinityError]) -> None:
    error = kind(*GIVEN.get(kind.__name__, ("it failed",)))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)


def test_what_they_say_besides_is_kept() -> None:
    short = pickle.loads(pickle.dumps(TraceTooShort("too short", 7.5)))
    assert short.needed_s == 7.5
    assert pickle.loads(pickle.dumps(TraceError("bad row", 3))).line == 3
    assert str(pickle.loads(pickle.dumps(TraceError("bad row", 3)))) == "line 3: bad row"
    unknown = pickle.loads(pickle.dumps(UnknownName("policy", "lifo", ["fifo", "sjf"])))
    assert (unknown.what, unknown.name) == ("policy", "lifo")
    stage = pickle.loads(pickle.dumps(StageError("it raised", "r1", "P")))
    assert (stage.request_id, stage.stage) == ("r1", "P")
    refused = pickle.loads(pickle.dumps(OfferRefused("no", "full", "tcp", "b")))
    assert (refused.reason, refused.scheme, refused.peer) == ("full", "tcp", "b")
    assert isinstance(refused, TransportError)


def fails() -> None:
    raise TraceTooShort("too short", 7.5)


def test_a_process_says_what_was_wrong() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(TraceTooShort) as caught:
        pool.submit(fails).result(60)
    assert caught.value.needed_s == 7.5


@pytest.mark.parametrize(("name", "outside"), [("mine", True), ("trinity", False), ("trinity.api", False)])
def test_a_warning_points_to_the_first_line_outside(name: str, outside: bool) -> None:
    """At 44286955 the package's own ``__init__`` was taken for a caller."""
    with pytest.warns(errors.TrinityWarning, match="said") as caught:
        make_caller(name)()
    assert (caught[0].filename == "inner.py") == outside


def test_code_without_a_name_may_lead_to_a_warning() -> None:
    """At 44286955 it was an ``AttributeError``. Python itself drops a warning of such code."""
    make_caller(None)()


def make_caller(name: str | None) -> Callable[[], None]:
    """Make a function, of a module of this name, that leads to a warning."""
    scope: dict[str, Any] = {"__name__": name, "warn_caller": errors.warn_caller}
    exec(compile("def call():\n    warn_caller('said')", "inner.py", "exec"), scope)
    call: Callable[[], None] = scope["call"]
    return call
