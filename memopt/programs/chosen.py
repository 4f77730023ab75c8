"""A graph in which one way to run operators is the only one."""

from __future__ import annotations

from dataclasses import replace

from memopt.models.graph import Graph, Operator


def with_chosen(graph: Graph, name: str) -> Graph:
    """Return the graph whose operators run by the implementation of this name where they have it,
    by their own elsewhere. Operators whose results nothing reads then are left out."""
    chosen = [_by(operator, name) for operator in graph.operators]
    wanted = {*graph.outputs, *graph.gradients}
    kept: list[Operator] = []
    for operator in reversed(chosen):
        if operator.has_effects or not wanted.isdisjoint(operator.writes):
            kept.append(operator)
            wanted.update(operator.reads)
    kept.reverse()
    computed = {t for operator in kept for t in operator.writes}
    owned = tuple(t for t in graph.allocator_owned if t in computed)
    return replace(graph, operators=tuple(kept), allocator_owned=owned)


def _by(operator: Operator, name: str) -> Operator:
    way = next((one for one in operator.implementations if one.name == name), None)
    if way is None:
        return replace(operator, implementations=())
    return replace(
        operator,
        reads=operator.reads if way.reads is None else way.reads,
        writes=operator.writes if way.writes is None else way.writes,
        time_s=way.time_s,
        workspace_bytes=way.workspace_bytes,
        in_place=way.in_place,
        implementations=(),
    )
