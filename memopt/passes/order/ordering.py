"""Ordering: the least peak memory over all valid orders (OLLA eq. 14), with a bound.

Minimum cuts give a bound, often met by the framework's own order. Where it is not met, the cut at
the peak's operator says which tasks to execute first. Then windows around the peak are searched
exactly, growing until they cover the whole independent part. A short search of this kind starts
from the framework's order, to change it little (it stays as easy to place as it was). A long one
also starts from the best of greedy orders. On request CP-SAT goes on, or does all (`CpSat`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from memopt.models.bounds import relative_gap
from memopt.models.status import Status
from memopt.passes.cp_sat import CpSat, Improvement, TimedSearch
from memopt.passes.order.mincut import forced_live, last_task_bound, minimum_cut
from memopt.passes.order.part_programs import solve_by_parts
from memopt.passes.order.task_contraction import (
    eager,
    expand_order,
    independent_parts,
    without_free_tasks,
)
from memopt.passes.order.tasks import Run, Tasks
from memopt.passes.order.window_search import Window

STATES_FROM_FRAMEWORK = 4_000
"""States that window searches from the framework's own order may visit before others are tried."""
DEFAULT_STATES = 400_000
"""States that all window searches may visit: seconds to a minute, the same on every machine."""


@dataclass(frozen=True, slots=True)
class Ordering:
    """An order of the tasks with its proof. Bytes include the base (resident) bytes.

    Attributes:
        order: a valid order of all tasks.
        peak: its peak memory, bytes.
        bound: no order has a smaller peak, bytes.
        status: OPTIMAL when peak = bound, else FEASIBLE.
        stats: "first_order" (best greedy order), "first_peak", "cuts", "states", "time_s"; with
            CP-SAT "variables", of all its programs, and "too_large", of programs not made.
    """

    order: tuple[int, ...]
    peak: int
    bound: int
    status: Status
    stats: dict[str, object] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Return (peak - bound) / bound, 0.0 when the bound is 0."""
        return relative_gap(self.peak, self.bound)


def order_tasks(
    tasks: Tasks,
    *,
    good_enough: int = 0,
    time_limit_s: float | None = None,
    max_states: int = DEFAULT_STATES,
    cp_sat: CpSat | None = None,
    on_improvement: Improvement | None = None,
) -> Ordering:
    """Order tasks for a small peak.

    Deterministic without a time limit. KeyboardInterrupt (or the limit) ends it with the best
    order so far; the tasks' own order is the first incumbent.

    Args:
        tasks: the problem, its own order valid.
        good_enough: bytes; an order of at most this peak ends the search.
        time_limit_s: wall clock, seconds.
        max_states: of the exact window searches in all.
        cp_sat: how CP-SAT goes on where the search leaves a gap; None: not at all.
        on_improvement: called with (seconds, peak, bound) whenever either improves.
    """
    run = _OrderSearch(tasks, good_enough, time_limit_s, on_improvement)
    try:
        if cp_sat is None or cp_sat.warm_start:
            run.bound_by_cuts()
            run.follow_cuts()
            run.windows(min(STATES_FROM_FRAMEWORK, max_states))
            run.greedy()
            run.bound_by_cuts()
            run.follow_cuts()
            run.windows(max_states)
        if cp_sat is not None:
            run.programs(cp_sat)
    except KeyboardInterrupt:
        run.interrupted = True
    return run.result()


LARGE = 1000
"""Tasks from which on a search that is out of time takes no bound at all."""


class _OrderSearch(TimedSearch):
    """One call of `order_tasks`, on the problem without tasks that need no memory of their own."""

    def __init__(
        self,
        tasks: Tasks,
        good_enough: int,
        time_limit_s: float | None,
        on_improvement: Improvement | None,
    ) -> None:
        super().__init__(time_limit_s, on_improvement)
        self.original = tasks
        self.good_enough = good_enough
        self.cuts: dict[int, tuple[int, int]] = {}
        self.states = 0
        self.first = ("framework", 0)
        self.figures: dict[str, object] = {}
        self.tasks, self.kept = without_free_tasks(tasks)
        self.order = eager(self.tasks, self.tasks.topological)
        self.profile = self.tasks.profile(self.order)
        self.bound = tasks.base
        self.own_peak = tasks.peak(tasks.topological)

    @property
    def peak(self) -> int:
        """Return the incumbent's peak."""
        return max(self.profile, default=self.tasks.base)

    @property
    def done(self) -> bool:
        """Tell whether nothing is left to find or the time is over."""
        return self.peak <= max(self.bound, self.good_enough) or self.out_of_time()

    def offer(self, order: Sequence[int]) -> bool:
        """Keep an order if it is better: a smaller peak, or as small and reached less often."""
        order = eager(self.tasks, order)
        profile = self.tasks.profile(order)
        peak = max(profile, default=self.tasks.base)
        old = self.peak
        if (peak, profile.count(peak)) >= (old, self.profile.count(old)):
            return False
        self.order, self.profile = list(order), profile
        if peak < old:
            self.tell(self.peak, self.bound)
        return True

    def raise_bound(self, bound: int) -> None:
        """Record a proof that no order has a smaller peak than `bound`."""
        if bound > self.bound:
            self.bound = bound
            self.tell(self.peak, self.bound)

    def greedy(self) -> None:
        """Try the greedy orders."""
        for name, order in greedy_orders(self.tasks):
            if self.offer(order) or name == "framework":
                self.first = (name, self.peak)
            if self.done:
                return

    def cut(self, task: int) -> tuple[int, int]:
        """Return the minimum cut at a task, computed once."""
        if task not in self.cuts:
            self.cuts[task] = minimum_cut(self.tasks, task)
            self.raise_bound(self.cuts[task][0])
        return self.cuts[task]

    def bound_by_cuts(self, count: int = 8) -> None:
        """Take minimum cuts where they promise most: at the incumbent's highest tasks, and at those
        with the largest forced-live bound."""
        if len(self.tasks) > LARGE and self.out_of_time():
            return
        forced = forced_live(self.tasks, self.out_of_time)
        self.raise_bound(max(last_task_bound(self.tasks), *forced, self.tasks.base))
        highest = sorted(range(len(self.order)), key=lambda i: -self.profile[i])[:count]
        tasks = [self.order[i] for i in highest]
        tasks += sorted(range(len(self.tasks)), key=lambda task: -forced[task])[:count]
        for task in dict.fromkeys(tasks):
            if self.done:
                return
            self.cut(task)

    def follow_cuts(self, rounds: int = 200) -> None:
        """Move tasks outside the cut at the peak to after the peak, while that helps."""
        for _ in range(rounds):
            if self.done:
                return
            position = self.profile.index(self.peak)
            task = self.order[position]
            value, executed = self.cut(task)
            if value >= self.peak:
                return
            first = [t for t in self.order if executed >> t & 1]
            rest = [t for t in self.order if not executed >> t & 1 and t != task]
            if not self.offer([*first, task, *rest]):
                return

    def windows(self, max_states: int) -> None:
        """Search windows around the highest task exactly, with growing width, until the searches
        have visited `max_states` states."""
        width = 12
        while not self.done and self.states < max_states:
            begin, end = self._part()
            low, high, centre = begin, end, self.profile.index(self.peak)
            if end - begin > width:
                low = max(begin, min(centre - width // 2, end - width))
                high = min(end, low + width)
            whole = (low, high) == (begin, end)
            improved = self._improve(low, high, max_states, whole=whole)
            if not improved:
                if whole or width > 2 * len(self.order):
                    return
                width *= 2

    def programs(self, how: CpSat) -> None:
        """Let CP-SAT go on by OLLA's own program."""
        if self.done:
            return

        def watch(peak: int, bound: int) -> None:
            self.tell(min(peak, self.peak), bound)

        least = max(self.bound, self.good_enough)
        found = solve_by_parts(
            self.tasks, self.order, how, least=least, left_s=self.left_s, watch=watch
        )
        self.figures |= {"variables": found.variables, "too_large": found.too_large}
        self.interrupted = found.interrupted
        self.offer(list(found.order))
        self.raise_bound(found.bound)

    def _part(self) -> tuple[int, int]:
        """Return the independent part of the present order that holds the peak."""
        centre = self.profile.index(self.peak)
        for begin, end in independent_parts(self.tasks, self.order):
            if begin <= centre < end:
                return begin, end
        return 0, len(self.order)

    def _improve(self, low: int, high: int, max_states: int, *, whole: bool) -> bool:
        """Search a window at the bound, then just below the peak; return whether it improved."""
        window = Window(self.tasks, self.order[:low], self.order[low:high])
        peak = self.peak
        target = max(self.bound, self.good_enough)
        while not self.done and self.states < max_states:
            left = max_states - self.states
            budget = min(left, 2_000 + 20 * (high - low) if not whole else 10**9)
            result = window.search(target, budget, self.out_of_time)
            self.states += result.states
            if result.order is not None:
                self.offer([*self.order[:low], *result.order, *self.order[high:]])
                return True
            if whole and result.proved:
                self.raise_bound(target + 1)
            if target >= peak - 1:
                return False
            target = max((target + peak) // 2, target + 1)
        return False

    def result(self) -> Ordering:
        """Return the incumbent in terms of the original tasks."""
        order = expand_order(self.original, self.kept, self.order)
        peak = self.original.peak(order)
        if self.own_peak < peak:
            order, peak = list(self.original.topological), self.own_peak
        bound = min(self.bound, peak)
        return Ordering(
            tuple(order),
            peak,
            bound,
            Status.OPTIMAL if peak == bound else Status.FEASIBLE,
            {
                "first_order": self.first[0],
                "first_peak": self.first[1],
                "cuts": len(self.cuts),
                "states": self.states,
                "time_s": self.elapsed_s(),
                "interrupted": self.interrupted,
                **self.figures,
            },
        )


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
