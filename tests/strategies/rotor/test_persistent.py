"""The persistent program and the yardsticks on the paper's toy chain."""

from __future__ import annotations

import pytest

from memopt.models.status import Status
from memopt.reductions.chain_replay import replay_chain
from memopt.strategies.rotor import Rotor, Sequential
from tests.strategies.rotor.chains import TOY_CURVE, toy_chain


@pytest.mark.parametrize(
    ("budget", "peak", "makespan"), [(None, 10699, 37.38), (9000, 8675, 47.42)]
)
def test_the_toy_chain_of_the_paper(budget, peak, makespan):
    solution = Rotor().solve(toy_chain(), budget)
    assert solution.peak_bytes == peak
    assert solution.time_s == pytest.approx(makespan, abs=1e-9)
    assert replay_chain(toy_chain(), solution.steps).peak_bytes == peak


def test_infeasible_names_the_smallest_budget_and_it_works():
    chain = toy_chain()
    least = TOY_CURVE[0][0]
    solution = Rotor().solve(chain, least - 1)
    assert solution.status is Status.INFEASIBLE
    assert solution.smallest_budget_bytes == least == Rotor().smallest_budget(chain)
    assert Rotor().solve(chain, least).time_s == pytest.approx(56.17)


def test_store_all_and_sequential_on_the_toy_chain():
    chain = toy_chain()
    one = Sequential(1)
    assert one.solve(chain, None).peak_bytes == 10699
    assert one.solve(chain, 10698).status is Status.INFEASIBLE
    two = Sequential().solve(chain, None)
    assert [str(step) for step in two.steps[:4]] == ["Fck^1", "F∅^2", "F∅^3", "Fall^4"]


def test_the_seven_budgets_of_the_toy_chain():
    found = Rotor(slots=None).curve(toy_chain())
    assert [point.peak_bytes for point in found] == [peak for peak, _ in TOY_CURVE]
    assert [point.time_s for point in found] == pytest.approx([time for _, time in TOY_CURVE])
