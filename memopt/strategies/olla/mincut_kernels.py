"""Compiled maximum flow (Dinic) with 64-bit capacities: bytes need no scaling."""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.strategies.olla.buffers import Ints

UNBOUNDED = 1 << 61


@njit(cache=True)
def _levels(
    source: int, start: Ints, heads: Ints, capacity: Ints, level: Ints, queue: Ints
) -> None:
    """Distance of every node from the source in the residual graph; -1: unreachable."""
    level[:] = -1
    level[source] = 0
    queue[0] = source
    done, count = 0, 1
    while done < count:
        node = queue[done]
        done += 1
        for arc in range(start[node], start[node + 1]):
            head = heads[arc]
            if capacity[arc] > 0 and level[head] < 0:
                level[head] = level[node] + 1
                queue[count] = head
                count += 1


@njit(cache=True)
def maximum_flow(
    source: int, sink: int, start: Ints, heads: Ints, twins: Ints, capacity: Ints, level: Ints
) -> int:
    """The value of a maximum flow; `capacity` becomes the residual capacities and `level` is
    ≥ 0 exactly on the source's side of a minimum cut.

    Arcs of node i are start[i] to start[i+1] (excluded); twins[a] is arc a's reverse.
    """
    nodes = start.shape[0] - 1
    queue = np.empty(nodes, np.int64)
    next_arc = np.empty(nodes, np.int64)
    path = np.empty(nodes, np.int64)
    total = 0
    while True:
        _levels(source, start, heads, capacity, level, queue)
        if level[sink] < 0:
            return total
        next_arc[:] = start[:-1]
        depth, node = 0, source
        while True:
            if node == sink:
                push = UNBOUNDED
                for k in range(depth):
                    push = min(push, capacity[path[k]])
                total += push
                first_full = depth
                for k in range(depth - 1, -1, -1):
                    capacity[path[k]] -= push
                    capacity[twins[path[k]]] += push
                    if capacity[path[k]] == 0:
                        first_full = k
                depth = first_full
                node = heads[twins[path[depth]]]
                continue
            advanced = False
            while next_arc[node] < start[node + 1]:
                arc = next_arc[node]
                if capacity[arc] > 0 and level[heads[arc]] == level[node] + 1:
                    path[depth] = arc
                    depth += 1
                    node = heads[arc]
                    advanced = True
                    break
                next_arc[node] += 1
            if not advanced:
                if depth == 0:
                    break
                level[node] = -1
                depth -= 1
                node = heads[twins[path[depth]]]
                next_arc[node] += 1
