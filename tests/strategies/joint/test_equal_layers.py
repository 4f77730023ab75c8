"""Equal layers: found by what operators are, and changed together."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest

from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.models.periods import Period
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.solvers.running import Deadline
from memopt.strategies.joint.equal_layers import EqualLayers
from memopt.strategies.joint.local_search import LocalSearch
from memopt.strategies.joint.moved import Mover
from memopt.strategies.joint.neighbours import Decisions, Neighbourhood
from memopt.strategies.shared.incumbent import stored
from memopt.strategies.shared.run_table import RunTable
from tests.strategies.joint.chains import blocks, chain_of

LINK = Device(to_host_bytes_per_s=1.0)


def near(graph: Graph, budget: int) -> tuple[Mover, Neighbourhood]:
    """The changes of the step as it is."""
    table = RunTable(graph)
    mover = Mover(table, budget, LINK)
    nothing = np.zeros(len(graph.tensors), dtype=np.bool_)
    at = Decisions(table.runs_of(stored(graph)), nothing, nothing)
    return mover, Neighbourhood(mover, at, mover.moved(at.runs), Random(0))


def wide(graph: Graph) -> list[Decisions]:
    """All changes of equal layers at once, from the step as it is."""
    budget = replay(graph, store_all(graph)).peak_bytes
    return list(near(graph, budget)[1].changes(wide=True))


@pytest.mark.parametrize("layers", [3, 8, 40])
def test_the_layers_of_a_deep_chain_are_found(layers: int) -> None:
    found = EqualLayers(blocks(layers))
    assert found.stretches == (Period(1, 2, layers),)


def test_nothing_is_equal_where_sizes_differ() -> None:
    assert EqualLayers(chain_of(2, 8, 1.0)).stretches == ()
    sizes = [1, 2, 3, 5, 8, 13, 21, 34]
    graph = blocks(8, sizes=sizes)
    assert EqualLayers(graph).stretches == ()


def test_stretches_do_not_overlap_and_repeat() -> None:
    for seed in range(20):
        graph = random_graph(Random(seed), 30)
        layers = EqualLayers(graph)
        spans = sorted((one.start, one.end) for one in layers.stretches)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        for one in layers.stretches:
            for i in range(one.start, one.end - one.length):
                assert layers._kind(i) == layers._kind(i + one.length)


def test_the_number_of_changes_grows_with_distinct_layers_not_with_all() -> None:
    counts = [len(wide(blocks(layers))) for layers in (8, 16, 32)]
    assert counts[0] > 0
    # Twice the layers: the halves of halves are one level more.
    assert counts[1] <= 2.3 * counts[0]
    assert counts[2] <= 2.3 * counts[1]
    parts = [part for _, part in EqualLayers(blocks(8)).parts()]
    assert [len(part) for part in parts] == [8, 4, 4, 2, 2, 2, 2]


def test_a_change_runs_a_place_of_every_layer_again() -> None:
    graph = blocks(6)
    runs = [np.bincount(at.runs[at.runs >= 0]) for at in wide(graph)]
    # The last layer's is read again at once.
    firsts = [1 + 2 * layer for layer in range(5)]
    assert any(all(count[i] == 2 for i in firsts) for count in runs)


def test_going_downhill_together_is_no_slower_than_the_start() -> None:
    graph = blocks(12)
    budget = replay(graph, store_all(graph)).peak_bytes // 2
    mover, changes = near(graph, budget)
    search = LocalSearch(mover, Deadline())
    begin_s = search.judged(changes.at).time_s
    search.descend(changes.at)
    assert search.best is not None
    assert search.time_s < begin_s
    program = mover.program(search.finished())
    timeline = replay(graph, program, LINK)
    assert timeline.peak_bytes <= budget
    assert timeline.time_s == pytest.approx(search.finished().time_s)


def test_what_cannot_be_fast_enough_is_left_early() -> None:
    graph = blocks(12)
    budget = replay(graph, store_all(graph)).peak_bytes // 2
    mover, changes = near(graph, budget)
    whole = mover.moved(changes.at.runs)
    assert whole.fits
    assert mover.moved(changes.at.runs, most_s=whole.time_s * 1.001).time_s == whole.time_s
    assert not mover.moved(changes.at.runs, most_s=whole.time_s * 0.9).fits
