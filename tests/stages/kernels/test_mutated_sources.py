"""A mutant of every source in the table is none that is known: a factor, a clip, another epsilon or scale."""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from itertools import count
from types import FunctionType
from typing import Any

import pytest

from tools import known_sources as tool
from trinity.stages.kernels.admission import fingerprint_part
from trinity.stages.kernels.known_sources import KNOWN_SOURCES, OUTLINES, LayerPart

SOURCES = [(part, name) for part, name in tool.named_sources() if tool.find_source(name) is not None]
_numbers = count()


class Factor(ast.NodeTransformer):
    """A factor of the positions on what is returned, as Ministral 3 has one on its queries."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        assert node.value is not None
        factor = ast.parse("(1 + position_ids // 16384)", mode="eval").body
        return ast.Return(ast.BinOp(node.value, ast.Mult(), factor))


class Clip(ast.NodeTransformer):
    """A bound on what is returned."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        assert node.value is not None
        clip = ast.Attribute(node.value, "clamp", ast.Load())
        return ast.Return(ast.Call(clip, [], [ast.keyword("max", ast.Constant(7.0))]))


class Constants(ast.NodeTransformer):
    """Another epsilon, scale or axis: every number, and every attribute or name that is read where there is none."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Constant(node.value + 1) if isinstance(node.value, int | float) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if isinstance(node.ctx, ast.Load) and ("eps" in node.attr or "scal" in node.attr):
            return ast.BinOp(node, ast.Mult(), ast.Constant(2))
        return node


MUTATIONS: list[Callable[[], ast.NodeTransformer]] = [Factor, Clip, Constants]


@pytest.fixture(autouse=True)
def forget_sources() -> Iterator[None]:
    yield
    for name in [each for each in linecache.cache if each.startswith("<mutant ")]:
        del linecache.cache[name]


def mutate(own: Any, mutation: ast.NodeTransformer) -> FunctionType | None:
    """The function with its source changed, whose text ``inspect`` finds; None if the mutation changes nothing."""
    source = inspect.getsource(own)
    tree = ast.parse(textwrap.dedent(source))
    function: Any = tree.body[0]
    function.decorator_list = []
    before = ast.unparse(tree)
    mutation.visit(tree)
    text = ast.unparse(ast.fix_missing_locations(tree))
    if text == before:
        return None
    method = source[0].isspace()
    lines = ["from __future__ import annotations\n", "class Mutant:\n" if method else "\n"]
    lines += [f"    {line}\n" if method else f"{line}\n" for line in text.splitlines()]
    name, space = f"<mutant {next(_numbers)}>", dict(own.__globals__)
    linecache.cache[name] = (len(text), None, lines, name)
    exec(compile("".join(lines), name, "exec"), space)
    made: FunctionType = vars(space["Mutant"])[function.name] if method else space[function.name]
    return made


def mutated(part: LayerPart, source: Any, mutation: ast.NodeTransformer) -> Any:
    """A class or function of the table with its forward, or what the part reads of it, mutated; None if none can."""
    if not isinstance(source, type):
        return mutate(inspect.unwrap(source), mutation)
    method = OUTLINES.get(part) or "forward"
    changed = mutate(inspect.unwrap(getattr(source, method)), mutation)
    return None if changed is None else type(source.__name__, (source,), {method: changed})


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(("part", "name"), SOURCES, ids=[f"{part.name}-{name}" for part, name in SOURCES])
def test_a_mutant_of_a_known_source_is_not_known(
    part: LayerPart, name: str, mutation: Callable[[], ast.NodeTransformer]
) -> None:
    source = tool.find_source(name)
    mutant = mutated(part, source, mutation())
    if mutant is None:
        assert mutation is Constants, "its source has neither a number nor an epsilon"
        return
    found = fingerprint_part(part, mutant)
    assert found is not None, "a mutant has a source: what has none is never known, and would prove nothing"
    assert found not in KNOWN_SOURCES[part]


class Docstring(ast.NodeTransformer):
    """A text that says other things: what a function computes is as before."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        has_one = ast.get_docstring(node) is not None
        node.body[: int(has_one)] = [ast.Expr(ast.Constant("Compute something else."))]
        return node


@pytest.mark.parametrize("part", [LayerPart.RMS_NORM, LayerPart.GATED_MLP, LayerPart.DECODER_LAYER, LayerPart.ROTARY])
def test_a_copy_that_computes_the_same_is_known(part: LayerPart) -> None:
    """The control: the way in which mutants are made does not change a fingerprint."""
    source = tool.find_source(next(name for each, name in SOURCES if each is part))
    assert fingerprint_part(part, mutated(part, source, Docstring())) in KNOWN_SOURCES[part]
