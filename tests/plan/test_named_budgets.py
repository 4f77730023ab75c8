"""A budget that is named comes with its plan, kept: at "min", planned again, at any time limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, ClassVar

import pytest

import memopt
from memopt.api.reserved import planned_within
from memopt.errors import InfeasibleBudgetError, InvalidProgramError, MemoptError
from memopt.models.bounds import memory_lower_bound
from memopt.models.budget import Budget
from memopt.models.charges import Charges
from memopt.models.generate import random_chain
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies import STRATEGIES, StoreAll, target
from memopt.strategies.auto.strategy import Auto
from memopt.strategies.base import Strategy
from memopt.strategies.monet.checkmate_strategies import Checkmate
from memopt.strategies.monet.rotor_menus import RotorMenus
from memopt.strategies.monet.strategy import Monet
from tests.brute_force.sweep import strategies as every_strategy
from tests.fuzz.extremes import extreme
from tests.strategies.monet.graphs import in_place_graph, training_graph

LINK = memopt.Device(to_host_bytes_per_s=5.0)
GRAPH = training_graph(Random(3), 14, True)
# With a tiny limit autoswap tries nothing, which is mended elsewhere.
NAMES = [strategy.name for strategy in STRATEGIES if strategy.name != "autoswap"]


def plan(model: Any, budget: Any, strategy: Any, limit_s: float = 20.0) -> memopt.Plan:
    return memopt.plan(
        model, budget=budget, strategy=strategy, device=LINK, time_limit_s=limit_s, progress=False
    )


def known(model: Any, budget: int, strategy: Any) -> int:
    """The peak of the plan within a budget, or what is named where there is none, bytes."""
    try:
        return plan(model, budget, strategy).peak_bytes
    except InfeasibleBudgetError as error:
        return error.smallest_budget_bytes or 2**62
    except MemoptError:
        return 0


@pytest.mark.parametrize("seed", [3, 46])
def test_min_is_what_its_plan_takes(seed: int) -> None:
    """Also of chains, whose programs may take less than the chain that was solved."""
    graph = training_graph(Random(seed), 14, True)
    for name in ("rotor", "rotor-menus", "revolve"):
        made = plan(graph, "min", name)
        assert made.budget == made.peak_bytes
        assert plan(graph, made.peak_bytes, name).peak_bytes == made.peak_bytes


def test_the_budget_that_is_named_has_room_for_what_is_beside_the_step() -> None:
    solve_for, beside = partial(plan, GRAPH, strategy="rotor"), Charges(forward_bytes=10**4)
    with pytest.raises(InfeasibleBudgetError) as refused:
        planned_within(solve_for, memory_lower_bound(GRAPH) - 1, beside)
    named = refused.value.smallest_budget_bytes
    assert planned_within(solve_for, named, beside).budget == named


@pytest.mark.parametrize("finds_larger", [False, True])
def test_what_only_the_smallest_search_finds_leaves_room_for_what_is_beside(
    finds_larger: bool,
) -> None:
    """A search within the budget finds nothing, or only what leaves no room."""
    beside = Charges(forward_bytes=10**4)
    least = planned_within(partial(plan, GRAPH, strategy="rotor"), "min", beside)
    assert least.budget is not None

    def solve_for(budget: Any) -> Any:
        if budget == "min" or (finds_larger and budget == least.budget + 1):
            made = plan(GRAPH, "min" if budget == "min" else None, "rotor")
            return made if budget == "min" else replace(made, budget=budget)
        raise InfeasibleBudgetError("none found", budget)

    for budget in (least.budget, least.budget + 1):
        assert planned_within(solve_for, budget, beside).program == least.program
    with pytest.raises(InfeasibleBudgetError, match=f"Raise the budget to {least.budget} bytes"):
        planned_within(solve_for, least.budget - 1, beside)


@pytest.mark.parametrize("limit_s", [1e-6, 0.05])
@pytest.mark.parametrize("name", NAMES)
def test_min_has_a_plan_at_any_limit(name: str, limit_s: float) -> None:
    made = plan(GRAPH, "min", name, limit_s)
    assert made.budget is not None
    assert made.peak_bytes <= made.budget
    assert plan(GRAPH, made.budget, name, limit_s).peak_bytes <= made.budget
    with pytest.raises(MemoptError) as refused:
        plan(GRAPH, memory_lower_bound(GRAPH) - 1, name, limit_s)
    named = getattr(refused.value, "smallest_budget_bytes", None)
    assert named is None or plan(GRAPH, named, name, limit_s).peak_bytes <= named


@pytest.mark.parametrize("strategy", ["monet", "checkmate", "rotor-menus", "store-all"])
def test_min_counts_computing_in_place(strategy: str) -> None:
    for seed in range(5):
        rng = Random(seed)
        graph = in_place_graph(rng, rng.randint(3, 6))
        least = plan(graph, "min", strategy)
        assert least.budget is not None
        again = plan(graph, least.budget, strategy)
        assert again.peak_bytes <= least.peak_bytes == least.budget
        # A search for a given budget may find less than the one for the smallest peak did.
        assert known(graph, least.budget - 1, strategy) <= least.budget


def test_all_that_runs_once_is_planned_in_place_within_what_that_needs() -> None:
    graph = in_place_graph(Random(2), 6)
    separate, in_place = store_all(graph), with_in_place(graph, store_all(graph))
    need_bytes = replay(graph, in_place).peak_bytes
    assert need_bytes < replay(graph, separate).peak_bytes
    assert plan(graph, need_bytes, "store-all").peak_bytes == need_bytes
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(graph, need_bytes - 1, "store-all")
    assert refused.value.smallest_budget_bytes == need_bytes


@dataclass(frozen=True)
class Forgetful(Strategy):
    """Names a budget once, and then finds nothing for it; or names it with half of a plan."""

    valid: bool = True

    name: ClassVar[str] = "forgetful"
    needs: ClassVar[str] = "graph"

    def solve(self, cost_model: Any, budget_bytes: int | None, **_: object) -> Solution:
        if budget_bytes != 1:
            return Solution(Status.UNKNOWN)
        program = store_all(cost_model)
        peak_bytes = replay(cost_model, program).peak_bytes
        if not self.valid:
            program = Program(program.instructions[:-2])
        plan = Solution(Status.FEASIBLE, program=program, peak_bytes=peak_bytes)
        return Solution(Status.UNKNOWN, smallest_budget_bytes=peak_bytes, smallest=plan)


def test_what_a_search_does_not_find_again_is_kept() -> None:
    graph = training_graph(Random(8), 4, False)
    peak_bytes = replay(graph, store_all(graph)).peak_bytes
    with pytest.raises(MemoptError, match="found no plan"):
        plan(graph, peak_bytes, Forgetful())
    with pytest.raises(MemoptError, match="one is known for"):
        plan(graph, 1, Forgetful())
    assert plan(graph, peak_bytes, Forgetful()).peak_bytes == peak_bytes
    assert plan(graph, "min", Forgetful()).budget == peak_bytes
    # Of this graph and this strategy only, and for no less.
    other = replace(graph, extra_resident_bytes=1)
    for model, budget, strategy in (
        (other, peak_bytes + 1, Forgetful()),
        (graph, peak_bytes - 1, Forgetful()),
        (graph, peak_bytes, Forgetful(valid=False)),
    ):
        with pytest.raises(MemoptError, match="found no plan"):
            plan(model, budget, strategy)


def test_a_plan_that_is_named_is_checked() -> None:
    with pytest.raises(InvalidProgramError, match="forgetful named"):
        plan(training_graph(Random(8), 4, False), "min", Forgetful(valid=False))


@pytest.mark.parametrize("strategy", [Monet(start=False), Checkmate(start=False)])
def test_without_a_start_the_smallest_known_is_all_that_is_stored(strategy: Strategy) -> None:
    graph = training_graph(Random(1), 6, True)
    everything = replay(graph, store_all(graph)).peak_bytes
    assert plan(graph, "min", strategy, 1e-6).budget == everything


@dataclass(frozen=True)
class Overlooking(Strategy):
    """Names the step as it is, and finds rotor-menus' plans when it is asked for less."""

    name: ClassVar[str] = "overlooking"
    needs: ClassVar[str] = "graph"

    def solve(self, cost_model: Any, budget_bytes: int | None, **_: object) -> Solution:
        if budget_bytes != 1:
            return RotorMenus().solve(cost_model, budget_bytes)
        whole = StoreAll().solve(cost_model, None)
        return Solution(Status.UNKNOWN, smallest_budget_bytes=whole.peak_bytes, smallest=whole)


