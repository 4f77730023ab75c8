"""The layers of memopt hold: models ← strategies ← planning; models ← profiler, executor."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import networkx
import pytest

from tests.layers import (
    COMPOSITES,
    LAYERS,
    NO_TORCH,
    PACKAGE,
    SHARED_BY_STRATEGIES,
    SOLVERS,
    TORCH,
    USED_BY_SHARED,
    Import,
    eager_modules,
    imports_of,
    is_in,
    layer_of,
    modules,
    types_of,
)

MODULES = modules()
Rule = Callable[[str, Import], bool]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


@functools.cache
def imports(module: str) -> list[Import]:
    path = MODULES[module]
    return imports_of(module, path.read_text(encoding="utf-8"), path.name == "__init__.py")


def wrong_layer(module: str, imported: Import) -> bool:
    layer = layer_of(module)
    assert layer is not None
    if not is_in(imported.module, "memopt"):
        return False
    may = (layer, *LAYERS[layer], *(types_of(module) if imported.for_types else ()))
    # The package itself is what users see of it, not all that is in it.
    return not any(
        imported.module == allowed if allowed == "memopt" else is_in(imported.module, allowed)
        for allowed in may
    )


def wrong_neighbour(module: str, imported: Import) -> bool:
    """Whether a strategy, or what strategies share, reaches into a strategy's folder."""
    if not is_in(imported.module, "memopt.strategies") or not is_in(module, "memopt.strategies"):
        return False
    own = ".".join(module.split(".")[:3])
    if own == "memopt.strategies":
        return False
    used = USED_BY_SHARED if own == "memopt.strategies.shared" else ()
    if any(is_in(imported.module, allowed) for allowed in (own, *used, *SHARED_BY_STRATEGIES)):
        return False
    name = imported.target.rpartition(".")[2]
    public_class = name[:1].isupper() and imported.target != imported.module
    the_tuple = imported.module in ("memopt.strategies", "memopt.strategies.singles")
    composite = any(is_in(module, one) for one in COMPOSITES)
    return not (composite and (public_class or the_tuple))


def wrong_package(module: str, imported: Import) -> bool:
    """Whether a torch-free layer imports torch, even inside a function."""
    if not any(is_in(module, layer) for layer in NO_TORCH):
        return False
    return imported.target.split(".")[0] in TORCH


def too_early(loaded: set[str], module: str, imported: Import) -> bool:
    """Whether a solver is loaded before anything is solved."""
    return module in loaded and imported.at_top and imported.target.split(".")[0] in SOLVERS


RULES = (wrong_layer, wrong_neighbour, wrong_package)


@pytest.mark.parametrize("module", MODULES)
def test_imports(module: str) -> None:
    assert layer_of(module) is not None, f"enter {module} in LAYERS of tests/layers.py"
    found = [
        f"line {imported.line}: {imported.target}: {broken.__name__}"
        for imported in imports(module)
        for broken in RULES
        if broken(module, imported)
    ]
    assert not found


