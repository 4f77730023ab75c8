"""Numbers worked out by hand, and the instances of the NP-hardness proofs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.instances import offload_three_partition, offload_two_partition
from memopt.models.status import Status
from memopt.strategies.offload import DynProg, Greedy, OffloadExact, Vdnn
from memopt.strategies.offload.ordered import (
    eager_amounts,
    fractional_optimum_s,
    makespan_s,
    ordered_schedule,
    per_operation_s,
    proposition_3_s,
)
from memopt.strategies.offload.problem import offload_problem
from tests.strategies.offload.chains import (
    splits,
    stage,
    three_stages,
)
from tests.strategies.offload.oracle import paper_link


def test_peak_floor_and_excess() -> None:
    problem = offload_problem(three_stages(), 8, paper_link(2))
    assert problem.peak_bytes == 10  # 4 + 3 + 2 + 0 + ex^B_2
    # F_0, B_0: x_0 + x_1 = 7; F_1: x_1 + x_2 = 5; B_2: x_2 + x_3 + 1 = 3.
    assert problem.floor_bytes == 7
    assert problem.excess_bytes == 2
    assert problem.need_bytes.tolist() == [-1, 1, 1, 2, 1, -1]
    assert problem.movable.tolist() == [True, True, False, False]


def test_lower_bounds() -> None:
    problem = offload_problem(three_stages(), 8, paper_link(0.5))
    # Two bytes out and back at 0.5 B/s: 8 s; six operations of 1 s.
    assert proposition_3_s(problem) == 8.0
    # B_2 starts after 4 s (two bytes out), takes 1 s, and two bytes return in 4 s.
    assert per_operation_s(problem) == 9.0
    assert proposition_3_s(offload_problem(three_stages(), 8, paper_link(2))) == 6.0


def test_fractional_schedule() -> None:
    problem = offload_problem(three_stages(), 8, paper_link(0.5))
    amounts = eager_amounts(problem, 2)
    assert amounts.tolist() == [2, 0, 0, 0]
    schedule = ordered_schedule(problem, amounts)
    # One byte is out after 2 s: F_1. Two after 4 s: B_2. One byte may be back during B_1 and
    # one more after it (need 1 at B_1, -1 at B_0): the first leaves at 5 s when B_2 ends.
    assert schedule.starts_s.tolist() == [0, 2, 3, 4, 5, 9]
    assert schedule.makespan_s == 10.0
    assert fractional_optimum_s(problem) == 10.0


def test_greedy_rounds_up() -> None:
    solution = Greedy().solve(three_stages(), 8, device=paper_link(1))
    assert solution.stats["chosen"] == (0,)
    assert solution.stats["chosen_bytes"] == 4
    # Whole: x_0 is out at 4 s, F_1 waits for it; it may return while B_2 is not running and
    # B_1 has room for it: need 1 of 4 away until B_1 ends, so 3 bytes are too many before.
    assert solution.stats["paper_whole_time_s"] == 4 + 2 + 2 + 4 + 1
    assert solution.time_s == 13.0
    assert solution.peak_bytes is not None
    assert solution.peak_bytes <= 8


def test_dynprog_prefers_what_fits() -> None:
    """Greedy moves x_0 (10 bytes); x_1 (2 bytes) is enough."""
    chain = Chain(10, [stage(1, 1, 2), stage(1, 1, 1), stage(1, 1, 1), stage(0, 0, 0)])
    device = paper_link(2)
    budget = 13
    greedy = Greedy().solve(chain, budget, device=device)
    dynprog = DynProg(slots=None, refine=False).solve(chain, budget, device=device)
    assert greedy.stats["chosen"] == (0,)
    assert dynprog.stats["chosen"] == (1,)
    # x_1 is out at 2 s, in time for F_2; B_2 has room for one of its bytes only, so that B_1
    # waits 0.5 s for the other one, or 1 s for a whole transfer.
    assert dynprog.stats["paper_time_s"] == 6.5
    assert dynprog.time_s == 7.0
    assert greedy.time_s is not None
    assert greedy.time_s > 7.0


def test_without_excess_nothing_moves() -> None:
    for budget in (10, 11, None):
        solution = DynProg().solve(three_stages(), budget, device=paper_link(1))
        assert solution.status is Status.OPTIMAL
        assert solution.time_s == 6.0
        assert solution.peak_bytes == 10
        assert solution.stats["offloaded"] == ()


def test_infeasible_names_the_floor() -> None:
    chain = three_stages()
    for strategy in (Greedy(), DynProg(), Vdnn(), OffloadExact()):
        solution = strategy.solve(chain, 6, device=paper_link(1))
        assert solution.status is Status.INFEASIBLE
        assert solution.smallest_budget_bytes == 7
        assert strategy.solve(chain, 7, device=paper_link(1)).steps is not None


def test_input_that_does_not_move() -> None:
    """F_1 then keeps x_0, x_1 and x_2: 9 bytes; B_2 needs 10 without x_1's 3."""
    strategy = Greedy(offload_input=False)
    assert strategy.solve(three_stages(), 9, device=paper_link(1)).stats["chosen"] == (1,)
    assert strategy.solve(three_stages(), 8, device=paper_link(1)).smallest_budget_bytes == 9


@pytest.mark.parametrize("values", [(2, 3, 5, 1, 4, 5), (3, 3, 4, 2, 2, 6), (1, 1, 1, 1, 1, 9)])
def test_figure_2_decides_3_partition(values: tuple[int, ...]) -> None:
    chain, budget, device = offload_three_partition(values, 2)
    solution = OffloadExact().solve(chain, budget, device=device)
    assert solution.stats["proved"]
    assert (solution.stats["exact_time_s"] == 4.0) == splits(values, 2)


def test_figure_2_with_three_parts() -> None:
    for values in ((1, 2, 6, 2, 3, 4, 1, 3, 5), (1, 1, 7, 7, 2, 2, 2, 2, 3)):
        chain, budget, device = offload_three_partition(values, 3)
        solution = OffloadExact().solve(chain, budget, device=device)
        assert solution.stats["proved"]
        assert (solution.stats["exact_time_s"] == 6.0) == splits(values, 3), values


def test_figure_3_decides_2_partition() -> None:
    both = set()
    for values in itertools.combinations_with_replacement((1, 2, 3, 5, 7), 4):
        if sum(values) % 2:
            continue
        chain, budget, device = offload_two_partition(values)
        solution = DynProg(slots=None, refine=False).solve(chain, budget, device=device)
        assert (solution.stats["paper_time_s"] == 2.0) == splits(values, 2), values
        both.add(splits(values, 2))
    assert both == {False, True}


def test_recurrence_counts_the_last_offload_at_the_gap() -> None:
    """(10) with its correction: F_j needs x_j although its copy has ended."""
    chain = Chain(2, [stage(4, 1, 6), stage(8, 1, 2), stage(1, 1, 2), stage(0, 0, 0)])
    device = Device(to_host_bytes_per_s=2.0, from_host_bytes_per_s=0.25, duplex=False)
    problem = offload_problem(chain, 10, device)
    best = min(
        makespan_s(problem, problem.amounts(list(chosen)))
        for size in range(4)
        for chosen in itertools.combinations(np.flatnonzero(problem.movable), size)
    )
    solution = DynProg(slots=None, refine=False).solve(chain, 10, device=device)
    assert solution.stats["paper_time_s"] == pytest.approx(best)
