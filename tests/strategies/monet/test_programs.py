"""The 0-1 programs against brute force, replay and each other."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from memopt import plan
from memopt.errors import MemoptError
from memopt.models.bounds import memory_lower_bound
from memopt.models.budget import Budget
from memopt.models.graph import Graph, Implementation, Operator
from memopt.models.status import Status
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.solvers.running import Solver, SolverOptions
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.checkmate_strategies import Checkmate, CheckmateRounding
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.monet.strategy import Choices, Monet
from memopt.strategies.shared.chain_programs import rotor_programs
from memopt.strategies.shared.kernel_choice import fastest_kernels
from tests.strategies.monet.fast_oracle import FastBrute
from tests.strategies.monet.graphs import in_place_graph, training_graph, with_one_gradient_choices
from tests.strategies.monet.oracle import Brute


def budgets(graph: Graph, rng: Random) -> int:
    peak = replay(graph, store_all(graph)).peak_bytes
    return rng.randint(peak // 3, peak + 2)


def drawn(seed: int, most: int) -> tuple[Graph, int]:
    rng = Random(seed)
    graph = training_graph(rng, rng.randint(2, most), rng.random() < 0.8)
    return graph, budgets(graph, rng)


def check_monet(seed: int, most: int) -> None:
    graph, budget = drawn(seed, most)
    built = MonetModel(graph)
    answer = built.model.solve(budget - graph.resident_bytes)
    best = Brute(graph, budget).best_s()
    if answer.status is Status.INFEASIBLE:
        assert best == float("inf")
        return
    assert answer.status is Status.OPTIMAL
    assert answer.objective == best
    violation, figures = validate_and_replay(
        graph, built.program(answer.values), Budget(budget), None
    )
    assert violation is None
    assert figures.peak_bytes <= budget
    assert figures.time_s == best


@pytest.mark.parametrize("seed", range(60))
def test_the_optimum_is_brute_force_under_the_same_count(seed: int) -> None:
    check_monet(seed, 3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1060))
def test_the_optimum_is_brute_force_on_many(seed: int) -> None:
    check_monet(seed, 4)


def check_eight(seed: int) -> None:
    rng = Random(seed)
    graph = training_graph(rng, rng.randint(5, 8), rng.random() < 0.8)
    peak = replay(graph, store_all(graph)).peak_bytes
    budget = rng.randint(6 * peak // 10, peak)
    built = MonetModel(graph)
    answer = built.model.solve(budget - graph.resident_bytes)
    best = FastBrute(graph, budget).best_s()
    assert (answer.status is Status.INFEASIBLE) == (best == float("inf"))
    if answer.values:
        assert answer.objective == best
        figures = replay(graph, built.program(answer.values))
        assert figures.peak_bytes <= budget
        assert figures.time_s == best


@pytest.mark.parametrize("seed", range(25))
def test_the_optimum_is_brute_force_up_to_eight_operators(seed: int) -> None:
    check_eight(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2000, 2400))
def test_the_optimum_is_brute_force_up_to_eight_operators_on_many(seed: int) -> None:
    check_eight(seed)


@pytest.mark.parametrize("seed", range(20))
def test_the_fast_brute_force_is_the_plain_one(seed: int) -> None:
    graph, budget = drawn(seed, 3)
    assert FastBrute(graph, budget).best_s() == Brute(graph, budget).best_s()


@pytest.mark.parametrize("seed", range(20))
def test_every_gradient_is_written_where_implementations_write_one_each(seed: int) -> None:
    rng = Random(seed)
    plain = training_graph(rng, rng.randint(2, 5), False)
    graph = with_one_gradient_choices(plain, rng)
    peak = replay(graph, store_all(graph)).peak_bytes
    budget = rng.randint(6 * peak // 10, peak)
    built, halves = MonetModel(graph), 0
    answer = built.model.solve(budget - graph.resident_bytes)
    without = MonetModel(graph, lambda operator, name: False)
    whole = without.model.solve(budget - graph.resident_bytes)
    if answer.values:
        program = built.program(answer.values)
        violation, figures = validate_and_replay(graph, program, Budget(budget), None)
        assert violation is None
        assert figures.time_s == answer.objective
        halves = sum(getattr(step, "implementation", None) is not None for step in program)
        assert halves % 2 == 0
    if whole.values:
        assert answer.values
        assert answer.objective <= whole.objective


@pytest.mark.parametrize("seed", range(40))
def test_without_alternatives_monet_is_no_better_than_checkmate(seed: int) -> None:
    rng = Random(seed)
    graph = training_graph(rng, rng.randint(2, 6), False)
    budget = budgets(graph, rng)
    monet = MonetModel(graph).model.solve(budget - graph.resident_bytes)
    built = CheckmateModel(graph)
    checkmate = built.model.solve(budget - graph.resident_bytes)
    if checkmate.status is Status.INFEASIBLE:
        assert monet.status is Status.INFEASIBLE
        return
    violation, figures = validate_and_replay(
        graph, built.program(checkmate.values), Budget(budget), None
    )
    assert violation is None
    assert figures.time_s == checkmate.objective
    assert monet.status is Status.INFEASIBLE or monet.objective >= checkmate.objective


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "strategy",
    [
        Monet(),
        Monet(choices=Choices.NONE),
        Checkmate(),
        CheckmateRounding(),
        Checkmate(fastest=True),
        Monet(solver=Solver.HIGHS),
    ],
    ids=["monet", "none", "checkmate", "rounding", "fastest", "highs"],
)
def test_strategies_keep_their_laws(strategy: Monet, seed: int) -> None:
    rng = Random(seed)
    graph = training_graph(rng, rng.randint(3, 8), True)
    budget = budgets(graph, rng)
    # A first call compiles kernels, for 10 seconds or more.
    solution = strategy.solve(graph, budget, time_limit_s=120.0)
    if solution.program is None:
        # Rounding proves nothing beyond the bound on memory.
        rounds = isinstance(strategy, CheckmateRounding)
        below = budget < memory_lower_bound(graph)
        assert solution.status is (Status.UNKNOWN if rounds and not below else Status.INFEASIBLE)
        smallest = solution.smallest_budget_bytes
        assert smallest is not None
        assert strategy.solve(graph, smallest, time_limit_s=120.0).program is not None
        return
    violation, figures = validate_and_replay(graph, solution.program, Budget(budget), None)
    assert violation is None
    assert figures.peak_bytes == solution.peak_bytes
    assert solution.lower_bound_s is not None
    assert solution.lower_bound_s <= figures.time_s


def test_rounding_ends_with_the_fastest_kernels() -> None:
    faster = 0
    for seed in range(20):
        rng = Random(seed)
        graph = training_graph(rng, rng.randint(3, 8), True)
        budget = budgets(graph, rng)
        plain = CheckmateRounding(start=False).solve(graph, budget)
        quick = CheckmateRounding(start=False, fastest=True).solve(graph, budget)
        assert (plain.program is None) == (quick.program is None)
        if plain.program is None or quick.program is None:
            continue
        violation, figures = validate_and_replay(graph, quick.program, Budget(budget), None)
        assert violation is None
        assert figures.time_s == quick.time_s <= (plain.time_s or 0.0)
        # The same runs, and no kernel of the same operands that fits where it runs is faster.
        assert fastest_kernels(graph, plain.program, budget) == quick.program
        assert fastest_kernels(graph, quick.program, budget) == quick.program
        faster += figures.time_s < (plain.time_s or 0.0)
    assert faster


def test_every_option_together_is_never_worse_than_one() -> None:
    for seed in range(12):
        rng = Random(seed)
        graph = training_graph(rng, 5, True)
        budget = budgets(graph, rng)
        times = {
            choices: Monet(choices=choices, start=False).solve(graph, budget).time_s
            for choices in Choices
        }
        together = times.pop(Choices.ALL) or float("inf")
        assert all(together <= (alone or float("inf")) for alone in times.values())


@pytest.mark.parametrize("strategy", [Monet(max_operators=6), Checkmate(max_operators=6)])
@pytest.mark.parametrize("seed", range(8))
def test_a_merged_graph_proves_nothing_about_the_whole(strategy: Monet, seed: int) -> None:
    rng = Random(seed)
    graph = training_graph(rng, 6, False)
    peak = replay(graph, store_all(graph)).peak_bytes
    for budget in range(memory_lower_bound(graph), peak, max(1, peak // 6)):
        solution = strategy.solve(graph, budget, time_limit_s=5.0)
        whole = type(strategy)(max_operators=99).solve(graph, budget, time_limit_s=20.0)
        if solution.program is None:
            # The relaxation of the whole graph may prove it.
            proved = solution.status is Status.INFEASIBLE
            assert not proved or whole.status is Status.INFEASIBLE
            continue
        assert solution.time_s is not None
        assert solution.lower_bound_s is not None
        if solution.status is Status.OPTIMAL and whole.time_s is not None:
            # By the relaxation of the whole graph, or because nothing is run twice.
            assert solution.time_s <= whole.time_s * (1 + 1e-6)
        if whole.time_s is not None:
            assert solution.lower_bound_s <= whole.time_s * (1 + 1e-6)


@pytest.mark.parametrize("strategy", [Monet(start=False), Checkmate(start=False)])
def test_no_time_is_no_proof(strategy: Monet) -> None:
    graph = training_graph(Random(1), 6, True)
    budget = memory_lower_bound(graph)
    assert strategy.solve(graph, budget, time_limit_s=0.0).status is Status.UNKNOWN
    assert strategy.solve(graph, budget - 1, time_limit_s=0.0).status is Status.INFEASIBLE
    with pytest.raises(MemoptError, match="larger time_limit_s"):
        plan(graph, budget=budget, strategy=strategy, time_limit_s=0.0, progress=False)


@pytest.mark.parametrize("seed", range(8))
def test_a_hint_reads_back_the_program_it_came_from(seed: int) -> None:
    graph, _ = drawn(seed, 5)
    peak = replay(graph, store_all(graph)).peak_bytes
    for built in (MonetModel(graph), CheckmateModel(graph)):
        answer = built.model.solve(peak)
        built.hint(built.program(answer.values))
        started = built.model.solve(peak)
        assert started.objective == answer.objective
        read = [built.model.hints.get(v, False) for v in range(built.model.count)]
        assert built.program(tuple(read)) == built.program(answer.values)


@pytest.mark.parametrize("seed", [0, 1, 2, 6])
def test_a_start_that_the_program_cannot_represent_is_kept_and_flagged(seed: int) -> None:
    # The program knows no computing in place, Rotor's plan does with less because of it.
    rng = Random(seed)
    graph = in_place_graph(rng, rng.randint(3, 7))
    budget = replay(graph, rotor_programs(graph, 1)[1]).peak_bytes
    built = MonetModel(graph)
    assert built.model.solve(budget - graph.resident_bytes).status is Status.INFEASIBLE
    solution = Monet().solve(graph, budget, time_limit_s=20.0)
    assert solution.stats["chosen"] == "rotor"
    assert solution.stats["outside_the_program"] is True
    violation, figures = validate_and_replay(graph, solution.program, Budget(budget), None)
    assert violation is None
    assert solution.lower_bound_s is not None
    assert solution.lower_bound_s < figures.time_s
    assert solution.status is Status.FEASIBLE
    inside = Monet().solve(graph, budget + 100, time_limit_s=20.0)
    assert inside.stats.get("outside_the_program") is not True


@pytest.mark.parametrize("solver", list(Solver))
def test_an_interrupt_ends_a_solver(solver: Solver) -> None:
    def interrupt(fraction: float, what: str) -> None:
        raise KeyboardInterrupt

    graph = training_graph(Random(5), 12, True)
    budget = 7 * replay(graph, store_all(graph)).peak_bytes // 10
    answer = MonetModel(graph).model.solve(
        budget - graph.resident_bytes,
        SolverOptions(solver, time_limit_s=600.0, progress=interrupt),
    )
    # A fast machine may be done before it is asked.
    assert answer.status in (Status.UNKNOWN, Status.FEASIBLE, Status.OPTIMAL)


def test_choices_by_name() -> None:
    assert Monet(solver="scip").solver is Solver.SCIP  # type: ignore[arg-type]
    assert Monet(choices="conv") == Monet(choices=Choices.CONV)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing"):
        Monet(choices="nothing")  # type: ignore[arg-type]


def test_what_an_implementation_is_does_not_hang_on_its_name() -> None:
    forward = Operator("conv", (0,), (1,), 4.0, target="aten.convolution.default")
    relu = Operator("relu", (1,), (2,), 2.0)
    names = ("mask", "index8", "any")
    same = tuple(Implementation(name, 1.0) for name in names)
    fewer = tuple(Implementation(name, 1.0, reads=(0,)) for name in names)
    more = tuple(Implementation(name, 1.0, reads=(0,), packed=True) for name in names)
    kinds = {
        Choices.CONV: (*((relu, c) for c in same), *((forward, c) for c in fewer)),
        Choices.OUTPUT: tuple((relu, c) for c in fewer),
        Choices.INTERMEDIATE: tuple((relu, c) for c in more),
    }
    for choices, which in kinds.items():
        for operator, choice in which:
            found = replace(operator, implementations=(choice,))
            only = [c for c in kinds if Monet(choices=c).allowed(found, choice.name)]
            assert only == [choices], choice
