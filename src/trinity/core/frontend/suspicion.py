"""Suspicion: deaths of instances that one request may have caused, and what it has shown since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from trinity.core.failure_policy import FailurePolicy
from trinity.stage_kinds import DECODE, PREFILL, order_letters, roles_of

PASSED_TOKENS = 8  # more than its reader had: past what the lost instance was at, which may have been ahead of that
NEWS_S = 1.0  # in which the end of an instance is heard, unless that is frozen: its channel ends
NEWS_KEPT_S = 5.0  # in which a death may be told late: what comes later was no death in its step


class Life(NamedTuple):
    """One life of an instance: it has another epoch after each restart."""

    name: str
    epoch: int


class Death(NamedTuple):
    """Death of an instance that had a request, with so many ``tokens`` out. ``alone``: it had nothing else.

    ``read``: only a target that could not read it has spoken of it.
    """

    life: Life
    roles: str
    tokens: int
    alone: bool
    read: bool = False

    @property
    def stages(self) -> str:
        """Letters of the stages in whose step it may have been: a prefill that goes on with tokens does a decode's."""
        return self.roles + (DECODE.letter if self.tokens and roles_of(self.roles).hands_kv_on else "")


@dataclass(slots=True)
class Suspicion:
    """Deaths of instances that had one request. ``delivered``: the tokens that its reader has.

    - ``deaths``: of instances that had it; the last ``row`` of them without its getting through between. ``died_at``:
      clock time of the last one.
    - ``cleared``: lives of instances whose deaths were withdrawn: reads from them had failed, and they were up.
    - ``tried_alone``: a life of it was alone since the last of these deaths, and was lost otherwise. One that an
      instance gave back, as the next stage was not up, was none: it may not have come to the stage in question.
    - ``left``: lives of instances where former lives of it may still be, and have not been counted as dead, with True
      where nothing else was there; one that dies within ``NEWS_KEPT_S`` of ``left_at`` may have died of it.
    - ``alone_at``: lives of instances that were empty and reserved for it as this life of it was sent, until it has
      got through. What becomes of them meanwhile does not change that it was alone there. ``alone_before``: those of
      former lives.
    """

    left: dict[Life, bool] = field(default_factory=dict)
    left_at: float = -inf
    deaths: tuple[Death, ...] = ()
    row: int = 0
    died_at: float = 0.0
    tried_alone: bool = False
    cleared: frozenset[Life] = frozenset()
    alone_before: frozenset[Life] = frozenset()
    alone_at: frozenset[Life] = frozenset()

    def stages(self, delivered: int) -> str:
        """Letters of the stages at which instances died with it, since it last got through.

        One that has tokens goes on from a decode at a prefill, which samples the next of them.
        """
        roles = {letter for death in self.last_row for letter in death.roles}
        roles |= {PREFILL.letter} if DECODE.letter in roles and delivered else set()
        return order_letters(roles)

    def has_passed(self, delivered: int) -> bool:
        """True for one that has got through what it was suspected in: its first token shows that of E and P.

        That it has been handed on shows nothing: blocks move ahead of the end of the step that fills them.
        """
        stages = self.stages(delivered)
        return not stages or delivered - self.deaths[-1].tokens >= (PASSED_TOKENS if DECODE.letter in stages else 1)

    @property
    def last_row(self) -> tuple[Death, ...]:
        """The deaths since it last got through."""
        return self.deaths[len(self.deaths) - self.row :]

    def get_through(self, *, alone: bool) -> None:
        """Note that it has tokens since it was sent. ``alone``: it ran alone, and is past what it was suspected in."""
        self.row = 0 if alone else self.row
        self.alone_at = frozenset()

    def send(self, alone_at: frozenset[Life]) -> None:
        """Note that a new life of it is sent, and which instances are empty for it."""
        self.alone_before, self.alone_at = self.alone_before | self.alone_at, alone_at

    def note_death(self, death: Death, now: float) -> None:
        """Count a death, once; the first of a row where it had got through since the one before."""
        if any(each.life == death.life for each in self.deaths):
            self.died_at = now if self.deaths[-1].life == death.life else self.died_at
            return
        self.row = 1 if self.has_passed(death.tokens) else self.row + 1
        self.deaths += (death,)
        self.died_at, self.tried_alone = now, False

    def clears(self, death: Death, up: Callable[[Life], bool], now: float) -> bool:
        """Withdraw deaths of lives that are up, of which only a failed read spoke. True of one of a life cleared so.

        The news of that death may be on its way: it counts late then.
        """
        false = {each for each in self.deaths if each.read and up(each.life)}
        self.row -= len(false.intersection(self.last_row))
        self.cleared |= {each.life for each in false}
        self.deaths = tuple(each for each in self.deaths if each not in false)
        self.leave_behind({each.life: each.alone for each in false}, now)
        return death.read and death.life in self.cleared and up(death.life)

    def leave_behind(self, lives: Mapping[Life, bool], now: float) -> None:
        """Note lives of instances where a former life of it may still be, and which of them had nothing else."""
        kept = self.left if now <= self.left_at + NEWS_KEPT_S else {}
        self.left, self.left_at = {**kept, **lives}, now if lives else self.left_at

    def awaits_news(self, delivered: int, now: float) -> bool:
        """True where an instance died with it and now a life ended for another reason: a second one may have died."""
        return bool(self.row) and not self.has_passed(delivered) and self.died_at != now

    def note_late_death(self, life: Life, roles: str, delivered: int, now: float) -> None:
        """Count a death of which a former life of it may have been the cause: nobody knew of it then.

        It was before what happened to the present life: a death alone stays the last one.
        """
        alone = self.left.pop(life, None)
        if alone is None or now > self.left_at + NEWS_KEPT_S or any(each.life == life for each in self.deaths):
            return
        last = self.deaths[-1:] if self.row and self.deaths[-1].alone else ()
        self.deaths = self.deaths[: len(self.deaths) - len(last)]
        self.row -= len(last)
        self.note_death(Death(life, roles, delivered, alone), now)
        self.deaths, self.row = self.deaths + last, self.row + len(last)

    def poison_deaths(self, policy: FailurePolicy) -> tuple[Death, ...]:
        """List the deaths for which it is refused: so many of the row at one stage, the last of them alone."""
        deaths = self._deaths_at_one_stage()
        return deaths if self.row and self.deaths[-1].alone and len(deaths) >= policy.deaths else ()

    def _deaths_at_one_stage(self) -> tuple[Death, ...]:
        """List the most deaths of the row that have a stage of the last one in common.

        What kills does so in the step of one stage: deaths that have none in common had different causes. A request
        that dies as its tokens are sampled does so where it decodes, and then where it is prefilled with these.
        """
        row = self.last_row
        common = [tuple(each for each in row if letter in each.stages) for letter in (row[-1].stages if row else "")]
        return max(common, key=len, default=())

    @property
    def has_been_alone(self) -> bool:
        """True where a life of it was alone since the last death, or in that, and the row is of one stage."""
        last_alone = bool(self.deaths) and self.deaths[-1].alone and len(self._deaths_at_one_stage()) == self.row
        return last_alone or self.tried_alone
