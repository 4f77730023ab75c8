"""The updates of a base program that the host may run, and the shares of them that are tried.

The gradient of such an update goes to the host where the base frees it. Parameter and state stay
there, so neither is fetched for the update nor copied back after it. (ZeRO-Offload,
arXiv:2101.06840, does so with all updates or none.) The first updates of the step are taken first,
so that the host finishes them before the step ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from memopt.models.graph import Graph
from memopt.models.variants import variant
from memopt.programs.instructions import Free, Program

SHARES = (1.0, 0.0, 0.75, 0.5, 0.25)
"""Shares of the bytes that updates change, to be changed by the host."""


@dataclass(frozen=True)
class HostUpdate:
    """An update that the host runs.

    Attributes:
        op: the operator.
        implementation: the name of its implementation on the host.
        gradient: the tensor that is copied to the host for it.
        time_s: seconds of the host.
    """

    op: int
    implementation: str
    gradient: int
    time_s: float


def without_host_updates(graph: Graph, *, inexact_only: bool = False) -> Graph:
    """Make all updates run on the device; or only those that round differently on the host."""
    operators = []
    for one in graph.operators:
        kept = tuple(c for c in one.implementations if not c.on_host or (inexact_only and c.exact))
        operators.append(one if kept == one.implementations else replace(one, implementations=kept))
    return replace(graph, operators=tuple(operators))


def possible(graph: Graph, program: Program) -> list[HostUpdate]:
    """Return the updates of a program that the host could run, in its order: those whose gradient
    is one tensor, which the program does not move, and frees after them."""
    moved = {t for x in program for t in x.effects(graph).host_begins}
    freed = set(_frees(program).values())
    found = []
    for _, run in program.computes:
        operator = graph.operators[run.op]
        name = next((c.name for c in operator.implementations if c.on_host), None)
        made = [t for t in dict.fromkeys(operator.reads) if t not in graph.resident]
        if name is None or len(made) != 1 or made[0] in moved or made[0] not in freed:
            continue
        time_s = variant(operator, name).time_s
        found.append(HostUpdate(run.op, name, made[0], time_s))
    return found


def shares(graph: Graph, updates: list[HostUpdate]) -> Iterator[tuple[HostUpdate, ...]]:
    """Yield the updates for the host to run: for each of `SHARES`, as many of the first as have
    that share of all bytes. All of them come first."""
    sizes = [
        sum(graph.tensors[t].size_bytes for t in graph.operators[one.op].reads) for one in updates
    ]
    seen = set()
    for share in SHARES:
        left, count = share * sum(sizes), 0
        while count < len(updates) and left >= sizes[count]:
            left -= sizes[count]
            count += 1
        if count not in seen:
            seen.add(count)
            yield tuple(updates[:count])


def without(
    program: Program, updates: tuple[HostUpdate, ...]
) -> tuple[Program, dict[int, HostUpdate]]:
    """Return the program without these updates, and a map from positions in it: from each Free of
    an update's gradient to the update."""
    if not updates:
        return program, {}
    ops = {one.op for one in updates}
    gone = {position for position, run in program.computes if run.op in ops}
    rest = Program(x for position, x in enumerate(program) if position not in gone)
    gradients = {one.gradient: one for one in updates}
    freed = _frees(rest).items()
    return rest, {i: gradients[tensor] for i, tensor in freed if tensor in gradients}


def _frees(program: Program) -> dict[int, int]:
    """Map positions of Frees to their tensors."""
    return {position: x.tensor for position, x in enumerate(program) if isinstance(x, Free)}
