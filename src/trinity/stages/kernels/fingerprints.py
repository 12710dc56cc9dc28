"""Fingerprints of what a class or function of transformers computes, from its source and from all that it calls.

Kernels may stand in for code that somebody has read; a fingerprint tells whether the code at hand is that code. It
covers the syntax tree of a method, of the functions that it finds among its globals, of the methods of its class that
it names, and of what decorators close over; what plain containers and partials among these hold, and the ``__call__``
of other objects. Comments, docstrings, annotations and the layout do not count. What has no
source, or is no plain function, has no fingerprint.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from functools import lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

_CALLS = ("__call__", "__getattr__", "__getattribute__")  # what else runs when a module is called
_EVERYBODYS = {nn.Module, object}
_PLUMBING = "transformers.modeling_layers"  # gradient checkpointing around a layer's own forward
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (tuple, list, dict, set, frozenset)
_IGNORED_FIELDS = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "simple"}
_OUTSIDE = ("torch", "builtins", "typing", "collections", "functools", "math", "contextlib")


def fingerprint_class(kind: type[Any]) -> str | None:
    """Fingerprint ``forward`` of ``kind``, with all that runs when an instance is called; None if it has none.

    The class's name does not count: two classes of equal source have equal fingerprints.
    """
    reading = _Reading(kind)
    for name in ("forward", *_CALLS):
        reading.read_member(name)
    return reading.digest()


def fingerprint_text(function: Any) -> str | None:
    """Fingerprint the text of ``function`` alone, within transformers' decorators, without what it calls."""
    while hasattr(function, "__wrapped__"):
        if not _module_of(function).startswith("transformers."):
            return None
        function = function.__wrapped__
    source = _read_source(function.__code__) if type(function) is FunctionType else None
    return None if source is None else _digest(source)


def fingerprint_function(function: Any) -> str | None:
    """Fingerprint ``function`` and what it calls; None if it has none."""
    reading = _Reading(None)
    reading.read(function)
    return reading.digest()


class _Reading:
    """Sources read so far, in the order in which they were found."""

    def __init__(self, kind: type[Any] | None) -> None:
        self._kind, self._seen, self._lines, self._whole = kind, set[int](), list[str](), True

    def digest(self) -> str | None:
        return _digest("\n".join(self._lines)) if self._whole and self._lines else None

    def read_member(self, name: str) -> None:
        """Read the class's own code ``name``; what it has of ``nn.Module`` is everybody's."""
        found = _find_member(self._kind, name)
        if isinstance(found, property):
            self._read_value(name, found.fget)
        elif isinstance(found, staticmethod | classmethod) or (callable(found) and not isinstance(found, type)):
            self._read_value(name, getattr(found, "__func__", found))

    def read(self, function: Any) -> None:
        if id(function) in self._seen:
            return
        self._seen.add(id(function))
        if _module_of(function) == _PLUMBING and hasattr(function, "__wrapped__"):
            self.read(function.__wrapped__)
            return
        source = _read_source(function.__code__) if type(function) is FunctionType else None
        if source is None:
            self._whole = False
            return
        self._lines += [source, *map(_describe, function.__defaults__ or ())]
        for value in function.__defaults__ or ():
            self._read_contents("", value)
        for name, value in sorted((function.__kwdefaults__ or {}).items()):
            self._read_value(name, value)
        for name in _names_of(function.__code__):
            if name in function.__globals__:
                self._read_value(name, function.__globals__[name])
            self.read_member(name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._read_value(name, cell.cell_contents)

    def _read_value(self, name: str, value: Any) -> None:
        self._lines.append(f"{name}: {_describe(value)}")
        if isinstance(value, FunctionType) and not _is_outside(value):
            self.read(value)
        self._read_contents(name, value)

    def _read_contents(self, name: str, value: Any) -> None:
        """Read what ``value`` holds, if it is a plain container or a partial, or the code that runs if it is called."""
        if id(value) in self._seen:
            return
        if isinstance(value, BuiltinFunctionType):
            self._lines.append(f"{value.__module__}.{value.__qualname__}")
        elif type(value) in _CONTAINERS or isinstance(value, partial):
            self._read_each(name, value, _list_contents(value))
        elif type(call := _find_member(type(value), "__call__")) is FunctionType and _is_somebodys(value, call):
            self._read_each(name, value, sorted(getattr(value, "__dict__", {}).items()))
            self.read(call)

    def _read_each(self, name: str, holder: Any, held: list[tuple[str, Any]]) -> None:
        self._seen.add(id(holder))
        for key, each in held:
            self._read_value(f"{name}[{key}]", each)


def _is_somebodys(value: Any, call: FunctionType) -> bool:
    """Tell if ``value`` is an object whose class has a ``__call__`` of its own: no class and no module of torch."""
    return not isinstance(value, type | nn.Module) and not _is_outside(call)


def _list_contents(value: Any) -> list[tuple[str, Any]]:
    """List what a container or a partial holds, sets in an order that is the same in each process."""
    if isinstance(value, partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if isinstance(value, dict):
        return [(_describe(key), each) for key, each in value.items()]
    held = sorted(value, key=_describe) if isinstance(value, set | frozenset) else value
    return [(str(index), each) for index, each in enumerate(held)]


def _find_member(kind: type[Any] | None, name: str) -> Any:
    for base in kind.__mro__ if kind is not None else ():
        if name in vars(base):
            return None if base in _EVERYBODYS or base.__module__ == _PLUMBING else vars(base)[name]
    return None


def _is_outside(function: FunctionType) -> bool:
    return _module_of(function).split(".")[0] in _OUTSIDE


def _module_of(function: Any) -> str:
    """Name the module whose code ``function`` is: a wrapper bears the name of what it wraps."""
    return str(getattr(function, "__globals__", {}).get("__name__"))


def _describe(value: Any) -> str:
    """Say what ``value`` is, equally in each process and release: a constant by value, all else by name or type."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}" if _is_outside(value) else "read below"
    named = value if isinstance(value, type) else type(value)
    return f"{'' if named is value else 'a '}{named.__name__}"


def _names_of(code: CodeType) -> list[str]:
    """List the names that ``code`` and the functions within it look up, sorted: their order is the compiler's."""
    nested = [_names_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return sorted({*code.co_names, *(name for names in nested for name in names)})


@lru_cache(maxsize=4096)
def _read_source(code: CodeType) -> str | None:
    try:
        text = inspect.getsource(code)
        return _flatten(ast.parse(f"if True:\n{text}" if text[0].isspace() else text).body)
    except (OSError, TypeError, SyntaxError, IndexError):
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _flatten(node: Any) -> str:
    """Write a syntax tree as text that is the same in each release of Python."""
    if isinstance(node, list):
        return f"[{','.join(_flatten(each) for each in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        node = ast.Assign(targets=[node.target], value=node.value)
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _IGNORED_FIELDS}
    if isinstance(node, ast.FunctionDef):
        fields["body"] = _without_docstring(node.body)
    kept = (f"{name}={_flatten(value)}" for name, value in sorted(fields.items()) if value not in (None, []))
    return f"{type(node).__name__}({','.join(kept)})"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    return body[1:] if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else body
