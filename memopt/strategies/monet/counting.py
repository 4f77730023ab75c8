"""For which graphs the 0-1 programs count memory as it is, so that what they prove holds."""

from __future__ import annotations

from memopt.models.bounds import needed_operators
from memopt.models.graph import Graph


def counted_exactly(graph: Graph) -> bool:
    """Whether what MONeT's and Checkmate's programs prove of a graph holds for all its programs
    that run operators again in their way.

    Both papers' operators write one tensor each, into a storage of its own, and all of them run.
    Here, a program may do with less: it may run an operator with several outputs twice between two
    others, once for each output; let an output take over the storage of what dies there; and leave
    out operators whose results nothing needs. A plan of the programs is a plan in any case.
    """
    plain = all(
        len(operator.writes) <= 1
        and not operator.in_place
        and not any(choice.in_place for choice in operator.implementations)
        for operator in graph.operators
    )
    return plain and len(needed_operators(graph)) == len(graph.operators)
