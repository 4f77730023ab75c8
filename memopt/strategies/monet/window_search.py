"""Large-neighbourhood search: the interval program with all but a window of operators fixed."""

from __future__ import annotations

from collections import defaultdict

from memopt.errors import InvalidProgramError
from memopt.models.graph import Graph
from memopt.programs.in_place import without_in_place
from memopt.programs.replay import replay
from memopt.strategies.monet.graph_model import Allowed
from memopt.strategies.monet.incumbent import Incumbent
from memopt.strategies.monet.intervals import IntervalModel, Runs, program_of, runs_of
from memopt.strategies.solvers.running import Deadline

WINDOW = 12
LARGEST_WINDOW = 96
WINDOW_S = 6.0
NEAR = 1e-6
"""Gap to the bound at which the search ends, and share of the time to win at least."""
MOST_RUNS = 4
"""Programs that run some operator more often are left as they are."""


def search_windows(
    best: Incumbent,
    allowed: Allowed | None,
    budget_bytes: int,
    deadline: Deadline,
    bound_s: float = 0.0,
) -> int:
    """Offer `best` faster programs; give the number of windows solved.

    Windows of neighbouring forward operators are freed in turn, half of each overlapping the
    next; where a round of them finds nothing faster they grow.

    Args:
        best: with a valid program within the budget.
        allowed: which implementations may be chosen; None: all.
        budget_bytes: total bytes.
        deadline: asked before every window.
        bound_s: stop where a program is as fast as this.
    """
    assert best.program is not None
    graph, runs, solved = best.graph, runs_of(best.graph, best.program), 0
    if not _fits(graph, runs, budget_bytes):
        return solved
    # This program's copies all have storages of their own: what starts by computing in place
    # would be none of its solutions. What it finds must keep the budget.
    room_bytes = max(budget_bytes, _separate_bytes(graph, runs))
    size = WINDOW
    while size <= LARGEST_WINDOW:
        faster = False
        for window in _windows(graph, runs, size):
            done = best.near(bound_s, NEAR)
            if done or deadline.passed(0.7, f"monet: windows, best {best.time_s:.6g} s"):
                return solved
            built = IntervalModel(graph, room_bytes, allowed, _most(runs))
            if not built.start(runs, window):
                return solved
            limit_s = min(WINDOW_S, deadline.left_s)
            _, found, _ = built.solve(limit_s, below_s=best.time_s * (1 - NEAR))
            solved += 1
            if found is not None and _fits(graph, found, budget_bytes):
                candidate = program_of(graph, found)
                best.offer(candidate, "windows")
                if best.program is candidate:
                    runs, faster = found, True
        size = size if faster else 2 * size
    return solved


def _most(runs: Runs) -> int:
    """Give one run more than any operator has, at least two."""
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
    """Give the peak of the runs with every output in a storage of its own."""
    return replay(graph, without_in_place(program_of(graph, runs))).peak_bytes


def _windows(graph: Graph, runs: Runs, size: int) -> list[set[int]]:
    """List sets of neighbouring forward operators, those with the longest repeated runs first."""
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
