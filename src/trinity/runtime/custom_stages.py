"""Stages of a user's own: what the factories of an instance make, and whether that can serve its roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity.errors import ConfigError, TrinityError
from trinity.plugins import load_plugin
from trinity.stages.base import GrowableStage, Stage

if TYPE_CHECKING:
    from trinity.instance import Instance
    from trinity.stages.base import StageFactory, StageSetup


def own_stages(spec: Instance, setup: StageSetup) -> list[Stage]:
    """What the instance's factories make. Raises ``ConfigError`` where that cannot serve its roles."""
    made = [_made(stage_factory(each), setup) for each in spec.stages]
    letters = "".join(stage.letters for stage in made)
    if len(set(letters)) != len(letters) or set(letters) - set(spec.roles):
        raise ConfigError(f"own stages with letters {letters!r} do not fit the roles {spec.roles} of {spec.name}")
    if {"P", "D"} <= set(spec.roles) and any(len({"P", "D"} & set(stage.letters)) == 1 for stage in made):
        raise ConfigError(f"{spec.name} ({spec.roles}) prefills and decodes: one stage with letters 'PD' does both")
    if spec.reservation == "optimistic" and any(
        "D" in each.letters and not isinstance(each, GrowableStage) for each in made
    ):
        raise ConfigError(
            f'{spec.name} has a stage without grow(): give it one (trinity.stages.GrowableStage), or reserve "full"'
        )
    return made


def _made(factory: StageFactory, setup: StageSetup) -> Stage:
    try:
        stage = factory(setup)
    except TrinityError:
        raise
    except Exception as error:  # other people's code
        raise ConfigError(f"the stage factory {factory!r} failed: {error!r}") from error
    if not isinstance(stage, Stage):
        raise ConfigError(f"{stage!r:.200} is no Stage: it needs letters, open, close and forward")
    return stage


def stage_factory(stage: StageFactory | str) -> StageFactory:
    if not isinstance(stage, str):
        return stage
    found: StageFactory = load_plugin("trinity.stages", "stage", stage)
    return found
