"""Chain steps → Program: the stage map applied to a schedule, frees by liveness.

Law: the program's replayed peak is at most the schedule's own, and so is its time. The time is
the same as long as the schedule recomputes nothing that its program does not read: the chain's
B^ℓ asks for all of ā^ℓ, a^ℓ included, while the operators of B^ℓ may not read a^ℓ, so that
re-running the stage for its backward stops before them ("early stop").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memopt.models.chain_replay import FORWARD_MOVES, replay_chain
from memopt.models.graph import Graph
from memopt.models.liveness import computes, with_frees
from memopt.models.program import Program
from memopt.models.steps import ChainStep, Move

if TYPE_CHECKING:
    from memopt.models.linearize import Linearization


def lower_steps(
    linearization: Linearization, steps: Sequence[ChainStep], keep_unread: bool = False
) -> Program:
    """Lower a chain schedule to the program that runs it.

    A stage's first forward runs all its forward operators, later ones those that the output or
    the saved values need, of which those are left out whose results nothing reads. Values are
    freed after their last reader, never later than the schedule drops them, so drops lower to
    nothing.

    Args:
        linearization: of the graph the program is for.
        steps: a schedule of `linearization.chain`.
        keep_unread: run these too, so that the program's time is exactly the schedule's.

    Raises:
        InvalidProgramError: the schedule is not valid for the chain.
    """
    replay_chain(linearization.chain, steps)
    graph, stages = linearization.graph, linearization.stages
    loss = len(stages) + 1
    boundary = [None] if graph.tangents or graph.first_backward < len(graph.operators) else []
    operators: list[int | None] = []
    begun: set[int] = set()
    for step in steps:
        if step.move in FORWARD_MOVES and step.stage < loss:
            stage = stages[step.stage - 1]
            operators += stage.rerun if step.stage in begun else stage.forward
            begun.add(step.stage)
        elif step.move is Move.BACKWARD:
            operators += boundary if step.stage == loss else stages[step.stage - 1].backward
    if not keep_unread:
        operators = without_unread_reruns(graph, operators)
    return Program(with_frees(graph, computes(graph, operators)))


def without_unread_reruns(graph: Graph, operators: Sequence[int | None]) -> list[int | None]:
    """Leave out the second and later runs of operators whose results nothing reads.

    Args:
        graph: the graph the indices refer to.
        operators: operator indices in order, None for the loss boundary.
    """
    first: dict[int | None, int] = {}
    for position, index in enumerate(operators):
        first.setdefault(index, position)
    read_later: set[int] = set()
    kept: list[int | None] = []
    for position in range(len(operators) - 1, -1, -1):
        index = operators[position]
        if index is not None:
            operator = graph.operators[index]
            if first[index] != position and read_later.isdisjoint(operator.writes):
                continue
            read_later.difference_update(operator.writes)
            read_later.update(operator.reads)
        kept.append(index)
    kept.reverse()
    return kept
