"""Checks of one change of a pipeline's instances, and the instances as they are after it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from trinity.core.messages import FRONTEND
from trinity.core.role_changes import RoleChange, find_free_name, may_have
from trinity.errors import ConfigError, PlacementError, UnknownName
from trinity.instance import Instance
from trinity.placement import STAGES, Group, Placement


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
