"""A relaxation with few moments, for graphs too large for a stage per operator.

Moment 0 is the loss boundary; moment c > 0 is the run of a chosen backward operator k_c. Between
two moments only which operators run again counts, not when, so its optimum is a lower bound for
every program without transfers that runs backward operators in the graph's order (with moment 0
alone: in any order) and operators that may not run twice, or draw random numbers, in their place.

Variables: d[i,l]   forward operator i runs by implementation l before the boundary
    r[c,i,l] it runs again between moments c and c+1
    b[k,l]   backward operator k runs by l
    s[c,t]   forward tensor t is in memory at moment c
Constraints: s[0,t] ≤ Σ d that write t; s[c,t] ≤ s[c-1,t] + Σ r[c-1] that write t
    d, r and b run only where what they read is there: from d; s[c] or r[c]; s[c] at moment c
    what the step ends with is written; Σ_t s[c,t] |t| + gradients + the operator ≤ budget
`program` reads an answer as a program that runs each operator again as late as it can.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memopt.models.bounds import needed_operators
from memopt.models.graph import Graph, Operator
from memopt.models.variants import Variant, variant
from memopt.programs.instructions import Compute, Instruction, LossBoundary, Program
from memopt.programs.liveness import with_frees
from memopt.strategies.monet.backend import Model

Choice = tuple[str | None, Operator | Variant]
Allowed = Callable[[Operator, str], bool]
"""allowed(operator, implementation name): whether the solver may choose it."""


def choices_of(operator: Operator, allowed: Allowed | None) -> list[Choice]:
    """The operator's own figures first, then those of the implementations allowed."""
    names = [choice.name for choice in operator.implementations]
    if allowed is not None:
        names = [name for name in names if allowed(operator, name)]
    return [(name, variant(operator, name)) for name in (None, *names)]


