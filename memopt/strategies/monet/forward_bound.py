"""A bound for graphs without a backward: the relaxation at the first runs of some operators.

Time point c is the first run of operator k_c. Between two of them, and after the last, only which
operators run again counts, not when, nor their memory. So its optimum bounds every program that
runs operators for the first time in the graph's order, each as often again as it likes.

Variables: h[c,t] tensor t is in memory at time point c
    r[c,i] operator i runs again after it, before the next
Constraints: h[c+1,t] ≤ h[c,t] + what runs in between and writes t → `_there`
    what runs after c, again or first, finds its operands there or written since → `_reads`
    results are there at the end; Σ_t h[c,t] |t| + operator k_c's own ≤ budget → `_time_point`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from memopt.models.bounds import needed_operators, time_lower_bound
from memopt.models.graph import Graph
from memopt.strategies.base import Status
from memopt.strategies.solvers.binary_program import BinaryProgram
from memopt.strategies.solvers.running import Deadline, Solver, SolverOptions

GAP = 1e-3
"""Of the time of repeated runs, at which one relaxation ends."""
ROUND_SHARE = 0.4
"""Share of the time left that one relaxation may take."""
MOST_POINTS = 48
MORE = 2
"""Time points added at once."""


@dataclass
class ForwardBoundModel:
    """The relaxation of a graph, all forward, its operators run as they are.

    Attributes:
        graph: without implementations.
        at: k_1 < k_2 < ..., operators that must run.
    """

    graph: Graph
    at: tuple[int, ...]
    model: BinaryProgram = field(default_factory=BinaryProgram)

    def __post_init__(self) -> None:
        graph = self.graph
        self.needed = needed_operators(graph)
        self.held: list[dict[int, int]] = []
        """h: time point → tensor → variable."""
        self.runs: list[dict[int, int]] = []
        """r: time point → operator → variable."""
        for point, k in enumerate(self.at):
            self._time_point(point, k)
            self._reads(point)
        last = len(self.at) - 1
        for t in graph.kept:
            if graph.producer.get(t, self.at[last]) < self.at[last]:
                self.model.at_least_one(self._there(last, t))

    def _end(self, point: int) -> int:
        """Give the operator at the next time point."""
        return self.at[point + 1] if point + 1 < len(self.at) else len(self.graph.operators)

    def _time_point(self, point: int, k: int) -> None:
        """Add what is in memory at a time point, and what may run after it."""
        graph, model = self.graph, self.model
        tensors = self._wanted(k)
        held = {t: model.variable() for t in sorted(tensors)}
        if point:
            for t, v in held.items():
                if not self.at[point - 1] <= graph.producer[t] < k:
                    model.implies_any(v, self._there(point - 1, t))
        makers = sorted({graph.producer[t] for t in tensors})
        again = [i for i in makers if graph.operators[i].recomputable]
        self.held.append(held)
        self.runs.append({i: model.variable(graph.operators[i].time_s) for i in again})
        operator = graph.operators[k]
        for t in operator.reads:
            if t in held:
                model.fixed[held[t]] = True
        own = sum(graph.tensors[t].size_bytes for t in operator.writes) + operator.workspace_bytes
        if operator.in_place:
            own -= graph.tensors[operator.writes[0]].size_bytes
        model.memory(own, [(graph.tensors[t].size_bytes, v) for t, v in held.items()])

    def _wanted(self, k: int) -> set[int]:
        """Find the tensors written before operator k of use from there on."""
        graph = self.graph
        stack = [t for i in range(k, len(graph.operators)) if i in self.needed
                 for t in graph.operators[i].reads]  # fmt: skip
        stack += graph.kept
        found: set[int] = set()
        while stack:
            t = stack.pop()
            i = graph.producer.get(t, k)
            if i < k and t not in found:
                found.add(t)
                if graph.operators[i].recomputable:
                    stack += graph.operators[i].reads
        return found

    def _there(self, point: int, t: int) -> list[int]:
        """List what gives an earlier tensor between a time point and the next."""
        maker = self.graph.producer[t]
        found = [self.held[point][t]] if t in self.held[point] else []
        return found + ([self.runs[point][maker]] if maker in self.runs[point] else [])

    def _reads(self, point: int) -> None:
        """What runs after a time point finds its operands."""
        graph, model, begin = self.graph, self.model, self.at[point]
        for i, v in self.runs[point].items():
            for t in graph.operators[i].reads:
                if graph.producer.get(t, begin) < begin:
                    model.implies_any(v, self._there(point, t))
        for i in range(begin + 1, self._end(point)):
            for t in graph.operators[i].reads if i in self.needed else ():
                if graph.producer.get(t, begin) < begin:
                    model.at_least_one(self._there(point, t))

    def sequence(self, values: tuple[bool, ...]) -> list[int]:
        """Read a solution as operators in the order in which they run, again as late as they
        can, in whatever memory that takes."""
        order = sorted(self.needed)
        found = [i for i in order if i < self.at[0]]
        for point, begin in enumerate(self.at):
            have = {t for t, v in self.held[point].items() if values[v]}
            again = {i for i, v in self.runs[point].items() if values[v]}
            for i in (i for i in order if begin <= i < self._end(point)):
                if i > begin:
                    found += self._late(self.graph.operators[i].reads, again, have)
                found.append(i)
                have.update(self.graph.operators[i].writes)
            following = self.held[point + 1].items() if point + 1 < len(self.at) else ()
            found += self._late((t for t, v in following if values[v]), again, have)
        return found

    def _late(self, tensors: Iterable[int], again: set[int], have: set[int]) -> list[int]:
        """List the runs, of those still to come, that make tensors which are not there."""
        wanted: set[int] = set()
        stack = list(tensors)
        while stack:
            t = stack.pop()
            i = self.graph.producer.get(t)
            if t not in have and i in again and i not in wanted:
                wanted.add(i)
                stack += self.graph.operators[i].reads
        again -= wanted
        have.update(t for i in wanted for t in self.graph.operators[i].writes)
        return sorted(wanted)


@dataclass
class ForwardBound:
    """Solves the relaxation again and again, with time points where its plan needs too much.

    Attributes:
        graph: all forward.
        budget_bytes: total bytes.
        memory: bytes, without what is resident, at every run of a sequence of operators.
        deadline: asked before every solve.
        bound_s: what no program of the class beats, seconds.
        infeasible: whether there is no program of the class.
        sequences: those of the relaxations whose plan keeps the budget.
    """

    graph: Graph
    budget_bytes: int
    memory: Callable[[list[int]], Sequence[int]]
    deadline: Deadline
    bound_s: float = 0.0
    infeasible: bool = False
    rounds: int = 0
    sequences: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.least_s = self.bound_s = time_lower_bound(self.graph)

    def run(self) -> ForwardBound:
        """Raise the bound until a relaxation is a plan, or time or points run out; give this."""
        sequence: list[int] | None = sorted(needed_operators(self.graph))
        at: set[int] = set()
        while sequence is not None and len(at) < MOST_POINTS:
            more = self._worst(sequence, at)
            what = f"forward bound {self.rounds}, {self.bound_s:.6g} s"
            if not more or self.deadline.passed(0.1, what):
                break
            at |= more
            sequence = self._solved(at)
        return self

    def _solved(self, at: set[int]) -> list[int] | None:
        """Solve the relaxation at time points; give its plan, if it has one."""
        options = SolverOptions(
            Solver.HIGHS,
            time_limit_s=max(1.0, ROUND_SHARE * self.deadline.left_s),
            progress=self.deadline.progress,
            gap=GAP,
        )
        built = ForwardBoundModel(self.graph, tuple(sorted(at)))
        answer = built.model.solve(self.budget_bytes - self.graph.resident_bytes, options)
        self.rounds += 1
        self.bound_s = max(self.bound_s, self.least_s + answer.bound)
        self.infeasible = answer.status is Status.INFEASIBLE
        return built.sequence(answer.values) if answer.values else None

    def _worst(self, sequence: list[int], known: set[int]) -> set[int]:
        """Find first runs, none of the known ones, near which a sequence needs most beyond the
        budget, not all in one place."""
        limit = self.budget_bytes - self.graph.resident_bytes
        need = self.memory(sequence)
        most: dict[int, int] = {}
        begun, beyond = set[int](), 0
        for i, size_bytes in zip(sequence, need, strict=True):
            # What repeated runs need counts at the first run after them.
            beyond = max(beyond, size_bytes - limit)
            if i not in begun:
                begun.add(i)
                if beyond > 0 and i not in known:
                    most[i] = beyond
                beyond = 0
        found: set[int] = set()
        apart = len(begun) // (2 * MORE + len(known))
        for i in sorted(most, key=lambda i: (-most[i], i)):
            if len(found) < MORE and all(abs(i - other) >= apart for other in found):
                found.add(i)
        return found
