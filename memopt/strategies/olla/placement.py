"""Placement: an offset for every buffer, the peak as low as can be (OLLA eq. 15)."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.strategies.base import Status
from memopt.strategies.olla.buffers import Buffer, Ints, Layout, Placement, peak_of
from memopt.strategies.olla.feasibility import solve_capacity
from memopt.strategies.olla.greedy import greedy_placement, promoted_placement, pyramid
from memopt.strategies.olla.repair import repaired_placement
from memopt.strategies.olla.search import find_placement
from memopt.strategies.olla.tiling import find_tiling, is_tiling
from memopt.strategies.olla.timed_search import Improvement, TimedSearch

FIRST_ROUND_WORK = 64_000_000
MOST_FAILURES = 2
"""A round ends after this many capacities above the bound at which nothing was found."""
NEAR_PER_MILLE = 7
"""Local search begins at a capacity this far above the bound."""
NEAR_STEPS = 8
"""A round of local search ends when one such part of the way from the bound to the peak is left."""
NEAR_ROUND_WORK = 300_000_000
"""Work that local search may take at one capacity in the first round."""
NEAR_WORK, FAR_WORK, FAR_PER_MILLE = 3_000_000_000, 5_000_000_000, 10
"""Work that local search may take above the bound before depth-first search is tried in earnest:
the second while the peak is this far above the bound, where that search finds nothing among
`MANY_BUFFERS`."""
MANY_BUFFERS = 500
NODE_WORK = 6000
"""Units of work for a node of the search for tilings."""
MOST_TILING_WORK = 4_000_000_000
"""Work that it may take, and at most two thirds of all."""
WITHOUT_LIMIT = 10**18
DEFAULT_WORK_LIMIT = 6_000_000_000
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
    on_improvement: Improvement | None = None,
) -> Placement:
    """Place buffers so that those live at the same time do not overlap, with a small peak.

    Greedy placements first, repaired by placing earlier what ends too high; then depth-first
    search at the lower bound (the most bytes live at once), local search a little above it and,
    while that fails, both at capacities between the bound and the best peak, with growing limits;
    then CP-SAT if asked for. It stops
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
        left = WITHOUT_LIMIT if work_limit is None else work_limit
        left -= run.greedy(left, seed)
        run.search(left, seed)
        if cp_sat:
            run.cp_sat(use_pyramid, num_workers, seed)
    except KeyboardInterrupt:
        run.interrupted = True
        if run.best is None:
            run.stack()
    return run.result()


