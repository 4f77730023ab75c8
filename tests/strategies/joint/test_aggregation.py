"""The bound by groups of layers: never above the whole step's relaxation, nor a program."""

from __future__ import annotations

from random import Random

import pytest

from memopt.models.bounds import memory_lower_bound
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.solvers.running import Deadline, Solver, SolverOptions
from memopt.strategies.joint import relaxation
from memopt.strategies.joint.aggregation import AggregatedModel, sure_runs
from memopt.strategies.joint.equal_layers import RepeatedLayers
from memopt.strategies.joint.folding import Folding, even_groups
from memopt.strategies.joint.local_search import LocalSearch
from memopt.strategies.joint.moved import Mover
from memopt.strategies.joint.relaxation import LinkedModel
from memopt.strategies.shared.incumbent import stored
from memopt.strategies.shared.run_table import RunTable
from tests.strategies.joint.chains import blocks
from tests.strategies.joint.repeated import repeated_graph

LINK = Device(to_host_bytes_per_s=1.0)
OPTIONS = SolverOptions(Solver.HIGHS)
SAME = 1e-6
ROOMY = 2**40


@pytest.fixture(autouse=True)
def _all_suffixes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the copies from every operator on: else the two have them from different ones on."""
    monkeypatch.setattr(relaxation, "SUFFIXES", 10**6)


def folding_of(graph: Graph, groups: int) -> Folding:
    """The equal layers of a graph in so many groups, or fewer."""
    layers = RepeatedLayers.of(graph)
    assert layers is not None
    return Folding(layers, even_groups(len(layers.core), min(groups, len(layers.core))))


def by_groups(graph: Graph, budget: int, groups: int, device: Device = LINK) -> float:
    """The bound by groups, seconds; infinity where no program fits."""
    folding = folding_of(graph, groups)
    built = AggregatedModel(folding.graph, device=device, folding=folding)
    answer = built.model.solve(budget - graph.resident_bytes, OPTIONS)
    return float("inf") if answer.status is Status.INFEASIBLE else answer.bound


def whole(graph: Graph, budget: int, device: Device = LINK) -> float:
    """The optimum of the whole step's relaxation, seconds; infinity where no program fits. What
    every program runs runs there, too."""
    built = LinkedModel(graph, device=device)
    for i in sure_runs(graph):
        built.model.at_least_one(built.run[i])
    answer = built.model.solve(budget - graph.resident_bytes, OPTIONS)
    return float("inf") if answer.status is Status.INFEASIBLE else answer.objective


def budgets(graph: Graph, parts: int) -> list[int]:
    """Budgets between what the step needs in any case and what it takes as it is."""
    least, most = memory_lower_bound(graph), replay(graph, store_all(graph)).peak_bytes
    return sorted({least + part * (most - least) // parts for part in range(parts)})


@pytest.mark.parametrize("seed", range(16))
def test_it_is_never_above_the_whole_steps_relaxation(seed: int) -> None:
    rng = Random(seed)
    places = rng.randint(2, 3)
    graph = repeated_graph(rng, 8, places, implementations=True, results=rng.random() < 0.7)
    for budget in budgets(graph, 4):
        optimum = whole(graph, budget)
        for groups in (3, 5):
            assert by_groups(graph, budget, groups) <= optimum * (1 + SAME)


@pytest.mark.parametrize("groups", [3, 4, 6, 10])
def test_groups_of_one_layer_lose_nothing(groups: int) -> None:
    graph = blocks(12)
    for budget in budgets(graph, 4)[1:]:
        found, optimum = by_groups(graph, budget, groups), whole(graph, budget)
        assert found <= optimum * (1 + SAME)
        assert found >= optimum * (1 - (SAME if groups == 10 else 0.02))


def test_it_grows_with_depth_as_the_whole_steps_does_and_its_size_does_not() -> None:
    sizes = []
    for layers in (12, 24):
        graph = blocks(layers)
        budget = budgets(graph, 3)[1]
        optimum = whole(graph, budget)
        assert optimum * 0.98 <= by_groups(graph, budget, 3) <= optimum * (1 + SAME)
        folding = folding_of(graph, 3)
        sizes.append(AggregatedModel(folding.graph, device=LINK, folding=folding).model.count)
    assert sizes[0] == sizes[1]


def test_without_a_link_it_holds_too() -> None:
    graph = blocks(16)
    for budget in budgets(graph, 4)[1:]:
        found, optimum = by_groups(graph, budget, 4, Device()), whole(graph, budget, Device())
        assert 0 < found <= optimum * (1 + SAME)


def test_time_points_other_than_the_boundary_are_refused() -> None:
    folding = folding_of(blocks(12), 3)
    with pytest.raises(ValueError, match="the boundary"):
        AggregatedModel(folding.graph, at=(folding.graph.first_backward + 2,), folding=folding)


@pytest.mark.parametrize("seed", range(12))
def test_no_program_that_is_found_is_faster(seed: int) -> None:
    """Exhaustive search is out of reach: six layers, the fewest with a group of two, have 13
    operators. Programs of a local search in the whole step stand in for the optimum."""
    rng = Random(seed)
    graph = repeated_graph(rng, 9, rng.randint(2, 3), implementations=True)
    table = RunTable(graph)
    runs = table.runs_of(stored(graph))
    least, most = Mover(table, ROOMY, LINK).floor_bytes(runs), budgets(graph, 4)[-1]
    for budget in sorted({least, least + 2, (least + most) // 2, most}):
        mover = Mover(table, budget, LINK)
        search = LocalSearch(mover, Deadline(), most=400)
        search.descend(search.start(runs))
        if search.best is None:
            continue
        time_s = replay(graph, mover.program(search.finished()), LINK).time_s
        for groups in (3, 5):
            assert by_groups(graph, budget, groups) <= time_s * (1 + SAME)
