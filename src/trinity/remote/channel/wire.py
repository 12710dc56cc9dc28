"""Control messages and their encoding: msgpack of tagged structs, tensors as an extension type, never pickle."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from trinity.core.frontend.journal import Journal, JournalKept, JournalStart
from trinity.core.messages import (
    Cancel,
    Caught,
    Commit,
    Emit,
    Fetch,
    Fetched,
    Finished,
    Forget,
    Gone,
    Helped,
    Move,
    Moved,
    NotMoved,
    Offer,
    PeerDown,
    PeerEmpty,
    PeerLeaving,
    PeerLoad,
    PeerRemoved,
    PeerReserved,
    PeerSuspect,
    PeerUp,
    Ready,
    Release,
    Spare,
    Submit,
    Value,
    Withdraw,
)
from trinity.core.values import FrontendUp, NotTaken
from trinity.costs.device_memory import DeviceTenant
from trinity.costs.visual_tokens import decode_rule, encode_rule
from trinity.emulation.model import EmulatedModel
from trinity.errors import HandshakeError, TransportError, describe_error
from trinity.memory.digests import Verify
from trinity.remote.channel import channel

TENSOR = 1  # the extension code of a tensor
ITEM_BYTES = {  # the dtypes that travel: no quantized one, whose tensors torch cannot make of plain bytes
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
MAX_DIMENSIONS = 16
MAX_ITEMS = 1 << 32  # a tensor of none may have no longer dimension either


class Layout(Value, frozen=True):
    """One kind of block of an instance: shape, dtype and bytes. Peers must have the same."""

    shape: tuple[int, ...]
    dtype: str
    block_bytes: int


class Hello(Value, frozen=True):
    """Either side, first: its name and block layouts. Instances must agree on the model and on kinds that both have.

    ``weights`` is the digest of every byte of the checkpoint's files, where it is known already.
    """

    name: str
    fingerprint: str = ""
    layouts: dict[str, Layout] = msgspec.field(default_factory=dict)
    pipeline: str = ""
    epoch: int = 0
    weights: str = ""


class ModelIdentity(Value, frozen=True):
    """Identity of what a pipeline serves: fingerprint, as in ``Hello``, and digest of every byte; "": not known yet."""

    fingerprint: str
    weights: str = ""


class RouteConfig(Value, frozen=True):
    """A transport that an instance makes for one kind of block: its name and keywords, and the connector's settings."""

    transport: str
    timeout_s: float = 30.0
    verify: Verify = "network"
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class Setup(Value, frozen=True, kw_only=True):
    """Front end to a new instance: what to load and how to run. ``paced`` replaces the checkpoint ``model``.

    ``instance``, ``serving``: its ``Instance`` and the pipeline's ``ServingOptions``, as ``pack_config`` writes them.
    ``routes``: transports by kind of block. ``pipeline`` tells this pipeline's instances from those of an earlier one.
    ``config`` is the digest of the front end's copy of the checkpoint's config.json. ``beside``: the pipeline's other
    instances on the same device. ``shelf``: the socket where they leave weights for each other; "": none. ``host``:
    where this one is, as the pipeline names hosts. ``waits``: a life of its name serves still; it loads what memory
    allows beside that, and waits for ``ProceedInstance``. ``serves``: what the pipeline serves already, of a life that
    is not among its first: it must have the same.
    """

    instance: dict[str, Any]
    serving: dict[str, Any]
    model: str
    routes: dict[str, RouteConfig]
    routing: str
    pipeline: str = ""
    config: str = ""
    epoch: int = 0
    paced: EmulatedModel | None = None
    beside: tuple[DeviceTenant, ...] = ()
    shelf: str = ""
    host: str = ""
    waits: bool = False
    serves: ModelIdentity | None = None

    @property
    def name(self) -> str:
        return str(self.instance.get("name", ""))

    @property
    def roles(self) -> str:
        return str(self.instance.get("roles", ""))


class Attach(Value, frozen=True):
    """A further front end to an instance that serves already: its name, and the digest of its copy of config.json."""

    name: str
    config: str = ""


class InstanceInfo(Value, frozen=True):
    """Instance to front end: it has loaded. ``pools``: descriptors by kind; peers connect to ``address``."""

    up: PeerUp
    hello: Hello
    pools: dict[str, bytes]
    address: str


class Peers(Value, frozen=True):
    """Front end to an instance: the peers to connect to; none once it has met them all."""

    peers: tuple[InstanceInfo, ...]


class StopInstance(Value, frozen=True):
    """Front end to an instance: end once it has no requests, or ``at_once``."""

    at_once: bool = False


class InstancePrepared(Value, frozen=True):
    """Instance to front end: it waits for ``ProceedInstance``, and has no pool. ``weights``: it has loaded those."""

    weights: bool


class ProceedInstance(Value, frozen=True):
    """Front end to an instance that waits, or will: the life that it follows has ended, and its memory is free."""


class CheckFiles(Value, frozen=True):
    """Front end to an instance: would its next life load what the pipeline serves? Answered by ``FilesChecked``."""

    serves: ModelIdentity


class FilesChecked(Value, frozen=True):
    """Instance to front end: ``why`` its next life would be refused; None: it would not."""

    why: InstanceFailure | None = None


class Slices(Value, frozen=True):
    """Instance to front end: rows of its timeline (lane, name, start in s, duration in s, arguments)."""

    rows: tuple[tuple[str, str, float, float, dict[str, Any]], ...]


class InstanceFailure(Value, frozen=True):
    """Instance to front end: it cannot go on. ``error`` is the name of the exception's class.

    ``reason`` is that of an ``OfferRefused``.
    """

    error: str
    message: str
    reason: str = ""


