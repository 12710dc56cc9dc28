"""Settings of an instance, as its core reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.core.values import STATE
from trinity.errors import ConfigError, show
from trinity.errors.arguments import Count, Whole
from trinity.stage_kinds import roles_of

Reservation = Literal["full", "optimistic"]
RESERVATIONS: tuple[Reservation, ...] = get_args(Reservation)
JOINT = ("joint",)
LANE_LAYOUTS = (JOINT, ("vision", "language"))


@dataclass(frozen=True, kw_only=True)
class CoreOptions:
    """Settings that an instance's core obeys as a user gives them, to an ``Instance`` or a ``Simulator``.

    - ``lanes`` (("joint",)): ("vision", "language") is the paper's dual stream (TriInfer 4.4), where an instance
      encodes beside another stage.
    - ``depth`` (None): steps in flight on a lane. With 2 the next step is decided while one runs (async scheduling), so
      that the lane never waits for the core; a request that a stop token ends is over one step later. None: 2 on a GPU,
      which computes while the host decides, and 1 on a CPU.
    - ``prefix_cache`` (True): keep KV blocks of finished prompts for requests that begin alike.
    - ``image_cache`` (True): keep image features for requests with the same image (an encoder cache).
    - ``reservation`` ("full"): KV blocks for prompt and ``max_tokens`` at once. "optimistic" adds blocks as a request
      decodes; where there are none, the youngest request is preempted and recomputed.
    """

    lanes: tuple[str, ...] = JOINT
    depth: int | None = None
    prefix_cache: bool = True
    image_cache: bool = True
    reservation: Reservation = "full"

    def check(self) -> None:
        """Raise ``ConfigError``."""
        if self.lanes not in LANE_LAYOUTS:
            raise ConfigError(f"lanes must be ('joint',) or ('vision', 'language'), got {show(self.lanes)}")
        if self.depth not in (None, 1, 2):
            raise ConfigError(f"depth is 1 or 2 steps in flight on a lane, got {self.depth!r}")

    def lanes_of(self, roles: str) -> tuple[str, ...]:
        """Return the lanes for these roles: one lane, unless the instance encodes beside another stage."""
        return self.lanes if roles_of(roles).has_two_parts else JOINT

    @property
    def steps_in_flight(self) -> int:
        """Steps in flight on a lane: ``depth``, and 1 where it is left to a device that nobody has named."""
        return self.depth or 1


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """Sizes of blocks.

    - ``image_block_size`` (rows of image features, 576): one block of the image cache.
    - ``kv_block_size`` (tokens, 16): one block of the KV cache.
    """

    image_block_size: Whole = 576
    kv_block_size: Whole = 16


@dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """Blocks of an instance, or the memory that they are counted from.

    - ``pools`` (blocks by kind, None): for example ``{"image": 64, "kv": 1024}``; "state" is for models whose layers
      keep states, one block for each request at a time.
    - ``memory_bytes`` (bytes, None): memory of each instance, its weights included, that pools are sized for. With
      neither, pools are sized for the memory that is free.
    """

    pools: Mapping[str, Count] | None = None
    memory_bytes: Whole | None = None


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions:
    """Rules by which instances batch and move what they have.

    - ``rules`` (None): ``BatchRules``, the scheduler's policy, queue order and switches.
    - ``transfers`` (``TransferPolicy()``): when blocks start to move.
    """

    rules: BatchRules | None = None
    transfers: TransferPolicy = TransferPolicy()


@dataclass(frozen=True)
class Settings(CoreOptions, BlockSizes):
    """An instance as its core sees it: its options, and what its host made of them.

    - ``pools``: blocks by kind. With blocks of states there is no ``prefix_cache``: a state holds all of a text.
    - ``host`` (""): where it runs; instances of one name are on one host.
    - ``layers`` (1): of a KV block.
    - ``lease_s`` (s, 30): blocks stay leased to a silent peer.
    - ``report_s`` (s, 0.1): between two reports of a load that changes.
    - ``heartbeat_s`` (s, 1): between two of one that does not.
    - ``digest_keys`` (512): most cached blocks of each kind that a report names, 8 bytes each.
    """

    name: str
    roles: str
    pools: dict[str, int]
    rules: BatchRules = field(default_factory=BatchRules)
    epoch: int = 0
    layers: int = 1
    transfers: TransferPolicy = field(default_factory=TransferPolicy)
    lease_s: float = 30.0
    report_s: float = 0.1
    heartbeat_s: float = 1.0
    digest_keys: int = 512
    host: str = ""

    def __post_init__(self) -> None:
        if STATE in self.pools:
            object.__setattr__(self, "prefix_cache", False)

    def is_other_life(self, epoch: int | None) -> bool:
        """True for the epoch of another life of this instance; None is any."""
        return epoch is not None and epoch != self.epoch


def check_limits(token_budget: int | None, image_budget: int | None, ruled: bool) -> None:
    """Raise ``ConfigError`` for a batch limit of the instance beside ``rules``, which have limits too."""
    for name, limit in (("token_budget", token_budget), ("image_budget", image_budget)):
        if ruled and limit is not None:
            raise ConfigError(f"{name}={limit!r} and rules= both limit a batch: give the limits in the rules alone")
