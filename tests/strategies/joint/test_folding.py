"""Steps of equal layers: proved equal, folded, and unfolded again."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies.joint.equal_layers import RepeatedLayers
from memopt.strategies.joint.folding import Folding, Unfolding, even_groups
from memopt.strategies.joint.moved import Mover
from memopt.strategies.joint.neighbours import Decisions, Neighbourhood
from memopt.strategies.shared.incumbent import stored
from memopt.strategies.shared.run_table import BOUNDARY, RunTable
from tests.strategies.joint.chains import blocks
from tests.strategies.joint.repeated import repeated_graph

LINK = Device(to_host_bytes_per_s=1.0)
ROOMY = 2**40
SEEDS = range(12)


def random_step(seed: int, layers: int = 12) -> Graph:
    """A step of some equal layers."""
    rng = Random(seed)
    return repeated_graph(rng, layers, rng.randint(2, 4), implementations=True)


def layers_of(graph: Graph) -> RepeatedLayers:
    """The equal layers of a graph that has some."""
    found = RepeatedLayers.of(graph)
    assert found is not None
    return found


def folded(graph: Graph, groups: int) -> Folding:
    """Equal layers in so many groups."""
    layers = layers_of(graph)
    return Folding(layers, even_groups(len(layers.core), groups))


def wandered(mover: Mover, rng: Random, changes: int) -> Decisions:
    """Decisions some random changes away from the step as it is."""
    nothing = np.zeros(len(mover.table.graph.tensors), dtype=np.bool_)
    at = Decisions(mover.table.runs_of(stored(mover.table.graph)), nothing, nothing)
    for _ in range(changes):
        near = Neighbourhood(mover, at, mover.moved(at.runs), rng)
        change = next(near.changes(), None)
        if change is not None and mover.moved(change.runs).fits:
            at = Decisions(mover.used(change.runs), change.stays, change.first)
    return at


@pytest.mark.parametrize("seed", SEEDS)
def test_all_layers_but_the_first_and_the_last_are_equal(seed: int) -> None:
    found = layers_of(random_step(seed))
    assert len(found.core) >= 9
    assert found.core.start <= 2
    assert found.core.stop >= 10


def test_a_layer_of_another_size_ends_what_is_equal() -> None:
    found = layers_of(blocks(20, sizes=[16] * 13 + [17] + [16] * 6))
    assert 13 not in found.core
    assert len(found.core) >= 10


def test_a_tensor_that_others_read_is_of_the_first_or_last_equal_layer() -> None:
    graph = blocks(20)
    operators = list(graph.operators)
    # The last backward operator reads what layer 12 made, too.
    operators[-1] = replace(operators[-1], reads=(*operators[-1].reads, 2 * 12 + 1))
    core = layers_of(
        Graph(graph.tensors, operators, graph.outputs, graph.gradients, graph.tangents)
    ).core
    assert core.start == 12 or core.stop == 13


def test_seconds_may_differ_and_the_folded_step_has_the_least() -> None:
    graph = blocks(20)
    operators = [replace(x, time_s=x.time_s + 0.01 * n) for n, x in enumerate(graph.operators)]
    slower = Graph(graph.tensors, operators, graph.outputs, graph.gradients, graph.tangents)
    folding = folded(slower, 8)
    assert len(folding.layers.core) == len(layers_of(graph).core)
    for n, one in enumerate(folding.graph.operators):
        alike = [i for i, m in enumerate(folding.number) if m == n]
        assert one.time_s == min(slower.operators[i].time_s for i in alike)


@pytest.mark.parametrize("count", [3, 8, 19, 78])
def test_groups_add_up(count: int) -> None:
    for groups in range(3, min(count, 10) + 1):
        sizes = even_groups(count, groups)
        assert len(sizes) == groups
        assert sum(sizes) == count
        assert sizes[0] == sizes[-1] == 1
        assert max(sizes[1:-1]) - min(sizes[1:-1]) <= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_folded_step_is_the_step_of_fewer_layers(seed: int) -> None:
    folding = folded(random_step(seed, 20), 6)
    outside = 20 - len(folding.layers.core)
    fewer = random_step(seed, 6 + outside)
    assert len(folding.graph.operators) == len(fewer.operators)
    for one, other in zip(folding.graph.operators, fewer.operators, strict=True):
        assert one.name.split("_")[0] == other.name.split("_")[0]
        assert (one.time_s, one.reads, one.writes) == (other.time_s, other.reads, other.writes)
        pairs = zip(one.implementations, other.implementations, strict=True)
        assert all((a.reads, a.time_s) == (b.reads, b.time_s) for a, b in pairs)
    peaks = [replay(x, store_all(x)).peak_bytes for x in (folding.graph, fewer)]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reach", [0, 1, 8])
def test_groups_of_one_change_nothing(seed: int, reach: int) -> None:
    graph, rng = random_step(seed), Random(seed)
    core = len(layers_of(graph).core)
    folding, table = folded(graph, core), RunTable(graph)
    mover = Mover(RunTable(folding.graph), ROOMY, LINK)
    at = wandered(mover, rng, 12)
    found = Unfolding(folding, mover.table, table, reach).runs(at.runs)
    assert found.tolist() == at.runs.tolist()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("reach", [0, 1, 8])
def test_unfolded_runs_are_a_program_of_the_step(seed: int, reach: int) -> None:
    graph, rng = random_step(seed, 24), Random(seed)
    folding, table = folded(graph, 6), RunTable(graph)
    mover = Mover(RunTable(folding.graph), ROOMY, LINK)
    unfolding = Unfolding(folding, mover.table, table, reach)
    at = wandered(mover, rng, 12)
    whole = unfolding.decisions(at)
    judge = Mover(table, ROOMY, LINK)
    moved = judge.moved(whole.runs)
    assert moved.fits
    ran = {mover.table.variants[run][0] for run in at.runs.tolist() if run >= 0}
    unfolded = {table.variants[run][0] for run in whole.runs.tolist() if run >= 0}
    assert unfolded == {i for i, n in enumerate(folding.number) if n in ran}
    assert whole.runs.tolist().count(BOUNDARY) == 1
    timeline = replay(graph, judge.program(moved), LINK)
    assert timeline.time_s == pytest.approx(moved.time_s)
    # What is decided of a tensor holds of all those that it stands for.
    flags = np.zeros(len(folding.graph.tensors), dtype=np.bool_)
    flags[folding.image[folding.tensors[-1]]] = True
    assert unfolding.flags(flags).sum() >= 1


def test_the_step_as_it_is_unfolds_to_itself() -> None:
    graph = random_step(3, 30)
    folding, table = folded(graph, 5), RunTable(graph)
    folded_table = RunTable(folding.graph)
    runs = folded_table.runs_of(stored(folding.graph))
    found = Unfolding(folding, folded_table, table, 1).runs(runs)
    assert found.tolist() == table.runs_of(stored(graph)).tolist()
