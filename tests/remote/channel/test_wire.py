"""Messages as bytes: what goes in comes out, and nothing else is taken for a message."""

from __future__ import annotations

import pickle
import string

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.core_tables import emitted
from trinity.config_classes import pack_config, unpack_config
from trinity.core.messages import Commit, MediaSpan, Offer, Part, PeerUp, ResolvedSampling, Sampled, Submit, Value, Work
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets, StepCost
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import Roofline, get_device
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel
from trinity.errors import ConfigError, HandshakeError
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.remote.channel.wire import Hello, Layout, RouteConfig, Setup, UnsendableMessage, decode, encode
from trinity.remote.instance_setup import read_instance
from trinity.runtime.loader import ServingOptions
from trinity.traces.trace import SLO

names = st.text(string.ascii_letters + "é-0", min_size=1, max_size=12)
counts = st.integers(0, 1 << 40)
works = st.builds(
    Work,
    request=names,
    prompt=st.lists(counts, max_size=40).map(tuple),
    media=st.lists(
        st.builds(MediaSpan, kind=names, tokens=counts, offset=counts, length=counts, content=names), max_size=3
    ).map(tuple),
    max_tokens=counts,
    sampling=st.builds(
        ResolvedSampling,
        temperature=st.floats(0, 9),
        seed=counts,
        suppress_tokens=st.lists(counts, max_size=2).map(tuple),
        bad_words_ids=st.lists(st.lists(counts, max_size=2).map(tuple), max_size=2).map(tuple),
    ),
    stop_ids=st.frozensets(counts, max_size=4),
    deadline_s=st.none() | st.floats(0, 1e6),
)
parts = st.lists(st.builds(Part, st.lists(counts, max_size=5).map(tuple)), max_size=4).map(tuple)
messages = st.one_of(
    st.builds(Submit, works),
    st.builds(Offer, id=names, kind=names, source=names, work=works, parts=parts),
    st.builds(Commit, names, st.lists(counts, max_size=5).map(tuple), counts, st.dictionaries(names, st.floats(0, 9))),
    st.builds(PeerUp, names, st.sampled_from(["E", "PD"]), counts, st.dictionaries(names, counts)),
    st.builds(
        lambda rows: emitted(*rows), st.lists(st.tuples(names, counts, counts, st.builds(Sampled, counts)), max_size=4)
    ),
)


@given(messages)
def test_what_goes_in_comes_out(message: Value) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_tensors_travel(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape) * 9).to(dtype)
    found = decode(encode(Submit(Work(request="r", prompt=(1,)), ({"pixels": value, "n": 3},))))
    assert isinstance(found, Submit)
    assert found.inputs[0]["n"] == 3
    assert found.inputs[0]["pixels"].dtype == dtype
    assert torch.equal(found.inputs[0]["pixels"], value)


def test_a_view_travels_as_what_it_shows() -> None:
    value = torch.arange(24).reshape(4, 6)[:, ::2].T
    found = decode(encode(Submit(Work(request="r", prompt=(1,)), ({"pixels": value},))))
    assert isinstance(found, Submit)
    assert torch.equal(found.inputs[0]["pixels"], value)


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    try:
        found = decode(garbage)
    except HandshakeError:
        return
    assert encode(found)  # by chance a message


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        encode(Hello("x"))[:-1],
        pickle.dumps(Hello("x")),
        msgspec.msgpack.encode({"type": "Exec", "code": "print(1)"}),
        msgspec.msgpack.encode({"type": "Submit", "work": {}, "inputs": [msgspec.msgpack.Ext(9, b"")]}),
        msgspec.msgpack.encode({"type": "PeerUp", "name": 3, "roles": "E"}),
    ],
    ids=["empty", "cut", "pickle", "unknown type", "unknown extension", "wrong field"],
)
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    with pytest.raises(HandshakeError, match="no message"):
        decode(frame)


def test_objects_do_not_travel() -> None:
    with pytest.raises(UnsendableMessage, match="cannot travel"):
        encode(Submit(Work(request="r", prompt=(1,)), (object(),)))


