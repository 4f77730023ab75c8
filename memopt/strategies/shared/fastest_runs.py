"""The fastest program where memory is no matter: what results need runs once, by the
implementations that are fastest together.

An implementation may read what only another operator's implementation writes, and two may share an
operator's results. Backwards over the operators, a state is the tensors that later runs want, with
the least seconds of such runs. Operators that share no such decision are planned apart: what every
program computes, and one operator alone can write, is no decision.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

from memopt.models.bounds import needed_operators
from memopt.models.disjoint import DisjointSets
from memopt.models.graph import Graph
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Program
from memopt.programs.liveness import computes, with_frees
from memopt.strategies.shared.graph_model import Allowed, Choice, choices_of

STATES = 256
"""The most states that are kept at an operator; of more, the fastest are."""

_Run = tuple[int, str | None]
"""(operator, implementation)."""
_Path = tuple[tuple[_Run, ...], "_Path"] | None
"""An operator's runs, and those of the operators after it."""
_States = dict[frozenset[int], tuple[float, _Path]]
"""Wanted tensors → (seconds, runs)."""


def fastest_program(graph: Graph, allowed: Allowed | None) -> tuple[Program, bool]:
    """Return the fastest program found without a budget, and whether none is faster. Collectives
    count as if the compute stream waited for each.

    Args:
        graph: a step, or a graph without a backward.
        allowed: which implementations may be chosen; None: all. The host runs none of them.
    """
    search = _Decisions(graph, allowed)
    runs = sorted((run for part in search.parts() for run in search.fastest(part)), key=_operator)
    names = iter(runs)
    steps = [
        Compute(step.op, (), next(names)[1]) if isinstance(step, Compute) else step
        for step in computes(graph, map(_operator, runs))
    ]
    return with_in_place(graph, Program(with_frees(graph, steps))), search.exact


def _operator(run: _Run) -> int:
    return run[0]


@dataclass
class _Decisions:
    """The decisions of one graph.

    Attributes:
        exact: whether nothing was left out so far.
    """

    graph: Graph
    allowed: Allowed | None
    exact: bool = True
    choices: list[list[Choice]] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Tensor → operators that can write it, ascending."""

    def __post_init__(self) -> None:
        graph = self.graph
        there = graph.resident | set(graph.tangents)
        every = [choices_of(operator, self.allowed) for operator in graph.operators]
        found = [[c for c in row if not c[1].on_host] for row in every]
        while found != self.choices:
            # Of these, earlier operators write all that a run reads.
            self.choices = found
            self.writers.clear()
            for i, row in enumerate(found):
                for t in {t for _, choice in row for t in choice.writes}:
                    self.writers[t].append(i)
            first = {t: indices[0] for t, indices in self.writers.items()}
            found = [
                [c for c in row if all(t in there or first.get(t, i) < i for t in c[1].reads)]
                for i, row in enumerate(found)
            ]
        self.exact = found == every
        names = [{name for name, _ in row} for row in self.choices]
        operators = (
            replace(o, implementations=tuple(c for c in o.implementations if c.name in known))
            for o, known in zip(graph.operators, names, strict=True)
        )
        needed = needed_operators(replace(graph, operators=tuple(operators), allocator_owned=()))
        common = (
            frozenset.intersection(*(frozenset(c.reads) for _, c in self.choices[i]))
            for i in needed
        )
        self.sure = graph.kept.union(*common) - there
        alone = {t for t in self.sure if len(self.writers[t]) == 1}
        self.settled = there | alone

    def parts(self) -> Iterator[list[int]]:
        """Yield the operators that share a decision, ascending."""
        together, seen = DisjointSets[int](), dict[int, int]()
        for i, row in enumerate(self.choices):
            for t in {t for _, c in row for t in (*c.reads, *c.writes)} - self.settled:
                together.join(seen.setdefault(t, i), i)
        yield from together.sets(range(len(self.choices)))

    def fastest(self, part: list[int]) -> Iterator[_Run]:
        """Yield the runs of a part's operators that are fastest together, the last first."""
        wanted = {t for i in part for _, c in self.choices[i] for t in c.writes if t in self.sure}
        states: _States = {frozenset(wanted): (0.0, None)}
        for i in reversed(part):
            found: _States = {}
            for wants, (seconds, path) in states.items():
                for chosen in self._ways(i, wants):
                    rest = wants.difference(*(c.writes for _, c in chosen))
                    rest |= {t for _, c in chosen for t in c.reads} - self.settled
                    if any(self.writers[t][0] >= i for t in rest):
                        continue
                    time_s = seconds + sum(c.time_s for _, c in chosen)
                    if rest not in found or time_s < found[rest][0]:
                        found[rest] = time_s, (tuple((i, name) for name, _ in chosen), path)
            states = self._best(found)
        if frozenset() not in states:
            yield from ((i, None) for i in part)
            return
        path = states[frozenset()][1]
        while path is not None:
            yield from path[0]
            path = path[1]

    def _ways(self, i: int, wants: frozenset[int]) -> Iterator[tuple[Choice, ...]]:
        """Yield the runs of operator i that may serve what is wanted: none, one, or some that each
        write what the others do not."""
        operator, row = self.graph.operators[i], self.choices[i]
        writes = [wants.intersection(c.writes) for _, c in row]
        own = frozenset().union(*writes)
        if not operator.has_effects:
            yield ()
        for choice, mine in zip(row, writes, strict=True):
            if mine or operator.has_effects:
                yield (choice,)
        parts = [n for n, mine in enumerate(writes) if mine and mine != own]
        if not operator.recomputable or operator.random:
            return
        for count in range(2, min(len(own), len(parts)) + 1):
            for some in combinations(parts, count):
                served = [t for n in some for t in writes[n]]
                if all(any(served.count(t) == 1 for t in writes[n]) for n in some):
                    yield tuple(row[n] for n in some)

    def _best(self, found: _States) -> _States:
        """Drop states that want more than another one and are no faster."""
        if len(found) == 1:
            return found
        kept: _States = {}
        for wants, one in sorted(found.items(), key=lambda item: (item[1][0], len(item[0]))):
            if not any(other <= wants for other in kept):
                kept[wants] = one
        if len(kept) > STATES:
            self.exact = False
            kept = dict(list(kept.items())[:STATES])
        return kept
