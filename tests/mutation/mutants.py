"""The mutants of a module: small changes of its source, each of which some test must notice.

The changes are cosmic-ray's operators: another comparison, another arithmetic operator, a number
one more or one less, `and` for `or`, a negated condition, `break` for `continue`, a loop that runs
no round. Left out are places that no run reaches: annotations and aliases of types, which the type
checker alone reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

LEFT_OUT = ("RemoveDecorator", "VariableInserter", "VariableReplacer", "ExceptionReplacer")
"""Operators of cosmic-ray whose mutants say little: without numba's decorator the kernels compute
the same, and names of variables exchanged at random fail at once."""
SAME = ("Is_Eq", "IsNot_NotEq", "Eq_Is", "NotEq_IsNot")
"""Comparisons that are each other's: of None, of members of enumerations, of small numbers."""
REPLACED_BY = {
    "Add": ("Sub", "Mul"),
    "Sub": ("Add", "Mul"),
    "Mul": ("Add", "FloorDiv"),
    "Div": ("Mul", "FloorDiv"),
    "FloorDiv": ("Mul", "Div"),
    "Mod": ("FloorDiv", "Add"),
    "Pow": ("Mul", "Add"),
    "RShift": ("LShift", "FloorDiv"),
    "LShift": ("RShift", "Add"),
    "BitOr": ("BitAnd", "BitXor"),
    "BitAnd": ("BitOr", "BitXor"),
    "BitXor": ("BitOr", "BitAnd"),
}
"""Of cosmic-ray's eleven replacements of an arithmetic operator, two that are hard to see."""


@dataclass(frozen=True, order=True)
class Mutant:
    """One change of a module.

    Attributes:
        line: where, from 1.
        column: where, from 0.
        operator: cosmic-ray's name of the change.
        occurrence: which place of that operator in the module.
    """

    line: int
    column: int
    operator: str
    occurrence: int

    def source(self, original: str) -> str:
        """The module's source with the change."""
        changed = mutate_code(original, _operator(self.operator), self.occurrence)
        assert changed is not None
        return str(changed)

    def shown(self, original: str) -> str:
        """The changed lines, before and after, for people."""
        before, after = original.splitlines(), self.source(original).splitlines()
        pairs = [(b, a) for b, a in zip(before, after, strict=False) if a != b]
        old, new = pairs[0] if pairs else (before[self.line - 1], "(lines removed)")
        return f"{self.line}: {old.strip()}  ->  {new.strip()}"


def _operator(name: str) -> object:
    return cosmic_ray.plugins.get_operator(name)()


def _wanted(name: str) -> bool:
    short = name.rpartition("/")[2]
    if short.startswith(LEFT_OUT) or short.removeprefix("ReplaceComparisonOperator_") in SAME:
        return False
    if short.startswith("ReplaceBinaryOperator_"):
        _, old, new = short.split("_")
        return new in REPLACED_BY[old]
    return True


def _unread(source: str) -> set[int]:
    """Lines of which no expression is evaluated when a function runs: those of annotations, of type
    aliases and of declarations in a NamedTuple or dataclass body without a value."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        spans: list[ast.expr | None] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            spans = [node.returns, *(one.annotation for one in every)]
        elif isinstance(node, ast.AnnAssign):
            alias = isinstance(node.annotation, ast.Name) and node.annotation.id == "TypeAlias"
            spans = [node.value if alias else None, node.annotation]
        for one in spans:
            if one is not None:
                lines.update(_columns(one))
    return lines


def _columns(node: ast.expr) -> Iterator[int]:
    """Each place of a node as line * 1000 + column."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    for line in range(node.lineno, node.end_lineno + 1):
        first = node.col_offset if line == node.lineno else 0
        last = node.end_col_offset if line == node.end_lineno else 999
        yield from range(line * 1000 + first, line * 1000 + last)


def mutants_of(source: str) -> list[Mutant]:
    """Every mutant of a module, by place."""
    tree, unread = list(ast_nodes(get_ast(source))), _unread(source)
    found = []
    for name in filter(_wanted, cosmic_ray.plugins.operator_names()):
        operator = cosmic_ray.plugins.get_operator(name)()
        places = [place for node in tree for place in operator.mutation_positions(node)]
        for occurrence, ((line, column), _) in enumerate(places):
            if line * 1000 + column not in unread:
                found.append(Mutant(line, column, name, occurrence))
    return sorted(found)


def sampled(path: Path, count: int | None, seed: int) -> list[Mutant]:
    """Mutants of a file: all, or so many of them drawn evenly, each place as likely as another."""
    every = mutants_of(path.read_text(encoding="utf-8"))
    if count is None or len(every) <= count:
        return every
    return sorted(Random(f"{seed} {path.name}").sample(every, count))
