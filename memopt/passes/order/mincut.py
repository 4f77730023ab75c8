"""Lower bounds on the memory of any order, operator by operator.

For a task v let X be the tasks executed before it in some order: X contains the ancestors of v,
neither v nor its descendants, and is closed under predecessors. Live when v starts are
the values produced in X that are kept or have a consumer outside X. The least such bytes over
all X is a minimum cut: a network with one node per value, arc producer → value of the value's
size, value → consumer and task → predecessor unbounded, the ancestors merged into the source, v
and its descendants into the sink. Adding v's outputs and transient bytes gives a bound on every
order (docs/strategies/olla.md).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from memopt.passes.order.tasks import Tasks, members

FREE, SOURCE, SINK = -1, 0, 1


def forced_live(tasks: Tasks, over: Callable[[], bool] = bool) -> list[int]:
    """Bound the memory while each task runs, without any flow: count the values whose producer must
    precede it and that are kept, or have a consumer that is the task or must follow it. Values
    are left out from when the time is `over` on."""
    outside = [tasks.descendants[task] | 1 << task for task in range(len(tasks))]
    bounds = [
        tasks.base + tasks.output_bytes[task] + tasks.transient[task] for task in range(len(tasks))
    ]
    for number, value in enumerate(tasks.values):
        if number % 64 == 0 and over():
            break
        # v must run after the producer and before (or as) some consumer.
        later = tasks.descendants[value.producer]
        if not value.kept:
            earlier = 0
            for consumer in value.consumers:
                earlier |= tasks.ancestors[consumer] | 1 << consumer
            later &= earlier
        for task in members(later):
            if value.kept or any(outside[task] >> c & 1 for c in value.consumers):
                bounds[task] += value.size
    return bounds


def last_task_bound(tasks: Tasks) -> int:
    """Bound every order by its end: some task without successors runs last, while all kept values,
    the values it consumes and its transient bytes are live."""
    kept = tasks.base + sum(value.size for value in tasks.values if value.kept)
    beside = [
        tasks.transient[task]
        + sum(tasks.values[v].size for v in tasks.consumed[task] if not tasks.values[v].kept)
        + sum(tasks.values[v].size for v in tasks.produced[task] if not tasks.values[v].kept)
        for task in range(len(tasks))
        if not tasks.following[task]
    ]
    return kept + min(beside, default=0)


def minimum_cut(tasks: Tasks, task: int) -> tuple[int, int]:
    """Return (a bound on the memory while `task` runs in any order, the set X that attains it).

    The set is a bit mask of the tasks executed before `task`, closed under predecessors.
    """
    from ortools.graph.python.max_flow import SimpleMaxFlow

    side = np.full(len(tasks), FREE, dtype=np.int64)
    side[members(tasks.ancestors[task])] = SOURCE
    side[members(tasks.descendants[task] | 1 << task)] = SINK
    free = np.flatnonzero(side == FREE)
    # Nodes: 0 source, 1 sink, free tasks, then values.
    node = side.copy()
    node[free] = 2 + np.arange(len(free))
    unbounded = 1 + sum(value.size for value in tasks.values)
    arcs: list[tuple[int, int, int]] = []
    constant = 0
    nodes = 2 + len(free)
    for value in tasks.values:
        producer = int(node[value.producer])
        if producer == SINK or value.size == 0:
            continue
        heads = {int(node[consumer]) for consumer in value.consumers}
        if value.kept or SINK in heads:
            if producer == SOURCE:
                constant += value.size
            else:
                arcs.append((producer, SINK, value.size))
            continue
        heads.discard(SOURCE)
        if heads and heads != {producer}:
            arcs.append((producer, nodes, value.size))
            arcs.extend((nodes, head, unbounded) for head in heads)
            nodes += 1
    for index in free.tolist():
        for other in tasks.before[index]:
            if side[other] != SOURCE:
                arcs.append((int(node[index]), int(node[other]), unbounded))
    network = SimpleMaxFlow()
    tails, heads_of, capacities = np.array(arcs, dtype=np.int64).reshape(-1, 3).T
    network.add_arcs_with_capacity(tails, heads_of, capacities)
    network.solve(SOURCE, SINK)
    reached = set(network.get_source_side_min_cut())
    executed = tasks.ancestors[task]
    for index in free.tolist():
        if int(node[index]) in reached:
            executed |= 1 << index
    own = tasks.output_bytes[task] + tasks.transient[task]
    return tasks.base + constant + network.optimal_flow() + own, executed
