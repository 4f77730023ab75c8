"""A plan in a notebook: its summary as tables. Everything is escaped; there is no script."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from memopt.models.chain_html import html_table
from memopt.report.style import BLUE, GREY, VERMILION
from memopt.report.summary import sections

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


def plan_html(plan: PlanRecord) -> str:
    """Write the summary as HTML, with bars for the plan's peak, the budget and the baseline's."""
    first, *others = sections(plan)
    parts = ["<div>", f"<b>memopt plan</b> ({escape(plan.strategy.name)})", _bars(plan)]
    parts.append(html_table(first.rows))
    parts += [
        f"<details><summary>{escape(section.title)}</summary>{html_table(section.rows)}</details>"
        for section in others
    ]
    parts += [f"<p>{escape(note)}</p>" for note in plan.notes]
    return "\n".join([*parts, "</div>"])


def _bars(plan: PlanRecord) -> str:
    largest = max(plan.peak_bytes, plan.baseline.peak_bytes, plan.budget or 0, 1)
    bars = [("peak", plan.peak_bytes, BLUE), ("baseline", plan.baseline.peak_bytes, GREY)]
    if plan.budget is not None:
        bars.insert(1, ("budget", plan.budget, VERMILION))
    rows = [
        f'<tr><td style="text-align:left">{name}</td><td style="text-align:left">'
        f'<div style="background:{color};height:0.7em;width:{16 * size / largest:.2f}em"></div>'
        "</td></tr>"
        for name, size, color in bars
    ]
    return f"<table>{''.join(rows)}</table>"
