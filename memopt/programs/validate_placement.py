"""The independent check of a placement: every pair of lifetimes, O(n²) on purpose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memopt.models.graph import Graph, Operator
from memopt.programs.instructions import Compute, Instruction, LossBoundary, Program
from memopt.programs.violations import Violation, ViolationCode, first

Code = ViolationCode


class LiveRange(NamedTuple):
    """One lifetime of a tensor in memory: instructions [begin, end)."""

    tensor: int
    begin: int
    end: int


def tensors_of(operator: Operator, name: str | None) -> tuple[Sequence[int], Sequence[int], int]:
    """Return (reads, writes, workspace) of the chosen implementation."""
    for choice in operator.implementations:
        if name is not None and choice.name == name:
            reads = operator.reads if choice.reads is None else choice.reads
            writes = operator.writes if choice.writes is None else choice.writes
            return reads, writes, choice.workspace_bytes
    return operator.reads, operator.writes, operator.workspace_bytes


def given_up(graph: Graph, instruction: Instruction) -> Sequence[int]:
    """Return the tensors whose memory is free, or another tensor's, while an instruction runs that
    ends them."""
    if isinstance(instruction, LossBoundary):
        return graph.written_back
    taken = instruction.in_place if isinstance(instruction, Compute) else None
    return () if taken is None else (taken,)


def misplaced(
    graph: Graph,
    program: Program,
    lifetimes: Sequence[LiveRange],
    outside_bytes: int,
    budget_bytes: int | None,
) -> Violation | None:
    """Return what is wrong with `program.offsets`; None: nothing.

    Every lifetime that begins at a Compute or SwapIn has an offset or is named in
    `program.unplaced`. Lifetimes of results (`graph.kept`), which the user may hold beyond the
    step, and transient outputs may have one. Tangents come from outside and have none, nor have
    the tensors that the graph lists as `allocator_owned`. Workspace is not placed."""
    ranges = {(x.begin, x.tensor): x for x in lifetimes}
    placed: dict[tuple[int, int], tuple[LiveRange, int]] = {}
    found: list[Violation] = []
    for position, tensor, offset in program.offsets or ():
        one = ranges.get((position, tensor)) or _transient(graph, program, position, tensor)
        if one is None or tensor in graph.tangents or tensor in graph.allocator_owned:
            message = f"tensor {tensor} does not appear here, or is not to be placed"
            found.append(Violation(Code.OFFSET_STRAY, position, message))
        elif (position, tensor) in placed:
            found.append(Violation(Code.OFFSET_REPEATED, position, f"tensor {tensor}"))
        elif offset < 0:
            found.append(Violation(Code.OFFSET_NEGATIVE, position, f"tensor {tensor}"))
        else:
            placed[position, tensor] = one, offset
    free = {*graph.outputs, *graph.gradients, *graph.tangents, *graph.allocator_owned}
    unplaced = set(program.unplaced)
    for one in lifetimes:
        key = one.begin, one.tensor
        if one.tensor not in free and key not in placed and key not in unplaced:
            name = graph.tensors[one.tensor].name
            found.append(Violation(Code.OFFSET_MISSING, one.begin, f"{name!r}"))
    for position, tensor in unplaced:
        if (position, tensor) in placed or (position, tensor) not in ranges:
            message = f"tensor {tensor} is apart, but has an offset or does not appear here"
            found.append(Violation(Code.OFFSET_STRAY, position, message))
    if found:
        return first(found)
    moved = _moved(graph, program, lifetimes, placed)
    if moved is not None:
        return moved
    overlap = _overlap(graph, list(placed.values()))
    if overlap is not None:
        return overlap
    ends = [offset + graph.tensors[x.tensor].size_bytes for x, offset in placed.values()]
    arena_bytes = max(ends, default=0)
    if budget_bytes is not None and arena_bytes + outside_bytes > budget_bytes:
        message = f"arena {arena_bytes} + outside {outside_bytes} bytes"
        return Violation(Code.ARENA_OVER_BUDGET, len(program), message)
    return None


def _moved(
    graph: Graph,
    program: Program,
    lifetimes: Sequence[LiveRange],
    placed: Mapping[tuple[int, int], tuple[LiveRange, int]],
) -> Violation | None:
    """Find a Compute in place whose output has another offset than the tensor it overwrites."""
    begin = {(x.tensor, x.end): x.begin for x in lifetimes}
    for position, instruction in enumerate(program):
        if not isinstance(instruction, Compute) or instruction.in_place is None:
            continue
        _, writes, _ = tensors_of(graph.operators[instruction.op], instruction.implementation)
        taken, made = instruction.in_place, writes[0]
        keys = ((begin[taken, position], taken), (position, made))
        here = [placed[key][1] for key in keys if key in placed]
        if here[:1] != here[1:]:
            return Violation(Code.IN_PLACE, position, f"tensor {made} over {taken}, at {here}")
    return None


def _transient(graph: Graph, program: Program, position: int, tensor: int) -> LiveRange | None:
    """Return the lifetime of a written tensor that is not kept: its Compute alone."""
    if not 0 <= position < len(program):
        return None
    instruction = program.instructions[position]
    if not isinstance(instruction, Compute) or tensor in instruction.outputs:
        return None
    _, writes, _ = tensors_of(graph.operators[instruction.op], instruction.implementation)
    return LiveRange(tensor, position, position + 1) if tensor in writes else None


def _overlap(graph: Graph, placed: Sequence[tuple[LiveRange, int]]) -> Violation | None:
    """Find the first lifetime that shares addresses with one that is live at its begin."""
    ranges = sorted(placed, key=lambda pair: pair[0].begin)
    begin = np.array([x.begin for x, _ in ranges], dtype=np.int64)
    end = np.array([x.end for x, _ in ranges], dtype=np.int64)
    low = np.array([offset for _, offset in ranges], dtype=np.int64)
    high = low + np.array([graph.tensors[x.tensor].size_bytes for x, _ in ranges], dtype=np.int64)
    for i, (one, offset) in enumerate(ranges):
        # Earlier ranges began no later, so they meet this one if they end after its begin.
        shared = np.maximum(low[:i], low[i]) < np.minimum(high[:i], high[i])
        clash = (begin[i] < end[:i]) & shared
        if clash.any():
            other = ranges[int(np.argmax(clash))][0]
            names = (graph.tensors[one.tensor].name, graph.tensors[other.tensor].name)
            message = f"{names[0]!r} at {offset} and {names[1]!r}, live since {other.begin}"
            return Violation(Code.ADDRESSES_OVERLAP, one.begin, message)
    return None
