"""Placements: roles of each instance, such as "1E3P4D", "2EP2D", "ED+P", "EPD" (TriInfer 3.3, 4.4)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from trinity.errors import PlacementError
from trinity.errors.arguments import Whole, check_arguments, check_call, show
from trinity.stage_kinds import DECODE, PREFILL, all_letters, describe_stages, order_letters, roles_of

METHODS = ("EPD", "EP+D", "ED+P", "E+P+D", "PD+E")
_GROUP = re.compile(r"(?<!\d)(\d*)([A-Za-z]+)")
# What a grammar for devices and ranks might have (decision 0136): how it looks, what it asks for, and what to write.
LONGEST_READ = 80  # characters: a longer text is no placement that a person wrote
_UNBUILT = (
    (
        re.compile(r"@[^+]*"),
        "devices or hosts",
        "give a list of trinity.Instance, each with its device= or address=, in place of the placement",
    ),
    (
        re.compile(r"(?i)[:/]?\b\d*([TPC]P|SP|DP|EP)\s*=\s*\d*|:[^@+]*|(?<![A-Z])TP\d+|TP\d+$"),
        "ranks of one instance on several devices",
        "an instance has one device: write more instances, such as 2P, or a smaller dtype",
    ),
    (
        re.compile(r"[(){}\[\]|&*×]|\d{1,9}[xX](?=\d|[(\[{]|[A-Za-z])"),
        "groups of instances that share a device",
        "write a count ahead of letters, such as 2EP; those of a list of trinity.Instance share a device=",
    ),
)


@check_arguments
@dataclass(frozen=True)
class Group:
    """``count`` instances with the same ``roles``, such as "EP"."""

    count: Whole
    roles: str

    @classmethod
    def parse(cls, roles: str) -> Group:
        """Read one instance's roles, such as "E" or "PD". Raises ``PlacementError``."""
        if isinstance(roles, str):
            _refuse_unbuilt(roles)
        if not (isinstance(roles, str) and roles.isalpha()):
            raise PlacementError(f"an instance's roles are letters of {_letters()}, such as 'EP', got {show(roles)}")
        return cls(1, _roles(roles.upper(), roles))


@check_arguments
@dataclass(frozen=True)
class Placement:
    """Groups of instances. ``str()`` gives the canonical form, ``method`` the disaggregation method."""

    groups: tuple[Group, ...]

    @classmethod
    @check_call
    def parse(cls, text: str) -> Placement:
        """Read groups ``[n]LETTERS``, one after another or joined by ``+``; a missing count is 1.

        Raises ``PlacementError`` if the text is not a placement, or has no prefill or decode.
        """
        _refuse_unbuilt(text)
        pieces = "".join(text.split()).upper().split("+")
        return cls.of(group for piece in pieces for group in _groups(piece, text))

    @classmethod
    @check_call
    def of(cls, groups: Iterable[Group]) -> Placement:
        """Make a placement of groups; neighbours of the same roles become one.

        Raises ``PlacementError`` if it has no prefill or decode.
        """
        alike = groupby(groups, lambda group: group.roles)
        placement = cls(tuple(Group(sum(group.count for group in same), roles) for roles, same in alike))
        missing = [stage for stage in (PREFILL.letter, DECODE.letter) if stage not in placement.stages]
        if missing:
            raise PlacementError(
                f"placement {placement} has no instance for stage {' and '.join(missing)}; "
                "a placement needs prefill (P) and decode (D), for example EPD, 1EP1D or 1E1P1D"
            )
        return placement

    @property
    def stages(self) -> str:
        """Letters of the stages that some instance has, in the order of the table (``trinity.stage_kinds``)."""
        return order_letters(letter for group in self.groups for letter in group.roles)

    @property
    def size(self) -> int:
        """Number of instances."""
        return sum(group.count for group in self.groups)

    @property
    def method(self) -> str:
        """Disaggregation method: one of ``METHODS``, or the roles joined by ``+``."""
        roles = {group.roles for group in self.groups}
        for name in METHODS:
            if set(name.split("+")) == roles:
                return name
        return "+".join(sorted(roles, key=lambda each: (all_letters().index(each[0]), -len(each))))

    def instances(self) -> list[tuple[str, str]]:
        """List (name, roles) of every instance: ("E0", "E"), ("P0", "P"), ("P1", "P"), ..."""
        named: list[tuple[str, str]] = []
        counts: dict[str, int] = {}
        for group in self.groups:
            for _ in range(group.count):
                index = counts.get(group.roles, 0)
                counts[group.roles] = index + 1
                named.append((f"{group.roles}{index}", group.roles))
        return named

    @check_call
    def check(self, multimodal: bool) -> None:
        """Raise ``PlacementError`` if this placement does not suit the model."""
        if multimodal and not roles_of(self.stages).encodes:
            raise PlacementError(f"placement {self} has no encode stage (E), which a multimodal model needs")
        if not multimodal and any(roles_of(group.roles).only_encodes for group in self.groups):
            raise PlacementError(f"placement {self} has an encode instance (E), which a text-only model never uses")

    def __str__(self) -> str:
        return "".join(f"{group.count}{group.roles}" for group in self.groups)


def _refuse_unbuilt(text: str) -> None:
    """Refuse by name what placements might say one day, and do not."""
    for pattern, what, instead in _UNBUILT if len(text) <= LONGEST_READ else ():
        found = pattern.search(text)
        if found is not None:
            raise PlacementError(
                f"placement {show(text)} names {what} ({found.group().strip()!r}), which placements cannot: {instead}"
            )


def _groups(piece: str, text: str) -> Iterable[Group]:
    if not piece or _GROUP.sub("", piece):
        raise PlacementError(
            f"{show(text)} is not a placement: write counts and letters of {_letters()}, such as 1E3P4D or ED+P"
        )
    for count, letters in _GROUP.findall(piece):
        yield Group(_count(count, text), _roles(letters, text))


def _count(digits: str, text: str) -> int:
    count = int(digits[:9]) if digits else 1  # of more digits it is out of range too
    if not 1 <= count <= 65_536 or len(digits) > 9:
        raise PlacementError(
            f"placement {show(text)}: an instance count must lie between 1 and 65536, got {digits:.20}"
        )
    return count


def _roles(letters: str, text: str) -> str:
    unknown = sorted(set(letters) - set(all_letters()))
    if unknown or len(set(letters)) != len(letters):
        wrong = f"unknown stage {', '.join(unknown)}" if unknown else f"a stage twice in {letters!r}"
        raise PlacementError(f"placement {show(text)} names {wrong}; the stages are {describe_stages()}")
    return order_letters(letters)


def _letters() -> str:
    return ", ".join(all_letters())
