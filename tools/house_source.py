"""Source of a package as syntax trees: sizes, imports, layers, names, bases, settings and private names.

Nothing is imported: the files are read. A package's modules see each other by absolute or relative imports, at any
depth of the code. An import under ``if TYPE_CHECKING`` is an edge too, since a reader follows it; those of an
``__init__.py`` are not: they tell an editor what the package's lazy door gives out, and an import through such a door
is an edge to the module that defines the name.
"""

from __future__ import annotations

import ast
import math
import re
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

Edge = tuple[str, str]
DOCUMENTED_NAME = re.compile(r"^\.\. auto\w+:: ([\w.]+)", re.MULTILINE)
PUBLIC_IN_PYTHON = {  # documented, in spite of its name: by Python, and by IPython for notebooks
    *("_replace", "_asdict", "_fields", "_make", "_exit", "_getframe", "_current_frames"),
    "_repr_html_",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """One file of a package; ``name`` is dotted, and that of an ``__init__.py`` is its folder's."""

    name: str
    path: Path
    tree: ast.Module
    lines: int

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


Modules = dict[str, Module]


def read_package(source: Path, package: str) -> Modules:
    """Read the modules of a dotted ``package`` below ``source``, without the tests that some packages carry inside."""
    found = {}
    for path in sorted(source.joinpath(*package.split(".")).rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        if "tests" not in parts[:-1]:
            text = path.read_text(encoding="utf-8")
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path, ast.parse(text), len(text.splitlines()))
    return found


def part_of(name: str, modules: Modules, package: str) -> str:
    """Return what holds module ``name`` directly below ``package``: a folder, as "core/", or a file, as "errors.py"."""
    inner = name.removeprefix(package).lstrip(".").split(".")
    if inner == [""]:
        return "__init__.py"
    first = f"{package}.{inner[0]}"
    return f"{inner[0]}/" if len(inner) > 1 or (first in modules and modules[first].is_package) else f"{inner[0]}.py"


def root_of(modules: Modules) -> str:
    """Return the name of the whole package, which may lack an ``__init__.py``."""
    first, last = (name.split(".") for name in (min(modules), max(modules)))
    return ".".join(one for one, other in zip(first, last, strict=False) if one == other)


def root_files(modules: Modules) -> list[str]:
    root = root_of(modules)
    return sorted({found for name in modules if not (found := part_of(name, modules, root)).endswith("/")})


def folders(modules: Modules) -> list[Path]:
    """Folders that hold modules: the package's own and those below it."""
    return sorted({module.path.parent for module in modules.values()})


def statements(tree: ast.AST, *, type_only: bool = True) -> Iterator[ast.stmt]:
    """Every statement at any depth; ``type_only`` includes those under ``if TYPE_CHECKING``, which never run."""
    for field in ("body", "handlers", "cases", "orelse", "finalbody"):
        for child in getattr(tree, field, ()):
            if isinstance(child, ast.stmt):
                yield child
            skipped = not type_only and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from statements(ast.Module(child.orelse, []) if skipped else child, type_only=type_only)


def functions(modules: Modules) -> Iterator[tuple[Module, Function]]:
    """Every function with its module, methods and nested ones too."""
    for module in modules.values():
        for statement in statements(module.tree):
            if isinstance(statement, Function):
                yield module, statement


def function_lengths(modules: Modules) -> list[int]:
    """Lines from ``def`` to the end of each function, shortest first."""
    return sorted((node.end_lineno or node.lineno) - node.lineno + 1 for _, node in functions(modules))


def spread(lengths: list[int]) -> tuple[float, int, int]:
    """Median, 95th percentile and maximum of sorted ``lengths``; zeros where there are none."""
    if not lengths:
        return 0, 0, 0
    return statistics.median(lengths), lengths[math.ceil(0.95 * len(lengths)) - 1], lengths[-1]


def longer_than(limit: int, lengths: Iterable[int]) -> int:
    return sum(length > limit for length in lengths)


def imported_names(module: Module, *, type_only: bool) -> Iterator[str]:
    """Absolute dotted name of everything that a module imports; ``from a import b`` gives ``a.b``."""
    for statement in statements(module.tree, type_only=type_only):
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield from (f"{_absolute(statement, module)}.{alias.name}" for alias in statement.names)


def _absolute(node: ast.ImportFrom, module: Module) -> str:
    """Package that a ``from`` names, with its leading dots resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - module.is_package
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def nearest_module(name: str, modules: Modules) -> str | None:
    """Module that defines the imported ``name``: itself, else the longest prefix that is a module."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def import_edges(modules: Modules, *, type_only: bool) -> set[Edge]:
    """Collect the distinct pairs (importing module, imported module)."""
    doors = {name: _door(module) for name, module in modules.items() if module.is_package}
    return {
        (name, target)
        for name, module in modules.items()
        for imported in imported_names(module, type_only=type_only and not module.is_package)
        if (target := _defining(imported, modules, doors)) and target != name
    }


def _door(module: Module) -> dict[str, str]:
    """Names that a package's ``__init__.py`` gives out without loading them, with the full name of each."""
    every = set(imported_names(module, type_only=True)) - set(imported_names(module, type_only=False))
    return {name.rpartition(".")[2]: name for name in every}


def _defining(imported: str, modules: Modules, doors: Mapping[str, Mapping[str, str]]) -> str | None:
    """Find the module that defines an imported name, behind any lazy door that it is imported through."""
    module = nearest_module(imported, modules)
    behind = doors.get(module or "", {}).get(imported.removeprefix(f"{module}."))
    return _defining(behind, modules, doors) if behind and behind != imported else module


def crossing(edges: Iterable[Edge], modules: Modules, package: str) -> set[Edge]:
    """Those ``edges`` between modules of ``package`` that join two of its parts."""
    return {
        (start, end)
        for start, end in edges
        if f"{start}.".startswith(f"{package}.") and f"{end}.".startswith(f"{package}.")
        if part_of(start, modules, package) != part_of(end, modules, package)
    }


def part_edges(edges: Iterable[Edge], modules: Modules, package: str) -> set[Edge]:
    """Collect the distinct pairs of parts of ``package``, folders and files, that ``edges`` between modules join."""
    return {
        (part_of(start, modules, package), part_of(end, modules, package))
        for start, end in crossing(edges, modules, package)
    }


def _reachable(edges: Iterable[Edge]) -> dict[str, set[str]]:
    """For each node all nodes that a path of edges leads to."""
    ends: dict[str, set[str]] = {}
    for start, end in edges:
        ends.setdefault(start, set()).add(end)
        ends.setdefault(end, set())
    return {node: _walk(ends, node) for node in ends}


def _walk(ends: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        fresh = ends[pending.pop()] - seen
        seen |= fresh
        pending += fresh
    return seen


def in_cycles(edges: Iterable[Edge]) -> list[str]:
    """Nodes that a path of edges leads back to."""
    return sorted(node for node, reached in _reachable(edges).items() if node in reached)


def layers(edges: Iterable[Edge]) -> list[list[str]]:
    """Sort nodes by layer, the lowest first: each is above all that it reaches; a cycle shares one layer."""
    reached = _reachable(edges)

    @cache
    def layer(node: str) -> int:
        below = [layer(other) for other in reached[node] if node not in reached[other]]
        return 1 + max(below, default=-1)

    found: dict[int, list[str]] = {}
    for node in sorted(reached):
        found.setdefault(layer(node), []).append(node)
    return [found[number] for number in sorted(found)]


def contract_layers(pyproject: Path) -> int:
    """Layers that import-linter holds, 0 where a project has no such contract."""
    if not pyproject.exists():
        return 0
    tool = tomllib.loads(pyproject.read_text(encoding="utf-8")).get("tool", {})
    contracts = tool.get("importlinter", {}).get("contracts", [])
    return max((len(each["layers"]) for each in contracts if each.get("type") == "layers"), default=0)


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
QUESTION = re.compile(r"\W*(what|whether|how|who|whom|whose|when|where|which|why)\b", re.IGNORECASE)
# One meaning by convention wherever they are defined: a module's logger, and the entry point of a script.
CONVENTIONAL = {"logger", "main"}

# A gerund that names a subject is a noun; any other word in -ing or -ed is taken for a participle.
NO_PARTICIPLE = re.compile(
    "addressing|batching|building|caching|drawing|embedding|encoding|handling|hashing|heading|learning|loading|logging|mapping|meaning|"
    "mixing|monitoring|networking|ordering|parsing|pipelining|planning|polling|pooling|posting|preloading|preprocessing|"
    "processing|profiling|pruning|rendering|reporting|routing|sampling|scheduling|setting|sharding|spacing|"
    "stealing|streaming|testing|thing|threading|timing|tokenizing|training|tuning|warning|"
    "bring|fling|ping|ring|sing|sling|spring|sting|string|swing|wing|"
    "bed|bleed|breed|embed|exceed|feed|hundred|need|proceed|red|seed|shed|sled|speed|succeed|weed"
)
# Those that differ from their verb: "put", "read", "run", "set" and "split" may be verbs, and are taken for such.
IRREGULAR = re.compile(
    "been|begun|bent|bound|born|borne|bought|broken|brought|built|caught|chosen|dealt|done|drawn|driven|drunk|"
    "eaten|fallen|fed|felt|fled|flown|forgotten|fought|found|frozen|given|gone|got|gotten|grown|had|heard|held|hidden|"
    "hung|kept|known|laid|lain|led|lent|lit|lost|made|meant|met|outrun|paid|proven|ridden|risen|rung|said|sat|seen|"
    "sent|shaken|shone|shot|shown|shrunk|slept|slid|sold|sought|spent|spoken|sprung|spun|stolen|stood|struck|"
    "stuck|sung|sunk|swept|sworn|swum|swung|taken|taught|thought|thrown|told|torn|understood|undone|woken|won|worn|"
    "withdrawn|withheld|wound|woven|written"
)


def is_participle(word: str) -> bool:
    """Tell whether ``word`` ends as a participle does and is no known noun or verb, or is an irregular one."""
    regular = word.endswith(("ed", "ing")) and not NO_PARTICIPLE.fullmatch(word)
    return regular or IRREGULAR.fullmatch(word) is not None


def participle_modules(modules: Modules) -> list[str]:
    """Modules and packages whose name ends in a participle: ``told`` and ``attention_told``, not ``fused_product``."""
    return sorted(name for name in modules if "." in name and is_participle(re.split(r"[._]", name)[-1]))


def participle_functions(modules: Modules) -> list[str]:
    """Functions named by one word that is a participle, private ones too."""
    return [
        f"{module.path}:{node.lineno} {node.name}"
        for module, node in functions(modules)
        if "_" not in (word := node.name.strip("_")) and is_participle(word)
    ]


def defined_names(module: Module) -> Iterator[str]:
    """Public names that the module itself binds at its top level, under an ``if``, ``try`` or ``with`` too."""
    pending: list[ast.AST] = list(module.tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            pending += ast.iter_child_nodes(node)
        yield from (name for name in _bound(node) if not name.startswith("_"))


def _bound(statement: ast.AST) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign) and statement.value is not None:
        return _variables(statement.target)
    if isinstance(statement, ast.Assign) and not _is_type_variable(statement.value):
        return [name for target in statement.targets for name in _variables(target)]
    return []


def _variables(target: ast.expr) -> list[str]:
    """Plain names bound by an assignment, not attributes or items."""
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]


def _is_type_variable(value: ast.expr) -> bool:
    """Tell whether a value is a ``TypeVar`` or its like: such a name stands for any type everywhere."""
    makers = ("TypeVar", "ParamSpec", "TypeVarTuple")
    return isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] in makers


