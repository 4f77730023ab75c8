"""Computing in place (MONeT appendix C.1): an output takes over the storage of a dying tensor.

A pass over finished programs. The graph says which tensors an operator may overwrite, and under
which implementation (`Operator.in_place`, `Implementation.in_place`); whether one dies there
depends on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from memopt.models.graph import Graph
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Free, Instruction, Program


def with_in_place(graph: Graph, program: Program) -> Program:
    """Compute in place wherever the program allows it.

    If a Compute is followed by the Free of a tensor that it may overwrite, and the tensor is
    neither being copied to the host nor sent by a collective, the first output takes over its
    storage. Programs with a placement stay as they are: their tensors have addresses already.

    Laws: the replayed peak is at most the program's, the time is the same.
    """
    if program.offsets is not None:
        return program
    made: list[Instruction] = []
    leaving: set[int] = set()
    waiting, operators = list(reversed(program.instructions)), graph.operators
    while waiting:
        instruction = waiting.pop()
        if isinstance(instruction, Compute):
            frees: list[Free] = []
            while waiting and isinstance(waiting[-1], Free):
                frees.append(waiting.pop())  # type: ignore[arg-type]  # checked in the condition
            taken = _overwritten(graph, instruction, frees, leaving) if frees else None
            if taken is not None:
                op, kept, chosen = instruction.op, instruction.outputs, instruction.implementation
                instruction = Compute(op, kept, chosen, taken.tensor)
                frees.remove(taken)
            made.append(instruction)
            made += frees
            if leaving:
                leaving.difference_update(instruction.outputs)
            if operators[instruction.op].collective is not None:
                leaving.update(operators[instruction.op].reads)
            continue
        effects = instruction.effects(graph)
        leaving.update(effects.host_begins)
        leaving.difference_update(effects.host_ends, effects.begins)
        made.append(instruction)
    return Program(made)


def without_in_place(
    program: Program, separate: Callable[[Compute], bool] = lambda _: True
) -> Program:
    """Give every output a storage of its own, or only those of Computes that `separate` accepts."""
    made: list[Instruction] = []
    for instruction in program:
        if (
            isinstance(instruction, Compute)
            and instruction.in_place is not None
            and separate(instruction)
        ):
            made += [replace(instruction, in_place=None), Free(instruction.in_place)]
        else:
            made.append(instruction)
    return Program(made, program.offsets)


def taken_over(instructions: Iterable[Instruction]) -> frozenset[int]:
    """Return the tensors whose storage an output takes over."""
    taken = (one.in_place for one in instructions if isinstance(one, Compute))
    return frozenset(tensor for tensor in taken if tensor is not None)


def _overwritten(
    graph: Graph, instruction: Compute, frees: list[Free], leaving: set[int]
) -> Free | None:
    """Return the Free that computing in place replaces."""
    if instruction.in_place is not None:
        return None
    chosen = variant(graph.operators[instruction.op], instruction.implementation)
    possible = set(chosen.in_place) - leaving
    return next((free for free in frees if free.tensor in possible), None)
