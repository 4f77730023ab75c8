"""Backwards in two halves, as the zero-bubble schedules of pipelines run them: the gradients of a
stage's inputs are sent to the stage before as soon as possible, those of its parameters wait.

A program's first half ends where the last gradient of an input is complete, whatever it has
computed until then. What is live there waits for the second half: the parameters' gradients that
are complete, and what the operators read that compute the others.
"""

from __future__ import annotations

from collections.abc import Collection

from memopt.models.graph import Graph
from memopt.models.variants import variant
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Instruction, Program
from memopt.programs.lifetimes import lifetimes
from memopt.programs.liveness import with_frees


def first_half_end(graph: Graph, program: Program) -> int:
    """Return the position at which the second half of a program's backward begins; its length if
    it has none. A program that moves or places tensors is not cut."""
    if not _is_cut(graph, program):
        return len(program)
    last = boundary = program.boundary or 0
    for position, run in program.computes:
        if position > boundary and _is_first(graph, run, graph.input_gradients):
            last = position
    rest = program.steps[program.steps_before[last + 1] :]
    return next(iter(rest), len(program))


def halved_bytes(graph: Graph, program: Program) -> int:
    """Return the bytes that a call keeps between the halves of its backward, with its outputs and
    their gradients, and the gradients of its inputs."""
    end = first_half_end(graph, program)
    kept = {x.tensor for x in lifetimes(graph, program).device if x.is_live_at(end)}
    kept.update(graph.tangents)
    return sum(graph.tensors[one].size_bytes for one in kept - graph.resident)


def can_wait(graph: Graph, program: Program) -> tuple[frozenset[int], ...]:
    """Return the operators of a program's backward that the gradients of inputs do not depend on,
    in groups that do not depend on one another. Those come first for which the least more is kept
    between the halves if they wait."""
    if not _is_cut(graph, program):
        return ()
    needed, first, found = set(graph.input_gradients), set[int](), list[tuple[set[int], set[int]]]()
    for position, run in reversed(program.computes):
        if position < (program.boundary or 0):
            break
        chosen = variant(graph.operators[run.op], run.implementation)
        if run.op < graph.first_backward:  # it runs again for what reads it
            continue
        if _is_first(graph, run, needed):
            needed.update(chosen.reads)
            first.add(run.op)
            continue
        own, read = {run.op}, {*chosen.reads}
        for other in [one for one in found if not one[1].isdisjoint(chosen.writes)]:
            found.remove(other)
            own, read = own | other[0], read | other[1]
        found.append((own, read))
    groups = [frozenset(own) for own, _ in found if own.isdisjoint(first)]
    return tuple(sorted(groups, key=lambda one: more_bytes(graph, one)))


def with_waiting(graph: Graph, program: Program, waiting: Collection[int]) -> Program:
    """Return a program that runs operators, of groups of `can_wait`, behind all others of its
    backward, and behind these what is computed again for them alone."""
    boundary, needed = program.boundary, set(graph.input_gradients)
    assert boundary is not None
    first, later = list[Compute](), list[Compute]()
    for position, run in reversed(program.computes):
        again = run.op < graph.first_backward
        chosen = variant(graph.operators[run.op], run.implementation)
        if position < boundary:
            break
        if run.op in waiting or (again and needed.isdisjoint(chosen.writes)):
            later.insert(0, run)
            continue
        first.insert(0, run)
        needed.difference_update(chosen.writes)
        needed.update(chosen.reads)
    runs = [one for i, one in program.computes if i < boundary]
    order: list[Instruction] = [*runs, program.instructions[boundary], *first, *later]
    return with_in_place(graph, Program(with_frees(graph, order)))


def _is_cut(graph: Graph, program: Program) -> bool:
    moves = program.has_transfers or program.offsets is not None or bool(graph.movable)
    return program.boundary is not None and bool(graph.input_gradients) and not moves


def _is_first(graph: Graph, run: Compute, needed: Collection[int]) -> bool:
    """Return whether an operator belongs to the first half: it acts, writes what is needed there,
    or reads a gradient that is handed over then."""
    operator = graph.operators[run.op]
    chosen = variant(operator, run.implementation)
    hands_over = any(one in graph.input_gradients for one in chosen.reads)
    return operator.has_effects or hands_over or any(one in needed for one in chosen.writes)


def more_bytes(graph: Graph, group: Collection[int]) -> int:
    """Return the bytes that a call keeps more between the halves of its backward if operators wait:
    those that they read less those of the gradients that they complete."""
    operators = [graph.operators[one] for one in group]
    written = {t for one in operators for t in one.writes}
    read = {t for one in operators for t in one.reads} - written - graph.resident
    made = written.intersection(graph.gradients)
    return sum(graph.tensors[t].size_bytes for t in read) - sum(
        graph.tensors[t].size_bytes for t in made
    )
