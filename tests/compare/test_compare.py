"""compare: one table, one profile, the same figures as plan."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

import memopt
from memopt import Chain, Comparison, Device, Status
from memopt.api import comparing
from memopt.errors import InfeasibleBudgetError
from memopt.programs.solution import Solution
from memopt.strategies import Rotor
from memopt.strategies.base import CostModel, Features, Progress, Strategy
from tests.plan.tiny import make, profiled

LINK = Device(to_host_bytes_per_s=2.0)


def test_has_the_figures_of_plan(chain: Chain, table: Comparison) -> None:
    assert table.complete
    assert len(table.cells) == len(table.strategies) * len(table.budgets)
    for cell in table.cells:
        if cell.plan is None:
            assert cell.status is Status.INFEASIBLE
            with pytest.raises(memopt.InfeasibleBudgetError) as caught:
                memopt.plan(chain, budget=cell.budget_bytes, strategy=cell.strategy)
            assert caught.value.smallest_budget_bytes == cell.smallest_budget_bytes
            continue
        plan = memopt.plan(chain, budget=cell.budget_bytes, strategy=cell.strategy)
        least_s = chain.compute_time_s
        gap = (plan.step_time_s - least_s) / least_s
        figures = (plan.peak_bytes, plan.step_time_s, plan.overhead, plan.lower_bound_s, gap)
        assert figures == (
            cell.peak_bytes,
            cell.step_time_s,
            cell.overhead,
            cell.lower_bound_s,
            cell.gap,
        )


def test_default_budgets_run_from_the_floor_to_the_baseline(
    chain: Chain, table: Comparison
) -> None:
    smallest = [
        memopt.plan(chain, budget="min", strategy=name).budget or 0 for name in table.strategies
    ]
    assert table.budgets[0] == min(smallest)
    assert table.budgets[-1] == table.baseline.peak_bytes
    assert len(table.budgets) == 5
    assert any(cell.plan for cell in table.cells if cell.budget_bytes == table.budgets[0])


def test_default_strategies_follow_the_link(chain: Chain, table: Comparison) -> None:
    assert not {"greedy", "vdnn"} & set(table.strategies)
    assert {"store-all", "rotor", "monet", "olla"} <= set(table.strategies)
    assert "not compared: greedy, dynprog, offload-graph, vdnn, tflms: they move" in str(table)
    linked = memopt.compare(chain, budgets=[0.7], device=LINK, progress=False)
    assert {"store-all", "rotor", "greedy", "vdnn", "offload-graph"} <= set(linked.strategies)
    assert not linked.left_out


def test_budgets_as_people_write_them(chain: Chain) -> None:
    made = memopt.compare(
        chain, budgets=["min", 0.9, None, "1GiB"], strategies=["rotor", Rotor(slots=9)]
    )
    assert made.budgets[2:] == (None, 2**30)
    assert made.strategies == (repr(Rotor()), repr(Rotor(slots=9)))
    with pytest.raises(ValueError, match="budget"):
        memopt.compare(chain, budgets=["much"])
    with pytest.raises(ValueError, match="unknown strategy"):
        memopt.compare(chain, strategies=["best"])
    with pytest.raises(ValueError, match="run=True"):
        memopt.compare(chain, run=True)


def test_a_strategy_that_cannot_plan_it_says_so(chain: Chain) -> None:
    made = memopt.compare(chain, budgets=[1.0], strategies=[Refusing(), "rotor"])
    assert made.cells[0].status is Status.UNKNOWN
    assert made.cells[0].applies is False
    assert made.cells[0].note == "refusing plans nothing"
    assert "refusing  " in str(made)
    assert " n/a " in str(made)
    assert "refusing: refusing plans nothing" in str(made)


def test_the_best_of_a_class_is_no_optimum(chain: Chain) -> None:
    """sequential has one schedule: the gap is to what holds for every plan."""
    made = memopt.compare(chain, budgets=["1GiB"], strategies=["sequential", "store-all"])
    sequential, store_all = made.cells
    assert sequential.status is Status.OPTIMAL
    assert sequential.gap == pytest.approx(sequential.overhead)
    assert (sequential.gap or 0) > 0
    assert (sequential.verdict, store_all.verdict) == ("best of class", "optimal")
    assert "best of class" in str(made)


def test_best(table: Comparison) -> None:
    for budget in table.budgets:
        fitting = [
            cell.step_time_s
            for cell in table.cells
            if cell.peak_bytes is not None and cell.peak_bytes <= (budget or 0)
        ]
        best = table.best(budget)
        assert best is not None
        assert best.step_time_s == min(time_s for time_s in fitting if time_s is not None)
    with pytest.raises(InfeasibleBudgetError, match="no compared plan needs at most 1 B") as none:
        table.best(1)
    least = min(cell.peak_bytes for cell in table.cells if cell.peak_bytes is not None)
    assert none.value.smallest_budget_bytes is not None
    assert none.value.smallest_budget_bytes <= least
    assert table.best() == table.best(1.0)


def test_best_of_no_plans_says_what_would_do(chain: Chain) -> None:
    made = memopt.compare(chain, budgets=[1], strategies=["rotor"], progress=False)
    for budget in (None, 1):
        with pytest.raises(InfeasibleBudgetError, match="no strategy has a plan") as none:
            made.best(budget)
        assert none.value.smallest_budget_bytes == made.cells[0].smallest_budget_bytes


@dataclasses.dataclass(frozen=True)
class Refusing(Strategy):
    """Plans nothing, and says so."""

    name: ClassVar[str] = "refusing"
    needs: ClassVar[str] = "chain"

    def why_not(self, cost_model: CostModel) -> str | None:
        return "refusing plans nothing"

    def solve(self, cost_model: CostModel, budget_bytes: int | None, **_: Any) -> Solution:
        raise AssertionError("never asked")


@dataclasses.dataclass(frozen=True)
class Mine(Strategy):
    """Rotor that notes its solves; `waits`: it never ends unless interrupted."""

    name: ClassVar[str] = "mine"
    features: ClassVar[Features] = Rotor.features
    needs: ClassVar[str] = "chain"
    waits: bool = False
    threads: list[int] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        """As Rotor."""
        self.threads.append(threading.get_ident())
        while self.waits:
            assert progress is not None
            progress(0.5, "waiting")
            time.sleep(0.01)
        return Rotor().solve(cost_model, budget_bytes)


def impatient(_fraction: float, what: str) -> None:
    """As if the user pressed Ctrl-C when a solve takes too long."""
    if what.endswith(": waiting"):
        raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [1, 2])
def test_interrupted_it_returns_what_is_done(chain: Chain, workers: int) -> None:
    made = memopt.compare(
        chain,
        budgets=[0.8, 1.0],
        strategies=["rotor", Mine(waits=True)],
        progress=impatient,
        workers=workers,
        cache=False,
    )
    assert not made.complete
    assert {cell.strategy for cell in made.cells} == {"rotor"}
    assert len(made.cells) in ((2,) if workers == 1 else (1, 2))
    assert "interrupted" in str(made)
    assert "interrupted" in made.to_markdown()


def _solves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The strategies that `compare` solves from now on."""
    solved: list[str] = []
    real = comparing.solve

    def spy(cost_model: Any, budget: Any, strategy: Any, **rest: Any) -> Any:
        solved.append(strategy.name)
        return real(cost_model, budget, strategy, **rest)

    monkeypatch.setattr(comparing, "solve", spy)
    return solved


