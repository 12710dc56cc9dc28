"""Checks values that users give against the types that constructors and methods declare; numpy's become plain ones.

The declared type is the rule: ``Annotated[int, Meta(ge=1)]`` says the bound as well. A wrong value raises
``ConfigError`` with the name of the argument, what it has to be, and what came.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import msgspec

from trinity.errors import LONGEST_SHOWN, ConfigError, UnknownName
from trinity.errors import show as show

T = TypeVar("T")
Parameters = ParamSpec("Parameters")
Count = Annotated[int, msgspec.Meta(ge=0)]
Whole = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
DeviceName = Annotated[
    str, msgspec.Meta(pattern=r"cpu(:0)?|cuda(:\d{1,4})?", description='give "cpu", "cuda" or "cuda:1"')
]
DtypeName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"auto|(torch\.)?(bfloat16|float(16|32|64))",
        description='give "auto", "bfloat16", "float16" or "float32"',
    ),
]
InstanceName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"[A-Za-z0-9_.-]{0,40}", description="give up to 40 letters, digits, dots, dashes and underscores"
    ),
]
_INT64 = 1 << 63
_BOUNDS: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (
    ("ge", "of at least", operator.ge),
    ("gt", "above", operator.gt),
    ("le", "of at most", operator.le),
    ("lt", "below", operator.lt),
    ("min_length", "of a length of at least", lambda value, least: len(value) >= least),
    ("pattern", "", lambda value, form: re.fullmatch(form, value) is not None),  # said by a description
)


class _Wrong(Exception):
    """The value does not fit its type. Any other exception while it is looked at says the same."""


def check_arguments(kind: type[T]) -> type[T]:
    """Make a class's constructor check each argument against its annotation before anything else (a decorator).

    The constructor raises ``ConfigError``, for names that are unknown or missing as well.
    """
    if issubclass(kind, msgspec.Struct):
        raise TypeError(f"{kind.__name__} is a Struct, whose constructor cannot be wrapped: use check_struct")
    kind.__init__ = _check_call(kind.__init__, kind)  # type: ignore[method-assign]
    return kind


def check_call(function: Callable[Parameters, T]) -> Callable[Parameters, T]:
    """Make a function or method check each argument against its annotation before anything else (a decorator).

    It raises ``ConfigError``, for names that are unknown or missing as well.
    """
    return _check_call(function, function)


def _check_call(function: Callable[Parameters, T], declares: Any) -> Callable[Parameters, T]:
    """Check arguments as ``declares`` annotates them: the function, or a dataclass, whose bases declare fields too."""
    declares = declares if dataclasses.is_dataclass(declares) else function
    signature = inspect.signature(function)
    listed = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    called = function.__qualname__.removesuffix(".__init__")
    rest = next((name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD), "")
    checked = [name for name, each in signature.parameters.items() if each.kind not in listed]
    takes = [name for name in checked if name not in ("self", "cls")]

    @functools.wraps(function)
    def checking(*args: Parameters.args, **kwargs: Parameters.kwargs) -> T:
        hints, known = _hints(declares), takes
        given: Set[str] = set() if rest else kwargs.keys()  # further keywords may be any,
        if rest in hints and get_origin(hints[rest]) is typing.Unpack:  # or are listed by a TypedDict
            known, given = [*takes, *get_args(hints[rest])[0].__annotations__], kwargs.keys()
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(explain_call(called, given, known, error)) from None
        if not given <= set(known):
            raise ConfigError(explain_call(called, given, known, TypeError()))
        for name in checked:
            if name in bound.arguments and name in hints:
                bound.arguments[name] = check_value(name, bound.arguments[name], hints[name])
        return function(*bound.args, **bound.kwargs)

    return checking


def explain_call(called: str, given: Iterable[str], known: Sequence[str], error: TypeError) -> str:
    """Explain a call with an unknown keyword by the nearest known one, or any other wrong call by Python's words."""
    unknown = next((name for name in given if name not in known), None)
    if unknown is None:
        return f"{called}(): {str(error)[:LONGEST_SHOWN]}; it takes {', '.join(known)}"
    return f"{called}() has no keyword {show(unknown)}: {suggest_name(unknown, known)}it takes {', '.join(known)}"


def suggest_name(wrong: str, known: Iterable[str]) -> str:
    """Suggest the known name that is nearest to a wrong one, as "did you mean 'x'? "; "" where none is near."""
    near = difflib.get_close_matches(wrong[:LONGEST_SHOWN], list(known), 1)
    return f"did you mean {near[0]!r}? " if near else ""


class KeywordsByName(msgspec.StructMeta):
    """Makes a struct's constructor name an unknown or missing keyword (a metaclass, for structs that users make).

    It raises the class's ``misuse``, ``ConfigError`` where it has none. Costs some microseconds a call, which
    what msgspec decodes or copies does not pay.
    """

    if not typing.TYPE_CHECKING:  # checkers know the fields

        def __call__(cls, *args: Any, **keywords: Any) -> Any:
            try:
                return msgspec.StructMeta.__call__(cls, *args, **keywords)
            except TypeError as error:
                text = explain_call(cls.__name__, keywords, cls.__struct_fields__, error)
                raise getattr(cls, "misuse", ConfigError)(text) from None


