"""Greedy orders: incumbents that need no solver."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from memopt.passes.order.tasks import Run, Tasks

Key = Callable[[Run, int, int], tuple[int, ...]]


def schedule(tasks: Tasks, key: Key) -> list[int]:
    """Schedule by list: take the ready task with the least key(run, task, when it became ready).

    A ready task that does not raise live bytes and fits under the peak so far runs at once: moving
    it here makes no order worse.
    """
    waiting = [len(earlier) for earlier in tasks.before]
    run = Run(tasks)
    ready: dict[int, int] = {t: 0 for t, count in enumerate(waiting) if count == 0}
    order: list[int] = []
    peak = tasks.base
    while ready:
        task = next((t for t in ready if run.net(t) <= 0 and run.during(t) <= peak), None)
        if task is None:
            task = min(ready, key=lambda t: key(run, t, ready[t]))
        del ready[task]
        peak = max(peak, run.execute(task))
        order.append(task)
        for other in tasks.following[task]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready[other] = len(order)
    return order


def reverse_schedule(tasks: Tasks) -> list[int]:
    """Schedule backwards: of the tasks that can be last, take the one with the least memory while
    it runs, then the one that leaves the least live before it."""
    values = tasks.values
    waiting = [len(later) for later in tasks.following]
    needed = [value.kept for value in values]
    live = tasks.base + sum(value.size for value in values if value.kept)
    ready = {t for t, count in enumerate(waiting) if count == 0}
    order: list[int] = []

    def figures(task: int) -> tuple[int, int, int]:
        comes = sum(values[v].size for v in tasks.consumed[task] if not needed[v])
        return live + comes + tasks.transient[task], comes - tasks.output_bytes[task], -task

    while ready:
        task = min(ready, key=figures)
        live += figures(task)[1]
        for value in tasks.consumed[task]:
            needed[value] = True
        ready.remove(task)
        order.append(task)
        for other in tasks.before[task]:
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.add(other)
    order.reverse()
    return order


def greedy_orders(tasks: Tasks) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield named orders: the framework's own; with updates early; least peak memory first; least
    growth first; depth first; reverse."""
    yield "framework", tasks.topological
    yield "early updates", schedule(tasks, lambda _run, t, _since: (t,))
    yield "least peak", schedule(tasks, lambda run, t, _since: (run.during(t), run.net(t), t))
    yield "least growth", schedule(tasks, lambda run, t, _since: (run.net(t), t))
    yield "depth first", schedule(tasks, lambda _run, t, since: (-since, t))
    yield "reverse", reverse_schedule(tasks)
