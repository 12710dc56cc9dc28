"""A launcher whose instances can be held up inside a transfer: before its first byte, between halves, or after.

As a program it is the launcher, with every transport wrapped. The test writes into a folder, TRINITY_PAUSES: a file
"pause" ({"kind", "phase"}) has the next read of that kind of block stop there; it then is called "reached", and the
read goes on when there is a file "resume".
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from trinity.remote.supervision import fork_client
from trinity.remote.supervision.fork_client import Launcher
from trinity.transport import registry
from trinity.transport.nixl.transport import NixlTransport

FOLDER = "TRINITY_PAUSES"
BEFORE, DURING, AFTER = PHASES = ("before", "during", "after")
LIVENESS_S = 60.0


class PausingLauncher(Launcher):
    program = (__file__,)


class Pauses:
    """The test's end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ask(self, kind: str, phase: str) -> None:
        for name in ("reached", "resume"):
            (self.folder / name).unlink(missing_ok=True)
        draft = self.folder / "draft"
        draft.write_text(json.dumps({"kind": kind, "phase": phase}))
        draft.rename(self.folder / "pause")

    async def reached(self) -> None:
        async with asyncio.timeout(LIVENESS_S):
            while not (self.folder / "reached").exists():
                await asyncio.sleep(0.005)

    def resume(self) -> None:
        (self.folder / "resume").touch()


class PausingRemote:
    """Reads of one pool. A paused read moves the halves of each block one after the other, with the pause between."""

    def __init__(self, remote: Any, into: Any) -> None:
        self._remote, self._into = remote, into
        self._folder = Path(os.environ[FOLDER])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._remote, name)

    async def read(self, source: Sequence[int], target: Sequence[int], within: Any = None) -> int:
        phase = self._claimed()
        if phase is None:
            return int(await self._remote.read(source, target, within))
        offset, length = within or (0, self._into.block_bytes)
        middle = {BEFORE: 0, DURING: length // 2 // 8 * 8, AFTER: length}[phase]
        moved = int(await self._remote.read(source, target, (offset, middle))) if middle else 0
        await self._wait()
        rest = (offset + middle, length - middle)
        return moved + (int(await self._remote.read(source, target, rest)) if rest[1] else 0)

    def _claimed(self) -> str | None:
        """The phase at which this read is to stop, if it is the one that is meant."""
        with suppress(OSError, ValueError):
            asked = json.loads((self._folder / "pause").read_text())
            if asked["kind"] == self._into.kind:
                os.rename(self._folder / "pause", self._folder / "reached")
                return str(asked["phase"])
        return None

    async def _wait(self) -> None:
        while not (self._folder / "resume").exists():
            await asyncio.sleep(0.005)


def wrapped(make: Callable[[], Any]) -> Callable[[], Any]:
    """Makes the same transport, whose remotes pause."""

    def made() -> Any:
        transport = make()
        attach = transport.attach

        async def attached(descriptor: bytes, into: Any) -> PausingRemote:
            return PausingRemote(await attach(descriptor, into), into)

        transport.attach = attached
        return transport

    return made


class NixlTcp(NixlTransport):
    """NIXL as between hosts: an instance has one transport, so that its choice is its process's."""

    scheme = "nixl-tcp"

    def __init__(self) -> None:
        if FOLDER in os.environ:
            os.environ["UCX_TLS"] = "tcp"
        super().__init__()


@contextmanager
def pausing(folder: Path) -> Iterator[tuple[Pauses, Launcher]]:
    """A kept launcher of instances that pause; "nixl-tcp" is a transport meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.BUILT_IN, "nixl-tcp", NixlTcp)
        patch.setenv(FOLDER, str(folder))
        launcher = PausingLauncher()
        patch.delenv(FOLDER)
        fork_client._kept.append(launcher)
        try:
            yield Pauses(folder), launcher
        finally:
            fork_client._kept.remove(launcher)
            launcher.close()


if __name__ == "__main__":
    from trinity.remote import fork_server as program

    registry.BUILT_IN["nixl-tcp"] = NixlTcp
    for scheme, make in list(registry.BUILT_IN.items()):
        registry.BUILT_IN[scheme] = wrapped(make)
    program.main()
