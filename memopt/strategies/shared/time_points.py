"""A relaxation with few time points, for graphs too large for a stage per operator.

Time point 0 is the loss boundary; time point c > 0 is the run of a chosen backward operator k_c.
Between two of them it counts which operators run again, but not when. So its optimum is a lower
bound for every program without transfers that runs backward operators in the graph's order (with
time point 0 alone: in any order) and operators that may not run twice, or draw random numbers, in
their place.

Variables: d[i,l]   forward operator i runs by implementation l before the boundary
    r[c,i,l] it runs again between time points c and c+1
    b[k,l]   backward operator k runs by l
    s[c,t]   forward tensor t is in memory at time point c
Constraints: s[0,t] ≤ Σ d that write t; s[c,t] ≤ s[c-1,t] + Σ r[c-1] that write t
    d, r and b run only where their operands are: from d; s[c] or r[c]; s[c] at point c
    results of the step are written; Σ_t s[c,t] |t| + gradients + the operator ≤ budget
`program` reads an answer as a program that runs each operator again as late as it can.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from memopt.models.bounds import needed_operators
from memopt.models.graph import Operator
from memopt.models.variants import Variant
from memopt.programs.instructions import Compute, Instruction, Program
from memopt.programs.liveness import with_frees
from memopt.strategies.shared.graph_model import GraphModel


@dataclass
class TimePointModel(GraphModel):
    """The relaxation of a graph at the boundary and at the runs of some backward operators.

    Attributes:
        at: the operators k_1 < k_2 < ..., backward ones.
        slack_bytes: for the boundary and each of `at`, memory to leave free: a heuristic for
            programs that need more between time points; the optimum is a bound only without.
    """

    at: tuple[int, ...] = ()
    slack_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gradients = self.writers(range(self.first, self.count))
        self.needed = self._needed_operators()
        self.run = [self.run_variables(i) for i in range(self.count)]
        """d of the forward operators, b of the others."""
        self.s: list[dict[int, int]] = []
        self.r: list[dict[int, list[int]]] = []
        self._once()
        for point in range(len(self.at) + 1):
            self._time_point(point)
        self._backward()

    def _needed_operators(self) -> frozenset[int]:
        """Find the operators that every program runs, by one of their implementations."""
        return needed_operators(self.graph)

    def _begin(self, point: int) -> int:
        """Return the first operator from a time point on."""
        return self.at[point - 1] if point else self.first

    def _once(self) -> None:
        """Require that the operands of every operator's run are written; results are, too."""
        model, graph = self.model, self.graph
        writers = self.made | self.gradients
        there = graph.resident.union(graph.tangents, writers)
        for i, choices in enumerate(self.choices):
            operator = graph.operators[i]
            once = i < self.first and i in self.needed and not operator.recomputable
            if once or operator.has_effects:
                model.at_least_one(self.run[i])
            if not operator.recomputable:
                model.at_most_one(self.run[i])
            for (_, choice), v in zip(choices, self.run[i], strict=True):
                if not there.issuperset(choice.reads):
                    # Only implementations that may not be chosen write an operand.
                    model.fixed[v] = False
                for t in choice.reads:
                    if t in writers and (i < self.first) == (t in self.made):
                        model.implies_any(v, [self.run[j][p] for j, p in writers[t]])
        for t in graph.kept:
            if t in writers:
                model.at_least_one([self.run[j][p] for j, p in writers[t]])

    def _needed(self, begin: int) -> tuple[set[int], set[int]]:
        """Find (forward tensors, operators that may run again) of use to operators from `begin`."""
        tensors: set[int] = set()
        operators: set[int] = set()
        stack = [
            t for k in range(begin, self.count) for _, choice in self.choices[k]
            for t in self._operands(k, choice)
        ]  # fmt: skip
        while stack:
            t = stack.pop()
            if t not in self.made or t in tensors:
                continue
            tensors.add(t)
            for i, _ in self.made[t]:
                if i not in operators and self.graph.operators[i].recomputable:
                    operators.add(i)
                    stack += [u for _, one in self.choices[i] for u in self._operands(i, one)]
        return tensors, operators

    def _operands(self, i: int, choice: Operator | Variant) -> tuple[int, ...]:
        """Return the tensors that a run of operator i may need."""
        return choice.reads

    def _time_point(self, point: int) -> None:
        """Add the tensors in memory at a time point, and the repeated runs after it."""
        model, graph = self.model, self.graph
        begin = self._begin(point)
        tensors, operators = self._needed(begin)
        kept = {t for t in graph.kept if t in self.made}
        held = {t: self.tensor_variable(t, "s", point) for t in sorted(tensors | kept)}
        for t, v in held.items():
            if t in kept:
                model.fixed[v] = True
                continue
            if point:
                model.implies_any(v, self._sources(point - 1, t))
            else:
                model.implies_any(v, [self.run[j][p] for j, p in self.made[t]])
        again = {i: self.run_variables(i, point) for i in sorted(operators)}
        self.s.append(held)
        self.r.append(again)
        for i, variables in again.items():
            for (_, choice), v in zip(self.choices[i], variables, strict=True):
                for t in choice.reads:
                    if t in self.made:
                        model.implies_any(v, self._sources(point, t))
        slack = self.slack_bytes[point] if self.slack_bytes else 0
        if not point:
            if self.has_boundary:
                self.boundary_row(held.items(), slack)
            return
        read_by_some = {t for _, choice in self.choices[begin] for t in choice.reads}
        for (_, choice), chosen in zip(self.choices[begin], self.run[begin], strict=True):
            constant = slack + self._gradient_bytes(begin, choice) + self.bytes_of(choice.writes)
            taken = max((self.size[t] for t in choice.in_place), default=0)
            # Operators that other implementations make useless need not run.
            one = len(self.choices[begin]) == 1 and begin in self.needed
            constant += choice.workspace_bytes - taken
            # Of two runs that each write one result, the second need not hold the first's operands.
            gone = read_by_some - set(choice.reads) - kept
            held_here = self.terms((t, v) for t, v in held.items() if t not in gone)
            model.memory(constant, held_here, None if one else chosen)

    def _sources(self, point: int, t: int) -> list[int]:
        """List s and r that make a forward tensor available between a time point and the next."""
        again = self.r[point]
        found = [again[j][p] for j, p in self.made[t] if j in again]
        return found + ([self.s[point][t]] if t in self.s[point] else [])

    def _backward(self) -> None:
        """Require that backward operators find their forward operands: held, or made since."""
        for k in range(self.first, self.count):
            point = bisect_right(self.at, k)
            exact = point > 0 and self.at[point - 1] == k
            for (_, choice), v in zip(self.choices[k], self.run[k], strict=True):
                for t in choice.reads:
                    if t in self.made:
                        there = [self.s[point][t]] if exact else self._sources(point, t)
                        self.model.implies_any(v, there)

    def _gradient_bytes(self, k: int, choice: Operator | Variant) -> int:
        """Sum the bytes of backward tensors that every program holds when operator k runs so."""
        held = set(self.graph.tangents).union(self.gradients).intersection(choice.reads)
        for t, writers in self.gradients.items():
            sure = len({i for i, _ in writers}) == 1 and writers[0][0] < k
            if sure and self._sure(t, k):
                held.add(t)
        held.update(t for t in self.graph.tangents if self._sure(t, k))
        return self.bytes_of(held)

    def _sure(self, t: int, k: int) -> bool:
        """Tell whether every program holds a tensor when operator k runs: the step ends with it, or
        an operator that must run, from k on, reads it under every implementation."""
        if t in self.graph.kept:
            return True
        return any(
            j >= k
            and self.graph.kept.intersection(self.graph.operators[j].writes)
            and all(t in choice.reads for _, choice in self.choices[j])
            and sum(len(self.gradients[u]) for u in self.graph.operators[j].writes)
            == len(self.graph.operators[j].writes) * len(self.choices[j])
            for j in self.graph.readers[t]
        )

    def program(self, values: tuple[bool, ...]) -> Program:
        """Read the program of a solution: operators run again just before their first need."""
        instructions: list[Instruction] = []
        for i in range(self.first):
            instructions += self.chosen(i, self.run[i], values)
        instructions += self.boundary()
        for point in range(len(self.at) + 1):
            run = _LateRuns(self, point, values, self._available(point, values))
            for k in range(self._begin(point), (*self.at, self.count)[point]):
                instructions += run.before(self._reads(k, values))
                instructions += self.chosen(k, self.run[k], values)
            if point < len(self.at):
                instructions += run.before(self._available(point + 1, values))
        return Program(with_frees(self.graph, instructions))

    def _available(self, point: int, values: tuple[bool, ...]) -> set[int]:
        """Find the forward tensors that a solution need not make after a time point."""
        return {t for t, v in self.s[point].items() if values[v]}

    def _reads(self, k: int, values: tuple[bool, ...]) -> set[int]:
        pairs = zip(self.choices[k], self.run[k], strict=True)
        return {t for (_, choice), v in pairs if values[v] for t in choice.reads}


class _LateRuns:
    """Runs operators again when something needs them, each at most once between two time points."""

    def __init__(
        self, built: TimePointModel, point: int, values: tuple[bool, ...], have: set[int]
    ) -> None:
        self.built, self.have = built, have
        self.maker: dict[int, tuple[int, int]] = {}
        for i, variables in built.r[point].items():
            for place, v in enumerate(variables):
                if values[v]:
                    for t in built.choices[i][place][1].writes:
                        self.maker.setdefault(t, (i, place))

    def before(self, tensors: Iterable[int]) -> list[Compute]:
        """List the runs that make tensors which are not in memory, in the graph's order."""
        wanted: set[tuple[int, int]] = set()
        stack = list(tensors)
        while stack:
            t = stack.pop()
            if t in self.have or t not in self.maker or self.maker[t] in wanted:
                continue
            wanted.add(self.maker[t])
            i, place = self.maker[t]
            stack += self.built.choices[i][place][1].reads
        for i, place in wanted:
            self.have.update(self.built.choices[i][place][1].writes)
        return [Compute(i, (), self.built.choices[i][place][0]) for i, place in sorted(wanted)]
