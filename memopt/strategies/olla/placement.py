"""Placement: an offset for every buffer, the peak as low as can be (OLLA eq. 15)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from math import gcd

from memopt.strategies.base import Status
from memopt.strategies.olla.buffers import Buffer, Ints, Layout, Placement, peak_of
from memopt.strategies.olla.feasibility import solve_capacity
from memopt.strategies.olla.greedy import greedy_placement, promoted_placement, pyramid
from memopt.strategies.olla.search import find_placement

FIRST_ROUND_WORK = 64_000_000
DEFAULT_WORK_LIMIT = 3_000_000_000
"""Units of search work: some seconds, and the same result on every machine."""


def place(
    buffers: Iterable[Buffer],
    capacity: int | None = None,
    *,
    time_limit_s: float | None = None,
    work_limit: int | None = DEFAULT_WORK_LIMIT,
    seed: int = 0,
    use_pyramid: bool = False,
    cp_sat: bool = False,
    num_workers: int = 1,
    on_improvement: Callable[[float, int, int], None] | None = None,
) -> Placement:
    """Place buffers so that those live at the same time do not overlap, with a small peak.

    Greedy placements first, repaired by placing earlier what ends too high; then depth-first
    search at the lower bound (the most bytes live at once) and, while that fails, at capacities
    between the bound and the best peak, with growing limits; then CP-SAT if asked for. It stops
    at the bound, at `capacity`, or at a limit.
    KeyboardInterrupt stops it too: the best placement so far is returned.

    Args:
        buffers: ids unique; sizes may be 0.
        capacity: bytes; the first placement within it is good enough. None: minimise the peak.
        time_limit_s: wall clock, seconds; checked every few tenths of a second.
        work_limit: units of search work (about 10⁹ in one to five seconds); None: no limit.
        seed: of the random restarts. Without a time limit, the same seed gives the same result.
        use_pyramid: let CP-SAT keep the nested tensors of OLLA Function 5 where it puts them.
        cp_sat: try CP-SAT at the bound when the search has not decided it.
        num_workers: threads of CP-SAT.
        on_improvement: called with (seconds since the start, peak, bound) at each better one.

    Raises:
        ValueError: two buffers have the same id.
    """
    run = _Run(tuple(buffers), capacity, time_limit_s, on_improvement)
    try:
        run.greedy(seed)
        run.search(work_limit, seed)
        if cp_sat:
            run.cp_sat(use_pyramid, num_workers, seed)
    except KeyboardInterrupt:
        run.interrupted = True
        if run.best is None:
            run.stack()
    return run.result()


class _Run:
    """One call of `place`: the incumbent and the bound, kept outside the solvers."""

    def __init__(
        self,
        buffers: tuple[Buffer, ...],
        capacity: int | None,
        time_limit_s: float | None,
        on_improvement: Callable[[float, int, int], None] | None,
    ) -> None:
        self.started_s = time.monotonic()
        self.time_limit_s = time_limit_s
        self.on_improvement = on_improvement
        self.buffers = buffers
        self.layout = Layout([buffer for buffer in buffers if buffer.size > 0])
        if len({buffer.id for buffer in buffers}) != len(buffers):
            raise ValueError("place: two buffers have the same id")
        self.capacity = capacity
        self.bound = self.layout.bound
        self.best: Ints | None = None
        self.peak = 0
        self.method = "none"
        self.nodes = 0
        self.interrupted = False

    @property
    def good_enough(self) -> int:
        """The peak to stop at."""
        return self.bound if self.capacity is None else max(self.bound, self.capacity)

    @property
    def done(self) -> bool:
        """Whether nothing is left to find."""
        if len(self.layout) == 0:
            return True
        if self.capacity is not None and self.capacity < self.bound and self.best is not None:
            return True
        return self.best is not None and self.peak <= self.good_enough

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started_s

    def out_of_time(self) -> bool:
        """Whether the time limit has passed."""
        return self.time_limit_s is not None and self.elapsed_s() >= self.time_limit_s

    def offer(self, offsets: Ints, method: str) -> None:
        """Keep a placement if it is the best one."""
        peak = int((offsets + self.layout.size).max())
        if self.best is None or peak < self.peak:
            self.best, self.peak, self.method = offsets, peak, method
            if self.on_improvement is not None:
                self.on_improvement(self.elapsed_s(), peak, self.bound)

    def stack(self) -> None:
        """One above the other: always valid, needs no compiled code."""
        if len(self.layout):
            self.offer(self.layout.size.cumsum() - self.layout.size, "stacked")

    def greedy(self, seed: int) -> None:
        """The greedy portfolio, then its repair."""
        if not self.done:
            name, offsets = greedy_placement(self.layout, self.good_enough, self.out_of_time)
            self.offer(offsets, name)
        if not self.done:
            name, offsets = promoted_placement(
                self.layout, self.good_enough, seed=seed, stop=self.out_of_time
            )
            self.offer(offsets, name)

    def search(self, work_limit: int | None, seed: int) -> None:
        """At the bound, then by bisection between the bound and the peak, in rounds whose limits
        double. Only proofs move the bound."""
        spent = turn = 0
        # Sunk placements only have offsets that are multiples of this.
        unit = gcd(*self.layout.size.tolist(), *self.layout.alignment.tolist())
        if (self.layout.alignment == 1).all():
            unit = gcd(*self.layout.size.tolist())
        limit = FIRST_ROUND_WORK
        while not self.done:
            low = target = self.good_enough
            while not self.done:
                # The target that would end it all gets about as much as the others together.
                share = limit if target == self.good_enough else limit // 4
                left = share if work_limit is None else min(share, work_limit - spent)
                if self.out_of_time() or left <= 0:
                    return
                outcome = find_placement(
                    self.layout,
                    target,
                    seed=seed,
                    turn=turn,
                    work_limit=left,
                    stop=self.out_of_time,
                )
                spent += outcome.work
                self.nodes += outcome.nodes
                if outcome.offsets is not None:
                    self.offer(outcome.offsets, "search")
                else:
                    low = target
                    if outcome.infeasible:
                        self.bound = low = target + unit
                if self.capacity is not None or self.peak - low <= unit:
                    break
                target = (low + self.peak) // 2
            limit *= 2
            turn += 1

    def cp_sat(self, use_pyramid: bool, num_workers: int, seed: int) -> None:
        """CP-SAT at the bound (or the capacity)."""
        if self.done or self.out_of_time():
            return
        fixed = None
        if use_pyramid:
            fixed, base = {}, 0
            for index in pyramid(self.layout).tolist():
                fixed[index] = base
                base += int(self.layout.size[index])
        left_s = None if self.time_limit_s is None else self.time_limit_s - self.elapsed_s()
        status, offsets = solve_capacity(
            self.layout,
            self.good_enough,
            fixed=fixed,
            time_limit_s=left_s,
            num_workers=num_workers,
            seed=seed,
        )
        if offsets is not None:
            self.offer(offsets, "CP-SAT")
        elif status is Status.INFEASIBLE and fixed is None:
            self.bound = self.good_enough + 1

    def result(self) -> Placement:
        """The incumbent with its proof."""
        offsets = {buffer.id: 0 for buffer in self.buffers}
        if self.best is not None:
            for buffer, offset in zip(self.layout.buffers, self.best.tolist(), strict=True):
                offsets[buffer.id] = offset
        peak = peak_of(self.buffers, offsets)
        self.bound = min(self.bound, peak)
        status = Status.OPTIMAL if peak == self.bound else Status.FEASIBLE
        if self.capacity is not None and peak > self.capacity:
            status = Status.INFEASIBLE if self.bound > self.capacity else Status.UNKNOWN
        return Placement(
            offsets=offsets,
            peak=peak,
            bound=self.bound,
            gap=(peak - self.bound) / self.bound if self.bound else 0.0,
            status=status,
            stats={
                "method": self.method,
                "nodes": self.nodes,
                "time_s": self.elapsed_s(),
                "interrupted": self.interrupted,
            },
        )
