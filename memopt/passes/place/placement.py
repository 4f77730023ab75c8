"""Placement: an offset for every buffer, the peak as low as possible (OLLA eq. 15)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memopt.models.status import Status
from memopt.passes.cp_sat import CpSat, Improvement, TimedSearch, ran_out
from memopt.passes.place.buffers import Buffer, Ints, Layout, Placement, peak_of
from memopt.passes.place.feasibility import solve_capacity
from memopt.passes.place.greedy import greedy_placement, promoted_placement
from memopt.passes.place.joined import find_joined
from memopt.passes.place.repair import repaired_placement
from memopt.passes.place.search import Outcome, find_placement

QUICK_WORK, ROUND_WORK = 16_000_000, 64_000_000
"""Work of one search at a capacity, between greedy placements and in the first round; each round
doubles it."""
TIGHT_SHARES, SHARES = (1.0, 0.5, 0.125), (0.25, 0.5, 4.0)
"""Shares of that work for each search (depth first, of joined buffers, local): at the bound, where
local search seldom finds what is exactly tight, and above it."""
NEAR_PER_MILLE = 7
"""The first capacity tried above the bound, unless the peak is already as low."""
NEAR_STEPS = 8
"""A round ends when the capacities left to try span at most 1/8 of those from bound to peak."""
WITHOUT_LIMIT = 10**18
_LARGEST = 2**62
"""Sums of sizes, and times, are computed in 64 bits."""
DEFAULT_WORK_LIMIT = 6_000_000_000
"""Units of search work: some seconds, and the same result on every machine."""


def place(
    buffers: Iterable[Buffer],
    capacity: int | None = None,
    *,
    time_limit_s: float | None = None,
    work_limit: int | None = None,
    seed: int = 0,
    cp_sat: CpSat | None = None,
    on_improvement: Improvement | None = None,
) -> Placement:
    """Place buffers so that those live at the same time do not overlap, with a small peak.

    Greedy placements first; then at the lower bound (the most bytes live at once), and at
    capacities between it and the best peak, three searches in rounds with growing limits: of
    buffers joined into larger ones, depth first, and local. Then CP-SAT if asked for. It stops at
    the bound, at `capacity`, or at a limit. KeyboardInterrupt stops it too: the best placement so
    far is returned.

    Args:
        buffers: ids unique; sizes may be 0.
        capacity: bytes; the first placement within it is good enough. None: minimise the peak.
        time_limit_s: wall clock, seconds; checked every few tenths of a second.
        work_limit: units of search work (about 10⁹ in one to five seconds). None:
            `DEFAULT_WORK_LIMIT`, or with a time limit as much as that allows.
        seed: of the random restarts. Without a time limit, the same seed gives the same result.
        cp_sat: how CP-SAT goes on where the search leaves a gap; None: not at all.
        on_improvement: called with (seconds since the start, peak, bound) at each better one.

    Raises:
        ValueError: two buffers have the same id, or numbers are too large for 64 bits.
    """
    run = _PlacementSearch(tuple(buffers), capacity, time_limit_s, on_improvement)
    try:
        if work_limit is None:
            work_limit = DEFAULT_WORK_LIMIT if time_limit_s is None else WITHOUT_LIMIT
        work_limit -= run.greedy(work_limit, seed)
        run.search(work_limit, seed)
        if cp_sat is not None:
            run.cp_sat(cp_sat)
    except KeyboardInterrupt:
        run.interrupted = True
        if run.best is None:
            run.stack()
    return run.result()


SEARCHES: dict[str, Callable[..., Outcome]] = {
    "search": find_placement,
    "joined": find_joined,
    "repair": repaired_placement,
}
"""Searches for a placement within a capacity; only the first can prove that there is none."""


class _PlacementSearch(TimedSearch):
    """One call of `place`: keeps the incumbent and the bound, outside the solvers."""

    def __init__(
        self,
        buffers: tuple[Buffer, ...],
        capacity: int | None,
        time_limit_s: float | None,
        on_improvement: Improvement | None,
    ) -> None:
        super().__init__(time_limit_s, on_improvement)
        self.buffers = buffers
        times = (abs(time) for one in buffers for time in (one.lower, one.upper, one.alignment))
        if max(sum(one.extent for one in buffers), *times, 0) >= _LARGEST:
            raise ValueError("place: times, alignments, and all sizes together must be below 2^62")
        self.layout = Layout([buffer for buffer in buffers if buffer.size > 0])
        if len({buffer.id for buffer in buffers}) != len(buffers):
            raise ValueError("place: two buffers have the same id")
        self.capacity = capacity
        self.bound = self.layout.bound
        self.best: Ints | None = None
        self.peak = 0
        self.method = "none"
        self.nodes = 0

    @property
    def good_enough(self) -> int:
        """Return the peak to stop at."""
        return self.bound if self.capacity is None else max(self.bound, self.capacity)

    @property
    def done(self) -> bool:
        """Tell whether nothing is left to find."""
        if len(self.layout) == 0:
            return True
        if self.capacity is not None and self.capacity < self.bound and self.best is not None:
            return True
        return self.best is not None and self.peak <= self.good_enough

    def offer(self, offsets: Ints, method: str) -> None:
        """Keep a placement if it is the best one."""
        peak = int((offsets + self.layout.size).max())
        if self.best is None or peak < self.peak:
            self.best, self.peak, self.method = offsets, peak, method
            self.tell(peak, self.bound)

    def stack(self) -> None:
        """Stack all buffers: always valid, and needs no compiled code."""
        if len(self.layout):
            self.offer(self.layout.size.cumsum() - self.layout.size, "stacked")

    def greedy(self, work_limit: int, seed: int) -> int:
        """Try the greedy portfolio; then a short search, and greedy placements in better and better
        orders. Return the work spent."""
        work = 0
        if not self.done:
            name, offsets = greedy_placement(self.layout, self.good_enough, self.out_of_time)
            self.offer(offsets, name)
        if not self.done:
            work = self._try(self.good_enough, min(work_limit, QUICK_WORK), seed, 0)
        if not self.done:
            name, offsets = promoted_placement(
                self.layout, self.good_enough, seed=seed, stop=self.out_of_time
            )
            self.offer(offsets, name)
        return work

    def search(self, left: int, seed: int) -> None:
        """Try the peak to stop at, then capacities above it, in rounds with limits that double."""
        limit, turn = ROUND_WORK, 1
        near = self.good_enough + self.bound * NEAR_PER_MILLE // 1000
        while not self.done:
            base = low = target = self.good_enough
            step = 0
            while not self.done and self.peak - low > step:
                if self.out_of_time() or left <= 0:
                    return
                left -= self._try(target, min(limit, left), seed, turn)
                low = max(target, self.bound) if self.peak > target else low
                step = max(self.layout.unit, (self.peak - base) // NEAR_STEPS)
                target = (low + self.peak) // 2
                if low == base:
                    target = min(target, near)
                turn += 1
            limit, near = 2 * limit, self.peak

    def _try(self, target: int, work_limit: int, seed: int, turn: int) -> int:
        """Search at a capacity by each method in turn, until one decides it; return the work."""
        shares = TIGHT_SHARES if target == self.layout.bound else SHARES
        work = 0
        for (method, search), share in zip(SEARCHES.items(), shares, strict=True):
            if self.peak <= target or self.bound > target or self.out_of_time():
                break
            outcome = search(
                self.layout, target, seed=seed, turn=turn, stop=self.out_of_time,
                work_limit=max(1, int(share * work_limit)),
            )  # fmt: skip
            work += outcome.work
            self.nodes += outcome.nodes
            if outcome.infeasible:
                # Peaks are multiples of the unit, capacities need not be.
                self.bound = (target // self.layout.unit + 1) * self.layout.unit
            elif outcome.offsets is not None:
                self.offer(outcome.offsets, method)
        return work

    def cp_sat(self, how: CpSat) -> None:
        """Let CP-SAT decide the peak to stop at, then minimise the peak above it (eq. 15)."""
        left = how.effort
        for minimise in (False, True):
            if self.done or self.out_of_time() or left <= 0:
                return
            options = how.options(self.left_s(), left if minimise else left / 2)
            answer = solve_capacity(
                self.layout,
                self.peak - self.layout.unit if minimise else self.good_enough,
                least=self.good_enough if minimise else None,
                options=options,
                watch=lambda peak, bound: self.tell(peak, max(self.bound, bound)),
            )
            left -= answer.effort
            if answer.offsets is not None:
                self.offer(answer.offsets, "CP-SAT")
            self.bound = max(self.bound, answer.bound)
            decided = answer.status in (Status.OPTIMAL, Status.INFEASIBLE)
            if not (decided or ran_out(options, answer.effort) or self.out_of_time()):
                self.interrupted = True
                return

    def result(self) -> Placement:
        """Return the incumbent with its proof."""
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
            status=status,
            stats={
                "method": self.method,
                "nodes": self.nodes,
                "time_s": self.elapsed_s(),
                "interrupted": self.interrupted,
            },
        )
