"""Large-neighbourhood search: the interval program with all but a window of operators fixed."""

from __future__ import annotations

import time
from collections import defaultdict

from memopt.errors import InvalidProgramError
from memopt.models.graph import Graph
from memopt.programs.in_place import without_in_place
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.strategies.base import Progress, stops
from memopt.strategies.monet.intervals import IntervalModel, Runs, program_of, runs_of
from memopt.strategies.monet.moments import Allowed

WINDOW = 12
LARGEST_WINDOW = 96
WINDOW_S = 6.0
MOST_RUNS = 4
"""Programs that run some operator more often are left as they are."""


def improved(
    graph: Graph,
    allowed: Allowed | None,
    program: Program,
    budget_bytes: int,
    deadline: float,
    *,
    bound_s: float = 0.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Program, int]:
    """(the program, or a faster one within the budget, windows solved).

    Windows of neighbouring forward operators are freed in turn, half of each overlapping the
    next; where a round of them finds nothing faster they grow.

    Args:
        graph: the training step.
        allowed: which implementations may be chosen; None: all.
        program: a valid program within the budget.
        budget_bytes: total bytes.
        deadline: on time.monotonic's clock.
        bound_s: stop where a program is as fast as this.
        seed: the solver's.
        progress: may raise KeyboardInterrupt, which ends the search.
    """
    best, runs = program, runs_of(graph, program)
    best_s, solved = replay(graph, best).time_s, 0
    if not _fits(graph, runs, budget_bytes):
        return best, solved
    # This program's copies all have storages of their own: what starts by computing in place
    # would be none of its solutions. What it finds must keep the budget.
    room_bytes = max(budget_bytes, _separate_bytes(graph, runs))
    size, faster = WINDOW, True
    while size <= LARGEST_WINDOW:
        faster = False
        for window in _windows(graph, runs, size):
            left_s = deadline - time.monotonic()
            done = left_s <= 0 or best_s <= bound_s * (1 + 1e-6)
            if done or stops(progress, 0.7, f"monet: windows, best {best_s:.6g} s"):
                return best, solved
            built = IntervalModel(graph, room_bytes, allowed, _most(runs))
            if not built.start(runs, window):
                return best, solved
            left_s = deadline - time.monotonic()
            _, found, _ = built.solve(min(WINDOW_S, left_s), seed, best_s * (1 - 1e-6))
            solved += 1
            if found is not None and _fits(graph, found, budget_bytes):
                candidate = program_of(graph, found)
                took_s = replay(graph, candidate).time_s
                if took_s < best_s * (1 - 1e-9):
                    best, best_s, runs, faster = candidate, took_s, found, True
        size = size if faster else 2 * size
    return best, solved


def _most(runs: Runs) -> int:
    """One run more than any operator has, at least two."""
    number: dict[int, int] = defaultdict(int)
    for _, i, _ in runs:
        number[i] += 1
    return max(2, *number.values())


def _fits(graph: Graph, runs: Runs, budget_bytes: int) -> bool:
    """Whether the runs, in this program's order, are a program within the budget."""
    if _most(runs) > MOST_RUNS:
        return False
    try:
        return replay(graph, program_of(graph, runs)).peak_bytes <= budget_bytes
    except InvalidProgramError:
        return False


def _separate_bytes(graph: Graph, runs: Runs) -> int:
    """The peak of the runs with every output in a storage of its own."""
    return replay(graph, without_in_place(program_of(graph, runs))).peak_bytes


def _windows(graph: Graph, runs: Runs, size: int) -> list[set[int]]:
    """Sets of neighbouring forward operators, those with the longest repeated runs first."""
    again: dict[int, float] = defaultdict(float)
    for stage, i, _ in runs:
        if stage >= 0 and i < graph.first_backward:
            again[i] += graph.operators[i].time_s
    starts = range(0, max(1, graph.first_backward - size // 2), max(1, size // 2))
    windows = [set(range(s, min(s + size, graph.first_backward))) for s in starts]
    return sorted(
        (window for window in windows if any(again[i] for i in window)),
        key=lambda window: -sum(again[i] for i in window),
    )
