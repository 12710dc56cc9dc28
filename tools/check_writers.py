"""Writers of what an instance's core remembers: at most two modules for each field; ``--list`` prints all.

A write is an assignment to a field or into it (``state.block_table = ...``, ``s.last_heard[peer] = now``, ``+=``,
``del``), or the call of a method that changes it (``.append``, ``.pop``), also by a local name for it. What an object
does to itself in a method of another name is its own affair. Types come from annotations; a write to a field's name on
something whose type they do not tell is an error. What a function does to a container that it is given is not seen.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

MOST = 2  # modules that write a field
FOLDER = Path("src") / "trinity" / "core"
OWNERS = (
    *("State", "RequestState", "MediaSlot", "KvStream", "IncomingTransfer", "Lease"),
    *("SkippedEncode", "FeatureFetch", "PendingMedia"),
)
CHANGING = {
    *("append", "appendleft", "extend", "insert", "pop", "popleft", "popitem", "remove", "discard", "clear"),
    *("add", "update", "setdefault", "difference_update", "intersection_update", "subtract", "sort", "reverse"),
}
HEAP = {"heappush", "heappop", "heapify"}  # change their first argument
SAME = {
    "list",
    "tuple",
    "sorted",
    "reversed",
    "iter",
    "set",
    "copy",
    "next",
    "max",
    "min",
    "values",
    "get",
    "setdefault",
}

Field = tuple[str, str]  # class, name


@dataclass
class Known:
    """Annotations of all modules: fields by class, and what functions and methods return."""

    fields: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    returns: dict[tuple[str, str], str] = field(default_factory=dict)  # by class ("" for none) and name
    aliases: dict[str, str] = field(default_factory=dict)  # names for types

    def read(self, tree: ast.Module) -> None:
        for each in tree.body:
            if isinstance(each, ast.FunctionDef):
                self.returns["", each.name] = _text(each.returns)
            elif isinstance(each, ast.ClassDef):
                self.returns["", each.name] = each.name
                self._class(each)
            elif isinstance(each, ast.Assign) and isinstance(each.value, ast.Subscript):
                self.aliases[ast.unparse(each.targets[0])] = ast.unparse(each.value)

    def _class(self, found: ast.ClassDef) -> None:
        for each in found.body:
            if isinstance(each, ast.AnnAssign):
                self.fields[found.name][ast.unparse(each.target)] = _text(each.annotation)
            elif isinstance(each, ast.FunctionDef):
                self.returns[found.name, each.name] = _text(each.returns)
                if each.name == "__init__":
                    self._init(found.name, each)

    def _init(self, owner: str, init: ast.FunctionDef) -> None:
        for each in ast.walk(init):
            if isinstance(each, ast.AnnAssign):
                self._field(owner, each.target, _text(each.annotation))
            elif isinstance(each, ast.Assign):
                made = ast.unparse(each.value.func) if isinstance(each.value, ast.Call) else ""
                for target in each.targets:
                    for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                        self._field(owner, one, made)

    def _field(self, owner: str, target: ast.expr, kind: str) -> None:
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
            self.fields[owner].setdefault(target.attr, kind)

    def owned(self, name: str) -> bool:
        return any(name in self.fields[owner] for owner in OWNERS)


def _text(annotation: ast.expr | None) -> str:
    """A type's name in plain form: no quotes, no None."""
    text = ast.unparse(annotation).strip("'\"") if annotation is not None else ""
    return text.removesuffix(" | None")


def _inside(kind: str) -> str:
    """The type of what a container holds; a dictionary's values."""
    if "[" not in kind:
        return ""
    head, _, rest = kind.partition("[")
    parts = ast.parse(rest[:-1], mode="eval").body
    each = [ast.unparse(part) for part in parts.elts] if isinstance(parts, ast.Tuple) else [rest[:-1]]
    return each[1] if head in ("dict", "Mapping", "OrderedDict") and len(each) > 1 else each[0]