def repeated_names(modules: Modules) -> dict[str, list[str]]:
    """Public names that more than one module defines, with those modules."""
    homes: dict[str, set[str]] = {}
    for name, module in modules.items():
        for defined in defined_names(module):
            homes.setdefault(defined, set()).add(name)
    return {name: sorted(found) for name, found in sorted(homes.items()) if len(found) > 1 and name not in CONVENTIONAL}


def docstrings(modules: Modules) -> Iterator[tuple[str, str]]:
    """Place and text of every docstring: of modules, classes and functions."""
    for module in modules.values():
        for node in (module.tree, *statements(module.tree)):
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                yield f"{module.path}:{getattr(node, 'lineno', 1)}", text


def asking_docstrings(modules: Modules) -> list[str]:
    """Docstrings whose first word is a question word, each as place and first line."""
    return [f"{place} {text.splitlines()[0]}" for place, text in docstrings(modules) if QUESTION.match(text)]


def small_modules(modules: Modules, edges: Iterable[Edge], below: int) -> list[str]:
    """Modules of fewer than ``below`` lines that one module alone imports, each with its lines and importer."""
    importers: dict[str, set[str]] = {}
    for start, end in edges:
        importers.setdefault(end, set()).add(start)
    return [
        f"{name} ({module.lines} lines): {importer}"
        for name, module in modules.items()
        if module.lines < below and not module.is_package and len(importers.get(name, ())) == 1
        for importer in importers[name]
    ]