class ConnectReport(Value, frozen=True):
    """Instance to front end: this peer is connected, or ``why`` it cannot be."""

    peer: str
    epoch: int
    why: InstanceFailure | None = None


class WeightsDigest(Value, frozen=True):
    """Instance to front end: the digest of every byte of its checkpoint's files, found while it serves."""

    digest: str


class LinkEnded(Value, frozen=True):
    """Instance to front end: the channel to this peer has ended, though nobody has said that it is lost."""

    peer: str
    epoch: int


class StillBusy(Value, frozen=True):
    """Instance to front end: it is neither frozen nor cut off.

    Every second while it loads, and while its core computes digests, as long as one after another is done.
    """


class AtStep(Value, frozen=True):
    """Instance to front end: for how long a lane has been at a step, while that is long. No sign of life of its core.

    - ``seconds`` (None): since the step began; None: no step is long any more.
    - ``predicted_s`` (seconds): predicted for the whole step; 0.0 if none like it has run.
    - ``lane``: its lane, "" where no step is long.
    """

    seconds: float | None = None
    predicted_s: float = 0.0
    lane: str = ""


class DropPeer(Value, frozen=True):
    """Front end to an instance: this peer is lost, even if its channel is still open: it may be frozen."""

    name: str
    epoch: int


class UnsendableMessage(TransportError):
    """A message cannot be sent, so nothing of it was. ``too_large``: it is above ``MAX_MESSAGE``."""

    def __init__(self, message: str, too_large: bool = False) -> None:
        super().__init__(message, "control")
        self.too_large = too_large


class _TensorHeader(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def _encode_hook(value: Any) -> Any:
    if callable(value):
        return encode_rule(value)
    import torch

    if isinstance(value, torch.Tensor) and (dtype := str(value.dtype).removeprefix("torch.")) in ITEM_BYTES:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        header = _TensorHeader(dtype, tuple(value.shape), flat.numpy().data)
        return msgspec.msgpack.Ext(TENSOR, msgspec.msgpack.encode(header))
    kind = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise NotImplementedError(f"{kind} cannot travel in a message")


def _decode_ext(code: int, data: memoryview) -> Any:
    if code != TENSOR:
        raise ValueError(f"unknown extension type {code}")
    header = msgspec.msgpack.decode(data, type=_TensorHeader)
    _check_tensor(header)
    import torch

    dtype = getattr(torch, header.dtype)
    if not header.data:
        return torch.empty(header.shape, dtype=dtype)
    return torch.frombuffer(bytearray(header.data), dtype=dtype).reshape(header.shape)


def _check_tensor(header: _TensorHeader) -> None:
    """Raise ``ValueError`` unless the dtype is of the list and the bytes are just those of the dimensions."""
    size = ITEM_BYTES.get(header.dtype)
    if size is None:
        raise ValueError(f"unknown dtype {header.dtype!r:.40}")
    dimensions = header.shape
    if len(dimensions) > MAX_DIMENSIONS or any(each < 0 for each in dimensions):
        raise ValueError("the dimensions of a tensor are negative, or too many")
    if math.prod(each or 1 for each in dimensions) > MAX_ITEMS or math.prod(dimensions) * size != len(header.data):
        raise ValueError(f"{len(header.data)} bytes are not those of a tensor of these dimensions")
    if header.dtype == "bool" and bytes(header.data).strip(b"\0\1"):
        raise ValueError("a bool of a tensor is neither 0 nor 1")


ControlMessage = (
    InstanceFailure
    | Attach
    | Cancel
    | Caught
    | CheckFiles
    | Commit
    | ConnectReport
    | DropPeer
    | Emit
    | Fetch
    | Fetched
    | FilesChecked
    | Finished
    | Forget
    | Hello
    | Helped
    | Gone
    | Journal
    | JournalKept
    | JournalStart
    | LinkEnded
    | Move
    | Moved
    | NotMoved
    | Offer
    | PeerLoad
    | PeerDown
    | PeerEmpty
    | PeerReserved
    | PeerSuspect
    | PeerLeaving
    | PeerRemoved
    | FrontendUp
    | NotTaken
    | PeerUp
    | Peers
    | Ready
    | Release
    | Setup
    | Slices
    | Spare
    | InstanceInfo
    | InstancePrepared
    | ProceedInstance
    | AtStep
    | StillBusy
    | StopInstance
    | Submit
    | WeightsDigest
    | Withdraw
)
_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_decoder = msgspec.msgpack.Decoder(ControlMessage, ext_hook=_decode_ext, dec_hook=decode_rule)


def encode(message: Value) -> bytes:
    """Encode a message. Raises ``UnsendableMessage``, whatever is wrong: nobody may fail by what a message holds."""
    try:
        frame = _encoder.encode(message)
    except Exception as error:  # numbers of too many bits, text that is no Unicode, objects, no memory, a broken tensor
        raise UnsendableMessage(f"a {type(message).__name__} cannot be sent: {describe_error(error, 200)}") from error
    if len(frame) > channel.MAX_MESSAGE:
        text = f"a {type(message).__name__} of {len(frame)} bytes is above the {channel.MAX_MESSAGE} of a message"
        raise UnsendableMessage(text, too_large=True)
    return frame


def decode(frame: bytes) -> Value:
    """Decode a message. Raises ``HandshakeError`` if the frame is not one, whatever the decoder makes of it."""
    try:
        message: Value = _decoder.decode(frame)
    except Exception as error:
        raise HandshakeError(f"a control frame of {len(frame)} bytes is no message: {error}", "control") from error
    return message