def check_struct(struct: msgspec.Struct) -> None:
    """Check the fields of a new ``msgspec.Struct``, which converts none itself. Raises ``ConfigError``."""
    for name, hint in _hints(type(struct)).items():
        if name in struct.__struct_fields__:
            given = getattr(struct, name)
            value = check_value(name, given, hint)
            if value is not given:
                msgspec.structs.force_setattr(struct, name, value)


def check_keywords(kind: type, given: Mapping[str, object]) -> dict[str, Any]:
    """Return arguments that a constructor is to get later as its annotations have them; one without passes as it is.

    Raises ``ConfigError``.
    """
    hints = _hints(kind if dataclasses.is_dataclass(kind) else vars(kind)["__init__"])
    return {name: check_value(name, value, hints.get(name, Any)) for name, value in given.items()}


def check_value(name: str, value: object, hint: Any) -> Any:
    """Return ``value`` as ``hint`` has it. Raises ``ConfigError`` if it is of another type or out of bounds."""
    try:
        return _plain(value, hint)
    except Exception:  # _Wrong, or a foreign object that fails when it is asked what it is
        pass
    known = _names_in(hint)
    if known and isinstance(value, str):
        raise UnknownName(name, value, known)
    advice = _advice(value, hint)
    raise ConfigError(f"{name} is {_words(hint)}, got {show(value)}{advice and f': {advice}'}")


def _advice(value: object, hint: Any) -> str:
    """Say what to give: as the annotation describes it, an object of a class that came itself, or one that is made."""
    if issubclass(type(value), type):  # not isinstance, which asks a foreign object
        return f"give an object of the class, {value.__name__}(...)"  # type: ignore[attr-defined]
    said = list(_descriptions(hint))
    if said:
        return said[0]
    within = issubclass(type(value), list | tuple | set | frozenset)
    makes = list(_classes_in(hint, within)) or list(_classes_in(hint, False))
    return f"make one with {' or '.join(dict.fromkeys(makes))}" if makes else ""


def _descriptions(hint: Any) -> Iterator[str]:
    parts = get_args(hint)
    if get_origin(hint) is Annotated:
        yield from (text for note in parts[1:] if (text := getattr(note, "description", None)))
    elif get_origin(hint) in (Union, types.UnionType):
        for part in parts:
            yield from _descriptions(part)


def _classes_in(hint: Any, within: bool) -> Iterator[str]:
    """Yield how the classes of trinity are made that a hint names, itself or as what it is a collection of."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType, Annotated):
        for part in get_args(hint):
            yield from _classes_in(part, within)
    elif within and isinstance(origin, type) and issubclass(origin, Sequence):
        yield from _classes_in(get_args(hint)[0], False)
    elif not within and isinstance(hint, type) and hint.__module__.startswith("trinity.") and not _is_protocol(hint):
        found = inspect.signature(hint).parameters.values()
        needed = [each for each in found if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
        yield f"{hint.__name__}({', '.join(f'{each.name}=...' for each in needed)})"


def _is_protocol(kind: type) -> bool:
    return bool(getattr(kind, "_is_protocol", False))


def _names_in(hint: Any) -> tuple[str, ...]:
    """Names that a ``Literal`` (or None) lists; none where any other text would do."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    listed = [each for each in get_args(hint) if each is not type(None)]
    return get_args(listed[0]) if len(listed) == 1 and get_origin(listed[0]) is Literal else ()


@functools.cache
def _hints(of: Any) -> dict[str, Any]:
    return typing.get_type_hints(of, include_extras=True)


def _plain(value: Any, hint: Any) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _within(_plain(value, parts[0]), parts[1:])
    if origin in (Union, types.UnionType):
        return _any_of(value, parts)
    if origin is Literal:
        return _choice(value, parts)
    check = _SCALARS.get(hint)
    if check is not None:
        return check(value)
    if isinstance(hint, TypeVar) or hint in (Any, object):
        return value
    return _collection(value, origin, parts) if origin is not None else _instance(value, hint)


def _within(value: Any, notes: Iterable[Any]) -> Any:
    for note in notes:
        for name, _, holds in _BOUNDS:
            bound = getattr(note, name, None)
            if bound is not None and not holds(value, bound):
                raise _Wrong
    return value


def _any_of(value: Any, hints: Iterable[Any]) -> Any:
    for hint in hints:
        with contextlib.suppress(Exception):
            return _plain(value, hint)
    raise _Wrong


def _choice(value: Any, known: Iterable[Any]) -> Any:
    for each in known:
        if isinstance(value, type(each)) and value == each:
            return each
    raise _Wrong


def _nothing(value: Any) -> None:
    if value is not None:
        raise _Wrong


