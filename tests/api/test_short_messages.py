"""No error repeats more than 200 characters of its input, wherever it comes in."""

from __future__ import annotations

import inspect
import pickle
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trinity
from api.test_wrong_arguments import SOUND
from trinity import Media, Request, Sampling, Structured, traces
from trinity.costs.budgets import StepCost
from trinity.costs.model_config import find_model_shape, read_model_shape
from trinity.costs.step_cost import CostTables, get_device
from trinity.errors import LONGEST_SHOWN, MOST_MESSAGE, RequestError, TrinityError, UnknownName, shorten_message, show
from trinity.preprocess.checkpoint.config_file import check_directory
from trinity.request import check_request
from trinity.simulation.simulator import Simulator

MARK = "Щ"  # in no message of ours
LONG = MARK * 100_000


def values() -> Iterator[Any]:
    yield from (LONG, LONG.encode(), f"/{LONG}", f"http://{LONG}", f"data:{LONG}", f"{LONG}/{LONG}", f"1E{LONG}")
    yield from ([LONG], (LONG,) * 3, {LONG: LONG}, {LONG}, 10**4000, f"{MARK} " * 50_000, [{"role": LONG}])
    yield [{"role": LONG, "content": LONG}]
    yield from ([{"role": "user", "content": [part]}] for part in parts())


def parts() -> Iterator[dict[str, Any]]:
    yield {"type": LONG}
    yield {"type": "text", "text": 3, LONG: LONG}
    for url in (f"http://{LONG}", f"{LONG}:x", f"file:{LONG}", f"data:{LONG}"):
        yield {"type": "image_url", "image_url": {"url": url}}


def request_with(name: str, value: Any) -> object:
    text = {} if name in ("prompt", "messages") else {"prompt": "x"}
    return check_request(Request(**text | {name: value}))


def sampled(**fields: Any) -> object:
    return check_request(Request("x", sampling=Sampling(**fields)))


def pipeline_with(name: str, value: Any) -> object:
    return trinity.Pipeline(**({} if name == "model" else {"model": "shapes"}) | {name: value})


def keywords_of(kind: Callable[..., object]) -> list[str]:
    return [name for name, each in inspect.signature(kind).parameters.items() if each.kind is not each.VAR_KEYWORD]


def made_with(kind: Any, name: str, value: Any) -> object:
    return kind(**{**SOUND[kind], name: value})


def structured_with(name: str, value: Any) -> object:
    return sampled(structured=Structured(**{name: value}))


def measured(**fields: Any) -> CostTables:
    curves = StepCost.from_samples({1: 0.1}, {1: 0.1}, {1: 0.1})
    return CostTables(**{**SOUND[CostTables], "costs": ((1, curves),), **fields})


def simulated_with(name: str, value: Any) -> object:
    return made_with(Simulator, "cost", measured(**{"model": "llava-1.5-7b", name: value}))


def loaded_with(name: str, value: Any) -> object:
    with tempfile.TemporaryDirectory() as folder:
        measured().save(Path(folder) / "own")
        measured(**{name: value}).save(Path(folder) / "other")
        CostTables.load(Path(folder) / "own")
        with pytest.raises(trinity.ConfigError) as raised:
            CostTables.load(Path(folder) / "other", **{name: "x"})  # type: ignore[arg-type]
        assert str(raised.value).count(MARK) <= LONGEST_SHOWN
        return CostTables.load(Path(folder) / "own", **{name: value})


READERS: list[Any] = [
    *(trinity.Placement.parse, trinity.Trace.load, trinity.Plan.load, CostTables.load, get_device, read_model_shape),
    *(find_model_shape, trinity.read_hosts, traces.read_trace, traces.read_shipped),
]


