"""Order of changes: from a placement that runs to another one, with a stage lacking at no time if that can be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from trinity.core.messages import FRONTEND
from trinity.errors import ConfigError, PlacementError, UnknownName
from trinity.instance import Instance
from trinity.placement import STAGES, Group, Placement

MOST_TRIED = 10_000  # kinds of what is left, of a search that hardly ever comes to ten


class RoleChange(NamedTuple):
    """An instance, and the roles that it is to have, "" for one that is to be removed; of a new name: to be added."""

    name: str
    roles: str


def order_changes(instances: Sequence[Instance], wanted: Placement, resize: bool = False) -> list[RoleChange]:
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


def _pair(instances: Sequence[Instance], wanted: Placement) -> tuple[list[RoleChange], list[str], list[str]]:
    """Pair instances with roles that are missing, as their ``may`` allows; as many as can be stay as they are.

    Returns the switches, the roles that nobody gets, and the names of those that get none.
    """
    roles = [group.roles for group in wanted.groups for _ in range(group.count)]
    owner = _match_stays(instances, roles)
    for row in range(len(instances)):
        if row not in owner.values():
            _place(row, instances, roles, owner, set())
    changes = [RoleChange(instances[row].name, roles[at]) for at, row in sorted(owner.items())]
    now = {each.name: each.roles for each in instances}
    lacking = [role for at, role in enumerate(roles) if at not in owner]
    surplus = [each.name for row, each in enumerate(instances) if row not in owner.values()]
    return [change for change in changes if now[change.name] != change.roles], lacking, surplus


def _name_added(instances: Sequence[Instance], lacking: Sequence[str]) -> list[RoleChange]:
    taken = {each.name for each in instances}
    added: list[RoleChange] = []
    for roles in lacking:
        added.append(RoleChange(find_free_name(taken, roles), roles))
        taken.add(added[-1].name)
    return added


def find_free_name(taken: Collection[str], roles: str) -> str:
    """Find the first name for an instance of these roles that none has: "D2"."""
    return next(name for name in (f"{roles}{number}" for number in count()) if name not in taken)


def _match_stays(instances: Sequence[Instance], roles: Sequence[str]) -> dict[int, int]:
    """Give roles to instances that have them already, by place in both lists."""
    owner: dict[int, int] = {}
    for row, each in enumerate(instances):
        at = next((at for at, role in enumerate(roles) if role == each.roles and at not in owner), None)
        if at is not None:
            owner[at] = row
    return owner


def _place(
    row: int, instances: Sequence[Instance], roles: Sequence[str], owner: dict[int, int], tried: set[int]
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


def may_have(instance: Instance, roles: str) -> bool:
    """True where an instance may ever have these roles."""
    return instance.may is None or set(roles) <= set(instance.may)


def _count_lacking(roles: Mapping[str, str], change: RoleChange, needed: str) -> int:
    """Count the stages that no instance has while this one switches."""
    others = {letter for name, letters in roles.items() if name != change.name for letter in letters}
    return len(set(needed) - others)


def switch_instances(instances: Iterable[Instance], change: RoleChange) -> list[Instance]:
    """List the instances as they are after a switch."""
    return [replace(each, roles=change.roles) if each.name == change.name else each for each in instances]


def check_switch(instances: Sequence[Instance], name: str, roles: str) -> RoleChange:
    """Check that an instance may have these roles, and that all stages of before are had by one.

    Raises ``UnknownName`` for an instance that is not there, else ``PlacementError``.
    """
    found = _find(instances, name)
    change = RoleChange(name, Group.parse(roles).roles)
    if change.roles == found.roles:
        raise PlacementError(f"instance {name} has the roles {change.roles} already")
    if not may_have(found, change.roles):
        raise PlacementError(f"instance {name} may have the roles {found.may}, and not {change.roles} (Instance.may)")
    after = {letter for each in switch_instances(instances, change) for letter in each.roles}
    missing = [letter for letter in STAGES if letter not in after and any(letter in each.roles for each in instances)]
    if missing:
        text = f"no instance would have stage {' and '.join(missing)} once {name} is {change.roles}"
        raise PlacementError(f"{text}; switch another one to it first")
    return change


def check_added(instances: Sequence[Instance], added: Instance) -> Instance:
    """Return an instance with its name, a free one if it has none. Raises ``ConfigError`` for a name that is in use."""
    taken = {each.name for each in instances}
    named = replace(added, name=added.name or find_free_name(taken, added.roles))
    if named.name in taken or named.name == FRONTEND:
        raise ConfigError(f"an instance {named.name} runs already: give another name, or none for {added.roles}0 or so")
    return named


def check_removed(instances: Sequence[Instance], name: str) -> str:
    """Check that all stages are had by others than this one.

    Raises ``UnknownName`` for an instance that is not there, else ``PlacementError``.
    """
    found = _find(instances, name)
    rest = {letter for each in instances if each is not found for letter in each.roles}
    missing = [letter for letter in found.roles if letter not in rest]
    if missing:
        text = f"no instance would have stage {' and '.join(missing)} without {name}"
        raise PlacementError(f"{text}; add another one first, or have one switch to it")
    return name


def _find(instances: Sequence[Instance], name: str) -> Instance:
    found = next((each for each in instances if each.name == name), None)
    if found is None:
        raise UnknownName("instance", name, [each.name for each in instances])
    return found


def describe_instances(instances: Iterable[Instance]) -> Placement:
    """The placement that these instances are, in the order of their stages."""
    return Placement.of(sorted((each.group for each in instances), key=lambda group: STAGES.index(group.roles[0])))
