"""Plans whole steps whose parameters and optimizer state may live on the host.

`planned_moves` takes base programs (from any source: every operator once, activations moved or
recomputed). From each, `memopt.strategies.moving.stays` makes programs within the budgets, with
none, some or all of the updates on the host; the fastest one is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from memopt.errors import InfeasibleBudgetError
from memopt.models.bounds import memory_lower_bound
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.progress import stops
from memopt.models.status import Status
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import Timeline, replay
from memopt.programs.solution import Solution
from memopt.reductions.step_linearization import updates_of, with_early_updates, without_updates
from memopt.solvers.running import Deadline, Stopped
from memopt.strategies.base import solution_of
from memopt.strategies.moving.bound import link_bound_s
from memopt.strategies.moving.on_host import possible, shares, without_host_updates
from memopt.strategies.moving.stays import CHOICES, MovedBase, RoomChoice

PROVED = 1e-9
SCOUTS = tuple(one for one in CHOICES if one.reserve == 0.3 and not one.for_returns)
"""Settings of the programs that are made with each share of the updates on the host."""
CARRIED = (0.2, 0.5, 1.0)
"""Shares of the room that may stay on the device from one step to the next, where the step is
repeated; 0 is tried, too."""
CLOSE = 1.1
"""The base without updates on the host is close to the best up to this many times its time."""

Tried: TypeAlias = tuple[float, int, MovedBase]
"""(least time of a base's programs, the base's number, the base)."""


@dataclass(frozen=True)
class Limits:
    """The limits of a plan."""

    device_bytes: int
    host_bytes: float = math.inf
    deadline: Deadline = field(default_factory=Deadline)


def fixed_graph(graph: Graph) -> Graph:
    """Return the step with parameters and state resident, and updated on the device."""
    return replace(without_host_updates(graph), movable=())


def early_steps(graph: Graph) -> Iterator[Program]:
    """Yield the step in the graph's order, every operator once, with updates as early as possible;
    then with the graph's own order of updates."""
    if updates_of(graph):
        first = store_all(without_updates(fixed_graph(graph)))
        yield with_in_place(graph, with_early_updates(fixed_graph(graph), first))
    yield with_in_place(graph, store_all(fixed_graph(graph)))


def planned_moves(
    graph: Graph,
    device: Device,
    limits: Limits,
    bases: Iterable[tuple[str, Program]],
    name: str,
    known: Solution | None = None,
) -> Solution:
    """Return the fastest program known within the limits.

    Raises:
        InfeasibleBudgetError: plans within the device's budget need more host memory.
    """
    began_s = time.monotonic()
    search = _Search(graph, device, limits)
    if known is not None and known.program is not None:
        search.offer(known.program, "nothing of the parameters moves")
    try:
        for source, program in bases:
            search.base(program, source)
            stopped = stops(limits.deadline.progress, 0.5, f"moving parameters: {source}")
            if stopped or (search.best is not None and not limits.deadline.left_s):
                break
    except (KeyboardInterrupt, Stopped):
        if search.least is None:
            raise
    return search.solution(name, began_s)


