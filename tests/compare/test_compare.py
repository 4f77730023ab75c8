"""compare: one table, one profile, the same figures as plan."""

from __future__ import annotations

import builtins
import itertools
import sys
from random import Random
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot

import memopt
from memopt import Chain, Comparison, Device, Status
from memopt.models.generate import random_chain
from memopt.report.comparison_plot import bounds
from memopt.strategies import Rotor
from tests.plan.tiny import make, profiled, step_digest

LINK = Device(to_host_bytes_per_s=2.0)


@pytest.fixture(scope="module")
def chain() -> Chain:
    return random_chain(Random(5), 9)


@pytest.fixture(scope="module")
def table(chain: Chain) -> Comparison:
    return memopt.compare(chain, progress=False)


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
        figures = (plan.peak_bytes, plan.step_time_s, plan.overhead, plan.lower_bound_s, plan.gap)
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
    linked = memopt.compare(chain, budgets=[0.7], device=LINK, progress=False)
    assert {"store-all", "rotor", "greedy", "vdnn"} <= set(linked.strategies)


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
    made = memopt.compare(chain, budgets=[1.0], strategies=["olla", "rotor"])
    assert made.cells[0].status is Status.UNKNOWN
    assert "plans a graph" in made.cells[0].note
    assert "plans a graph" in str(made)


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
    assert table.best(1) is None
    assert table.best() == table.best(1.0)


def test_interrupted_it_returns_what_is_done(chain: Chain) -> None:
    cells = itertools.count()

    def impatient(fraction: float, what: str) -> None:
        if what.endswith(": planning") and next(cells) == 3:
            raise KeyboardInterrupt

    made = memopt.compare(
        chain, budgets=[0.8, 1.0], strategies=["rotor", "store-all"], progress=impatient
    )
    assert not made.complete
    assert len(made.cells) == 3
    assert "interrupted" in str(made)
    assert "interrupted" in made.to_markdown()


def test_tables(table: Comparison) -> None:
    lines = str(table).splitlines()
    assert len(lines) == 2 + len(table.cells)
    assert "needs" in str(table)
    markdown = [line for line in table.to_markdown().splitlines() if line.startswith("|")]
    assert len(markdown) == 2 + len(table.cells)
    assert len({line.count("|") for line in markdown}) == 1
    html = table._repr_html_()
    assert html.count("<tr>") == 1 + len(table.cells)
    assert "font-weight:bold" in html
    frame = table.to_dataframe()
    assert list(frame["strategy"]) == [cell.strategy for cell in table.cells]
    assert str(frame["peak_bytes"].dtype) == "Int64"
    assert "plan" not in frame


@pytest.mark.parametrize(
    ("package", "method"), [("pandas", "to_dataframe"), ("matplotlib", "plot")]
)
def test_a_missing_package_is_named(
    table: Comparison, monkeypatch: pytest.MonkeyPatch, package: str, method: str
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"memopt\[plots\]"):
        getattr(table, method)()


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_plot(table: Comparison, style: str) -> None:
    with matplotlib.style.context(style):
        _, ax = pyplot.subplots()
        assert table.plot(ax=ax) is ax
        names = ax.get_legend_handles_labels()[1]
        planned = {cell.strategy for cell in table.cells if cell.plan is not None}
        assert planned <= set(names)
        assert any(name.startswith("without memopt") for name in names)
        assert "faster than the bound" in names
        assert ax.get_xlabel().startswith("peak memory")
        assert ax.get_ylabel().endswith(")")
        pyplot.close(ax.figure)  # type: ignore[arg-type]  # a subfigure has none
    levels = dict(bounds(table))
    for cell in table.cells:
        if cell.step_time_s is not None and cell.budget_bytes is not None:
            assert levels[cell.budget_bytes] <= cell.step_time_s


def test_run_measures_and_leaves_the_model_alone() -> None:
    before = step_digest("convolutions", make("convolutions")[0])
    made = make("convolutions")
    model, _, loss = made
    one = profiled(made)
    table = memopt.compare(
        one, budgets=["min", None], strategies=["store-all", "rotor"], run=True, loss_fn=loss
    )
    assert table.complete
    assert table.measured_baseline is not None
    for cell in table.cells:
        if cell.plan is None:
            assert cell.measured_peak_bytes is None
            continue
        assert cell.measured_peak_bytes is not None
        assert cell.measured_peak_bytes <= (cell.peak_bytes or 0)
        assert (cell.measured_time_s or 0) > 0
    store_all, rotor = table.cells[1], table.cells[2]
    assert (rotor.measured_peak_bytes or 0) < (store_all.measured_peak_bytes or 0)
    best = table.best(table.budgets[0])
    assert best is not None
    assert best.strategy == "rotor"
    ax = table.plot()
    assert "measured" in ax.get_xlabel()
    pyplot.close(ax.figure)  # type: ignore[arg-type]  # a subfigure has none
    assert "measured peak" in str(table)
    assert step_digest("convolutions", model) == before