class _Run(TimedSearch):
    """One call of `place`: the incumbent and the bound, kept outside the solvers."""

    def __init__(
        self,
        buffers: tuple[Buffer, ...],
        capacity: int | None,
        time_limit_s: float | None,
        on_improvement: Improvement | None,
    ) -> None:
        super().__init__(time_limit_s, on_improvement)
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

    def offer(self, offsets: Ints, method: str) -> None:
        """Keep a placement if it is the best one."""
        peak = int((offsets + self.layout.size).max())
        if self.best is None or peak < self.peak:
            self.best, self.peak, self.method = offsets, peak, method
            self.tell(peak, self.bound)

    def stack(self) -> None:
        """One above the other: always valid, needs no compiled code."""
        if len(self.layout):
            self.offer(self.layout.size.cumsum() - self.layout.size, "stacked")

    def greedy(self, work_limit: int, seed: int) -> int:
        """The greedy portfolio, then the search for a tiling where it has to be one, else the
        repair of the greedy placements; the work spent."""
        if not self.done:
            name, offsets = greedy_placement(self.layout, self.good_enough, self.out_of_time)
            self.offer(offsets, name)
        spent = self._tile(work_limit, seed)
        if not self.done:
            name, offsets = promoted_placement(
                self.layout, self.good_enough, seed=seed, stop=self.out_of_time
            )
            self.offer(offsets, name)
        return spent

    def _tile(self, work_limit: int, seed: int) -> int:
        """The search for placements without a byte free; the work spent."""
        if self.done or self.good_enough > self.bound or not is_tiling(self.layout):
            return 0
        nodes = min(2 * work_limit // 3, MOST_TILING_WORK) // NODE_WORK
        outcome = find_tiling(self.layout, seed=seed, node_limit=nodes, stop=self.out_of_time)
        self.nodes += outcome.nodes
        if outcome.infeasible:
            self.bound += self.layout.unit
        elif outcome.offsets is not None:
            self.offer(outcome.offsets, "tiling")
        return outcome.nodes * NODE_WORK

    def search(self, left: int, seed: int) -> None:
        """Depth first at the bound; local search above it; then both in rounds, by bisection
        between the bound and the peak, with limits that double. Only proofs move the bound."""
        left -= self._try(self.good_enough, min(left, FIRST_ROUND_WORK), seed, 0)
        if self.capacity is None:
            left -= self._near(left, seed)
        limit = 2 * FIRST_ROUND_WORK
        turn = 1
        while not self.done:
            low = target = self.good_enough
            failures = 0
            while not self.done:
                if self.out_of_time() or left <= 0:
                    return
                left -= self._try(target, min(limit, left), seed, turn)
                if self.peak > target:
                    low = max(target, self.bound)
                    failures += 1
                # Closer to what fails is not worth it before the limits are larger.
                over = failures > MOST_FAILURES or self.peak - low <= self.layout.unit
                if self.capacity is not None or over:
                    break
                target = (low + self.peak) // 2
            limit *= 2
            turn += 1

    def _near(self, work_limit: int, seed: int) -> int:
        """Local search a fixed share above the bound, then by bisection between that and the
        peak, in rounds with limits that double. The work spent."""
        per_mille = self.bound // 1000
        target = self.bound + min((self.peak - self.bound) // 2, NEAR_PER_MILLE * per_mille)
        spent, limit, turn = 0, NEAR_ROUND_WORK, 0
        while not self.done:
            low = self.bound
            step = max(self.layout.unit, (self.peak - low) // NEAR_STEPS)
            while self.peak - low > step:
                many = len(self.layout) >= MANY_BUFFERS
                far = many and self.peak - self.bound > FAR_PER_MILLE * per_mille
                most = FAR_WORK if far else NEAR_WORK
                left = min(work_limit * most // DEFAULT_WORK_LIMIT, most) - spent
                if left <= 0 or self.done or self.out_of_time():
                    return spent
                spent += self._repair(target, min(limit, left), seed, turn)
                low = target if self.peak > target else low
                target = (low + self.peak) // 2
                turn += 1
            if self.peak - self.bound <= self.layout.unit:
                return spent
            limit *= 2
            target = (self.bound + self.peak) // 2
        return spent

    def _try(self, target: int, work_limit: int, seed: int, turn: int) -> int:
        """Depth-first search at a capacity, then local search if that does not decide it; the
        work spent."""
        if self.done or self.out_of_time():
            return 0
        # Depth first finds what is exactly tight and proves that it is not there; a little above
        # the bound, and with hundreds of buffers, local search is much faster.
        end = target == self.good_enough
        deep, wide = (work_limit, work_limit // 8) if end else (work_limit // 8, work_limit)
        outcome = find_placement(
            self.layout, target, seed=seed, turn=turn, work_limit=deep, stop=self.out_of_time
        )
        self.nodes += outcome.nodes
        if outcome.infeasible:
            self.bound = target + self.layout.unit
        elif outcome.offsets is not None:
            self.offer(outcome.offsets, "search")
        else:
            return outcome.work + self._repair(target, wide, seed, turn)
        return outcome.work

    def _repair(self, target: int, work_limit: int, seed: int, turn: int) -> int:
        """Local search at a capacity; the work spent."""
        outcome = repaired_placement(
            self.layout, target, seed=seed, turn=turn, work_limit=work_limit, stop=self.out_of_time
        )
        if outcome.offsets is not None:
            self.offer(outcome.offsets, "repair")
        return outcome.work

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
        status, offsets = solve_capacity(
            self.layout,
            self.good_enough,
            fixed=fixed,
            time_limit_s=self.left_s(),
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
            status=status,
            stats={
                "method": self.method,
                "nodes": self.nodes,
                "time_s": self.elapsed_s(),
                "interrupted": self.interrupted,
            },
        )
