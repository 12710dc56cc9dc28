"""Stand-in for hypothesis where it is not installed, as on a foreign machine with a GPU: its tests are skipped."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

REASON = "hypothesis is not installed: this test draws its examples with it"


class Nothing:
    """Any strategy, profile or health check: it can be called, and has every attribute."""

    def __call__(self, *_: object, **__: object) -> Nothing:
        return self

    def __getattr__(self, name: str) -> Nothing:
        if name.startswith("__"):  # who copies or inspects it is not to be fooled
            raise AttributeError(name)
        return self

    def __or__(self, _: object) -> Nothing:
        return self


def skip_test(*drawn: object, **named: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Take the arguments of ``given``; what it decorates is skipped, and still asks for what is not drawn."""

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        def skipped(**_: object) -> None:
            raise AssertionError("never called")

        asked = list(inspect.signature(test).parameters.values())  # those by position are drawn from the right
        asked = [each for each in asked[: len(asked) - len(drawn)] if each.name not in named]
        skipped.__name__, skipped.__doc__, skipped.__module__ = test.__name__, test.__doc__, test.__module__
        vars(skipped)["__signature__"] = inspect.Signature(asked)
        return pytest.mark.skip(reason=REASON)(skipped)

    return decorate


class PassThrough(Nothing):
    """``settings`` and ``example``: as decorators they leave a test as it is."""

    def __call__(self, *_: object, **__: object) -> Any:
        return lambda test: test


def install() -> None:
    """Have ``import hypothesis`` find modules in which nothing can be drawn."""
    module, strategies = ModuleType("hypothesis"), ModuleType("hypothesis.strategies")
    for each in (module, strategies):
        each.__spec__ = ModuleSpec(each.__name__, None)  # torch asks for it
        vars(each)["__getattr__"] = lambda name: Nothing().__getattr__(name)
    vars(module).update(given=skip_test, example=PassThrough(), settings=PassThrough(), strategies=strategies)
    vars(module)["__path__"] = []
    sys.modules["hypothesis"], sys.modules["hypothesis.strategies"] = module, strategies
