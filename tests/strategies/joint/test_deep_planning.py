"""Steps of many equal layers, planned by way of a folded step."""

from __future__ import annotations

import pytest

from memopt.models.bounds import memory_lower_bound
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.programs.validate import validate
from memopt.strategies import Joint
from memopt.strategies.joint import deep_planning
from tests.strategies.joint.chains import blocks

LINK = Device(to_host_bytes_per_s=1.0)


def planned(graph: Graph, share: float, device: Device = LINK) -> tuple[int, Solution]:
    """(budget, plan) within a share of what the step takes beyond what it needs in any case."""
    least, most = memory_lower_bound(graph), replay(graph, store_all(graph)).peak_bytes
    budget = least + int(share * (most - least))
    return budget, Joint(changes=200).solve(graph, budget, device=device, time_limit_s=60.0)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_a_deep_step_is_planned_through_its_equal_layers(share: float) -> None:
    graph = blocks(40)
    budget, solution = planned(graph, share)
    assert solution.stats["equal_layers"] == 38
    assert solution.stats["source"] == "equal layers"
    assert solution.program is not None
    assert validate(graph, solution.program, Budget(budget)) is None
    timeline = replay(graph, solution.program, LINK)
    assert timeline.peak_bytes <= budget
    assert (solution.lower_bound_s or 0) <= timeline.time_s <= 1.02 * (solution.lower_bound_s or 0)


def test_a_step_of_few_equal_layers_is_not_folded() -> None:
    _, solution = planned(blocks(deep_planning.DEEP - 4), 0.8)
    assert "equal_layers" not in solution.stats


@pytest.mark.slow
@pytest.mark.parametrize("device", [LINK, Device()])
def test_the_gap_does_not_grow_with_depth(device: Device) -> None:
    gaps = []
    for layers in (40, 80, 160):
        _, solution = planned(blocks(layers), 0.4, device)
        assert solution.time_s is not None
        assert solution.lower_bound_s is not None
        gaps.append(solution.time_s / solution.lower_bound_s - 1)
    assert max(gaps) <= gaps[0] + 0.01
