"""The layers of memopt and how its imports are read, for test_layering."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "memopt"

_FACTS = ("memopt.errors", "memopt.models", "memopt.programs")
_STEP = (*_FACTS, "memopt.torch_private", "memopt.step", "memopt.user_code")
_PLANS = (*_FACTS, "memopt.reductions", "memopt.plan_record", "memopt.strategies")
_EXECUTOR = (*_STEP, "memopt.reductions", "memopt.executor")

# Layer → what its modules may import of memopt, besides their own layer. A new module or folder of
# memopt must be entered here. The longest name that a module is in counts.
LAYERS: dict[str, tuple[str, ...]] = {
    "memopt.errors": (),
    "memopt.models": ("memopt.errors",),
    "memopt.programs": ("memopt.errors", "memopt.models"),
    "memopt.reductions": _FACTS,
    "memopt.solvers": ("memopt.models",),
    "memopt.passes": (*_FACTS, "memopt.solvers"),
    "memopt.strategies": (*_FACTS, "memopt.reductions", "memopt.solvers", "memopt.passes"),
    "memopt.plan_record": (*_FACTS, "memopt.strategies"),
    "memopt.comparison_record": (
        "memopt.errors",
        "memopt.models",
        "memopt.plan_record",
        "memopt.strategies",
    ),
    "memopt.torch_private": (
        "memopt.errors",
        "memopt.models.deferred_interrupt",
        "memopt.models.locks",
    ),
    "memopt.step": (*_FACTS, "memopt.torch_private"),
    "memopt.user_code": (
        "memopt.errors",
        "memopt.models",
        "memopt.torch_private",
        "memopt.step",
    ),
    "memopt.capture": _STEP,
    "memopt.pricing": _STEP,
    "memopt.kernels": (*_STEP, "memopt.capture", "memopt.pricing"),
    "memopt.profiler": (*_STEP, "memopt.capture", "memopt.pricing", "memopt.kernels"),
    "memopt.distributed": ("memopt.errors", "memopt.step", "memopt.torch_private"),
    # How a kernel writes at an address: a step is prepared with it, and runs by it.
    "memopt.executor.composed_variants": _STEP,
    "memopt.executor.out_variants": (
        *_STEP,
        "memopt.pricing.workspace",
        "memopt.executor.composed_variants",
    ),
    "memopt.stages": (
        *_STEP,
        "memopt.capture",
        "memopt.pricing",
        "memopt.kernels",
        "memopt.profiler",
        "memopt.executor.out_variants",
    ),
    # Running knows nothing of how a step was captured and priced...
    "memopt.executor": _EXECUTOR,
    # ...but where a model's planned call begins,
    "memopt.executor.guard": (*_EXECUTOR, "memopt.capture.as_eager.masks"),
    "memopt.executor.module": (*_EXECUTOR, "memopt.capture.training_call"),
    "memopt.executor.train_step": (*_EXECUTOR, "memopt.capture.training_call"),
    "memopt.executor.step_checks": (*_EXECUTOR, "memopt.capture.remedies"),
    # where one is captured again, or anew,
    "memopt.executor.dependency_check": (*_EXECUTOR, "memopt.capture.trace"),
    "memopt.executor.apply": (*_EXECUTOR, "memopt.capture.training_call", "memopt.stages"),
    "memopt.executor.recaptured": (*_EXECUTOR, "memopt.stages"),
    "memopt.executor.lengths": (*_EXECUTOR, "memopt.capture"),
    "memopt.executor.self_planning": (*_EXECUTOR, "memopt.capture"),
    "memopt.executor.parts": (
        *_EXECUTOR,
        "memopt.capture.taken",
        "memopt.capture.training_call",
    ),
    # and where it is measured.
    "memopt.executor.check": (*_EXECUTOR, "memopt.stages", "memopt.pricing"),
    "memopt.executor.surroundings": (*_EXECUTOR, "memopt.pricing"),
    "memopt.executor.shared_budget": (*_EXECUTOR, "memopt.pricing"),
    "memopt.report": (
        *_FACTS,
        "memopt.reductions",
        "memopt.plan_record",
        "memopt.comparison_record",
    ),
    "memopt.files": _PLANS,
    "memopt.api": (
        *_PLANS,
        *_STEP,
        "memopt.passes",
        "memopt.capture",
        "memopt.pricing",
        "memopt.kernels",
        "memopt.profiler",
        "memopt.stages",
        "memopt.executor",
        "memopt.distributed",
        "memopt.report",
        "memopt.files",
        "memopt.comparison_record",
    ),
    "memopt.integrations": (
        *_PLANS,
        *_STEP,
        "memopt.pricing",
        "memopt.kernels",
        "memopt.executor",
        "memopt.api",
    ),
    "memopt.commands": (
        *_PLANS,
        "memopt",
        "memopt.torch_private",
        "memopt.passes",
        "memopt.report",
        "memopt.files",
        "memopt.api",
        "memopt.step.accelerator",
    ),
    "memopt.commands.doctor": (
        *_PLANS,
        "memopt",
        "memopt.torch_private",
        "memopt.api",
        "memopt.step.accelerator",
        "memopt.commands",
    ),
    "memopt.testing": (*_PLANS, "memopt.files", "memopt.api"),
    "memopt.demo": (
        "memopt.models",
        "memopt.pricing",
        "memopt.executor",
        "memopt.api",
        "memopt.demo_models",
    ),
    "memopt.demo_models": ("memopt.commands",),
    "memopt.cli": ("memopt", "memopt.commands", "memopt.demo"),
    "memopt.__main__": ("memopt.cli",),
    "memopt": (
        "memopt.errors",
        "memopt.models",
        "memopt.programs",
        "memopt.pricing",
        "memopt.strategies",
        "memopt.report",
        "memopt.api",
        "memopt.integrations",
    ),
}

# What a layer may name in annotations only, under `if TYPE_CHECKING:`.
FOR_TYPES: dict[str, tuple[str, ...]] = {
    "memopt.executor": ("memopt.plan_record",),
    "memopt.plan_record": ("memopt.step",),
    "memopt.stages": ("memopt.plan_record", "memopt.strategies"),
}

# Inside memopt.strategies: what every strategy shares.
SHARED_BY_STRATEGIES = (
    "memopt.strategies.base",
    "memopt.strategies.host_budget",
    "memopt.strategies.budget_search",
    "memopt.strategies.checkpointed_blocks",
    "memopt.strategies.target",
    "memopt.strategies.store_all",
    "memopt.solvers",
    "memopt.strategies.moving",
    "memopt.strategies.shared",
)
# Who asks whole strategies for their plans: they import the others' public classes.
COMPOSITES = (
    "memopt.strategies.singles",
    "memopt.strategies.auto",
    "memopt.strategies.joint.strategy",
)
# The folders that what is shared may use: Rotor's recurrence plans a graph's chain for everybody.
USED_BY_SHARED = ("memopt.strategies.rotor",)

NO_TORCH = (
    "memopt.errors",
    "memopt.models",
    "memopt.programs",
    "memopt.reductions",
    "memopt.solvers",
    "memopt.passes",
    "memopt.strategies",
)
TORCH = ("torch", "torchvision", "transformers", "timm")
SOLVERS = ("numba", "ortools", "scipy", "networkx")
"""Not imported by what `import memopt` and building cost models import: a strategy imports its
compiled code and its solver inside the function that solves."""

EAGER_ROOTS = ("memopt", "memopt.errors", "memopt.strategies", "memopt.strategies.base")
"""Imported before anything is solved: these modules, all of memopt.models, and what they import."""


@dataclass(frozen=True)
class Import:
    """One imported module, or one name of a module.

    Attributes:
        target: dotted name of the module, or of the name within it.
        line: where.
        at_top: executed when the importing module is imported.
        for_types: under `if TYPE_CHECKING:`, so never executed.
    """

    target: str
    line: int
    at_top: bool
    for_types: bool = False

    @property
    def module(self) -> str:
        """The longest prefix of `target` that is a module of memopt; else `target` itself."""
        parts = self.target.split(".")
        for length in range(len(parts), 0, -1):
            path = ROOT.joinpath(*parts[:length])
            if path.with_suffix(".py").exists() or path.is_dir():
                return ".".join(parts[:length])
        return self.target


def is_in(name: str, layer: str) -> bool:
    """Whether a dotted name is that module or inside that package."""
    return name == layer or name.startswith(layer + ".")


def modules() -> dict[str, Path]:
    """Every module of memopt: dotted name → file."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    return found