def plain_bool(value: object) -> bool:
    """Return True or False, numpy's too, as Python's own. Raises ``TypeError`` for anything else."""
    if type(value).__name__ not in ("bool", "bool_"):  # numpy's is no subclass
        raise TypeError
    return bool(value)


def plain_int(value: Any) -> int:
    """Return a whole number of any size and type as Python's own. Raises ``TypeError``, for True and False as well."""
    if isinstance(value, bool):
        raise TypeError
    return int(operator.index(value))


def plain_real(value: Any) -> float:
    """Return a number of any type, a whole one as int. Raises ``TypeError``, and where it is beyond any float."""
    if isinstance(value, str | bytes | bool) or not hasattr(value, "__float__"):
        raise TypeError
    number = float(value)  # raises where it is too large, or an array of several
    return int(value) if isinstance(value, int) else number


def plain_str(value: object) -> str:
    """Return a text as Python's own. Raises ``TypeError``, and ``UnicodeEncodeError`` for half a character."""
    if not isinstance(value, str):
        raise TypeError
    if type(value) is not str:
        return str.encode(value, "utf-8").decode()  # not the methods of a subclass
    if not value.isascii():  # most megabytes are: no copy of a picture's is made to look at it
        for start in range(0, len(value), _PIECE):  # a call for all of it would stop all threads for long
            try:
                value[start : start + _PIECE].encode()
            except UnicodeEncodeError as error:
                place = start + error.start, start + error.end
                raise UnicodeEncodeError(error.encoding, value, *place, error.reason) from None
    return value


def _path(value: Any) -> Path:
    """Read a path of any class, or a text that only a path can be: with bytes that are no UTF-8 (PEP 383)."""
    if isinstance(value, str):
        plain = str.encode(value, "utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
        if not any("\udc80" <= each <= "\udcff" for each in plain):
            raise _Wrong
        return Path(plain)
    if not isinstance(value, os.PathLike):
        raise _Wrong
    return Path(os.fsdecode(os.fspath(value)))


def _int(value: Any) -> int:
    number = plain_int(value)
    if not -_INT64 <= number < _INT64:
        raise _Wrong
    return number


def _float(value: Any) -> float:
    number = plain_real(value)
    if not math.isfinite(number):
        raise _Wrong
    return number


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    type(None): _nothing,
    None: _nothing,
    bool: plain_bool,
    int: _int,
    float: _float,
    str: plain_str,
    Path: _path,
}


def _collection(value: Any, origin: Any, parts: tuple[Any, ...]) -> Any:
    if origin is type:
        return _of(value, type)
    if origin is Callable:
        if not callable(value):
            raise _Wrong
        return value
    if issubclass(origin, Mapping):
        given = _of(value, Mapping)
        return {_plain(key, parts[0]): _plain(each, parts[1]) for key, each in given.items()}
    if origin is tuple:
        return _tuple(value, parts)
    if isinstance(value, str | bytes) or not isinstance(value, origin):
        raise _Wrong
    if issubclass(origin, Sequence):
        return type(value)(_plain(each, parts[0]) for each in value) if type(value) in (list, tuple) else value
    return value  # an iterator is not run through


def _tuple(value: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, tuple | list):
        raise _Wrong
    hints = [parts[0]] * len(value) if len(parts) == 2 and parts[1] is ... else list(parts)
    if len(hints) != len(value):
        raise _Wrong
    return tuple(map(_plain, value, hints))


def _instance(value: Any, hint: Any) -> Any:
    if isinstance(hint, type) and _is_protocol(hint):
        return _speaks(value, hint)
    return _of(value, hint) if isinstance(hint, type) else value


def _of(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _Wrong
    return value


def _speaks(value: Any, protocol: type) -> Any:
    """Test for a protocol's members by name: protocols here are for users, and not all of them runtime-checkable."""
    if isinstance(value, type) or not all(hasattr(value, each) for each in vars(protocol) if not each.startswith("_")):
        raise _Wrong
    return value


VOWELS = (*"AEIOU", "SLO")
_PIECE = 1 << 20  # characters that are encoded at a time
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "True or False", type(None): "None"}


def _words(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join(filter(None, [_words(parts[0]), *_bound_words(parts[1:])]))
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, parts)))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, parts))
    if hint in _NAMES:
        return _NAMES[hint]
    if origin is not None:
        return _collection_words(origin, parts)
    named = str(getattr(hint, "__name__", hint))
    return f"{'an' if named.startswith(VOWELS) else 'a'} {named}"


def _bound_words(notes: Iterable[Any]) -> list[str]:
    said = [(words, getattr(note, name, None)) for note in notes for name, words, _ in _BOUNDS if words]
    return [" and ".join(f"{words} {bound}" for words, bound in said if bound is not None)]


def _collection_words(origin: Any, parts: tuple[Any, ...]) -> str:
    if origin is Callable:
        return "a function"
    if issubclass(origin, Mapping):
        return f"a mapping of {_words(parts[0])} to {_words(parts[1])}"
    each = [_words(part) for part in parts if part is not ...]
    return f"a {origin.__name__.lower()} of {', '.join(dict.fromkeys(each))}"