def test_auto_also_searches_below_what_its_members_name() -> None:
    graph = training_graph(Random(8), 4, False)
    least = plan(graph, "min", Auto(members=(Overlooking(),)))
    assert least.peak_bytes == plan(graph, "min", "rotor-menus").peak_bytes
    assert least.peak_bytes < plan(graph, "min", "store-all").peak_bytes


def test_auto_looks_for_the_smallest_budget_in_the_time_of_one_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each search has what the ones before left, and starts from the least plan so far."""
    graph = training_graph(Random(8), 4, False)
    asked: list[tuple[float, list[int]]] = []
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 8 * len(asked))
    solve = Auto.solve_from

    def counted(self: Auto, known: Sequence[Program], *given: Any, **options: Any) -> Solution:
        peaks = [replay(graph, program).peak_bytes for program in known]
        found = solve(self, known, *given, **options)
        asked.append((self.most_s, peaks))
        return found

    monkeypatch.setattr(Auto, "solve_from", counted)
    least = memopt.plan(graph, budget="min", strategy=Auto(), progress=False)
    spans, starts = zip(*asked, strict=True)
    assert all(span <= max(0.0, 20.0 - 8 * number) for number, span in enumerate(spans))
    assert starts[0] == []
    assert all(len(peaks) == 1 and peaks[0] >= least.peak_bytes for peaks in starts[1:])
    assert len(asked) > 1


def test_auto_with_slow_members_only_asks_the_first() -> None:
    assert plan(GRAPH, "min", Auto(members=(Monet(), Checkmate())), 1e-6).peak_bytes > 0


def _zero(graph: Graph) -> Graph:
    tensors = [replace(tensor, size_bytes=0) for tensor in graph.tensors]
    operators = [replace(operator, workspace_bytes=0) for operator in graph.operators]
    return replace(graph, tensors=tuple(tensors), operators=tuple(operators))


@pytest.mark.parametrize("name", ["store-all", "rotor", "monet", "checkmate", "auto", "olla"])
def test_a_graph_of_no_bytes_has_a_plan_at_min(name: str) -> None:
    assert plan(_zero(training_graph(Random(2), 4, False)), "min", name).peak_bytes == 0


def test_a_plan_is_checked_once_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named, found again and wrapped, it is one plan."""
    checked: list[object] = []

    def counted(*given: Any) -> Any:
        checked.append(given)
        return validate_and_replay(*given)

    monkeypatch.setattr(target, "validate_and_replay", counted)
    chain = random_chain(Random(3), 6)
    plan = memopt.plan(chain, budget="min", strategy="rotor", progress=False)
    assert checked == [(plan.graph, plan.program, Budget(plan.budget), plan.device)]


def test_a_named_plan_can_be_ordered_again_at_its_ordered_peak() -> None:
    """The search for "min" and the refusal below it know different plans of one budget."""
    known = ((90038, "monet"), (90096, "monet"), (90102, "auto"), (90237, "offload-graph"))
    for seed, name in known:
        graph, device = extreme(seed)
        own = next(one for one in every_strategy() if one.name == name)
        ask = partial(memopt.plan, graph, strategy=own, device=device, order=True, progress=False)
        least = ask(budget="min")
        assert least.budget is not None
        assert least.peak_bytes < least.budget
        assert ask(budget=least.peak_bytes).peak_bytes == least.peak_bytes