@pytest.mark.parametrize("kind", ["chain", "module"])
def test_a_second_call_takes_up_the_finished_cells(
    chain: Chain, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make("mlp")
    model = chain if kind == "chain" else profiled(made)
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    budgets, names = [0.5, 0.8, None], ["rotor", "store-all"]
    solved = _solves(monkeypatch)
    part = memopt.compare(
        model, budgets=budgets, strategies=["rotor", Mine(waits=True)], progress=impatient
    )
    assert not part.complete
    assert set(solved) == {"rotor", "mine"}
    solved.clear()
    whole = memopt.compare(model, budgets=budgets, strategies=names, progress=False, workers=2)
    assert whole.complete
    assert len(part.cells) in (2, 3)
    assert set(part.cells) <= set(whole.cells)
    assert len(solved) == len(whole.cells) - len(part.cells)
    solved.clear()
    again = memopt.compare(model, budgets=budgets, strategies=names, progress=False)
    assert (again.cells, solved) == (whole.cells, [])
    fresh = memopt.compare(model, budgets=budgets, strategies=names, cache=False, workers=1)
    for cell, other in zip(again.cells, fresh.cells, strict=True):
        assert dataclasses.replace(cell, solve_time_s=0.0) == dataclasses.replace(
            other, solve_time_s=0.0
        )
        assert (cell.plan is None) == (other.plan is None)
        if cell.plan is not None and other.plan is not None:
            # Statistics hold the solver's seconds.
            assert dataclasses.replace(cell.plan, stats={}) == dataclasses.replace(
                other.plan, stats={}
            )
    if kind == "module":
        best = again.best()
        assert best is not None
        assert best.plan is not None
        best.plan.apply(made[0])


def test_damaged_cells_and_other_questions_are_planned_anew(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    solved = _solves(monkeypatch)

    def ask(**more: Any) -> int:
        begin = len(solved)
        memopt.compare(chain, budgets=[0.8], strategies=["rotor"], progress=False, **more)
        return len(solved) - begin

    assert [ask(), ask()] == [1, 0]
    assert [ask(device=LINK), ask(time_limit_s=9.0), ask(cache=False)] == [1, 1, 1]
    for path in (tmp_path / "cells-v1").glob("*.json"):
        path.write_bytes(path.read_bytes()[:-9])
    assert [ask(), ask()] == [1, 0]


def test_finished_cells_of_a_chains_operators_are_taken_up(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    solved = _solves(monkeypatch)
    names = ["rotor", "offload-graph", "auto"]

    def ask() -> Comparison:
        return memopt.compare(chain, budgets=[0.95], strategies=names, device=LINK, progress=False)

    first = ask()
    begin = len(solved)
    again = ask()
    assert len(solved) == begin
    assert again == first
    for one, other in zip(first.cells, again.cells, strict=True):
        assert one.plan is not None
        assert other.plan is not None
        assert (one.plan.program, one.plan.graph) == (other.plan.program, other.plan.graph)
        assert (one.plan.chain, one.plan.is_of_chain) == (other.plan.chain, other.plan.is_of_chain)
    assert [cell.plan is not None and cell.plan.is_of_chain for cell in first.cells][:2] == [
        True,
        False,
    ]


def test_strategies_of_users_run_side_by_side_and_are_not_kept(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    mine = Mine()
    for count in (1, 2):
        table = memopt.compare(chain, budgets=[1.0, None], strategies=[mine], workers=2)
        assert len(mine.threads) == 2 * count
        assert all(cell.plan is not None and cell.plan.strategy is mine for cell in table.cells)
    assert threading.get_ident() not in mine.threads
    with pytest.raises(ValueError, match="workers must be at least 1"):
        memopt.compare(chain, workers=0)


def test_errors_of_a_strategy_are_raised(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(comparing, "solve", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        memopt.compare(chain, budgets=[0.8], strategies=["rotor"], cache=False)
