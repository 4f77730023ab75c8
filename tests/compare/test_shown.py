"""Comparisons as tables and pictures, and their measured figures."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot

import memopt
from memopt import Comparison
from memopt.report.comparison_plot import bounds
from tests.plan.tiny import make, profiled, step_digest


def test_tables(table: Comparison) -> None:
    lines = str(table).splitlines()
    assert len(lines) == 2 + len(table.cells) + len(table.left_out)
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
    with pytest.raises(ImportError, match=f"pip install {package}"):
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
