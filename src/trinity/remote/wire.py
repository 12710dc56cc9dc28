"""Messages as bytes: msgpack of tagged structs, tensors as an extension type. Nothing is ever unpickled."""

from __future__ import annotations

from typing import Any

import msgspec

from trinity.core.instance.settings import Reservation
from trinity.core.messages import (
    Cancel,
    Commit,
    Emit,
    Fetch,
    Fetched,
    Finished,
    Forget,
    Moved,
    Offer,
    PeerLoad,
    PeerLost,
    PeerUp,
    Ready,
    Release,
    Submit,
    Value,
    Withdraw,
)
from trinity.core.scheduler import Order, Policy
from trinity.core.transfers import TransferPolicy
from trinity.costs.budgets import StepBudgets
from trinity.costs.visual_tokens import decode_rule, encode_rule
from trinity.emulation.model import EmulatedModel
from trinity.errors import HandshakeError
from trinity.memory.digests import Verify
from trinity.traces.trace import SLO

TENSOR = 1  # the extension code of a tensor


class Layout(Value, frozen=True):
    """One kind of block of an instance, as a peer must have it: shape, dtype and bytes."""

    shape: tuple[int, ...]
    dtype: str
    block_bytes: int


class Hello(Value, frozen=True):
    """Who is at the other end, and what its blocks are. Two instances must agree on the model and on shared kinds."""

    name: str
    fingerprint: str = ""
    layouts: dict[str, Layout] = msgspec.field(default_factory=dict)
    pipeline: str = ""
    epoch: int = 0


class Setup(Value, frozen=True, kw_only=True):
    """Front end to a new instance: what to load and how to run. ``paced``: in place of the checkpoint ``model``.

    ``pipeline`` tells this pipeline's instances from an earlier one's; ``config`` is the digest of the checkpoint's
    config.json as the front end has it.
    """

    name: str
    pipeline: str = ""
    config: str = ""
    epoch: int
    roles: str
    model: str
    dtype: str
    device: str
    transport: str
    routing: str
    lanes: tuple[str, ...]
    threads: int
    image_block_size: int
    kv_block_size: int
    cores: tuple[int, ...] = ()
    pools: dict[str, int] | None = None
    memory_bytes: int | None = None
    prefix_cache: bool = True
    image_cache: bool = True
    reservation: Reservation = "full"
    attention: str = "auto"
    pack: bool | None = None
    depth: int = 1
    most_tokens: int | None = None
    most_images: int | None = None
    slo: SLO | None = None
    budgets: StepBudgets | None = None
    tokens: int = 2048
    media: int = 1
    policy: Policy = "alg1"
    order: Order = "fcfs"
    chunked: bool = True
    media_budget: bool = True
    read_timeout_s: float = 30.0
    verify: Verify = "network"
    transfers: TransferPolicy = TransferPolicy()
    paced: EmulatedModel | None = None


class Started(Value, frozen=True):
    """Instance to front end: loaded. ``pools``: the transport's descriptors by kind; peers connect to ``address``."""

    up: PeerUp
    hello: Hello
    pools: dict[str, bytes]
    address: str


class Peers(Value, frozen=True):
    """Front end to an instance: those that it works with."""

    peers: tuple[Started, ...]


class Stop(Value, frozen=True):
    """Front end to an instance: end once nothing lives there, or at once."""

    at_once: bool = False


class Slices(Value, frozen=True):
    """Instance to front end: what ran when, for the timeline: (lane, name, start, seconds, arguments)."""

    rows: tuple[tuple[str, str, float, float, dict[str, Any]], ...]


class Broken(Value, frozen=True):
    """Instance to front end: it cannot go on. ``error`` names a class of trinity.errors where it is one.

    ``reason`` is that of an ``OfferRefused``.
    """

    error: str
    message: str
    reason: str = ""


class Connected(Value, frozen=True):
    """Instance to front end: these peers (name, epoch) are reached, or ``why`` they are not."""

    peers: tuple[tuple[str, int], ...] = ()
    why: Broken | None = None


class Dropped(Value, frozen=True):
    """Front end to an instance: this peer is lost, whatever its channel looks like: it may be frozen."""

    name: str
    epoch: int


class _TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _encode_hook(value: Any) -> Any:
    if callable(value):
        return encode_rule(value)
    import torch

    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        header = _TensorHeader(str(value.dtype).removeprefix("torch."), tuple(value.shape), flat.numpy().tobytes())
        return msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode(header))
    raise NotImplementedError(f"{type(value).__name__} cannot travel in a message")


def _decode_ext(code: int, data: memoryview) -> Any:
    if code != TENSOR:
        raise ValueError(f"unknown extension type {code}")
    import torch

    header = msgspec.msgpack.decode(data, type=_TensorHeader)
    dtype = getattr(torch, header.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {header.dtype!r}")
    if not header.data:
        return torch.empty(header.shape, dtype=dtype)
    return torch.frombuffer(bytearray(header.data), dtype=dtype).reshape(header.shape)


Message = (
    Broken
    | Cancel
    | Commit
    | Connected
    | Dropped
    | Emit
    | Fetch
    | Fetched
    | Finished
    | Forget
    | Hello
    | Moved
    | Offer
    | PeerLoad
    | PeerLost
    | PeerUp
    | Peers
    | Ready
    | Release
    | Setup
    | Slices
    | Started
    | Stop
    | Submit
    | Withdraw
)
_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_decoder = msgspec.msgpack.Decoder(Message, ext_hook=_decode_ext, dec_hook=decode_rule)


def encode(message: Value) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Value:
    """A message from bytes. Raises ``HandshakeError`` where they are none."""
    try:
        message: Value = _decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RuntimeError) as error:
        raise HandshakeError(f"a control frame of {len(frame)} bytes is no message: {error}", "control") from error
    return message
