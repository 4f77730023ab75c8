"""Plans to start from, and the last polish: Rotor's plan of the chain, the fastest kernels."""

from __future__ import annotations

from dataclasses import replace

from memopt.models.graph import Graph
from memopt.models.variants import variant
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Instruction, Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.linearize import Linearization, linearize
from memopt.reductions.stage_map import has_updates
from memopt.strategies.budget_search import best_that_fits
from memopt.strategies.rotor.persistent import Rotor


def stored(graph: Graph) -> Program:
    """The framework's own order, nothing recomputed, in place where it may be."""
    return with_in_place(graph, store_all(graph))


def rotor_program(
    graph: Graph, budget_bytes: int | None, view: Linearization | None = None
) -> tuple[Program | None, int]:
    """(Rotor's program within the budget or None, the smallest budget it is known to meet)."""
    found, least = rotor_programs(graph, budget_bytes, view)
    return found, replay(graph, least).peak_bytes


def rotor_programs(
    graph: Graph, budget_bytes: int | None, view: Linearization | None = None
) -> tuple[Program | None, Program]:
    """(Rotor's program within the budget or None, the program of the smallest peak known); `view`
    is the graph's linearization, if the caller has it."""
    everything = stored(graph)
    peak_bytes = replay(graph, everything).peak_bytes
    if budget_bytes is None or peak_bytes <= budget_bytes:
        return everything, everything
    if has_updates(graph):
        return None, everything
    view = view or linearize(graph)

    def attempt(limit_bytes: int | None):  # type: ignore[no-untyped-def]  # Solution
        return Rotor().solve(view.chain, limit_bytes)

    found = best_that_fits(graph, view, attempt, budget_bytes)
    if found.steps is not None:
        program = view.lower(found.steps)
        return program, program
    assert found.smallest is not None
    assert found.smallest.steps is not None
    least = view.lower(found.smallest.steps)
    return None, smaller(graph, everything, least)


def smaller(graph: Graph, *programs: Program) -> Program:
    """The program of the smallest peak; of several, the first."""
    return min(programs, key=lambda program: replay(graph, program).peak_bytes)


def fastest_kernels(graph: Graph, program: Program, budget_bytes: int | None) -> Program:
    """Each run of an operator by its fastest exact implementation of the same reads and writes
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
