"""A graph as arrays, for the compiled loops: its variants, and runs of them as a program.

A *variant* is an operator by one of its implementations. *Runs* are an array with an entry for
each time point of a step: the number of the variant that runs there, or BOUNDARY.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from memopt.models.graph import Graph, Operator
from memopt.models.variants import Variant, variant
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.strategies.shared.graph_model import Allowed

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

BOUNDARY = -1
TRANSFERS = (Free, SwapIn, SwapOut, DropHost)
"""Instructions of the mover's events, by their kind."""
AFTER = 2
"""Events of this kind or a higher one follow the run of their time point."""


class VariantArrays(NamedTuple):
    """The variants of a graph's operators.

    Attributes:
        operator: of each variant.
        time_s, workspace_bytes: of each variant.
        reads_at, reads: tensors that variant v reads, without resident ones:
            reads[reads_at[v] : reads_at[v + 1]], each once.
        writes_at, writes: the same of the tensors it writes.
        over_at, over: the same of the tensors its first output may overwrite.
        size_bytes: of each tensor.
        kept: whether the step must end with a tensor.
        stays: whether a tensor never moves to the host: kept, resident, or a tangent.
        tangents: the tensors that appear at the loss boundary.
        resident_bytes, boundary_bytes: the graph's.
    """

    operator: Ints
    time_s: Floats
    workspace_bytes: Ints
    reads_at: Ints
    reads: Ints
    writes_at: Ints
    writes: Ints
    over_at: Ints
    over: Ints
    size_bytes: Ints
    kept: Flags
    stays: Flags
    tangents: Ints
    resident_bytes: int
    boundary_bytes: int


@dataclass(frozen=True, eq=False)
class RunTable:
    """The variants of a graph, and runs of them.

    Attributes:
        graph: the training step.
        allowed: which implementations there are; None: all.
    """

    graph: Graph
    allowed: Allowed | None = None

    @cached_property
    def variants(self) -> tuple[tuple[int, str | None], ...]:
        """Return (operator, implementation) of each variant, each operator's own one first."""
        return tuple(
            (i, name)
            for i, operator in enumerate(self.graph.operators)
            for name in self._names(operator)
        )

    def _names(self, operator: Operator) -> list[str | None]:
        """Return the implementations of an operator, its own first."""
        names = (choice.name for choice in operator.implementations)
        return [
            None,
            *(name for name in names if self.allowed is None or self.allowed(operator, name)),
        ]

    @cached_property
    def number(self) -> dict[tuple[int, str | None], int]:
        """Map (operator, implementation) to its variant's number."""
        return {variant: v for v, variant in enumerate(self.variants)}

    @cached_property
    def others(self) -> tuple[tuple[int, ...], ...]:
        """Return for each variant the others of its operator."""
        of: dict[int, list[int]] = defaultdict(list)
        for v, (operator, _) in enumerate(self.variants):
            of[operator].append(v)
        return tuple(
            tuple(u for u in of[operator] if u != v)
            for v, (operator, _) in enumerate(self.variants)
        )

    @cached_property
    def other_counts(self) -> Ints:
        """Return, for each variant, how many other variants its operator has."""
        return np.array([len(one) for one in self.others], dtype=np.int64)

    @cached_property
    def recomputable(self) -> Flags:
        """Tell of each variant whether its operator may run again."""
        operators = self.graph.operators
        return np.array([operators[i].recomputable for i, _ in self.variants], dtype=np.bool_)

    @cached_property
    def figures(self) -> tuple[Operator | Variant, ...]:
        """Return the operator or implementation behind each variant."""
        return tuple(variant(self.graph.operators[i], name) for i, name in self.variants)

    @cached_property
    def reads_of(self) -> tuple[tuple[int, ...], ...]:
        """Return the tensors that each variant reads, without resident ones, each once."""
        resident = self.graph.resident
        return tuple(
            tuple(t for t in dict.fromkeys(one.reads) if t not in resident) for one in self.figures
        )

    @cached_property
    def writes_of(self) -> tuple[tuple[int, ...], ...]:
        """Return the tensors that each variant writes."""
        return tuple(tuple(one.writes) for one in self.figures)

    @cached_property
    def arrays(self) -> VariantArrays:
        """Return the arrays of the compiled loops."""
        graph, resident, figures = self.graph, self.graph.resident, self.figures
        flags = np.zeros((2, len(graph.tensors)), dtype=np.bool_)
        flags[0, sorted(graph.kept)] = True
        flags[1, sorted(graph.kept | resident | set(graph.tangents))] = True
        return VariantArrays(
            np.array([i for i, _ in self.variants], dtype=np.int64),
            np.array([c.time_s for c in figures], dtype=np.float64),
            np.array([c.workspace_bytes for c in figures], dtype=np.int64),
            *_rows(self.reads_of),
            *_rows(self.writes_of),
            *_rows([c.in_place for c in figures]),
            np.array([tensor.size_bytes for tensor in graph.tensors], dtype=np.int64),
            flags[0],
            flags[1],
            np.array(graph.tangents, dtype=np.int64),
            graph.resident_bytes,
            graph.boundary_bytes,
        )

    def runs_of(self, program: Program) -> Ints:
        """Return the runs of a program, its transfers left out.

        Raises:
            KeyError: it runs an implementation that is not allowed.
        """
        number = self.number
        found = [number[run.op, run.implementation] for _, run in program.computes]
        if program.boundary is not None:
            points = [position for position, _ in program.computes]
            found.insert(bisect_left(points, program.boundary), BOUNDARY)
        return np.array(found, dtype=np.int64)

    def instruction(self, run: int) -> Instruction:
        """Return the Compute of a run, without its outputs, or the loss boundary."""
        if run == BOUNDARY:
            return LossBoundary()
        operator, name = self.variants[run]
        return Compute(operator, (), name)

    def instructions(self, runs: Ints, events: Ints) -> list[Instruction]:
        """Put the mover's events between runs; see `transfers` in the kernels."""
        before: dict[int, list[Instruction]] = {}
        after: dict[int, list[Instruction]] = {}
        for point, kind, tensor in events.tolist():
            side = after if kind >= AFTER else before
            side.setdefault(point, []).append(TRANSFERS[kind](tensor))
        found: list[Instruction] = []
        for point, run in enumerate(runs.tolist()):
            found += [*before.get(point, ()), self.instruction(run), *after.get(point, ())]
        return found


def _rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Pack rows of whole numbers as (where each begins, all of them)."""
    begins = [0, *accumulate(map(len, lists))]
    flat = [t for one in lists for t in one]
    return np.array(begins, dtype=np.int64), np.array(flat, dtype=np.int64)
