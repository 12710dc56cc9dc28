"""Configuration classes: frozen dataclasses that declare settings once, for all that takes or documents them.

A setting's name, type, bounds, default and help text are in one class. Classes of the same settings inherit that one,
and a constructor that takes them is made of it: ``@takes(PipelineConfig)``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping, Set
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from trinity.errors import ConfigError
from trinity.errors.arguments import explain_call

P = ParamSpec("P")
Config = TypeVar("Config")
Made = TypeVar("Made")
_BULLET = re.compile(r"- ``(\w+)``")


def takes(
    config: Callable[P, Config],
) -> Callable[[Callable[[Made, Config, Set[str]], None]], Callable[Concatenate[Made, P], None]]:
    """Give a constructor the arguments of a configuration class (a decorator).

    The constructor itself is called with the configuration and the names of the arguments that were given. None stands
    for a default that is a configuration itself. Raises ``ConfigError`` in the constructor's own name.
    """
    signature = inspect.signature(config)
    parameters, names = signature.parameters, list(signature.parameters)

    def adopt(constructor: Callable[[Made, Config, Set[str]], None]) -> Callable[Concatenate[Made, P], None]:
        called = constructor.__qualname__.removesuffix(".__init__")

        @functools.wraps(constructor)
        def init(self: Made, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise ConfigError(explain_call(called, kwargs, names, error)) from None
            meant = {name: each for name, each in given.items() if not _is_left_out(each, parameters[name].default)}
            constructor(self, typing.cast(Any, config)(**meant), meant.keys())

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        whole = [own, *parameters.values()]
        init.__signature__ = signature.replace(parameters=whole, return_annotation=None)  # type: ignore[attr-defined]
        adopted: Callable[Concatenate[Made, P], None] = typing.cast(Any, init)
        return adopted

    return adopt


def _is_left_out(value: object, default: object) -> bool:
    return value is None and (dataclasses.is_dataclass(default) or isinstance(default, msgspec.Struct))


def documented_by(*configs: type) -> Callable[[type[Made]], type[Made]]:
    """Put the help texts of configuration classes where a class's docstring has ``{settings}`` (a decorator)."""

    def fill(kind: type[Made]) -> type[Made]:
        texts = [text for each in configs for text in help_texts(each).values()]
        kind.__doc__ = (kind.__doc__ or "").replace("{settings}", "\n    ".join(texts))
        return kind

    return fill


def help_texts(config: type) -> dict[str, str]:
    """Return the help text of each setting, a bullet of the docstring of the class that declares it; its own first."""
    texts: dict[str, str] = {}
    for kind in config.__mro__:
        if "__dataclass_fields__" not in vars(kind):
            continue
        for bullet in re.findall(r"^- ``\w+``.*(?:\n  .*)*", inspect.cleandoc(kind.__doc__ or ""), re.MULTILINE):
            name = _BULLET.match(bullet)
            if name is not None and name[1] in vars(kind)["__annotations__"]:
                texts.setdefault(name[1], bullet.replace("\n", "\n    "))
    own = vars(config)["__annotations__"]
    ordered = sorted(dataclasses.fields(config), key=lambda each: each.name not in own)
    return {each.name: texts[each.name] for each in ordered if each.name in texts}


def set_fields(record: object, **values: Any) -> None:
    """Set fields of a frozen dataclass that its own ``__post_init__`` completes."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def pick_fields(kind: type, source: object) -> dict[str, Any]:
    """Return what ``source`` has of a configuration class's fields, by name."""
    return {each.name: getattr(source, each.name) for each in dataclasses.fields(kind)}


def pack_config(source: object, kind: type | None = None) -> dict[str, Any]:
    """Return the fields of a configuration that are not at their defaults, for the wire or a file.

    ``kind`` (its own class): whose fields; a class that it inherits.
    """
    named = [(each.name, getattr(source, each.name), each.default) for each in dataclasses.fields(kind or type(source))]
    return {name: value for name, value, default in named if value != default}


def unpack_config(kind: type[Made], values: Mapping[str, Any]) -> Made:
    """Make a configuration of what ``pack_config`` gave, decoded. Raises ``ConfigError``."""
    hints, names = typing.get_type_hints(kind, include_extras=True), [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if not values.keys() <= set(names):
        raise ConfigError(explain_call(kind.__name__, values, names, TypeError()))
    return kind(**{name: _read_as(name, value, hints.get(name, Any)) for name, value in values.items()})


def _read_as(name: str, value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from error
    except TypeError:  # the field may hold an object of this process as well, which nobody sends
        return value
