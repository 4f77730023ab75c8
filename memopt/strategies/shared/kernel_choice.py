"""Chooses implementations afterwards, for the runs of a finished program.

The relaxation sees the memory of a run only at its time points. Elsewhere it takes the fastest
kernels. A batch norm's backward over its gradient, or a convolution's gradients one after the
other, often make its program fit at little cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from memopt.models.graph import Graph, Operator
from memopt.models.variants import variant
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Free, Instruction, LossBoundary, Program
from memopt.programs.liveness import with_frees
from memopt.programs.replay import replay
from memopt.strategies.shared.graph_model import Allowed, Choice, choices_of


def fastest_kernels(graph: Graph, program: Program, budget_bytes: int | None) -> Program:
    """Give each run of an operator its fastest exact implementation of the same reads and writes
    that the budget leaves room for (MONeT appendix D's post-optimisation, Checkmate-O)."""
    instructions: list[Instruction] = list(program.instructions)
    rows = replay(graph, program).step_bytes
    for position, instruction in enumerate(instructions):
        if not isinstance(instruction, Compute):
            continue
        operator = graph.operators[instruction.op]
        current = variant(operator, instruction.implementation)
        room = None if budget_bytes is None else budget_bytes - rows[position]
        first = current.workspace_bytes
        for choice in operator.implementations:
            other = variant(operator, choice.name)
            same = set(other.reads) == set(current.reads) and other.writes == current.writes
            fits = room is None or other.workspace_bytes - first <= room
            over = instruction.in_place is None or instruction.in_place in other.in_place
            if choice.exact and same and fits and over and other.time_s < current.time_s:
                instructions[position] = replace(instruction, implementation=choice.name)
                current = other
    return Program(instructions)


@dataclass(frozen=True)
class _OperatorRun:
    """One run of an operator in a program.

    Attributes:
        outputs: the results that are kept.
        reads: the tensors that its present implementation reads.
        dying: the tensors that end with it.
        before_bytes: memory without its results and scratch.
    """

    operator: Operator
    outputs: frozenset[int]
    reads: frozenset[int]
    dying: frozenset[int]
    before_bytes: int


def smaller_implementations(
    graph: Graph, program: Program, budget_bytes: int, allowed: Allowed | None
) -> Program:
    """Choose other implementations where a run exceeds the budget: the fastest that fit, or else
    those that need least. They read nothing that the run does not."""
    rows = replay(graph, program).step_bytes
    steps: list[Instruction] = []
    changed = False
    for position, instruction in enumerate(program):
        if isinstance(instruction, LossBoundary):
            steps.append(instruction)
        if not isinstance(instruction, Compute):
            continue
        names: tuple[str | None, ...] = (instruction.implementation,)
        if rows[position] > budget_bytes:
            run = _run(graph, program, position, rows[position])
            best = min(
                _ways(graph, run, allowed),
                key=lambda way: (max(0, _need_bytes(graph, run, way) - budget_bytes), _time_s(way)),
                default=(),
            )
            if best and _need_bytes(graph, run, best) < rows[position]:
                names, changed = tuple(name for name, _ in best), True
        steps += [Compute(instruction.op, (), name) for name in names]
    return with_in_place(graph, Program(with_frees(graph, steps))) if changed else program


def _run(graph: Graph, program: Program, position: int, row_bytes: int) -> _OperatorRun:
    instruction = program.instructions[position]
    assert isinstance(instruction, Compute)
    operator = graph.operators[instruction.op]
    chosen = dict(choices_of(operator, None))[instruction.implementation]
    dying: set[int] = set()
    for later in program.instructions[position + 1 :]:
        if not isinstance(later, Free):
            break
        dying.add(later.tensor)
    before_bytes = row_bytes - _bytes(graph, chosen.writes) - chosen.workspace_bytes
    if instruction.in_place is not None:
        dying.add(instruction.in_place)
        before_bytes += graph.tensors[instruction.in_place].size_bytes
    return _OperatorRun(
        operator,
        frozenset(instruction.outputs),
        frozenset(chosen.reads),
        frozenset(dying),
        before_bytes,
    )


def _ways(graph: Graph, run: _OperatorRun, allowed: Allowed | None) -> Iterator[tuple[Choice, ...]]:
    """Yield one implementation, or two after each other, that write the run's kept results."""
    known = [
        choice
        for choice in choices_of(run.operator, allowed)
        if run.reads | graph.resident >= set(choice[1].reads)
    ]
    for choice in known:
        if run.outputs <= set(choice[1].writes):
            yield (choice,)
    again = run.operator.recomputable and not run.operator.random
    parts = [c for c in known if again and not run.outputs <= set(c[1].writes)]
    for first, second in permutations(parts, 2):
        if run.outputs <= {*first[1].writes, *second[1].writes}:
            yield first, second


def _need_bytes(graph: Graph, run: _OperatorRun, way: tuple[Choice, ...]) -> int:
    """Return the most memory that these runs take."""
    live, most = run.before_bytes, 0
    for place, (_, choice) in enumerate(way):
        later = {t for _, other in way[place + 1 :] for t in other.reads}
        ending = run.dying.intersection(choice.reads) - later
        taken = next((t for t in choice.in_place if t in ending), None)
        over = 0 if taken is None else graph.tensors[taken].size_bytes
        most = max(most, live + _bytes(graph, choice.writes) + choice.workspace_bytes - over)
        kept = [t for t in choice.writes if t in run.outputs]
        live += _bytes(graph, kept) - _bytes(graph, ending)
    return most


def _time_s(way: tuple[Choice, ...]) -> float:
    return sum(choice.time_s for _, choice in way)


def _bytes(graph: Graph, tensors: Iterable[int]) -> int:
    return sum(graph.tensors[t].size_bytes for t in tensors)
