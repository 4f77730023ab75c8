"""A plan as a few lines of text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from memopt.models.budget import format_bytes
from memopt.models.program import Compute, SwapOut

if TYPE_CHECKING:
    from memopt.plan import Plan


def _seconds(time_s: float) -> str:
    if time_s >= 1:
        return f"{time_s:.2f} s"
    return f"{1e3 * time_s:.2f} ms"


def plan_summary(plan: Plan) -> str:
    """The figures a user asks for first, in aligned lines."""
    budget = "no limit" if plan.budget is None else format_bytes(plan.budget)
    kind = "measured" if plan.baseline.measured else "replayed"
    rows = [
        ("strategy", f"{plan.strategy!r}, {plan.status.value}"),
        ("budget", budget),
        (
            "peak",
            f"{format_bytes(plan.peak_bytes)} predicted, of which "
            f"{format_bytes(plan.resident_bytes)} resident",
        ),
        ("baseline peak", f"{format_bytes(plan.baseline.peak_bytes)} ({kind})"),
        ("step time", f"{_seconds(plan.step_time_s)} predicted, {plan.overhead:+.1%} overhead"),
        ("baseline time", f"{_seconds(plan.baseline.step_time_s)} ({kind})"),
        ("bound", f"{_seconds(plan.lower_bound_s)}, gap {plan.gap:.2%}"),
    ]
    rows += _program_rows(plan)
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, *plan.notes])


def _program_rows(plan: Plan) -> list[tuple[str, str]]:
    if plan.program is None or plan.graph is None:
        return []
    runs = Counter(i.op for i in plan.program if isinstance(i, Compute))
    again = sum(n - 1 for n in runs.values())
    rows = [("operators", f"{len(plan.graph.operators)}, {again} recomputations")]
    moved = {i.tensor for i in plan.program if isinstance(i, SwapOut)}
    if moved:
        size = sum(plan.graph.tensors[t].size_bytes for t in moved)
        rows.append(("swapped", f"{len(moved)} tensors, {format_bytes(size)}"))
    return rows