@dataclass
class MomentModel:
    """The relaxation of a graph at the boundary and at the runs of some backward operators.

    Attributes:
        graph: the training step.
        allowed: which implementations may be chosen; None: all.
        at: the operators k_1 < k_2 < ..., backward ones.
        slack_bytes: for the boundary and each of `at`, memory to leave free: a heuristic for
            programs that need more between moments; the optimum is a bound only without.
    """

    graph: Graph
    allowed: Allowed | None = None
    at: tuple[int, ...] = ()
    slack_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        graph = self.graph
        self.model = Model()
        self.first, self.count = graph.first_backward, len(graph.operators)
        self.size = [tensor.size_bytes for tensor in graph.tensors]
        self.choices = [choices_of(operator, self.allowed) for operator in graph.operators]
        self.made = self._writers(range(self.first))
        """Forward tensor → (operator, place of the implementation) that write it."""
        self.gradients = self._writers(range(self.first, self.count))
        self.needed = needed_operators(graph)
        self.run = [self._runs(i) for i in range(self.count)]
        """d of the forward operators, b of the others."""
        self.s: list[dict[int, int]] = []
        self.r: list[dict[int, list[int]]] = []
        self._once()
        for moment in range(len(self.at) + 1):
            self._moment(moment)
        self._backward()

    def _runs(self, i: int) -> list[int]:
        """The variables of an operator's run."""
        return [self.model.variable(choice.time_s) for _, choice in self.choices[i]]

    def _in_its_place(self, i: int) -> bool:
        """Whether a forward operator that must run may not run twice: it does in the forward."""
        plain = i < self.first and not self.graph.operators[i].recomputable
        return plain and i in self.needed

    def _writers(self, operators: Iterable[int]) -> dict[int, list[tuple[int, int]]]:
        writers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for i in operators:
            for place, (_, choice) in enumerate(self.choices[i]):
                for t in choice.writes:
                    writers[t].append((i, place))
        return dict(writers)

    def _once(self) -> None:
        """Every operator's run: what it reads is written, what the step ends with too."""
        model, graph = self.model, self.graph
        writers = self.made | self.gradients
        there = graph.resident.union(graph.tangents, writers)
        for i, choices in enumerate(self.choices):
            operator = graph.operators[i]
            if self._in_its_place(i) or operator.has_effects:
                model.add([(-1, v) for v in self.run[i]], -1)
            if not operator.recomputable:
                model.add([(1, v) for v in self.run[i]], 1)
            for (_, choice), v in zip(choices, self.run[i], strict=True):
                if not there.issuperset(choice.reads):
                    # Only what may not be chosen writes an operand.
                    model.fixed[v] = False
                for t in choice.reads:
                    if t in writers and (i < self.first) == (t in self.made):
                        model.implies_any(v, [self.run[j][p] for j, p in writers[t]])
        for t in graph.kept:
            if t in writers:
                model.add([(-1, self.run[j][p]) for j, p in writers[t]], -1)

    def _needed(self, begin: int) -> tuple[set[int], set[int]]:
        """(forward tensors, operators that may run again) of use to operators from `begin` on."""
        tensors: set[int] = set()
        operators: set[int] = set()
        stack = [
            t for k in range(begin, self.count) for _, choice in self.choices[k]
            for t in choice.reads
        ]  # fmt: skip
        while stack:
            t = stack.pop()
            if t not in self.made or t in tensors:
                continue
            tensors.add(t)
            for i, _ in self.made[t]:
                if i not in operators and self.graph.operators[i].recomputable:
                    operators.add(i)
                    stack += [u for _, choice in self.choices[i] for u in choice.reads]
        return tensors, operators

    def _moment(self, moment: int) -> None:
        """What is in memory at a moment, and what runs again after it."""
        model, graph = self.model, self.graph
        begin = self.at[moment - 1] if moment else self.first
        tensors, operators = self._needed(begin)
        kept = {t for t in graph.kept if t in self.made}
        held = {t: model.variable() for t in sorted(tensors | kept)}
        for t, v in held.items():
            if t in kept:
                model.fixed[v] = True
                continue
            sources = [self.run[j][p] for j, p in self.made[t]]
            if moment:
                before = self.r[-1]
                sources = [before[j][p] for j, p in self.made[t] if j in before]
                sources += [self.s[-1][t]] if t in self.s[-1] else []
            model.implies_any(v, sources)
        again = {
            i: [model.variable(c.time_s) for _, c in self.choices[i]] for i in sorted(operators)
        }
        self.s.append(held)
        self.r.append(again)
        for i, variables in again.items():
            for (_, choice), v in zip(self.choices[i], variables, strict=True):
                for t in choice.reads:
                    if t in self.made:
                        model.implies_any(v, self._sources(moment, t))
        terms = [(self.size[t], v) for t, v in held.items()]
        slack = self.slack_bytes[moment] if self.slack_bytes else 0
        if not moment:
            if graph.tangents or self.first < self.count:
                model.memory(slack + self._bytes(graph.tangents) + graph.boundary_bytes, terms)
            return
        read_by_some = {t for _, choice in self.choices[begin] for t in choice.reads}
        for (_, choice), chosen in zip(self.choices[begin], self.run[begin], strict=True):
            constant = slack + self._gradient_bytes(begin, choice) + self._bytes(choice.writes)
            taken = max((self.size[t] for t in choice.in_place), default=0)
            # What implementations of others make useless need not run.
            one = len(self.choices[begin]) == 1 and begin in self.needed
            constant += choice.workspace_bytes - taken
            # Of two runs that give one result each, the second need not hold the first's operands.
            gone = read_by_some - set(choice.reads) - kept
            held_here = [(self.size[t], v) for t, v in held.items() if t not in gone]
            model.memory(constant, held_here, None if one else chosen)

    def _sources(self, moment: int, t: int) -> list[int]:
        """s and r that give a forward tensor between a moment and the next."""
        again = self.r[moment]
        found = [again[j][p] for j, p in self.made[t] if j in again]
        return found + ([self.s[moment][t]] if t in self.s[moment] else [])

    def _backward(self) -> None:
        """Backward operators find their forward operands: held at a moment, or made since."""
        for k in range(self.first, self.count):
            moment = bisect_right(self.at, k)
            exact = moment > 0 and self.at[moment - 1] == k
            for (_, choice), v in zip(self.choices[k], self.run[k], strict=True):
                for t in choice.reads:
                    if t in self.made:
                        there = [self.s[moment][t]] if exact else self._sources(moment, t)
                        self.model.implies_any(v, there)

    def _bytes(self, tensors: Iterable[int]) -> int:
        return sum(self.size[t] for t in tensors)

    def _gradient_bytes(self, k: int, choice: Operator | Variant) -> int:
        """Bytes of the backward's tensors that every program holds when operator k runs so."""
        held = set(self.graph.tangents).union(self.gradients).intersection(choice.reads)
        for t, writers in self.gradients.items():
            sure = len({i for i, _ in writers}) == 1 and writers[0][0] < k
            if sure and self._sure(t, k):
                held.add(t)
        held.update(t for t in self.graph.tangents if self._sure(t, k))
        return self._bytes(held)

    def _sure(self, t: int, k: int) -> bool:
        """Whether a tensor must be held when operator k runs: the step ends with it, or an
        operator that must run, from k on, reads it under every implementation."""
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
        """The program of a solution: run again just before the first need, freed after the last."""
        instructions: list[Instruction] = []
        for i in range(self.first):
            instructions += self._chosen(i, self.run[i], values)
        if self.graph.tangents or self.first < self.count:
            instructions.append(LossBoundary())
        have: set[int] = set()
        for moment in range(len(self.at) + 1):
            held = {t for t, v in self.s[moment].items() if values[v]}
            begin = self.at[moment - 1] if moment else self.first
            last = self.at[moment] if moment < len(self.at) else self.count
            have = held
            run = _Lazy(self, moment, values, have)
            for k in range(begin, last):
                instructions += run.before(self._reads(k, values))
                instructions += self._chosen(k, self.run[k], values)
            if moment < len(self.at):
                following = {t for t, v in self.s[moment + 1].items() if values[v]}
                instructions += run.before(following)
        return Program(with_frees(self.graph, instructions))

    def _reads(self, k: int, values: tuple[bool, ...]) -> set[int]:
        pairs = zip(self.choices[k], self.run[k], strict=True)
        return {t for (_, choice), v in pairs if values[v] for t in choice.reads}

    def _chosen(self, i: int, variables: Sequence[int], values: tuple[bool, ...]) -> list[Compute]:
        pairs = zip(self.choices[i], variables, strict=True)
        return [Compute(i, (), name) for (name, _), v in pairs if values[v]]


class _Lazy:
    """Runs operators again when something needs them, each at most once between two moments."""

    def __init__(
        self, built: MomentModel, moment: int, values: tuple[bool, ...], have: set[int]
    ) -> None:
        self.built, self.have = built, have
        self.maker: dict[int, tuple[int, int]] = {}
        for i, variables in built.r[moment].items():
            for place, v in enumerate(variables):
                if values[v]:
                    for t in built.choices[i][place][1].writes:
                        self.maker.setdefault(t, (i, place))

    def before(self, tensors: Iterable[int]) -> list[Compute]:
        """The runs that make tensors which are not there, in the graph's order."""
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
