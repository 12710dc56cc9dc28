"""The door of requests: numpy's values, subclasses and huge ones become plain and bounded, or are refused; what passes
can be encoded in a message and comes out equal."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity.core.messages import Submit
from trinity.emulation.model import EmulatedRequest
from trinity.errors import RequestError
from trinity.pipeline import Pipeline
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.text.prompt import take_media
from trinity.remote.channel.wire import decode, encode
from trinity.request import Media, Request, Sampling, check_request


class Text(str):
    """A subclass that lies about what it holds."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def encode(self, *_: Any) -> bytes:
        raise RuntimeError("no bytes")


class Number(enum.IntEnum):
    SEVEN = 7


class Bomb:
    """Raises whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise MemoryError(name)


class Endless(Sequence[Any]):
    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, at: Any) -> Any:
        return "x"


HUGE, HALF = 10**400, "a\ud800"
PLAIN = (float, int, bool, str, tuple, dict, type(None))
TAKEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "numpy's float": ({"temperature": np.float64(0.7)}, {"temperature": 0.7}),
    "a small float": ({"top_p": np.float32(0.5)}, {"top_p": 0.5}),
    "a fraction": ({"min_p": Fraction(1, 4)}, {"min_p": 0.25}),
    "numpy's int": ({"top_k": np.int32(5), "seed": np.uint64(2**64 - 1)}, {"top_k": 5, "seed": 2**64 - 1}),
    "an enum": ({"top_k": Number.SEVEN}, {"top_k": 7}),
    "numpy's bool": ({"ignore_eos": np.True_}, {"ignore_eos": True}),
    "an array of ids": ({"stop_token_ids": np.array([1, 2])}, {"stop_token_ids": (1, 2)}),
    "lists": ({"stop": ["a"], "bad_words_ids": [[1, 2]]}, {"stop": ("a",), "bad_words_ids": ((1, 2),)}),
    "text of its own": ({"stop": (Text("é"),)}, {"stop": ("é",)}),
    "one string": ({"stop": Text("é")}, {"stop": ("é",)}),
    "penalties": (
        {"presence_penalty": np.float32(0.5), "frequency_penalty": -2},
        {"presence_penalty": 0.5, "frequency_penalty": -2.0},
    ),
    "a bias": ({"logit_bias": {np.int64(9): np.float64(1), Number.SEVEN: -100}}, {"logit_bias": {7: -100.0, 9: 1.0}}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_numpy_users_pass_becomes_plain(name: str) -> None:
    given_, plain = TAKEN[name]
    found = check_request(Request("a", sampling=Sampling(**given_))).sampling
    assert found == Sampling(**plain)
    for field in found.__struct_fields__:
        assert type(getattr(found, field)) in PLAIN


def test_the_other_fields_become_plain() -> None:
    asked = Request(
        messages=[{"role": Text("user"), "content": [{"type": "text", "text": Text("a")}]}],
        max_tokens=np.int64(3),  # type: ignore[arg-type]
        deadline_s=np.float64(5),
        session=Text("s"),
        request_id=Text("r"),
        client=Text("c"),
        images=[Text("cat\udcff.jpg")],
        media=[Media(Text("image"), b"")],
    )
    plain = check_request(asked)
    assert (plain.max_tokens, plain.deadline_s, plain.session, plain.request_id) == (3, 5.0, "s", "r")
    assert plain.messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert plain.client == "c"
    for text in (plain.session, plain.request_id, plain.client, plain.images[0], plain.media[0].kind):
        assert type(text) is str
    assert plain.images[0] == f"{Path.cwd()}/./cat\udcff.jpg", "the name of a file may hold any bytes"
    assert check_request(Request("a", max_tokens=HUGE)).max_tokens == 2**31 - 1


def test_a_long_text_is_not_copied() -> None:
    """A picture in a chat is a text of megabytes; each copy of it holds the event loop, and memory."""
    url = "data:image/png;base64," + "A" * 10**6
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    plain = check_request(Request(messages=chat))
    assert plain.messages[0]["content"][0]["image_url"]["url"] is url  # type: ignore[index]
    (medium,) = take_media(plain).media
    assert medium.source is url


def test_a_chat_is_copied() -> None:
    messages = [{"role": "user", "content": "a"}]
    plain = check_request(Request(messages=messages))
    messages[0]["content"] = "b"
    assert plain.messages is not None
    assert plain.messages[0]["content"] == "a"


nested: list[Any] = []
nested.append(nested)
REFUSED: dict[str, dict[str, Any]] = {
    "temperature": {"sampling": Sampling(temperature=HUGE)},
    "deadline_s": {"deadline_s": HUGE},
    "deadline_s of complex": {"deadline_s": 1j},
    "seed": {"sampling": Sampling(seed=2**64)},
    "seed below": {"sampling": Sampling(seed=-(2**63) - 1)},
    "top_k": {"sampling": Sampling(top_k=2**64)},
    "top_k of digits": {"sampling": Sampling(top_k=10**5000)},
    "repetition_penalty": {"sampling": Sampling(repetition_penalty=1e300)},
    "stop_token_ids": {"sampling": Sampling(stop_token_ids=(2**70,))},
    "stop_token_ids of many": {"sampling": Sampling(stop_token_ids=range(10**9))},  # type: ignore[arg-type]
    "stop": {"sampling": Sampling(stop=(HALF,))},
    "request_id": {"request_id": HALF},
    "request_id of length": {"request_id": "x" * 10**6},
    "session": {"session": HALF},
    "prompt": {"prompt": HALF},
    "messages": {"prompt": None, "messages": [{"role": "user", "content": HALF}]},
    "messages of keys": {"prompt": None, "messages": [{HALF: 1}]},
    "messages without end": {"prompt": None, "messages": nested},
    "messages of many": {"prompt": None, "messages": Endless()},
    "images": {"images": range(10**9)},
    "media": {"media": Endless()},
    "kind": {"media": [Media(HALF, b"")]},
    "kind of a list": {"media": [Media([], b"")]},  # type: ignore[arg-type]
    "ignore_eos": {"sampling": Sampling(ignore_eos="yes")},  # type: ignore[arg-type]
    "max_tokens": {"max_tokens": True},
    "max_tokens of an array": {"max_tokens": np.array([1, 2])},
    "temperature of a tensor": {"sampling": Sampling(temperature=torch.tensor([1.0, 2.0]))},  # type: ignore[arg-type]
    "temperature of a bomb": {"sampling": Sampling(temperature=Bomb())},  # type: ignore[arg-type]
    "bad_words_ids": {"sampling": Sampling(bad_words_ids=((),))},
    "presence_penalty": {"sampling": Sampling(presence_penalty=2.1)},
    "frequency_penalty": {"sampling": Sampling(frequency_penalty=float("nan"))},
    "logit_bias": {"sampling": Sampling(logit_bias={1: 101})},
    "logit_bias of text": {"sampling": Sampling(logit_bias={"1": 1})},  # type: ignore[dict-item]
    "logit_bias of none": {"sampling": Sampling(logit_bias={-1: 1})},
    "logit_bias of many": {"sampling": Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))},
    "logit_bias of a list": {"sampling": Sampling(logit_bias=[(1, 1)])},  # type: ignore[arg-type]
    "stop of nothing": {"sampling": Sampling(stop="")},
    "logprobs": {"sampling": Sampling(logprobs=np.int64(101))},  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_message_could_hold_is_refused(name: str) -> None:
    with pytest.raises(RequestError):
        check_request(Request(**{"prompt": "a", **REFUSED[name]}))


# ---------------------------------------------------------------- encoded, and out again equal

NUMBERS: list[Any] = [HUGE, -HUGE, 10**5000, 2**64, 2**63, -1, 0, 1, True, 0.5, float("nan"), float("inf"), 1j]
NUMPYS: list[Any] = [np.float64(0.3), np.float32(1e30), np.int8(-3), np.uint64(2**64 - 1), np.bool_(True), np.array(5)]
LISTS: list[Any] = [
    (),
    [],
    {},
    {5: 1.5},
    {1, 2},
    range(3),
    (2**70,),
    ["a"],
    np.arange(3),
    np.zeros((2, 2)),
    [[1, 2]],
    (("a",),),
]
OTHERS: list[Any] = ["7", b"7", HALF, Text("z"), None, object(), Number.SEVEN, Fraction(7, 3), [HALF], [Text("end")]]
WEIRD = st.sampled_from([*NUMBERS, *NUMPYS, *LISTS, *OTHERS, Endless(), nested])
SAMPLING = st.fixed_dictionaries({}, optional=dict.fromkeys(Sampling.__struct_fields__, WEIRD))
FIELDS = st.fixed_dictionaries(
    {"sampling": SAMPLING.map(lambda fields: Sampling(**fields))},
    optional={name: WEIRD | st.just("a") for name in ("max_tokens", "deadline_s", "session", "request_id")},
)


@pytest.fixture(scope="module")
def processor() -> Iterator[RequestProcessor]:
    made = RequestProcessor(checkpoint("llava"))
    yield made
    made.close()


@settings(max_examples=400)
@given(fields=FIELDS, picture=st.booleans())
def test_what_passes_the_door_encodes_and_decodes_equal(
    processor: RequestProcessor, fields: dict[str, Any], picture: bool
) -> None:
    images = [np.zeros((8, 8, 3), np.uint8)] if picture else []
    try:
        plain = check_request(Request("<image>" * picture + "Hello", images=images, **fields))
        processed = processor.process(plain)
    except RequestError:
        return
    said = Submit(processed.work, processed.inputs)
    found = decode(encode(said))
    assert isinstance(found, Submit)
    assert found.work == said.work
    assert all(torch.equal(a[k], b[k]) for a, b in zip(said.inputs, found.inputs, strict=True) for k in a)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([plain.session, plain.request_id, processed.stop]))


@settings(max_examples=150)
@given(fields=st.fixed_dictionaries({}, optional=dict.fromkeys(Sampling.__struct_fields__, WEIRD)))
def test_half_of_all_values_pass_by_themselves(fields: dict[str, Any]) -> None:
    """The door is not closed: each field for itself takes some of these values and refuses others."""
    for name, value in fields.items():
        try:
            found = check_request(Request("a", sampling=Sampling(**{name: value})))
        except RequestError as error:
            said = str(error)
        else:
            said = name
            assert type(getattr(found.sampling, name)) in PLAIN
        assert name in said or "cannot be read" in said


@pytest.mark.parametrize("hosting", ["thread", "process"])
async def test_such_requests_end_and_so_does_the_pipeline(hosting: Any) -> None:
    """``aclose()`` hung with processes: the front end kept an entry that no instance had ever seen."""
    options = pipeline_options({"dtype": "float32", "pools": {"image": 8, "kv": 64}})
    async with asyncio.timeout(120):
        async with Pipeline(checkpoint("llama"), "PD", hosting=hosting, **options) as pipe:
            for name, (fields, _) in TAKEN.items():
                request = Request("Hello", max_tokens=2, sampling=Sampling(**fields), deadline_s=np.float64(60))
                assert (await pipe.complete(request)).token_ids, name
            for changes in REFUSED.values():
                with pytest.raises(RequestError):
                    await pipe.complete(Request(**{"prompt": "a", "max_tokens": 2, **changes}))
            assert not pipe._frontend.streams
            await pipe.wait_idle()


@pytest.mark.parametrize("changes", [{"text_tokens": np.int64(3)}, {"image_tokens": (np.int64(4),)}])
def test_counts_of_an_emulated_request_may_be_numpys(changes: dict[str, Any]) -> None:
    from support.emulated_pipelines import MODEL
    from trinity.emulation.processor import EmulatedProcessor

    work = EmulatedProcessor(MODEL).process(EmulatedRequest(max_tokens=2, **changes)).work
    assert decode(encode(Submit(work))) == Submit(work)


def test_a_value_that_leaves_as_it_is_read_ends_its_request_alone() -> None:
    class Leaves(list[Any]):
        def __iter__(self) -> Any:
            raise SystemExit(3)

    with pytest.raises(RequestError, match="cannot be read") as caught:
        check_request(Request("<image>", images=Leaves([1]), request_id="mine"))
    assert caught.value.request_id == "mine"
