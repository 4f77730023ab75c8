"""The base of 0-1 programs over a graph: operators' implementations, memory, reading an answer, and
starting from a known program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from memopt.models.graph import Graph, Operator
from memopt.models.variants import Variant, variant
from memopt.programs.instructions import Compute, Free, Instruction, LossBoundary, Program
from memopt.solvers.binary_program import BinaryProgram, Term

Choice = tuple[str | None, Operator | Variant]
"""(an implementation's name, its figures); None names the operator itself."""
Allowed = Callable[[Operator, str], bool]
"""allowed(operator, implementation name): whether the solver may choose it."""


def choices_of(operator: Operator, allowed: Allowed | None) -> list[Choice]:
    """List the operator's own figures first, then those of the implementations allowed."""
    names = [choice.name for choice in operator.implementations]
    if allowed is not None:
        names = [name for name in names if allowed(operator, name)]
    return [(name, variant(operator, name)) for name in (None, *names)]


@dataclass
class GraphModel:
    """A 0-1 program over a graph; `model` is ready to solve.

    Attributes:
        graph: the training step.
        allowed: which implementations may be chosen; None: all.
    """

    graph: Graph
    allowed: Allowed | None = None

    def __post_init__(self) -> None:
        graph = self.graph
        self.model = self.new_program()
        self.first, self.count = graph.first_backward, len(graph.operators)
        self.size = [tensor.size_bytes for tensor in graph.tensors]
        self.choices = [choices_of(operator, self.allowed) for operator in graph.operators]
        self.made = self.writers(range(self.first))
        """The (operator, place of the implementation) that write each forward tensor."""

    def new_program(self) -> BinaryProgram:
        """Return the program to fill."""
        return BinaryProgram()

    def writers(self, operators: Iterable[int]) -> dict[int, list[tuple[int, int]]]:
        """Map each tensor to (operator, place of the implementation) that write it."""
        writers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for i in operators:
            for place, (_, choice) in enumerate(self.choices[i]):
                for t in choice.writes:
                    writers[t].append((i, place))
        return dict(writers)

    def run_variables(self, i: int, point: int = -1) -> list[int]:
        """Add a variable for a run of operator i by each of its implementations."""
        return [self.model.variable(choice.time_s) for _, choice in self.choices[i]]

    def tensor_variable(self, t: int, kind: str, point: int) -> int:
        """Add a variable of a tensor at a time point; `kind` is its letter in the mathematics."""
        return self.model.variable()

    def bytes_of(self, tensors: Iterable[int]) -> int:
        """Sum up tensors' bytes."""
        return sum(self.size[t] for t in tensors)

    def terms(self, held: Iterable[tuple[int, int]]) -> list[Term]:
        """Return the terms of a memory row for (tensor, variable)."""
        return [(self.size[t], v) for t, v in held]

    def boundary_row(self, held: Iterable[tuple[int, int]], free_bytes: int = 0) -> None:
        """Limit the memory at the loss boundary, where (tensor, variable) are held."""
        constant = self.bytes_of(self.graph.tangents) + self.graph.boundary_bytes + free_bytes
        self.model.memory(constant, self.terms(held))

    @property
    def has_boundary(self) -> bool:
        """Tell whether the step has a loss boundary."""
        return bool(self.graph.tangents) or self.first < self.count

    def boundary(self) -> list[Instruction]:
        """Return the loss boundary of a step that has one."""
        return [LossBoundary()] if self.has_boundary else []

    def chosen(self, i: int, variables: Sequence[int], values: tuple[bool, ...]) -> list[Compute]:
        """Return the runs of operator i that a solution chooses."""
        pairs = zip(self.choices[i], variables, strict=True)
        return [Compute(i, (), name) for (name, _), v in pairs if values[v]]


@dataclass
class FirstRun:
    """An operator's first run, the repeated runs just before it, and the tensors in memory then."""

    live: frozenset[int]
    runs: dict[int, str | None] = field(default_factory=dict)
    """Operator → implementation, of its last run if it runs twice."""


def first_runs(graph: Graph, program: Program) -> Iterator[FirstRun]:
    """Split a program at the first run of each operator, in the program's order."""
    live: set[int] = set()
    begun: set[int] = set()
    part: FirstRun | None = None
    for instruction in program:
        if isinstance(instruction, Free):
            live.discard(instruction.tensor)
        elif isinstance(instruction, Compute):
            part = part or FirstRun(frozenset(live))
            part.runs[instruction.op] = instruction.implementation
            live.discard(-1 if instruction.in_place is None else instruction.in_place)
            live.update(instruction.outputs or graph.operators[instruction.op].writes)
            if instruction.op not in begun:
                begun.add(instruction.op)
                yield part
                part = None
