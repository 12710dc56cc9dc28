"""Turns a placement, a plan or a file of hosts, and the user's keywords, into a pipeline's instances and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity.connector import Connector
from trinity.core.scheduler import BatchRules
from trinity.errors import ConfigError, UnknownName
from trinity.instance import Instance, list_instances
from trinity.pipeline.config import PipelineConfig
from trinity.placement import Placement
from trinity.planner import Plan
from trinity.remote.buddy import Buddy
from trinity.remote.channel.tls import join_files
from trinity.remote.hosts.hosts import read_hosts
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.stage_kinds import roles_of

SEARCHED_LIMIT = 0  # a plan's batch limit that Algorithm 1 is to find
PLANNED_DEPTH = 1  # of a plan whose search left the depth alone
SEARCHED_RULES = ("order", "policy")
BATCH_LIMITS = ("tokens", "mixed_tokens", "images")
PLAN_SETTINGS = (*SEARCHED_RULES, *BATCH_LIMITS, "routing", "reservation", "depth", "spread")


def make_instances(
    placement: str | Placement | Plan | Sequence[Instance], options: Mapping[str, Any], *, limited: bool = False
) -> list[Instance]:
    """Make the instances of a placement or of a plan's best one; a list of instances stays as it is.

    ``options`` override a plan's settings. A plan's batch limits are left out if the user has ``limited`` batches by
    rules or budgets. Raises ``ConfigError`` for no instances, and for options beside instances, which have their own.
    """
    if isinstance(placement, Plan):
        knobs, given = read_plan_settings(placement), {**options}
        planned = list_instances(placement.placement)
        return [replace(each, **_plan_options(knobs, each.roles, limited) | given) for each in planned]
    if isinstance(placement, str | Placement):
        return list_instances(placement, **options)
    if not placement:
        raise ConfigError("a pipeline needs at least one instance")
    if options:
        raise ConfigError(
            f"options cannot be given beside a list of instances: give {', '.join(options)} to each Instance instead"
        )
    return list(placement)


def list_plan_options(plan: Plan, roles: str) -> dict[str, Any]:
    """List a plan's settings for an instance of these roles, by keyword of ``Instance``."""
    return _plan_options(read_plan_settings(plan), roles, limited=False)


def _plan_options(knobs: Mapping[str, Any], roles: str, limited: bool) -> dict[str, Any]:
    """Select a plan's settings for an instance of these roles. It is served at the depth that it was simulated at."""
    found = {"depth": PLANNED_DEPTH, **{name: knobs[name] for name in ("reservation", "depth") if name in knobs}}
    if not limited:
        tokens = knobs.get("mixed_tokens" if roles_of(roles).decodes else "tokens", SEARCHED_LIMIT)
        images = knobs.get("images", SEARCHED_LIMIT) if roles_of(roles).encodes else SEARCHED_LIMIT
        found |= {"token_budget": tokens or None, "image_budget": images or None}
    return found


def choose_plan_settings(placement: object, config: PipelineConfig) -> dict[str, Any]:
    """Return the plan's rules, routing and spread, but for those that the user has given."""
    knobs = read_plan_settings(placement) if isinstance(placement, Plan) else {}
    found = {name: knobs[name] for name in ("routing", "spread") if name in knobs and getattr(config, name) is None}
    rules = {name: knobs[name] for name in SEARCHED_RULES if name in knobs}
    return found | ({"rules": replace(BatchRules(), **rules)} if rules and config.rules is None else {})


def read_plan_settings(plan: Plan) -> dict[str, Any]:
    """Read the settings of a plan's wider search. Raises ``UnknownName`` for one that this version does not have."""
    for name in plan.best.settings:
        if name not in PLAN_SETTINGS:
            raise UnknownName("setting of a plan", name, PLAN_SETTINGS)
    return dict(plan.best.settings)


def read_hosted_options(
    file: str | Path,
    tls_files: Sequence[str | None] = (),
    *,
    trusted_network: bool = False,
    attach: bool = False,
    buddy: Buddy | None = None,
) -> dict[str, Any]:
    """Read the keywords of a ``Pipeline`` that serves on the instances of a file of hosts.

    - ``tls_files`` (none): certificate, key and authority for the control channels.
    - ``trusted_network`` (False): say so of the network that control channels and blocks go over.
    - ``attach`` (False), ``buddy`` (None): as ``ProcessConfig`` has them.

    Raises ``ConfigError``, for one of the three files alone, too.
    """
    options = {"trusted_network": True} if trusted_network else {}
    return {
        "placement": read_hosts(file).placement,
        "hosting": "process",
        "processes": ProcessConfig(
            tls=join_files(tls_files), trusted_network=trusted_network, attach=attach, buddy=buddy
        ),
        "connector": Connector("auto", options=options),
    }
