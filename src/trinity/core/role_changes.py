"""Role changes: which instances switch when one placement becomes another, in which order, and what a switch took.

No stage lacks an instance on the way, if an order allows that. A pipeline carries the changes out, and a simulation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import NamedTuple, Protocol

import msgspec

from trinity.errors import PlacementError

MOST_TRIED = 10_000  # kinds of what is left, of a search that hardly ever comes to ten


class RunningInstance(Protocol):
    """An instance as it is, and the roles that it may ever have (None: any)."""

    @property
    def name(self) -> str: ...
    @property
    def roles(self) -> str: ...
    @property
    def may(self) -> str | None: ...


class WantedPlacement(Protocol):
    """A placement: how many instances, the stages that they have, and (name, roles) of each."""

    @property
    def size(self) -> int: ...
    @property
    def stages(self) -> str: ...
    def instances(self) -> list[tuple[str, str]]: ...


class Switch(msgspec.Struct, frozen=True):
    """Record of an instance that has switched to other roles, was added or was removed.

    - ``name``, ``former``, ``roles``: the instance, what it was ("": added), and what it is ("": removed).
    - ``drain_s`` (seconds): until it was empty; EPDServe's offload.
    - ``change_s`` (seconds): from then until it served in its new roles, or was gone.
    - ``migration_s`` (seconds): of ``change_s``, until its former life had ended and its next one had its weights and
      pools. On threads a switch loads these ahead of the drain, and it is 0.
    - ``emptied``: False where its last requests had to go on elsewhere, with their tokens so far.
    - ``prepare_s`` (seconds): before the drain, in which it served as ever, and its next life loaded beside it.
    """

    name: str
    former: str
    roles: str
    drain_s: float
    change_s: float
    emptied: bool
    migration_s: float = 0.0
    prepare_s: float = 0.0

    @property
    def onload_s(self) -> float:
        """Seconds of ``change_s`` after ``migration_s``, in which it met the others."""
        return self.change_s - self.migration_s


class RoleChange(NamedTuple):
    """An instance, and the roles that it is to have, "" for one that is to be removed; of a new name: to be added."""

    name: str
    roles: str


def order_changes(
    instances: Sequence[RunningInstance], wanted: WantedPlacement, resize: bool = False
) -> list[RoleChange]:
    """List changes that make ``wanted`` of these instances, few of them, in an order in which they can be done.

    Those that lack are added first, those too many removed last (``resize``). While one switches, others have all
    stages of the model where an order allows that. Raises ``PlacementError`` for another number of instances without
    ``resize``, and where none may have the roles that are missing.
    """
    if wanted.size != len(instances) and not resize:
        text = f"placement {wanted} has {wanted.size} instances, and {len(instances)} run"
        raise PlacementError(f"{text}: give one of as many, which they can switch to, or resize=True")
    left, lacking, surplus = _pair(instances, wanted)
    if surplus and not resize:
        text = f"placement {wanted} cannot be made of what {', '.join(each.name for each in instances)}"
        raise PlacementError(f"{text} may be (Instance.may)")
    added = _name_added(instances, lacking)
    roles = {each.name: each.roles for each in instances} | dict(added)
    order = _order_covered(roles, left, wanted.stages, set()) or _order_scarce(roles, left, wanted.stages)
    return [*added, *order, *(RoleChange(name, "") for name in surplus)]


def _order_covered(
    roles: Mapping[str, str], left: Sequence[RoleChange], needed: str, seen: set[tuple[str, ...]]
) -> list[RoleChange] | None:
    """Find an order in which the others have all stages during each switch; None where there is none.

    ``seen``: what was left, by kinds of switches, where no order was found.
    """
    if not left:
        return []
    kinds = tuple(sorted(f"{roles[each.name]} {each.roles}" for each in left))
    if kinds in seen or len(seen) > MOST_TRIED:
        return None
    seen.add(kinds)
    for change in {(roles[each.name], each.roles): each for each in left}.values():
        if not _count_lacking(roles, change, needed):
            rest = [each for each in left if each is not change]
            found = _order_covered({**roles, change.name: change.roles}, rest, needed, seen)
            if found is not None:
                return [change, *found]
    return None


def _order_scarce(roles: Mapping[str, str], left: Sequence[RoleChange], needed: str) -> list[RoleChange]:
    """Order switches of which some leave a stage without an instance meanwhile: those that lack fewest first."""
    now, rest, ordered = dict(roles), list(left), []
    while rest:
        change = min(rest, key=lambda each: _count_lacking(now, each, needed))
        rest.remove(change)
        ordered.append(change)
        now[change.name] = change.roles
    return ordered


def _pair(
    instances: Sequence[RunningInstance], wanted: WantedPlacement
) -> tuple[list[RoleChange], list[str], list[str]]:
    """Pair instances with roles that are missing, as their ``may`` allows; as many as can be stay as they are.

    Returns the switches, the roles that nobody gets, and the names of those that get none.
    """
    roles = [roles for _, roles in wanted.instances()]
    owner = _match_stays(instances, roles)
    for row in range(len(instances)):
        if row not in owner.values():
            _place(row, instances, roles, owner, set())
    changes = [RoleChange(instances[row].name, roles[at]) for at, row in sorted(owner.items())]
    now = {each.name: each.roles for each in instances}
    lacking = [role for at, role in enumerate(roles) if at not in owner]
    surplus = [each.name for row, each in enumerate(instances) if row not in owner.values()]
    return [change for change in changes if now[change.name] != change.roles], lacking, surplus


def _name_added(instances: Sequence[RunningInstance], lacking: Sequence[str]) -> list[RoleChange]:
    taken = {each.name for each in instances}
    added: list[RoleChange] = []
    for roles in lacking:
        added.append(RoleChange(find_free_name(taken, roles), roles))
        taken.add(added[-1].name)
    return added


def find_free_name(taken: Collection[str], roles: str) -> str:
    """Find the first name for an instance of these roles that none has: "D2"."""
    return next(name for name in (f"{roles}{number}" for number in count()) if name not in taken)


def _match_stays(instances: Sequence[RunningInstance], roles: Sequence[str]) -> dict[int, int]:
    """Give roles to instances that have them already, by place in both lists."""
    owner: dict[int, int] = {}
    for row, each in enumerate(instances):
        at = next((at for at, role in enumerate(roles) if role == each.roles and at not in owner), None)
        if at is not None:
            owner[at] = row
    return owner


def _place(
    row: int, instances: Sequence[RunningInstance], roles: Sequence[str], owner: dict[int, int], tried: set[int]
) -> bool:
    """Find roles for an instance, free ones first; whoever has them looks for others (augmenting paths)."""
    fitting = [at for at, role in enumerate(roles) if may_have(instances[row], role)]
    for at in sorted(fitting, key=lambda at: at in owner):
        if at not in tried:
            tried.add(at)
            if at not in owner or _place(owner[at], instances, roles, owner, tried):
                owner[at] = row
                return True
    return False


def may_have(instance: RunningInstance, roles: str) -> bool:
    """True where an instance may ever have these roles."""
    return instance.may is None or set(roles) <= set(instance.may)


def _count_lacking(roles: Mapping[str, str], change: RoleChange, needed: str) -> int:
    """Count the stages that no instance has while this one switches."""
    others = {letter for name, letters in roles.items() if name != change.name for letter in letters}
    return len(set(needed) - others)