def circles(graph: networkx.DiGraph) -> list[list[str]]:
    """Modules that import one another, however far around."""
    found = networkx.strongly_connected_components(graph)
    return sorted(sorted(modules) for modules in found if len(modules) > 1)


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and for annotations only are imports, too."""
    graph = networkx.DiGraph()
    for module in MODULES:
        for imported in imports(module):
            target = next(
                (name for name in (imported.target, imported.module) if name in MODULES), module
            )
            if target != module:
                graph.add_edge(module, target)
    assert graph.number_of_edges() > len(MODULES)
    assert not circles(graph)


def test_a_circle_is_found() -> None:
    graph = networkx.DiGraph([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")])
    assert circles(graph) == [["a", "b", "c"]]


def test_no_solver_is_loaded_before_it_is_needed() -> None:
    every = {module: imports(module) for module in MODULES}
    loaded = eager_modules(every)
    assert "memopt.strategies.base" in loaded
    assert not [
        f"{module} line {imported.line}: {imported.target}"
        for module, imported_by in every.items()
        for imported in imported_by
        if too_early(loaded, module, imported)
    ]


@pytest.mark.parametrize(
    ("strategy", "early"),
    [
        ("from memopt.strategies.x.compiled import f", True),
        ("from .compiled import f", True),
        ("def solve():\n    from .compiled import f", False),
    ],
)
def test_a_solver_loaded_early_is_found(strategy: str, early: bool) -> None:
    sources = {
        "memopt.strategies": "from memopt.strategies.x.x import X",
        "memopt.strategies.x.x": strategy,
        "memopt.strategies.x.compiled": "from numba import njit",
    }
    every = {name: imports_of(name, text, name.count(".") == 1) for name, text in sources.items()}
    compiled = "memopt.strategies.x.compiled"
    assert too_early(eager_modules(every), compiled, every[compiled][0]) == early


@pytest.mark.parametrize(
    ("module", "source", "broken"),
    [
        ("memopt.models.x", "from memopt.strategies.base import Strategy", wrong_layer),
        ("memopt.models.x", "from memopt import plan", wrong_layer),
        ("memopt.models.x", "def f():\n    import memopt.executor", wrong_layer),
        ("memopt.strategies.rotor.x", "from memopt.executor import run", wrong_layer),
        ("memopt.strategies.rotor.x", "from memopt.api import planning", wrong_layer),
        ("memopt.profiler.x", "from memopt import strategies", wrong_layer),
        (
            "memopt.models.x",
            "if TYPE_CHECKING:\n    from memopt.api.plan import Plan",
            wrong_layer,
        ),
        ("memopt.executor.x", "def f():\n    from memopt.api.plan import Plan", wrong_layer),
        (
            "memopt.executor.x",
            "if TYPE_CHECKING:\n    from memopt.api.plan import Plan",
            wrong_layer,
        ),
        ("memopt.programs.x", "from memopt.reductions.linearize import linearize", wrong_layer),
        ("memopt.strategies.rotor.x", "from ..olla import Olla", wrong_neighbour),
        ("memopt.strategies.auto.x", "from memopt.strategies.olla import search", wrong_neighbour),
        ("memopt.strategies.monet.x", "from memopt.strategies.rotor import Rotor", wrong_neighbour),
        ("memopt.strategies.joint.x", "from memopt.strategies.monet.x import X", wrong_neighbour),
        ("memopt.strategies.shared.x", "from memopt.strategies.monet.x import X", wrong_neighbour),
        ("memopt.models.x", "def f():\n    import torch", wrong_package),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, broken: Rule) -> None:
    assert any(broken(module, found) for found in imports_of(module, source, False))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("memopt.models.x", "from memopt.models.graph import Graph\nimport numpy"),
        (
            "memopt.strategies.rotor.x",
            "from .y import z\nfrom ..base import Status",
        ),
        ("memopt.strategies.auto.x", "from memopt.strategies.olla import Olla"),
        ("memopt.strategies.joint.strategy", "from memopt.strategies.monet.strategy import Monet"),
        ("memopt.strategies.shared.x", "from memopt.strategies.rotor import Rotor"),
        ("memopt.strategies.monet.x", "from memopt.strategies.shared.x import y"),
        (
            "memopt.executor.x",
            "if TYPE_CHECKING:\n    from memopt.plan_record import PlanRecord",
        ),
        ("memopt.executor.x", "import torch\nfrom memopt.step import captured"),
    ],
)
def test_a_right_import_is_not(module: str, source: str) -> None:
    for found in imports_of(module, source, False):
        for broken in RULES:
            assert not broken(module, found), broken.__name__


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return all of a module's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring apart."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_files_and_functions_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    long = {f.name: code_lines(f) for f in functions(path) if code_lines(f) > MAX_FUNCTION_LINES}
    assert not long


def test_one_name_is_one_class() -> None:
    """Whoever meets a class knows which; the trainers' callbacks are alike on purpose."""
    where: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(module)
    assert len(where) > 400
    assert {name for name, found in where.items() if len(found) > 1} == {"MemoptCallback"}
