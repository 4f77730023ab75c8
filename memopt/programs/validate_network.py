"""The validator's law of collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from memopt.models.graph import Graph
from memopt.programs.instructions import Compute, Instruction
from memopt.programs.violations import Violation, ViolationCode


def collectives_in_order(graph: Graph, instructions: Sequence[Instruction]) -> Iterator[Violation]:
    """Ranks meet in the order of their collectives: a program's first runs keep the graph's, so
    that running some again adds to it and neither reorders nor drops one."""
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
