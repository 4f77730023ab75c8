"""Finds updates that can run as one: they follow each other in a program, and have room."""

from __future__ import annotations

from memopt.models.graph import Graph, Phase
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Free, Program
from memopt.programs.moved import changed_by, moved_tensors
from memopt.programs.replay import outside_bytes, replay


def updates_together(
    graph: Graph, program: Program, most_bytes: int | None = None
) -> dict[int, tuple[int, ...]]:
    """Return the updates of a program that can run together, where the first of them is.

    Nothing but Frees stands between them, so that all their gradients are there before the first.
    Their workspaces, all at once, must leave the program's peak as it is, outside of an arena if it
    has one. Updates of a program with collectives, of moved tensors or on the host stay alone.

    Args:
        graph: the cost model of the program.
        program: valid.
        most_bytes: the most bytes of the gradients of those that run together; None: any number.

    Returns:
        Position of the first update → the positions of all, at least two.
    """
    if not any(operator.phase is Phase.UPDATE for operator in graph.operators):
        return {}
    if any(operator.collective is not None for operator in graph.operators):
        return {}
    used = replay(graph, program).step_bytes
    if program.offsets is not None:
        used = outside_bytes(graph, program, used)
    peak_bytes = max(used)
    moved = moved_tensors(graph, program)
    found: dict[int, tuple[int, ...]] = {}
    run: list[int] = []
    room_bytes = gradient_bytes = 0

    def close() -> None:
        if len(run) > 1:
            found[run[0]] = tuple(run)
        run.clear()

    for position, instruction in enumerate(program.instructions):
        if isinstance(instruction, Free):
            continue
        sizes = None
        if isinstance(instruction, Compute):
            sizes = _sizes(graph, instruction, moved)
        if sizes is None:
            close()
            continue
        workspace_bytes, own_bytes = sizes
        full = most_bytes is not None and gradient_bytes + own_bytes > most_bytes
        if run and (full or workspace_bytes > room_bytes):
            close()
        if not run:
            room_bytes, gradient_bytes = peak_bytes - used[position] + workspace_bytes, 0
        run.append(position)
        room_bytes -= workspace_bytes
        gradient_bytes += own_bytes
    close()
    return found


def _sizes(graph: Graph, instruction: Compute, moved: frozenset[int]) -> tuple[int, int] | None:
    """Return the bytes of an update's workspace and of its gradient; None: it stays alone."""
    operator = graph.operators[instruction.op]
    chosen = variant(operator, instruction.implementation)
    if operator.phase is not Phase.UPDATE or operator.random or chosen.on_host:
        return None
    if not moved.isdisjoint((*chosen.reads, *changed_by(graph, operator))):
        return None
    own = [graph.tensors[t].size_bytes for t in chosen.reads if t not in graph.resident]
    return chosen.workspace_bytes, sum(own)
