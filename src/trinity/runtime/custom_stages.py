"""Builds user-supplied stages and checks that they fit the instance's roles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity.errors import ConfigError, TrinityError, describe_error
from trinity.errors.arguments import show
from trinity.plugins import load_plugin
from trinity.stage_kinds import roles_of
from trinity.stages.base import GrowableStage, Stage

if TYPE_CHECKING:
    from trinity.instance import Instance
    from trinity.stages.base import StageFactory, StageSetup


def make_custom_stages(spec: Instance, setup: StageSetup) -> list[Stage]:
    """Make the stages of the instance's own factories. Raises ``ConfigError`` if they cannot serve its roles."""
    made = [_make_stage(find_stage_factory(each), setup) for each in spec.stages]
    letters = "".join(stage.letters for stage in made)
    if len(set(letters)) != len(letters) or set(letters) - set(spec.roles):
        raise ConfigError(
            f"stages= of {spec.name} have the letters {letters!r}, which do not fit its roles {spec.roles}: "
            "give at most one stage for each role"
        )
    does, done = roles_of(spec.roles), [roles_of(stage.letters) for stage in made]
    if does.prefills and does.decodes and any(each.prefills != each.decodes for each in done):
        raise ConfigError(
            f"{spec.name} ({spec.roles}) prefills and decodes: give one stage with letters 'PD' that does both"
        )
    if spec.reservation == "optimistic" and any(
        roles_of(each.letters).decodes and not isinstance(each, GrowableStage) for each in made
    ):
        raise ConfigError(
            f'{spec.name} has a stage without grow(): give it one (trinity.stages.GrowableStage), or reserve "full"'
        )
    return made


def _make_stage(factory: StageFactory, setup: StageSetup) -> Stage:
    try:
        stage = factory(setup)
    except (TrinityError, KeyboardInterrupt):
        raise
    except BaseException as error:  # user code raises anything, and sys.exit() must not end a server
        raise ConfigError(f"the stage factory {show(factory)} failed: {describe_error(error)}") from error
    if not isinstance(stage, Stage) or not isinstance(stage.letters, str):
        raise ConfigError(f"{show(stage)} is not a Stage: it needs letters (a text), open, close and forward")
    return stage


def find_stage_factory(stage: StageFactory | str) -> StageFactory:
    """Find a factory by its entry point's name; a factory itself is returned as it is. Raises ``UnknownName``."""
    if not isinstance(stage, str):
        return stage
    found: StageFactory = load_plugin("trinity.stages", "stage", stage)
    return found
