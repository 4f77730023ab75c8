"""Exact reductions of the ordering problem: tasks whose place needs no search.

* A task that needs no memory of its own (no outputs, no transient bytes: an in-place update, a
  free) should run as soon as it can: it never raises memory, and its frees come early. So it is
  left out, and its predecessors hold the values it consumes. OLLA §4.3 (Functions 3 and 4)
  approximates this with control edges to an anchor. The task stays in when a task would
  otherwise have to hold a value that may be produced after it.
* A task that every other one must precede or follow is a cut point. (Tasks without memory of
  their own do not count: they follow their last predecessor at once.) The set of tasks before it
  is the same in every order, so the parts between cut points are independent problems.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from memopt.passes.order.tasks import Tasks, Value, mask_of


def without_free_tasks(tasks: Tasks) -> tuple[Tasks, tuple[int, ...]]:
    """Leave out the tasks that need no memory of their own.

    Returns (the smaller problem, the original task of each of its tasks). The smallest peak is
    the same; `expand_order` turns its orders into orders of the original problem.
    """
    stand_ins: dict[int, set[int]] = {}

    def expand(group: Sequence[int]) -> set[int]:
        found: set[int] = set()
        for task in group:
            found |= stand_ins.get(task, {task})
        return found

    candidates = free_tasks(tasks)
    for task in tasks.topological:
        if task in candidates:
            earlier = expand(tasks.before[task])
            if all(
                _ordered(tasks, tasks.values[v].producer, earlier) for v in tasks.consumed[task]
            ):
                stand_ins[task] = earlier
    kept = [task for task in range(len(tasks)) if task not in stand_ins]
    index = {task: i for i, task in enumerate(kept)}

    transient = [tasks.transient[task] for task in kept]
    values = []
    for value in tasks.values:
        if value.producer in stand_ins:
            continue
        # Tasks that run before the producer anyway do not prolong the value's life.
        consumers = {
            task
            for task in expand(value.consumers)
            if tasks.descendants[value.producer] >> task & 1
        }
        producer = index[value.producer]
        if consumers or value.kept:
            listed = tuple(sorted(index[task] for task in consumers))
            values.append(Value(value.size, producer, listed, value.kept))
        else:
            transient[producer] += value.size
    after = tuple(
        tuple(sorted(index[task] for task in expand(tasks.after[old]) - {old})) for old in kept
    )
    return Tasks(tuple(transient), tuple(values), after, tasks.base), tuple(kept)


def free_tasks(tasks: Tasks) -> set[int]:
    """Return the tasks that need no memory of their own."""
    produce = {value.producer for value in tasks.values if value.size > 0 or value.consumers}
    return {t for t in range(len(tasks)) if tasks.transient[t] == 0 and t not in produce}


def _ordered(tasks: Tasks, producer: int, others: set[int]) -> bool:
    """Tell whether each of the others is the producer, or must precede or follow it."""
    related = tasks.ancestors[producer] | tasks.descendants[producer] | 1 << producer
    return all(related >> task & 1 for task in others)


def expand_order(tasks: Tasks, original: Sequence[int], order: Sequence[int]) -> list[int]:
    """Turn an order of `without_free_tasks(tasks)` into one of `tasks`: the tasks left out run as
    soon as they can."""
    waiting = [len(earlier) for earlier in tasks.before]
    planned = {original[task] for task in order}
    result: list[int] = []

    def run(task: int) -> None:
        result.append(task)
        ready: list[int] = []
        for other in tasks.following[task]:
            waiting[other] -= 1
            if waiting[other] == 0 and other not in planned:
                heapq.heappush(ready, other)
        while ready:
            run(heapq.heappop(ready))

    for task in [t for t in range(len(tasks)) if waiting[t] == 0 and t not in planned]:
        run(task)
    for task in order:
        run(original[task])
    return result


def eager(tasks: Tasks, order: Sequence[int]) -> list[int]:
    """Move every task that needs no memory of its own to where it can run first."""
    free = free_tasks(tasks)
    kept = [task for task in order if task not in free]
    return expand_order(tasks, range(len(tasks)), kept)


def cut_points(tasks: Tasks) -> list[int]:
    """Return, in order, ancestors or descendants of every other task that needs memory."""
    free = free_tasks(tasks)
    counted = mask_of(task for task in range(len(tasks)) if task not in free)
    everyone = counted.bit_count() - 1
    found = [
        task
        for task in range(len(tasks))
        if task not in free
        and ((tasks.ancestors[task] | tasks.descendants[task]) & counted).bit_count() == everyone
    ]
    return sorted(found, key=lambda task: tasks.ancestors[task].bit_count())


def independent_parts(tasks: Tasks, order: Sequence[int]) -> list[tuple[int, int]]:
    """Split an eager order at its cut points into ranges [begin, end). A cut point ends its part,
    and the parts can be ordered independently of each other."""
    position = {task: i for i, task in enumerate(order)}
    ends = sorted({position[task] + 1 for task in cut_points(tasks)} | {len(order)})
    return [(begin, end) for begin, end in zip([0, *ends], ends, strict=False) if begin < end]


def part_of(tasks: Tasks, order: Sequence[int], begin: int, end: int) -> Tasks:
    """Return the problem of order[begin:end], an independent part, as tasks 1, 2, ... in that
    order. Task 0 makes the values that are there when the part begins and may end in it."""
    index = {task: i for i, task in enumerate(order[begin:end], 1)}
    before = set(order[:begin])
    values, base = [], tasks.base
    for value in tasks.values:
        producer = 0 if value.producer in before else index.get(value.producer)
        inside = tuple(sorted(index[task] for task in value.consumers if task in index))
        kept = value.kept or any(x not in before and x not in index for x in value.consumers)
        if producer == 0 and kept:
            base += value.size
        elif producer or (producer == 0 and inside):
            values.append(Value(value.size, producer, inside, kept))
    transient = [0, *(tasks.transient[task] for task in index)]
    after = [(), *((0, *sorted(index[x] for x in tasks.after[t] if x in index)) for t in index)]
    return Tasks(tuple(transient), tuple(values), tuple(after), base)
