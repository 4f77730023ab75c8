"""Plans graphs without a backward: an inference, or any DAG.

The class is Checkmate's and Moccasin's (Bartan et al., 2023): every operator that must run does so
first in the graph's order, with any number of repeated runs in between. Repeated runs are annealed
(`forward_kernels`); the bound is that of `forward_bound`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memopt.models.bounds import memory_lower_bound, needed_operators
from memopt.models.graph import Graph
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import computes, with_frees
from memopt.solvers.running import Deadline
from memopt.strategies.monet.forward_bound import ForwardBound
from memopt.strategies.monet.forward_kernels import PERIOD, GraphArrays, Ints, annealed, memory
from memopt.strategies.shared.incumbent import SAME, Incumbent

PART, STEPS, WORK = 10_000, 40, 12_000_000
"""The most steps of the search between two looks at the clock: in all, for each operator, and over
the number of operators and operands."""
RUNS = (3, 12, *[50] * 12)
"""The number of parts of each annealing, one annealing after the other."""
HOT, COLD = 1.0, 0.02
"""Temperatures of an annealing, first and last, in mean times of an operator."""
QUICK = 2
"""Annealings before the bound is computed."""
BISECTIONS = 8


@dataclass(frozen=True)
class ForwardSearch:
    """A search for programs of one graph, whose operators run without their implementations."""

    graph: Graph
    seed: int = 0

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Return the operators that must run, in the graph's order."""
        return tuple(sorted(needed_operators(self.graph)))

    @cached_property
    def arrays(self) -> GraphArrays:
        """Return the graph for the compiled code: operators by their place in `order`."""
        graph, operators = self.graph, [self.graph.operators[i] for i in self.order]
        tensors = [t for operator in operators for t in operator.writes]
        number = {t: n for n, t in enumerate(tensors)}
        reads = [[number[t] for t in dict.fromkeys(o.reads) if t in number] for o in operators]
        writes = [[number[t] for t in o.writes] for o in operators]

        def starts(rows: list[list[int]]) -> Ints:
            return np.cumsum([0, *map(len, rows)], dtype=np.int64)

        def whole(values: list[int]) -> Ints:
            return np.array(values, np.int64)

        return GraphArrays(
            starts(reads), whole([t for row in reads for t in row]),
            starts(writes), whole([t for row in writes for t in row]),
            whole([i for i, row in enumerate(writes) for _ in row]),
            whole([graph.tensors[t].size_bytes for t in tensors]),
            whole([t in graph.kept for t in tensors]),
            whole([o.workspace_bytes for o in operators]),
            whole([o.recomputable for o in operators]),
            np.array([o.time_s for o in operators], np.float64),
        )  # fmt: skip

    @cached_property
    def once(self) -> Ints:
        """Return the sequence in which nothing runs again."""
        return np.arange(len(self.order), dtype=np.int64)

    @property
    def steps(self) -> int:
        """Return how many neighbours one part of an annealing tries."""
        operators, operands = self.arrays.again.size, self.arrays.reads.size
        return max(PERIOD, min(PART, STEPS * operators, WORK // (1 + operators + operands)))

    def peak(self, sequence: Ints) -> int:
        """Return the peak bytes of a sequence, without resident ones."""
        return int(memory(sequence, self.arrays).max(initial=0))

    def program(self, sequence: Ints) -> Program:
        """Return the program of a sequence, with in-place outputs where allowed."""
        runs = computes(self.graph, (self.order[i] for i in sequence))
        return with_in_place(self.graph, Program(with_frees(self.graph, runs)))

    def annealing(self, limit: int, run: int) -> Iterator[Ints]:
        """Anneal from the sequence in which nothing runs again. Yield, after each part, its fastest
        sequence within `limit` bytes, empty if there was none."""
        sequence, price, parts = self.once, 1.0, RUNS[run]
        for part in range(parts):
            warmth = [HOT * (COLD / HOT) ** ((part + more) / parts) for more in (0, 1)]
            seed = (self.seed * len(RUNS) + run) * max(RUNS) + part
            sequence, price, best = annealed(
                sequence, self.arrays, limit, self.steps, (warmth[0], warmth[1]), price, seed
            )
            yield best

    def smallest(self) -> Program:
        """Search for the smallest peak by bisection: each step is a short annealing that tries to
        keep a limit. Return the best program. The result does not depend on the machine's speed."""
        best, high = self.once, self.peak(self.once)
        low = memory_lower_bound(self.graph) - self.graph.resident_bytes - 1
        for _ in range(BISECTIONS):
            if high - low <= 1:
                break
            middle = (low + high) // 2
            found = [sequence for sequence in self.annealing(middle, 0) if sequence.size]
            if found:
                best, high = found[-1], self.peak(found[-1])
            else:
                low = middle
        return self.program(best)

    def search(self, best: Incumbent, bound_s: float, runs: range, deadline: Deadline) -> int:
        """Offer faster and faster programs within the incumbent's budget.

        Returns:
            The number of annealings.
        """
        assert best.budget_bytes is not None
        for done, run in enumerate(runs):
            for found in self.annealing(best.budget_bytes - self.graph.resident_bytes, run):
                if found.size:
                    best.offer(self.program(found), "annealing")
                what = f"forward {run}: {best.time_s:.6g} s, bound {bound_s:.6g} s"
                if best.near(bound_s, SAME) or deadline.passed(0.5, what):
                    return done
        return len(runs)

    def bound(self, best: Incumbent, deadline: Deadline) -> ForwardBound:
        """Bound the programs of the class within the incumbent's budget; offer it the relaxation's
        own plan, if that keeps the budget."""
        assert best.budget_bytes is not None
        place = {i: n for n, i in enumerate(self.order)}

        def bytes_of(operators: list[int]) -> list[int]:
            sequence = np.array([place[i] for i in operators], np.int64)
            return [int(need) for need in memory(sequence, self.arrays)]

        found = ForwardBound(self.graph, best.budget_bytes, bytes_of, deadline).run()
        if found.sequence:
            sequence = np.array([place[i] for i in found.sequence], np.int64)
            best.offer(self.program(sequence), "relaxation")
        return found
