"""Finds order and addresses of a program together (OLLA eq. 1-9), starting from a solution that
finds one after the other: a 0-1 program in CP-SAT, for small steps.

Variables: those of `LifetimeModel`; A_i, the address of storage i
    a[i,j], b[i,j]  storage i lies below j, or above, for pairs that can be in memory together
        (§4.2 → `Windows.never_meet`)
    arena   the extent of all addresses; outside: the most bytes live without one
Constraints: a + b ≤ 1; a + b ≥ live[i,t] + live[j,t] - 1, live = C + P (eq. 6)
    a → A_i + S_i ≤ A_j (eq. 7a); b → A_j + S_j ≤ A_i (eq. 7b) → `_apart`
    A_i + S_i ≤ arena (eq. 8); eq. 13 of what has addresses, which these imply → `__init__`
    eq. 13 of what has none (workspace, tangents): at most outside → `__init__`
Objective: arena + outside (eq. 9, where nothing lies outside).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil
from typing import Any

from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.passes.cp_sat import CpSat, Improvement, TimedSearch, ran_out
from memopt.passes.order.lifetime_model import LifetimeModel
from memopt.passes.order.program_tasks import ProgramTasks, tasks_of
from memopt.passes.order.tasks import Tasks, Value
from memopt.passes.order.windows import Windows
from memopt.passes.passes import alignment_of, never_placed, place_program, with_offsets
from memopt.passes.place.buffers import Placement
from memopt.passes.place.placement import DEFAULT_WORK_LIMIT
from memopt.programs.instructions import LossBoundary, Program
from memopt.programs.lifetimes import Storage, lifetimes, storages
from memopt.programs.replay import replay
from memopt.solvers.running import solve_with_cp_sat

MOST_ROWS = 400_000
"""Programs with more rows of eq. 6 are not made: they take minutes before the solver begins."""


@dataclass(frozen=True, slots=True)
class JointAnswer:
    """What CP-SAT found.

    Attributes:
        order: of the tasks, in their problem's own numbers; empty: none was found.
        addresses: of storages by their number, bytes.
        bound: on arena and memory outside it, resident included, bytes.
        rows: of eq. 6 for pairs and steps.
        too_large: whether these were too many to make the program.
        interrupted: whether the search ended by neither a proof nor a limit.
    """

    order: tuple[int, ...]
    addresses: Mapping[int, int]
    bound: int
    rows: int
    too_large: bool = False
    interrupted: bool = False


def storage_tasks(problem: ProgramTasks, program: Program) -> Tasks:
    """Return the ordering problem of a program with one value for each storage, in the order of
    `storages`: outputs computed in place live on in it, and those that nothing reads are values,
    too, so that only workspace is transient."""
    graph, task_at, task = problem.graph, {}, 0
    for position, instruction in enumerate(program):
        if task < len(problem.instructions) and instruction is problem.instructions[task]:
            task_at[position] = task
            task += 1
    after = [set(earlier) for earlier in problem.tasks.before]
    values = []
    for storage in storages(lifetimes(graph, program).device):
        users = {task_at[x.begin] for x in storage.lifetimes[1:]}
        for lifetime in storage.lifetimes:
            users |= {task_at[reader] for reader in lifetime.readers}
        size, last = graph.tensors[storage.first.tensor].size_bytes, storage.lifetimes[-1]
        values.append(Value(size, task_at[storage.first.begin], tuple(sorted(users)), last.stays))
    workspace = [x.effects(graph).workspace_bytes for x in problem.instructions]
    for i, instruction in enumerate(problem.instructions):
        if isinstance(instruction, LossBoundary):  # before which these are written back
            workspace[i] -= sum(graph.tensors[t].size_bytes for t in graph.written_back)
    listed = tuple(tuple(sorted(earlier)) for earlier in after)
    return Tasks(tuple(workspace), tuple(values), listed, problem.tasks.base)


class JointModel(LifetimeModel):
    """The program of a problem in which some values have addresses."""

    def __init__(
        self, tasks: Tasks, extents: Mapping[int, int], start: Mapping[int, int], peaks: range
    ) -> None:
        """Build it.

        Args:
            tasks: see `storage_tasks`; their own order is the hint.
            extents: bytes that each value with an address takes, by its number.
            start: valid addresses in that order, bytes.
            peaks: of arena and outside memory together, without the base, bytes: from what is
                enough to what is known, both included.
        """
        super().__init__(tasks, range(len(tasks)), extents.values())
        self.extents = {value: size // self.unit for value, size in extents.items()}
        everything = -(-peaks.stop // self.unit)
        self.A = {
            value: self._integer(everything - size, start[value] // self.unit)
            for value, size in self.extents.items()
        }
        used = max((start[i] + extents[i] for i in extents), default=0) // self.unit
        self.arena = self._integer(everything, used)
        self.outside = self._integer(everything, None)
        self.least = min(max(0, peaks.start // self.unit), everything)
        self.total = self.model.new_int_var(self.least, everything, "peak")
        self.model.add(self.arena + self.outside <= self.total)
        for value, size in self.extents.items():
            self.model.add(self.A[value] + size <= self.arena)
        rest = [value for value in range(len(tasks.values)) if value not in extents]
        for t in range(len(tasks)):
            inside = self.bytes_at(t, list(extents), (0,) * len(tasks))
            self.model.add(inside <= self.arena)
            self.model.add(self.bytes_at(t, rest, tasks.transient) <= self.outside)
        for one, other in meeting_pairs(self.windows, extents):
            self._apart(one, other)
        self.model.minimize(self.total)

    def _integer(self, most: int, hint: int | None) -> Any:
        variable = self.model.new_int_var(0, most, "")
        if hint is not None:
            self.model.add_hint(variable, hint)
        return variable

    def _apart(self, one: int, other: int) -> None:
        """Add eq. 6 and 7 of two values."""
        model, A = self.model, self.A
        below, above = model.new_bool_var("a"), model.new_bool_var("b")
        model.add_at_most_one(below, above)
        model.add(A[one] + self.extents[one] <= A[other]).only_enforce_if(below)
        model.add(A[other] + self.extents[other] <= A[one]).only_enforce_if(above)
        for t in shared_steps(self.windows, one, other):
            for x in self.live(one, t):
                for y in self.live(other, t):
                    model.add_bool_or(below, above, ~x, ~y)


def shared_steps(windows: Windows, one: int, other: int) -> range:
    """Return the steps at which two values may be in memory together."""
    first, second = (windows.lasting(windows.edges[value]) for value in (one, other))
    return range(max(first.start, second.start), min(first.stop, second.stop))


def meeting_pairs(windows: Windows, values: Collection[int]) -> list[tuple[int, int]]:
    """Return the pairs of values that may be in memory together (OLLA §4.2)."""
    return [
        (one, other)
        for one, other in combinations(values, 2)
        if not windows.never_meet(windows.edges[one], windows.edges[other])
    ]


def solve_jointly(
    tasks: Tasks,
    extents: Mapping[int, int],
    start: Mapping[int, int],
    peaks: range,
    how: CpSat,
    search: TimedSearch,
) -> JointAnswer:
    """Order tasks and place their values for the least memory.

    Args:
        tasks, extents, start: see `JointModel`.
        peaks: from a bound to the peak of the start, base included, bytes.
        how: options of the solver.
        search: its clock and its listener.
    """
    windows = Windows(tasks)
    pairs = meeting_pairs(windows, extents)
    rows = sum(len(shared_steps(windows, *pair)) for pair in pairs)
    if rows > MOST_ROWS:
        return JointAnswer((), {}, peaks.start, rows, too_large=True)
    base = tasks.base
    model = JointModel(tasks, extents, start, range(peaks.start - base, peaks.stop - base))

    def watch(peak: float, bound: float) -> None:
        low = base + int(bound) * model.unit
        search.tell(base + int(peak) * model.unit, max(peaks.start, low))

    options = how.options(search.left_s())
    status, solver = solve_with_cp_sat(model.model, options, watch=watch)
    units = ceil(solver.best_objective_bound - 1e-6)
    proved = units > model.least
    bound = max(peaks.start, base + units * model.unit) if proved else peaks.start
    limited = ran_out(options, solver.deterministic_time) or search.out_of_time()
    interrupted = status is not Status.OPTIMAL and not limited
    if status not in (Status.OPTIMAL, Status.FEASIBLE):
        return JointAnswer((), {}, bound, rows, interrupted=interrupted)
    return JointAnswer(
        order=model.order_of(solver),
        addresses={value: solver.value(x) * model.unit for value, x in model.A.items()},
        bound=bound,
        rows=rows,
        interrupted=interrupted,
    )


def order_and_place_together(
    graph: Graph,
    program: Program,
    how: CpSat,
    *,
    bound_bytes: int = 0,
    alignment: int = 1,
    place_results: bool = True,
    time_limit_s: float | None = None,
    work_limit: int = DEFAULT_WORK_LIMIT,
    on_improvement: Improvement | None = None,
) -> tuple[Program, int, dict[str, object]]:
    """Give every lifetime an address, and reorder the program where that makes it smaller.

    Args:
        graph: the cost model of the program.
        program: valid, without transfers; its order is the first, and its in-place outputs stay.
        how: options of CP-SAT. Without a warm start the search for the first addresses is short.
        bound_bytes: known of every order's peak, resident included.
        alignment, place_results: see `place_program`.
        time_limit_s: wall clock, seconds.
        work_limit: of the search for the first addresses.
        on_improvement: called with (seconds, peak, bound) at each better one.

    Returns:
        The program with its offsets; a bound on arena and memory outside it of every order, with
        these in-place outputs, bytes; and stats: "rows" of the program, "too_large" where it was
        not made, "interrupted", "time_s".
    """
    search = TimedSearch(time_limit_s, on_improvement)
    first, placement = place_program(
        graph,
        program,
        alignment=alignment,
        place_results=place_results,
        time_limit_s=search.left_s(),
        work_limit=work_limit if how.warm_start else 0,
        seed=how.seed,
    )
    timeline = replay(graph, first)
    peak = timeline.placed_peak_bytes
    if peak is None or timeline.arena_bytes is None or peak <= bound_bytes:
        return first, min(bound_bytes, peak or bound_bytes), {}
    aligned, never = alignment_of(graph, alignment), never_placed(graph, place_results)
    problem, keyed = tasks_of(graph, first), _keyed(graph, first)
    numbers = {key: number for number, key in enumerate(keyed)}
    extents = {
        numbers[key]: -(-graph.tensors[storage.first.tensor].size_bytes // aligned) * aligned
        for key, storage in keyed.items()
        if storage.id in placement.offsets and graph.tensors[storage.first.tensor].size_bytes
    }
    start = {numbers[key]: placement.offsets.get(x.id, 0) for key, x in keyed.items()}
    known = placement.peak + peak - timeline.arena_bytes
    answer = solve_jointly(
        storage_tasks(problem, first),
        extents,
        start,
        range(bound_bytes, known),
        how,
        search,
    )
    stats: dict[str, object] = {"rows": answer.rows, "interrupted": answer.interrupted}
    stats |= {"too_large": answer.too_large, "time_s": search.elapsed_s()}
    if not answer.order:
        return first, min(answer.bound, peak), stats
    ordered = problem.program(answer.order)
    offsets = {
        storage.id: answer.addresses.get(numbers[key], 0)
        for key, storage in _keyed(graph, ordered).items()
        if keyed[key].id in placement.offsets
    }
    best = _with_addresses(graph, ordered, offsets, placement, never)
    best_bytes = replay(graph, best).placed_peak_bytes
    assert best_bytes is not None
    if best_bytes >= peak:
        best, best_bytes = first, peak
    return best, min(answer.bound, best_bytes), stats


def _with_addresses(
    graph: Graph,
    program: Program,
    offsets: dict[str, int],
    placement: Placement,
    never: set[int],
) -> Program:
    """Return the program with the offsets of its storages, by their id."""
    chosen = [x for x in storages(lifetimes(graph, program).device) if x.id in offsets]
    return with_offsets(graph, program, chosen, replace(placement, offsets=offsets), never)


def _keyed(graph: Graph, program: Program) -> dict[tuple[int, int], Storage]:
    """Return a program's storages by their first tensor and how many of that tensor's lifetimes
    begin before, which is the same in every order."""
    count: dict[int, int] = {}
    found = {}
    listed = lifetimes(graph, program).device
    firsts = {id(storage.first): storage for storage in storages(listed)}
    for lifetime in listed:
        at = count.get(lifetime.tensor, 0)
        count[lifetime.tensor] = at + 1
        if id(lifetime) in firsts:
            found[lifetime.tensor, at] = firsts[id(lifetime)]
    return dict(sorted(found.items(), key=lambda entry: entry[1].first.key))
