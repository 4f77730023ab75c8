"""Checks of a graph's implementations and results, which `memopt.models.graph` makes."""

from __future__ import annotations

from typing import Any


def check_written_back(graph: Any) -> None:
    """Check that nothing but the loss boundary needs what is written back."""
    needed = {*graph.gradients, *graph.tangents}
    for operator in graph.operators:
        needed.update(operator.reads, *(way.reads or () for way in operator.implementations))
    for index in graph.written_back:
        if index not in graph.outputs or index in graph.resident or index in needed:
            raise ValueError(
                f"Graph: tensor {index} is written back: a computed output, which nothing reads"
            )
    if graph.written_back and graph.is_forward:
        raise ValueError("Graph: values are written back at a loss boundary; there is none")


def check_implementations(graph: Any, operator: Any) -> None:
    """Check an operator's implementations, and what each may overwrite."""
    owner = f"Graph: operator {operator.name!r}"
    _check_in_place(graph, owner, operator.in_place, operator.reads, operator.writes)
    names: set[str] = set()
    for choice in operator.implementations:
        owner = f"Graph: operator {operator.name!r}, implementation {choice.name!r}"
        if choice.name in names:
            raise ValueError(f"{owner}: the name is used twice")
        names.add(choice.name)
        for index in (*(choice.reads or ()), *(choice.writes or ())):
            if not 0 <= index < len(graph.tensors):
                raise ValueError(f"{owner}: there is no tensor {index}")
        for index in choice.writes or ():
            if graph.tensors[index].resident or index in graph.tangents:
                name = graph.tensors[index].name
                raise ValueError(f"{owner}: {name!r} cannot be written")
        reads = operator.reads if choice.reads is None else choice.reads
        writes = operator.writes if choice.writes is None else choice.writes
        _check_in_place(graph, owner, choice.in_place, reads, writes)
        if choice.on_host and not operator.changes_in_place:
            raise ValueError(f"{owner}: only updates run on the host")
        for index in operator.reads if choice.on_host else ():
            if index not in (graph.movable if graph.tensors[index].resident else graph.computed):
                name = graph.tensors[index].name
                raise ValueError(f"{owner}: {name!r} cannot be on the host")


def _check_in_place(
    graph: Any,
    owner: str,
    in_place: tuple[int, ...],
    reads: tuple[int, ...],
    writes: tuple[int, ...],
) -> None:
    for index in in_place:
        if index not in reads or not writes:
            raise ValueError(f"{owner}: in_place needs an output, and tensors that it reads")
        taken, made = graph.tensors[index], graph.tensors[writes[0]]
        if taken.resident or index in graph.tangents or taken.size_bytes != made.size_bytes:
            raise ValueError(f"{owner}: its output cannot take over {taken.name!r}")
