"""A bound for graphs without a backward: the relaxation at the first runs of some operators.

Time point c is the first run of operator k_c. Between two of them, and after the last, it counts
which operators run again, but not when. So its optimum bounds every program that runs operators for
the first time in the graph's order, each as often again as it likes.

Variables: h[c,t] tensor t is in memory at time point c
    r[c,i] operator i runs again after it, before the next
    a[c,t] tensor t is in memory all the time from c to the next
Constraints: h[c+1,t] ≤ h[c,t] + runs in between that write t → `_available`
    runs after c, again or first, find their operands in memory there or written since → `_reads`
    results are there at the end; Σ_t h[c,t] |t| + operator k_c's own ≤ budget → `_time_point`
    a[c,t] ≥ h[c,t] + h[c+1,t] - 1 - r[c, operators that write t] → `_throughout`
    r[c,i] = 1: Σ_t a[c,t] |t| + operator i's operands and own ≤ budget, of watched i → `_watch`
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from memopt.models.bounds import needed_operators
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.solvers.binary_program import BinaryProgram
from memopt.solvers.running import Deadline, Solver, SolverOptions

GAP = 1e-5
"""Gap at which one relaxation ends, as a share of the time of repeated runs."""
ROUND_SHARE = 0.4
"""Share of the time left that one relaxation may take."""
MOST_POINTS = 48
MORE = 2
"""Time points added after each solve."""


@dataclass
class ForwardBoundModel:
    """The relaxation of a graph, all forward, its operators run as they are.

    Attributes:
        graph: without implementations.
        at: k_1 < k_2 < ..., operators that must run.
        watched: (k, i): operator i's repeated runs before the first run of k, since the time point
            before it, need memory, too.
    """

    graph: Graph
    at: tuple[int, ...]
    watched: frozenset[tuple[int, int]] = frozenset()
    model: BinaryProgram = field(default_factory=BinaryProgram)

    def __post_init__(self) -> None:
        graph = self.graph
        self.needed = needed_operators(graph)
        self.held: list[dict[int, int]] = []
        """h: variable by time point and tensor."""
        self.runs: list[dict[int, int]] = []
        """r: variable by time point and operator."""
        for point, k in enumerate(self.at):
            self._time_point(point, k)
            self._reads(point)
        self.through: dict[tuple[int, int], int] = {}
        """a: variable by (time point, tensor)."""
        points = {(bisect_left(self.at, k) - 1, i) for k, i in self.watched}
        for point, i in sorted(points):
            if point in range(len(self.at) - 1) and i in self.runs[point]:
                self._watch(point, i)
        last = len(self.at) - 1
        for t in graph.kept:
            if graph.producer.get(t, self.at[last]) < self.at[last]:
                self.model.at_least_one(self._available(last, t))

    def _end(self, point: int) -> int:
        """Return the operator at the next time point."""
        return self.at[point + 1] if point + 1 < len(self.at) else len(self.graph.operators)

    def _time_point(self, point: int, k: int) -> None:
        """Add the tensors in memory at a time point, and the runs after it."""
        graph, model = self.graph, self.model
        tensors = self._wanted(k)
        held = {t: model.variable() for t in sorted(tensors)}
        if point:
            for t, v in held.items():
                if not self.at[point - 1] <= graph.producer[t] < k:
                    model.implies_any(v, self._available(point - 1, t))
        makers = sorted({graph.producer[t] for t in tensors})
        again = [i for i in makers if graph.operators[i].recomputable]
        self.held.append(held)
        self.runs.append({i: model.variable(graph.operators[i].time_s) for i in again})
        for t, v in held.items():
            # A result that was read stays in memory.
            stays = t in graph.kept and any(i < k and i in self.needed for i in graph.readers[t])
            if stays or t in graph.operators[k].reads:
                model.fixed[v] = True
        size = graph.tensors
        model.memory(self._own(k), [(size[t].size_bytes, v) for t, v in held.items()])

    def _own(self, i: int) -> int:
        """Return the bytes of a run of operator i beside its operands."""
        operator, size = self.graph.operators[i], self.graph.tensors
        own = sum(size[t].size_bytes for t in operator.writes) + operator.workspace_bytes
        return own - (size[operator.writes[0]].size_bytes if operator.in_place else 0)

    def _throughout(self, point: int, t: int) -> int:
        """Return the variable of a tensor in memory from a time point to the next."""
        if (point, t) not in self.through:
            self.through[point, t] = found = self.model.variable()
            terms = [(1, self.held[point][t]), (1, self.held[point + 1][t]), (-1, found)]
            again = self.runs[point].get(self.graph.producer[t])
            self.model.add([*terms, *([] if again is None else [(-1, again)])], 1)
        return self.through[point, t]

    def _watch(self, point: int, i: int) -> None:
        """Count the memory of operator i's repeated run after a time point."""
        graph, operator = self.graph, self.graph.operators[i]
        if len(operator.writes) != 1:
            # The run may be for one of its results alone.
            return
        operands = {t for t in operator.reads if t in graph.producer}
        size = graph.tensors
        own = self._own(i) + sum(size[t].size_bytes for t in operands)
        others = self.held[point].keys() & self.held[point + 1].keys()
        others -= operands.union(operator.writes)
        terms = [(size[t].size_bytes, self._throughout(point, t)) for t in sorted(others)]
        self.model.memory(own, terms, when=self.runs[point][i])

    def _wanted(self, k: int) -> set[int]:
        """Find the tensors written before operator k that are of use from there on."""
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

    def _available(self, point: int, t: int) -> list[int]:
        """List variables that make an earlier tensor available from a time point to the next."""
        maker = self.graph.producer[t]
        found = [self.held[point][t]] if t in self.held[point] else []
        return found + ([self.runs[point][maker]] if maker in self.runs[point] else [])

    def _reads(self, point: int) -> None:
        """Require that runs after a time point find their operands."""
        graph, model, begin = self.graph, self.model, self.at[point]
        for i, v in self.runs[point].items():
            for t in graph.operators[i].reads:
                if graph.producer.get(t, begin) < begin:
                    model.implies_any(v, self._available(point, t))
        for i in range(begin + 1, self._end(point)):
            for t in graph.operators[i].reads if i in self.needed else ():
                if graph.producer.get(t, begin) < begin:
                    model.at_least_one(self._available(point, t))

    def sequence(self, values: tuple[bool, ...]) -> list[int]:
        """Read a solution as a sequence of operators, repeated runs as late as possible, whatever
        memory that takes."""
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
        """List, of the repeated runs that are still to come, those that are needed to make tensors
        which are not in memory."""
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
    """Solves the relaxation repeatedly, adding time points where its plan needs too much memory.

    Attributes:
        graph: all forward.
        budget_bytes: total bytes.
        memory: bytes, without resident ones, at every run of a sequence of operators.
        deadline: asked before every solve.
        bound_s: a lower bound on the time of every program of the class, seconds.
        infeasible: whether there is no program of the class.
        at, watched: of `ForwardBoundModel`.
        sequence: the last relaxation's plan, which may exceed the budget.
    """

    graph: Graph
    budget_bytes: int
    memory: Callable[[list[int]], Sequence[int]]
    deadline: Deadline
    bound_s: float = 0.0
    infeasible: bool = False
    rounds: int = 0
    at: set[int] = field(default_factory=set)
    watched: set[tuple[int, int]] = field(default_factory=set)
    sequence: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        operators = self.graph.operators
        self.least_s = sum(operators[i].time_s for i in sorted(needed_operators(self.graph)))
        self.bound_s = self.least_s

    def run(self) -> ForwardBound:
        """Raise the bound until a relaxation is a plan, or time or points run out; return self."""
        sequence: list[int] | None = sorted(needed_operators(self.graph))
        while sequence is not None and len(self.at) < MOST_POINTS:
            what = f"forward bound {self.rounds}, {self.bound_s:.6g} s"
            if not self._more(sequence) or self.deadline.passed(0.1, what):
                break
            sequence = self.solved()
            self.sequence = sequence or self.sequence
        return self

    def solved(self) -> list[int] | None:
        """Solve the relaxation; return its plan, if it has one."""
        options = SolverOptions(
            Solver.HIGHS,
            time_limit_s=max(1.0, ROUND_SHARE * self.deadline.left_s),
            progress=self.deadline.progress,
            gap=GAP,
        )
        built = ForwardBoundModel(self.graph, tuple(sorted(self.at)), frozenset(self.watched))
        answer = built.model.solve(self.budget_bytes - self.graph.resident_bytes, options)
        self.rounds += 1
        self.bound_s = max(self.bound_s, self.least_s + answer.bound)
        self.infeasible = answer.status is Status.INFEASIBLE
        return built.sequence(answer.values) if answer.values else None

    def _more(self, sequence: list[int]) -> bool:
        """Add time points and watched runs where a sequence exceeds the budget most, not all in one
        place; tell whether there were any."""
        limit = self.budget_bytes - self.graph.resident_bytes
        operators = sorted(needed_operators(self.graph))
        following = iter([*operators, len(self.graph.operators)])
        k = next(following)
        places: list[tuple[int, int, int]] = []
        for i, size_bytes in zip(sequence, self.memory(sequence), strict=True):
            known = (k, i) in self.watched if i < k else k in self.at
            if size_bytes > limit and not known and k < len(self.graph.operators):
                places.append((limit - size_bytes, k, i))
            k = next(following) if i == k else k
        apart = len(operators) // (2 * MORE + len(self.at))
        found: list[int] = []
        for _, k, i in sorted(places):
            if len(found) < MORE and all(abs(k - other) >= apart for other in found):
                found.append(k)
                self.at.add(k)
                self.watched |= {(k, i)} if i < k else set()
        return bool(found)
