"""What a placement, a plan's settings and the user's own keywords make of a pipeline's instances, rules and routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from trinity.core.instance.settings import Reservation
from trinity.core.routing import RoutingPolicy
from trinity.core.scheduler import BatchRules
from trinity.errors import ConfigError, UnknownName
from trinity.instance import Instance
from trinity.placement import Placement
from trinity.planner import Plan

SEARCHED = 0  # a batch limit in a plan: what Algorithm 1 finds
RULES = ("order", "policy")
LIMITS = ("tokens", "mixed_tokens", "images")
KNOBS = (*RULES, *LIMITS, "routing", "reservation", "depth")


class InstanceOptions(TypedDict, total=False):
    """Keywords of ``Instance`` that one pipeline may give to all of its instances."""

    lanes: tuple[str, ...]
    threads: int
    prefix_cache: bool
    image_cache: bool
    reservation: Reservation
    attention: str
    depth: int
    pack: bool | None
    token_budget: int | None
    image_budget: int | None


def placed(
    placement: str | Placement | Plan | Sequence[Instance], options: InstanceOptions, *, limited: bool = False
) -> list[Instance]:
    """Instances of a placement, of a plan's best one, or the user's own as they are.

    ``options`` go before what a plan says; where the user has ``limited`` batches in another way, by rules or budgets,
    a plan's batch limits are left out. Raises ``ConfigError``: an option that is none (``UnknownName``), options beside
    instances that have their own.
    """
    for name in options:
        if name not in InstanceOptions.__annotations__:
            raise UnknownName("keyword of Pipeline or its instances", name, InstanceOptions.__annotations__)
    if isinstance(placement, Plan):
        knobs, named = settings_of(placement), Placement.parse(placement.placement).instances()
        given: dict[str, Any] = {**options}
        return [Instance(roles, name, **_options(knobs, roles, limited) | given) for name, roles in named]
    if isinstance(placement, str):
        placement = Placement.parse(placement)
    if isinstance(placement, Placement):
        return [Instance(roles, name, **options) for name, roles in placement.instances()]
    if not placement:
        raise ConfigError("a pipeline needs at least one instance")
    if options:
        raise ConfigError(f"instances are given as they are: give {', '.join(options)} to each Instance instead")
    return list(placement)


def _options(knobs: Mapping[str, Any], roles: str, limited: bool) -> dict[str, Any]:
    """What a plan has set for an instance of these roles."""
    found = {name: knobs[name] for name in ("reservation", "depth") if name in knobs}
    if not limited:
        tokens = knobs.get("mixed_tokens" if "D" in roles else "tokens", SEARCHED)
        images = knobs.get("images", SEARCHED) if "E" in roles else SEARCHED
        found |= {"token_budget": tokens or None, "image_budget": images or None}
    return found


def rules_and_routing(
    placement: object, rules: BatchRules | None, routing: str | RoutingPolicy | None
) -> tuple[BatchRules, str | RoutingPolicy]:
    """Rules and routing: the user's, else those that a plan's wider search has set, else the defaults."""
    knobs = settings_of(placement) if isinstance(placement, Plan) else {}
    chosen = rules or replace(BatchRules(), **{name: knobs[name] for name in RULES if name in knobs})
    return chosen, str(knobs.get("routing", "round_robin")) if routing is None else routing


def settings_of(plan: Plan) -> dict[str, Any]:
    """Knobs that its wider search has set. Raises ``UnknownName`` for one that this version has not got."""
    for name in plan.best.settings:
        if name not in KNOBS:
            raise UnknownName("setting of a plan", name, KNOBS)
    return dict(plan.best.settings)