def _final_name(node: ast.expr) -> str:
    """Last word of a dotted name, without what it is subscripted by: "Base" of ``a.b.Base[int]``."""
    inner = node.value if isinstance(node, ast.Subscript) else node
    return ast.unparse(inner).rpartition(".")[2] if isinstance(inner, ast.Name | ast.Attribute) else ""


def _names_used(tree: ast.AST) -> Iterator[str]:
    """Names in a tree that stand for values: not bases of classes, annotations, imports or owners of attributes."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.id if isinstance(node, ast.Name) else node.attr
        skipped = {"bases", "annotation", "returns"} | ({"value"} if isinstance(node, ast.Attribute) else set())
        for field, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            pending += [each for each in children if isinstance(each, ast.AST) and field not in skipped]


def public_names(modules: Modules, reference: Path) -> set[str]:
    """Names in the ``__all__`` of packages, and those that the pages of a ``reference`` document."""
    texts = [page.read_text(encoding="utf-8") for page in sorted(reference.glob("*.rst"))]
    found = {name.rpartition(".")[2] for text in texts for name in DOCUMENTED_NAME.findall(text)}
    for module in modules.values():
        for statement in module.tree.body if module.is_package else ():
            if isinstance(statement, ast.Assign | ast.AnnAssign) and "__all__" in ast.unparse(statement).split(" ")[0]:
                found |= {each.value for each in ast.walk(statement) if isinstance(each, ast.Constant)}
    return found


def single_bases(modules: Modules, public: set[str], others: Path | None = None) -> list[str]:
    """Classes that exist to be inherited by one other: not public, no protocol, and never used but as its base.

    ``others``: a folder whose classes inherit too, of tests for instance.
    """
    classes = {
        node.name: (module.name, [_final_name(base) for base in node.bases])
        for module in modules.values()
        for node in statements(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    used = {name for module in modules.values() for name in _names_used(module.tree)}
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (others.rglob("*.py") if others else ()))
    outside = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    used |= {_final_name(base) for node in outside for base in node.bases}
    heirs: dict[str, list[str]] = {}
    for name, (home, bases) in classes.items():
        for base in bases:
            heirs.setdefault(base, []).append(f"{home}.{name}")
    return sorted(
        f"{home}.{name}: {heirs[name][0]}"
        for name, (home, bases) in classes.items()
        if len(heirs.get(name, ())) == 1 and name not in public | used and "Protocol" not in bases
    )


def _class_of(modules: Modules, name: str) -> ast.ClassDef | None:
    home, _, own = name.rpartition(".")
    found = statements(modules[home].tree) if home in modules else iter(())
    return next((each for each in found if isinstance(each, ast.ClassDef) and each.name == own), None)


def settings_of(modules: Modules, owners: Iterable[str]) -> set[str]:
    """Names of the settings that classes take: fields, their bases' too, or keywords of their ``__init__``."""
    classes = {
        node.name: node for each in modules.values() for node in ast.walk(each.tree) if isinstance(node, ast.ClassDef)
    }
    left, found, seen = [_class_of(modules, owner) for owner in owners], set[str](), set[str]()
    while left:
        node = left.pop()
        if node is None or node.name in seen:
            continue
        seen.add(node.name)
        left += [classes.get(base.id) for base in node.bases if isinstance(base, ast.Name)]
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found.add(statement.target.id)
            elif isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                found |= {each.arg for each in (*statement.args.args, *statement.args.kwonlyargs)} - {"self"}
    return {name for name in found if not name.startswith("_")}


