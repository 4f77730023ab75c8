"""A strategy that breaks a law is told which: deliberately bad strategies for `check_strategy`."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest

from memopt.errors import MemoptError
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.steps import ChainStep, Move
from memopt.strategies import Rotor, Solution, Status, Strategy
from memopt.strategies.base import CostModel, Features, Progress
from memopt.testing import Law, StrategyLawError, check_strategy, tiny_instances

Change = Callable[[CostModel, int | None, Solution], Solution]


@dataclass(frozen=True)
class Changed(Strategy):
    """Rotor, whose solutions somebody has changed."""

    change: Change

    name = "changed"
    needs = "chain"
    features = Features(recompute=True)

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        solution = Rotor().solve(
            cost_model, budget_bytes, time_limit_s=time_limit_s, progress=progress
        )
        return self.change(cost_model, budget_bytes, solution)


def unchanged(_model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    return solution


def store_all(model: CostModel) -> tuple[ChainStep, ...]:
    assert isinstance(model, Chain)
    stages = range(1, len(model) + 1)
    forward = [ChainStep(Move.FORWARD_ALL, stage) for stage in stages]
    return (*forward, *(ChainStep(Move.BACKWARD, stage) for stage in reversed(stages)))


def over_budget(model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    return replace(solution, steps=store_all(model)) if solution.plans else solution


def high_bound(_model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    return replace(solution, lower_bound_s=1e6) if solution.plans else solution


def slower_with_more(model: CostModel, budget: int | None, solution: Solution) -> Solution:
    """Without a budget, the plan of the smallest one."""
    if budget is not None:
        return solution
    least = Rotor().solve(model, 1).smallest
    assert least is not None
    return replace(least, status=Status.FEASIBLE, lower_bound_s=None)


def slow_optimum(model: CostModel, budget: int | None, solution: Solution) -> Solution:
    """As if that were optimal."""
    slow = slower_with_more(model, budget, solution)
    return slow if slow is solution else replace(slow, status=Status.OPTIMAL)


def slow_bound(model: CostModel, budget: int | None, solution: Solution) -> Solution:
    """As if nothing were faster: at most the plan's own time, but more than a smaller budget's."""
    slow = slower_with_more(model, budget, solution)
    return slow if slow is solution else replace(slow, lower_bound_s=slow.time_s)


def unserialisable(_model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    return replace(solution, stats={"table": {1, 2}})


def infinite_figure(_model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    return replace(solution, stats={"best_s": math.inf})


def list_of_steps(_model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    """Comes back from its file as a tuple."""
    return replace(solution, steps=list(solution.steps)) if solution.steps else solution  # type: ignore[arg-type]


def named_too_small(_model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    named = solution.smallest_budget_bytes
    return replace(solution, smallest_budget_bytes=named and named - 1)


def named_too_large(model: CostModel, budget: int | None, solution: Solution) -> Solution:
    """Names what the unplanned step needs, though it has plans for less."""
    if solution.plans:
        return solution
    most = Rotor().solve(model, None)
    return replace(solution, smallest_budget_bytes=most.peak_bytes, smallest=most)


def names_none(_model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    return replace(solution, smallest_budget_bytes=None, smallest=None)


def half_a_schedule(_model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    return replace(solution, steps=solution.steps[:-1]) if solution.steps else solution


def no_plan_but_feasible(_model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    return solution if solution.plans else replace(solution, status=Status.FEASIBLE)


def gives_up(_model: CostModel, budget: int | None, solution: Solution) -> Solution:
    if budget is not None:
        return solution
    return replace(solution, status=Status.UNKNOWN, steps=None)


def another_each_time() -> Change:
    calls = count()

    def change(model: CostModel, budget: int | None, solution: Solution) -> Solution:
        return slower_with_more(model, budget, solution) if next(calls) % 2 else solution

    return change


def refuses_without_words(_model: CostModel, _budget: int | None, solution: Solution) -> Solution:
    if solution.plans:
        return solution
    raise MemoptError("no")


CHAIN = {"chain": tiny_instances()["chain"]}


def law_broken_by(change: Change, **how: bool) -> Law:
    with pytest.raises(StrategyLawError) as caught:
        check_strategy(Changed(change), CHAIN, **how)
    assert caught.value.strategy == "changed"
    assert caught.value.instance == "chain"
    assert caught.value.law.value in str(caught.value)
    return caught.value.law


def test_the_unchanged_strategy_keeps_every_law() -> None:
    assert check_strategy(Changed(unchanged), monotone=True)


@pytest.mark.parametrize(
    ("change", "law"),
    [
        (over_budget, Law.BUDGETS),
        (high_bound, Law.BOUND),
        (slow_bound, Law.BOUND),
        (slow_optimum, Law.OPTIMAL),
        (unserialisable, Law.STATS),
        (infinite_figure, Law.STATS),
        (list_of_steps, Law.FILE),
        (named_too_small, Law.SMALLEST),
        (names_none, Law.SMALLEST),
        (half_a_schedule, Law.VALID),
        (no_plan_but_feasible, Law.VALID),
        (gives_up, Law.PLANS),
        (another_each_time(), Law.DETERMINISTIC),
        (refuses_without_words, Law.REFUSAL),
    ],
)
def test_a_broken_law_is_named(change: Change, law: Law) -> None:
    assert law_broken_by(change) is law


def test_a_budget_named_too_large_is_mended_by_a_search_below_it() -> None:
    assert check_strategy(Changed(named_too_large))
    assert law_broken_by(named_too_small) is Law.SMALLEST


def test_slower_plans_with_more_memory_break_a_promise() -> None:
    assert law_broken_by(slower_with_more, monotone=True) is Law.MONOTONE


class TornOff(Changed):
    """Lets KeyboardInterrupt through."""

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        if progress is not None:
            progress(0.0, "begins")
        return super().solve(cost_model, budget_bytes)


def test_an_interruption_that_comes_through_is_named() -> None:
    with pytest.raises(StrategyLawError) as caught:
        check_strategy(TornOff(unchanged), CHAIN)
    assert caught.value.law is Law.STOPS


def test_a_bound_is_held_against_an_exhaustive_search() -> None:
    with pytest.raises(StrategyLawError) as caught:
        check_strategy(Rotor(), CHAIN, fastest=lambda _model, _budget: 0.5)
    assert caught.value.law in (Law.BOUND, Law.OPTIMAL)


def test_a_strategy_that_plans_nothing_is_told() -> None:
    class Nothing(Changed):
        def why_not(self, cost_model: CostModel) -> str | None:
            return "I plan nothing"

    with pytest.raises(StrategyLawError, match="plans none"):
        check_strategy(Nothing(unchanged))


def test_no_test_framework_is_needed() -> None:
    code = "import sys, memopt.testing; sys.exit('pytest' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_example_in_the_docs_keeps_the_laws(tmp_path: Path) -> None:
    page = Path(__file__).parent.parent / "docs" / "adding.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "check_strategy(" in block]
    file = tmp_path / "example.py"
    file.write_text(example, encoding="utf-8")
    subprocess.run([sys.executable, str(file)], check=True, timeout=120)
