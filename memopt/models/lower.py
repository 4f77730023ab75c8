"""Chain steps → Program: the stage map applied to a schedule, frees by liveness.

Law: the program's replayed peak is at most the schedule's own, and the time is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memopt.models.chain_replay import FORWARD_MOVES, replay_chain
from memopt.models.liveness import computes, with_frees
from memopt.models.program import Program
from memopt.models.steps import ChainStep, Move

if TYPE_CHECKING:
    from memopt.models.linearize import Linearization


def lower_steps(linearization: Linearization, steps: Sequence[ChainStep]) -> Program:
    """Lower a chain schedule to the program that runs it.

    A stage's first forward runs all its forward operators, later ones those that the output or
    the saved values need. Values are freed after their last reader, never later than the
    schedule drops them, so drops lower to nothing.

    Args:
        linearization: of the graph the program is for.
        steps: a schedule of `linearization.chain`.

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
    return Program(with_frees(graph, computes(graph, operators)))