class Function:
    """One function's names: the type of each, and the field that it stands for."""

    def __init__(self, known: Known, owner: str, found: ast.FunctionDef) -> None:
        self.known, self.found = known, found
        self.types = {each.arg: _text(each.annotation) for each in [*found.args.args, *found.args.kwonlyargs]}
        self.stands: dict[str, Field] = {}
        if owner:
            self.types["self"] = owner
        for _ in range(2):  # names of names
            for each in ast.walk(found):
                self._learn(each)

    def _learn(self, each: ast.AST) -> None:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            self.types[each.target.id] = _text(each.annotation)
        elif isinstance(each, ast.Assign):
            for target in each.targets:
                self._name(target, each.value, inside=False)
        elif isinstance(each, ast.NamedExpr):
            self._name(each.target, each.value, inside=False)
        elif isinstance(each, ast.For | ast.comprehension):
            self._name(each.target, each.iter, inside=True)

    def _name(self, target: ast.expr, value: ast.expr, inside: bool) -> None:
        if isinstance(target, ast.Tuple):
            for one, part in zip(target.elts, self._parts(value, len(target.elts), inside), strict=False):
                self._name(one, part, inside)
        elif isinstance(target, ast.Name):
            kind = self.type(value)
            kind = _inside(kind) if inside else kind
            if kind or target.id not in self.types:
                self.types[target.id] = kind
            stood = self.stands_for(value)
            if stood and kind not in OWNERS:
                self.stands[target.id] = stood

    def _parts(self, value: ast.expr, count: int, inside: bool) -> list[ast.expr]:
        """List what each name of a tuple is given: of ``zip``, ``enumerate``, ``.items()`` or a tuple."""
        nothing = ast.Constant(None)
        if isinstance(value, ast.Tuple) and not inside:
            return value.elts
        if isinstance(value, ast.Call):
            called = ast.unparse(value.func).rpartition(".")[2]
            if called == "zip":
                return list(value.args)
            if called == "enumerate":
                return [nothing, value.args[0]]
            if called == "items" and isinstance(value.func, ast.Attribute):
                return [nothing, value.func.value]
        return [nothing] * count

    def type(self, value: ast.expr) -> str:
        """The annotated type, or nothing."""
        if isinstance(value, ast.Name):
            return self.types.get(value.id, "")
        if isinstance(value, ast.Attribute):
            owner = self.type(value.value)
            kind = self.known.fields[owner].get(value.attr) or self.known.returns.get((owner, value.attr), "")
            return self.known.aliases.get(kind, kind)
        if isinstance(value, ast.Subscript):
            return _inside(self.type(value.value))
        if isinstance(value, ast.Call):
            return self._called(value)
        if isinstance(value, ast.BoolOp):
            return next((kind for each in value.values if (kind := self.type(each))), "")
        if isinstance(value, ast.IfExp):
            return self.type(value.body) or self.type(value.orelse)
        if isinstance(value, ast.GeneratorExp | ast.ListComp):
            inside = self.type(value.elt)
            return inside and f"list[{inside}]"
        return ""

    def _called(self, call: ast.Call) -> str:
        if isinstance(call.func, ast.Name):
            if call.func.id in SAME and call.args:
                inside = _inside(self.type(call.args[0]))
                return inside if call.func.id in ("next", "max", "min") else inside and f"list[{inside}]"
            return self.known.returns.get(("", call.func.id), "")
        if isinstance(call.func, ast.Attribute):
            kind, name = self.type(call.func.value), call.func.attr
            if name == "values":
                return _inside(kind) and f"list[{_inside(kind)}]"
            if name in ("get", "pop", "popleft", "setdefault") and (found := _inside(kind)):
                return found
            return self.known.returns.get((kind, name), "")
        return ""

    def stands_for(self, value: ast.expr) -> Field | None:
        """The field that this is, or is a part of."""
        if isinstance(value, ast.Name):
            return self.stands.get(value.id)
        if isinstance(value, ast.Attribute):
            owner = self.type(value.value)
            return (owner, value.attr) if owner in OWNERS and value.attr in self.known.fields[owner] else None
        if isinstance(value, ast.Subscript):
            return self.stands_for(value.value) if self.type(value) not in OWNERS else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            part = value.func.attr in ("get", "setdefault", "values", "items") and self.type(value) not in OWNERS
            return self.stands_for(value.func.value) if part else None
        return None

    def writes(self) -> Iterator[tuple[int, Field]]:
        """Line and field of every write."""
        for line, value in self._changed():
            stood = self.stands_for(value)
            if stood is not None:
                yield line, stood
            elif isinstance(value, ast.Attribute) and self.known.owned(value.attr) and not self.type(value.value):
                yield line, ("", ast.unparse(value))

    def _changed(self) -> Iterator[tuple[int, ast.expr]]:
        for each in ast.walk(self.found):
            if isinstance(each, ast.Assign | ast.Delete):
                for target in each.targets:
                    yield from ((each.lineno, one) for one in _assigned(target))
            elif isinstance(each, ast.AugAssign | ast.AnnAssign):
                yield from ((each.lineno, one) for one in _assigned(each.target))
            elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
                if each.func.attr in CHANGING:
                    yield each.lineno, each.func.value
                elif each.func.attr in HEAP:
                    yield each.lineno, each.args[0]


def _assigned(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple):
        for each in target.elts:
            yield from _assigned(each)
    elif isinstance(target, ast.Subscript):
        yield target.value
    elif isinstance(target, ast.Attribute):
        yield target


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function with the class that it is a method of, or none."""
    for each in tree.body:
        if isinstance(each, ast.FunctionDef):
            yield "", each
        elif isinstance(each, ast.ClassDef):
            yield from ((each.name, one) for one in each.body if isinstance(one, ast.FunctionDef))


def writers(paths: Iterable[Path]) -> dict[Field, dict[str, list[int]]]:
    """Of each field the modules that write it, with their lines; what has no known type under the class ""."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths)}
    known = Known()
    for tree in trees.values():
        known.read(tree)
    found: dict[Field, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path, tree in trees.items():
        for owner, function in functions(tree):
            for line, written in Function(known, owner, function).writes():
                found[written][path.stem].append(line)
    return found


def check(paths: Iterable[Path]) -> tuple[list[str], list[str]]:
    """A line for each field with the modules that write it, and what is wrong."""
    found = sorted(writers(paths).items())
    lines = [f"{owner}.{name}: {', '.join(at)}" for (owner, name), at in found if owner]
    problems = [
        f"{module}:{line} writes {name}, whose type no annotation tells"
        for (owner, name), at in found
        for module, (line, *_) in at.items()
        if not owner
    ]
    problems += [
        f"{owner}.{name} is written by {len(at)} modules, at most {MOST}: {', '.join(at)}"
        for (owner, name), at in found
        if owner and len(at) > MOST
    ]
    return lines, problems


def main(root: Path, *, listed: bool = False) -> int:
    lines, problems = check((root / FOLDER).rglob("*.py"))
    summary = f"{len(lines)} fields of a core's state, each written by at most {MOST} modules"
    print("\n".join([*(lines if listed else []), *(problems or [summary])]))
    return 1 if problems else 0


if __name__ == "__main__":
    options = sys.argv[1:]
    roots = [each for each in options if each != "--list"]
    sys.exit(main(Path(roots[0] if roots else "."), listed="--list" in options))
