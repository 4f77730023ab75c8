"""Lower bounds on memory and time that hold for every valid program or schedule.

They are cheap (one pass) and safe: whatever is reordered, recomputed, moved to the host or run
by another implementation, no valid program of the graph needs less.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memopt.models.chain import Chain
from memopt.models.graph import Graph, Operator, Phase
from memopt.models.last_of import LastOf
from memopt.models.variants import Variant, variant

_LEAST, _FASTEST = LastOf[int](), LastOf[float]()


def memory_lower_bound(graph: Graph) -> int:
    """Return the bytes, resident included, that every program of a graph needs: the largest of the
    loss boundary, the end of the step, and the working sets of operators that every program must
    run, with the results that are already held."""
    fixed_bytes = graph.resident_bytes - graph.movable_bytes
    return _LEAST.of((graph,), None, lambda: fixed_bytes + max(_graph_working_sets(graph)))


def memory_upper_bound(graph: Graph) -> int:
    """Return the bytes, resident included, with which every tensor is live at once beside any
    operator: a budget that limits nothing."""
    scratch = max((x.workspace_bytes for o in graph.operators for x in choices_of(o)), default=0)
    tensors = sum(tensor.size_bytes for tensor in graph.tensors)
    return graph.extra_resident_bytes + tensors + max(scratch, graph.boundary_bytes)


def time_lower_bound(cost_model: Graph | Chain) -> float:
    """Return the seconds that every plan of the cost model needs: its needed operators, once, the
    fastest way, on the compute stream; or its collectives, one after the other, on the network.

    Operators that no result depends on and that have no effects need not run.
    """
    if isinstance(cost_model, Chain):
        return cost_model.compute_time_s
    graph = cost_model
    return _FASTEST.of((graph,), None, lambda: max(_needed_time_s(graph), graph.network_time_s))


def _needed_time_s(graph: Graph) -> float:
    needed = [graph.operators[index] for index in sorted(needed_operators(graph))]
    return sum(compute_time_s(operator) for operator in needed if operator.collective is None)


def compute_time_s(operator: Operator) -> float:
    """Return the least seconds of the compute stream that an operator takes; 0 on the host."""
    return min(0.0 if choice.on_host else choice.time_s for choice in choices_of(operator))


def overlapped_bound(graph: Graph, bound_s: float) -> float:
    """Return a lower bound with a network from one without it.

    The given bound holds for programs that compute their collectives. A program of time T on the
    network becomes one of these by waiting for each of its collectives, of N seconds in all. That
    makes it slower by at most N, and T ≥ N; so T ≥ bound - N, and T ≥ bound / 2.
    """
    if not graph.network_time_s:
        return bound_s
    return max(time_lower_bound(graph), bound_s / 2)


def relative_gap(value: float, bound: float) -> float:
    """Return a value's gap to its lower bound, as a share of that; 0.0 if the bound is 0."""
    return (value - bound) / bound if bound > 0 else 0.0


def needed_operators(graph: Graph) -> frozenset[int]:
    """Return the operators that every valid program runs: results and effects depend on them."""
    writers = _writers(graph)
    needed: set[int] = set()
    pending = [index for index, operator in enumerate(graph.operators) if operator.has_effects]
    pending += _only_writers(graph, writers, graph.kept)
    while pending:
        index = pending.pop()
        if index not in needed:
            needed.add(index)
            pending += _only_writers(graph, writers, sure_needs(graph.operators[index]))
    return frozenset(needed)


def spared_operators(graph: Graph) -> frozenset[int]:
    """Return the operators that a program may skip when others run by implementations that do not
    read their results (the logits of a chunked cross-entropy)."""
    return needed_operators(as_they_are(graph)) - needed_operators(graph)


def as_they_are(graph: Graph) -> Graph:
    """Return the graph whose operators run by their own implementation only."""
    operators = tuple(replace(o, implementations=()) for o in graph.operators)
    # Tensors that only implementations write are in no such graph.
    return replace(graph, operators=operators, allocator_owned=())


def _writers(graph: Graph) -> dict[int, set[int]]:
    """Map each tensor to the operators that can write it, by any implementation."""
    writers: dict[int, set[int]] = {}
    for index, operator in enumerate(graph.operators):
        for choice in choices_of(operator):
            for tensor in choice.writes:
                writers.setdefault(tensor, set()).add(index)
    return writers


def _only_writers(graph: Graph, writers: dict[int, set[int]], tensors: Iterable[int]) -> list[int]:
    """Return the operators that are the only writers of one of the tensors."""
    there = graph.resident | set(graph.tangents)
    found = [writers.get(tensor, set()) for tensor in tensors if tensor not in there]
    return [index for indices in found if len(indices) == 1 for index in indices]


def choices_of(operator: Operator) -> list[Operator | Variant]:
    """Return the operator under each of its implementations, its own first."""
    names = [None, *(choice.name for choice in operator.implementations)]
    return [variant(operator, name) for name in names]


def sure_reads(operator: Operator) -> frozenset[int]:
    """Return the tensors that every implementation reads."""
    return frozenset.intersection(*(frozenset(choice.reads) for choice in choices_of(operator)))


def sure_needs(operator: Operator) -> frozenset[int]:
    """Return the tensors that every implementation needs, on the device or on the host."""
    choices = choices_of(operator)
    return frozenset.intersection(
        *(frozenset(operator.reads if one.on_host else one.reads) for one in choices)
    )


def _graph_working_sets(graph: Graph) -> Iterator[int]:
    """Yield the bytes of live tensors, except unmovable resident ones and bytes outside the graph,
    at moments that no valid program avoids."""
    always = graph.resident.difference(graph.movable)
    sizes = [0 if t in always else tensor.size_bytes for t, tensor in enumerate(graph.tensors)]

    def total(tensors: Iterable[int]) -> int:
        return sum(sizes[tensor] for tensor in set(tensors))

    early = {
        tensor
        for index in range(graph.first_backward)
        for tensor in graph.operators[index].writes
        if tensor in graph.outputs
    }
    yield total(graph.kept_to_end)
    yield total(early)
    early.difference_update(graph.written_back)
    boundary = graph.first_backward < len(graph.operators) or bool(graph.tangents)
    if boundary:
        yield total((*early, *graph.tangents)) + graph.boundary_bytes
    after_boundary = early | (set(graph.tangents) & graph.kept)
    results = _results_before(graph)
    for index in needed_operators(graph):
        operator = graph.operators[index]
        held = results[index]
        if operator.phase is not Phase.FORWARD:
            held = held | after_boundary
        # An operator's first run: none of its results is live, so they come on top, or take over
        # the storage of a tensor that the operator overwrites.
        yield min(
            total({*held, *choice.reads} - {*choice.writes})
            + total(choice.writes)
            - (sizes[choice.writes[0]] if choice.in_place else 0)
            + (0 if choice.on_host else choice.workspace_bytes)
            for choice in choices_of(operator)
        )


def _results_before(graph: Graph) -> list[frozenset[int]]:
    """Return, for each operator, the kept tensors that it or an ancestor reads. They are live when
    it runs, since a result that was live once is never freed. (A result that nothing reads may have
    been transient in an early run of its operator.)"""
    before: list[frozenset[int]] = []
    through: dict[int, frozenset[int]] = {}
    writers = _writers(graph)
    for operator in graph.operators:
        reads = sure_reads(operator)
        sets = [through.get(tensor, frozenset()) for tensor in reads]
        before.append(frozenset().union(*sets) | (reads & graph.kept_to_end))
        for tensor in operator.writes:
            if len(writers[tensor]) == 1:
                through[tensor] = before[-1]
    return before