def test_a_setup_travels_with_slo_budgets_and_cost() -> None:
    instance = Instance(
        "EP", "E0", lanes=("vision", "language"), threads=2, pools={"kv": 3}, rules=BatchRules(limit_s=2.0)
    )
    serving = ServingOptions(
        dtype="float32",
        cache=CacheConfig(image_block_size=64, kv_block_size=8),
        slo=SLO(ttft=1.0, tbt=0.1),
        budgets=StepBudgets(token_budget=9, cost=StepCost.from_samples(prefill={1: 0.1, 5: 0.2})),
    )
    setup = Setup(
        instance=pack_config(instance),
        serving=pack_config(serving),
        epoch=2,
        model="somewhere",
        routes={"kv": RouteConfig("shm")},
        routing="round_robin",
    )
    there = decode(encode(setup))
    assert isinstance(there, Setup)
    assert (unpack_config(Instance, there.instance), unpack_config(ServingOptions, there.serving)) == (
        instance,
        serving,
    )
    assert (there.name, there.roles, there.epoch) == ("E0", "EP", 2)
    for wrong in ({}, {"name": "E0"}, {**there.instance, "newest": 1}, {**there.instance, "threads": "two"}):
        bad = msgspec.structs.replace(there, instance=wrong)
        with pytest.raises(ConfigError):
            read_instance(bad)
        assert bad.name in ("", "E0")
    with pytest.raises(ConfigError, match="has no keyword 'newest'"):
        unpack_config(ServingOptions, {**there.serving, "newest": 1})
    roofline = Roofline(model=get_model_shape("qwen2-vl-7b"), device=get_device("H100"))
    paced = EmulatedModel(shape=LLAVA_15_7B, cost=roofline)
    there = decode(encode(msgspec.structs.replace(setup, paced=paced)))
    assert isinstance(there, Setup)
    assert there.paced is not None
    assert there.paced.fingerprint == paced.fingerprint
    hello = Hello("E0", "abc", {"kv": Layout((1, 2), "torch.float32", 8)})
    assert decode(encode(hello)) == hello


def with_tensor(dtype: str, shape: list[int], data: bytes) -> bytes:
    """A Submit whose input is a tensor with this header, as a peer of any make could send it."""
    header = msgspec.msgpack.encode([dtype, shape, data])
    inputs = [{"pixels": msgspec.msgpack.Ext(1, header)}]
    return msgspec.msgpack.encode({"type": "Submit", "work": {"request": "r", "prompt": [1]}, "inputs": inputs})


ALL_DTYPES = sorted(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))


@given(
    st.sampled_from([*ALL_DTYPES, "save", "", "float32.x"]),
    st.lists(st.integers(-2, 9) | st.integers(-(2**63), 2**64 - 1), max_size=4),
    st.binary(max_size=64) | st.integers(0, 64).map(bytes),
)
def test_a_tensor_has_just_the_bytes_of_its_dimensions(dtype: str, shape: list[int], data: bytes) -> None:
    try:
        found = decode(with_tensor(dtype, shape, data))
    except HandshakeError:
        return
    assert isinstance(found, Submit)
    pixels = found.inputs[0]["pixels"]
    assert list(pixels.shape) == shape
    assert pixels.nbytes == len(data)
    assert pixels.reshape(-1).view(torch.uint8).numpy().tobytes() == data


@pytest.mark.parametrize(
    ("dtype", "shape", "data"),
    [
        ("quint8", [64], bytes(64)),
        ("quint4x2", [4], bytes(64)),
        ("float32", [2**64 - 1], bytes(4)),
        ("float32", [1000, 1000], b""),
        ("float32", [-1], bytes(8)),
        ("float32", [0, 2**62, 4], b""),
        ("uint8", [1] * 100_000, b"x"),
        ("bool", [4], b"\x00\x07\x01\x00"),
    ],
    ids=["quantized", "packed", "huge", "uninitialised", "negative", "strides", "dimensions", "bool"],
)
def test_no_tensor_is_made_of_a_header_that_lies(dtype: str, shape: list[int], data: bytes) -> None:
    with pytest.raises(HandshakeError, match="no message"):
        decode(with_tensor(dtype, shape, data))


def test_other_dtypes_do_not_set_out() -> None:
    with pytest.raises(UnsendableMessage, match=r"complex64 cannot travel"):
        encode(Submit(Work(request="r", prompt=(1,)), ({"pixels": torch.zeros(2, dtype=torch.complex64)},)))
