"""0-1 programs as data: their variables, costs and rows, and what a solver answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from memopt.strategies.base import Progress, Status

Term = tuple[int, int]
"""(coefficient, variable)."""


class Solver(StrEnum):
    """The solvers that take a 0-1 program."""

    CP_SAT = "cp-sat"
    HIGHS = "highs"
    SCIP = "scip"


@dataclass(frozen=True, slots=True)
class Row:
    """Σ terms ≤ bound, plus the peak variable if `memory`; only where `when` holds, if given."""

    terms: tuple[Term, ...]
    bound: int
    memory: bool = False
    when: int | None = None

    @property
    def largest_excess(self) -> int:
        """The most that the left side can exceed the bound."""
        return sum(c for c, _ in self.terms if c > 0) - self.bound


@dataclass(frozen=True, slots=True)
class Answer:
    """A solver's result: values of the variables (empty without a solution), objective and a
    bound on it in the units of the costs (or bytes when the peak was minimised)."""

    status: Status
    values: tuple[bool, ...] = ()
    objective: float = 0.0
    bound: float = 0.0


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """Options of solving a 0-1 program.

    Attributes:
        solver: whose search.
        time_limit_s: seconds; None: no limit.
        deterministic_s: CP-SAT's deterministic time, of which one is a few seconds; ends the
            search at the same answer on any machine. None: no limit.
        progress: called now and then; KeyboardInterrupt ends the search: CP-SAT's with what it
            has, the others' with nothing.
        workers: CP-SAT's threads; the others run on one.
        seed: the solver's.
        gap: relative gap at which the search may end.
    """

    solver: Solver = Solver.CP_SAT
    time_limit_s: float | None = None
    deterministic_s: float | None = None
    progress: Progress | None = None
    workers: int = 1
    seed: int = 0
    gap: float = 0.0


@dataclass
class BinaryProgram:
    """A 0-1 program that minimises Σ costs under rows, or the peak of its memory rows."""

    costs: dict[int, float] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    fixed: dict[int, bool] = field(default_factory=dict)
    hints: dict[int, bool] = field(default_factory=dict)
    """Values to start from; they need not be all, nor feasible."""
    count: int = 0

    def variable(self, cost: float = 0.0) -> int:
        """Add a 0-1 variable."""
        self.count += 1
        if cost:
            self.costs[self.count - 1] = cost
        return self.count - 1

    def add(self, terms: Iterable[Term], bound: int) -> None:
        """Require Σ terms ≤ bound."""
        self.rows.append(Row(tuple(terms), bound))

    def at_most_one(self, variables: Iterable[int]) -> None:
        """Require Σ variables ≤ 1."""
        self.add([(1, v) for v in variables], 1)

    def at_least_one(self, variables: Iterable[int]) -> None:
        """Require Σ variables ≥ 1."""
        self.add([(-1, v) for v in variables], -1)

    def exactly_one(self, variables: Sequence[int]) -> None:
        """Require Σ variables = 1."""
        self.at_most_one(variables)
        self.at_least_one(variables)

    def implies_any(self, left: int, right: Iterable[int]) -> None:
        """Require left ≤ Σ right."""
        self.add([(1, left), *((-1, v) for v in right)], 0)

    def memory(self, constant: int, terms: Iterable[Term], when: int | None = None) -> None:
        """Require constant + Σ terms ≤ peak, only where `when` holds."""
        self.rows.append(Row(tuple(t for t in terms if t[0]), -constant, True, when))
