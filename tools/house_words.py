"""Names and docstrings of a package: names with two meanings, docstrings that ask, names that are participles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.house_source import Module, Modules, functions, statements

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