def doors() -> Iterator[tuple[str, Callable[[Any], object]]]:
    for kind in SOUND:
        yield from ((f"{kind.__name__}.{name}", partial(made_with, kind, name)) for name in keywords_of(kind))
    for name in ("model", "device", "dtype", "shape"):
        yield f"Simulator.cost.{name}", partial(simulated_with, name)
    yield from ((f"CostTables.load.{name}", partial(loaded_with, name)) for name in ("model", "device"))
    yield from ((f"Request.{name}", partial(request_with, name)) for name in Request.__struct_fields__)
    yield from ((f"Sampling.{name}", partial(_sampled, name)) for name in Sampling.__struct_fields__)
    yield from ((f"Structured.{name}", partial(structured_with, name)) for name in Structured.__struct_fields__)
    yield "Media.kind", lambda value: check_request(Request("x", media=[Media(value, b"")]))
    yield "Media.source", lambda value: check_request(Request("x", media=[Media("image", value)]))
    yield from ((f"Pipeline.{name}", partial(pipeline_with, name)) for name in keywords_of(trinity.Pipeline))
    yield "Pipeline", lambda value: pipeline_with(str(value), 1)
    yield from ((function.__qualname__, function) for function in READERS)


def _sampled(name: str, value: Any) -> object:
    return sampled(**{name: value})


DOORS = dict(doors())


@pytest.mark.parametrize("door", DOORS)
def test_no_door_repeats_a_long_value(door: str) -> None:
    """At a8f8c7ea 29 of them did: unknown transports, devices and models, placements, options and files."""
    for value in values():
        try:
            DOORS[door](value)
        except TrinityError as error:
            said = str(error)
            assert said.count(MARK) <= LONGEST_SHOWN, said[:300]
            assert said.count("9") + said.count(r"\xd0") <= LONGEST_SHOWN
            assert len(said) <= MOST_MESSAGE


def test_a_model_directory_of_a_long_name() -> None:
    for value in (LONG, f"/tmp/{MARK * 4000}"):
        with pytest.raises(trinity.ConfigError) as raised:
            check_directory(Path(value))
        assert str(raised.value).count(MARK) <= LONGEST_SHOWN


@given(st.text(max_size=300), st.integers(1, 60))
def test_whatever_an_error_is_made_with_its_words_are_short(text: str, times: int) -> None:
    said = shorten_message(text * times)
    assert len(said) <= MOST_MESSAGE
    assert all(len(word) <= LONGEST_SHOWN for word in said.split()) or len(text * times) <= LONGEST_SHOWN
    if all(len(word) <= LONGEST_SHOWN for word in (text * times).split()) and len(text * times) <= MOST_MESSAGE:
        assert said == text * times


def test_errors_of_every_kind_are_shortened_and_pickled_as_they_are() -> None:
    for error in (
        TrinityError(LONG),
        RequestError(LONG, "r"),
        UnknownName("what", LONG, ["a"]),
        trinity.ConfigError(LONG),
    ):
        assert str(error).count(MARK) <= LONGEST_SHOWN
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(TrinityError("a short one")) == "a short one"
    assert TrinityError().args == ()


def test_a_value_is_shown_up_to_its_bound() -> None:
    assert show("x") == "'x'"
    assert show(LONG).count(MARK) == LONGEST_SHOWN - 1
    assert show([LONG]).count(MARK) <= LONGEST_SHOWN


@pytest.mark.parametrize("kind", [list, tuple, set, dict.fromkeys])
def test_no_more_is_looked_at_than_is_shown(kind: Callable[[list[Any]], Any]) -> None:
    """At b6e2a44b a wrong tool_choice of 60 MB was written out whole, for 0.3 s, and cut then."""
    looked = list[int]()

    class Odd:
        def __repr__(self) -> str:
            looked.append(1)
            return "odd"

    assert len(show(kind([Odd() for _ in range(10_000)]))) < 2 * LONGEST_SHOWN
    assert 0 < len(looked) <= LONGEST_SHOWN


def test_texts_of_a_schema_are_bounded_together() -> None:
    """At b6e2a44b 30 MB of them were written as JSON on the event loop, for 0.3 s, before they were refused."""
    schema = {"enum": ["y" * 500 for _ in range(132)]}
    with pytest.raises(RequestError, match="json_schema: the texts have more than 65536 characters in all"):
        check_request(Request("a", sampling=Sampling(structured=Structured(json_schema=schema))))


def test_half_a_character_is_found_wherever_it_is() -> None:
    for place in (0, 5, (1 << 20) - 1, 1 << 20, (1 << 20) + 3):
        text = "é" * place + "\ud800" + "é" * 9
        with pytest.raises(RequestError, match=rf"lone surrogate, at {place}\)"):
            check_request(Request(text))
