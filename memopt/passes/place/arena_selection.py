"""Selects the buffers of an arena that, with all memory outside it, stays within a limit.

A placed plan needs the arena, for the whole step, and the largest memory outside it at any
instruction: workspace, tangents, tensors that kernels allocate themselves. The two peak at
different instructions, so placing everything may cost more than the liveness peak. A lifetime that
is left to the allocator makes the arena smaller where it is live, and the memory outside larger
only there.

With s_i the bytes of buffer i, f_t the memory always outside at time point t, and x_i whether i is
placed: the most bytes Σ s_i x_i such that A + O <= limit, Σ_{i live at t} s_i x_i <= A and f_t +
Σ_{i live at t} s_i (1 - x_i) <= O for all t. Greedily, for several values of A: the best is often
just below the largest, limit - max f_t, so they are dense there.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from memopt.models.graph import Graph
from memopt.passes.place.buffers import Buffer
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import Ints, live_bytes
from memopt.programs.replay import replay

STEPS = 24
"""Capacities tried: this many evenly spaced ones, and as many at distances that halve."""


def select_buffers(
    graph: Graph, program: Program, buffers: Sequence[Buffer], limit_bytes: int
) -> tuple[Buffer, ...] | None:
    """Select the buffers to place: as many bytes as the search finds. None: the program exceeds the
    limit whatever is placed.

    Args:
        graph: the cost model of the program.
        program: valid, without offsets.
        buffers: its lifetimes that could be placed.
        limit_bytes: for the arena (assumed as large as its fullest instant) and all memory outside
            it, resident included.
    """
    lower, upper, total = _time_points(graph, program, buffers)
    raw = np.array([buffer.size for buffer in buffers], dtype=np.int64)
    size = np.array([buffer.extent for buffer in buffers], dtype=np.int64)
    fixed = total - live_bytes(lower, upper, raw, len(total))
    if int(total.max(initial=0)) > limit_bytes:
        return None
    inside = live_bytes(lower, upper, size, len(total))
    largest = limit_bytes - int(fixed.max(initial=0))
    if int(inside.max(initial=0)) <= largest:
        return tuple(buffers)
    from memopt.passes.place.arena_selection_kernels import leave_out

    best, best_bytes = np.zeros(len(buffers), dtype=np.bool_), 0
    below = {
        0,
        *(largest * k // STEPS for k in range(STEPS)),
        *(largest >> k for k in range(STEPS)),
    }
    for capacity, shortest in product(sorted({largest - x for x in below}), (False, True)):
        room = limit_bytes - capacity
        placed, kept = leave_out(lower, upper, size, fixed, inside, capacity, room, shortest)
        if kept and int(size[placed].sum()) > best_bytes:
            best, best_bytes = placed, int(size[placed].sum())
    return tuple(buffer for buffer, placed in zip(buffers, best, strict=True) if placed)


def _time_points(
    graph: Graph, program: Program, buffers: Sequence[Buffer]
) -> tuple[Ints, Ints, Ints]:
    """Return (first time point of each buffer, its end, bytes at each time point). Time points are
    instructions other than frees, which never need more than the instruction before."""
    before = np.array(program.steps_before, dtype=np.int64)
    lower = before[[buffer.lower for buffer in buffers]]
    upper = before[[buffer.upper for buffer in buffers]]
    total = np.array(replay(graph, program).step_bytes, dtype=np.int64)[list(program.steps)]
    return lower, upper, total
