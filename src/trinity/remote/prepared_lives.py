"""PreparedLives: the part of SupervisorCore that has an instance's next life load beside the present one.

A life that is prepared has a process, and weights where memory allows that; nobody knows it, and it has no pool. It is
given the word to go on in place of a launch, once the present life of its name has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trinity.remote.supervised_lives import LifePhase, Member, NextLife
from trinity.remote.supervisor_messages import (
    DropNext,
    Ended,
    Event,
    Fence,
    Launch,
    LoadNext,
    Lost,
    NextLoaded,
    NextLost,
    Proceed,
    Quiet,
)

SUSPECT_S = 2.0  # of silence: requests are routed past it, and one that was prepared is not relied on
LOADING_SILENCE_S = 20.0  # imports and kernels may hold an interpreter for seconds


class PreparedLives:
    """Lives that wait for the word to go on, at most one of a name. See the table of ``supervisor_core``."""

    members: dict[str, Member]
    silence_s: float
    closing: bool
    _out: list[Event]

    # ------------------------------------------------------------ for the core

    def _launch_next(self, member: Member) -> bool:
        """Give the life that was prepared the word, as the present one; False where there is none to rely on."""
        if member.next is None or member.next.suspected:
            self._dismiss(member)
            return False
        member.epoch, member.next = member.next.epoch, None
        self._out.append(Proceed(member.name, member.epoch))
        return True

    def _dismiss(self, member: Member) -> None:
        """End the life that was prepared, if there is one."""
        if member.next is not None:
            member.dismissed.add(member.next.epoch)
            self._out.append(Fence(member.name, member.next.epoch))
            member.next = None

    def _lose_next(self, member: Member, why: str) -> None:
        if member.next is not None:
            epoch = member.next.epoch
            self._dismiss(member)
            self._out.append(NextLost(member.name, epoch, why))

    # ------------------------------------------------------------ events of the present life

    def _load_next(self, member: Member, event: LoadNext, now: float) -> None:
        """Launch the next life beside the present one, in place of one that was prepared before."""
        if member.phase is LifePhase.UP and not (member.by_hand or member.removed or self.closing):
            self._dismiss(member)
            member.newest += 1
            member.next = NextLife(member.newest)
            self._out.append(Launch(member.name, member.newest, waits=True))

    def _drop_next(self, member: Member, event: DropNext, now: float) -> None:
        self._dismiss(member)

    # ------------------------------------------------------------ events of the next one

    def _is_of_next(self, member: Member, epoch: int) -> bool:
        return epoch in member.dismissed or (member.next is not None and member.next.epoch == epoch)

    def _next_loaded(self, member: Member, event: NextLoaded, now: float) -> None:
        if member.next is not None and member.next.epoch == event.epoch:
            member.next.prepared = True

    def _next_lost(self, member: Member, event: Lost, now: float) -> None:
        if event.epoch not in member.dismissed:
            self._lose_next(member, event.why)

    def _next_quiet(self, member: Member, event: Quiet, now: float) -> None:
        if member.next is not None and event.epoch not in member.dismissed:
            member.next.suspected = member.next.prepared and event.seconds > SUSPECT_S
            if event.seconds > max(self.silence_s, LOADING_SILENCE_S):
                self._lose_next(member, f"it said nothing for {event.seconds:.1f} s")

    def _next_ended(self, member: Member, event: Ended, now: float) -> None:
        member.dismissed.discard(event.epoch)


OF_THE_NEXT: dict[type[Event], Callable[[PreparedLives, Member, Any, float], None]] = {
    NextLoaded: PreparedLives._next_loaded,
    Lost: PreparedLives._next_lost,
    Quiet: PreparedLives._next_quiet,
    Ended: PreparedLives._next_ended,
}
