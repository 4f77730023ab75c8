"""Who tells instructions apart by their types; all others ask for their `effects`."""

from __future__ import annotations

import ast

from memopt.programs.instructions import INSTRUCTIONS
from tests.layers import modules

NAMES = {kind.__name__ for kind in INSTRUCTIONS.kinds.values()}
OF_RUNS = {"Compute", "Free"}
"""A pass that rewrites programs finds the computations and the frees among its own output."""

EVERY_KIND = {
    "memopt.programs.instructions",
    "memopt.programs.replay",
    "memopt.programs.validate",
    "memopt.executor.code_writer",
    "memopt.executor.interpret",
}
"""What a new instruction must be told to; docs/adding.md lists the same places."""

SOME_KINDS = {
    "memopt.passes.early_collectives",
    "memopt.passes.joint_pass",
    "memopt.passes.order_and_place",
    "memopt.programs.validate_placement",
    "memopt.strategies.shared.kernel_choice",
}
RUNS_ONLY = {
    "memopt.programs.in_place",
    "memopt.programs.lifetimes",
    "memopt.programs.liveness",
    "memopt.programs.moved",
    "memopt.executor.step_updates",
    "memopt.programs.validate_moved",
    "memopt.programs.validate_network",
    "memopt.reductions.coarsen",
    "memopt.reductions.lower",
    "memopt.reductions.step_linearization",
    "memopt.strategies.moving.on_host",
    "memopt.strategies.shared.fastest_runs",
    "memopt.strategies.shared.graph_model",
    "memopt.strategies.shared.stage_alternatives",
    "memopt.passes.order.program_tasks",
}


def asked_for(source: str) -> set[str]:
    """The instruction types that a module branches on: isinstance, match, `type(x) is`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        tested: list[ast.expr] = []
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            tested = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            tested = [node.cls]
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
            tested = node.comparators if getattr(node.left.func, "id", "") == "type" else []
        for expression in tested:
            names = (one.id for one in ast.walk(expression) if isinstance(one, ast.Name))
            found |= NAMES.intersection(names)
    return found


def test_few_modules_know_the_kinds_of_instructions() -> None:
    asked = {
        module: found
        for module, path in modules().items()
        if (found := asked_for(path.read_text(encoding="utf-8")))
    }
    beyond = {module for module, found in asked.items() if found - OF_RUNS}
    assert beyond <= EVERY_KIND | SOME_KINDS
    assert asked.keys() <= EVERY_KIND | SOME_KINDS | RUNS_ONLY


def test_questions_for_types_are_found() -> None:
    assert asked_for("isinstance(x, Free | SwapIn)") == {"Free", "SwapIn"}
    assert asked_for("match x:\n    case DropHost(t):\n        pass") == {"DropHost"}
    assert asked_for("type(x) is Compute") == {"Compute"}
    assert not asked_for("made = [Compute(0, ()), Free(1)]")