def declarations(modules: Modules, settings: set[str]) -> dict[str, list[str]]:
    """Places that declare each setting: a field of a class, a parameter that has a default, a key of a table."""
    found: dict[str, list[str]] = {name: [] for name in settings}
    for module in modules.values():
        for node in ast.walk(module.tree):
            for name in _declared(node):
                if name in found:
                    found[name].append(f"{module.name}:{getattr(node, 'lineno', 0)}")
    return found


def _declared(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef):
        fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
        return [target.id for target in fields if isinstance(target, ast.Name)]
    if isinstance(node, Function):
        positional = [*node.args.posonlyargs, *node.args.args]
        defaulted = positional[len(positional) - len(node.args.defaults) :]
        keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        return [each.arg for each in (*defaulted, *(keyword for keyword, default in keywords if default))]
    if isinstance(node, ast.Dict):
        return [key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return []


def private_imports(modules: Modules) -> list[str]:
    """Private names that a module takes from another of the package, each with the importing module."""
    return [
        f"{name}: {imported}"
        for name, module in modules.items()
        for imported in imported_names(module, type_only=True)
        if _is_private(own := imported.rpartition(".")[2]) and imported not in modules
        if (home := nearest_module(imported, modules)) and not (modules[home].path.parent / f"{own}.pyi").exists()
    ]


def private_reads(modules: Modules) -> list[str]:
    """Private attributes that are read or set on an object other than ``self`` and ``cls``, with their places."""
    return [
        f"{module.path}:{node.lineno} {ast.unparse(node)}"
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute)
        if _is_private(node.attr) and node.attr not in PUBLIC_IN_PYTHON
        if ast.unparse(node.value) not in ("self", "cls", "super()")
    ]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def count_statements(modules: Modules) -> int:
    """Count statements, docstrings left out."""
    return sum(
        not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for module in modules.values()
        for each in statements(module.tree)
    )


def inner_layers(modules: Modules, edges: Iterable[Edge]) -> dict[str, int]:
    """Count the layers on which the parts of each package of two or more stand, by its dotted name."""
    inside = [name for name, module in modules.items() if module.is_package and name != root_of(modules)]
    counted = {name: len(layers(part_edges(edges, modules, name))) for name in inside}
    return {name: count for name, count in counted.items() if count}


def lines_with_text(folder: Path) -> int:
    """Count the lines of Python below a folder that are not blank."""
    texts = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    return sum(bool(line.strip()) for text in texts for line in text.splitlines())