def layer_of(module: str) -> str | None:
    """The layer a module belongs to; None if it is in no layer of LAYERS."""
    if module == "memopt":
        return module
    layers = [layer for layer in LAYERS if layer != "memopt" and is_in(module, layer)]
    return max(layers, key=len, default=None)


def types_of(module: str) -> tuple[str, ...]:
    """What a module may name in annotations, by all layers that it is in."""
    return tuple(name for layer, may in FOR_TYPES.items() if is_in(module, layer) for name in may)


def imports_of(module: str, source: str, is_package: bool) -> list[Import]:
    """All imports of a module's source; `from x import y` counts as x.y."""
    found: list[Import] = []
    _collect(ast.parse(source), module if is_package else module.rpartition(".")[0], True, found)
    return found


def eager_modules(imports: Mapping[str, Iterable[Import]]) -> set[str]:
    """The modules that are loaded before anything is solved."""
    todo = [name for name in imports if name in EAGER_ROOTS or is_in(name, "memopt.models")]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in found or name not in imports:
            continue
        found.add(name)
        for imported in imports[name]:
            if imported.at_top:
                # A module, or the module a name is taken from; and the packages they are in.
                parts = imported.target.split(".")
                todo.extend(".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return found


def _collect(
    node: ast.AST, package: str, at_top: bool, found: list[Import], for_types: bool = False
) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            base = f"{_absolute(child, package)}." if isinstance(child, ast.ImportFrom) else ""
            found.extend(
                Import(base + alias.name, child.lineno, at_top, for_types) for alias in child.names
            )
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            _collect(child, package, False, found, for_types)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            _collect(ast.Module(child.body, []), package, False, found, True)
            _collect(ast.Module(child.orelse, []), package, at_top, found, for_types)
        else:
            _collect(child, package, at_top, found, for_types)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - (node.level - 1)])
    return f"{base}.{node.module}" if node.module else base
