"""auto on real models: the minimum over the single strategies.

How well it keeps its time limit is measured by `benchmarks.auto_grid`, whose grid this is.
"""

from __future__ import annotations

import pytest

from benchmarks.auto_grid import MODELS, SINGLE, budgets_of, graph_of, least_of
from memopt.api.planning import solve
from memopt.models.device import Device
from memopt.strategies import Auto, resolve

AMPLE_S = 1200.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_is_the_minimum(name: str) -> None:
    graph = graph_of(name)
    auto = Auto(tuple(resolve(member) for member in SINGLE))
    for share, budget in budgets_of(graph).items():
        made = solve(graph, budget, auto, device=Device(), time_limit_s=AMPLE_S)
        # Sums in another order differ in the last digit.
        assert made.step_time_s == pytest.approx(least_of(graph, budget)[0], rel=1e-9), share
        assert made.peak_bytes <= budget
