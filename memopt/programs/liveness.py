"""Lifetimes: the written tensors that a program keeps, and its frees."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto

from memopt.errors import InvalidProgramError
from memopt.models.graph import Graph, Phase
from memopt.models.last_of import LastOf
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Free, Instruction, LossBoundary, Program


class _Future(Enum):
    """The next event of a tensor's present device copy."""

    DEAD = auto()
    READ = auto()
    """Read later; with_frees frees it after its last reader, or it is kept to the end."""
    FREED = auto()
    """The caller's own Free comes later."""


def computes(graph: Graph, operators: Iterable[int | None]) -> tuple[Instruction, ...]:
    """Return Compute instructions for operator indices, in order, for `with_frees` to complete.

    Args:
        graph: the graph the indices refer to.
        operators: operator indices, an operator as often as it is to run; None marks the loss
            boundary. Without a None the boundary comes before the first operator that is not
            forward, or at the end if there is none but the graph has tangents.

    Returns:
        One Compute per operator, its `outputs` left empty, and the LossBoundary.
    """
    indices = list(operators)
    if None not in indices:
        for position, index in enumerate(indices):
            if index is not None and graph.operators[index].phase is not Phase.FORWARD:
                indices.insert(position, None)
                break
        else:
            if graph.tangents:
                indices.append(None)
    return tuple(LossBoundary() if i is None else Compute(i, ()) for i in indices)


def with_frees(graph: Graph, instructions: Iterable[Instruction]) -> tuple[Instruction, ...]:
    """Complete instructions with the shortest lifetimes: outputs and frees.

    Every Compute's `outputs` is replaced by the tensors it writes that are needed afterwards:
    read (by a Compute, a SwapOut or the boundary) or freed by the caller's own Free before they
    are computed or swapped in again, or kept to the end (`graph.kept_to_end`, at their first
    computation only). So a tensor that is re-computed is not held until then: its earlier
    instance ends at its last reader, which never costs more memory, since the re-run is charged
    for it anyway. A Free follows the last reader of each instance, and the boundary for a tangent
    that nothing reads and the framework does not hold. Kept tensors are never freed, nor those
    that the boundary writes back.

    A Free in the input stays, and ends its instance. Give one after a SwapOut where the copy
    should be over (a Free waits for it); else it comes right after the SwapOut.
    DropHost is left to the caller, and so is everything about movable tensors.

    Raises:
        InvalidProgramError: a tensor is read and nothing before it puts it on the device.
    """
    program = tuple(instructions)
    first = _first_computations(graph, program)
    dead, kept_to_end = _Future.DEAD, graph.kept_to_end
    future = [_Future.READ if i in kept_to_end else dead for i in range(len(graph.tensors))]
    backwards: list[Instruction] = []
    for position in range(len(program) - 1, -1, -1):
        instruction = program[position]
        if isinstance(instruction, Compute):
            chosen = variant(graph.operators[instruction.op], instruction.implementation)
            reads, kept = chosen.reads, []
            for tensor in chosen.writes:
                if tensor in kept_to_end:
                    if first[tensor] == position:
                        kept.append(tensor)
                        future[tensor] = dead
                elif future[tensor] is not dead:
                    kept.append(tensor)
                    future[tensor] = dead
            instruction = Compute(instruction.op, tuple(kept), instruction.implementation)
        else:
            effects = instruction.effects(graph)
            reads = effects.reads
            if graph.movable and effects.touches & graph.resident:
                backwards.append(instruction)
                continue
            for tensor in effects.ends:
                if future[tensor] is _Future.READ:
                    name = graph.tensors[tensor].name
                    raise InvalidProgramError(f"instruction {position} frees {name!r}, read later")
                future[tensor] = _Future.FREED
            _appear(effects.begins, future, backwards)
        _read(graph, reads, future, backwards)
        backwards.append(instruction)
    for tensor, after in enumerate(future):
        if after is not _Future.DEAD:
            name = graph.tensors[tensor].name
            raise InvalidProgramError(f"{name!r} is needed before anything computes it")
    backwards.reverse()
    return tuple(backwards)


_STORED = LastOf[Program]()


def store_all(graph: Graph) -> Program:
    """Run every operator once, in the graph's order; free each tensor after its last reader."""
    operators = range(len(graph.operators))
    return _STORED.of(
        (graph,), None, lambda: Program(with_frees(graph, computes(graph, operators)))
    )


def _first_computations(graph: Graph, program: tuple[Instruction, ...]) -> dict[int, int]:
    """Map each tensor to the position of the first Compute that writes it."""
    first: dict[int, int] = {}
    for position, instruction in enumerate(program):
        if isinstance(instruction, Compute):
            chosen = variant(graph.operators[instruction.op], instruction.implementation)
            for tensor in chosen.writes:
                first.setdefault(tensor, position)
    return first


def _read(
    graph: Graph,
    tensors: Iterable[int],
    future: list[_Future],
    backwards: list[Instruction],
) -> None:
    """Record a reader of tensors. The walk goes backwards, so that the first reader of a tensor it
    meets is the last to run, and a Free follows that."""
    resident, dead = graph.resident, _Future.DEAD
    for tensor in tensors:
        if future[tensor] is dead and tensor not in resident:
            backwards.append(Free(tensor))
            future[tensor] = _Future.READ


def _appear(tensors: Iterable[int], future: list[_Future], backwards: list[Instruction]) -> None:
    """Record tensors that become live without being computed here; one that nothing reads is freed
    at once."""
    for tensor in tensors:
        if future[tensor] is _Future.DEAD:
            backwards.append(Free(tensor))
        future[tensor] = _Future.DEAD
