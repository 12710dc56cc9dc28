"""Both supplies keep the contract; broken ones are caught by it, each by the check that is for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from support.running_instances import SECRET, by_hand, tcp
from trinity.errors import ConfigError
from trinity.remote.supervision.fork_client import Launcher, kept_launcher
from trinity.remote.supervision.fork_supply import ForkSupply
from trinity.remote.supervision.supply import AttachedSupply, InstanceOrder, InstancePlace, Supply
from trinity.remote.supervision.warm_launchers import close_idle
from trinity.testing import supply_contract
from trinity.testing.supply_contract import INSTANCE_NAMES, check_supply

KEY = SECRET.encode()


@asynccontextmanager
async def forking(folder: Path, kind: type[ForkSupply] = ForkSupply) -> AsyncIterator[ForkSupply]:
    own = folder / str(len(list(folder.iterdir())))  # who is killed holds its address for a moment
    own.mkdir()
    supply = kind(own)
    try:
        yield supply
    finally:
        await ForkSupply.aclose(supply)


async def test_the_forking_one_keeps_the_contract(tmp_path: Path) -> None:
    async with kept_launcher(torch=False):
        await check_supply(lambda: forking(tmp_path), secret=KEY)


async def test_the_attached_one_keeps_the_contract() -> None:
    async with kept_launcher(torch=False) as launcher, by_hand(launcher, tcp(), tcp(), model="") as running:
        addresses = {name: one.address for name, one in zip(INSTANCE_NAMES, running, strict=True)}

        @asynccontextmanager
        async def attached() -> AsyncIterator[AttachedSupply]:
            yield AttachedSupply(addresses)

        await check_supply(attached, secret=KEY, ends=False)
        with pytest.raises(AssertionError, match="end\\(\\) returned while the instance"):
            await check_supply(attached, secret=KEY)


async def test_an_attached_one_without_an_address_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="D0 has no address"):
        await AttachedSupply({}).begin(InstanceOrder("D0", 0, "D", KEY))


async def test_no_launcher_is_an_error_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    close_idle()
    monkeypatch.setattr(Launcher, "program", ("-c", "pass"))
    async with forking(tmp_path) as supply:
        for _ in range(2):  # each starts another
            with pytest.raises(ConfigError, match="launcher of instance processes has ended"):
                await supply.begin(InstanceOrder("D0", 0, "D", KEY))


# ---------------------------------------------------------------- broken ones


class Unending(ForkSupply):
    async def end(self, name: str, epoch: int) -> None:
        """Leave it running."""


class Mixing(ForkSupply):
    """Takes each name for the same."""

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        return await super().begin(InstanceOrder("P0", order.epoch, "P", order.secret))


class Sweeping(ForkSupply):
    """Ends all with one."""

    async def end(self, name: str, epoch: int) -> None:
        for life in list(self._begun):
            await super().end(*life)


class Leaving(ForkSupply):
    async def aclose(self) -> None:
        """Leave all that it has begun."""


BROKEN: dict[type[ForkSupply], str] = {
    Unending: "end\\(\\) returned while the instance",
    Mixing: "two instances were said to be at one address",
    Sweeping: "nobody listens at",
    Leaving: "was there after aclose",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
async def test_a_broken_one_is_caught(kind: type[ForkSupply], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply_contract, "GONE_S", 0.5)
    async with kept_launcher(torch=False):
        with pytest.raises(AssertionError, match=BROKEN[kind]):
            await check_supply(lambda: forking(tmp_path, kind), secret=KEY)


async def test_one_that_never_answers_is_caught() -> None:
    class Silent(AttachedSupply):
        async def begin(self, order: InstanceOrder) -> InstancePlace:
            await asyncio.Event().wait()
            raise AssertionError

    @asynccontextmanager
    async def silent() -> AsyncIterator[Supply]:
        yield Silent({})

    with pytest.raises(AssertionError, match="each_name_has_a_place_of_its_own: no answer"):
        await check_supply(silent, secret=KEY, timeout_s=0.1)
