"""The validator's check of collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memopt.models.graph import Graph
from memopt.programs.instructions import Compute, Instruction
from memopt.programs.violations import Violation, ViolationCode


def collectives_in_order(graph: Graph, instructions: Sequence[Instruction]) -> Iterator[Violation]:
    """Check that the first runs of collectives keep the graph's order. The ranks meet in that
    order; repeated runs add to it, and no rank may reorder or drop a collective."""
    ran: set[int] = set()
    for i, instruction in enumerate(instructions):
        if not isinstance(instruction, Compute) or instruction.op in ran:
            continue
        operator = graph.operators[instruction.op]
        if operator.collective is None:
            continue
        if ran and max(ran) > instruction.op:
            message = f"{operator.name!r} after {graph.operators[max(ran)].name!r}"
            yield Violation(ViolationCode.COLLECTIVE_ORDER, i, message)
        ran.add(instruction.op)
