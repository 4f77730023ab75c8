"""Adds updates, as early as possible, to programs of strategies that plan no updates.

Such a strategy plans the step up to its gradients. Each parameter's update then follows the last
computation that reads the parameter or touches its gradient (OLLA §4.3), and frees the gradient. A
random update also follows the random operators before it.
"""

from __future__ import annotations

from dataclasses import replace

from memopt.models.graph import Graph, Phase
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Free, Instruction, Program
from memopt.programs.liveness import with_frees


def without_updates(graph: Graph) -> Graph:
    """Return the step up to its gradients, which become its results; tensors and the other
    operators keep their indices.

    Raises:
        ValueError: an update is not at the end of the operators.
    """
    count = len(graph.operators) - len(updates_of(graph))
    if any(operator.phase is Phase.UPDATE for operator in graph.operators[:count]):
        raise ValueError("without_updates: updates must come after all other operators")
    gradients = [t for i in updates_of(graph) for t in graph.operators[i].reads]
    results = (t for t in (*graph.gradients, *gradients) if t not in graph.resident)
    return replace(
        graph, operators=graph.operators[:count], gradients=tuple(dict.fromkeys(results))
    )


def with_early_updates(graph: Graph, program: Program) -> Program:
    """Add the graph's updates to a program of `without_updates(graph)`, each as early as it can be.

    In-place outputs and addresses must be decided afterwards.
    """
    last: dict[int, int] = {}
    drawn: dict[int, int] = {}
    """First run of each random operator."""
    for position, run in program.computes:
        if graph.operators[run.op].random:
            drawn.setdefault(run.op, position)
        chosen = variant(graph.operators[run.op], run.implementation)
        last.update(dict.fromkeys((*chosen.reads, *chosen.writes), position))
    after: dict[int, list[int]] = {}
    for index in updates_of(graph):
        position = max((last.get(t, 0) for t in graph.operators[index].reads), default=0)
        if graph.operators[index].random:
            position = drawn[index] = max([position, *drawn.values()])
        after.setdefault(position, []).append(index)
    listed: list[Instruction] = []
    ready: list[Instruction] = []
    for position, instruction in enumerate(program):
        # Tensors that die with the last user are freed first.
        if ready and not isinstance(instruction, Free):
            listed += ready
            ready = []
        listed.append(instruction)
        ready += [Compute(index, ()) for index in after.get(position, ())]
    listed += ready
    return Program(with_frees(graph, listed))


def updates_of(graph: Graph) -> list[int]:
    """Return the indices of the operators that update parameters."""
    return [i for i, x in enumerate(graph.operators) if x.phase is Phase.UPDATE]
