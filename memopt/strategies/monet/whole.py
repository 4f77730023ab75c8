"""Plans and bounds of graphs with hundreds of operators."""

from __future__ import annotations

import time

from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.reductions.linearize import linearize
from memopt.reductions.stage_map import has_updates
from memopt.strategies.base import Progress
from memopt.strategies.monet.moment_search import CLOSE, MomentSearch
from memopt.strategies.monet.moments import Allowed
from memopt.strategies.monet.window_search import improved

RELAXATION_SHARE = 0.4
SAME = 1e-9


def search_whole(
    graph: Graph,
    allowed: Allowed | None,
    best: Program | None,
    budget_bytes: int,
    deadline: float,
    stats: dict[str, object],
    progress: Progress | None,
) -> tuple[Program | None, float | None]:
    """(the best program found or `best`, a lower bound in s) within a budget.

    Args:
        graph: the training step.
        allowed: which implementations may be chosen; None: all.
        best: a program within the budget to start from, if there is one.
        budget_bytes: total bytes.
        deadline: on time.monotonic's clock.
        stats: gets what was found, by which search.
        progress: may raise KeyboardInterrupt, which ends a search with its best program.
    """
    left_s = max(0.0, deadline - time.monotonic())
    until = time.monotonic() + RELAXATION_SHARE * left_s
    search = MomentSearch(graph, allowed, budget_bytes, until, progress)
    search.run()
    stats["relaxation_rounds"] = search.rounds
    stats["relaxation_infeasible"] = search.infeasible
    best_s = float("inf") if best is None else replay(graph, best).time_s
    if search.best is not None and search.best_s < best_s * (1 - SAME):
        best, best_s, stats["whole"] = search.best, search.best_s, "relaxation"
    if best_s > search.bound_s * (1 + CLOSE) and not has_updates(graph):
        from memopt.strategies.monet.menus import MENU_SLOTS, MenuTable, Watch

        table = MenuTable(
            linearize(graph), budget_bytes, MENU_SLOTS, Watch(deadline, progress), allowed
        )
        found = table.best(budget_bytes)[0] if table.complete else None
        found_s = float("inf") if found is None else replay(graph, found).time_s
        if found_s < best_s * (1 - SAME):
            best, best_s, stats["whole"] = found, found_s, "rotor-menus"
    if best is not None and best_s > search.bound_s * (1 + CLOSE):
        better, stats["windows"] = improved(
            graph, allowed, best, budget_bytes, deadline,
            bound_s=search.bound_s, progress=progress,
        )  # fmt: skip
        if better is not best:
            best, stats["whole"] = better, "windows"
    return best, search.bound_s or None
