"""Changes of decisions: all there are, each drawn when its turn comes, none of no effect."""

from __future__ import annotations

from itertools import islice, pairwise
from random import Random

import numpy as np
import pytest

from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies.joint.moved import Mover
from memopt.strategies.joint.neighbours import BETWEEN, Decisions, Neighbourhood, drawn
from memopt.strategies.shared.run_table import RunTable
from tests.strategies.joint.repeated import repeated_graph

LINK = Device(to_host_bytes_per_s=3.0)


def begun(graph: Graph, host_bytes: float = float("inf")) -> tuple[Mover, Decisions]:
    """A mover within less than the step needs, and the step as it is."""
    table, peak = RunTable(graph), replay(graph, store_all(graph)).peak_bytes
    nothing = np.zeros(len(graph.tensors), dtype=np.bool_)
    mover = Mover(table, peak * 3 // 4, LINK, host_bytes)
    return mover, Decisions(table.runs_of(store_all(graph)), nothing, nothing)


def gaps(mover: Mover, at: Decisions) -> set[tuple[int, int, int]]:
    """The stretches in which tensors are not needed, found by walking over the runs."""
    lives: dict[int, list[list[int]]] = {}
    for p, run in enumerate(at.runs.tolist()):
        if run >= 0:
            for t in mover.table.reads_of[run]:
                if t in lives:
                    lives[t][-1].append(p)
            for t in mover.table.writes_of[run]:
                lives.setdefault(t, []).append([p])
    return {
        (t, a, b)
        for t, several in lives.items()
        if not mover.arrays.stays[t] and mover.arrays.size_bytes[t] >= mover.least_bytes
        for touches in several
        for a, b in pairwise(touches)
        if b > a + BETWEEN
    }


@pytest.mark.parametrize("seed", range(8))
def test_gaps_are_those_of_a_walk_over_the_runs(seed: int) -> None:
    rng = Random(seed)
    graph = repeated_graph(rng, 6, 3, implementations=True) if seed % 2 else random_graph(rng, 20)
    mover, at = begun(graph)
    found = 0
    for _ in range(10):
        near = Neighbourhood(mover, at, mover.moved(at.runs), rng)
        rows = [tuple(row) for row in near.gaps.tolist()]
        assert len(rows) == len(set(rows))
        assert set(rows) == gaps(mover, at)
        found += len(rows)
        valid = (x for x in near.changes() if mover.needs(x.runs) is not None)
        change = next(valid, at)
        at = Decisions(mover.used(change.runs), change.stays, change.first)
    assert found


def test_numbers_are_drawn_one_by_one() -> None:
    assert sorted(drawn(50, Random(0))) == list(range(50))
    assert list(drawn(50, Random(0))) != list(range(50))
    assert len(set(islice(drawn(10**12, Random(0)), 3))) == 3
    assert list(drawn(0, Random(0))) == []


def test_where_nothing_can_move_no_change_is_one_of_moves() -> None:
    graph = repeated_graph(Random(0), 6, 3, implementations=True)
    for host_bytes, some in ((float("inf"), True), (0.0, False)):
        mover, at = begun(graph, host_bytes)
        mover.budget_bytes *= 2
        near = Neighbourhood(mover, at, mover.moved(at.runs), Random(0))
        made = [*near.changes(wide=True), *near.changes()]
        assert made
        assert any(change.runs is at.runs for change in made) is some