@dataclass
class _Search:
    """Holds the fastest program so far, and the base that needs the least memory."""

    graph: Graph
    device: Device
    limits: Limits
    best: tuple[Program, Timeline, str] | None = None
    least: MovedBase | None = None
    least_host_bytes: float = math.inf
    tried: int = 0

    def __post_init__(self) -> None:
        self.bound_s = link_bound_s(self.graph, self.limits.device_bytes, self.device)

    def offer(self, program: Program, source: str) -> float:
        """Keep a program within the budgets if it is the fastest; return its time, else
        infinity."""
        timeline = replay(self.graph, program, self.device)
        self.tried += 1
        if timeline.peak_bytes > self.limits.device_bytes:
            return math.inf
        self.least_host_bytes = min(self.least_host_bytes, timeline.host_peak_bytes)
        if timeline.host_peak_bytes > self.limits.host_bytes:
            return math.inf
        if self.best is None or timeline.time_s < self.best[1].time_s:
            self.best = program, timeline, source
        return timeline.time_s

    def base(self, program: Program, source: str) -> None:
        """Offer the programs of one base.

        First a few (`SCOUTS`) for each share of the updates that the host runs. Then all others for
        the best of these shares, and for none if that is nearly as good; in a repeated step also
        programs that leave tensors on the device. One program is made even after the deadline.
        """
        updates = possible(self.graph, program)
        found: list[Tried] = []
        for number, hosted in enumerate(shares(self.graph, updates)):
            base = MovedBase(self.graph, program, self.device, hosted)
            if self.least is None or base.floor_bytes < self.least.floor_bytes:
                self.least = base
            if base.floor_bytes > self.limits.device_bytes or (
                self.best is not None and base.timeline.time_s >= self.best[1].time_s
            ):
                continue
            if found and self.over:
                break
            choices = SCOUTS if updates else CHOICES
            found.append((self._tried(base, choices, source), number, base))
        found.sort(key=lambda row: row[:2])
        rest = [choice for choice in CHOICES if choice not in SCOUTS]
        if self.graph.repeated:
            self._thorough(found, _with_carried_shares(SCOUTS), source)
        if updates:
            self._thorough(found, rest, source)
        if self.graph.repeated:
            self._thorough(found, _with_carried_shares(rest), source)

    def _thorough(self, rows: list[Tried], choices: Sequence[RoomChoice], source: str) -> None:
        """Offer programs of more choices, for the first row's base and, if it is nearly as good,
        the base without updates on the host. `rows` are sorted by time."""
        for time_s, _, base in rows:
            if self.over:
                break
            if base is rows[0][-1] or (not base.hosted and time_s <= CLOSE * rows[0][0]):
                self._tried(base, choices, source)

    def _tried(self, base: MovedBase, choices: Sequence[RoomChoice], source: str) -> float:
        """Offer a base's programs; return the least time of those within the budgets. Where host
        memory is limited, also try gradients that leave it at once."""
        name = f"{source}, {len(base.hosted)} updates on the host" if base.hosted else source
        least_s, listed = math.inf, list(choices)
        if base.hosted and math.isfinite(self.limits.host_bytes):
            listed += [replace(one, drops_at_once=True) for one in listed]
        for program in base.candidates(self.limits.device_bytes, listed):
            least_s = min(least_s, self.offer(program, name))
            if self.over:
                break
        return least_s

    @property
    def over(self) -> bool:
        """Tell whether to return the best so far."""
        return self.done or (self.best is not None and not self.limits.deadline.left_s)

    @property
    def done(self) -> bool:
        """Tell whether nothing can be faster."""
        return self.best is not None and self.best[1].time_s <= self.bound_s * (1 + PROVED)

    def solution(self, name: str, began_s: float) -> Solution:
        """Return the plan, or the smallest budget known."""
        if self.best is not None:
            return self._of(*self.best, self.bound_s, began_s)
        assert self.least is not None
        if self.least.floor_bytes <= self.limits.device_bytes:
            raise InfeasibleBudgetError(
                f"{name}: a host budget of {self.limits.host_bytes} bytes is too small: the plans "
                f"known for a device budget of {self.limits.device_bytes} bytes put at least "
                f"{self.least_host_bytes} bytes on the host; raise either",
                self.limits.device_bytes,
                None,
            )
        floor = self.least.floor_bytes
        program = next(iter(self.least.candidates(floor)))
        timeline = replay(self.graph, program, self.device)
        bound_s = link_bound_s(self.graph, floor, self.device)
        smallest = self._of(program, timeline, "least memory", bound_s, began_s)
        proved = self.limits.device_bytes < memory_lower_bound(self.graph)
        return Solution(
            Status.INFEASIBLE if proved else Status.UNKNOWN,
            smallest_budget_bytes=timeline.peak_bytes,
            smallest=smallest,
        )

    def _of(
        self, program: Program, timeline: Timeline, source: str, bound_s: float, began_s: float
    ) -> Solution:
        stats = {
            "source": source,
            "programs_tried": self.tried,
            "stall_s": timeline.total_stall_s,
            "host_peak_bytes": timeline.host_peak_bytes,
            "solve_s": time.monotonic() - began_s,
        }
        return solution_of(program, timeline, bound_s, PROVED, stats)


def _with_carried_shares(choices: Iterable[RoomChoice]) -> list[RoomChoice]:
    """Return each choice once for every share in `CARRIED`: the share of the room for tensors that
    stay on the device until the next step."""
    return [replace(one, carried=share) for one in choices for share in CARRIED]


def activation_bases(
    graph: Graph,
    budget_bytes: int,
    solve: Callable[[Graph, int], Solution],
    shares: Iterable[float],
) -> Iterator[tuple[str, Program]]:
    """Yield programs whose activations are planned within a share of the room; the rest of it is
    for moved tensors. The room is the budget without what cannot move."""
    fixed = graph.resident_bytes - graph.movable_bytes
    resident = fixed_graph(graph)
    for share in shares:
        within = graph.resident_bytes + int(share * (budget_bytes - fixed))
        found = solve(resident, within)
        taken = found if found.program is not None else found.smallest
        if taken is not None and taken.program is not None:
            source = f"activations within {share:.0%} of the room"
            yield source, with_in_place(graph, taken.program)
