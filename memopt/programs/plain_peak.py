"""The peak of a program, ten times faster than by `replay` where nothing moves."""

from __future__ import annotations

from memopt.models.graph import Graph
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Free, LossBoundary, Program
from memopt.programs.replay import replay


def peak_bytes(graph: Graph, program: Program) -> int:
    """Return `replay(graph, program).peak_bytes`.

    Args:
        graph: the cost model the program refers to.
        program: valid.
    """
    kinds = set(map(type, program.instructions))
    if graph.movable or not kinds <= {Compute, Free, LossBoundary}:
        return replay(graph, program).peak_bytes
    sizes = [tensor.size_bytes for tensor in graph.tensors]
    operators = graph.operators
    during = [
        sum([sizes[t] for t in operator.writes]) + operator.workspace_bytes
        for operator in operators
    ]
    live = peak = graph.resident_bytes
    for one in program.instructions:
        if type(one) is Free:
            live -= sizes[one.tensor]
            continue
        if type(one) is LossBoundary:
            live += sum(sizes[t] for t in graph.tangents)
            live -= sum(sizes[t] for t in graph.written_back)
            now = live + graph.boundary_bytes
        else:
            assert type(one) is Compute
            now = live + during[one.op]
            if one.implementation is not None:
                chosen = variant(operators[one.op], one.implementation)
                now = live + sum(sizes[t] for t in chosen.writes) + chosen.workspace_bytes
            if one.in_place is not None:
                now -= sizes[one.in_place]
                live -= sizes[one.in_place]
            for tensor in one.outputs:
                live += sizes[tensor]
        if now > peak:
            peak = now
    return peak
