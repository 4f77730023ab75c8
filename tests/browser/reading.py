"""What a page shows, read back from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memopt.api.comparison import Comparison
from memopt.api.plan import Plan

Open = Callable[..., Any]


def shown(page: Any, name: str) -> float:
    """A tile's whole figure."""
    return float(page.get_attribute(f"[data-figure='{name}']", "data-value"))


def opened(page: Any, comparison: Comparison) -> Plan:
    """The plan that the page is about, by its figures."""
    figures = shown(page, "peak memory"), shown(page, "step time")
    found = [
        cell.plan
        for cell in comparison.cells
        if cell.plan is not None and (cell.plan.peak_bytes, cell.plan.step_time_s) == figures
    ]
    assert found
    return found[0]


def step_in(page: Any) -> dict[str, Any]:
    """The step that the page draws, as its script worked it out."""
    found: dict[str, Any] = page.evaluate(
        """() => {
          const { data, explorer } = memoptReport, step = explorer.now;
          const plots = explorer.plots;
          return {
            codes: [...step.codes], start: [...step.start], total: [...step.total],
            peak: step.program.peak, layers: explorer.layers().map((x) => [x.name, [...x.bytes]]),
            drawn: [...plots.model("stack").data.get?.("l10") ?? plots.model("stack").data.l10],
          };
        }"""
    )
    return found
